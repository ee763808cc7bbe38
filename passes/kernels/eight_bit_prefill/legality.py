"""What a prefill schedule for activations of 8 bits must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_prefill.plan import EightBitPlan, EightBitPrefillPlan
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.prefill.factor import factors_of
from lowbit.passes.kernels.prefill.legality import check_shared, check_split, shared_bytes
from lowbit.passes.kernels.requirements import can_use_wgmma, check_compute
from lowbit.passes.target import Target

OTHERS = "take an EightBitSchedule"
_MOST_REGISTERS = 242  # of a thread, beside those for addresses and on the way to fragments
_SECOND_BANK = 32  # of these, for scales and addresses that are needed later
_MORE = 8  # for zeros, or integers that become f32,
_CLUSTER = 3  # for the other block of a cluster, with which x is shared
_SPLIT = 7  # or k is split,
_CUT = 6  # or tiles are cut,
_LAST_SPLIT, _IN_GROUPS = 16, 3  # or that of slices, fewer where no group is longer than a panel,
_FOLDING = 24  # of these, for weights in f16 that become bytes,
_ADDED = 16  # for float zeros and offsets,
_CODED = 24  # for scales that are codes,
_WIDE = 25  # for codes of 8 bits with integers that become f32,
_LONG_FLOATS = 2  # for floats of 6 bits and more in groups,
_SHORT_GROUPS = 12  # for these in groups of 16, if they are folded,
_BYTES, _MANY_GROUPS = 9, 16  # and for scales of e4m3 of so many groups at a time, and more


def check_schedule(spec: MatmulSpec, s: EightBitPrefillSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    check_compute(spec, target)
    plan = EightBitPrefillPlan(spec, s)
    if why := _misfit(plan, target):
        raise SpecError(f"schedule: {why}")
    check_weight(plan)
    check_split(plan)
    check_shared(plan, shared_bytes(plan), target)


def _misfit(plan: EightBitPrefillPlan, target: Target) -> str:
    """Returns what of a target or a schedule does not fit and what to do about it, or "" if all does."""
    spec, s = plan.spec, plan.schedule
    if not can_use_wgmma(spec, target):
        return f"eight_bit_prefill needs sm_90a and x in whole 16-byte pieces, {target} has k={spec.k}; {OTHERS}"
    if plan.keeps_sums and (s.parts, s.banks) != (1, 1):
        return f"{spec} has sums that the tensor core adds up: it needs parts=1 and banks=1"
    if max(s.parts, s.split_k) % min(s.parts, s.split_k):
        return f"parts={s.parts} and split_k={s.split_k} must divide one another"
    return ""


def check_weight(plan: EightBitPlan) -> None:
    """Raises SpecError where groups and rounds do not fit one another, or codes less their zeros are no bytes."""
    spec = plan.spec
    if not plan.divides_groups:
        groups = f"groups of {spec.group_size} and rounds of {plan.step} columns"
        raise SpecError(f"schedule: {groups} must divide one another; {OTHERS}")
    if spec.zeros == "int" and spec.dtype.bits == 8 and not spec.folds:
        raise SpecError(f"schedule: {spec} has differences of codes and zeros that are no bytes; {OTHERS}")


def spills(spec: MatmulSpec, s: EightBitPrefillSchedule) -> bool:
    """Whether a thread is likely to need more registers than there are: for sums and for products, for two panels'
    fragments, and for what is loaded. It follows what the assembler was seen to do."""
    plan = EightBitPrefillPlan(spec, s)
    if spec.folds:
        return s.tokens // 2 + s.panel_k // 4 + _folded_registers(plan) > _MOST_REGISTERS
    integers, zeros = spec.compute == "i8" and plan.groups > 0, spec.zeros == "int"
    products = 0 if plan.keeps_sums else s.banks * plan.part_tokens // 2
    loaded = _code_registers(plan) + 2 * plan.held_groups * ((plan.groups > 0) + zeros)
    more = _SECOND_BANK * (s.banks > 1) + products // 32
    more += _MORE * zeros + 1 if s.cluster == 1 else _MORE * integers or _CLUSTER
    more += _split_registers(plan) + _CUT * (s.cluster == 1 and s.last_tokens > 0)
    more += integers * (products // 16 + _WIDE * (spec.dtype.bits == 8))
    more += _LONG_FLOATS * (plan.groups > 0 and _is_long_float(spec))
    more += _BYTES * (spec.scale == "e4m3" and plan.held_groups >= _MANY_GROUPS)
    return s.tokens // 2 + products + s.panel_k // 4 + loaded + more > _MOST_REGISTERS


def _split_registers(plan: EightBitPrefillPlan) -> int:
    """Registers for the part of k that a block has of a tile or a slice."""
    s, group = plan.schedule, plan.spec.packing.padded_group
    last = _IN_GROUPS if group and group <= s.panel_k and not plan.spec.folds else _LAST_SPLIT
    return _SPLIT * (s.split_k > 1) + last * (s.last_split_k > 1)


def _code_registers(plan: EightBitPrefillPlan) -> int:
    """Registers for codes while products are under way: none for those that wait in shared memory, if decoding takes no
    others instead, as that of integers and short floats does, and blocks that split k do."""
    leaves = plan.code_stages > 0 and _is_long_float(plan.spec) and plan.schedule.split_k == 1
    return 0 if leaves else plan.held_pieces * plan.piece_registers


def _folded_registers(plan: EightBitPrefillPlan) -> int:
    """Registers for what is loaded of weights that are scaled, and for what becomes of it on the way to bytes."""
    factors = factors_of(plan).values()
    numbers = sum(plan.held(factor.count) * (2 if factor.lanes > 1 else 1) for factor in factors)  # of two rows, or all
    loaded = plan.held_pieces * plan.piece_registers + numbers
    more = _FOLDING + _CLUSTER * (plan.schedule.cluster > 1) + _split_registers(plan)
    more += _SHORT_GROUPS * (_is_long_float(plan.spec) and plan.spec.packing.padded_group == 16)
    return loaded + more + _ADDED * (plan.spec.zeros in ("float", "offset")) + _CODED * (plan.spec.bilevel is not None)


def _is_long_float(spec: MatmulSpec) -> bool:
    return spec.dtype.kind == "float" and spec.dtype.bits >= 6
