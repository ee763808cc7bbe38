"""Panels of x in the prefill kernels with mma.sync: they come by cp.async, to which all threads contribute. A barrier
per panel says that it is there, and that all warps have left the one before."""

from __future__ import annotations

from lowbit.passes.builder import Index, Memory, Program, Scalar
from lowbit.passes.kernels.copy_layout import copy_layout
from lowbit.passes.kernels.prefill.panels import Panels
from lowbit.passes.kernels.prefill.plan import PrefillPlan
from lowbit.passes.kernels.prefill.tile_order import TileOrder
from lowbit.passes.kernels.prefill.turn import Turn


class CopiedPanels(Panels):
    """pitch: numbers from a token to the next in shared memory."""

    def __init__(self, p: Program, plan: PrefillPlan, pitch: int) -> None:
        super().__init__(p, plan)
        s, spec, self.pitch = plan.schedule, plan.spec, pitch
        self.stages = self._allocate()
        panels = -(-spec.k // s.panel_k)
        self.x = p.global_view(p["x"], spec.x.operand, (panels, -1, s.panel_k), (s.panel_k, spec.k, 1), sizes=[p["m"]])

    def _allocate(self) -> Memory:
        """Returns the stages: [stages, 1, tokens, panel_k]."""
        s, size = self.schedule, self.schedule.tokens * self.pitch
        shape = (s.num_stages, 1, s.tokens, s.panel_k)
        return self.p.alloc_shared(self.spec.x.operand, shape, (size, size, self.pitch, 1))

    def copy_first(self, order: TileOrder, token: Scalar, first_round: Index) -> None:
        for panel in range(self.plan.ahead):
            self._copy(panel, token, panel)

    def copy_first_of_slice(self, turn: Turn, order: TileOrder) -> None:
        """Does nothing: no tiles are cut."""

    def copy_later(self, turn: Turn, index: Scalar, panel: int) -> None:
        """Copies it to the stage of the panel before this. What is copied beyond the last tile of a block is not
        read."""
        _, token, column = self.later(turn, index, panel)
        self._copy((panel + self.plan.ahead) % self.schedule.num_stages, token, column)

    def wait(self, turn: Turn, index: Scalar, panel: int) -> Memory:
        self.p.wait(self.plan.ahead - 1)
        self.p.barrier()
        return self.p.stage(self.stages, panel % self.schedule.num_stages)

    def release_before(self, panel: int) -> None:
        """Does nothing: a barrier says so."""

    def _copy(self, stage: int, token: Scalar, panel: Index) -> None:
        """Starts to copy a panel of x, counted in the tile."""
        self._copy_tokens(self.p.stage(self.stages, stage), token, self.schedule.tokens, panel)
        self.p.commit()

    def _copy_tokens(self, target: Memory, token: Scalar, tokens: int, panel: Index) -> None:
        """Copies a panel of some tokens; zeros beyond the last token and the last column."""
        p, s, k = self.p, self.schedule, self.spec.k
        layout = copy_layout((1, tokens, s.panel_k), s.threads, self.spec.x.per_vector)
        limit = (s.panel_k, 0, 1, k) if k % s.panel_k else ()
        boundary = ("none" if self.plan.rounds * self.plan.step == k else "zero", "zero", "none")
        p.copy_async(self.x, target, (panel, token, 0), layout, boundary, limit)
