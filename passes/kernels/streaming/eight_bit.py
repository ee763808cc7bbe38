"""The engines for activations of 8 bits (the family `eight_bit`).

The idea. The packed weight stays as it is, and a register of an 8-bit fragment takes its four codes from two registers
of a 16-bit one: for four bits, one mask. The activation has been written in the column order that this gives
(`dialect.formats.byte_codes`), so it is copied and read as it lies in memory.

    a = bytes of the step's codes      less their zeros, or offset, from 9 tokens on
    for group in step:
        p   = a x^T                at most 128 columns from zero: f8e4m3 in f32, i8 in i32
        p   = p - zero * (sums of x)    where these are not subtracted from codes
        acc = acc + scale * p      in f32

Sums of x have been written with it, and are copied beside it; the scale of a token is for the epilogue. Of i8 p is an
exact integer, whether zeros are subtracted from it or from codes: f32 holds all of 512 columns, and i32 those of a row.

Tensor cores keep 13 to 14 bits of a sum of f8e4m3 products, so these are added to acc in f32 after 128 columns, whether
or not a group ends there. With one scale per row sums of integers stay integers to the end.

Shared memory: beside the stages of the streaming kernel, the sums of x [warps_k, step_k / 32, tokens] in f32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial

from lowbit.dialect.formats.byte_codes import MOST_EXACT, PROMOTED, SUM_COLUMNS, has_signs
from lowbit.dialect.formats.raw_codes import zero_code
from lowbit.dialect.layouts.fragments import MMA_M16N8K32_A, MMA_M16N8K32_B_NK
from lowbit.passes.builder import Tile
from lowbit.passes.kernels.scales.block_scales import Scales
from lowbit.passes.kernels.scales.sum_scaling import SumScaling
from lowbit.passes.kernels.streaming.activations import Activations
from lowbit.passes.kernels.streaming.block import Block
from lowbit.passes.kernels.streaming.engine import Engine, by_chain, side_by_side, zero_sums
from lowbit.passes.kernels.streaming.fragments import sum_fragments, weight_fragments, x_fragments
from lowbit.passes.kernels.streaming.operands import Operands
from lowbit.passes.kernels.streaming.steps import Product


class Bytes(Engine):
    """Multiplies codes as bytes by x of 8 bits."""

    def __init__(self, block: Block, operands: Operands) -> None:
        self.block, self.p, self.plan, s = block, block.p, block.plan, block.schedule
        self.integers, self.sums_of_x = block.spec.byte_type == "i8", operands.sums_of_x
        self.codes, self.bytes = weight_fragments(s), weight_fragments(s, SUM_COLUMNS, MMA_M16N8K32_A)
        self.sums = sum_fragments(s)
        self.row = self.sums.reduce((1,))
        self.scales = Scales(block, operands.scales, self.sums)
        self.scaling = SumScaling(self.scales)
        of_rows = self.plan.arithmetic.zeros_in_decode and not self.plan.steps.groups
        self._row_zeros = self.scales.stored_zeros() if of_rows else []
        self.products = (WgmmaOfBytes if s.wgmma else MmaOfBytes)(block, operands.x)

    def begin(self) -> list[Tile]:
        rows_of_integers = self.integers and not self.plan.steps.groups
        return zero_sums(self.block, self.sums, "i32" if rows_of_integers else "f32")

    def step(self, carried: list[Tile], words: Callable[[], Tile]) -> list[Tile]:
        p, spec = self.p, self.block.spec
        codes = p.view(words(), spec.dtype, self.codes)
        a = p.decode_bytes(codes, self._element, self.bytes, self._zeros(), self._offset)
        self.products.begin_step()
        if not self.plan.steps.groups:
            chains = zip(self.plan.steps.products, by_chain(self.block, carried), strict=True)
            return side_by_side([self._row_step(a, some, *of_chain) for some, of_chain in chains])
        totals = list(carried)
        for chain, group, first, width in self.plan.steps.products:
            for start, columns in self._parts(first, width):
                product = self._as_f32(self._product(a, start, columns))
                if self.sums_of_x:
                    minus = self._minus_stored(partial(self.scales.of_group, group=group))
                    product = p.fma(minus, self.sums_of_x.load(start, columns, self.row), product)
                totals[chain] = self.scaling.add_scaled(totals[chain], product, group, None)
        return totals

    @property
    def _element(self) -> str:
        """The type of bytes."""
        spec = self.block.spec
        if not self.integers:
            return str(spec.x.operand)
        signed = self.plan.arithmetic.zeros_in_decode or has_signs(spec.dtype, "i8", spec.zeros)
        return "i8" if signed else "ui8"

    def _zeros(self) -> list[Tile]:
        """Returns the zeros that are subtracted from codes, as `decode_bytes` takes them."""
        if not self.plan.arithmetic.zeros_in_decode:
            return []
        return self._row_zeros or self.scales.stored_zeros()

    @property
    def _offset(self) -> int:
        """The offset of signed codes that is subtracted from them."""
        arithmetic, spec = self.plan.arithmetic, self.block.spec
        subtracted = arithmetic.subtracts_in_bytes and not arithmetic.zeros_in_decode
        return int(zero_code(spec.dtype)) if subtracted else 0

    def _minus_stored(self, load: Callable[[str], Tile]) -> Tile:
        """Minus the number of every row that bytes are too large by [warps_k, rows, 1]. load: gives zeros, as f32."""
        return self.block.convert.minus_stored(self.scales.layout, load)

    def _row_step(self, a: Tile, some: Product, total: Tile, *sums: Tile) -> list[Tile]:
        """A chain's part of a step where rows have one scale: sums of x are carried beside the products."""
        p, first, width = self.p, some.start, some.columns
        if self.integers:
            total = self.products.added(a, first, width, total)
        else:
            for start, columns in self._parts(first, width):
                total = p.add(total, self._product(a, start, columns))
        of_x = (self.sums_of_x.load(first, width, self.row) for _ in sums if self.sums_of_x)
        return [total, *map(p.add, sums, of_x)]

    def end(self, carried: list[Tile]) -> list[Tile]:
        return [self._end_of_chain(*of_chain) for of_chain in by_chain(self.block, carried)]

    def _end_of_chain(self, total: Tile, *sums: Tile) -> Tile:
        if self.plan.steps.groups:
            return total
        for of_x in sums:
            minus = self._minus_stored(self.scales.of_rows)
            if self.integers:
                minus, of_x = self.p.cast(minus, "i32"), self.p.cast(of_x, "i32")
            total = self.p.fma(minus, of_x, total)
        return self.scaling.whole(self._as_f32(total))

    def _parts(self, start: int, columns: int) -> Iterator[tuple[int, int]]:
        """Yields the columns of each product from zero: where they begin, and how many they are."""
        width = min(columns, MOST_EXACT if self.integers else PROMOTED)
        for part in range(start, start + columns, width):
            yield part, width

    def _product(self, a: Tile, start: int, columns: int) -> Tile:
        """Returns some columns of the step times x."""
        zero = self.p.constant(0.0, "i32" if self.integers else "f32", self.sums)
        return self.products.added(a, start, columns, zero, self.block.schedule.overlap_groups)

    def _as_f32(self, product: Tile) -> Tile:
        return self.p.cast(product, "f32", "signed") if self.integers else product


class Products(ABC):
    """How bytes of weights are multiplied by x."""

    def __init__(self, block: Block, x: Activations) -> None:
        self.block, self.p, self.x = block, block.p, x

    @abstractmethod
    def begin_step(self) -> None:
        """Reads x of a step to registers, where the instruction does not read it by itself."""

    @abstractmethod
    def added(self, a: Tile, start: int, columns: int, total: Tile, overlap: bool = False) -> Tile:
        """Returns a total with columns `start` .. of a step's weights times x. overlap: whether the next product may
        begin before this one has ended."""


class MmaOfBytes(Products):
    """mma.sync, with x as fragments."""

    def __init__(self, block: Block, x: Activations) -> None:
        super().__init__(block, x)
        self.fragments = x_fragments(block.schedule, SUM_COLUMNS, MMA_M16N8K32_B_NK)

    def begin_step(self) -> None:
        self.b = self.p.load_matrix(self.x.buffer, self.block.work.tokens, self.fragments)

    def added(self, a: Tile, start: int, columns: int, total: Tile, overlap: bool = False) -> Tile:
        return self.p.mma(self.p.slice(a, 2, start, columns), self.p.slice(self.b, 2, start, columns), total)


class WgmmaOfBytes(Products):
    """wgmma, which reads x by itself."""

    def begin_step(self) -> None:
        pass

    def added(self, a: Tile, start: int, columns: int, total: Tile, overlap: bool = False) -> Tile:
        return self.p.warpgroup_mma(self.p.slice(a, 2, start, columns), self.x.buffer, start, total, overlap)
