"""What a prefill schedule must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.prefill.factor import factors_of, staged_factors
from lowbit.passes.kernels.prefill.plan import MOST_BLOCKS, PrefillPlan, TileShape
from lowbit.passes.kernels.prefill.schedule import ROWS_OF_TILE, WARPS, PrefillSchedule
from lowbit.passes.kernels.requirements import fits_async_x, scale_table
from lowbit.passes.target import Target

OTHERS = "take a Schedule of the decode family"
_MOST_REGISTERS = 240  # of a thread, beside those for addresses and on the way to fragments
_OUTLIERS = 16  # of these, for the place in the lines of outliers
_SHORT_GROUP = 16  # columns

P = TypeVar("P")
Extra = tuple[int, str, Callable[[P], bool]]
"""Registers that a thread needs besides those that follow from a plan; what for; and with which plans. The numbers are
fitted: with them, `spills` says of kernels what the assembler does."""

_EXTRAS: tuple[Extra[PrefillPlan], ...] = (
    (17, "codes that f16 cannot hold", lambda p: compute_element(p.spec.dtype, "f16") != "f16"),
    (1, "scales of e4m3", lambda p: p.spec.scale == "e4m3"),
    (25, "float zeros beside these", lambda p: p.spec.scale == "e4m3" and p.spec.zeros == "float"),
    (9, "zeros that are codes", lambda p: p.spec.bilevel is not None and p.spec.bilevel.zeros),
    (8, "integer zeros beside scales of rows", lambda p: p.scales_rows_early and p.spec.zeros == "int"),
    (21, "outliers that are added in f32", lambda p: _is_wide(p) and p.spec.outliers and p.scales_in_f32),
    (9, "floats of 7 bits", lambda p: _is_float_of(7, p)),
    (8, "the same, scaled in f32", lambda p: _is_float_of(7, p) and p.scales_in_f32),
    (21, "the same with float zeros, where tiles are cut", lambda p: _is_float_of(7, p) and _has_cut_zeros(p)),
    (17, "floats of 8 bits with float zeros", lambda p: _is_float_of(8, p) and _is_wide(p) and p.spec.zeros == "float"),
    (3, "tiles that are cut", lambda p: p.schedule.last_tokens > 0),
    (17, "offsets beside scales in f32, with eight panels", lambda p: p.scales_in_f32 and _has_deep_offsets(p)),
    (29, "parts of tiles, in wide panels", lambda p: p.schedule.streams and _is_wide(p)),
    (24, "the same, in narrow ones", lambda p: p.schedule.streams and not _is_wide(p)),
    (40, "the same with float zeros, of clusters", lambda p: p.schedule.streams and _shares_zeros(p)),
    (22, "slices whose k is split", lambda p: p.schedule.last_split_k > 1),
    (_MOST_REGISTERS, "all that there are: what is added to short groups", lambda p: _adds_in_short_groups(p)),
)


def check_schedule(spec: MatmulSpec, s: PrefillSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    plan = PrefillPlan(spec, s)
    if not target.has_wgmma:
        raise SpecError(f"schedule: prefill needs sm_90a, the target is {target}; {OTHERS}")
    check_plan(plan, shared_bytes(plan), target)


def check_plan(plan: PrefillPlan, needed: int, target: Target) -> None:
    """Raises SpecError where a kernel that needs so many bytes of shared memory does not fit a spec or a target."""
    if why := _misfit(plan.spec):
        raise SpecError(f"schedule: {why}; {OTHERS}")
    check_split(plan, target)
    check_shared(plan, needed, target)


def check_split(plan: PrefillPlan, target: Target) -> None:
    """Raises SpecError where blocks cannot split k."""
    s = plan.schedule
    unlike = {"split_k": 1, "last_split_k": 1, "stream_k": "off"}
    field = next((name for name, value in unlike.items() if getattr(s, name) != value), None)
    if field is None:
        return
    split, instead = f"schedule: {field}={getattr(s, field)!r}", f"take {field}={unlike[field]!r}"
    if s.split_k > 1 and s.cluster > 1:
        raise SpecError(f"{split} needs cluster=1, got {s.cluster}: blocks of a cluster share x or split k")
    if s.streams and target.most_multiprocessors > MOST_BLOCKS:
        raise SpecError(f"{split} has a workspace for {MOST_BLOCKS} blocks, {target} runs more; {instead}")
    if plan.spec.outliers:
        raise SpecError(f"{split} does not fit outliers, which are found from the first column on; {instead}")


def check_shared(plan: PrefillPlan, needed: int, target: Target) -> None:
    """Raises SpecError where a block of a target has fewer bytes of shared memory than needed."""
    if needed > target.max_shared_per_block:
        raise SpecError(
            f"schedule: {plan.schedule} needs {needed} bytes of shared memory, {target} allows "
            f"{target.max_shared_per_block}; take fewer tokens or num_stages, or a smaller panel_k"
        )


def _misfit(spec: MatmulSpec) -> str:
    """Returns what of a spec does not fit, or "" if all does."""
    if not fits_async_x(spec):
        return (
            f"prefill copies x in whole 16-byte pieces; {spec.weight} with k={spec.k} and groups of {spec.group_size} "
            "does not fit"
        )
    if spec.compute is not None:
        return "prefill takes no activations of 8 bits"
    return ""


def shared_bytes(plan: PrefillPlan) -> int:
    """Shared memory, as `lower-tiles` will lay it out."""
    s, spec = plan.schedule, plan.spec
    stages = s.num_stages * s.tokens * s.panel_k * spec.x.bytes
    signals = 2 * (-(-8 * s.num_stages // 128) * 128)
    out = WARPS * plan.out_tokens * plan.out_pitch * spec.y.bytes
    exchange = exchanged_bytes(plan.split) + 2 * 128 if plan.split else 0  # two kinds of signals
    last = 2 * 128 * s.streams  # whether the block is the last to write its sums, asked twice
    return stages + signals + out + exchange + last + weight_bytes(plan)


def exchanged_bytes(shape: TileShape) -> int:
    """Bytes of sums that a block gets from others that split k with it, and sends to them."""
    return 4 * ROWS_OF_TILE * shape.share * (shape.split_k - 1)


def weight_bytes(plan: PrefillPlan) -> int:
    """Shared memory of the weight side: the tables of a format and of scales that have one, outliers, and scales, zeros
    and offsets that do not go straight to registers."""
    s, spec = plan.schedule, plan.spec
    compute = compute_element(spec.dtype, spec.act)
    table = DecodeTable(spec.dtype, compute).bytes if spec.dtype.kind == "table" else 0
    outliers = ROWS_OF_TILE * s.panel_k * spec.x.bytes if spec.outliers else 0
    factors = factors_of(plan)
    staged = sum(2 * WARPS * factors[name].row_block_bytes for name in staged_factors(plan))
    of_panel = ROWS_OF_TILE * plan.panel_groups * len(plan.panel_factors) * spec.x.bytes
    scales = scale_table(spec)
    return table + (scales.bytes if scales else 0) + outliers + staged + of_panel


def spills(spec: MatmulSpec, s: PrefillSchedule) -> bool:
    """Whether a thread is likely to need more registers than there are: for sums, for two panels' fragments, for what
    is loaded of a round, and for what kernels were seen to need besides."""
    plan = PrefillPlan(spec, s)
    needed = s.tokens // 2 + s.panel_k // 2 + loaded_registers(plan) + extra_registers(_EXTRAS, plan)
    return needed > _MOST_REGISTERS


def extra_registers(extras: Iterable[Extra[P]], plan: P) -> int:
    """Registers of all rows of a table that hold for a plan."""
    return sum(registers for registers, _, holds in extras if holds(plan))


def _is_wide(plan: PrefillPlan) -> bool:
    """Whether panels have more than 64 columns."""
    return plan.schedule.panel_k > 64


def _is_float_of(bits: int, plan: PrefillPlan) -> bool:
    return plan.spec.dtype.kind == "float" and plan.spec.dtype.bits == bits


def _has_cut_zeros(plan: PrefillPlan) -> bool:
    """Whether there are float zeros beside scales of f32, in tiles that are cut."""
    return plan.spec.zeros == "float" and plan.spec.scale == "f32" and plan.schedule.last_tokens > 0


def _has_deep_offsets(plan: PrefillPlan) -> bool:
    """Whether there are offsets, and eight panels of x in shared memory."""
    return plan.spec.zeros == "offset" and plan.schedule.num_stages == 8


def _shares_zeros(plan: PrefillPlan) -> bool:
    """Whether blocks that share narrow panels of x have float zeros."""
    return plan.spec.zeros == "float" and plan.schedule.cluster > 1 and not _is_wide(plan)


def _adds_in_short_groups(plan: PrefillPlan) -> bool:
    """Whether numbers are added to the weights of short groups, in tiles of clusters that are cut."""
    group, s = plan.spec.group_size, plan.schedule
    adds = group is not None and group <= _SHORT_GROUP and plan.spec.zeros in ("float", "offset")
    return adds and s.cluster > 1 and s.last_tokens > 0


def loaded_registers(plan: PrefillPlan) -> int:
    """Registers for what a thread loads of a round, of a row block."""
    factors, staged = factors_of(plan), staged_factors(plan)
    numbers = sum(factor.count for name, factor in factors.items() if name not in staged)
    return plan.step * plan.spec.packing.bits // 64 + numbers + _OUTLIERS * plan.spec.outliers
