"""The order in which a persistent block goes through k: `Chains`. No MLIR is needed here.

A kernel of no given order visits the columns as they are, and has one chain of sums. One that is to add up as kernels
for few tokens do (`SumOrder`) visits them chain by chain, and adds a chain's sums to those of the chains before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from lowbit.dialect.formats.byte_codes import MOST_EXACT, PROMOTED
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.round import Round
from lowbit.passes.kernels.scales.in_order import scales_weights
from lowbit.passes.kernels.sum_order import SumOrder

if TYPE_CHECKING:
    from lowbit.passes.builder import Scalar

I = TypeVar("I", "int", "Scalar", "int | Scalar")


@dataclass(frozen=True)
class Chains:
    """The chains of an order: of each of its parts of k as many as take the steps of a part in turn."""

    spec: MatmulSpec
    order: SumOrder
    round: Round

    @property
    def count(self) -> int:
        """Chains of all of k."""
        return self.order.parts * self.order.chains

    @property
    def are_apart(self) -> bool:
        """Whether the chains of each part are added up, and then the parts."""
        return min(self.order.parts, self.order.chains) > 1

    @cached_property
    def steps(self) -> int:
        """Steps of a chain that are visited, some perhaps beyond the last column: where k has one part, whole rounds of
        them. Beyond another part's end are columns of the next."""
        steps = -(-self.spec.packing.padded_k // (self.order.step_k * self.count))
        if self.order.parts > 1:
            return steps
        whole = math.lcm(self.order.step_k, self.round.step) // self.order.step_k
        least = -(-self.round.least_rounds * self.round.step // self.order.step_k)
        return -(-max(steps, least) // whole) * whole

    @property
    def rounds(self) -> int:
        """Rounds of a chain."""
        return self.steps * self.order.step_k // self.round.step

    @property
    def misfit(self) -> str:
        """What of the rounds does not fit the chains, or "" if all does."""
        step, length = self.order.step_k, self.round.step
        panel_k = self.round.schedule.panel_k
        if self.steps * step % length:
            return f"chains of {self.steps * step} columns are no whole rounds of {length} columns"
        if self.order.chains == 1:
            return ""
        if length % step and step % length:
            return f"rounds of {length} columns and steps of {step} do not divide each other"
        group = math.gcd(self.spec.packing.padded_group or step, self.unit)
        if any(step % width for width in (panel_k, self.round.piece, group)):
            return f"steps of {step} columns do not hold panels of {panel_k} columns and groups of {group}"
        return ""

    @property
    def product_columns(self) -> int:
        """Columns of the products that kernels for few tokens add up from zero, of a given order: those of a group, or
        of a step where groups are longer, and no more than are promoted at a time, or exact in f32. 0 where rows have
        one scale, or weights are scaled, so that a chain's products are added to its sums directly."""
        group, step, compute = self.spec.packing.padded_group, self.order.step_k, self.spec.compute
        if (group is None and compute != "f8e4m3") or scales_weights(self.spec):
            return 0
        most = {"f8e4m3": PROMOTED, "i8": MOST_EXACT}.get(compute or "", step)
        return min(group or step, step, most)

    @property
    def are_whole(self) -> bool:
        """Whether the columns of a round are side by side."""
        return self.round.run == self.round.step

    @property
    def unit(self) -> int:
        """Columns of which `start` counts so many."""
        return self.round.run

    def start(self, round_: I) -> I:
        """Returns in which column a round begins, in units; rounds are counted as they are visited."""
        if self.order.chains == 1:
            return round_
        per_unit = self.round.step // self.unit
        return self._column(round_ * per_unit, self.order.step_k // self.unit)

    def offset(self, column: int) -> int:
        """Returns how far behind its start a round has what would be this column of it, were they side by side."""
        if self.are_whole:
            return column
        step, within = divmod(column, self.order.step_k)
        return step * self.order.chains * self.order.step_k + within

    def of_panel(self, panel: I) -> I:
        """Returns the first column of a panel; panels are counted as they are visited."""
        return self.place_of_panel(panel) * self.round.schedule.panel_k

    def place_of_panel(self, panel: I) -> I:
        """Returns the place of a panel among all of k's; panels are counted as they are visited."""
        if self.order.chains == 1:
            return panel
        return self._column(panel, self.order.step_k // self.round.schedule.panel_k)

    def _column(self, visited: I, per_step: int) -> I:
        """Returns the place of what is visited, of which steps have so many, among all of k's."""
        step, within = visited // per_step, visited % per_step
        chain, turn = step // self.steps, step % self.steps
        chains = self.order.chains
        first = chain // chains * (chains * self.steps) + chain % chains
        return (first + turn * chains) * per_step + within
