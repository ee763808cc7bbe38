"""The weight side of prefill kernels that add up in a given order: `OrderedWeight`."""

from __future__ import annotations

from lowbit.passes.builder import Scalar, Tile
from lowbit.passes.kernels.persistent.group_columns import GroupColumns
from lowbit.passes.kernels.persistent.weight import Finish, Weight
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters


class OrderedWeight(Weight):
    """A weight whose scales multiply products, the sums of chains, or weights as in kernels of no given order."""

    def scale_of(
        self, columns: GroupColumns, panel: int, registers: WeightRegisters
    ) -> tuple[Tile | None, Tile | None]:
        """Returns what a product is multiplied by, for every row in f32, and what the sums of x are, where these make
        up for zeros or offsets. There is no scale where the sums of chains or weights have it."""
        scaling, convert = self.plan.scaling, self.scales.convert
        if not scaling.groups or scaling.of_weights:
            return None, None
        column = panel * self.plan.schedule.panel_k + columns.start

        def load(name: str) -> Tile:
            return self.scales.number(name, registers.scales, column)

        scale = load("scales")
        return convert.with_exponent(scale), convert.beside(scale, load) if scaling.sums_x else None

    def scaled(self, sums: Tile, row_tile: Scalar, sums_of_x: Tile | None = None) -> Tile:
        """Returns the sums of a chain times the scales of rows, if these have one for all columns, with zeros or
        offsets added by the sums of x [1, tokens]."""
        if self.plan.scaling.groups:
            return sums
        p, convert = self.p, self.scales.convert

        def load(name: str) -> Tile:
            return self._of_rows(name, row_tile)

        scale = load("scales")
        result = p.mul(sums, convert.with_exponent(scale))
        return result if sums_of_x is None else p.fma(convert.beside(scale, load), sums_of_x, result)

    def _of_rows(self, name: str, row_tile: Scalar) -> Tile:
        """One number of every row in f32 [rows, 1]."""
        slot = self.plan.spec.slot(name)
        number = self.scales.convert.as_f32(self.scales.rows_at(slot, row_tile).load(), slot.storage)
        return self.p.reshape(number, self.scales.row_layout.shape)

    def finish_of(self, row_tile: Scalar) -> Finish:
        if not self.plan.spec.row_scales:
            return lambda total, token: total
        scale = self._of_rows("row_scales", row_tile)
        return lambda total, token: self.p.mul(total, scale)
