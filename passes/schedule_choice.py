"""Which schedule a matmul gets, without MLIR: this runs before the disk cache is asked for a kernel.

`schedule_for` takes, in this order: what was measured for the very same matmul; what was measured for one like it
(`passes.schedule_tables`); a rule. With wgmma the rule is the least predicted (`passes.cost_model`) of some dozens of
schedules. Without, it comes from what bounds the kernel: enough bytes in flight (three stages of 8 warps), enough
blocks for all multiprocessors (fewer row blocks each, then k split over blocks), activations that fit beside them; and
for one token of a narrow weight it is weighed against doing so in integers, again by what is predicted.
docs/tuning.md says how far each is from the best.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dialect.errors import SpecError
from dialect.spec import MatmulSpec
from passes.cost_model import predict, spills
from passes.plan import Plan
from passes.schedule import Schedule
from passes.schedule_check import (
    enough_blocks,
    group_fits,
    has_digits,
    has_wgmma,
    is_allowed,
    multiprocessors,
    shared_bytes,
)
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
    if not is_allowed(spec, s, target):
        return False

    def filled(n: int) -> float:
        blocks = -(-n // s.rows) * s.splits
        return blocks / (-(-blocks // processors) * processors)

    return s.warps_k * s.splits <= Plan(spec, s).steps and filled(spec.n) >= 0.9 * filled(entry.key.n)


def check_tile(tile: int) -> None:
    """Raises SpecError unless there is a kernel for up to `tile` tokens."""
    if tile not in TOKEN_TILES:
        raise SpecError(f"tokens={tile} must be one of {', '.join(map(str, TOKEN_TILES))}")


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
    if tile > 1 and has_wgmma(spec, target):
        best = min(_warpgroup_schedules(spec, tile, target), key=lambda s: predict(spec, tile, s, target), default=None)
        if best and shared_bytes(spec, best) <= target.max_shared_per_block:
            return best
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

    # One token leaves room for two blocks on a multiprocessor, whose phases then overlap; one and a half for each were
    # still better (6144 x 4096, 7168 x 5120) than twice as many of half the rows. Wide tiles and long rows would rather
    # split k than share x among fewer rows.
    room, least = (2, 1.4) if tile == 1 else (1, 0.9)
    most = 2 if tile >= 32 or tile * spec.k >= _LONG_X else 1
    while s.rows > 16 and tiles(s) * splits(s, most) < least * processors:
        s = replace(s, row_blocks=s.row_blocks // 2) if s.row_blocks > 1 else replace(s, warps_n=s.warps_n // 2)
    if tile == 1 and s.row_blocks == 1 and packing.bits < 8:
        s = replace(s, warps_k=16, stages=2)
    while s.warps_k > 1 and Plan(spec, s).steps <= s.warps_k // 2:  # idle warps
        s = replace(s, warps_k=s.warps_k // 2)
    limit = min(target.max_shared_per_block, target.shared_per_sm // room - 1024)
    while shared_bytes(spec, s) > limit and (smaller := _smaller(s, packing.chunk)):
        s = smaller
    s = replace(s, splits=splits(s, min(_MOST_SPLITS, -(-9 * processors // (10 * tiles(s))))))
    if tile == 1 and has_digits(spec) and packing.bits <= 2:  # with more, memory is the bound
        return min([s, *_digit_schedules(spec, target)], key=lambda s: predict(spec, tile, s, target))
    return s


# (row blocks, warps along n, warps along k) with wgmma: what won most often when an H200's table was tuned. More shapes
# do not make the choice better.
_WARPGROUP_SHAPES = ((1, 4, 4), (1, 4, 2), (1, 4, 1), (1, 8, 2), (1, 8, 1))


def _warpgroup_schedules(spec: MatmulSpec, tile: int, target: Target) -> Iterator[Schedule]:
    """Schedules with wgmma, few enough to predict them all in about two milliseconds."""
    steps = [step for step in (256, 128, 64) if step % spec.packing.chunk == 0 and group_fits(spec, step)]
    for (row_blocks, warps_n, warps_k), splits in itertools.product(_WARPGROUP_SHAPES, (1, 2, 4, 8)):
        blocks = -(-spec.n // (16 * row_blocks * warps_n)) * splits
        if splits > 1 and blocks > 6 * multiprocessors(target):
            continue
        most = enough_blocks(blocks, target)
        for step, stages in itertools.product(steps[:2], (2, 4)):
            s = Schedule(tile, row_blocks, warps_n, warps_k, step, stages, splits, splits, 1, most)
            if not spills(s, target) and Plan(spec, s).rounds >= 2:
                yield s


def _digit_schedules(spec: MatmulSpec, target: Target) -> Iterator[Schedule]:
    """Schedules with one token in integers."""
    step = 256 if group_fits(spec, 256) else 128
    for row_blocks, warps_k, splits, stages in itertools.product((8, 4, 2, 1), (4, 8), (1, 2, 4), (2, 3)):
        cluster = splits if target.has_clusters else 1
        blocks = -(-spec.n // (16 * row_blocks)) * splits
        most = enough_blocks(blocks, target)
        s = Schedule(1, row_blocks, 1, warps_k, step, stages, splits, cluster, max_blocks=most, digits=1)
        if Plan(spec, s).rounds >= 2 and not spills(s, target) and is_allowed(spec, s, target):
            yield s


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
