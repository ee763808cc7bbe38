"""What the families of invariant matmuls with mma.sync for many tokens have in common: `MmaInOrderFamily`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, ClassVar, TypeVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates
from lowbit.passes.kernels.persistent.in_order_family import InOrderFamily
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill_mma.family import TOKEN_TILES
from lowbit.passes.kernels.prefill_mma.schedule import PartsOfTokens
from lowbit.passes.target import Target

S = TypeVar("S", bound=PartsOfTokens)

_TOKENS = (32, 64, 96, 128)  # of a tile


class MmaInOrderFamily(InOrderFamily[S]):
    """The base of families whose candidates are one for each tile: the panels of which chains take the fewest columns.

    panels   columns and stages of panels, the most promising first
    """

    chosen_for: ClassVar[tuple[int, ...]] = TOKEN_TILES
    panels: ClassVar[Sequence[tuple[int, int]]]

    @abstractmethod
    def plan(self, spec: MatmulSpec, schedule: S) -> PersistentPlan:
        """The plan of a kernel."""

    @abstractmethod
    def least(self, spec: MatmulSpec, token_tile: int, tile: S, most_k: int, target: Target) -> float:
        """The microseconds that a tile takes at least, with panels of up to `most_k` columns."""

    def of_cut(
        self, spec: MatmulSpec, token_tile: int, target: Target, cut: Mapping[str, Any]
    ) -> Iterator[Candidates[S]]:
        most_k = max(panel_k for panel_k, _ in self.panels)
        for tokens, row_blocks in product(_TOKENS, self.schedule_type.allowed["row_blocks"]):
            tile = self.schedule_type(tokens, row_blocks=row_blocks, **cut)
            least = self.least(spec, token_tile, tile, most_k, target)
            yield Candidates(least, partial(self._of_tile, spec, tile, target))

    def _of_tile(self, spec: MatmulSpec, tile: S, target: Target) -> list[S]:
        panels = (replace(tile, panel_k=panel_k, num_stages=stages) for panel_k, stages in self.panels)
        fitting = [s for s in panels if self.fits(spec, s, target)]
        return sorted(fitting, key=lambda s: self.plan(spec, s).tiles.columns)[:1]  # stable

    def shape(self, schedule: S) -> tuple[object, ...]:
        return schedule.tokens, schedule.row_blocks
