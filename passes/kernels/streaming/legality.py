"""What a schedule must obey for a spec on a target, and what it takes of a multiprocessor, without MLIR."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.byte_codes import SUM_COLUMNS
from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.integer_limbs import LIMBS, PIECE, ROW, takes
from lowbit.dialect.formats.outliers import LINE, SPARE
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.requirements import can_use_wgmma, scale_table
from lowbit.passes.kernels.streaming.plan import (
    MOST_SCALED,
    SPREAD,
    KernelPlan,
    always_uses_raw_codes,
    can_use_raw_codes,
)
from lowbit.passes.launch import COUNTERS
from lowbit.passes.target import Target

MOST_PRELOADED = 128  # registers of weight in a thread
MOST_IN_CLUSTER = 8  # blocks: so many may split k even where some of them have no step


def shared_bytes(spec: MatmulSpec, s: Schedule) -> int:
    """Shared memory of the decode kernel, as `lower-tiles` will lay it out (buffers are multiples of 128 bytes)."""
    return _shared_bytes(KernelPlan(spec, s))


def _shared_bytes(plan: KernelPlan) -> int:
    spec, s = plan.spec, plan.schedule
    slots = plan.rounds if s.preload_weights else min(s.num_stages, plan.rounds)
    scratch = _padded(4 * math.prod(plan.outlier_scratch[1])) if spec.outliers else 0
    lines = s.warps_k * plan.row_blocks * plan.staged_lines * LINE * 4 if spec.outliers else 0
    if plan.spreads_outliers:
        lines, scratch = 0 if plan.sums_in_stage else scratch, 0
    if s.outliers_by_step:
        lines, scratch = _padded(s.warps_k * s.tokens * (s.step_k + SPARE) * spec.x.bytes), 0
        lines += _padded(slots * s.warps_k * plan.row_blocks * plan.step_lines * LINE * 4)
    signals = _padded(16 * slots * s.warps_k) if s.refill == "per_warp" else 0
    loop = lines + signals + (0 if s.preload_weights else _padded(slots * _codes_bytes(plan)))
    loop = -(-loop // 1024) * 1024 if s.wgmma else loop  # x is swizzled
    loop += sum(_padded(slots * size) for size in (*_x_bytes(plan), *_factors_bytes(plan)))
    factor = spec.x if plan.rounds_scales else ELEMENTS["f32"]
    loop += _padded(len(plan.step_factors) * s.warps_k * _rows_of_groups(plan) * factor.bytes)
    if plan.shares_blocks:
        numbers = s.warps_k * plan.row_blocks * plan.blocks * 4
        loop += _padded(numbers) * sum(slot.index == "block" for slot in plan.spec.tensors)
    outliers = lines + signals + scratch
    sums = _padded(s.warps_k * s.tokens * (s.rows + 4) * 4) if s.warps_k > 1 or s.cluster > 1 else 0
    flag = 128 if s.split_k > s.cluster else 0  # of the last block to arrive
    return max(max(loop, outliers) + _bytes_there_once(plan), signals + sums + flag)


def _padded(size: int) -> int:
    return -(-size // 128) * 128


def _codes_bytes(plan: KernelPlan) -> int:
    """Codes of a round."""
    s, packing = plan.schedule, plan.spec.packing
    return s.warps_k * plan.row_blocks * (s.step_k // packing.chunk * packing.units * 512)


def _x_bytes(plan: KernelPlan) -> Iterator[int]:
    """x of a round, and the sums of x."""
    spec, s = plan.spec, plan.schedule
    row = s.step_k if s.wgmma else s.step_k + spec.x.per_vector
    yield s.warps_k * s.tokens * row * spec.x.bytes
    if plan.reads_sums:
        yield s.warps_k * s.columns * (s.step_k // SUM_COLUMNS) * ELEMENTS["f32"].bytes


def _factors_bytes(plan: KernelPlan) -> Iterator[int]:
    """Each tensor of scales, zeros or offsets of a round."""
    if not plan.groups:
        return
    for slot in plan.spec.tensors:
        if slot.index == "group":
            yield plan.schedule.warps_k * _rows_of_groups(plan) * ELEMENTS[slot.storage].bytes
        elif slot.index == "block":
            numbers = plan.row_blocks * plan.blocks * slot.shape[2]
            yield plan.schedule.warps_k * numbers * ELEMENTS[slot.storage].bytes


def _rows_of_groups(plan: KernelPlan) -> int:
    """Numbers that a warp has of a round, one for every row and group."""
    return plan.row_blocks * max(1, plan.groups) * 16


def _bytes_there_once(plan: KernelPlan) -> int:
    """Limbs of x, and the tables of a format and of scales that have one."""
    spec, s = plan.spec, plan.schedule
    limbs = s.warps_k * (s.step_k // PIECE) * LIMBS * 4 * ROW * 4 if s.integer_mma else 0
    table = spec.dtype.kind == "table"
    codes = DecodeTable(spec.dtype, compute_element(spec.dtype, spec.act)).bytes if table else 0
    return limbs + codes + (scales.bytes if (scales := scale_table(spec)) else 0)


def shared_room(spec: MatmulSpec, s: Schedule, target: Target) -> int:
    """Blocks for which a multiprocessor has shared memory; the system takes 1 KB for each."""
    return target.shared_per_sm // (shared_bytes(spec, s) + 1024)


def check_schedule(spec: MatmulSpec, s: Schedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    plan, chunk, group = KernelPlan(spec, s), spec.packing.chunk, spec.packing.padded_group
    if s.step_k % chunk:
        raise SpecError(f"schedule: step_k={s.step_k} must be a multiple of {chunk} for {spec.weight}; try {chunk}")
    if not group_fits(spec, s.step_k):
        raise SpecError(f"schedule: step_k={s.step_k} and groups of {group} must divide one another; try {chunk}")
    if s.split_k > max(plan.steps, MOST_IN_CLUSTER):
        rule = f"must be at most {MOST_IN_CLUSTER}, or the {plan.steps} steps of step_k={s.step_k} that k={spec.k} has"
        raise SpecError(f"schedule: split_k={s.split_k} {rule}")
    if s.wgmma:
        _check_wgmma(plan, target)
    if s.integer_mma:
        _check_integer_mma(spec, s)
    if s.raw_codes and not can_use_raw_codes(spec):
        raise SpecError(
            f"schedule: raw_codes=True is for integers in f16; {spec.weight} in {spec.act} needs raw_codes=False"
        )
    if s.raw_codes and always_uses_raw_codes(spec, s):
        raise SpecError(
            f"schedule: {spec.weight} with zeros={spec.zeros!r} is multiplied as it is stored anyway; "
            "take raw_codes=False"
        )
    if s.preload_weights:
        _check_preloaded(plan)
    if s.spread_k and not can_spread(spec):
        raise SpecError(f"schedule: spread_k=True is for groups of 16, 32 and 64; {_weight(spec)} needs spread_k=False")
    if s.overlap_groups and (not plan.groups or plan.rounds_scales):
        raise SpecError(
            "schedule: overlap_groups=True is for sums that are scaled group by group; "
            f"{_weight(spec)} needs overlap_groups=False"
        )
    if s.outliers_by_step and not spec.outliers:
        raise SpecError(f"schedule: outliers_by_step=True is for weights with outliers; {_weight(spec)} needs False")
    if s.cluster > 1 and not target.has_clusters:
        raise SpecError(f"schedule: cluster={s.cluster} needs clusters, which {target} does not have; take cluster=1")
    if spec.is_gated and s.rows % (ROWS * s.cluster):
        raise SpecError(
            f"schedule: each block of a cluster adds up whole row blocks for {spec.epilogue}, but {s.rows} rows of "
            f"cluster={s.cluster} are fewer than {ROWS} each; take more row_blocks or warps_n, or a smaller cluster"
        )
    if plan.workspace_bytes and plan.tiles > COUNTERS:
        raise SpecError(
            f"schedule: split_k={s.split_k} in device memory counts blocks of up to {COUNTERS} tiles, n={spec.n} has "
            f"{plan.tiles}; take more row_blocks or split_k=1"
        )
    needed = _shared_bytes(plan)
    if needed > target.max_shared_per_block:
        raise SpecError(
            f"schedule: {s} needs {needed} bytes of shared memory, {target} allows {target.max_shared_per_block}; "
            "take fewer num_stages or warps_k, or a smaller step_k"
        )


def _weight(spec: MatmulSpec) -> str:
    """Names a weight in messages. Their spec may be one that was derived from the user's."""
    groups = "a scale per row" if spec.group_size is None else f"groups of {spec.group_size}"
    return f"{spec.weight} with {groups}"


def _check_wgmma(plan: KernelPlan, target: Target) -> None:
    spec, s = plan.spec, plan.schedule
    if not target.has_wgmma:
        raise SpecError(f"schedule: wgmma needs sm_90a, the target is {target}; take wgmma=False")
    if s.step_k % spec.x.per_panel:
        raise SpecError(f"schedule: step_k={s.step_k} must be a multiple of {spec.x.per_panel} for wgmma")
    if s.tokens > MOST_SCALED and not plan.sums_once:
        raise SpecError(
            f"schedule: tokens={s.tokens} leaves registers for one set of sums, and {_weight(spec)} needs two; "
            f"take tokens of at most {MOST_SCALED}"
        )
    if not can_use_wgmma(spec, target):
        raise SpecError(
            f"schedule: wgmma multiplies {spec.act} by {spec.act} in whole 16-byte pieces of x; {spec.weight} with "
            f"k={spec.k} and groups of {spec.group_size} needs wgmma=False"
        )


def has_integer_mma(spec: MatmulSpec) -> bool:
    """Whether one token can be multiplied in integers: codes must be some, and groups whole pieces of 128 columns."""
    group = spec.packing.padded_group
    return takes(spec.dtype) and (group is None or group % PIECE == 0) and not spec.outliers


def _check_integer_mma(spec: MatmulSpec, s: Schedule) -> None:
    if s.step_k % PIECE:
        raise SpecError(f"schedule: step_k={s.step_k} must be a multiple of {PIECE} for decode_integer")
    if not has_integer_mma(spec):
        raise SpecError(
            f"schedule: decode_integer multiplies integers of 1, 2 or 4 bits in groups of multiples of {PIECE} "
            f"columns, without outliers; {spec.weight} in groups of {spec.group_size} needs a Schedule of the decode "
            "family"
        )


def _check_preloaded(plan: KernelPlan) -> None:
    spec, s = plan.spec, plan.schedule
    if not plan.covers_exactly or spec.packing.padded_k % s.step_k or not plan.async_x:
        raise SpecError(
            f"schedule: preload_weights=True needs steps of step_k={s.step_k}, warps_k={s.warps_k} and "
            f"split_k={s.split_k} to come out even for k={spec.packing.padded_k}, and x in 16-byte pieces; "
            "take preload_weights=False"
        )
    if plan.preloaded_words > MOST_PRELOADED:
        raise SpecError(
            f"schedule: preload_weights=True has at most {MOST_PRELOADED} registers of weight in a thread, {s} needs "
            f"{plan.preloaded_words}; take more warps or splits, or preload_weights=False"
        )


def can_spread(spec: MatmulSpec) -> bool:
    """Whether one token can be spread over the columns of a product, so that a lane has groups of its own."""
    group = spec.packing.padded_group
    return group is not None and SPREAD // 2 % group == 0 and spec.compute is None


def group_fits(spec: MatmulSpec, step: int) -> bool:
    """Whether steps and groups, and blocks of groups where there are some, divide one another."""
    group = spec.packing.padded_group
    lengths = [length for length in (group, spec.bilevel and spec.bilevel.columns(spec.packing)) if length]
    return all(step % length == 0 or length % step == 0 for length in lengths)


def enough_blocks(blocks: int, target: Target) -> int:
    """The `max_blocks` with which so many blocks run at a time and no more would, or 0 where that takes many: a
    multiprocessor that finishes early would take more than its share of the next kernel's."""
    each = -(-blocks // target.multiprocessors)
    return each if each <= 2 else 0
