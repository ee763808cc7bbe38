"""What one thread holds of a tile while tiles are being lowered: registers that are written down when first asked for.

Making registers on demand puts every load and every decode right before the mma that uses it, whatever the order of
the tile operations, so that few are alive at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from lowbit.dialect.bindings import ir
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import Reg, element_bits
from lowbit.passes.lowering import emit

Kind = Literal["scalar", "pair", "word"]


class Fragment:
    """A tile in one thread. Registers have the location at which the tile was made, whoever asks for them.

    `make(i)` writes down register i: slot i ("scalar"), a vector of slots 2i and 2i+1 ("pair"), or the i-th 32-bit
    word of packed codes or of 16-byte elements ("word").
    """

    def __init__(self, reg: Reg, kind: Kind, make: Callable[[int], Any]) -> None:
        self.reg = reg
        self.kind: Kind = kind
        self._make = make
        self._made: dict[int, Any] = {}
        self._location = ir.Location.current

    @property
    def count(self) -> int:
        """Number of registers."""
        if self.kind == "word":
            return self.reg.bits_per_thread // 32
        return self.reg.layout.locals // (2 if self.kind == "pair" else 1)

    def register(self, i: int) -> Any:
        if i not in self._made:
            with self._location:
                self._made[i] = self._make(i)
        return self._made[i]

    def force(self) -> None:
        """Write down what is not there yet."""
        for i in range(self.count):
            self.register(i)

    def scalar(self, slot: int) -> Any:
        """The element in a slot."""
        if self.kind == "scalar":
            return self.register(slot)
        return emit.element(self.register(slot // 2), slot % 2)

    def pair(self, i: int) -> Any:
        """Slots 2i and 2i+1 as a vector."""
        if self.kind == "pair":
            return self.register(i)
        return emit.pair(self.scalar(2 * i), self.scalar(2 * i + 1))

    def operand(self, i: int) -> Any:
        """The i-th register of an operand of 16 or 8 bits, as an mma takes it: a pair, or a word of four bytes."""
        return self.register(i) if self.kind == "word" else self.pair(i)

    def registers(self, kind: Kind) -> list[Any]:
        """All registers as ones of another kind."""
        if kind == "word":
            return [self.register(i) for i in range(self.count)]
        slots = self.reg.layout.locals
        return [self.pair(i) for i in range(slots // 2)] if kind == "pair" else [self.scalar(i) for i in range(slots)]

    def reads_first(self, factor: Fragment) -> bool:
        """Whether `factor`, which is multiplied or added to this tile, is better read before this tile is asked for."""
        return False

    def type(self) -> Any:
        """The type of a register."""
        if self.kind == "word":
            return emit.integer()
        element = ir.Type.parse(str(self.reg.element))
        return ir.VectorType.get([2], element) if self.kind == "pair" else element


def kind_of(reg: Reg) -> Kind:
    """The natural registers of a tile: pairs of 16-bit reals, words of codes and vectors, else scalars."""
    if not isinstance(reg.element, str) or element_bits(reg.element) == 128:
        return "word"
    if reg.element in ("f16", "bf16") and reg.layout.locals % 2 == 0:
        return "pair"
    return "scalar"


Block = tuple[int, int]


def fragment_blocks(layout: Layout, fragment: Layout) -> list[Block]:
    """Returns the place (row, column), in fragments, of each fragment that a thread holds of a tile, in slot order.

    Places count within the thread's part of the tile, along the last two dims.
    """
    rows, columns = fragment.shape
    slots = np.arange(0, layout.locals, fragment.locals)
    place = np.zeros((len(slots), layout.rank), dtype=np.int64)
    for size, divisor, dim, stride in layout.local_digits():
        place[:, dim] += slots // divisor % size * stride
    return [(int(p[-2]) // rows, int(p[-1]) // columns) for p in place]


def column_parts(layout: Layout, fragment: Layout, count: int) -> list[int]:
    """Returns in which of `count` equal parts of the columns each fragment of a tile is, in slot order."""
    columns = [column for _, column in fragment_blocks(layout, fragment)]
    return [column * count // (1 + max(columns)) for column in columns]


def pairs_at(source: Fragment, slots: Sequence[int]) -> Callable[[int], Any]:
    """Returns what makes pair i of these slots; an element that stands for many is doubled once."""
    doubled: dict[int, Any] = {}

    def pair(i: int) -> Any:
        a, b = slots[2 * i], slots[2 * i + 1]
        if a != b:
            return source.pair(a // 2)
        if a not in doubled:
            doubled[a] = emit.pair(source.scalar(a), source.scalar(a))
        return doubled[a]

    return pair
