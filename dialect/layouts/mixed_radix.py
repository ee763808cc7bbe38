"""Numbers in mixed radix whose digits move coordinates: what `dialect.layouts.layout` is made of.

A thread or slot number is a list of modes, most significant first; every mode adds digit * stride to one
coordinate of an index. The modes of all numbers of a layout together tile its shape: sorted by stride, those
of a dim are the mixed-radix digits of its coordinate.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowbit.dialect.errors import LayoutError


class Digit(NamedTuple):
    """A digit of a thread or slot number x: it adds ((x // divisor) % size) * stride to coordinate `dim`."""

    size: int
    divisor: int
    dim: int
    stride: int


class Mode(NamedTuple):
    """A digit whose divisor follows from its place in a list of digits, most significant first.

    A replication digit moves no coordinate: dim -1, stride 0.
    """

    size: int
    dim: int
    stride: int


def replica(size: int) -> Mode:
    """Returns a replication digit."""
    return Mode(size, -1, 0)


def modes_of(shape: tuple[int, ...], mode_shape: tuple[int, ...]) -> list[Mode]:
    """Returns the modes with their dims and strides. Raises LayoutError when they do not tile the shape."""
    modes: list[Mode] = []
    sizes = iter(mode_shape)
    for dim, extent in enumerate(shape):
        rest = extent
        while rest > 1:
            size = next(sizes, 0)
            if size < 1 or rest % size:
                raise LayoutError(f"modes={mode_shape} do not tile shape={shape}")
            rest //= size
            modes.append(Mode(size, dim, rest))
    ones = list(sizes)
    if any(n < 1 for n in shape) or any(size != 1 for size in ones):
        raise LayoutError(f"modes={mode_shape} do not tile shape={shape}")
    return modes + [replica(size) for size in ones]


def merge(modes: Iterable[Mode]) -> list[Mode]:
    """Returns the modes without those of size 1; neighbours that form one longer digit become one mode."""
    merged: list[Mode] = []
    for mode in modes:
        if mode.size == 1:
            continue
        if merged and merged[-1].dim == mode.dim and merged[-1].stride == mode.size * mode.stride:
            mode = mode._replace(size=merged.pop().size * mode.size)
        merged.append(mode)
    return merged


def in_dim_order(modes: Iterable[Mode]) -> list[Mode]:
    """Returns the modes that move coordinates, by dim and from major to minor in it: the order of `mode_shape`."""
    return sorted((m for m in modes if m.dim >= 0), key=lambda m: (m.dim, -m.stride))


def numbered(spatial: list[Mode], local: list[Mode]) -> tuple[tuple[int, ...], ...]:
    """Returns (mode_shape, spatial_modes, local_modes) of merged lists of modes."""
    ordered = in_dim_order(spatial + local)
    number = {mode: i for i, mode in enumerate(ordered)}
    return (
        tuple(mode.size for mode in ordered),
        tuple(number.get(mode, -mode.size) for mode in spatial),
        tuple(number[mode] for mode in local),
    )


def cut(modes: list[Mode], size: int) -> tuple[list[Mode], list[Mode]]:
    """Returns (major, minor) digits, where minor has `size` values. Raises LayoutError if a digit can't be split so."""
    major, minor = list(modes), list[Mode]()
    while size > 1:
        last = major.pop() if major else replica(1)
        part = min(size, last.size)
        if part == 1 or size % part or last.size % part:
            raise LayoutError(f"digits {modes} do not have {size} as the size of their minor part")
        if last.size > part:
            major.append(Mode(last.size // part, last.dim, last.stride * part))
        minor.insert(0, last._replace(size=part))
        size //= part
    return major, minor


def reshaped(modes: Iterable[Mode], old: tuple[int, ...], new: tuple[int, ...]) -> list[Mode]:
    """Returns the modes of a tile of shape `old` as modes of the same elements, row-major, in shape `new`. Raises
    LayoutError when sizes differ or a mode would straddle the new dims."""
    before, after = row_major(old), row_major(new)
    impossible = LayoutError(f"modes of shape {old} do not fit shape {new}")
    if before[0] != after[0] or any(n < 1 for n in new):
        raise impossible
    parts: list[Mode] = []
    for mode in merge(m if m.dim < 0 else Mode(m.size, 0, m.stride * before[m.dim + 1]) for m in modes):
        if mode.dim < 0:
            parts.append(mode)
            continue
        low, high = mode.stride, mode.stride * mode.size
        cuts = [high, *(cut for cut in dict.fromkeys(after) if low < cut < high), low]
        for upper, lower in pairwise(cuts):
            dim = next(d for d in range(len(new)) if after[d + 1] <= lower < after[d])
            if upper % lower or lower % after[dim + 1]:
                raise impossible
            parts.append(Mode(upper // lower, dim, lower // after[dim + 1]))
    return parts


def divisors(modes: list[Mode]) -> list[int]:
    """Returns the weight of every digit: the product of the sizes after it."""
    return list(row_major(tuple(mode.size for mode in modes))[1:])


def row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the product of all sizes, then that of the sizes after each one: (size, *strides)."""
    return tuple(accumulate(reversed(sizes), operator.mul, initial=1))[::-1]


def digits(modes: list[Mode]) -> list[Digit]:
    """Returns the digits that move coordinates, with their divisors."""
    return [Digit(m.size, d, m.dim, m.stride) for m, d in zip(modes, divisors(modes)) if m.dim >= 0]


def coords(modes: list[Mode], rank: int) -> NDArray[np.int64]:
    """Returns what every value of the number with these digits adds to the coordinates: int64 [values, rank]."""
    x = np.arange(prod(mode.size for mode in modes))
    moved = np.zeros((x.size, rank), dtype=np.int64)
    for size, divisor, dim, stride in digits(modes):
        moved[:, dim] += x // divisor % size * stride
    return moved
