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
        """Columns of a round: a multiple of the group, or a part of it, unless rounds would get too long.

        A panel of a round has the same stage in all rounds; where rounds fill half of the stages, in every other one.
        They do so if that visits a tenth fewer columns: rounds of all stages may end far beyond the last column.
        """
        longest, *shorter = self.steps
        return next((step for step in shorter if self._visited(step) <= 0.9 * self._visited(longest)), longest)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Columns of rounds that such a schedule may have, the most first: those whose panels fill all stages, once or
        several times, and those that fill half of them."""
        unit = math.lcm(self.piece, self.schedule.panel_k * self.schedule.num_stages)
        steps = range(-(-self._least // unit) * unit, _MOST + 1, unit)
        longest = next(filter(self._divides_groups, steps), steps[0])
        return (longest, longest // 2) if self._may_halve(longest) else (longest,)

    @property
    def _least(self) -> int:
        return max(self.engine.least_step, self.engine.least_pieces * self.piece)

    def _may_halve(self, step: int) -> bool:
        """Tells whether rounds may fill half of the stages. Beside x in 8 bits sums of x have a place by panel."""
        half = step // 2
        fits = half >= self._least and half % self.piece == 0 and self._divides_groups(half)
        fills = step == self.schedule.panel_k * self.schedule.num_stages and self.schedule.num_stages % 2 == 0
        sums_by_panel = self.spec.compute and self.schedule.order
        return self.engine.asynchronous and fits and fills and not sums_by_panel

    def _visited(self, step: int) -> int:
        """Returns how many columns rounds of so many visit, of a chain of the order or of a block's part of k."""
        order, k = self.schedule.order, self.spec.packing.padded_k
        if order:
            chain = -(-k // (order.step_k * order.parts * order.chains)) * order.step_k
            return max(self.least_rounds, -(-chain // step)) * step
        return max(self.least_rounds, -(-k // (step * self.schedule.split_k))) * step

    @property
    def least_rounds(self) -> int:
        """Rounds of a tile, or of a chain, at least: of several chains one, since a loop goes over them."""
        order = self.schedule.order
        return 1 if order and order.parts * order.chains > 1 else self.engine.least_rounds

    @property
    def run(self) -> int:
        """Columns of a round that are side by side: all, or where chains of an order take turns those of a step."""
        order = self.schedule.order
        whole = order is None or order.chains == 1 or order.step_k % self.step == 0
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
    def turns(self) -> int:
        """Rounds until a panel has the same stage again, 1 or 2."""
        return -(-self.schedule.num_stages // self.panels)

    @property
    def ahead(self) -> int:
        """Panels of x under way while one is multiplied."""
        return self.schedule.num_stages - self.engine.busy_stages
