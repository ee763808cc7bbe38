"""Round to nearest: the range of each group is searched, then every weight takes the nearest code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.passes.cpu.group_plans import Errors, Parts
from lowbit.pylib.quantization.calibration import output_errors
from lowbit.pylib.quantization.grid import Codes, Grid, by_chunks
from lowbit.pylib.quantization.group_fit import has_programs, rounded_at_once, rounds_at_once
from lowbit.pylib.quantization.losses import (
    POWER,
    SAFE_POWER,
    counted,
    counts,
    has_correlations,
    importance_of,
    of_output,
)
from lowbit.pylib.runtime.cpu_groups import CpuGroups

RATIOS = [1 - 0.02 * step for step in range(41)]  # of a group's range, 1 to 0.2, for `clip="mse"`
COARSE, FINE = [1 - 0.08 * step for step in range(11)], (0.04, 0.02, 0.01, 0.005)
"""The same for `clip="output"`, and by which part the best so far is then changed: half the work, and less loss."""
LEAST_GAIN = 0.0175  # of the loss and per bit, for a scale per row; with more groups in a row less: chance averages out
COPIES = 6  # temporaries of the search in f32, for each weight


Rating = Callable[[Tensor, Tensor], Tensor]
"""Returns the loss of each group [rows, groups] for scales and zeros of that shape."""


class Range(NamedTuple):
    """The range that the levels of each group span, each [rows, groups].

    scales, zeros   as `Grid.fit` returns them
    ratio           the part of the group's own range; below 0 where the levels run from its upper end downwards
    """

    scales: Tensor
    zeros: Tensor
    ratio: Tensor


def rtn(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> Codes:
    """Returns the codes of a weight [rows, k], each the nearest one.

    importance   [k]: squared errors of a column count so much in the search; None: all columns alike
    """
    if rounds_at_once(weight, grid):  # by one program, which tries the same ranges
        by_size = importance is None and grid.config.clip == "output"
        gain = _least_gain(grid, grid.k // grid.group_size) if by_size else None
        power = SAFE_POWER if by_size else POWER
        return Codes(*rounded_at_once(weight, grid, Parts(*_tried(grid), gain), power, importance))
    return by_chunks(lambda rows: rounded(rows, grid, search(rows, grid, importance)), weight, COPIES)


def rounded(weight: Tensor, grid: Grid, span: Range) -> Codes:
    """Returns the nearest codes for a range of each group."""
    return grid.quantize(weight, span.scales, span.zeros)


def search(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> Range:
    """Returns the range of each group that `clip` asks for."""
    if grid.config.clip in ("max", "ocp"):
        return whole(weight, grid)
    if importance is not None or grid.config.clip == "mse":
        return least(weight, grid, _rating(weight, grid, counts(weight, grid, importance)))
    ratings = [_rating(weight, grid, counts(weight, grid, power=power)) for power in (SAFE_POWER, 0.0)]
    return _worth_it(weight, grid, least(weight, grid, ratings[0]), *ratings)


def _rating(weight: Tensor, grid: Grid, each: Tensor) -> Rating:
    """Returns the loss of groups whose squared errors count so much each (`counts`); on a CPU by a compiled program, if
    levels are integers."""
    groups = grid.groups(weight)
    if not has_programs(weight, grid):
        loss = counted(each)
        return lambda scales, zeros: loss(grid.errors(groups, scales, zeros))
    has_zeros = grid.config.zeros != "none"
    plan, on_cpu = Errors(grid.group_size, grid.least, grid.most, has_zeros), CpuGroups(groups, each)
    return lambda scales, zeros: on_cpu.errors(plan, scales, -scales * zeros if has_zeros else None)


def _worth_it(weight: Tensor, grid: Grid, found: Range, loss: Rating, squares: Rating) -> Range:
    """Returns the range that was found where it is worth it, and the whole one of all other groups.

    Without data nobody knows how inputs go together, so any other rounding changes the output error by chance. With
    fine steps there is little to gain: a gain may come from the single largest weight, while others lose. So the loss
    has to be less by LEAST_GAIN for each bit of the format, and squared errors that count alike must not be more.
    """
    spans = found, whole(weight, grid)
    (new, old), (new_squares, old_squares) = (
        [each(span.scales, span.zeros) for span in spans] for each in (loss, squares)
    )
    gain = _least_gain(grid, found.scales.shape[1])
    better = (new < (1 - gain) * old) & (new_squares <= old_squares)
    return Range(*(torch.where(better, one, other) for one, other in zip(*spans)))


def _least_gain(grid: Grid, groups: int) -> float:
    """Returns by which part the loss has to be less in a row of so many groups."""
    return LEAST_GAIN * grid.config.dtype.bits / groups**0.5


def whole(weight: Tensor, grid: Grid) -> Range:
    """Returns the whole range of each group."""
    scales, zeros = grid.fit(*grid.groups(weight).aminmax(dim=-1))
    return Range(scales, zeros, torch.ones_like(scales))


def least(weight: Tensor, grid: Grid, rating: Rating) -> Range:
    """Returns the range of each group that has the least loss: parts of its own, then others near the best of these."""
    search = _Search(weight, grid, rating)
    ratios, steps = _tried(grid)
    for ratio in ratios:
        search.visit(torch.full_like(search.best.ratio, ratio))
    for step in steps:
        best = search.best.ratio
        search.visit(best * (1 + step))
        search.visit(best * (1 - step))
    return search.best


def _tried(grid: Grid) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns which parts of a group's own range are tried, and by which steps the best of them is then changed."""
    if grid.config.clip != "output":
        return tuple(RATIOS[1:]), ()
    return (*COARSE[1:], *((-ratio for ratio in COARSE) if grid.has_a_longer_side else ())), FINE


class _Search:
    """The best ranges of some groups so far."""

    def __init__(self, weight: Tensor, grid: Grid, rating: Rating) -> None:
        self._grid, self._rating = grid, rating
        self._low, self._high = grid.groups(weight).aminmax(dim=-1)
        self.best = whole(weight, grid)
        self._least = rating(self.best.scales, self.best.zeros)

    def visit(self, ratio: Tensor) -> None:
        """Take for each group this part of its own range if its loss is less."""
        found = Range(*self._grid.fit(self._low * ratio, self._high * ratio), ratio)
        losses = self._rating(found.scales, found.zeros)
        better = losses < self._least
        self._least = torch.where(better, losses, self._least)
        self.best = Range(*(torch.where(better, new, old) for new, old in zip(found, self.best)))


def candidates(weight: Tensor, grid: Grid, hessian: Tensor) -> Iterator[Codes]:
    """Yields a weight [rows, k] rounded by the ranges among which methods with data choose: searched ones with
    importances, and for `clip="output"` whole ones, and those with the least output error of each group. None is best
    for all rows, as errors of groups add up in different ways."""
    importance = importance_of(hessian)
    yield rtn(weight, grid, importance)
    if grid.config.clip == "output" and has_correlations(hessian):
        loss = of_output(hessian, grid)

        def by_output(rows: Tensor) -> Codes:
            return rounded(rows, grid, least(rows, grid, lambda *of: loss(grid.errors(grid.groups(rows), *of))))

        yield by_chunks(lambda rows: rounded(rows, grid, whole(rows, grid)), weight, COPIES)
        yield by_chunks(by_output, weight, COPIES)


def best_rounded(weight: Tensor, grid: Grid, hessian: Tensor) -> Codes:
    """Returns a weight [rows, k] in f32, rounded to nearest; each row takes the ranges with the least output error."""
    best = rtn(weight, grid)
    for found in candidates(weight, grid, hessian):
        best = better_rows(grid, weight, hessian, found, best)
    return best


def better_rows(grid: Grid, target: Tensor, hessian: Tensor, new: Codes, old: Codes) -> Codes:
    """Returns for each row the codes with the smaller output error."""
    new_error, old_error = (output_errors(target - grid.dequantize(codes), hessian) for codes in (new, old))
    better = (new_error < old_error)[:, None]
    codes, scales, zeros = (torch.where(better, a, b) for a, b in zip(new, old))
    return Codes(codes, scales, zeros)
