"""Scaling of sums: a group's product p and the sums of x go into

    total + scale * p + offset * (sums of x)        offset: - scale * zero, or the offset

once per group and accumulator, or once at the end where rows have one scale.
"""

from __future__ import annotations

from lowbit.passes.builder import Tile
from lowbit.passes.kernels.scales.block_scales import Scales


class SumScaling:
    """Scales sums of products [warps_k, rows, tokens]."""

    def __init__(self, scales: Scales) -> None:
        self.p, self.plan, self.scales = scales.p, scales.plan, scales

    def add_scaled(self, total: Tile, product: Tile, group: int, sums_of_x: Tile | None) -> Tile:
        """Returns total + scale * product, and + offset * (sums of x) where zeros or offsets are still to add."""
        p = self.p
        scale, offset = self._of_group(group, sums_of_x is not None)
        total = p.fma(product, scale, total)
        return total if offset is None or sums_of_x is None else p.fma(offset, sums_of_x, total)

    def _of_group(self, group: int, offset: bool) -> tuple[Tile, Tile | None]:
        """Returns the scale of a group's sums and, if `offset`, what sums of x are multiplied by."""
        if step := self.scales.step:
            kinds = ("scales", "offsets")[: 1 + offset]
            scale, *others = (step.load(kind, group) for kind in kinds)
            return scale, others[0] if others else None
        return self.scales.with_offset(lambda name: self.scales.of_group(name, group), offset)

    def whole(self, total: Tile, *sums_of_x: Tile) -> Tile:
        """Returns a warp's sums over all of its columns, times the scales of rows, with zeros or offsets added, where
        groups have none."""
        if self.plan.steps.groups:
            return total
        scales = self.scales
        scale = scales.of_rows("scales")
        result = self.p.mul(total, scales.convert.with_exponent(scale))
        return self.p.fma(scales.convert.beside(scale, scales.of_rows), sums_of_x[0], result) if sums_of_x else result
