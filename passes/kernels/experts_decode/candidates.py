"""The schedules from which the rule chooses for few slots of each expert.

Blocks take turns at the tiles of all experts that are hit, as if these were one matrix; so the cost model of the dense
kernels serves. The shapes are those that won most often on an H200 (docs/lab-notebook/experts.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelFamily
from lowbit.passes.kernels.experts_decode.schedule import ExpertsDecodeSchedule
from lowbit.passes.kernels.streaming.candidates import SMALL_GROUP
from lowbit.passes.kernels.streaming.cost_model import blocks_per_sm, spills
from lowbit.passes.kernels.streaming.order import cuts_of, sum_order
from lowbit.passes.kernels.streaming.plan import known_plan
from lowbit.passes.kernels.streaming.search_space import MOST_WARPS
from lowbit.passes.kernels.sum_order import SumOrder
from lowbit.passes.target import Target


class _Shape(NamedTuple):
    """A candidate but for its slots.

    blocks  at most so many on a multiprocessor
    """

    row_blocks: int
    warps_n: int
    warps_k: int
    step_k: int
    num_stages: int
    blocks: int
    wgmma: bool = False
    chains: int = 1

    def schedule(self, kind: type[ExpertsDecodeSchedule], tile: int) -> ExpertsDecodeSchedule:
        """Returns the schedule of a kind for so many slots."""
        overlaps = self.wgmma and self.row_blocks == 1 and self.warps_n < 16  # so many hide their waits
        return kind(
            tile,
            self.row_blocks,
            self.warps_n,
            self.warps_k,
            self.step_k,
            self.num_stages,
            wgmma=self.wgmma,
            max_blocks_per_sm=self.blocks,
            refill="after_first_mma" if self.wgmma and tile >= _MANY and self.row_blocks == 1 else "before_mma",
            overlap_groups=overlaps and tile <= kind.most_overlapping,
            chains=self.chains,
        )


_SHAPES = {
    8: (
        *(_Shape(2, 2, 4, 128, 3, 3), _Shape(1, 2, 4, 128, 2, 3), _Shape(2, 2, 2, 128, 4, 3)),
        *(_Shape(2, 4, 1, 256, 4, 2), _Shape(2, 4, 1, 256, 2, 4), _Shape(4, 1, 8, 256, 2, 1)),
        *(_Shape(2, 4, 1, 128, 2, 3), _Shape(2, 1, 2, 256, 2, 4)),
        _Shape(1, 4, 1, 256, 3, 6, wgmma=True),
    ),
    16: (
        *(_Shape(2, 4, 1, 256, 3, 3), _Shape(2, 4, 1, 128, 4, 4), _Shape(2, 2, 2, 128, 3, 2)),
        *(_Shape(2, 4, 2, 128, 4, 2, wgmma=True), _Shape(2, 4, 1, 256, 3, 3, wgmma=True)),
        *(_Shape(2, 4, 1, 128, 2, 5, wgmma=True), _Shape(2, 4, 1, 128, 4, 4, wgmma=True)),
    ),
    32: (
        *(_Shape(1, 4, 2, 256, 2, 2, wgmma=True), _Shape(1, 8, 1, 256, 2, 2, wgmma=True)),
        *(_Shape(1, 8, 2, 256, 3, 1, wgmma=True), _Shape(1, 4, 1, 256, 2, 3, wgmma=True)),
        _Shape(2, 4, 1, 128, 2, 4, wgmma=True),
    ),
    48: (_Shape(1, 8, 1, 256, 2, 2, wgmma=True), _Shape(2, 4, 1, 256, 2, 2, wgmma=True)),
    64: (
        *(_Shape(1, 16, 1, 256, 2, 1, wgmma=True), _Shape(1, 8, 1, 128, 4, 2, wgmma=True)),
        _Shape(1, 16, 1, 256, 3, 1, wgmma=True),
    ),
    80: (
        *(_Shape(2, 4, 1, 256, 2, 2, wgmma=True), _Shape(2, 8, 1, 256, 2, 1, wgmma=True)),
        _Shape(2, 4, 1, 128, 3, 2, wgmma=True),
    ),
}
_WITH_ZEROS = {48: (2, 4, 256), 80: (2, 4, 128)}
"""Row blocks, warps along n and columns of a step, by slots, of the blocks that are fastest for weights with zeros. The
cost model takes the subtraction of zeros to be hidden in all (docs/lab-notebook/experts.md)."""
_OF_SMALL_GROUPS = {
    8: (
        *(_Shape(2, 4, 1, 128, 2, 3), _Shape(2, 2, 2, 128, 4, 3)),
        *(_Shape(2, 2, 4, 128, 2, 2), _Shape(2, 2, 2, 128, 2, 3)),
    )
}
IN_ORDER = (8, 16, 32, 64)  # slots of tiles of invariant matmuls
_MOST_HALVED = 32  # slots of a tile, up to which blocks may share k
_MANY = 64  # slots of a tile, from which on the first product need not wait for the copies of a round
_LEAST = (_Shape(1, 1, 4, 0, 2, 4), _Shape(1, 1, 2, 0, 2, 4), _Shape(1, 1, 1, 0, 2, 4))  # step_k: a chunk


def candidates(
    spec: MatmulSpec, tile: int, target: Target, family: KernelFamily[ExpertsDecodeSchedule]
) -> list[ExpertsDecodeSchedule]:
    """Returns the family's schedules with tiles of so many slots that fit; small ones where k is too short for the
    others. None where tiles of so many slots are not for this kernel."""
    group = spec.packing.padded_group
    shapes = _SHAPES | (_OF_SMALL_GROUPS if group and group <= SMALL_GROUP else {})
    of_tile = _shapes_of(tile, shapes)
    found = list(dict.fromkeys(_fitting(spec, tile, target, family, of_tile)))
    if found or all(shape.wgmma for shape in of_tile):
        return found
    least = [shape._replace(step_k=spec.packing.chunk) for shape in _LEAST]
    return list(_fitting(spec, tile, target, family, least))


def preferred(spec: MatmulSpec, schedules: Sequence[ExpertsDecodeSchedule]) -> Sequence[ExpertsDecodeSchedule]:
    """Returns those of a tile's schedules that predictions are to choose from."""
    if spec.zeros == "none" or spec.compute:
        return schedules
    known = [s for s in schedules if (s.row_blocks, s.warps_n, s.step_k) == _WITH_ZEROS.get(s.tokens)]
    return known or schedules


def _shapes_of(tile: int, shapes: Mapping[int, Sequence[_Shape]]) -> Sequence[_Shape]:
    """Returns the shapes for tiles of so many slots: of a size between two, those of both."""
    above = min((tokens for tokens in shapes if tokens >= tile), default=None)
    if above is None:
        return ()
    below = max((tokens for tokens in shapes if tokens <= tile), default=above)
    return list(dict.fromkeys((*shapes[below], *shapes[above])))


def cuts(spec: MatmulSpec, kind: type[ExpertsDecodeSchedule]) -> list[ExpertsDecodeSchedule]:
    """Returns a schedule of each way in which candidates cut k."""
    steps = dict.fromkeys((shape.warps_k, shape.step_k) for shape in itertools.chain(*_SHAPES.values()))
    steps |= dict.fromkeys((shape.warps_k, spec.packing.chunk) for shape in _LEAST)
    kept = [(warps_k, step) for warps_k, step in steps if step % spec.packing.chunk == 0]
    plain = [kind(8, 1, 1, warps_k, step, 2) for warps_k, step in kept]
    return [*plain, *(replace(s, split_k=2, cluster=2) for s in plain)]


def in_order(
    spec: MatmulSpec, tile: int, target: Target, order: SumOrder, family: KernelFamily[ExpertsDecodeSchedule]
) -> list[ExpertsDecodeSchedule]:
    """Returns the family's schedules with tiles of so many slots whose kernels have an order of sums: the shapes of
    candidates, with k cut as the order says; those of 16 slots, too, where the others are of wgmma."""
    shapes = (*_SHAPES[tile], *_SHAPES[16], *_LEAST) if tile in IN_ORDER else ()
    ways = [cut for cut in cuts_of(spec, target, order) if cut.split_k <= 2]
    cut = dict.fromkeys(
        shape._replace(warps_k=way.warps_k, step_k=way.step_k, chains=way.chains) for shape in shapes for way in ways
    )
    found = _fitting(spec, tile, target, family, [each for each in cut if each.warps_n * each.warps_k <= MOST_WARPS])
    return list(dict.fromkeys(s for s in found if sum_order(spec, s) == order))


def _fitting(
    spec: MatmulSpec,
    tile: int,
    target: Target,
    family: KernelFamily[ExpertsDecodeSchedule],
    shapes: Iterable[_Shape],
) -> Iterator[ExpertsDecodeSchedule]:
    """Yields the schedules of these shapes that fit and have work for every warp, in two rounds or more of several."""
    for s in (shape.schedule(family.schedule_type, tile) for shape in shapes):
        plan = known_plan(spec, s)
        room = blocks_per_sm(plan, target)
        works = s.warps_k == 1 or 2 * s.warps_k <= plan.steps.count
        if room and works and not spills(plan, target):
            for fitting in (replace(s, max_blocks_per_sm=room), *_halved(s, plan.steps.count, room)):
                if family.allows(spec, fitting, target):
                    yield fitting


def _halved(s: ExpertsDecodeSchedule, steps: int, room: int) -> Iterator[ExpertsDecodeSchedule]:
    """Yields a schedule whose blocks, up to `room`, have half of k each. Where tiles are few and k is long, more blocks
    are at work then."""
    if s.tokens <= _MOST_HALVED and room >= 2 and steps >= 8 * s.warps_k:
        yield replace(s, split_k=2, cluster=2, max_blocks_per_sm=room - room % 2)
