"""Groups with a scale and an offset, or whose scales and offsets are codes: GGUF's K-quants, Q4_1 and the like.

A weight is w = s q + o. With a second level (`lowbit.Bilevel`), s = S sc and o = M m: a block of groups shares S and M,
and every group has codes sc and m. The least squared error is searched for in two steps, as llama.cpp does
(make_qkx2_quants and make_qx_quants in ggml-quants.c), and in two more, which it does not have:

1. For each group, codes are computed for several ranges, and for these codes the s and o of least error. From the best
   of them on, codes and s and o follow each other a few times more (`group_fit`).
2. S and M map the largest s and o of a block to the last code. Each group takes the nearest sc and m.
3. Each group takes the neighbours of sc and m, by one, with which its error is less.
4. With offsets, S and M of least error for all these codes; then step 3 again. Without, that would only make S less, as
   weights that are clipped can't be larger: no gain in output errors.

Scale and offset are rounded to what kernels will multiply with before the codes of the weights are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lowbit.dialect.formats.dtypes import dtype
from lowbit.passes.cpu.group_plans import Ranges
from lowbit.pylib.quantization.calibration import output_errors
from lowbit.pylib.quantization.grid import Grid, each_chunk
from lowbit.pylib.quantization.group_fit import (
    can_be_below_zero,
    fit_of,
    quotient,
    ranges,
    rounded_at_once,
    rounds,
    rounds_at_once,
)
from lowbit.pylib.quantization.losses import POWER, counts, has_correlations, importance_of
from lowbit.pylib.torch_types import TORCH

REFITS = 2  # of step 4; a third gains 0.2 % of the output error
COPIES = 10  # temporaries of the search in f32, for each weight


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
    if grid.config.zeros == "offset" and rounds_at_once(weight, grid):  # by one program, which tries the same ranges
        search = Ranges(tuple(ranges(grid)), rounds(grid))
        codes, *numbers = rounded_at_once(weight, grid, search, POWER, importance)
        return KQuant(codes, Pair(*(Numbers(each, None) for each in numbers)))
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
        best = better_k_rows(grid, weight, hessian, finished(weight, grid, pair), best)
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
        best = search.better(search.rated(best), search.fitted()).pair
    return finished(weight, grid, best)


class _Search:
    """The search in some rows of a weight, in f32."""

    def __init__(self, weight: Tensor, grid: Grid, importance: Tensor | None) -> None:
        self.grid, self.level = grid, grid.config.bilevel
        self.groups, self.counted = grid.groups(weight), counts(weight, grid, importance)
        self.fit = fit_of(self.groups, self.counted, grid)
        self.has_offsets, self.is_signed = grid.config.zeros == "offset", can_be_below_zero(grid)
        self.kind = TORCH[self.level.scale if self.level else grid.config.scale_type]
        codes = dtype(grid.config.scale_type).values() if self.level else None
        self.least, self.most = (0.0, 0.0) if codes is None else (float(codes.min()), float(codes.max()))

    # -- scales and offsets as they would be without codes, [rows, groups]

    def whole_ranges(self) -> tuple[Tensor, Tensor]:
        """Returns scales and offsets with which the levels just span each group."""
        low, high = self.fit.low, self.fit.high
        if self.has_offsets:
            if not self.is_signed:  # 0 is between both, as offsets can't be positive
                low, high = low.clamp(max=0), high.clamp(min=0)
            scales = (high - low) / (self.grid.most - self.grid.least)
            return scales, low - scales * self.grid.least
        scales = self.grid.reach(low, high, 0.0)
        return scales, torch.zeros_like(scales)

    # -- the same as they are stored

    def coded(self, scales: Tensor, offsets: Tensor) -> Pair:
        """Returns scales and offsets as they are stored."""
        return Pair(self._numbers(scales), self._numbers(offsets) if self.has_offsets else None)

    def _numbers(self, values: Tensor) -> Numbers:
        if self.level is None:
            return Numbers(values.to(self.kind).float(), None)
        blocks = values.unflatten(1, (-1, self.level.groups))
        supers = (_extreme(blocks) / (self.least if self.is_signed else self.most)).to(self.kind).float()
        codes = quotient(blocks, supers[..., None]).round_().clamp_(self.least, self.most)
        return Numbers(codes.flatten(1), supers)

    def rated(self, pair: Pair) -> Rated:
        """Returns scales and offsets with the error of each group."""
        return Rated(pair, self.fit.errors(*pair.values()))

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

    def better(self, old: Rated, new: Rated) -> Rated:
        """Returns for each block of groups the pair with the smaller error."""
        size = self.level.groups if self.level else 1
        less = new.errors.unflatten(1, (-1, size)).sum(-1) < old.errors.unflatten(1, (-1, size)).sum(-1)
        errors = torch.where(less.repeat_interleave(size, 1), new.errors, old.errors)
        return Rated(_chosen(less, size, new.pair, old.pair), errors)

    def fitted(self) -> Rated:
        """Returns the pairs that were searched for."""
        best = self.with_neighbours(self.coded(*self.fit.fitted()))
        for _ in range(REFITS if self.level and self.has_offsets else 0):
            best = self.better(best, self.with_neighbours(self.refitted(best.pair)))
        return best

    def refitted(self, given: Pair) -> Pair:
        """Returns a pair with the same codes of scales and offsets, and for each block the S and M of least squared
        error for these and for the codes of the weight; the given ones where S or M would have another sign."""
        of_scales, of_offsets = given.scales, cast(Numbers, given.offsets)
        scales, offsets = of_scales.values[..., None], of_offsets.values[..., None]
        levels = self.grid.nearest(quotient(self.groups - offsets, scales))
        counted = levels * self.counted
        products, sums = (counted * self.groups).sum(-1), counted.sum(-1)
        squares = counted.mul_(levels).sum(-1)
        (count, weights), sc, m = self._sums, of_scales.codes, of_offsets.codes
        aa, ab, bb = (self._by_block(each) for each in (sc**2 * squares, sc * m * sums, m**2 * count))
        ax, bx = (self._by_block(each) for each in (sc * products, m * weights))
        determinant = aa * bb - ab.square()
        found = [quotient(each, determinant).to(self.kind).float() for each in (ax * bb - bx * ab, bx * aa - ax * ab)]
        supers = [cast(Tensor, each.supers) for each in (of_scales, of_offsets)]
        allowed = determinant > 1e-6 * aa * bb
        for new, old in zip(found, supers):
            allowed &= new.sign() == old.sign()
        new_s, new_m = (torch.where(allowed, new, old) for new, old in zip(found, supers))
        return Pair(Numbers(sc, new_s), Numbers(m, new_m))

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """How much all weights of a group count, and the sum of these weights, each [rows, groups]."""
        return self.counted.expand_as(self.groups).sum(-1), (self.groups * self.counted).sum(-1)

    def _by_block(self, x: Tensor) -> Tensor:
        """Returns the sums of each block of groups [rows, blocks] in f64."""
        return x.double().unflatten(1, (-1, self.level.groups if self.level else 1)).sum(-1)


def finished(weight: Tensor, grid: Grid, pair: Pair) -> KQuant:
    """Returns a weight [rows, k] in f32 with the codes that are nearest for a pair."""
    scales, offsets = pair.values()
    groups = grid.groups(weight)
    groups = groups if offsets is None else groups - offsets[..., None]
    return KQuant(grid.encode(quotient(groups, scales[..., None])).flatten(1), pair)


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

