"""What a schedule must obey for a spec on a target, and what it takes of a multiprocessor, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.integer_limbs import DIGITS, PIECE, ROW, takes
from lowbit.dialect.spec import BYTES, MatmulSpec
from lowbit.passes.kernels.decode.plan import MOST_SCALED, Plan, has_bare, is_bare
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.lowering.recipes import compute_element
from lowbit.passes.target import Target

MOST_RESIDENT = 128  # registers of weight in a thread


def shared_bytes(spec: MatmulSpec, s: Schedule) -> int:
    """Shared memory of the skinny kernel, as `lower-tiles` will lay it out (buffers are multiples of 128 bytes)."""
    plan = Plan(spec, s)

    def padded(size: int) -> int:
        return -(-size // 128) * 128

    slots = plan.rounds if s.resident else min(s.stages, plan.rounds)
    signals = padded(16 * slots * s.warps_k) if s.late == 2 else 0
    units = s.step_k // spec.packing.chunk * spec.packing.units * 512
    rows = plan.row_blocks * max(1, plan.groups) * 16
    total = signals + (0 if s.resident else padded(slots * s.warps_k * plan.row_blocks * units))
    total = -(-total // 1024) * 1024 if s.wgmma else total  # x is swizzled
    row = s.step_k if s.wgmma else s.step_k + 8
    total += padded(slots * s.warps_k * s.tokens * row * 2)
    if plan.groups:
        for kind in filter(None, (spec.scale, spec.zero_kind)):
            total += padded(slots * s.warps_k * rows * BYTES[kind])
    if s.digits:
        total += s.warps_k * (s.step_k // PIECE) * DIGITS * 4 * ROW * 4
    if spec.dtype.kind == "table":
        total += DecodeTable(spec.dtype, compute_element(spec.dtype, spec.act)).bytes
    sums = padded(s.warps_k * s.tokens * (s.rows + 4) * 4) if s.warps_k > 1 or s.cluster > 1 else 0
    flag = 128 if s.splits > s.cluster else 0  # of the last block to arrive
    return max(total, signals + sums + flag)


def shared_room(spec: MatmulSpec, s: Schedule, target: Target) -> int:
    """Blocks for which a multiprocessor has shared memory; the system takes 1 KB for each."""
    return target.shared_per_sm // (shared_bytes(spec, s) + 1024)


def check_schedule(spec: MatmulSpec, s: Schedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    chunk, group = spec.packing.chunk, spec.packing.padded_group
    if s.step_k % chunk:
        raise SpecError(f"schedule: step_k={s.step_k} must be a multiple of {chunk} for {spec.weight}; try {chunk}")
    if not group_fits(spec, s.step_k):
        raise SpecError(f"schedule: step_k={s.step_k} and groups of {group} must divide one another; try {chunk}")
    if s.wgmma:
        _check_wgmma(spec, s, target)
    if s.digits:
        _check_digits(spec, s)
    if s.bare and not has_bare(spec):
        raise SpecError(f"schedule: bare=1 is for integers in f16; {spec.weight} in {spec.act} needs bare=0")
    if s.bare and is_bare(spec, s):
        raise SpecError(
            f"schedule: {spec.weight} with zeros={spec.zeros!r} is multiplied as it is stored anyway; take bare=0"
        )
    if s.resident:
        _check_resident(spec, s)
    if s.overlap and (not Plan(spec, s).groups or Plan(spec, s).rounds_scales):
        raise SpecError(f"schedule: overlap=1 is for sums that are scaled group by group; {spec} needs overlap=0")
    if s.cluster > 1 and not target.has_clusters:
        raise SpecError(f"schedule: cluster={s.cluster} needs sm_90, the target is {target}; take cluster=1")
    needed = shared_bytes(spec, s)
    if needed > target.max_shared_per_block:
        raise SpecError(
            f"schedule: {s} needs {needed} bytes of shared memory, {target} allows {target.max_shared_per_block}; "
            "take fewer stages or warps_k, or a smaller step_k"
        )


def is_allowed(spec: MatmulSpec, s: Schedule, target: Target) -> bool:
    """Whether a schedule fits a spec and a target."""
    try:
        check_schedule(spec, s, target)
    except SpecError:
        return False
    return True


def has_wgmma(spec: MatmulSpec, target: Target) -> bool:
    """Whether a matmul can use wgmma: it needs x in 16-byte pieces, and codes decoded to the type of x."""
    return target.has_wgmma and compute_element(spec.dtype, spec.act) == spec.act and Plan(spec, Schedule()).async_x


def _check_wgmma(spec: MatmulSpec, s: Schedule, target: Target) -> None:
    if not target.has_wgmma:
        raise SpecError(f"schedule: wgmma needs sm_90a, the target is {target}; take wgmma=0")
    if s.step_k % 64:
        raise SpecError(f"schedule: step_k={s.step_k} must be a multiple of 64 for wgmma")
    if s.tokens > MOST_SCALED and not Plan(spec, s).sums_once:
        raise SpecError(
            f"schedule: tokens={s.tokens} leaves registers for one set of sums, and {spec} needs two; "
            f"take tokens of at most {MOST_SCALED}"
        )
    if not has_wgmma(spec, target):
        raise SpecError(
            f"schedule: wgmma multiplies {spec.act} by {spec.act} in whole 16-byte pieces of x; {spec.weight} with "
            f"k={spec.k} and groups of {spec.group_size} needs wgmma=0"
        )


def has_digits(spec: MatmulSpec) -> bool:
    """Whether one token can be multiplied in integers: codes must be some, and groups whole pieces of 128 columns."""
    group = spec.packing.padded_group
    return takes(spec.dtype) and (group is None or group % PIECE == 0)


def _check_digits(spec: MatmulSpec, s: Schedule) -> None:
    if s.step_k % PIECE:
        raise SpecError(f"schedule: step_k={s.step_k} must be a multiple of {PIECE} for digits=1")
    if not has_digits(spec):
        raise SpecError(
            f"schedule: digits=1 multiplies integers of 1, 2 or 4 bits in groups of multiples of {PIECE} columns; "
            f"{spec.weight} in groups of {spec.group_size} needs digits=0"
        )


def _check_resident(spec: MatmulSpec, s: Schedule) -> None:
    plan = Plan(spec, s)
    if not plan.covers_exactly or spec.packing.padded_k % s.step_k or not plan.async_x:
        raise SpecError(
            f"schedule: resident=1 needs steps of step_k={s.step_k}, warps_k={s.warps_k} and splits={s.splits} to come "
            f"out even for k={spec.packing.padded_k}, and x in 16-byte pieces; take resident=0"
        )
    if plan.resident_words > MOST_RESIDENT:
        raise SpecError(
            f"schedule: resident=1 has at most {MOST_RESIDENT} registers of weight in a thread, {s} needs "
            f"{plan.resident_words}; take more warps or splits, or resident=0"
        )


def group_fits(spec: MatmulSpec, step: int) -> bool:
    """Whether steps and groups divide one another."""
    group = spec.packing.padded_group
    return group is None or step % group == 0 or group % step == 0


def multiprocessors(target: Target) -> int:
    """Of the usual GPU of an architecture: A100, A40, Orin, L40S, H100."""
    return {86: 84, 87: 16, 89: 142, 90: 132}.get(target.capability, 108)


def enough_blocks(blocks: int, target: Target) -> int:
    """The `max_blocks` with which so many blocks run at a time and no more would, or 0 where that takes many: a
    multiprocessor that finishes early would take more than its share of the next kernel's."""
    each = -(-blocks // multiprocessors(target))
    return each if each <= 2 else 0
