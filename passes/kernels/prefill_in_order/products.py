"""The products of which the sums of a chain are made: `Products`. No MLIR is needed here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lowbit.passes.kernels.persistent.group_columns import GroupColumns, groups_of_panel
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import WARPS

MMA_TOKENS = 8  # of an instruction


@dataclass(frozen=True)
class Products:
    """The products of a plan: as many columns each as kernels for few tokens add up from zero.

    columns  of a product (`Chains.product_columns`)
    """

    plan: PersistentPlan

    @property
    def columns(self) -> int:
        return self.plan.tiles.chains.product_columns

    @property
    def misfit(self) -> str:
        """What of panels does not fit the products, or "" if all does."""
        panel_k = self.plan.schedule.panel_k
        if self.columns and panel_k % self.columns:
            return f"panels of panel_k={panel_k} columns do not hold products of {self.columns}"
        if self.plan.scaling.sums_x and panel_k % self.sum_columns:
            return f"panels of panel_k={panel_k} columns do not hold steps of {self.sum_columns}, over which x is added"
        return ""

    @property
    def sum_columns(self) -> int:
        """Columns over which x is added up from zero: those of a product, or of a step where rows have one scale."""
        return self.columns or self.plan.tiles.chains.order.step_k

    @property
    def per_panel(self) -> int:
        """Products of a panel."""
        return self.plan.schedule.panel_k // self.columns if self.columns else 1

    def of_panel(self, panel: int) -> Iterator[GroupColumns]:
        """Yields the products of a round's panel, in order."""
        if not self.columns:
            yield from groups_of_panel(self.plan, panel)
            return
        width, of_group = self.plan.schedule.panel_k, self.plan.round.step // self.plan.scaling.groups
        for start in range(0, width, self.columns):
            yield GroupColumns(start, self.columns, (panel * width + start) // of_group)

    def sharing(self, tokens: int) -> tuple[int, int]:
        """Returns how many warps share out the products and the tokens of a panel where they add up x; what is left of
        them does the same. Sums over rows are added in order: a warp has all of a token's."""
        along_tokens = math.gcd(WARPS, tokens // MMA_TOKENS)
        return math.gcd(WARPS // along_tokens, self.per_panel) if self.columns else 1, along_tokens

    def parts_of(self, tokens: int) -> int:
        """Returns the parts that a tile or slice of so many tokens is multiplied in."""
        return max(1, tokens // self.plan.schedule.part_tokens)
