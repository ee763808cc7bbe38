"""Groups of a weight on this CPU, and the programs that search scales and offsets in them (`passes.cpu.groups`)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lowbit.dialect.errors import TargetError
from lowbit.passes.cpu.group_plans import Errors, Fit, GroupPlan, Round, Tiles
from lowbit.passes.cpu.layer_plans import LANES
from lowbit.passes.cpu.task import ENTRY
from lowbit.pylib.build import knobs
from lowbit.pylib.build.host_programs import load_plan
from lowbit.pylib.runtime.machine_code import load


@lru_cache(maxsize=1)
def has_group_programs() -> bool:
    """Tells whether this process can make such programs: it needs LLVM, and a processor that has AVX2."""
    try:
        _function(Errors(16, 0.0, 1.0, False), knobs.cpu())
    except TargetError:
        return False
    return True


class CpuGroups:
    """Weights [rows, groups, size] in f32, sixteen groups side by side, and how much their squared errors count.

    counts      what weights can be multiplied by
    low, high   the least and the largest weight of each group [rows, groups]
    """

    def __init__(self, weights: Tensor, counts: Tensor) -> None:
        self._shape, self._size = weights.shape[:2], weights.shape[2]
        self._weights, low, high = self._in_tiles(weights)
        self._counts, *_ = self._in_tiles(counts.expand_as(weights))
        self.low, self.high = self._by_group(low), self._by_group(high)
        self._ends = low, high

    def fit(self, plan: Fit) -> tuple[Tensor, Tensor]:
        """Returns the scales and offsets [rows, groups] of least error."""
        scales, offsets = (torch.zeros_like(self._ends[0]) for _ in range(2))
        self._run(plan, self._weights, scales, [self._counts, *self._ends, offsets])
        return self._by_group(scales), self._by_group(offsets)

    def errors(self, plan: Errors, scales: Tensor, offsets: Tensor | None) -> Tensor:
        """Returns the squared errors [rows, groups] with scales and offsets of that shape."""
        result = torch.empty_like(self._ends[0])
        given = [_filled(each.flatten()) for each in (scales, offsets) if each is not None]
        self._run(plan, self._weights, result, [self._counts, *given])
        return self._by_group(result)

    def _in_tiles(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns groups as programs read them, the last tile filled up with zeros, and their ends."""
        by_row = _filled(groups.flatten(0, 1).float())
        low, high = (groups.new_empty(len(by_row) // LANES, LANES) for _ in range(2))
        tiles = torch.empty_like(by_row)
        self._run(Tiles(self._size), by_row, tiles, [low, high])
        return tiles, low, high

    def _run(self, plan: GroupPlan, given: Tensor, result: Tensor, more: Sequence[Tensor]) -> None:
        """Runs a program; `more` are the arrays of its words."""
        tiles = given.numel() // (LANES * self._size)
        words = [each.data_ptr() for each in more] + [0] * (len(plan.words) - len(more))
        _call(plan, tiles, given, result, None, words)

    def _by_group(self, tiles: Tensor) -> Tensor:
        return tiles.flatten()[: self._shape.numel()].view(self._shape)


def round_groups(plan: Round, weight: Tensor, importance: Tensor | None, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Writes the codes [rows, k], a byte each, of a weight [rows, k] in f32, whose rows follow each other as theirs do.
    Returns scales and offsets [rows, groups] in f32; offsets are 0 where the search has none.

    importance   [k]: squared errors of a column count so much; None: all alike
    """
    rows, blocks = len(weight), weight.shape[1] // plan.size
    count = rows * blocks
    scales, offsets, inverse = torch.zeros(3, -(-count // LANES) * LANES)
    scratch = weight.new_empty(2 * plan.size * LANES)
    columns = scratch if importance is None else importance.to(weight).contiguous()
    words = [each.data_ptr() for each in (scales, offsets, inverse, columns)]
    _call(plan, -(-rows // LANES), weight, codes, scratch, [*words, blocks, count])
    return scales[:count].view(rows, blocks), offsets[:count].view(rows, blocks)


def _call(plan: GroupPlan, pieces: int, x: Tensor, y: Tensor, scratch: Tensor | None, words: Sequence[int]) -> None:
    """Runs a program."""
    room = 0 if scratch is None else scratch.data_ptr()
    task = array("q", (0, 0, 0, pieces, 0, x.data_ptr(), y.data_ptr(), room, 0, *words))
    _function(plan, knobs.cpu())(task.buffer_info()[0])


def _filled(groups: Tensor) -> Tensor:
    """Returns what groups have, with zeros up to the end of a tile."""
    missing = -len(groups) % LANES
    return torch.cat([groups, groups.new_zeros(missing, *groups.shape[1:])]) if missing else groups.contiguous()


@lru_cache(maxsize=256)
def _function(plan: GroupPlan, cpu: str) -> Callable[[int], None]:
    return load(load_plan(plan, cpu), ENTRY)
