"""The sums of a tile in the prefill kernel for activations of 8 bits: two ways to add up products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from lowbit.dialect.layouts.layout import Layout
from lowbit.passes.builder import Memory, Program, Tile


@dataclass(frozen=True)
class Zeros:
    """What is added for zeros and offsets: a number of every row times one of every token.

    offset     of rows [rows, 1]: minus the zero, or the offset of signed codes
    sums_of_x  of tokens [1, tokens] in shared memory, over the columns of the product
    beside     whether it is added to the sums beside the scaled product, and `offset` holds the scale; else it is added
               to the product before that is scaled
    """

    offset: Tile
    sums_of_x: Memory
    beside: bool = False


@dataclass(frozen=True)
class Product:
    """Some columns of the weight times some columns of x.

    a        the weights
    x        a panel of x in shared memory
    start    the first column of x there
    scale    what the product is multiplied by, for every row; None where nothing is
    zeros    what makes up for zeros and offsets that the weights have not got, where they have not
    """

    a: Tile
    x: Memory
    start: int
    scale: Tile | None
    zeros: Zeros | None = None


class Sums(Protocol):
    """The operations on sums that the kernel needs."""

    def begin_tile(self) -> None:
        """Sets them to zero."""

    def begin_panel(self, products: Sequence[Product]) -> None:
        """Begins products of a panel, the first at least."""

    def begin_others(self) -> None:
        """Begins those that are left."""

    def end_panel(self) -> None:
        """Adds those that have ended."""

    def end_round(self) -> None:
        """Leaves nothing under way that another round does not know of."""

    def end_tile(self) -> Iterator[Tile]:
        """Yields the sums in f32 or i32, of one part of the tokens after the other."""
        ...


class KeptSums:
    """Sums that the tensor core adds up from the first column to the last. at_once: products of a panel, whose weights
    are ready, are begun together."""

    def __init__(self, p: Program, layout: Layout, element: str, at_once: bool = False) -> None:
        self.p, self._sums, self._at_once = p, p.accumulator(layout, element), at_once

    def begin_tile(self) -> None:
        self.p.clear(self._sums)

    def begin_panel(self, products: Sequence[Product]) -> None:
        for some in products:
            joined = some is not products[-1]
            more, held = joined and not self._at_once, joined and self._at_once
            self.p.accumulate(some.a, some.x, some.start, self._sums, row=0, more=more, held=held)

    def begin_others(self) -> None:
        """All are under way."""

    def end_panel(self) -> None:
        """They are added as they end."""

    def end_round(self) -> None:
        """The next round adds to the same sums."""

    def end_tile(self) -> Iterator[Tile]:
        yield self.p.read(self._sums)


@dataclass(frozen=True)
class _Begun:
    """A product that has been begun: where it is, the part of the tokens, and the sums that it will be added to."""

    product: Product
    bank: Tile
    part: int
    sums: Tile


class PromotedSums:
    """Sums in f32 to which products of few columns are added: where groups have scales, or tensor cores keep too few
    bits. There are sums for each of `parts` parts of the tokens.

    A product has registers of its own, a bank. With two banks, one is under way while the one before it is added to the
    sums. That ends with a round: the assembler lets no loop carry a product whose registers others read (C7514).
    """

    def __init__(self, p: Program, layout: Layout, parts: int, element: str, banks: int) -> None:
        self.p, self._layout, self._tokens = p, layout, layout.shape[1]
        self._sums = [p.accumulator(layout) for _ in range(parts)]
        self._banks = [p.accumulator(layout, element) for _ in range(banks)]
        self._under_way: list[_Begun] = []
        self._count = 0
        self._rest: list[tuple[Product, int]] = []

    def begin_tile(self) -> None:
        for sums in self._sums:
            self.p.clear(sums)

    def begin_panel(self, products: Sequence[Product]) -> None:
        first, *self._rest = product(products, range(len(self._sums)))
        self._begin(*first)

    def begin_others(self) -> None:
        for some, part in self._rest:
            self._add_until(len(self._banks) - 1)
            self._begin(some, part)

    def end_panel(self) -> None:
        self._add_until(len(self._banks) - 1)

    def end_round(self) -> None:
        self._add_until(0)

    def end_tile(self) -> Iterator[Tile]:
        for sums in self._sums:
            yield self.p.read(sums)

    def _begin(self, some: Product, part: int) -> None:
        """Begins a product for a part of the tokens, in the bank whose turn it is."""
        bank = self._banks[self._count % len(self._banks)]
        self._count += 1
        self.p.accumulate(some.a, some.x, some.start, bank, row=part * self._tokens, fresh=True)
        self._under_way.append(_Begun(some, bank, part, self._sums[part]))

    def _add_until(self, pending: int) -> None:
        """Adds products until so many are left under way."""
        while len(self._under_way) > pending:
            ended = self._under_way.pop(0)
            zeros = ended.product.zeros
            of_x = self._sums_of_x(zeros, ended.part) if zeros else None  # on its way while the product is waited for
            outer = (zeros.offset, of_x) if zeros and of_x is not None else None
            within = None if zeros and zeros.beside else outer
            self.p.add_scaled(ended.bank, ended.product.scale, ended.sums, len(self._under_way), within)
            if outer and not within:
                self.p.add_outer(*outer, ended.sums)

    def _sums_of_x(self, zeros: Zeros, part: int) -> Tile:
        """The sums of a part of the tokens, as the sums of the product have their columns."""
        return self.p.load(zeros.sums_of_x, (0, part * self._tokens), self._layout.reduce((0,)))
