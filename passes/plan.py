"""`Plan`: what follows from a spec and a schedule, in numbers. The skinny kernel is built from it, and schedules are
chosen by it; so it needs no MLIR.
"""

from __future__ import annotations

from dataclasses import dataclass

from dialect.spec import MatmulSpec
from passes.schedule import Schedule


@dataclass(frozen=True)
class Plan:
    """Numbers that follow from a spec and a schedule."""

    spec: MatmulSpec
    schedule: Schedule

    @property
    def steps(self) -> int:
        """Of step_k columns, in the packed weight."""
        return -(-self.spec.packing.padded_k // self.schedule.step_k)

    @property
    def rounds(self) -> int:
        """Rounds of one block."""
        return -(-self.steps // (self.schedule.warps_k * self.schedule.splits))

    @property
    def covers_exactly(self) -> bool:
        """Whether no warp ever meets a step beyond the last."""
        return self.rounds * self.schedule.warps_k * self.schedule.splits == self.steps

    @property
    def row_blocks(self) -> int:
        """Of 16 rows, per block."""
        return self.schedule.row_blocks * self.schedule.warps_n

    @property
    def tiles(self) -> int:
        """Blocks side by side along n."""
        return -(-self.spec.packing.row_blocks // self.row_blocks)

    @property
    def groups(self) -> int:
        """Groups in a step, 1 if a group is longer; 0 for one scale per row."""
        group = self.spec.packing.padded_group
        return 0 if group is None else max(1, self.schedule.step_k // group)

    @property
    def async_x(self) -> bool:
        """Whether 16-byte copies fit the rows of x."""
        return self.spec.k % 8 == 0 and not self.spec.packing.pads_groups

    @property
    def workspace_bytes(self) -> int:
        """Partial sums of all splits and a counter per tile, where splits add up through device memory."""
        s = self.schedule
        return 0 if s.splits == s.cluster else self.tiles * (s.splits * s.rows * s.columns + 1) * 4
