"""Panels of x for mma.sync: they come by cp.async, to which all threads contribute. A barrier per panel says that it is
there, and that all warps have left the one before."""

from __future__ import annotations

from lowbit.passes.builder import Index, Memory, Program, Scalar
from lowbit.passes.kernels.copy_layout import copy_layout
from lowbit.passes.kernels.persistent.panels import Panels
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.tile_order import Order, Position, Turn


class CopiedPanels(Panels):
    """Panels that come by cp.async. A stage has parts of the tile's tokens, which are multiplied one after the other:
    [parts, 1, tokens of a part, panel_k]."""

    def __init__(self, p: Program, plan: PersistentPlan) -> None:
        super().__init__(p, plan)
        s, spec, pitch = plan.schedule, plan.spec, plan.x.pitch
        self.tokens, self.parts, size = s.part_tokens, s.tokens // s.part_tokens, s.part_tokens * pitch
        shape = (s.num_stages, self.parts, 1, self.tokens, s.panel_k)
        self.stages = p.alloc_shared(spec.x.operand, shape, (self.parts * size, size, size, pitch, 1))
        panels = -(-spec.k // s.panel_k)
        self.x = p.global_view(p["x"], spec.x.operand, (panels, -1, s.panel_k), (s.panel_k, spec.k, 1), sizes=[p["m"]])

    def copy_first(self, order: Order, first: Position, first_round: Index) -> None:
        for panel in range(self.round.ahead):
            self._copy(panel, first.token, first.end, panel)

    def copy_first_of_slice(self, turn: Turn, order: Order) -> None:
        """Does nothing: no tiles are cut."""

    def copy_later(self, turn: Turn, index: Scalar, panel: int) -> None:
        """Copies it to the stage of the panel before this. What is copied beyond the last tile of a block is not
        read."""
        inside, token, column = self.later(turn, index, panel)
        self._copy(self.stage_of(turn, index, panel + self.round.ahead), token, turn.end_of(inside), column)

    def wait(self, turn: Turn, index: Scalar, panel: int) -> Memory:
        self.p.wait(self.round.ahead - 1)
        self.p.barrier()
        return self.p.stage(self.stages, self.stage_of(turn, index, panel))

    def release_before(self, turn: Turn, index: Scalar, panel: int) -> None:
        """Does nothing: a barrier says so."""

    def _copy(self, stage: Index, token: Scalar, end: Scalar | None, panel: Index) -> None:
        """Starts to copy a panel of x, counted in the tile as panels are visited."""
        panel = self.plan.tiles.chains.place_of_panel(panel)
        for part in range(self.parts):
            target = self.p.stage(self.p.stage(self.stages, stage), part)
            self._copy_part(target, token + part * self.tokens, end, panel)
        self.p.commit()

    def _copy_part(self, target: Memory, token: Scalar, end: Scalar | None, panel: Index) -> None:
        """Copies a panel of a part's tokens; zeros beyond the last token and the last column. end: of the slots, where
        tokens are some, whose rows of x a list names."""
        p, s, k = self.p, self.schedule, self.spec.k
        layout = copy_layout((1, self.tokens, s.panel_k), s.threads, self.spec.x.per_vector)
        limit = (s.panel_k, 0, 1, k) if k % s.panel_k else ()
        boundary = ("none" if self.plan.tiles.rounds * self.round.step == k else "zero", "zero", "none")
        if end is None:
            p.copy_async(self.x, target, (panel, token, 0), layout, boundary, limit)
        else:
            rows = p.global_view(p["rows"], "i32", (-1,), sizes=[end])
            p.copy_rows(self.x, rows, target, (panel, token, 0), 1, layout, boundary, limit)
