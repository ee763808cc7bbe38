"""The weight side of the prefill kernel: codes, scales and zeros straight from device memory to registers, and the
fragments that they become."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.formats.recipes import compute_element, exponent
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A
from lowbit.dialect.types import UNIT
from lowbit.passes.builder import Index, Memory, Program, Scalar, Tile
from lowbit.passes.kernels.prefill.access import Access
from lowbit.passes.kernels.prefill.factors import Factors
from lowbit.passes.kernels.prefill.panel_factors import PanelFactors
from lowbit.passes.kernels.prefill.parts import Part
from lowbit.passes.kernels.prefill.plan import PrefillPlan
from lowbit.passes.kernels.prefill.schedule import WARPS


@dataclass
class WeightRegisters:
    """What a thread has of the weight: codes by piece, scales, zeros and offsets by name and number, and where its
    outliers go on."""

    codes: list[Tile]
    factors: dict[str, list[Tile]]
    outliers: list[Tile] = field(default_factory=list[Tile])
    coming: dict[str, Tile] = field(default_factory=dict[str, Tile])  # of the next round, where a round has one number

    def flat(self) -> list[Tile]:
        """All tiles, as a loop carries them."""
        return [*self.codes, *(tile for tiles in self.factors.values() for tile in tiles), *self.outliers]

    def like(self, tiles: list[Tile]) -> WeightRegisters:
        """The inverse of `flat`."""
        codes, rest = tiles[: len(self.codes)], tiles[len(self.codes) :]
        factors: dict[str, list[Tile]] = {}
        for name, some in self.factors.items():
            factors[name], rest = rest[: len(some)], rest[len(some) :]
        return WeightRegisters(codes, factors, rest)


class Weight:
    """Loads and decodes the weight in program `p`."""

    def __init__(self, p: Program, plan: PrefillPlan) -> None:
        self.p, self.plan, self.spec, self.packing = p, plan, plan.spec, plan.spec.packing
        self.compute = compute_element(plan.spec.dtype, plan.spec.act)
        self.factors = Factors(p, plan)
        self.convert = self.factors.convert
        self.of_panel = PanelFactors(p, plan, self.factors) if plan.panel_factors else None
        self.a_layout = plan.rows.local(1, plan.piece // BLOCK_K) * MMA_M16N8K16_A
        packing, units = self.packing, self.packing.units
        shape = (packing.chunks, packing.row_blocks, units * 32)
        strides = (units * 32, packing.chunks * units * 32, 1)
        self._codes = p.global_view(p["codes"], UNIT, shape, strides)
        chunks = plan.piece // packing.chunk
        self._unit_layout = plan.rows.unsqueeze(0).local(chunks, 1, 1).local(1, 1, units).spatial(1, 1, 32)
        self._row_boundary = "none" if plan.covers_rows else "clamp"
        self._k_boundary = "none" if plan.covers_columns else "clamp"
        self.table: Memory | None = None

    def fill_table(self) -> None:
        """The tables of a format and of scales that have one, in shared memory."""
        self.factors.convert.alloc_table()
        self.factors.convert.fill_table()
        t = self.spec.dtype
        if t.kind == "table":
            self.table = self.p.alloc_shared("i32", DecodeTable(t, self.compute).shape)
            self.p.fill_table(self.table, t, self.compute, exponent(t, self.compute))

    # -- to registers

    def load_round(self, row_tile: Scalar, index: Index) -> WeightRegisters:
        """A whole round."""
        codes = [self.codes_at(row_tile, index, piece).load() for piece in range(self.plan.pieces)]
        counts = {name: factor.count for name, factor in self.factors.loaded.items()}
        loaded = {
            name: [self.factors.at(name, row_tile, index, i).load() for i in range(count)]
            for name, count in counts.items()
        }
        return WeightRegisters(codes, loaded)

    def load_next_round(self, registers: WeightRegisters, panel: int, row_tile: Scalar, following: Scalar) -> None:
        """Starts to load what the next round has in place of what this panel was the last to need."""
        plan = self.plan
        piece, rest = divmod((panel + 1) * plan.schedule.panel_k, plan.piece)
        if not rest:
            registers.codes[piece - 1] = self.codes_at(row_tile, following, piece - 1).load()
        for name, factor in self.factors.loaded.items():
            if factor.count > 1:
                for i in factor.ended(plan, panel):
                    registers.factors[name][i] = self.factors.at(name, row_tile, following, i).load()
            elif panel == 0:
                registers.coming[name] = self.factors.at(name, row_tile, following, 0).load()
            elif panel == plan.panels - 1:
                registers.factors[name] = [registers.coming[name]]

    def codes_at(self, row_tile: Scalar, index: Index, piece: int) -> Access:
        """The codes of a piece of a round."""
        plan, chunks = self.plan, self.plan.piece // self.packing.chunk
        offsets = (index * (plan.pieces * chunks) + piece * chunks, row_tile * WARPS, 0)
        boundary = (self._k_boundary, self._row_boundary, "none")
        return Access(self.p, self._codes, offsets, self._unit_layout, boundary)

    # -- to fragments

    def fragments(self, part: Part, panel: int, registers: WeightRegisters, outliers: Tile | None = None) -> Tile:
        """The weights of a part of a panel as they are multiplied; outliers: those of the panel, or 0."""
        p, plan = self.p, self.plan
        first = panel * plan.schedule.panel_k
        piece, within = divmod(first, plan.piece)
        codes = p.view(registers.codes[piece], self.spec.dtype, self.a_layout)
        column = first + part.start
        numbers = self._decoded(codes, column, registers)
        numbers = p.slice(numbers, 1, within + part.start, part.width)
        if not plan.scales_weights:
            return numbers
        sparse = None if outliers is None else p.slice(outliers, 1, part.start, part.width)
        if self.of_panel:
            return self._scaled_as_in_panel(self.of_panel, numbers, part, sparse)
        if plan.scales_in_two:
            return self._scaled_in_two(numbers, column, registers)
        scaled = self._scaled_in_f32 if plan.scales_in_f32 else self._scaled
        return scaled(numbers, column, registers, sparse)

    def _decoded(self, codes: Tile, column: int, registers: WeightRegisters) -> Tile:
        """All of a piece as if it were of a column's group: registers that nobody takes are not made."""
        p = self.p
        if self.table:
            return p.lookup(codes, self.table, self.compute)
        shifts: list[Tile] = []
        if self.spec.zeros == "int":  # decoding subtracts these zeros, which costs nothing: q - z is exact
            zero = self.factors.number("zeros", registers.factors, column)
            shifts = [p.cast(self.convert.minus_zero(zero), self.compute)]
        offset = "raw" if self.plan.raw_codes else "subtracted"
        return p.decode(codes, self.compute, self.convert.exponent, offset, shifts)

    def _scaled(self, numbers: Tile, column: int, registers: WeightRegisters, sparse: Tile | None) -> Tile:
        """s * q + what is added, in x's type."""
        p = self.p
        if self.plan.exponent:  # by itself: a scale times it may not be a number of x's type
            numbers = numbers * 2.0**self.plan.exponent
        scale = p.cast(self.factors.number("scales", registers.factors, column), self.compute)
        added = self._added(scale, column, registers)
        if added is not None and sparse is not None:
            added = p.add(sparse, added)
        elif sparse is not None:
            added = sparse
        return p.mul(numbers, scale) if added is None else p.fma(numbers, scale, added)

    def _scaled_in_two(self, numbers: Tile, column: int, registers: WeightRegisters) -> Tile:
        """s * q + what is added, in x's type, by two numbers of it that add up to s."""
        p, act = self.p, self.spec.act
        scale = self.factors.number("scales", registers.factors, column)
        added = self._added(scale, column, registers)
        high, low = self.factors.in_two(scale)
        rest = p.mul(numbers, low) if added is None else p.fma(numbers, low, p.cast(added, act))
        return p.fma(numbers, high, rest)

    def _scaled_as_in_panel(self, factors: PanelFactors, numbers: Tile, part: Part, sparse: Tile | None) -> Tile:
        """The same with numbers that the warp has computed for the panel."""
        p, group = self.p, part.start // part.width
        low = factors.number("low", group)
        if "added" in self.plan.panel_factors:
            rest = p.fma(numbers, low, factors.number("added", group))
        else:
            rest = p.mul(numbers, low)
        return p.fma(numbers, factors.number("high", group), rest if sparse is None else p.add(rest, sparse))

    def _scaled_in_f32(self, numbers: Tile, column: int, registers: WeightRegisters, sparse: Tile | None) -> Tile:
        """The same in f32, rounded once."""
        p = self.p
        scale = self.factors.number("scales", registers.factors, column)
        if self.plan.scales_rows_early:
            scale = p.mul(scale, self.factors.number("row_scales", registers.factors, column))
        added = self._added(scale, column, registers)
        if sparse is not None:
            sparse = p.cast(sparse, "f32")
            added = sparse if added is None else p.add(sparse, added)
        numbers, scale = p.cast(numbers, "f32"), self.convert.with_exponent(scale)
        scaled = p.mul(numbers, scale) if added is None else p.fma(numbers, scale, added)
        return p.cast(scaled, self.spec.act)

    def _added(self, scale: Tile, column: int, registers: WeightRegisters) -> Tile | None:
        """Returns the number added to scaled codes [rows, 1], in the scale's type: an offset, or - s * z."""
        p, element = self.p, str(scale.reg.element)
        if self.spec.zeros == "float":
            zero = self.factors.number("zeros", registers.factors, column)
            return p.mul(scale, p.cast(self.convert.minus_zero(zero), element))
        if self.spec.zeros != "offset":
            return None
        offset = self.factors.number("offsets", registers.factors, column)
        if self.plan.scales_rows_early:
            offset = p.mul(offset, self.factors.number("row_scales", registers.factors, column))
        return p.cast(offset, element)
