"""The scales, zeros and offsets of a block's rows, wherever they are: those of groups in a stage of the pipeline, those
of whole rows in device memory, and what a warp has computed for a step in shared memory.

`SumScaling` and `WeightScaling` apply them. Both take a scale, and an offset that goes with it: minus scale times zero,
or the offset of the weight.
"""

from __future__ import annotations

from collections.abc import Callable

from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.layouts.layout import Layout
from lowbit.passes.builder import Tile
from lowbit.passes.kernels.scales.conversion import ScaleConversion
from lowbit.passes.kernels.scales.group_scales import GroupScales
from lowbit.passes.kernels.scales.staged_scales import StagedScales
from lowbit.passes.kernels.scales.step_scales import StepScales
from lowbit.passes.kernels.streaming.block import Block


class Scales:
    """Reads the scales, zeros and offsets of a block.

    layout      of a number for each row of the tile [warps_k, rows, 1], as the lanes have the rows of its sums
    groups      those of the stage
    step        those that were computed for the step, where `Arithmetic.step_scales` says so
    """

    def __init__(self, block: Block, staged: StagedScales, sums: Layout) -> None:
        """sums: the layout of the tile's sums [warps_k, rows, columns]."""
        self.block, self.p, self.plan, self.spec, self.convert = block, block.p, block.plan, block.spec, block.convert
        self.layout = sums.reduce((2,))
        block.buffers += self.convert.alloc_table()
        self.groups = GroupScales(block, staged)
        self.step = self._make_step_scales() if self.plan.arithmetic.step_scales else None

    def _make_step_scales(self) -> StepScales:
        of_weights = compute_element(self.spec.dtype, self.spec.act)
        return StepScales(self.block, self.layout, of_weights if self.plan.scaling.rounds_scales else "f32")

    def begin_step(self) -> None:
        """Computes what the lanes of a warp share in this step."""
        self.groups.fill()
        if step := self.step:
            step.fill(lambda: self._computed(step))

    def _computed(self, step: StepScales) -> dict[str, Tile]:
        """Returns the scales, and offsets, of all groups of the step."""

        def load(name: str) -> Tile:
            return step.rows_first(self.groups.load(name, 0, step.layout))

        scale, offset = self.with_offset(load, "offsets" in self.plan.arithmetic.step_scales)
        return {"scales": scale} | ({} if offset is None else {"offsets": offset})

    def of_group(self, name: str, group: int) -> Tile:
        """Loads a scale, zero or offset of every row in one group of the step, from shared memory, as f32."""
        return self.p.reshape(self.groups.load(name, group, self._of_one_group), self.layout.shape)

    def of_rows(self, name: str) -> Tile:
        """Loads the scale, zero or offset of every row, from device memory, as f32."""
        return self.convert.as_f32(self._stored_rows(name), self.spec.slot(name).storage)

    def stored_zeros(self) -> list[Tile]:
        """Loads integer zeros as they are stored, in bytes: those of each group of the step, or those of whole rows."""
        if not self.plan.steps.groups:
            return [self._stored_rows("zeros")]
        zeros = self.groups.staged.of_groups["zeros"]
        loaded = (zeros.load((0, 0, group, 0), self._of_one_group) for group in range(self.plan.steps.groups))
        return [self.p.reshape(each, self.layout.shape) for each in loaded]

    @property
    def _of_one_group(self) -> Layout:
        """The layout of numbers [warps_k, row blocks, 1, 16] of a group."""
        return self.layout.reshape((self.plan.schedule.warps_k, self.plan.steps.row_blocks, 1, ROWS))

    def _stored_rows(self, name: str) -> Tile:
        """Loads numbers of rows from device memory as they are stored."""
        p, warps, blocks, work = self.p, self.plan.schedule.warps_k, self.spec.packing.row_blocks, self.block.work
        element = ScaleConversion.element(self.spec.slot(name).storage)
        view = p.global_view(p[name], element, (warps, blocks, ROWS), (0, ROWS, 1))
        layout = self.layout.reshape((warps, self.plan.steps.row_blocks, ROWS))
        loaded = p.load(view, (0, work.first_block, 0), layout, ("none", work.row_boundary, "none"))
        return p.reshape(loaded, self.layout.shape)

    def with_offset(self, load: Callable[[str], Tile], offset: bool) -> tuple[Tile, Tile | None]:
        """Returns a scale with the power of two that decoding left out and, if `offset`, what is added with it.
        load: gives scales, zeros and offsets, by name, as f32."""
        scale = load("scales")
        return self.convert.with_exponent(scale), self.convert.beside(scale, load) if offset else None
