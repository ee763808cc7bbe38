"""The kernel of a rotation by a Hadamard matrix, which goes in front of a matmul or behind it.

    y = (x * before) (F (x) H) / sqrt(size) * after                    in f32, rounded once

for each row x [size] of the memory. H is Sylvester's matrix of a power of two, and F a small matrix of signs. Both work
on axes of their own: the columns are an array [len(F), r1, r2, ...], whose radices r are powers of two, and H is the
product of a Sylvester matrix for each of these axes.

    to shared memory: a row, in f32
    for each axis:    a thread takes the numbers along it, transforms them in registers, and puts them back
    to y:             the row

A thread's numbers along an axis are one tile each, so that a butterfly is an addition and a subtraction of tiles.

Shared memory: [len(F), r1, r2, ...] in f32, whose rows have a word more than numbers, against bank conflicts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from lowbit.dialect.layouts.layout import Layout, local

if TYPE_CHECKING:
    from lowbit.passes.builder import Memory, Program, Tile

Signs = Literal["none", "before", "after"]
Factor = tuple[tuple[int, ...], ...]
"""Rows of numbers 1 and -1."""

LEAST_POWER = 16  # of two, for a kernel
MOST_FACTOR = 40  # rows of a factor that are added up in registers
_BITS = 4  # of an axis, where three axes are enough
_VECTOR = 8  # numbers that a thread reads and writes at once: 16 bytes
_MOST_AXES = 3
_MOST_THREADS = 512
_PER_THREAD = 16  # numbers


def axes_of(power: int) -> tuple[int, ...]:
    """Returns the radices of a power of two, the highest first."""
    bits = power.bit_length() - 1
    count = min(_MOST_AXES, -(-bits // _BITS))
    return tuple(1 << (bits + i) // count for i in range(count))


def shared_bytes(factor: int, power: int) -> int:
    """Returns the shared memory that the kernel takes, for a factor of so many rows."""
    radices = axes_of(power)
    return 4 * factor * math.prod(radices[:-1]) * (radices[-1] + 1)


def hadamard_program(element: str, factor: Factor, power: int, signs: Signs = "none") -> Program:
    """Returns the program for rows of len(factor) * power numbers.

    element   "f16" or "bf16": the type of x and y
    factor    F, with at most MOST_FACTOR rows
    power     the rows of H, a power of two of at least LEAST_POWER
    signs     whether x or y is multiplied by the numbers of `signs`, which are 1 and -1

    Parameters: x and y [m, size], m, and with signs `signs` [size], in the type of x.
    """
    from lowbit.passes.builder import Program

    size = len(factor) * power
    threads = min(_MOST_THREADS, max(32, 1 << (size // _PER_THREAD).bit_length() - 1))
    names: dict[str, str] = {"x": "pointer", "y": "pointer", "m": "i32"}
    names |= {} if signs == "none" else {"signs": "pointer"}
    p = Program("hadamard", threads, ("ceil(m / 1)", 1, 1), names)
    with p:
        _Block(p, threads, element, factor, axes_of(power), signs).run()
    return p


class _Block:
    """What one block does for its row."""

    def __init__(
        self, p: Program, threads: int, element: str, factor: Factor, radices: Sequence[int], signs: Signs
    ) -> None:
        self.p, self.threads, self.element, self.factor, self.signs = p, threads, element, factor, signs
        self.shape = (len(factor), *radices)
        self.size = math.prod(self.shape)
        self.start = (0,) * (1 + len(self.shape))

    def run(self) -> None:
        """Transforms the row."""
        p = self.p
        row, within, beyond = _spread(self.shape, self.threads, vector=_VECTOR)
        p.grid_launch_dependents()
        p.grid_wait()
        signs = None
        if self.signs != "none":
            given = p.global_view(p["signs"], self.element, (1, *self.shape))
            signs = p.cast(p.load(given, self.start, row, within), "f32")
        source, target = (p.global_view(p[name], self.element, (-1, *self.shape), sizes=[p["m"]]) for name in "xy")
        first = (p.block_id(0), *(0 for _ in self.shape))
        x = p.cast(p.load(source, first, row, within), "f32")
        x = p.mul(x, signs) if signs is not None and self.signs == "before" else x
        buffer = p.alloc_shared("f32", (1, *self.shape), self._strides())
        p.store(x, buffer, self.start, beyond)
        p.barrier()
        for axis in range(len(self.shape)):
            self._transform(buffer, axis)
        y = p.load(buffer, self.start, row, within) * (1 / math.sqrt(self.size))
        y = p.mul(y, signs) if signs is not None and self.signs == "after" else y
        p.store(p.cast(y, self.element), target, first, beyond)

    def _strides(self) -> tuple[int, ...]:
        """Returns those of the row in shared memory."""
        strides = [1]
        for size in (self.shape[-1] + 1, *self.shape[-2::-1]):
            strides.append(strides[-1] * size)
        return tuple(reversed(strides))

    def _transform(self, buffer: Memory, axis: int) -> None:
        """Multiplies the numbers along one axis of a row in shared memory by the matrix of the axis."""
        p, size = self.p, self.shape[axis]
        if size == 1:
            return
        layout, within, beyond = _spread(self.shape, self.threads, axis)
        places = [tuple(i if dim == axis + 1 else 0 for dim in range(len(self.start))) for i in range(size)]
        numbers = [p.load(buffer, place, layout, within) for place in places]
        made = _added_up(p, numbers, self.factor) if axis == 0 else _butterflies(p, numbers)
        for place, tile in zip(places, made):
            p.store(tile, buffer, place, beyond)
        p.barrier()


def _spread(
    shape: Sequence[int], threads: int, axis: int | None = None, vector: int = 1
) -> tuple[Layout, tuple[str, ...], tuple[str, ...]]:
    """Returns how the threads of a block share out an array, without one of its axes, with what a load and a store do
    beyond its end: the first axis is the one that threads may not fill.

    vector   numbers side by side in the last axis that a thread has
    """
    local_sizes, spatial_sizes = [1] * len(shape), [1] * len(shape)
    axes = [dim for dim in reversed(range(len(shape))) if dim != axis]
    for dim in axes:
        size = shape[dim] // (vector if dim == len(shape) - 1 else 1)
        spatial_sizes[dim] = threads if dim == axes[-1] else min(threads, size)
        local_sizes[dim] = -(-size // spatial_sizes[dim])
        threads //= spatial_sizes[dim]
    layout = local(1, *local_sizes).spatial(1, *spatial_sizes).local(*(1 for _ in shape), vector)
    ends = layout.shape[1:]
    ragged = [dim != axis and end != size for dim, (end, size) in enumerate(zip(ends, shape))]
    within, beyond = (("none", *(word if r else "none" for r in ragged)) for word in ("zero", "skip"))
    return layout, within, beyond


def _butterflies(p: Program, numbers: list[Tile]) -> list[Tile]:
    """Returns Sylvester's matrix times a power of two of numbers."""
    if len(numbers) == 1:
        return numbers
    half = len(numbers) // 2
    low, high = numbers[:half], numbers[half:]
    sums, differences = ([turn(a, b) for a, b in zip(low, high)] for turn in (p.add, p.sub))
    return [*_butterflies(p, sums), *_butterflies(p, differences)]


def _added_up(p: Program, numbers: list[Tile], factor: Factor) -> list[Tile]:
    """Returns numbers times a matrix of signs."""
    made: list[Tile] = []
    for column in zip(*factor):
        total = numbers[0] if column[0] > 0 else p.neg(numbers[0])
        for sign, number in zip(column[1:], numbers[1:]):
            total = p.add(total, number) if sign > 0 else p.sub(total, number)
        made.append(total)
    return made
