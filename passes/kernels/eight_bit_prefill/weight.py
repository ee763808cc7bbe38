"""The weight side of the prefill kernel for activations of 8 bits: fragments of bytes, and scales of products."""

from __future__ import annotations

from lowbit.dialect.formats.byte_codes import SUM_COLUMNS, byte_exponent
from lowbit.dialect.layouts.fragments import MMA_M16N8K32_A
from lowbit.passes.builder import Index, Program, Scalar, Tile
from lowbit.passes.kernels.eight_bit_prefill.codes import Codes, HeldCodes, Round, StagedCodes, turn
from lowbit.passes.kernels.eight_bit_prefill.plan import Columns, EightBitPlan
from lowbit.passes.kernels.prefill.weight import Weight, WeightRegisters
from lowbit.passes.kernels.scales_zeros import ScalesZeros


class EightBitWeight(Weight):
    """Loads and decodes the weight in program `p`.

    codes    what brings codes. Numbers of groups go straight to registers, as `HeldCodes` do: they take turns there,
             and come from the L2 cache.
    """

    plan: EightBitPlan
    codes: Codes

    def __init__(self, p: Program, plan: EightBitPlan) -> None:
        super().__init__(p, plan)
        self.convert = ScalesZeros(p, plan.spec, power=byte_exponent(plan.spec.dtype, plan.spec.byte_type))
        self._bytes_layout = plan.rows.local(1, plan.piece // SUM_COLUMNS) * MMA_M16N8K32_A
        if plan.code_stages:
            self.codes = StagedCodes(p, plan, self.codes_at, self._unit_layout)
        else:
            self.codes = HeldCodes(plan, self.codes_at)

    # -- to registers

    def begin_round(self, row_tile: Scalar, index: Index) -> WeightRegisters:
        """The beginning of a tile's first round, which is number `index`; the rest is brought nearer."""
        plan, loaded = self.plan, self.factors.loaded
        codes = self.codes.begin((row_tile, index))
        factors = {
            name: [self.factors.at(name, row_tile, index, i).load() for i in range(plan.held(factor.count))]
            for name, factor in loaded.items()
        }
        for name, factor in loaded.items():
            for i in range(plan.held(factor.count), factor.count):
                self.factors.at(name, row_tile, index, i).prefetch()
        return WeightRegisters(codes, factors)

    def read_codes(self, panel: int) -> None:
        """Brings the codes of a panel to registers, if it is the first of its piece."""
        piece, within = divmod(panel * self.plan.schedule.panel_k, self.plan.piece)
        if not within:
            self.codes.read(piece)

    def load_later(self, registers: WeightRegisters, panel: int, here: Round, coming: Round) -> None:
        """Starts to load what takes the place of what this panel of the round `here` was the last to need."""
        plan, panel_k = self.plan, self.plan.schedule.panel_k
        piece, within = divmod((panel + 1) * panel_k, plan.piece)
        if not within:
            self.codes.bring_later(registers, piece - 1, here, coming)
        ended = [(i, name) for name, factor in self.factors.loaded.items() for i in factor.ended(plan, panel)]
        for i, name in sorted(ended, key=lambda each: each[0] * self.factors.loaded[each[1]].columns):
            self._load_later_factor(registers, name, i, here, coming)
        for name in (name for name, factor in self.factors.loaded.items() if factor.count == 1):
            if panel == 0:
                registers.coming[name] = self.factors.at(name, *coming, 0).load()
            elif panel == plan.panels - 1:
                registers.factors[name] = [registers.coming[name]]

    def _load_later_factor(self, registers: WeightRegisters, name: str, i: int, here: Round, coming: Round) -> None:
        """The same for number i of a factor that has several in a round."""
        count = self.factors.loaded[name].count
        if count == 1:
            return
        place, number, round_ = turn(i, self.plan.held(count), count, here, coming)
        registers.factors[name][place] = self.factors.at(name, *round_, number).load()
        self.factors.at(name, *coming, i).prefetch()

    # -- to fragments

    def bytes_of(self, columns: Columns, panel: int, registers: WeightRegisters) -> Tile:
        """The weights of a product, as bytes."""
        p, plan, spec = self.p, self.plan, self.spec
        piece, first = divmod(panel * plan.schedule.panel_k, plan.piece)
        codes = p.view(self.codes.of(registers, piece), spec.dtype, self.a_layout)
        element, zeros = spec.x.operand, None
        if spec.compute == "i8" and not plan.has_signs:
            element = "ui8"
        if spec.zeros == "int":
            loaded = registers.factors["zeros"][columns.group % plan.held_groups]
            zeros = p.reshape(loaded, self.factors.row_layout.shape)
        decoded = p.decode_bytes(codes, element, self._bytes_layout, zeros, plan.offset)
        return p.slice(decoded, 1, first + columns.start, columns.width)

    def scale_of(self, columns: Columns, registers: WeightRegisters) -> Tile | None:
        """Returns the scale of a product for every row; None where rows have one scale for all columns."""
        if not self.plan.groups:
            return None
        return self._scale(registers.factors["scales"][columns.group % self.plan.held_groups])

    def row_scale(self, row_tile: Scalar) -> Tile:
        """Returns the scales of the sums over all of k, where there is one scale per row."""
        return self._scale(self.factors.rows_at(self.spec.slot("scales"), row_tile).load())

    def _scale(self, loaded: Tile) -> Tile:
        """Scales [rows, 1] in f32, times the power of two that bytes leave out."""
        scale = self.convert.as_f32(loaded, self.spec.scale)
        return self.convert.with_exponent(self.p.reshape(scale, self.factors.row_layout.shape))
