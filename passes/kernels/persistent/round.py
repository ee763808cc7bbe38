"""The columns of a round, in which a persistent block goes through k: `Round`. No MLIR is needed here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.engine import Engine
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule

_MOST = 2048  # columns


@dataclass(frozen=True)
class Round:
    """A round has `step` columns: `pieces` of `piece` columns, of which a thread loads the codes at once, or `panels`
    of `panel_k` columns, of which a stage holds x."""

    spec: MatmulSpec
    schedule: PrefillSchedule
    engine: Engine

    @property
    def piece(self) -> int:
        return max(self.spec.packing.chunk, self.schedule.panel_k)

    @cached_property
    def step(self) -> int:
        """Columns of a round: a multiple of the group, or a part of it, unless rounds would get too long. A panel of a
        round has the same stage in all rounds."""
        unit = math.lcm(self.piece, self.schedule.panel_k * self.schedule.num_stages)
        least = max(self.engine.least_step, self.engine.least_pieces * self.piece)
        steps = [step for step in range(unit, _MOST + 1, unit) if step >= least]
        return next(filter(self._divides_groups, steps), steps[0])

    @property
    def run(self) -> int:
        """Columns of a round that are side by side: all, or where chains of an order take turns those of a step."""
        order = self.schedule.order
        whole = order is None or order.warps_k == 1 or order.step_k % self.step == 0
        return self.step if whole or order is None else order.step_k

    @property
    def divides_groups(self) -> bool:
        """Tells whether rounds are multiples of groups, or groups of rounds."""
        return self._divides_groups(self.step)

    def _divides_groups(self, step: int) -> bool:
        group = self.spec.packing.padded_group
        return group is None or step % group == 0 or group % step == 0

    @property
    def pieces(self) -> int:
        return self.step // self.piece

    @property
    def panels(self) -> int:
        return self.step // self.schedule.panel_k

    @property
    def ahead(self) -> int:
        """Panels of x under way while one is multiplied."""
        return self.schedule.num_stages - self.engine.busy_stages
