"""Panels of rows of x that a list names, for wgmma: they come by cp.async to swizzled stages, since Hopper's copy
engine gathers no rows. A barrier per panel says that it is there, also to the proxy that wgmma reads by, and that all
warps have awaited the product before the last one, whose stage is filled again."""

from __future__ import annotations

from lowbit.passes.builder import Index, Memory, Program, Scalar
from lowbit.passes.kernels.copy_layout import copy_layout
from lowbit.passes.kernels.persistent.panels import Panels
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.tile_order import Order, Position, Turn


class ListedPanels(Panels):
    """Panels of slots, whose rows of x are those that the parameter "rows" names."""

    def __init__(self, p: Program, plan: PersistentPlan) -> None:
        super().__init__(p, plan)
        s, spec, width = plan.schedule, plan.spec, plan.spec.x.per_panel
        parts = s.panel_k // width
        self._stages = p.alloc_shared(spec.x.operand, (s.num_stages, 1, parts, s.tokens, width), swizzle=128)
        shape, strides = (-(-spec.k // s.panel_k), parts, -1, width), (s.panel_k, width, spec.k, 1)
        self._x = p.global_view(p["x"], spec.x.operand, shape, strides, sizes=[p["m"]])
        self._layouts = {
            tokens: copy_layout((1, parts, tokens, width), s.threads, spec.x.per_vector) for tokens in plan.tiles.tokens
        }
        self._limit = (s.panel_k, width, 0, 1, spec.k) if spec.k % s.panel_k else ()
        self._boundary = ("none" if plan.tiles.columns == spec.k else "zero", "none", "zero", "none")

    def copy_first(self, order: Order, first: Position, first_round: Index) -> None:
        for panel in range(self.round.ahead):
            self._copy(self.schedule.tokens, panel, first.token, first.end, panel)

    def copy_first_of_slice(self, turn: Turn, order: Order) -> None:
        """Does nothing: no tiles are cut."""

    def copy_later(self, turn: Turn, index: Scalar, panel: int) -> None:
        """Copies it to the stage of the panel before the last one. What is copied beyond the last tile of a block is
        not read."""
        inside, token, column = self.later(turn, index, panel)
        stage = self.stage_of(turn, index, panel + self.round.ahead)
        self._copy(turn.shape.tokens, stage, token, turn.end_of(inside), column)

    def wait(self, turn: Turn, index: Scalar, panel: int) -> Memory:
        self.p.wait(self.round.ahead - 1)
        self.p.barrier(async_proxy=True)
        return self._stage(self.stage_of(turn, index, panel))

    def release_before(self, turn: Turn, index: Scalar, panel: int) -> None:
        """Waits until that panel has been multiplied; the next barrier says so."""
        self.p.await_products(1)

    def _stage(self, stage: Index) -> Memory:
        return self.p.stage(self.p.stage(self._stages, stage), 0)

    def _copy(self, tokens: int, stage: Index, token: Scalar, end: Scalar | None, panel: Index) -> None:
        """Starts to copy a panel of so many slots, counted in the tile; zeros beyond the last slot and column. The tile
        that follows has no more than this one, since short tiles are the last."""
        p, target = self.p, self.p.stage(self._stages, stage)
        rows = p.global_view(p["rows"], "i32", (-1,), sizes=[p["m"] if end is None else end])
        p.copy_rows(self._x, rows, target, (panel, 0, token, 0), 2, self._layouts[tokens], self._boundary, self._limit)
        p.commit()
