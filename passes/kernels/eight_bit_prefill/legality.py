"""What a prefill schedule for activations of 8 bits must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan, bytes_plan
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.legality import Extra, check_shared, check_split, extra_registers
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.requirements import can_use_wgmma, check_compute
from lowbit.passes.target import Target

_Plan = BytesPlan[EightBitPrefillSchedule]
OTHERS = "take an EightBitSchedule"
_MOST_REGISTERS = 242  # of a thread, for all that `spills` adds up

_OF_K: tuple[Extra[_Plan], ...] = (
    (7, "a block's part of the k of a tile", lambda p: p.schedule.split_k > 1),
    (16, "the same of a slice", lambda p: p.schedule.last_split_k > 1 and not _has_short_groups(p)),
    (3, "the same, with groups in panels", lambda p: p.schedule.last_split_k > 1 and _has_short_groups(p)),
)
_OF_PARTS: tuple[Extra[_Plan], ...] = (
    (26, "parts of tiles, in integers that become f32", lambda p: p.schedule.streams and _becomes_f32(p)),
    (36, "the same, of all tokens at once", lambda p: p.schedule.streams and _becomes_f32(p) and p.schedule.parts == 1),
)
_OF_CODES: tuple[Extra[_Plan], ...] = (
    *_OF_K,
    *_OF_PARTS,
    (12, "which tiles of slots are whose", lambda p: p.spec.experts > 1),
    (32, "scales and addresses that are needed later", lambda p: p.schedule.banks > 1),
    (1, "a block by itself", lambda p: p.schedule.cluster == 1),
    (6, "tiles that are cut, of such a block", lambda p: p.schedule.cluster == 1 and p.schedule.last_tokens > 0),
    (8, "zeros, of such a block", lambda p: p.schedule.cluster == 1 and p.spec.zeros == "int"),
    (8, "integers that become f32, where blocks share x", lambda p: p.schedule.cluster > 1 and _becomes_f32(p)),
    (3, "the other block, where they share x", lambda p: p.schedule.cluster > 1 and not _becomes_f32(p)),
    (25, "codes of 8 bits in integers that become f32", lambda p: _becomes_f32(p) and p.spec.dtype.bits == 8),
    (2, "long floats in groups", lambda p: p.base.scaling.groups > 0 and _has_long_floats(p)),
    (9, "scales of e4m3, many at a time", lambda p: p.spec.scale == "e4m3" and p.held.groups >= 16),
)
_OF_FOLDED: tuple[Extra[_Plan], ...] = (
    *_OF_K,
    (24, "weights in f16 that become bytes", lambda p: True),
    (3, "the other block, where they share x", lambda p: p.schedule.cluster > 1),
    (12, "long floats in groups of 16", lambda p: p.spec.packing.padded_group == 16 and _has_long_floats(p)),
    (16, "float zeros and offsets", lambda p: p.spec.zeros in ("float", "offset")),
    (24, "scales that are codes", lambda p: p.spec.bilevel is not None),
)


def check_schedule(spec: MatmulSpec, s: EightBitPrefillSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    check_compute(spec, target)
    plan = bytes_plan(spec, s, WGMMA)
    if why := _misfit(plan, target):
        raise SpecError(f"schedule: {why}")
    check_sums(plan)
    check_weight(plan, OTHERS)
    check_split(plan.base, target)
    check_shared(plan.base, target)


def _misfit(plan: _Plan, target: Target) -> str:
    """Returns what of a target or a schedule does not fit and what to do about it, or "" if all does."""
    spec, s = plan.spec, plan.schedule
    if not can_use_wgmma(spec, target):
        return f"eight_bit_prefill needs sm_90a and x in whole 16-byte pieces, {target} has k={spec.k}; {OTHERS}"
    if max(s.parts, s.split_k) % min(s.parts, s.split_k):
        return f"parts={s.parts} and split_k={s.split_k} must divide one another"
    return ""


def check_sums(plan: BytesPlan[EightBitPrefillSchedule]) -> None:
    """Raises SpecError for registers for products, where these are never apart from sums."""
    spec, s = plan.spec, plan.schedule
    if plan.products.keeps_sums and (s.parts, s.banks) != (1, 1):
        sums = f"{spec.weight} in {spec.compute} has sums that the tensor core adds up"
        raise SpecError(f"schedule: {sums}: it needs parts=1 and banks=1")


def check_weight(plan: BytesPlan[PrefillSchedule], others: str) -> None:
    """Raises SpecError where groups and rounds do not fit one another, or codes less their zeros are no bytes.

    others: what to take instead
    """
    spec = plan.spec
    if not plan.base.round.divides_groups:
        groups = f"groups of {spec.group_size} and rounds of {plan.base.round.step} columns"
        raise SpecError(f"schedule: {groups} must divide one another; {others}")
    if spec.zeros == "int" and spec.dtype.bits == 8 and not spec.folds and plan.subtracts:
        differences = f"{spec.weight} with zeros={spec.zeros!r} has differences of codes and zeros"
        raise SpecError(f"schedule: {differences} that are no bytes; {others}")


def spills(spec: MatmulSpec, s: EightBitPrefillSchedule, more: int = 0) -> bool:
    """Whether a thread is likely to need more registers than there are: for sums and for products, for two panels'
    fragments, for what is loaded, for what kernels were seen to need besides, and so many more."""
    plan = bytes_plan(spec, s, WGMMA)
    needed = _folded_registers(plan) if spec.folds else _code_registers(plan)
    return s.tokens // 2 + s.panel_k // 4 + needed + more > _MOST_REGISTERS


def _code_registers(plan: _Plan) -> int:
    """Registers for products, and for codes, scales and zeros, which are loaded."""
    products = 0 if plan.products.keeps_sums else plan.schedule.banks * plan.schedule.part_tokens // 2
    converted = products // 16 if _becomes_f32(plan) else 0
    loaded = _held_codes(plan) + 2 * plan.held.groups * ((plan.base.scaling.groups > 0) + (plan.spec.zeros == "int"))
    return products + products // 32 + converted + loaded + extra_registers(_OF_CODES, plan)


def _held_codes(plan: _Plan) -> int:
    """Registers for codes while products are under way: none for those that wait in shared memory, if decoding takes no
    others instead, as that of integers and short floats does, and blocks that split k do."""
    leaves = plan.held.code_stages > 0 and _has_long_floats(plan) and plan.schedule.split_k == 1
    return 0 if leaves else plan.held.code_registers


def _folded_registers(plan: _Plan) -> int:
    """Registers for codes and for scales, zeros and offsets of weights that are scaled, which are loaded."""
    tensors = plan.base.tensors.every.values()
    numbers = sum(plan.held.of(some.count) * (2 if some.lanes > 1 else 1) for some in tensors)  # of two rows, or all
    return plan.held.code_registers + numbers + extra_registers(_OF_FOLDED, plan)


def _becomes_f32(plan: _Plan) -> bool:
    """Whether products are integers that are converted, since groups have scales."""
    return plan.spec.compute == "i8" and plan.base.scaling.groups > 0


def _has_short_groups(plan: _Plan) -> bool:
    """Whether no group is longer than a panel, and products are scaled by groups."""
    group = plan.spec.packing.padded_group
    return group is not None and group <= plan.schedule.panel_k and not plan.spec.folds


def _has_long_floats(plan: _Plan) -> bool:
    return plan.spec.dtype.kind == "float" and plan.spec.dtype.bits >= 6
