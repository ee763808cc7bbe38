"""How codes become bytes that an engine multiplies: as they are, or scaled and rounded.

Where scales of groups are folded into weights, fragments are those of the prefill kernel for f16, scaled and rounded as
`dequantize` rounds them, and then rounded to the type of products; in i8 scaled and rounded at once, where that is done
in f16. What is left for sums is the scale of the row, so the tensor core adds up all columns.
"""

from __future__ import annotations

import math
from typing import Protocol

from lowbit.dialect.formats.byte_codes import ROUNDER, SUM_COLUMNS, byte_exponent
from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A, MMA_M16N8K32_A
from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.eight_bit_prefill.codes import Codes
from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan
from lowbit.passes.kernels.persistent.fragments import Fragments
from lowbit.passes.kernels.persistent.group_columns import GroupColumns
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters
from lowbit.passes.kernels.scales.conversion import ScaleConversion
from lowbit.passes.kernels.scales.round_scales import RoundScales


class WeightBytes(Protocol):
    """Makes bytes of codes."""

    def fill_table(self) -> None:
        """Fills the table of a format that has one, in shared memory."""

    def of(self, columns: GroupColumns, panel: int, registers: WeightRegisters) -> Tile:
        """Returns the weights of a product, as bytes."""
        ...

    def scale_of(self, columns: GroupColumns, registers: WeightRegisters) -> Tile | None:
        """Returns the scale of a product for every row; None where it has none."""
        ...

    def row_scale(self, row_tile: Scalar) -> Tile | None:
        """Returns the scales [rows, 1] of sums over all of k in f32, where rows have one; None where groups have."""
        ...


def bytes_from(p: Program, plan: BytesPlan[PrefillSchedule], codes: Codes, scales: RoundScales) -> WeightBytes:
    """Returns what makes bytes of the weight of a plan, whose scales are folded in or not."""
    return (FoldedBytes if plan.spec.folds else PlainBytes)(p, plan, codes, scales)


class PlainBytes:
    """Codes less their zeros, whose products are scaled."""

    def __init__(self, p: Program, plan: BytesPlan[PrefillSchedule], codes: Codes, scales: RoundScales) -> None:
        self.p, self.plan, self.spec, self._codes, self._scales = p, plan, plan.spec, codes, scales
        power = byte_exponent(plan.spec.dtype, plan.spec.byte_type, plan.spec.zeros)
        self._convert = ScaleConversion(p, plan.spec, power=power)
        rows, piece = plan.base.tiles.rows, plan.base.round.piece
        self._codes_layout = rows.local(1, piece // BLOCK_K) * MMA_M16N8K16_A
        self._layout = rows.local(1, piece // SUM_COLUMNS) * MMA_M16N8K32_A

    def fill_table(self) -> None:
        """Does nothing: tables are no bytes."""

    def of(self, columns: GroupColumns, panel: int, registers: WeightRegisters) -> Tile:
        p, plan, spec = self.p, self.plan, self.spec
        piece, first = divmod(panel * plan.base.schedule.panel_k, plan.base.round.piece)
        codes = p.view(self._codes.of(registers, piece), spec.dtype, self._codes_layout)
        element, zeros = spec.x.operand, list[Tile]()
        if spec.compute == "i8" and not plan.has_signs:
            element = "ui8"
        if spec.zeros == "int" and plan.subtracts:
            zeros = [p.reshape(registers.of_group("zeros", columns.group), self._scales.row_layout.shape)]
        decoded = p.decode_bytes(codes, element, self._layout, zeros, plan.offset)
        return p.slice(decoded, 1, first + columns.start, columns.width)

    def scale_of(self, columns: GroupColumns, registers: WeightRegisters) -> Tile | None:
        if not self.plan.base.scaling.groups:
            return None
        return self._as_scale(registers.of_group("scales", columns.group))

    def row_scale(self, row_tile: Scalar) -> Tile | None:
        if self.plan.base.scaling.groups:
            return None
        return self._as_scale(self._scales.rows_at(self.spec.slot("scales"), row_tile).load())

    def _as_scale(self, loaded: Tile) -> Tile:
        """Scales [rows, 1] in f32, times the power of two that bytes leave out."""
        scale = self._convert.as_f32(loaded, self.spec.scale)
        return self._convert.with_exponent(self.p.reshape(scale, self._scales.row_layout.shape))


class FoldedBytes:
    """Weights that are scaled and rounded. plan: `BytesPlan.in_f16`."""

    def __init__(self, p: Program, plan: BytesPlan[PrefillSchedule], codes: Codes, scales: RoundScales) -> None:
        self.p, self.plan, self._codes, self._scales = p, plan, codes, scales
        rounder = ROUNDER if plan.spec.compute == "i8" else 0.0
        self._fragments = Fragments(p, plan.base, scales, of_panel=None, plus=rounder)

    def fill_table(self) -> None:
        self._fragments.fill_table()

    def of(self, columns: GroupColumns, panel: int, registers: WeightRegisters) -> Tile:
        """Returns the weights of a panel, which is one product, made group by group."""
        base, loaded = self.plan.base, self._as_round(registers)
        codes = loaded.codes[panel * base.schedule.panel_k // base.round.piece]
        width = math.gcd(base.round.step // base.scaling.groups, columns.width)
        groups = (GroupColumns(start, width, columns.group) for start in range(0, columns.width, width))
        parts = [self._fragments.of(codes, group, panel, loaded) for group in groups]
        layout = base.tiles.rows.local(1, columns.width // MMA_M16N8K32_A.shape[1]) * MMA_M16N8K32_A
        return self.p.encode_fragments(parts, self.plan.spec.x.operand, layout)

    def scale_of(self, columns: GroupColumns, registers: WeightRegisters) -> Tile | None:
        """Returns None: weights are scaled already."""
        return None

    def row_scale(self, row_tile: Scalar) -> Tile | None:
        """Returns None, too."""
        return None

    def _as_round(self, registers: WeightRegisters) -> WeightRegisters:
        """Returns the registers by number in the round: numbers that have the same place take turns there."""
        codes = [self._codes.of(registers, piece) for piece in range(self.plan.base.round.pieces)]
        counts = {name: tensor.count for name, tensor in self._scales.loaded.items()}
        scales = {name: [held[i % len(held)] for i in range(counts[name])] for name, held in registers.scales.items()}
        return WeightRegisters(codes, scales)
