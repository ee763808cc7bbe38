"""The weight side of persistent kernels for activations of 8 bits: codes and scales come part by part to registers, and
become bytes (`weight_bytes`)."""

from __future__ import annotations

from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import Layout
from lowbit.passes.builder import Index, Program, Scalar, Tile
from lowbit.passes.kernels.eight_bit_prefill.codes import Codes, HeldCodes, Round, StagedCodes, turn
from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan
from lowbit.passes.kernels.eight_bit_prefill.sums_of_x import Offsets
from lowbit.passes.kernels.eight_bit_prefill.weight_bytes import bytes_from
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.persistent.stores import epilogue_of
from lowbit.passes.kernels.persistent.weight import Finish
from lowbit.passes.kernels.persistent.weight_codes import PackedCodes
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters
from lowbit.passes.kernels.scales.round_scales import RoundScales


class ByteWeight:
    """Loads the weight in program `p`.

    codes    what brings codes. Numbers of groups go straight to registers, as `HeldCodes` do: they take turns there,
             and come from the L2 cache.
    bytes    what makes bytes of them
    offsets  what sums of x are multiplied by, where these make up for zeros
    """

    registers: WeightRegisters

    def __init__(self, p: Program, plan: BytesPlan[PrefillSchedule]) -> None:
        self.p, self.plan = p, plan
        self.scales, packed = RoundScales(p, plan.base), PackedCodes(p, plan.base)
        self.codes: Codes = (
            StagedCodes(p, plan, packed.at, packed.layout) if plan.held.code_stages else HeldCodes(plan, packed.at)
        )
        self.bytes = bytes_from(p, plan, self.codes, self.scales)
        self.offsets = Offsets(p, plan, self.scales)

    def begin(self, row_tile: Scalar, index: Index) -> None:
        """Starts to load the beginning of a tile's first round, which is number `index`; brings the rest nearer."""
        held, loaded = self.plan.held, self.scales.loaded
        codes = self.codes.begin((row_tile, index))
        scales = {
            name: [self.scales.at(name, row_tile, index, i).load() for i in range(held.of(tensor))]
            for name, tensor in loaded.items()
        }
        for name, tensor in loaded.items():
            for i in range(held.of(tensor), tensor.count):
                self.scales.at(name, row_tile, index, i).prefetch()
        self.registers = WeightRegisters(codes, scales)
        self.scales.fill_table()
        self.bytes.fill_table()

    def read_codes(self, panel: int) -> None:
        """Brings the codes of a panel to registers, if it is the first of its piece."""
        piece, within = divmod(panel * self.plan.base.schedule.panel_k, self.plan.base.round.piece)
        if not within:
            self.codes.read(piece)

    def load_later(self, registers: WeightRegisters, panel: int, here: Round, coming: Round) -> None:
        """Starts to load what takes the place of what this panel of the round `here` was the last to need."""
        round_, width, loaded = self.plan.base.round, self.plan.base.schedule.panel_k, self.scales.loaded
        piece, within = divmod((panel + 1) * width, round_.piece)
        if not within:
            self.codes.bring_later(registers, piece - 1, here, coming)
        ended = [(i, name) for name, tensor in loaded.items() for i in tensor.ended(width, panel)]
        for i, name in sorted(ended, key=lambda each: each[0] * loaded[each[1]].columns):
            self._load_later_number(registers, name, i, here, coming)
        for name in (name for name, tensor in loaded.items() if tensor.count == 1):
            if panel == 0:
                registers.coming[name] = self.scales.at(name, *coming, 0).load()
            elif panel == round_.panels - 1:
                registers.scales[name] = [registers.coming[name]]

    def _load_later_number(self, registers: WeightRegisters, name: str, i: int, here: Round, coming: Round) -> None:
        """The same for number i of a tensor that has several in a round."""
        tensor = self.scales.loaded[name]
        if tensor.count == 1:
            return
        held = self.plan.held.of(tensor)
        place, number, round_ = turn(i, held, tensor.count, here, coming)
        registers.scales[name][place] = self.scales.at(name, *round_, number).load()
        if held < tensor.count:  # else it has been loaded
            self.scales.at(name, *coming, i).prefetch()

    def scaled(self, total: Tile, row_tile: Scalar, sums_of_x: Tile | None) -> Tile:
        """Returns the sums of a chain in f32, times the scales of rows, if these have one for all columns. Sums of x
        [1, tokens] make up for zeros of rows, which are integers as the sums are."""
        p, scale = self.p, self.bytes.row_scale(row_tile)
        if sums_of_x is not None:
            total = p.fma(p.cast(self.offsets.of_rows(row_tile), "i32"), p.cast(sums_of_x, "i32"), total)
        total = p.cast(total, "f32", "signed")
        return total if scale is None else p.mul(total, scale)

    def finish_of(self, row_tile: Scalar) -> Finish:
        """Returns what multiplies sums by the scales of rows, if rows have one for all columns, and of tokens. In an
        order of sums chains have been scaled, and scales of tokens come first, as in kernels for few."""
        p, spec, epilogue = self.p, self.plan.spec, epilogue_of(self.p, self.plan.base)

        def row_scaled(total: Tile) -> Tile:
            if not spec.row_scales:
                return total
            first_row = row_tile * (ROWS * self.plan.base.tiles.unit)
            return p.mul(total, epilogue.per_row("row_scales", "f32", total, first_row))

        def finish_in_order(total: Tile, token: Scalar) -> Tile:
            return row_scaled(p.mul(total, self._scales_of_x(token, total.layout.reduce((0,)))))

        def finish(total: Tile, token: Scalar) -> Tile:
            scale = self.bytes.row_scale(row_tile)
            if scale is not None:
                total = p.mul(total, scale)
            return p.mul(row_scaled(total), self._scales_of_x(token, total.layout.reduce((0,))))

        return finish_in_order if self.plan.base.schedule.order else finish

    def _scales_of_x(self, token: Scalar, layout: Layout) -> Tile:
        """The scales [1, tokens] of rows of x, from a token on; of slots, those of the rows that a list names."""
        p, whole = self.p, ("none", "clamp")
        scales = p.global_view(p["x_scales"], "f32", (1, -1), (0, 1), sizes=[p["m"]])
        if self.plan.spec.experts == 1:
            return p.load(scales, (0, token), layout, whole)
        rows = p.global_view(p["rows"], "i32", (1, -1), (0, 1), sizes=[p["m"]])
        return p.gather(scales, (0,), p.load(rows, (0, token), layout, whole))
