"""The schedules from which the rule chooses, where nobody has measured, and where a measured one does as well."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from lowbit.dialect.formats.integer_limbs import PIECE
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, KernelFamily
from lowbit.passes.kernels.decode.schedule import TOKEN_TILES, IntegerSchedule, Refill, Schedule, usual_refill
from lowbit.passes.kernels.requirements import can_use_wgmma
from lowbit.passes.kernels.streaming.bounds import known_bounds
from lowbit.passes.kernels.streaming.cost_model import blocks_per_sm, spills
from lowbit.passes.kernels.streaming.engine_plans import SPREAD, can_spread, has_integer_mma
from lowbit.passes.kernels.streaming.legality import enough_blocks, group_fits
from lowbit.passes.kernels.streaming.plan import KernelPlan, known_plan
from lowbit.passes.target import Target

S = TypeVar("S", bound=Schedule)

SMALL_GROUP = 32  # columns
_AS_MANY = 1.1  # times as many blocks or bytes as were measured still do
_PLAIN_TILES = TOKEN_TILES[:-2]  # without wgmma: the sums of more have no room in registers


def token_tiles(spec: MatmulSpec, target: Target) -> tuple[int, ...]:
    """The token tiles that a matmul has decode kernels for. A warp that adds outliers reads x from device memory, an
    address for each token: for more of them, the dequantize kernel writes outliers out with the weight."""
    if spec.outliers or not can_use_wgmma(spec, target):
        return _PLAIN_TILES
    step = math.lcm(spec.packing.chunk, spec.x.per_panel)
    widest = KernelPlan(spec, Schedule(TOKEN_TILES[-1], 1, 4, 1, step, num_stages=1, wgmma=True))
    return TOKEN_TILES if widest.arithmetic.sums_once else TOKEN_TILES[:-1]


def token_tile_limit(spec: MatmulSpec, target: Target) -> str:
    """Why `token_tiles` ends where it does: the end of an error's message."""
    where = f" for {spec.weight}, k={spec.k} on {target}"
    if spec.outliers:
        return f"{where}, whose outliers are added by the dequantize kernel then"
    if can_use_wgmma(spec, target):
        return where
    return f"{where}, " + ("whose x is not in whole 16-byte pieces" if target.has_wgmma else "which has no wgmma")


def suits(spec: MatmulSpec, s: Schedule, target: Target, measured: MatmulSpec) -> bool:
    """Whether a schedule that is allowed does for `spec` what it did for the matmul it was measured with: it scales
    weights or sums as there, every warp has work, and its blocks fill the multiprocessors about as well."""
    plan, scaling = known_plan(spec, s), known_plan(measured, s).scaling
    if plan.scaling.rounds_scales != scaling.rounds_scales or s.warps_k * s.split_k > plan.steps.count:
        return False

    def filled(n: int) -> float:
        blocks = -(-n // s.rows) * s.split_k
        return blocks / (-(-blocks // target.multiprocessors) * target.multiprocessors)

    share = filled(spec.n) / filled(measured.n)
    # Two kernels with preloaded weights share the multiprocessors: neither blocks nor weights may be more.
    if s.preload_weights and spec.bytes > _AS_MANY * measured.bytes:
        return False
    return 0.9 <= share <= (_AS_MANY if s.preload_weights else math.inf)


# (row blocks, warps along n, warps along k): what won most often when an H200's table was tuned.
_WGMMA = (
    *((1, 4, 4), (1, 4, 3), (1, 4, 2), (1, 4, 1), (1, 8, 2), (1, 8, 1), (1, 16, 1)),
    *((2, 4, 4), (2, 4, 2), (2, 4, 1), (2, 8, 1), (2, 8, 2), (4, 4, 2), (4, 8, 2)),
)
_ONE_TOKEN = ((1, 1, 3), (1, 1, 4), (1, 1, 8), (1, 1, 16), (2, 1, 4), (2, 1, 8), (2, 2, 4), (4, 1, 4), (4, 1, 16))
_INTEGER = ((1, 1, 16), (2, 1, 8), (2, 1, 16), (4, 1, 4), (4, 1, 8), (4, 1, 16), (8, 1, 4), (8, 1, 8))
_WITHOUT_WGMMA = ((1, 1, 8), (2, 1, 8), (4, 1, 8), (2, 2, 4), (8, 2, 2), (2, 4, 2), (2, 4, 4), (4, 4, 2))
_SPREAD = (
    *((1, 1, 4), (1, 1, 8), (1, 1, 16), (1, 2, 4), (1, 2, 8), (2, 1, 4), (2, 1, 8)),
    *((2, 1, 16), (2, 2, 4), (2, 2, 8), (4, 1, 4), (4, 1, 8), (4, 1, 16)),
)  # with `Schedule.spread_k`
_LEAST = ((1, 1, 4), (1, 1, 2), (1, 1, 1))  # where k has few steps, or a block little room


# By token tile: the weights, per multiprocessor, up to which preloading a matrix is faster (u4 on an H200).
_SMALL = {8: 128 << 10, 16: 128 << 10, 32: 72 << 10, 64: 72 << 10}


def may_preload(spec: MatmulSpec, token_tile: int, target: Target) -> bool:
    """Whether a matrix is small enough for all of its weight to be on its way at once."""
    if spec.outliers or spec.bilevel:  # whose lines and numbers take a stage or more of shared memory themselves
        return False
    if spec.compute:
        return False
    small = spec.n * spec.k <= _SMALL.get(token_tile, 0) * target.multiprocessors
    return small and can_use_wgmma(spec, target)


def preloaded_schedule(
    spec: MatmulSpec, token_tile: int, target: Target, family: KernelFamily[Schedule]
) -> Schedule | None:
    """All of the weight on its way at once, in blocks that leave room for those of the next kernel. None where the
    matrix is too large for that, or does not come out even."""
    if not may_preload(spec, token_tile, target):
        return None
    processors = target.multiprocessors
    tiles = -(-spec.n // 64)
    wide = next((s for s in (1, 2, 4) if spec.k <= 4096 * s), 0)  # splits, of blocks of 16 warps
    narrow = next((s for s in (1, 2, 4) if spec.k <= 1536 * s and tiles * s >= 64), 0)  # of four
    shapes = [(4, wide)] if token_tile <= 16 and 32 <= tiles * wide <= 96 else []
    shapes += [(1, narrow)] if 64 <= tiles * narrow <= processors else []
    for (warps_k, split_k), step in itertools.product(shapes, (256, 128)):
        choice = (token_tile, 1, 4, warps_k, step, 1, split_k, split_k, True)
        s = Schedule(*choice, preload_weights=True, min_blocks=processors)
        if family.allows(spec, s, target) and not spills(known_plan(spec, s), target):
            return s
    return None


def streaming_schedules(
    spec: MatmulSpec, token_tile: int, target: Target, family: KernelFamily[S]
) -> list[Candidates[S]]:
    """Some dozens of a family's schedules with a copy pipeline that are allowed, by shape. Never empty."""
    if token_tile > 1 and can_use_wgmma(spec, target):
        # Twelve warps add up 64 rows by a third of their threads, which have no registers for 128 tokens.
        shapes = [shape for shape in _WGMMA if token_tile <= 64 or shape[2] != 3]
        found = list(_shaped(family, spec, target, shapes, token_tile, wgmma=True))
    elif token_tile > 1:
        found = list(_shaped(family, spec, target, _WITHOUT_WGMMA, token_tile))
    else:
        found = _of_one_token(spec, target, family)

    def if_none() -> list[S]:
        some = any(group.schedules for group in sorted(found, key=lambda group: group.least))
        return [] if some else least_schedules(spec, token_tile, target, family)

    return [*found, Candidates(_least_time_of_least(spec, token_tile, target, family), if_none)]


def least_time(spec: MatmulSpec, token_tile: int, target: Target, family: KernelFamily[S]) -> float:
    """Microseconds that no candidate is predicted to be below."""
    integers = family.schedule_type.integer_mma
    kinds = {False, token_tile > 1 and can_use_wgmma(spec, target)}
    return min(known_bounds(spec, token_tile, target, wgmma, integers).of_all for wgmma in kinds)


def _of_one_token(spec: MatmulSpec, target: Target, family: KernelFamily[S]) -> list[Candidates[S]]:
    """Schedules for one token: spread over the columns of a product where groups are small, since four lanes scale the
    same sums otherwise. Integers in groups of 32 without zeros are as fast without that, and faster in small matrices:
    blocks begin sooner.

    A token tile of eight for one token: it is predicted like that of one, of which more blocks fit, and crowd.
    """
    group = spec.packing.padded_group or 0
    small = can_spread(spec) and group <= SMALL_GROUP
    found = list(_shaped(family, spec, target, _SPREAD, 1, spread_k=True)) if small else []
    plain = group == SMALL_GROUP and spec.dtype.kind in ("uint", "int") and spec.zeros == "none" and not spec.bilevel
    if not plain and any(group.schedules for group in found):
        return found
    return found + list(_shaped(family, spec, target, _ONE_TOKEN, 8, token_tile=1))


def least_schedules(spec: MatmulSpec, token_tile: int, target: Target, family: KernelFamily[S]) -> list[S]:
    """Small schedules, for matmuls that are too short for two rounds of any other."""
    chunk, kind = spec.packing.chunk, family.schedule_type
    if token_tile > max(_PLAIN_TILES):
        return [kind(token_tile, 1, 4, 1, math.lcm(chunk, spec.x.per_panel), num_stages=1, wgmma=True)]
    least = [kind(token_tile, *shape, chunk, 2) for shape in _LEAST]
    fitting = [s for s in least if family.allows(spec, s, target)]
    return [s for s in fitting if s.warps_k <= known_plan(spec, s).steps.count] or fitting[-1:]


def _least_time_of_least(spec: MatmulSpec, token_tile: int, target: Target, family: KernelFamily[S]) -> float:
    """Microseconds that none of `least_schedules` is predicted to be below."""
    wide, chunk = token_tile > max(_PLAIN_TILES), spec.packing.chunk
    shapes, step_k = ([(1, 4, 1)], math.lcm(chunk, spec.x.per_panel)) if wide else (_LEAST, chunk)
    bounds = known_bounds(spec, token_tile, target, wide, family.schedule_type.integer_mma)
    return min(bounds.of_shape(*shape, 1, steps=[step_k], sums=max(8, token_tile)) for shape in shapes)


def integer_schedules(
    spec: MatmulSpec, target: Target, family: KernelFamily[IntegerSchedule]
) -> list[Candidates[IntegerSchedule]]:
    """The same for one token in integers, which pays for codes of 1 and 2 bits: with more, memory is the bound."""
    if spec.packing.bits > 2 or not has_integer_mma(spec):
        return []
    return list(_shaped(family, spec, target, _INTEGER, 1))


def step_lengths(spec: MatmulSpec, least: int) -> list[int]:
    """Returns the columns that a step may have, the most first: multiples of `least`."""
    chunk = spec.packing.chunk
    return [step for step in (256, 128, 64, 32) if step % chunk == step % least == 0 and group_fits(spec, step)]


def _shaped(
    family: KernelFamily[S],
    spec: MatmulSpec,
    target: Target,
    shapes: Sequence[tuple[int, int, int]],
    tokens: int,
    wgmma: bool = False,
    spread_k: bool = False,
    token_tile: int = 0,
) -> Iterator[Candidates[S]]:
    """The family's schedules of these shapes that are allowed, do not spill and have two rounds or more; token_tile:
    what they are for, unless it is `tokens`."""
    integers = family.schedule_type.integer_mma
    steps = step_lengths(spec, spec.x.per_panel if wgmma else PIECE if integers else SPREAD if spread_k else 1)
    # The wider x is, the less room there is for long steps; those of small groups take few, as scales do per step.
    steps = steps[: 3 if tokens > 128 else 1 if spread_k else 2]
    if not steps:
        return
    sums = 1 if integers or spread_k else max(8, tokens)
    bounds = known_bounds(spec, token_tile or tokens, target, wgmma, integers)
    for shape, split_k in itertools.product(shapes, (1, 2, 4, 8) if wgmma else (1, 2, 4)):
        row_blocks, warps_n, _ = shape
        blocks = -(-spec.n // (16 * row_blocks * warps_n)) * split_k
        if split_k == 1 or blocks <= (6 if wgmma else 2) * target.multiprocessors:
            block = Block(tokens, *shape, split_k, wgmma, spread_k, enough_blocks(blocks, target) if wgmma else 0)
            least = bounds.of_shape(*shape, split_k, steps=steps, sums=sums)
            yield Candidates(least, partial(of_block, family, spec, target, block, steps))


@dataclass(frozen=True)
class Block:
    """What the candidates of a group have in common: fields of `Schedule`."""

    tokens: int
    row_blocks: int
    warps_n: int
    warps_k: int
    split_k: int
    wgmma: bool
    spread_k: bool
    max_blocks_per_sm: int
    chains: int = 1


def of_block(
    family: KernelFamily[S], spec: MatmulSpec, target: Target, block: Block, steps: Sequence[int]
) -> list[S]:
    """The candidates with such blocks: with steps of one of these lengths, in two or three stages."""
    overlapping = target.has_clusters and not block.wgmma  # kernels of mma.sync of which the next one starts early
    refill: Refill = usual_refill(block.tokens, block.warps_n) if block.wgmma else "before_mma"
    cluster = block.split_k if target.has_clusters else 1
    found: list[S] = []
    # Of equals the first is taken: with mma.sync that with more bytes under way, as measured on Hopper.
    for step in steps:
        rounds = -(-spec.packing.padded_k // (step * block.warps_k * block.split_k))
        # More stages than rounds are a tenth to a third slower than two.
        most = rounds if block.spread_k or overlapping else 3
        for num_stages in (3, 2) if overlapping else (2, 3):
            if rounds == 1 or num_stages > most:
                continue
            s = family.schedule_type(
                **vars(block), step_k=step, num_stages=num_stages, cluster=cluster, refill=refill
            )
            plan = known_plan(spec, s)
            if spills(plan, target):  # with any number of stages
                break
            if family.allows(spec, s, target):
                found.append(s if block.wgmma else without_room(plan, s, target))
    return found


def without_room(plan: KernelPlan, s: S, target: Target) -> S:
    """The schedule of a plan with room on a multiprocessor for no more blocks than it needs, where kernels overlap:
    blocks of the next one would crowd some. Where there is room for fewer, it stays as it is."""
    needed = -(-plan.steps.tiles * s.split_k // target.multiprocessors)
    fitting = blocks_per_sm(plan, target) if target.has_clusters else 0
    return replace(s, max_blocks_per_sm=needed) if fitting >= needed else s
