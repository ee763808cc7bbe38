"""Scales and zero points as tiles of f32, and what decoding leaves for them to do."""

from __future__ import annotations

from collections.abc import Callable

from lowbit.dialect.bilevel import Bilevel, least_code
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.formats.raw_codes import raw_exponents
from lowbit.dialect.formats.recipes import compute_element, exponent
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.ops import raised_power
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import TensorSlot
from lowbit.passes.builder import Memory, Program, Tile
from lowbit.passes.kernels.requirements import scale_table

OfBlock = Callable[[str, Bilevel], Tile]
"""Gives the numbers of a second level, by name, as f32."""


class ScaleConversion:
    """Scales and zeros as f32 tiles."""

    def __init__(
        self, p: Program, spec: MatmulSpec, offset: float = 0.0, raw: bool = False, power: int | None = None
    ) -> None:
        """offset: by how much the codes are too large that are multiplied; raw: whether they are subnormals; power: the
        power of two that decoding leaves out, None: that of decoding to the activation's type."""
        self.p, self.spec, self.offset, self.raw = p, spec, offset, raw
        self._table: Memory | None = None
        self.multiplied = False  # whether a second level's numbers come with `minus_product` in place of B
        self.exponent = exponent(spec.dtype, compute_element(spec.dtype, spec.act)) if power is None else power

    def alloc_table(self) -> list[Memory]:
        """The buffer in shared memory of the table in which scales are places, if they are."""
        if table := scale_table(self.spec):
            self._table = self.p.alloc_shared("i32", table.shape)
        return [self._table] if self._table else []

    def fill_table(self) -> None:
        """Fills this buffer, if there is one, by all threads of the block."""
        if self._table and (table := scale_table(self.spec)):
            self.p.fill_table(self._table, table.format, table.element)

    @staticmethod
    def element(kind: str) -> str:
        """The element type in memory of scales or zeros of a kind."""
        return ELEMENTS[kind].mlir

    def as_f32(self, tile: Tile, kind: str) -> Tile:
        return self.p.cast(tile, "f32", {"e4m3": "e4m3", "e8m0": "e8m0", "u8": "unsigned"}.get(kind, "float"))

    def two_level(self, slot: TensorSlot, tile: Tile, of_block: OfBlock) -> Tile:
        """Numbers of a slot as f32: where they are codes, S * (code - B) or S * code + O, where the product is rounded
        before the sum. tile: from the slot's tensor in memory."""
        bilevel = self.spec.bilevel
        if bilevel is None or not slot.code:
            return self.as_f32(tile, slot.storage)
        values = self._scaled(slot, tile, bilevel, of_block)
        return self.p.add(values, of_block(f"{slot.role}_offsets", bilevel)) if bilevel.offsets else values

    def _scaled(self, slot: TensorSlot, tile: Tile, bilevel: Bilevel, of_block: OfBlock) -> Tile:
        """S * (code - B)."""
        if slot.shared and bilevel.scale == "f16":
            return self._scaled_at_once(slot, tile, bilevel, of_block)
        values = self._codes(slot, tile, bilevel)
        if bilevel.zeros:
            values = self.p.sub(values, of_block(f"{slot.role}_zeros", bilevel))
        return self.p.mul(values, of_block(f"{slot.role}_scales", bilevel))

    def _scaled_at_once(self, slot: TensorSlot, tile: Tile, bilevel: Bilevel, of_block: OfBlock) -> Tile:
        """The same by one fma, S * code - S * B or S * (power + code) - S * power. What is subtracted is one number for
        all codes of a block, and is exact: a product of two numbers of f16 has 22 bits."""
        scale, power = of_block(f"{slot.role}_scales", bilevel), raised_power(slot.bit)
        raised = self._raised(slot, tile)
        if not bilevel.zeros:
            return self.p.fma(raised, scale, scale * -power)
        zero = of_block(f"{slot.role}_zeros", bilevel)
        return self.p.fma(raised - power, scale, zero if self.multiplied else self.minus_product(scale, zero))

    def minus_product(self, scale: Tile, zero: Tile) -> Tile:
        """- S * B."""
        return self.p.neg(scale * zero)

    def _codes(self, slot: TensorSlot, tile: Tile, bilevel: Bilevel) -> Tile:
        """The numbers that codes stand for before they are scaled."""
        if slot.shared:
            return self._raised(slot, tile) - raised_power(slot.bit)
        if self._table:
            return self.p.lookup_bytes(tile, self._table)
        if bilevel.table:
            return self.p.look_up(tile, dtype(slot.code, bilevel.table))
        values = self.as_f32(tile, slot.storage)
        if slot.storage == "u8" and (least := least_code(slot.code)):
            values = self.p.add(values, self.p.constant(least, "f32", values.layout))
        return values

    def _raised(self, slot: TensorSlot, tile: Tile) -> Tile:
        """Codes from bytes that they share, plus a power of two."""
        return self.p.raise_bits(tile, slot.bit, slot.bits)

    def with_exponent(self, scale: Tile, sign: int = 1) -> Tile:
        """The scale times the power of two that decoding left out; with sign -1, divided by it."""
        upper, lower = (2.0 ** (sign * e) for e in self.exponents)
        if upper == lower == 1.0:
            return scale
        return self.p.mul(scale, self.p.constant(upper, "f32", scale.layout, lower if lower != upper else None))

    @property
    def exponents(self) -> tuple[int, int]:
        """The power of two that decoding left out, in the first eight rows of a block of 16 and in the others."""
        return raw_exponents(self.spec.dtype) if self.raw else (self.exponent, self.exponent)

    def minus_zero(self, stored: Tile) -> Tile:
        """-z, and minus the offset; integer zeros are stored from the format's least value up."""
        p, layout = self.p, stored.layout
        minus = p.mul(stored, p.constant(-1.0, "f32", layout))
        least = float(self.spec.dtype.values().min()) if self.spec.zeros == "int" else 0.0
        more = -least - self.offset
        return p.add(minus, p.constant(more, "f32", layout)) if more else minus

    def minus_stored(self, layout: Layout, load: Callable[[str], Tile]) -> Tile:
        """Returns minus the number that bytes are too large by, codes as they are stored: the zero of a group, or the
        offset of signed codes, divided by the power of two that bytes leave out. load: gives zeros, as f32. layout: of
        these."""
        minus = self.p.constant(-self.offset, "f32", layout)
        return self.with_exponent(self.minus_zero(load("zeros")) if self.spec.zeros != "none" else minus, -1)

    def beside(self, scale: Tile, load: Callable[[str], Tile]) -> Tile:
        """Returns what sums of x are multiplied by beside a scale, or what is added to scaled weights.
        load: gives zeros and offsets, by name, as f32."""
        p, zeros = self.p, self.spec.zeros
        if zeros == "offset":
            return self.with_code_offset(load("offsets"), scale)
        if zeros == "none":
            return p.mul(scale, p.constant(-self.offset, "f32", scale.layout))
        return p.mul(scale, self.minus_zero(load("zeros")))

    def with_code_offset(self, o: Tile, scale: Tile) -> Tile:
        """An offset o, less the scaled number by which the codes are too large that are multiplied."""
        p = self.p
        return p.fma(scale, p.constant(-self.offset, "f32", scale.layout), o) if self.offset else o
