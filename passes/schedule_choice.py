"""Which schedule a matmul gets, without MLIR: this runs before the disk cache is asked for a kernel.

`schedule_for` takes, in this order: what was measured for the very same matmul; what was measured for one like it
(`passes.schedule_tables`); a rule of thumb. The rule comes from what bounds the kernel: enough bytes in flight (three
stages of 8 warps), enough blocks for all multiprocessors (fewer row blocks each, then k split over blocks), activations
that fit beside them. docs/tuning.md says how far each is from the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dialect.decode_table import DecodeTable
from dialect.errors import SpecError
from dialect.spec import BYTES, MatmulSpec
from passes.plan import Plan
from passes.recipes import compute_element
from passes.schedule import Schedule
from passes.schedule_tables import Entry, Table, nearest, shipped_tables
from passes.target import Target

TOKEN_TILES = (1, 8, 16, 32, 64)  # the m for which a kernel of its own is made, up to the next


def schedule_for(
    spec: MatmulSpec, tile: int, target: Target, gpu: str | None = None, user: Sequence[Table] = ()
) -> Schedule:
    """The schedule for up to `tile` tokens (one of TOKEN_TILES). The same arguments give the same schedule.

    gpu   name of the GPU that will run it, as CUDA spells it; None: any GPU of the target's architecture
    user  tables that go before the shipped ones where both know a matmul equally well
    """
    check_tile(tile)
    tables = [t for t in (*user, *shipped_tables()) if t.capability == target.capability]
    tables.sort(key=lambda t: t.gpu != gpu)  # stable: the user's stay first among equals
    return choose(spec, tile, target, tables)


def choose(spec: MatmulSpec, tile: int, target: Target, tables: Sequence[Table]) -> Schedule:
    """The schedule from these tables, the most trusted first, or by the rule."""
    found = nearest(tables, spec, tile, lambda entry: _suits(spec, entry, target))
    return found or default_schedule(spec, tile, target)


def _suits(spec: MatmulSpec, entry: Entry, target: Target) -> bool:
    """Whether a schedule does here what it did where it was measured: it is allowed, every warp has work, and its
    blocks fill the multiprocessors about as well."""
    s, processors = entry.schedule, multiprocessors(target)
    try:
        check_schedule(spec, s, target)
    except SpecError:
        return False

    def filled(n: int) -> float:
        blocks = -(-n // s.rows) * s.splits
        return blocks / (-(-blocks // processors) * processors)

    return s.warps_k * s.splits <= Plan(spec, s).steps and filled(spec.n) >= 0.9 * filled(entry.key.n)


def multiprocessors(target: Target) -> int:
    """Of the usual GPU of an architecture: A100, A40, Orin, L40S, H100."""
    return {86: 84, 87: 16, 89: 142, 90: 132}.get(target.capability, 108)


def check_tile(tile: int) -> None:
    """Raises SpecError unless there is a kernel for up to `tile` tokens."""
    if tile not in TOKEN_TILES:
        raise SpecError(f"tokens={tile} must be one of {', '.join(map(str, TOKEN_TILES))}")


def shared_bytes(spec: MatmulSpec, s: Schedule) -> int:
    """Shared memory of the skinny kernel, as `lower-tiles` will lay it out (buffers are multiples of 128 bytes)."""
    plan = Plan(spec, s)

    def padded(size: int) -> int:
        return -(-size // 128) * 128

    units = s.step_k // spec.packing.chunk * spec.packing.units * 512
    rows = plan.row_blocks * max(1, plan.groups) * 16
    total = padded(s.stages * s.warps_k * plan.row_blocks * units)
    row = s.step_k if s.wgmma else s.step_k + 8
    total += padded(s.stages * s.warps_k * s.tokens * row * 2)  # swizzled if wgmma, from a multiple of 1024 anyway
    if plan.groups:
        for kind in filter(None, (spec.scale, spec.zero_kind)):
            total += padded(s.stages * s.warps_k * rows * BYTES[kind])
    if spec.dtype.kind == "table":
        total += DecodeTable(spec.dtype, compute_element(spec.dtype, spec.act)).bytes
    sums = padded(s.warps_k * s.tokens * (s.rows + 4) * 4) if s.warps_k > 1 or s.cluster > 1 else 0
    flag = 128 if s.splits > s.cluster else 0  # of the last block to arrive
    return max(total, sums + flag)


def check_schedule(spec: MatmulSpec, s: Schedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    chunk, group = spec.packing.chunk, spec.packing.padded_group
    if s.step_k % chunk:
        raise SpecError(f"schedule: step_k={s.step_k} must be a multiple of {chunk} for {spec.weight}; try {chunk}")
    if not group_fits(spec, s.step_k):
        raise SpecError(f"schedule: step_k={s.step_k} and groups of {group} must divide one another; try {chunk}")
    if s.wgmma:
        _check_wgmma(spec, s, target)
    if s.cluster > 1 and not target.has_clusters:
        raise SpecError(f"schedule: cluster={s.cluster} needs sm_90, the target is {target}; take cluster=1")
    needed = shared_bytes(spec, s)
    if needed > target.max_shared_per_block:
        raise SpecError(
            f"schedule: {s} needs {needed} bytes of shared memory, {target} allows {target.max_shared_per_block}; "
            "take fewer stages or warps_k, or a smaller step_k"
        )


def has_wgmma(spec: MatmulSpec, target: Target) -> bool:
    """Whether a matmul can use wgmma: it needs x in 16-byte pieces, and codes decoded to the type of x."""
    return target.has_wgmma and compute_element(spec.dtype, spec.act) == spec.act and Plan(spec, Schedule()).async_x


def _check_wgmma(spec: MatmulSpec, s: Schedule, target: Target) -> None:
    if not target.has_wgmma:
        raise SpecError(f"schedule: wgmma needs sm_90a, the target is {target}; take wgmma=0")
    if s.step_k % 64:
        raise SpecError(f"schedule: step_k={s.step_k} must be a multiple of 64 for wgmma")
    if not has_wgmma(spec, target):
        raise SpecError(
            f"schedule: wgmma multiplies {spec.act} by {spec.act} in whole 16-byte pieces of x; {spec.weight} with "
            f"k={spec.k} and groups of {spec.group_size} needs wgmma=0"
        )


def group_fits(spec: MatmulSpec, step: int) -> bool:
    """Whether steps and groups divide one another."""
    group = spec.packing.padded_group
    return group is None or step % group == 0 or group % step == 0


# (row blocks, warps along n, warps along k, stages) for m up to a token tile, by measurement on an H200 (2026-11;
# docs/tuning.md): many rows per block save reads of x, warps along k make up for few rows.
_SHAPES = {1: (2, 1, 8, 3), 8: (4, 1, 8, 4), 16: (4, 1, 8, 4), 32: (2, 4, 4, 2), 64: (2, 4, 2, 2)}
# The same where the weight has rows for many blocks per multiprocessor.
_TALL_SHAPES = {1: (2, 1, 4, 3), 8: (8, 2, 2, 3), 16: (8, 2, 2, 2), 32: (4, 4, 2, 2)}
_MOST_SPLITS = 4  # beyond, their partial sums cost more than idle multiprocessors
_LONG_X = 1 << 18  # tokens * k from which splitting k is cheaper than every block reading all of x


def default_schedule(spec: MatmulSpec, tile: int, target: Target) -> Schedule:
    """A good schedule without search, for m up to `tile` (one of TOKEN_TILES)."""
    check_tile(tile)
    if has_wgmma(spec, target) and (tile > 8 or (tile == 8 and spec.n >= 64 * multiprocessors(target) * 0.9)):
        return _warpgroup_schedule(spec, tile, target)
    processors = multiprocessors(target)
    packing, has_table = spec.packing, spec.dtype.kind == "table"
    step = max(packing.chunk, min(128, 2 * packing.chunk))
    step = step if group_fits(spec, step) else packing.chunk

    def shaped(row_blocks: int, warps_n: int, warps_k: int, stages: int) -> Schedule:
        tokens = tile if has_table else max(8, tile)  # a table leaves little room for rows of x that are not there
        return Schedule(tokens, row_blocks, warps_n, warps_k, step, stages)

    def tiles(s: Schedule) -> int:
        return Plan(spec, s).tiles

    def splits(s: Schedule, most: int) -> int:
        return max(1, min(most, Plan(spec, s).rounds // 2))  # two rounds at least

    s = shaped(*_SHAPES[tile])
    many = 6 * processors if tile == 1 else 1.5 * processors
    if tile in _TALL_SHAPES and tiles(tall := shaped(*_TALL_SHAPES[tile])) >= many:
        s = tall
        if tile == 1 and packing.bits <= 2:
            s = replace(s, row_blocks=4, stages=2)  # decoding is the bound: more work for every fragment of x
        if tile == 1 and has_table and packing.bits <= 4:
            s = replace(s, row_blocks=4, warps_k=8, stages=2)  # few blocks have room, and each fills a table
    elif tile == 16 and tile * spec.k >= _LONG_X:
        s = replace(s, row_blocks=8)
    if tile == 1 and packing.bits == 8:
        cheap = spec.dtype.kind in ("uint", "int")  # to decode; then the smallest blocks are best
        s = replace(s, row_blocks=1, warps_k=8) if cheap else replace(s, stages=4)
    if packing.chunk == 256:
        s = replace(s, stages=2)  # a stage is large as it is

    # One token leaves room for two blocks on a multiprocessor, whose phases then overlap. Wide tiles and long rows
    # would rather split k than share x among fewer rows.
    blocks, most = (2 if tile == 1 else 1), (2 if tile >= 32 or tile * spec.k >= _LONG_X else 1)
    while s.rows > 16 and tiles(s) * splits(s, most) < 0.9 * blocks * processors:
        s = replace(s, row_blocks=s.row_blocks // 2) if s.row_blocks > 1 else replace(s, warps_n=s.warps_n // 2)
    if tile == 1 and s.row_blocks == 1 and packing.bits < 8:
        s = replace(s, warps_k=16, stages=2)
    while s.warps_k > 1 and Plan(spec, s).steps <= s.warps_k // 2:  # idle warps
        s = replace(s, warps_k=s.warps_k // 2)
    limit = min(target.max_shared_per_block, target.shared_per_sm // blocks - 1024)
    while shared_bytes(spec, s) > limit and (smaller := _smaller(s, packing.chunk)):
        s = smaller
    return replace(s, splits=splits(s, min(_MOST_SPLITS, -(-9 * processors // (10 * tiles(s))))))


def _warpgroup_schedule(spec: MatmulSpec, tile: int, target: Target) -> Schedule:
    """With wgmma, by measurement on an H200 (2026-11): four warpgroups on a multiprocessor, each with k of its own; or,
    where there are rows for many blocks, small blocks, and x shared by as many rows as its size demands."""
    processors, chunk = multiprocessors(target), spec.packing.chunk
    steps = [s for s in (256, 128, 64) if s % chunk == 0 and group_fits(spec, s)]
    wide, narrow = steps[0], steps[min(1, len(steps) - 1)]
    if spec.n >= 64 * 4 * processors:
        rows, stages, splits = {8: ((1, 4), 8, 1), 16: ((1, 4), 6, 1), 32: ((2, 4), 3, 2), 64: ((1, 8), 4, 2)}[tile]
        s = Schedule(tile, *rows, 1, narrow, stages, splits, splits, wgmma=1)
    else:
        s = Schedule(tile, 1, 4, 4, narrow if tile == 64 else wide, 2, wgmma=1)
        splits = 1
        while splits < 8 and Plan(spec, s).tiles * splits < 0.9 * processors and Plan(spec, s).rounds >= 4 * splits:
            splits *= 2
        s = replace(s, splits=splits, cluster=splits)
    while s.warps_k > 1 and Plan(spec, s).rounds < 2:
        s = replace(s, warps_k=s.warps_k // 2)
    while shared_bytes(spec, s) > target.max_shared_per_block and (smaller := _smaller(s, max(64, chunk))):
        s = smaller
    return replace(s, max_blocks=enough_blocks(spec, s, target))


def enough_blocks(spec: MatmulSpec, s: Schedule, target: Target) -> int:
    """The `max_blocks` with which all blocks run at a time and no more would, or 0 where that takes many: a
    multiprocessor that finishes early would take more than its share of the next kernel's."""
    blocks = -(-Plan(spec, s).tiles * s.splits // multiprocessors(target))
    return blocks if blocks <= 2 else 0


def _smaller(s: Schedule, chunk: int) -> Schedule | None:
    """The least painful way to need less shared memory."""
    if s.stages > 2:
        return replace(s, stages=s.stages - 1)
    if s.step_k > chunk:
        return replace(s, step_k=chunk)
    if s.warps_k > 4:
        return replace(s, warps_k=s.warps_k // 2, stages=3)  # half the warps, with more in flight for each
    if s.warps_k > 1:
        return replace(s, warps_k=s.warps_k // 2)
    if s.row_blocks > 1:
        return replace(s, row_blocks=s.row_blocks // 2)
    return replace(s, warps_n=s.warps_n // 2) if s.warps_n > 1 else None
