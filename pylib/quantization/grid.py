"""The numbers that codes stand for: w = scale * (level - zero), with scales and zeros as they are stored.

A `Grid` does everything on whole chunks of rows: it rounds to the nearest level, and it finds the scale and the zero
with which the levels span a range. All of that is in f32, with scales and zeros that are rounded to their types before
codes are computed: what is quantized here is what a kernel will multiply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.formats.dtypes import DType
from lowbit.pylib.quantization.cells import Cells
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.weights.packed import TORCH

LEAST_SCALE = {"f16": 2.0**-24, "bf16": 2.0**-126, "f32": 2.0**-126, "e8m0": 2.0**-126, "e4m3": 2.0**-9}
EXPONENT, FRACTION = 0x7F800000, 23  # the exponent's bits of an f32, and how many bits are below
FLAT = 1024  # a scale with float zeros is at least the largest magnitude divided by this: zeros stay small
TEMPORARIES = 256 << 20  # bytes that a method may use at a time beyond its result
CACHED = 16 << 20  # the same on a CPU: a quarter of the time of more, which its caches do not hold


Result = TypeVar("Result")


class Codes(NamedTuple):
    """Some rows of a quantized weight: codes [rows, k]; scales and zeros [rows, groups] in f32, rounded to their types.

    Without zeros the zeros are 0.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor


class _Straight(torch.autograd.Function):
    """Rounding whose gradient is that of the identity: the straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def straight(x: Tensor, rounded: Tensor) -> Tensor:
    """Returns `rounded`, through which gradients pass to x as if it were x."""
    return _Straight.apply(x, rounded) if x.requires_grad else rounded  # type: ignore[return-value]


class Grid:
    """The grid of a configuration, for a weight with k columns on a device.

    least, most   the range of the levels
    """

    def __init__(self, config: QuantConfig, k: int, device: torch.device) -> None:
        self.config, self.k, self.device = config, k, device
        self.group_size = config.group_size or k
        self.integer = config.dtype.kind in ("uint", "int")
        self.code_type = torch.int8 if config.dtype.kind == "int" else torch.uint8
        self.least, self.most = _ends(config.dtype)
        if not self.integer:
            self._values = torch.from_numpy(np.nan_to_num(config.dtype.values())).float().to(device)
            bounds, codes = _decisions(config)
            self._cells, self._codes = Cells(torch.from_numpy(bounds).to(device)), torch.from_numpy(codes).to(device)
            self._levels = self._values[self._codes.int()]  # in ascending order

    def groups(self, weight: Tensor) -> Tensor:
        """Returns a weight [rows, k] as [rows, groups, group_size]."""
        return weight.unflatten(1, (-1, self.group_size))

    def encode(self, x: Tensor) -> Tensor:
        """Returns the codes of the levels nearest to x; ties go to the even code."""
        if self.integer:
            return x.round().clamp_(self.least, self.most).to(self.code_type)
        return taken(self._codes, self._cells.find(x))

    def decode(self, codes: Tensor) -> Tensor:
        """Returns the levels that codes stand for, in f32: a new tensor."""
        return codes.to(torch.float32, copy=True) if self.integer else taken(self._values, codes.int())

    def nearest(self, x: Tensor) -> Tensor:
        """Returns the levels nearest to x; x may be overwritten."""
        if self.integer:
            return x.round_().clamp_(self.least, self.most)
        return self._nearest_float(x) if self.config.dtype.mantissa else taken(self._levels, self._cells.find(x))

    def _nearest_float(self, x: Tensor) -> Tensor:
        """Returns the levels of a float format with a mantissa that are nearest to x, in place of x.

        Between two powers of two the levels are multiples of a quantum. A sum in f32 whose last bit is a quantum rounds
        to it, and ties go to the even multiple, which has the even code. On a CPU that takes a tenth of the time of
        looking x up among the levels.
        """
        dtype = self.config.dtype
        least, most = (127 + power << FRACTION for power in (1 - dtype.bias, math.frexp(self.most)[1] - 1))
        power = (x.view(torch.int32) & EXPONENT).clamp_(least, most).view(torch.float32)  # not above |x|
        large = 1.5 * 2.0 ** (FRACTION - dtype.mantissa)  # the last bit of so many powers is the quantum
        return x.add_(power, alpha=large).sub_(power, alpha=large).clamp_(self.least, self.most)

    def two_nearest(self, x: Tensor) -> Tensor:
        """Returns the levels nearest and second nearest to x, in a last dimension."""
        if self.integer:
            first = x.round().clamp_(self.least, self.most)
            return torch.stack([first, _neighbour(first, x > first, self.least, self.most)], dim=-1)
        first = self._cells.find(x)
        second = _neighbour(first, x > taken(self._levels, first), 0, len(self._levels) - 1)
        return taken(self._levels, torch.stack([first, second], dim=-1))

    def quantize(self, weight: Tensor, scales: Tensor, zeros: Tensor) -> Codes:
        """Returns the nearest codes of a weight [rows, k] for scales and zeros [rows, groups]."""
        x = self.groups(weight) / scales[..., None] + zeros[..., None]
        return Codes(self.encode(x).flatten(1), scales, zeros)

    def dequantize(self, quantized: Codes, out: Tensor | None = None) -> Tensor:
        """Returns the weight [rows, k] in f32; out: where to, or None."""
        codes = quantized.codes
        values = self.decode(codes) if out is None else out.copy_(codes if self.integer else self.decode(codes))
        groups = self.groups(values)
        if self.config.zeros != "none":
            groups = groups.sub_(quantized.zeros[..., None])
        return groups.mul_(quantized.scales[..., None]).flatten(1)

    def errors(self, groups: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Returns scale * (nearest level - zero) - w for weights [rows, groups, group_size]."""
        x = groups / scales[..., None]
        if self.config.zeros != "none":
            x += zeros[..., None]
        x = self.nearest(x)
        if self.config.zeros != "none":
            x -= zeros[..., None]
        return x.mul_(scales[..., None]).sub_(groups)

    def fit(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Returns scales and zeros with which the levels span low..high, each [rows, groups].

        Where the zero is fixed, the scale is the least one that clips neither end; where low is above high, the levels
        run from high down to low, by a scale below 0.
        """
        if self.config.zeros == "none" or self.config.symmetric:
            middle = self._middle()
            scales = self._round_scales(self.reach(torch.minimum(low, high), torch.maximum(low, high), middle))
            return torch.where(low > high, -scales, scales), torch.full_like(scales, middle)
        if self.config.zeros == "int":  # 0 stays exact, and the zero within the codes
            low, high = low.clamp(max=0), high.clamp(min=0)
        scales = (high - low) / ((self.most - self.least) or 1.0)
        if self.config.zeros == "float":
            scales = torch.maximum(scales, torch.maximum(high.abs(), low.abs()) / FLAT)
        scales = self._round_scales(scales)
        return scales, self.round_zeros(self.least - low / scales)

    @property
    def has_a_longer_side(self) -> bool:
        """Whether the levels reach farther on one side of a fixed zero, so that scales of either sign are of use."""
        if not (self.config.zeros == "none" or self.config.symmetric):
            return False
        middle, signed = self._middle(), self.config.scale_type in ("f16", "bf16", "f32")
        return signed and middle - self.least != self.most - middle

    def _middle(self) -> float:
        """Returns the zero of a grid whose zeros are all the same."""
        if self.config.zeros == "none":
            return 0.0
        return (self.least + self.most + (self.config.zeros == "int")) / 2

    def reach(self, low: Tensor, high: Tensor, zero: float) -> Tensor:
        """Returns the least scale with which no end of low..high is clipped."""
        below, above = zero - self.least, self.most - zero
        if self.config.scale_type == "e8m0" and self.config.clip in ("max", "ocp"):
            # MX: 2^(floor(log2 max|w|) - floor(log2 of the largest level)).
            low, high = -_power_below(-low), _power_below(high)
            ends = torch.tensor([below, above], dtype=torch.float32, device="cpu")
            below, above = _power_below(ends).tolist()
        reach = torch.zeros_like(high)
        if above > 0:
            reach = torch.maximum(reach, high / above)
        if below > 0:
            reach = torch.maximum(reach, -low / below)
        return reach

    def _round_scales(self, scales: Tensor) -> Tensor:
        """Returns scales in the precision of their type: the nearest, of powers of two the next one above."""
        kind = self.config.scale_type
        bounded = scales.clamp(min=LEAST_SCALE[kind])
        if kind == "e8m0":
            below = _power_below(bounded)
            return straight(scales, torch.where(below < bounded, 2 * below, below).detach())
        return straight(scales, bounded.detach().to(TORCH[kind]).float())

    def round_zeros(self, zeros: Tensor) -> Tensor:
        """Returns zeros in the precision of their type."""
        if self.config.zeros == "int":
            return straight(zeros, zeros.detach().round().clamp(self.least, self.most))
        # Beside 8-bit scales zeros have the activation's type: bf16 values are exact in f16, too.
        kind = self.config.scale_type if self.config.scale_type in ("f16", "f32") else "bf16"
        return straight(zeros, zeros.detach().to(TORCH[kind]).float())


def taken(table: Tensor, at: Tensor) -> Tensor:
    """Returns the numbers of a table at these places; on a CPU in a fifth of the time of indexing."""
    return table.index_select(0, at.flatten()).view(at.shape)


def _neighbour(at: Tensor, above: Tensor, least: float, most: float) -> Tensor:
    """Returns the next number above or below each of some numbers; at the ends that which there is."""
    above = (above | (at == least)) & (at < most)
    return torch.where(above, at + 1, at - 1).clamp_(min=least)


def each_chunk(work: Callable[[slice], Result], weight: Tensor, copies: int) -> list[Result]:
    """Returns what a function gives for each of the slices of `chunks`, in order.

    On a CPU, each of torch's threads works on a chunk of its own. A method runs thousands of small operations; were
    each of them cut into parts, all threads would have to wait for the last one as often, and on a busy machine that
    one is not running.
    """
    slices, threads = list(chunks(weight, copies)), torch.get_num_threads()
    if weight.device.type != "cpu" or min(threads, len(slices)) < 2:
        return [work(rows) for rows in slices]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(torch.no_grad()(work), slices))
    finally:
        torch.set_num_threads(threads)  # that of a worker counts for threads that torch starts later


def chunks(weight: Tensor, copies: int) -> Iterator[slice]:
    """Yields slices of a weight's rows; so many copies in f32 of each fit into the memory for temporaries."""
    rows, k = weight.shape
    size = max(1, (CACHED if weight.device.type == "cpu" else TEMPORARIES) // (4 * copies * k))
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))


def by_chunks(method: Callable[[Tensor], Codes], weight: Tensor, copies: int) -> Codes:
    """Returns what a method gives for a weight [rows, k], which it gets in f32 and chunk by chunk."""
    parts = each_chunk(lambda rows: method(weight[rows].float().contiguous()), weight, copies)
    codes, scales, zeros = (torch.cat(tensors) if len(parts) > 1 else tensors[0] for tensors in zip(*parts))
    return Codes(codes, scales, zeros)


def _power_below(x: Tensor) -> Tensor:
    """Returns the largest power of two that is not above x, for x > 0; else 0."""
    mantissa, exponent = torch.frexp(x)
    return torch.where(x > 0, torch.ldexp(torch.ones_like(mantissa), exponent - 1), 0.0)


@lru_cache(maxsize=256)
def _ends(kind: DType) -> tuple[float, float]:
    """Returns the least and the largest level."""
    values = kind.values()
    finite = values[np.isfinite(values)]
    return float(finite.min()), float(finite.max())


def _decisions(config: QuantConfig) -> tuple[Any, Any]:
    """Returns the bounds between neighbouring levels and the code of each level, in ascending order.

    A bound is the largest number in f32 that belongs to the lower level: the middle, if a tie goes there, or below it.
    """
    values = config.dtype.values()
    codes = np.flatnonzero(np.isfinite(values))
    codes = codes[np.unique(values[codes], return_index=True)[1]]
    levels = values[codes]
    middles, tie_goes_up = (levels[1:] + levels[:-1]) / 2, codes[:-1] % 2 == 1
    bounds = middles.astype(np.float32)
    above = (bounds > middles) | ((bounds == middles) & tie_goes_up)
    bounds[above] = np.nextafter(bounds[above], np.float32(-np.inf))
    return bounds, codes.astype(np.uint8)
