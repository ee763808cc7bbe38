"""What a prefill schedule must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.prefill.factor import factors_of, staged_factors
from lowbit.passes.kernels.prefill.plan import PrefillPlan, TileShape
from lowbit.passes.kernels.prefill.schedule import ROWS_OF_TILE, WARPS, PrefillSchedule
from lowbit.passes.kernels.requirements import fits_async_x, scale_table
from lowbit.passes.lowering.recipes import compute_element
from lowbit.passes.target import Target

OTHERS = "take a Schedule of the decode family"
_MOST_REGISTERS = 240  # of a thread, beside those for addresses and on the way to fragments
_OUTLIERS = 16  # of these, for the place in the lines of outliers
_RANGE = 17  # and for floats of so many exponent bits that f16 cannot hold them,
_ADDED_IN_F32 = 21  # for outliers that are added in f32, where panels have more than 64 columns,
_CODED_ZEROS = 9  # for zeros that are codes,
_BYTES = 1  # for scales of e4m3,
_ZEROS_OF_BYTES = 25  # and more of them for float zeros,
_LONG_FLOATS = 17  # for float zeros beside floats of 8 bits, where panels have more than 64 columns,
_SEVEN_BITS = 9  # for floats of 7 bits,
_SEVEN_BITS_IN_F32 = 8  # and more of them for scales in f32,
_CUT_FLOATS = 21  # and for float zeros with scales of f32, where tiles are cut,
_ROWS_EARLY = 8  # for integer zeros beside scales of rows that multiply weights,
_CUT = 3  # and for tiles that are cut,
_LAST_SPLIT = 22  # more of them if k of slices is split
_SHORT_GROUP = 16  # columns of a group up to which tiles of clusters are not cut beside what is added to weights


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
    check_split(plan)
    check_shared(plan, needed, target)


def check_split(plan: PrefillPlan) -> None:
    """Raises SpecError where blocks cannot split k."""
    s = plan.schedule
    if plan.split is None:
        return
    field = "split_k" if s.split_k > 1 else "last_split_k"
    split = f"schedule: {field}={plan.split.split_k}"
    if s.split_k > 1 and s.cluster > 1:
        raise SpecError(f"{split} needs cluster=1, got {s.cluster}: blocks of a cluster share x or split k")
    if plan.spec.outliers:
        raise SpecError(f"{split} does not fit outliers, which are found from the first column on; take {field}=1")


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
    return stages + signals + out + exchange + weight_bytes(plan)


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
    """Whether a thread is likely to need more registers than there are: for sums, for two panels' fragments, and for
    what is loaded of a round. It follows what the assembler was seen to do."""
    plan, short = PrefillPlan(spec, s), spec.group_size is not None and spec.group_size <= _SHORT_GROUP
    if short and spec.zeros in ("float", "offset") and s.cluster > 1 and s.last_tokens:
        return True  # the assembler takes all registers there are, whatever is counted here
    counted = s.tokens // 2 + s.panel_k // 2 + loaded_registers(plan) + _registers_on_the_way(plan)
    return counted + _CUT * (s.last_tokens > 0) + _LAST_SPLIT * (s.last_split_k > 1) > _MOST_REGISTERS


def _registers_on_the_way(plan: PrefillPlan) -> int:
    """Registers for what becomes of codes and numbers on the way to fragments, where that takes more of them."""
    spec, float_zeros = plan.spec, plan.spec.zeros == "float"
    more = _RANGE * (compute_element(spec.dtype, "f16") != "f16")
    more += _BYTES * (spec.scale == "e4m3") + _ZEROS_OF_BYTES * (spec.scale == "e4m3" and float_zeros)
    wide, cut = plan.schedule.panel_k > 64, plan.schedule.last_tokens > 0
    more += _ADDED_IN_F32 * (wide and spec.outliers and plan.scales_in_f32)
    if spec.dtype.kind == "float" and spec.dtype.bits == 7:
        more += _SEVEN_BITS + _SEVEN_BITS_IN_F32 * plan.scales_in_f32
        more += _CUT_FLOATS * (float_zeros and cut and spec.scale == "f32")
    if spec.dtype.kind == "float" and spec.dtype.bits == 8:
        more += _LONG_FLOATS * (float_zeros and wide)
    more += _CODED_ZEROS * (spec.bilevel is not None and spec.bilevel.zeros)
    return more + _ROWS_EARLY * (plan.scales_rows_early and spec.zeros == "int")


def loaded_registers(plan: PrefillPlan) -> int:
    """Registers for what a thread loads of a round, of a row block."""
    factors, staged = factors_of(plan), staged_factors(plan)
    numbers = sum(factor.count for name, factor in factors.items() if name not in staged)
    return plan.step * plan.spec.packing.bits // 64 + numbers + _OUTLIERS * plan.spec.outliers
