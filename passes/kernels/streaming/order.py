"""The order of sums of the kernels for few tokens, from their schedules, and the schedules that have a given one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple, TypeVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, KernelFamily
from lowbit.passes.kernels.decode.schedule import ROTATED, Schedule
from lowbit.passes.kernels.requirements import can_use_wgmma
from lowbit.passes.kernels.streaming.bounds import known_bounds
from lowbit.passes.kernels.streaming.candidates import Block, least_schedules, may_preload, of_block, step_lengths
from lowbit.passes.kernels.streaming.cost_model import spills
from lowbit.passes.kernels.streaming.legality import enough_blocks
from lowbit.passes.kernels.streaming.plan import KernelPlan, known_plan
from lowbit.passes.kernels.streaming.search_space import MOST_WARPS
from lowbit.passes.kernels.sum_order import SumOrder
from lowbit.passes.target import Target

S = TypeVar("S", bound=Schedule)

_SPLITS, _CHAINS = (1, 2, 4, 8), (1, 2, 3, 4, 8, 16)
_OF_WARP = (1, 2, 4)  # chains that a warp may have
_LONGEST_STEP = 512  # columns, of several chains
_MOST_BY_MMA = 64  # tokens whose sums have room in registers
_MOST_ACCUMULATORS = 16  # of mma.sync: row blocks times blocks of 8 tokens times chains, per warp
_MMA = tuple(product((1, 2, 4, 8), (1, 2, 4)))
_WGMMA = ((1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (4, 4), (4, 8))
"""Row blocks of a warp, and warps along n."""


def sum_order(spec: MatmulSpec, s: Schedule) -> SumOrder:
    """Returns the order in which a kernel adds up."""
    parts = 1 if s.split_k == 1 or known_plan(spec, s).steps.take_turns else s.split_k
    chains = s.warps_k * s.chains * s.split_k // parts
    return SumOrder.of(spec, parts, chains, s.step_k // s.chains, tuple(_products(spec, known_plan(spec, s))))


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
        when = "by step" if s.outliers_by_step else "first" if plan.outliers.are_spread else "last"
        yield f"outliers {when}, shared out among {s.split_k} x {s.warps_k} warps"
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
    # Blocks of a cluster have chains as warps do.
    splits = (1,) if target.has_clusters and not spec.outliers else _SPLITS
    cluster = target.has_clusters
    found = [
        family.schedule_type(8, 1, 1, chains, columns, 2, split_k, cluster=split_k if cluster else 1)
        for split_k, chains, columns in product(splits, _CHAINS, step_lengths(spec, 1))
    ]
    found = [s for s in found if spec.packing.padded_k > s.step_k * s.warps_k * s.split_k]
    if _has_two_sums(spec) and can_use_wgmma(spec, target):
        found += [replace(s, warps_n=4, wgmma=True) for s in found if 4 * s.warps_k <= MOST_WARPS]
    found += [s for tokens in (8, 64) for s in least_schedules(spec, tokens, target, family)]
    return list(dict.fromkeys(sum_order(spec, s) for s in found))


class Cut(NamedTuple):
    """Who has the chains of an order: fields of `Schedule`."""

    split_k: int
    warps_k: int
    step_k: int
    chains: int


def cuts_of(spec: MatmulSpec, target: Target, order: SumOrder) -> Iterator[Cut]:
    """Yields the ways of blocks, of the warps of each and of their chains to share out the chains of an order."""
    every = order.parts * order.chains
    for split_k, chains in product(_SPLITS, _OF_WARP):
        blocks_fit = split_k == order.parts or (order.parts == 1 and target.has_clusters)
        step_k = order.step_k * chains
        step_fits = chains == 1 or (step_k <= _LONGEST_STEP and not spec.outliers)
        if blocks_fit and step_fits and every % (split_k * chains) == 0:
            yield Cut(split_k, every // (split_k * chains), step_k, chains)
    if every == 1:  # then steps may be longer
        longer = (step for step in step_lengths(spec, 1) if step > order.step_k)
        yield from (Cut(1, 1, step, 1) for step in longer)


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
    if may_preload(spec, token_tile, target):
        least = known_bounds(spec, token_tile, target, wgmma=True, integer_mma=False).of_all
        least *= target.costs.decode.preloaded
        yield Candidates(least, partial(_preloaded, family, spec, token_tile, target, order))


def _of_engine(
    spec: MatmulSpec, token_tile: int, target: Target, order: SumOrder, family: KernelFamily[S], wgmma: bool
) -> Iterator[Candidates[S]]:
    """Yields those of one engine that are larger than the least ones."""
    tokens, bounds = max(8, token_tile), known_bounds(spec, token_tile, target, wgmma, integer_mma=False)
    for cut, (row_blocks, warps_n) in product(cuts_of(spec, target, order), _WGMMA if wgmma else _MMA):
        if _has_room(cut, tokens, row_blocks, warps_n, wgmma):
            blocks = -(-spec.n // (16 * row_blocks * warps_n)) * cut.split_k
            shape = row_blocks, warps_n, cut.warps_k, cut.split_k
            block = Block(tokens, *shape, wgmma, False, enough_blocks(blocks, target) if wgmma else 0, cut.chains)
            least = bounds.of_shape(*shape, steps=[cut.step_k], sums=tokens)
            yield Candidates(least, partial(_of_order, family, spec, target, block, cut.step_k, order))


def _has_room(cut: Cut, tokens: int, row_blocks: int, warps_n: int, wgmma: bool) -> bool:
    """Whether a block has neither too many warps nor too many accumulators."""
    accumulators = row_blocks * tokens // 8 * cut.chains
    return warps_n * cut.warps_k <= MOST_WARPS and (wgmma or accumulators <= _MOST_ACCUMULATORS)


def _of_order(
    family: KernelFamily[S], spec: MatmulSpec, target: Target, block: Block, step_k: int, order: SumOrder
) -> list[S]:
    found = of_block(family, spec, target, block, [step_k])
    return [s for s in found if family.sum_order(spec, s) == order]


def _preloaded(family: KernelFamily[S], spec: MatmulSpec, token_tile: int, target: Target, order: SumOrder) -> list[S]:
    """Those that have all of the weight on its way at once, in blocks that leave room for the next kernel's."""
    processors = target.multiprocessors
    found = [
        family.schedule_type(
            *(token_tile, 1, 4, cut.warps_k, cut.step_k, 1, cut.split_k, cut.split_k, True),
            preload_weights=True,
            min_blocks=processors,
            chains=cut.chains,
        )
        for cut in cuts_of(spec, target, order)
        if -(-spec.n // 64) * cut.split_k <= processors and 4 * cut.warps_k <= MOST_WARPS
    ]
    fitting = [s for s in found if family.allows(spec, s, target) and family.sum_order(spec, s) == order]
    return [s for s in fitting if not spills(known_plan(spec, s), target)]


def _least(family: KernelFamily[S], spec: MatmulSpec, token_tile: int, target: Target, order: SumOrder) -> list[S]:
    """The small schedules of mma.sync that have an order, one of which every matmul has."""
    small = [replace(s, tokens=max(8, token_tile)) for s in least_schedules(spec, 8, target, family)]
    return [s for s in small if family.allows(spec, s, target) and family.sum_order(spec, s) == order]
