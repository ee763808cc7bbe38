"""The scales and offsets that fit groups best: step 1 of `k_quants`, and the errors of given ones.

`fit_of` returns a `Fit`: in torch's operations for any device and format, or by programs of the CPU target
(`passes/cpu/groups.py`), in a tenth of the time. Both try the same ranges; their sums differ in the last digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from lowbit.dialect.formats.dtypes import dtype
from lowbit.passes.cpu import group_plans
from lowbit.passes.cpu.group_plans import Parts, Ranges, Round
from lowbit.pylib.quantization.grid import Grid, each_chunk
from lowbit.pylib.runtime.cpu_groups import CpuGroups, has_group_programs, round_groups

STEPS = {"mse": [0.1 * step for step in range(-10, 11)], "output": [0.2 * step for step in range(-5, 6)]}
"""The ranges of step 1, by how many levels they have more than the format; so few are as good."""
STEPS_WITHOUT_OFFSETS = [-1.0, -0.5, 0.0, 0.5, 1.0]
"""The same, from each end of the levels: more gain less than 0.2 % of the output error of rounding to nearest. GPTQ
takes STEPS, as all of them gain it up to 0.7 %, and the search is little of its time."""
SIGNED = ("f16", "bf16", "f32")  # types of scales that may be below 0
COPIES = 4  # parts of a cache for each weight of a chunk that is rounded at once
ROUNDS, ROUNDS_WITHOUT_OFFSETS = 4, 2  # of step 1, after the ranges


class Fit(Protocol):
    """The search in some rows of a weight.

    low, high   the least and the largest weight of each group [rows, groups]
    """

    low: Tensor
    high: Tensor

    def fitted(self) -> tuple[Tensor, Tensor]:
        """Returns the scales and offsets [rows, groups] of least error; offsets are 0 in a format without."""
        ...

    def errors(self, scales: Tensor, offsets: Tensor | None) -> Tensor:
        """Returns the squared errors [rows, groups] with scales and offsets of that shape."""
        ...


def fit_of(groups: Tensor, counted: Tensor, grid: Grid) -> Fit:
    """Returns the search in groups [rows, groups, group_size] in f32, whose squared errors count so much (`counts`)."""
    return (_OnCpu if has_programs(groups, grid) else _InTorch)(groups, counted, grid)


def has_programs(weight: Tensor, grid: Grid) -> bool:
    """Tells whether programs of the CPU target serve a weight, or its groups: one of integers on a CPU."""
    return weight.device.type == "cpu" and grid.integer and has_group_programs()


def rounds_at_once(weight: Tensor, grid: Grid) -> bool:
    """Tells whether one program searches and rounds a weight (`group_plans.Round`): one with a searched scale of one
    level, and an offset or no zero."""
    config = grid.config
    simple = config.bilevel is None and config.zeros in ("none", "offset") and config.clip in ("output", "mse")
    return simple and config.scale_type in SIGNED and grid.group_size % 8 == 0 and has_programs(weight, grid)


def rounded_at_once(
    weight: Tensor, grid: Grid, search: Parts | Ranges, power: float, importance: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the codes [rows, k], scales and offsets [rows, groups] in f32 that the program finds for a weight [rows,
    k]. Errors count by this power of the size of weights, where they do (`losses`), and by importances [k]."""
    power = power if grid.config.clip == "output" else 0.0
    kind = cast(Any, grid.config.scale_type)
    plan = Round(grid.group_size, grid.least, grid.most, kind, power, importance is not None, search)
    codes = torch.empty(weight.shape, dtype=grid.code_type)

    def work(rows: slice) -> tuple[Tensor, Tensor]:
        return round_groups(plan, weight[rows].float().contiguous(), importance, codes[rows])

    scales, offsets = (torch.cat(parts) for parts in zip(*each_chunk(work, weight, COPIES)))
    return codes, scales, offsets


def can_be_below_zero(grid: Grid) -> bool:
    """Tells whether scales may be below 0 and offsets above: not where both are codes from 0 on."""
    return grid.config.bilevel is None or float(dtype(grid.config.scale_type).values().min()) < 0


def ranges(grid: Grid) -> list[float]:
    """Returns with offsets how many levels the ranges to try are wide; without, the levels of a group's largest
    weight."""
    if grid.config.zeros == "offset":
        return [grid.most - grid.least + step for step in STEPS[grid.config.clip]]
    ends = [end for end in (grid.least, grid.most) if end]
    steps = STEPS[grid.config.clip] if _is_thorough(grid) else STEPS_WITHOUT_OFFSETS
    return [end + (step if end > 0 else -step) for end in ends for step in steps]


def rounds(grid: Grid) -> int:
    """Returns how often levels, and the scales and offsets that fit them, then follow each other."""
    return ROUNDS if _is_thorough(grid) else ROUNDS_WITHOUT_OFFSETS


def _is_thorough(grid: Grid) -> bool:
    """Tells whether all STEPS and ROUNDS gain something: with offsets, and for GPTQ."""
    return grid.config.zeros == "offset" or grid.config.method == "gptq"


class _OnCpu:
    def __init__(self, groups: Tensor, counted: Tensor, grid: Grid) -> None:
        self._groups, self._grid = CpuGroups(groups, counted), grid
        self.low, self.high = self._groups.low, self._groups.high
        self._kind = grid.group_size, grid.least, grid.most
        self._has_offsets = grid.config.zeros == "offset"

    def fitted(self) -> tuple[Tensor, Tensor]:
        grid = self._grid
        how = tuple(ranges(grid)), rounds(grid), self._has_offsets, can_be_below_zero(grid)
        return self._groups.fit(group_plans.Fit(*self._kind, *how))

    def errors(self, scales: Tensor, offsets: Tensor | None) -> Tensor:
        return self._groups.errors(group_plans.Errors(*self._kind, self._has_offsets), scales, offsets)


class _InTorch:
    """groups, importance   [group_size, rows, groups]: sums over a group add up whole rows then; or a number for all"""

    def __init__(self, groups: Tensor, counted: Tensor, grid: Grid) -> None:
        self._grid, self._groups, self._importance = grid, _columns_first(groups), _columns_first(counted)
        self.low, self.high = self._groups.amin(0), self._groups.amax(0)
        self._has_offsets, self._is_signed = grid.config.zeros == "offset", can_be_below_zero(grid)
        self._counted, self._buffer = self._groups * self._importance, torch.empty_like(self._groups)
        self._sums = self._importance.expand_as(self._groups).sum(0), self._counted.sum(0)

    def fitted(self) -> tuple[Tensor, Tensor]:
        best = torch.full_like(self.low, torch.inf)
        scales, offsets = torch.zeros_like(best), torch.zeros_like(best)
        for levels in chain(self._levels(), repeat(None, rounds(self._grid))):
            if levels is None:  # each fitted to the levels of a range and then to its own
                levels = self._nearest(scales, offsets if self._has_offsets else None)
            s, o, error = self._least_squares(levels)
            better = error < best
            best = torch.where(better, error, best)
            scales, offsets = torch.where(better, s, scales), torch.where(better, o, offsets)
        return scales, offsets

    def errors(self, scales: Tensor, offsets: Tensor | None) -> Tensor:
        values = self._nearest(scales, offsets).mul_(scales)
        if offsets is not None:
            values += offsets
        return values.sub_(self._groups).square_().mul_(self._importance).sum(0)

    def _nearest(self, scales: Tensor, offsets: Tensor | None) -> Tensor:
        return self._grid.nearest(quotient(self._groups if offsets is None else self._groups - offsets, scales))

    def _levels(self) -> Iterator[Tensor]:
        """Yields the nearest levels for several ranges."""
        if self._has_offsets:
            low, high = (self.low, self.high) if self._is_signed else (self.low.clamp(max=0), self.high.clamp(min=0))
            for levels in ranges(self._grid):
                inverse = quotient(torch.full_like(high, levels), high - low)
                yield self._grid.nearest((self._groups - low).mul_(inverse).add_(self._grid.least))
            return
        extreme = torch.where(self.high < -self.low, self.low, self.high)
        for level in ranges(self._grid):
            inverse = quotient(torch.full_like(extreme, level), extreme)
            yield self._grid.nearest(self._groups * (inverse if self._is_signed else inverse.abs()))

    def _least_squares(self, levels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the scale and the offset with which these levels have the least error, and that error, less what does
        not depend on levels."""
        products = torch.mul(levels, self._counted, out=self._buffer).sum(0)
        counted = torch.mul(levels, self._importance, out=self._buffer)
        sums = counted.sum(0) if self._has_offsets else products
        squares = counted.mul_(levels).sum(0)
        scales = quotient(products, squares)
        if not self._has_offsets:
            scales = scales if self._is_signed else scales.clamp(min=0)
            return scales, torch.zeros_like(scales), scales * (scales * squares - 2 * products)
        count, weights = self._sums
        determinant = count * squares - sums.square()
        s = quotient(count * products - sums * weights, determinant)
        o = quotient(squares * weights - sums * products, determinant)
        allowed = (determinant > 0) & (self._is_signed | ((o <= 0) & (s >= 0)))
        offsets = torch.where(allowed, o, 0.0)
        scales = torch.where(allowed, s, scales if self._is_signed else scales.clamp(min=0))
        of_scales = scales * (scales * squares - 2 * (products - offsets * sums))
        return scales, offsets, of_scales + offsets * (offsets * count - 2 * weights)


def _columns_first(groups: Tensor) -> Tensor:
    """Returns [rows, groups, size] as [size, rows, groups]; a number stays one."""
    return groups.permute(2, 0, 1).contiguous() if groups.ndim else groups


def quotient(x: Tensor, y: Tensor) -> Tensor:
    """Returns x / y, and 0 where y is 0."""
    return x / torch.where(y == 0, torch.inf, y)
