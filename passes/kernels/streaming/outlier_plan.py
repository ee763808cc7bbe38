"""`OutlierPlan`: how many outliers a warp has at a time, and what room they take. No MLIR is needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowbit.dialect.formats.outliers import ENTRIES, LANE_SUMS, LINE, SPARE, lines_at_once, scratch_words
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.streaming.stage_plans import CodesPlan, padded
from lowbit.passes.kernels.streaming.steps import Steps


@dataclass(frozen=True)
class OutlierPlan:
    """Lines of outliers (`dialect.formats.outliers`) and the shared memory that they take, if there are any."""

    spec: MatmulSpec
    schedule: Schedule
    steps: Steps
    codes: CodesPlan

    @property
    def staged_lines(self) -> int:
        """Lines of outliers in a warp's share of a row block for which shared memory has room, at most 16."""
        return min(16, 4 * math.ceil(self._usual_lines / 4))

    @property
    def loaded_lines(self) -> int:
        """The same for one token, whose lines are loaded to registers: at most 32 of all row blocks of a warp."""
        return min(math.ceil(self._usual_lines), max(1, 32 // self.schedule.row_blocks))

    @property
    def _usual_lines(self) -> float:
        """Lines of a warp's share of a row block: a quarter more than one outlier in a hundred weights takes."""
        return ROWS * self.spec.k / 80 / ENTRIES / (self.schedule.warps_k * self.schedule.split_k)

    @property
    def indexed_lines(self) -> int:
        """Lines of a row block of which a lane has the first column, a lane each: at most four times 32."""
        lines = self._usual_lines * self.schedule.warps_k * self.schedule.split_k
        return min(4, math.ceil(lines / 32))

    @property
    def step_lines(self) -> int:
        """Lines of a row block and step that are copied before they are needed: one more than outliers fill, at least,
        and as many as a warp copies at a time."""
        return 4 * math.ceil((math.ceil(ROWS * self.schedule.step_k / 80 / ENTRIES) + 1) / 4)

    @property
    def are_spread(self) -> bool:
        """Whether products with outliers are spread over the eight columns that one token has."""
        return self.schedule.tokens == 1

    @property
    def begin_sums(self) -> bool:
        """Whether these products are what the sums begin with: those that are spread over k alike, unless they are
        scaled at the end."""
        return self.are_spread and self.schedule.spread_k and not self.spec.row_scales

    @property
    def sums_in_stage(self) -> bool:
        """Whether the buffer of codes has room for the sums of lanes for outliers of one token: a warp has them where
        it copies its own codes later."""
        s = self.schedule
        loops = not s.preload_weights and self.steps.rounds >= s.num_stages
        return loops and self.codes.bytes_of_warp >= LANE_SUMS

    @property
    def scratch(self) -> tuple[str, tuple[int, ...]]:
        """Element and shape of the shared memory that the warps need for products with outliers."""
        s = self.schedule
        warps = s.threads // 32
        if self.are_spread:
            return "f32", (warps, ROWS, 32)
        return "i32", (warps, lines_at_once(s.tokens), scratch_words(self.spec.act, s.tokens))

    @property
    def bytes_beside(self) -> int:
        """Bytes beside the stages, in front of the codes."""
        if not self.spec.outliers:
            return 0
        s, rows = self.schedule, self.schedule.warps_k * self.steps.row_blocks * 4 * LINE
        if s.outliers_by_step:
            turned = padded(s.warps_k * s.tokens * (s.step_k + SPARE) * self.spec.x.bytes)
            return turned + padded(self.steps.stages * rows * self.step_lines)
        if self.are_spread:
            return 0 if self.sums_in_stage else self._scratch_bytes
        return rows * self.staged_lines

    @property
    def bytes_after(self) -> int:
        """Bytes that take the place of the stages, when the loop has ended."""
        after_loop = self.spec.outliers and not self.schedule.outliers_by_step and not self.are_spread
        return self._scratch_bytes if after_loop else 0

    @property
    def _scratch_bytes(self) -> int:
        return padded(4 * math.prod(self.scratch[1]))
