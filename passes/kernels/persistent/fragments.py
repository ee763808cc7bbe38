"""Codes become fragments of weights that an engine multiplies: `Fragments`."""

from __future__ import annotations

from collections.abc import Callable

from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.formats.recipes import compute_element, exponent
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A
from lowbit.passes.builder import Memory, Program, Tile
from lowbit.passes.kernels.persistent.group_columns import GroupColumns
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.scaling import Scaled
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters
from lowbit.passes.kernels.scales.panel_scales import PanelScales
from lowbit.passes.kernels.scales.round_scales import RoundScales

_Scale = Callable[[Tile, GroupColumns, int, WeightRegisters, Tile | None], Tile]


class Fragments:
    """Decodes codes in program `p`, and scales them where that is done before they are multiplied.

    plus    a number that is added to scaled weights; in x's type by the multiplication that scales, rounded once
    """

    def __init__(
        self, p: Program, plan: PersistentPlan, scales: RoundScales, of_panel: PanelScales | None, plus: float = 0.0
    ) -> None:
        self.p, self.plan, self.spec, self.scaling = p, plan, plan.spec, plan.scaling
        self.scales, self.of_panel, self.convert = scales, of_panel, scales.convert
        self.compute = compute_element(plan.spec.dtype, plan.spec.act)
        self.layout = plan.tiles.rows.local(1, plan.round.piece // BLOCK_K) * MMA_M16N8K16_A
        self.table: Memory | None = None
        self._plus = plus
        self._scale: dict[Scaled, _Scale] = {
            Scaled.WEIGHTS: self._in_type_of_x,
            Scaled.WEIGHTS_IN_TWO: self._in_two,
            Scaled.WEIGHTS_BY_PANEL: self._by_panel,
            Scaled.WEIGHTS_IN_F32: self._in_f32,
        }

    def fill_table(self) -> None:
        """Fills the table of a format that has one, in shared memory."""
        t = self.spec.dtype
        if t.kind == "table":
            self.table = self.p.alloc_shared("i32", DecodeTable(t, self.compute).shape)
            self.p.fill_table(self.table, t, self.compute, exponent(t, self.compute))

    def of(
        self, codes: Tile, columns: GroupColumns, panel: int, registers: WeightRegisters, outliers: Tile | None = None
    ) -> Tile:
        """Returns the weights of some columns of a panel as they are multiplied. codes: those of its piece; outliers:
        those of the panel, or 0."""
        p, first = self.p, panel * self.plan.schedule.panel_k
        column, within = first + columns.start, first % self.plan.round.piece
        numbers = self._decoded(p.view(codes, self.spec.dtype, self.layout), column, registers)
        numbers = p.slice(numbers, 1, within + columns.start, columns.width)
        scale = self._scale.get(self.scaling.scaled)
        if scale is None:
            return numbers
        sparse = None if outliers is None else p.slice(outliers, 1, columns.start, columns.width)
        return scale(numbers, columns, column, registers, sparse)

    def _decoded(self, codes: Tile, column: int, registers: WeightRegisters) -> Tile:
        """All of a piece as if it were of a column's group: registers that nobody takes are not made."""
        p = self.p
        if self.table:
            return p.lookup(codes, self.table, self.compute)
        shifts: list[Tile] = []
        if self.spec.zeros == "int":  # decoding subtracts these zeros, which costs nothing: q - z is exact
            zero = self.scales.number("zeros", registers.scales, column)
            shifts = [p.cast(self.convert.minus_zero(zero), self.compute)]
        offset = "raw" if self.scaling.raw_codes else "subtracted"
        return p.decode(codes, self.compute, self.convert.exponent, offset, shifts)

    def _in_type_of_x(
        self, numbers: Tile, columns: GroupColumns, column: int, registers: WeightRegisters, sparse: Tile | None
    ) -> Tile:
        """s * q + what is added, in x's type."""
        p = self.p
        if self.scaling.exponent:  # by itself: a scale times it may not be a number of x's type
            numbers = numbers * 2.0**self.scaling.exponent
        scale = p.cast(self.scales.number("scales", registers.scales, column), self.compute)
        added = self._added(scale, column, registers)
        if self._plus:
            added = p.constant(self._plus, self.compute, scale.reg.layout)
        elif added is not None and sparse is not None:
            added = p.add(sparse, added)
        elif sparse is not None:
            added = sparse
        return p.mul(numbers, scale) if added is None else p.fma(numbers, scale, added)

    def _in_two(
        self, numbers: Tile, columns: GroupColumns, column: int, registers: WeightRegisters, sparse: Tile | None
    ) -> Tile:
        """s * q + what is added, in x's type, by two numbers of it that add up to s."""
        p, act = self.p, self.spec.act
        scale = self.scales.number("scales", registers.scales, column)
        added = self._added(scale, column, registers)
        high, low = self.scales.in_two(scale)
        rest = p.mul(numbers, low) if added is None else p.fma(numbers, low, p.cast(added, act))
        return p.fma(numbers, high, rest)

    def _by_panel(
        self, numbers: Tile, columns: GroupColumns, column: int, registers: WeightRegisters, sparse: Tile | None
    ) -> Tile:
        """The same with numbers that the warp has computed for the panel."""
        if self.of_panel is None:
            raise ValueError(f"{self.spec} is scaled by panels, whose numbers nobody computes")
        p, group, number = self.p, columns.start // columns.width, self.of_panel.number
        low = number("low", group)
        if "added" in self.scaling.panel_numbers:
            rest = p.fma(numbers, low, number("added", group))
        else:
            rest = p.mul(numbers, low)
        return p.fma(numbers, number("high", group), rest if sparse is None else p.add(rest, sparse))

    def _in_f32(
        self, numbers: Tile, columns: GroupColumns, column: int, registers: WeightRegisters, sparse: Tile | None
    ) -> Tile:
        """The same in f32, rounded once."""
        p = self.p
        scale = self.scales.number("scales", registers.scales, column)
        if self.scaling.rows_early:
            scale = p.mul(scale, self.scales.number("row_scales", registers.scales, column))
        added = self._added(scale, column, registers)
        if sparse is not None:
            sparse = p.cast(sparse, "f32")
            added = sparse if added is None else p.add(sparse, added)
        numbers, scale = p.cast(numbers, "f32"), self.convert.with_exponent(scale)
        scaled = p.mul(numbers, scale) if added is None else p.fma(numbers, scale, added)
        weights = p.cast(scaled, self.spec.act)
        return weights + self._plus if self._plus else weights

    def _added(self, scale: Tile, column: int, registers: WeightRegisters) -> Tile | None:
        """Returns the number added to scaled codes [rows, 1], in the scale's type: an offset, or - s * z."""
        p, element = self.p, str(scale.reg.element)
        if self.spec.zeros == "float":
            zero = self.scales.number("zeros", registers.scales, column)
            return p.mul(scale, p.cast(self.convert.minus_zero(zero), element))
        if self.spec.zeros != "offset":
            return None
        offset = self.scales.number("offsets", registers.scales, column)
        if self.scaling.rows_early:
            offset = p.mul(offset, self.scales.number("row_scales", registers.scales, column))
        return p.cast(offset, element)
