"""The order of sums of the kernels for few tokens, from their schedules, and the schedules that have a given one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TypeVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, KernelFamily
from lowbit.passes.kernels.decode.schedule import ROTATED, Schedule
from lowbit.passes.kernels.requirements import can_use_wgmma
from lowbit.passes.kernels.streaming.bounds import known_bounds
from lowbit.passes.kernels.streaming.candidates import Block, least_schedules, of_block, step_lengths
from lowbit.passes.kernels.streaming.legality import enough_blocks
from lowbit.passes.kernels.streaming.plan import KernelPlan, known_plan
from lowbit.passes.kernels.streaming.search_space import MOST_WARPS
from lowbit.passes.kernels.sum_order import APART, SumOrder
from lowbit.passes.target import Target

S = TypeVar("S", bound=Schedule)

_SPLITS, _WARPS_K = (1, 2, 4, 8), (1, 2, 3, 4, 8, 16)
_MOST_BY_MMA = 64  # tokens whose sums have room in registers
_MOST_ACCUMULATORS = 16  # of mma.sync: row blocks times blocks of 8 tokens, per warp
_MMA = tuple(product((1, 2, 4, 8), (1, 2, 4)))
_WGMMA = ((1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (4, 4), (4, 8))
"""Row blocks of a warp, and warps along n."""


def sum_order(spec: MatmulSpec, s: Schedule) -> SumOrder:
    """Returns the order in which a kernel adds up."""
    return SumOrder(s.split_k, s.warps_k, s.step_k, tuple(_products(spec, known_plan(spec, s))))


def _products(spec: MatmulSpec, plan: KernelPlan) -> Iterator[str]:
    """Yields what decides on bits besides how k is cut."""
    s, arithmetic, scaling = plan.schedule, plan.arithmetic, plan.scaling
    yield "limbs" if s.integer_mma else "one token over k" if s.spread_k else "bytes" if spec.compute else "mma"
    if _has_two_sums(spec):
        yield "by wgmma" if s.wgmma else "by mma.sync"
    flags = {
        "raw codes": arithmetic.raw_codes and spec.compute != "i8",  # products less zeros are exact integers
        "deferred offsets": arithmetic.defers_offset,
        "scaled weights": scaling.rounds_scales,
        "rounded zeros": scaling.rounds_zeros,
    }
    yield from (name for name, holds in flags.items() if holds)
    if spec.outliers:
        yield f"outliers {'by step' if s.outliers_by_step else 'first' if plan.outliers.are_spread else 'last'}"
    if s.warps_k > 1 and s.split_k > 1 and not (spec.invariant and s.cluster > 1):
        yield APART
    if not spec.invariant and s.tokens in ROTATED and plan.steps.rounds > 1:
        yield f"rotated every {s.rows} rows"
    if not spec.invariant and s.cluster > 2:
        yield f"parts from another one on every {s.rows // s.cluster} rows"


def _has_two_sums(spec: MatmulSpec) -> bool:
    """Tells whether wgmma adds up otherwise than mma.sync: it keeps 13 to 14 bits of a sum of e4m3 products, where
    Hopper's mma.sync makes numbers of f16 of them and adds these up in f32."""
    return spec.compute == "f8e4m3"


def orders(spec: MatmulSpec, target: Target, family: KernelFamily[S]) -> list[SumOrder]:
    """Returns the orders that a family's kernels may have for every number of tokens."""
    cuts = product(_SPLITS, _WARPS_K, step_lengths(spec, 1))
    clustered = target.has_clusters  # as schedules of `of_block` are
    found = [
        family.schedule_type(8, 1, 1, warps_k, step, 2, split_k, cluster=split_k if clustered else 1)
        for split_k, warps_k, step in cuts
    ]
    found = [s for s in found if spec.packing.padded_k > s.step_k * warps_of(s)]
    if _has_two_sums(spec) and can_use_wgmma(spec, target):
        found += [replace(s, warps_n=4, wgmma=True) for s in found if 4 * s.warps_k <= MOST_WARPS]
    found += [s for tokens in (8, 64) for s in least_schedules(spec, tokens, target, family)]
    return list(dict.fromkeys(sum_order(spec, s) for s in found))


def warps_of(s: Schedule) -> int:
    """Returns how many warps share a row's k."""
    return s.warps_k * s.split_k


def in_order(
    spec: MatmulSpec, token_tile: int, target: Target, order: SumOrder, family: KernelFamily[S]
) -> Iterator[Candidates[S]]:
    """Yields a family's schedules that have an order of sums, by shape; none where a token tile has none."""
    if token_tile <= _MOST_BY_MMA:
        yield from _of_engine(spec, token_tile, target, order, family, wgmma=False)
        least = known_bounds(spec, token_tile, target, wgmma=False, integer_mma=False).of_all
        yield Candidates(least, partial(_least, family, spec, token_tile, target, order))
    if token_tile > 1 and can_use_wgmma(spec, target):
        yield from _of_engine(spec, token_tile, target, order, family, wgmma=True)


def _of_engine(
    spec: MatmulSpec, token_tile: int, target: Target, order: SumOrder, family: KernelFamily[S], wgmma: bool
) -> Iterator[Candidates[S]]:
    """Yields those of one engine that are larger than the least ones."""
    tokens, bounds = max(8, token_tile), known_bounds(spec, token_tile, target, wgmma, integer_mma=False)
    for row_blocks, warps_n in _WGMMA if wgmma else _MMA:
        if _has_room(order, tokens, row_blocks, warps_n, wgmma):
            blocks = -(-spec.n // (16 * row_blocks * warps_n)) * order.split_k
            shape = row_blocks, warps_n, order.warps_k, order.split_k
            block = Block(tokens, *shape, wgmma, False, enough_blocks(blocks, target) if wgmma else 0)
            least = bounds.of_shape(*shape, steps=[order.step_k], sums=tokens)
            yield Candidates(least, partial(_of_order, family, spec, target, block, order))


def _has_room(order: SumOrder, tokens: int, row_blocks: int, warps_n: int, wgmma: bool) -> bool:
    """Whether a block has neither too many warps nor too many accumulators."""
    return warps_n * order.warps_k <= MOST_WARPS and (wgmma or row_blocks * tokens // 8 <= _MOST_ACCUMULATORS)


def _of_order(family: KernelFamily[S], spec: MatmulSpec, target: Target, block: Block, order: SumOrder) -> list[S]:
    found = of_block(family, spec, target, block, [order.step_k])
    return [s for s in found if family.sum_order(spec, s) == order]


def _least(family: KernelFamily[S], spec: MatmulSpec, token_tile: int, target: Target, order: SumOrder) -> list[S]:
    """The small schedules of mma.sync that have an order, one of which every matmul has."""
    small = [replace(s, tokens=max(8, token_tile)) for s in least_schedules(spec, 8, target, family)]
    return [s for s in small if family.allows(spec, s, target) and family.sum_order(spec, s) == order]
