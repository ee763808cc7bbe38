"""Groups with a scale and an offset, or whose scales and offsets are codes: GGUF's K-quants, Q4_1 and the like.

A weight is w = s q + o. With a second level (`lowbit.Bilevel`), s = S sc and o = M m: a block of groups shares S and M,
and every group has codes sc and m. The least squared error is searched for in two steps, as llama.cpp does
(make_qkx2_quants and make_qx_quants in ggml-quants.c), and in a third, which it does not have:

1. For each group, codes are computed for several ranges, and for these codes the s and o of least error. From the best
   of them on, codes and s and o follow each other a few times more.
2. S and M map the largest s and o of a block to the last code. Each group takes the nearest sc and m.
3. Each group takes the neighbours of sc and m, by one, with which its error is less.

Scale and offset are rounded to what kernels will multiply with before the codes of the weights are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, product, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.dialect.formats.dtypes import dtype
from lowbit.pylib.quantization.calibration import output_errors
from lowbit.pylib.quantization.grid import Grid, each_chunk
from lowbit.pylib.quantization.losses import counts, has_correlations, importance_of
from lowbit.pylib.torch_types import TORCH

COPIES = 8  # temporaries of the search in f32, for each weight
STEPS = {"mse": [0.1 * step for step in range(-10, 11)], "output": [0.2 * step for step in range(-5, 6)]}
"""The ranges of step 1, by how many levels they have more than the format; so few are as good."""
STEPS_WITHOUT_OFFSETS = [-1.0, -0.5, 0.0, 0.5, 1.0]
"""The same, from each end of the levels: more gain less than 0.2 % of the output error."""
ROUNDS, ROUNDS_WITHOUT_OFFSETS = 4, 2  # of step 1, after the ranges


class Numbers(NamedTuple):
    """The scales, or the offsets, of some rows.

    codes   [rows, groups] in f32: integers of the format of codes; the numbers themselves where there is one level
    supers  [rows, blocks] in f32: what codes are multiplied by; None where there is one level
    """

    codes: Tensor
    supers: Tensor | None

    @property
    def values(self) -> Tensor:
        """The numbers [rows, groups] in f32."""
        if self.supers is None:
            return self.codes
        return self.codes * self.supers.repeat_interleave(self.codes.shape[1] // self.supers.shape[1], 1)


class Pair(NamedTuple):
    """The scales and the offsets of some rows; None without offsets."""

    scales: Numbers
    offsets: Numbers | None

    def values(self) -> tuple[Tensor, Tensor | None]:
        """Returns the numbers of each group, [rows, groups]."""
        return self.scales.values, None if self.offsets is None else self.offsets.values


class Rated(NamedTuple):
    """Scales and offsets, and the squared error of each group [rows, groups]."""

    pair: Pair
    errors: Tensor


class KQuant(NamedTuple):
    """Some rows of a quantized weight: codes [rows, k] and what they are multiplied by."""

    codes: Tensor
    pair: Pair

    def dequantize(self, grid: Grid) -> Tensor:
        """Returns the weight [rows, k] in f32."""
        scales, offsets = self.pair.values()
        values = grid.groups(grid.decode(self.codes)) * scales[..., None]
        return (values if offsets is None else values.add_(offsets[..., None])).flatten(1)


def k_quant(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> KQuant:
    """Returns a weight [rows, k], quantized. No block of groups has a larger error than by its whole ranges.

    importance   [k]: squared errors of a column count so much in the search; None: all columns alike
    """
    parts = each_chunk(lambda rows: _searched(weight[rows].float().contiguous(), grid, importance), weight, COPIES)
    return _combined(lambda *tensors: torch.cat(tensors), *parts)


def chosen(where: Tensor, new: KQuant, old: KQuant) -> KQuant:
    """Returns the new rows where they are wanted, bool [rows], and the old ones elsewhere."""
    return _combined(lambda a, b: torch.where(where[:, None], a, b), new, old)


def k_candidates(weight: Tensor, grid: Grid, hessian: Tensor) -> Iterator[Pair]:
    """Yields scales and offsets among which GPTQ chooses: searched ones with importances, and for `clip="output"` those
    of whole ranges."""
    yield k_quant(weight, grid, importance_of(hessian)).pair
    if grid.config.clip == "output" and has_correlations(hessian):
        yield k_quant(weight, whole_ranges(grid)).pair


def best_k_quant(weight: Tensor, grid: Grid, hessian: Tensor) -> KQuant:
    """Returns a weight [rows, k] in f32, quantized; each row takes the scales and offsets with the least output
    error."""
    best = k_quant(weight, grid)
    for pair in k_candidates(weight, grid, hessian):
        best = better_k_rows(grid, weight, hessian, _Search(weight, grid, None).finish(pair), best)
    return best


def better_k_rows(grid: Grid, target: Tensor, hessian: Tensor, new: KQuant, old: KQuant) -> KQuant:
    """Returns for each row of a weight the one with the smaller output error."""
    new_error, old_error = (output_errors(target - each.dequantize(grid), hessian) for each in (new, old))
    return chosen(new_error < old_error, new, old)


def whole_ranges(grid: Grid) -> Grid:
    """Returns a grid that takes the whole range of each group."""
    return Grid(replace(grid.config, clip="max"), grid.k, grid.device)


def _combined(combine: Callable[..., Tensor], *parts: Any) -> Any:
    """Returns what `combine` makes of each tensor of some parts, which have the same tensors."""
    if parts[0] is None or isinstance(parts[0], Tensor):
        return None if parts[0] is None else combine(*parts)
    return type(parts[0])(*(_combined(combine, *each) for each in zip(*parts)))


def _searched(weight: Tensor, grid: Grid, importance: Tensor | None) -> KQuant:
    """Returns some rows of a weight, in f32, quantized."""
    search = _Search(weight, grid, importance)
    best = search.coded(*search.whole_ranges())
    if grid.config.clip != "max":
        best = search.better(search.rated(best), search.with_neighbours(search.coded(*search.fitted())))
    return search.finish(best)


class _Search:
    """The search in some rows of a weight.

    groups      [group_size, rows, groups]: sums over a group add up whole rows then, in half the time on a CPU
    importance  the same, or [group_size, 1, groups], or []
    low, high   the least and the largest weight of each group [rows, groups]
    """

    def __init__(self, weight: Tensor, grid: Grid, importance: Tensor | None) -> None:
        self.grid, self.level = grid, grid.config.bilevel
        self.groups = _columns_first(grid.groups(weight))
        self.importance = _columns_first(counts(weight, grid, importance))
        self.low, self.high = self.groups.amin(0), self.groups.amax(0)
        self.has_offsets = grid.config.zeros == "offset"
        self._counted, self._buffer = self.groups * self.importance, torch.empty_like(self.groups)
        self._sums = self.importance.expand_as(self.groups).sum(0), self._counted.sum(0)
        self.kind = TORCH[self.level.scale if self.level else grid.config.scale_type]
        codes = dtype(grid.config.scale_type).values() if self.level else None
        self.least, self.most = (0.0, 0.0) if codes is None else (float(codes.min()), float(codes.max()))
        self.is_signed = codes is None or self.least < 0

    # -- scales and offsets as they would be without codes, [rows, groups]

    def whole_ranges(self) -> tuple[Tensor, Tensor]:
        """Returns scales and offsets with which the levels just span each group."""
        if self.has_offsets:
            low, high = self._range()
            scales = (high - low) / (self.grid.most - self.grid.least)
            return scales, low - scales * self.grid.least
        scales = self.grid.reach(self.low, self.high, 0.0)
        return scales, torch.zeros_like(scales)

    def _range(self) -> tuple[Tensor, Tensor]:
        """Returns the least and the largest weight of each group; 0 is between them where offsets can't be positive."""
        return (self.low, self.high) if self.is_signed else (self.low.clamp(max=0), self.high.clamp(min=0))

    def fitted(self) -> tuple[Tensor, Tensor]:
        """Returns the scales and offsets of least error, each fitted to the levels of a range or, then, to its own."""
        best, (scales, offsets) = torch.full_like(self.low, torch.inf), self.whole_ranges()
        rounds = ROUNDS if self.has_offsets else ROUNDS_WITHOUT_OFFSETS
        for levels in chain(self._levels(), repeat(None, rounds)):
            if levels is None:
                levels = self.grid.nearest(self._over_scales(scales, offsets if self.has_offsets else None))
            s, o, error = self._least_squares(levels)
            better = error < best
            best = torch.where(better, error, best)
            scales, offsets = torch.where(better, s, scales), torch.where(better, o, offsets)
        return scales, offsets

    def _levels(self) -> Iterator[Tensor]:
        """Yields the nearest levels for several ranges."""
        least, most = self.grid.least, self.grid.most
        if self.has_offsets:
            low, high = self._range()
            for step in STEPS[self.grid.config.clip]:
                inverse = _quotient(torch.full_like(high, most - least + step), high - low)
                yield self.grid.nearest((self.groups - low).mul_(inverse).add_(least))
            return
        extreme = torch.where(self.high < -self.low, self.low, self.high)
        for end, step in product([end for end in (least, most) if end], STEPS_WITHOUT_OFFSETS):
            inverse = _quotient(torch.full_like(extreme, end + (step if end > 0 else -step)), extreme)
            inverse = inverse if self.is_signed else inverse.abs()
            yield self.grid.nearest(self.groups * inverse)

    def _least_squares(self, levels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the scale and the offset with which these levels have the least error, and that error, less what does
        not depend on levels."""
        products = torch.mul(levels, self._counted, out=self._buffer).sum(0)
        counted = torch.mul(levels, self.importance, out=self._buffer)
        sums = counted.sum(0) if self.has_offsets else products
        squares = counted.mul_(levels).sum(0)
        scales = _quotient(products, squares)
        if not self.has_offsets:
            scales = scales if self.is_signed else scales.clamp(min=0)
            return scales, torch.zeros_like(scales), scales * (scales * squares - 2 * products)
        count, weights = self._sums
        determinant = count * squares - sums.square()
        s = _quotient(count * products - sums * weights, determinant)
        o = _quotient(squares * weights - sums * products, determinant)
        allowed = (determinant > 0) & (self.is_signed | ((o <= 0) & (s >= 0)))
        offsets = torch.where(allowed, o, 0.0)
        scales = torch.where(allowed, s, scales if self.is_signed else scales.clamp(min=0))
        of_scales = scales * (scales * squares - 2 * (products - offsets * sums))
        return scales, offsets, of_scales + offsets * (offsets * count - 2 * weights)

    # -- the same as they are stored

    def coded(self, scales: Tensor, offsets: Tensor) -> Pair:
        """Returns scales and offsets as they are stored."""
        return Pair(self._numbers(scales), self._numbers(offsets) if self.has_offsets else None)

    def _numbers(self, values: Tensor) -> Numbers:
        if self.level is None:
            return Numbers(values.to(self.kind).float(), None)
        blocks = values.unflatten(1, (-1, self.level.groups))
        supers = (_extreme(blocks) / (self.least if self.is_signed else self.most)).to(self.kind).float()
        codes = _quotient(blocks, supers[..., None]).round_().clamp_(self.least, self.most)
        return Numbers(codes.flatten(1), supers)

    def rated(self, pair: Pair) -> Rated:
        """Returns scales and offsets with the error of each group."""
        scales, offsets = pair.values()
        values = self.grid.nearest(self._over_scales(scales, offsets)).mul_(scales)
        if offsets is not None:
            values += offsets
        return Rated(pair, values.sub_(self.groups).square_().mul_(self.importance).sum(0))

    def with_neighbours(self, given: Pair) -> Rated:
        """Returns for each group the best codes of scale and offset out of the given ones and their neighbours."""
        found, best = self.rated(given)
        steps = product((-1, 0, 1), (-1, 0, 1) if self.has_offsets else (0,))
        for of_scale, of_offset in steps if self.level else ():
            if (of_scale, of_offset) == (0, 0):
                continue
            offsets = None if given.offsets is None else self._moved(given.offsets, of_offset)
            moved, errors = self.rated(Pair(self._moved(given.scales, of_scale), offsets))
            found, best = _chosen(errors < best, 1, moved, found), torch.minimum(errors, best)
        return Rated(found, best)

    def _moved(self, numbers: Numbers, by: int) -> Numbers:
        return numbers._replace(codes=(numbers.codes + by).clamp_(self.least, self.most))

    def _over_scales(self, scales: Tensor, offsets: Tensor | None) -> Tensor:
        return _quotient(self.groups if offsets is None else self.groups - offsets, scales)

    def better(self, old: Rated, new: Rated) -> Pair:
        """Returns for each block of groups the pair with the smaller error."""
        size = self.level.groups if self.level else 1
        by_block = [rated.errors.unflatten(1, (-1, size)).sum(-1) for rated in (old, new)]
        return _chosen(by_block[1] < by_block[0], size, new.pair, old.pair)

    def finish(self, pair: Pair) -> KQuant:
        """Returns the weight with the codes that are nearest for a pair."""
        codes = self.grid.encode(self._over_scales(*pair.values()))
        return KQuant(codes.permute(1, 2, 0).flatten(1), pair)


def _columns_first(groups: Tensor) -> Tensor:
    """Returns [rows, groups, size] as [size, rows, groups]; a number stays one."""
    return groups.permute(2, 0, 1).contiguous() if groups.ndim else groups


def _chosen(where: Tensor, size: int, new: Pair, old: Pair) -> Pair:
    """Returns the new numbers of some blocks of so many groups, and the old ones of all others."""

    def choose(a: Numbers, b: Numbers) -> Numbers:
        codes = torch.where(where.repeat_interleave(size, 1), a.codes, b.codes)
        if a.supers is None or b.supers is None or a.supers is b.supers:
            return Numbers(codes, b.supers)
        return Numbers(codes, torch.where(where, a.supers, b.supers))

    offsets = None if new.offsets is None or old.offsets is None else choose(new.offsets, old.offsets)
    return Pair(choose(new.scales, old.scales), offsets)


def _extreme(x: Tensor) -> Tensor:
    """Returns of the last dim the number with the largest magnitude."""
    return x.gather(-1, x.abs().argmax(-1, keepdim=True))[..., 0]


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    """Returns x / y, and 0 where y is 0."""
    return x / torch.where(y == 0, torch.inf, y)
