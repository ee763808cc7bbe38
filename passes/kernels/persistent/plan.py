"""What follows from a spec and a schedule of a persistent kernel, in numbers, part by part: `PersistentPlan`.

The program is built from it, and schedules are chosen by it; so it needs no MLIR.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.engine import Engine
from lowbit.passes.kernels.persistent.round import Round
from lowbit.passes.kernels.persistent.scaling import Scaling
from lowbit.passes.kernels.persistent.schedule import ROWS_OF_TILE, WARPS, PrefillSchedule, takes_rows_in_order
from lowbit.passes.kernels.persistent.staging import Staging
from lowbit.passes.kernels.persistent.tiles import Tiles
from lowbit.passes.kernels.persistent.x_copies import XCopies
from lowbit.passes.kernels.requirements import scale_table
from lowbit.passes.kernels.scales.round_tensors import RoundTensors


@dataclass(frozen=True)
class PersistentPlan:
    """The parts of a persistent kernel, in numbers.

    round    the columns that it goes through k in
    tiles    how the launch is cut into tiles, waves, slices and shares
    scaling  where scales are applied
    tensors  scales, zeros and offsets of a round, and how they come
    x        stages of x, and the copies that fill them
    staging  y on its way out, where it is turned around in shared memory
    """

    spec: MatmulSpec
    schedule: PrefillSchedule
    engine: Engine

    @cached_property
    def round(self) -> Round:
        return Round(self.spec, self.schedule, self.engine)

    @cached_property
    def tiles(self) -> Tiles:
        return Tiles(self.spec, self.schedule, self.round)

    @cached_property
    def scaling(self) -> Scaling:
        return Scaling(self.spec, self.round)

    @cached_property
    def tensors(self) -> RoundTensors:
        return RoundTensors.of(self.spec, self.round, self.tiles, self.scaling)

    @cached_property
    def x(self) -> XCopies:
        swizzled = self.engine.asynchronous
        side_by_side = self.spec.experts == 1 or takes_rows_in_order(self.schedule)
        return XCopies(self.spec, self.schedule, self.tiles, swizzled, by_boxes=swizzled and side_by_side)

    @cached_property
    def staging(self) -> Staging | None:
        """None where y leaves from registers."""
        return Staging(self.spec, self.schedule) if self.engine.asynchronous else None

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a block, as `lower-tiles` will lay it out."""
        split, staging = self.tiles.split, self.staging
        exchange = split.exchanged_bytes + 2 * 128 if split else 0  # two kinds of signals
        last = 2 * 128 * self.schedule.streams  # whether the block is the last to write its sums, asked twice
        staged = staging.shared_bytes if staging else 0
        return self.x.shared_bytes + staged + exchange + last + self.weight_bytes + self.sums_of_x_bytes

    @property
    def sums_of_x_bytes(self) -> int:
        """Shared memory of the sums of x, where these make up for zeros: over products those of every stage, else those
        of a chain. Beside mma.sync of numbers of x's type every warp has them in registers."""
        s, of_warps = self.schedule, not (self.engine.asynchronous or self.spec.compute)
        if not self.scaling.sums_x or of_warps:
            return 0
        columns = self.tiles.chains.product_columns
        return 4 * s.tokens * (s.num_stages * (s.panel_k // columns) if columns else 1)

    @property
    def weight_bytes(self) -> int:
        """Shared memory of the weight side: the tables of a format and of scales that have one, outliers, and scales,
        zeros and offsets that do not go straight to registers. There is none beside activations of 8 bits."""
        s, spec, scaling = self.schedule, self.spec, self.scaling
        compute = compute_element(spec.dtype, spec.act)
        table = DecodeTable(spec.dtype, compute).bytes if spec.dtype.kind == "table" else 0
        outliers = ROWS_OF_TILE * s.panel_k * spec.x.bytes if spec.outliers else 0
        of_panel = ROWS_OF_TILE * scaling.panel_groups * len(scaling.panel_numbers) * spec.x.bytes
        scales = scale_table(spec)
        return table + (scales.bytes if scales else 0) + outliers + 2 * WARPS * self.tensors.staged_bytes + of_panel
