"""The weight side of prefill kernels that add up in a given order: `OrderedWeight`."""

from __future__ import annotations

from lowbit.passes.builder import Scalar, Tile
from lowbit.passes.kernels.persistent.group_columns import GroupColumns
from lowbit.passes.kernels.persistent.weight import Finish, Weight
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters


class OrderedWeight(Weight):
    """A weight whose scales multiply products, or the sums of chains."""

    def scale_of(
        self, columns: GroupColumns, panel: int, registers: WeightRegisters
    ) -> tuple[Tile | None, Tile | None]:
        """Returns what a product is multiplied by, for every row in f32, and what the sums of x are, where these make
        up for zeros or offsets. There is no scale where the sums of chains have it."""
        scaling, convert = self.plan.scaling, self.scales.convert
        if not scaling.groups:
            return None, None
        column = panel * self.plan.schedule.panel_k + columns.start

        def load(name: str) -> Tile:
            return self.scales.number(name, registers.scales, column)

        scale = load("scales")
        return convert.with_exponent(scale), convert.beside(scale, load) if scaling.sums_x else None

    def scaled(self, sums: Tile, row_tile: Scalar) -> Tile:
        """Returns the sums of a chain times the scales of rows, if these have one for all columns."""
        if self.plan.scaling.groups:
            return sums
        slot = self.plan.spec.slot("scales")
        scale = self.scales.convert.as_f32(self.scales.rows_at(slot, row_tile).load(), slot.storage)
        scale = self.p.reshape(scale, self.scales.row_layout.shape)
        return self.p.mul(sums, self.scales.convert.with_exponent(scale))

    def finish_of(self, row_tile: Scalar) -> Finish:
        p, spec = self.p, self.plan.spec
        if not spec.row_scales:
            return lambda total, token: total
        slot = spec.slot("row_scales")
        scale = self.scales.convert.as_f32(self.scales.rows_at(slot, row_tile).load(), slot.storage)
        scale = p.reshape(scale, self.scales.row_layout.shape)
        return lambda total, token: p.mul(total, scale)
