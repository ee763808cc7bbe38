"""How the program for few tokens multiplies codes by x: in f32, in bf16, or in integers.

f32     any codes, decoded
bf16    values of codes from a table, 32 at a time, where the processor multiplies bf16
i16     integer codes as they are stored, 32 at a time, by x in fixed point: whole numbers of 16 bits, in a *unit* that
        every group has, a power of two. Nothing is decoded but by a shift and a mask, and sums are exact

A unit is 2^-14 of the power of two below the largest |x| in a group, or in `Tiling.piece` columns of a long one. So a
number of bf16 is exact down to 2^-7 of the largest, one of f16 down to 2^-4, and others are off by 2^-15 of the largest
at most. No unit is below 2^-125. The offsets of a group are multiplied by sums of the same whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lowbit.dialect.bindings import arith
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.decode import ChunkMap, ChunkReader, Isa, least_code, multiplies_bf16, pair_table
from lowbit.passes.cpu.prepare import Rows
from lowbit.passes.cpu.vector_ops import Value, constant, dot_bf16, dot_i16, f32, fma, i, vec


class Products:
    """Products in f32.

    rows   the prepared activation
    low    what is to be added to a code for its value
    most   tokens for which the program for few is faster than that for many
    sums   vectors that a tile is added up in: 8 of the 16 registers of AVX2. A multiply-add takes 4 cycles and 2 start
           in every one, so fewer would wait for each other. 4 tokens of a row, or 2 of each of two rows
    """

    sums = 4

    def __init__(self, spec: MatmulSpec, isa: Isa) -> None:
        self.spec, self.low = spec, least_code(spec)
        self.most = 4 if multiplies_bf16(spec, isa) else 12
        self.rows = Rows(spec, scaled=_is_integer(spec), sums=spec.zeros != "none" or self.low != 0)

    def zero(self) -> Value:
        """Returns a sum of nothing."""
        return constant(vec(f32()), 0.0)

    def groups(self, chunk_map: ChunkMap) -> list[tuple[int, ...]]:
        """Returns the groups of the elements of each vector of a chunk."""
        return [chunk_map.groups(step, which) for step in range(chunk_map.steps) for which in (0, 1)]

    def codes(self, reader: ChunkReader, number: int) -> Value:
        """Returns a vector of a chunk, ready to be multiplied."""
        step, which = divmod(number, 2)
        return reader.vectors(step)[which]

    def multiply_add(self, codes: Value, x: Value, total: Value) -> Value:
        """Returns total + codes * x."""
        return fma(codes, x, total)

    def total(self, sums: Sequence[Value], chunk_map: ChunkMap) -> Value:
        """Returns the sum of sums, in f32."""
        total = _added(arith.addf, sums)
        late = chunk_map.late_exponent
        return arith.mulf(total, constant(total.type, 2.0**late)) if late else total


class _PairProducts(Products):
    """Of vectors in which the two codes of a word are neighbours."""

    most = 12

    def groups(self, chunk_map: ChunkMap) -> list[tuple[int, ...]]:
        return [chunk_map.pair_groups(step) for step in range(chunk_map.steps)]


class _Bf16Products(_PairProducts):
    """Products in bf16 of a table's values. AVX-512 has room for more sums."""

    sums = 8

    def __init__(self, spec: MatmulSpec, table: NDArray[np.float64]) -> None:
        self.low, self._table = 0, table
        self.rows = Rows(spec, "bf16", paired=True, sums=spec.zeros != "none")

    def codes(self, reader: ChunkReader, number: int) -> Value:
        return reader.pairs(number, self._table)

    def multiply_add(self, codes: Value, x: Value, total: Value) -> Value:
        return dot_bf16(codes, x, total)

    def total(self, sums: Sequence[Value], chunk_map: ChunkMap) -> Value:
        return _added(arith.addf, sums)


class _IntegerProducts(_PairProducts):
    """Products of whole numbers."""

    def __init__(self, spec: MatmulSpec, isa: Isa) -> None:
        self.low, self._isa = least_code(spec), isa
        self.rows = Rows(spec, "i16", paired=True, sums=spec.zeros != "none" or self.low != 0)

    def zero(self) -> Value:
        return constant(vec(i(32)), 0)

    def codes(self, reader: ChunkReader, number: int) -> Value:
        return reader.integers(number)

    def multiply_add(self, codes: Value, x: Value, total: Value) -> Value:
        return arith.addi(total, dot_i16(codes, x, wide=self._isa != "avx2"))

    def total(self, sums: Sequence[Value], chunk_map: ChunkMap) -> Value:
        return arith.sitofp(vec(f32()), _added(arith.addi, sums))


def products_of(spec: MatmulSpec, isa: Isa) -> Products:
    """Returns how a processor multiplies few tokens."""
    if (table := pair_table(spec, isa)) is not None:
        return _Bf16Products(spec, table)
    return _IntegerProducts(spec, isa) if _is_integer(spec) and isa != "generic" else Products(spec, isa)


def _is_integer(spec: MatmulSpec) -> bool:
    return spec.dtype.kind in ("uint", "int")


def _added(add: Callable[[Value, Value], Value], sums: Sequence[Value]) -> Value:
    left = list(sums)
    while len(left) > 1:
        left = [add(a, b) for a, b in zip(left[::2], left[1::2])]
    return left[0]
