"""Panels of x in the prefill kernel: how they come to shared memory, and who may use a stage.

A panel has a stage of a ring. `Panels` knows which panel is copied while one is multiplied. In `BoxPanels` the copy
engine brings panels as boxes, asked for by one thread, and two signals say of every stage that its panel has come, and
that all warps of the cluster have left it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import product

from lowbit.passes.builder import Index, Memory, Program, Scalar
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import WARPS
from lowbit.passes.kernels.persistent.tile_order import Order, Position, TileOrder, Turn, first_round
from lowbit.passes.kernels.persistent.tiles import TileShape


class Panels(ABC):
    """The panels of a block, in program `p`. rank: of the block in its cluster, known before the first is copied."""

    rank: Scalar

    def __init__(self, p: Program, plan: PersistentPlan) -> None:
        self.p, self.plan, self.spec, self.schedule = p, plan, plan.spec, plan.schedule
        self.round = plan.round

    @abstractmethod
    def copy_first(self, order: Order, first: Position, first_round: Index) -> None:
        """Starts to copy the panels of the first tile that are under way when the first is multiplied. first_round: of
        the block's part of k."""

    @abstractmethod
    def copy_first_of_slice(self, turn: Turn, order: Order) -> None:
        """Starts to copy the first panels of this block's slice, if tiles are cut and it comes next."""

    @abstractmethod
    def copy_later(self, turn: Turn, index: Scalar, panel: int) -> None:
        """Starts to copy a later panel than this one of a round."""

    @abstractmethod
    def wait(self, turn: Turn, index: Scalar, panel: int) -> Memory:
        """Waits for a panel of a round; returns its stage."""

    @abstractmethod
    def release_before(self, turn: Turn, index: Scalar, panel: int) -> None:
        """Gives back the stage of the panel before this one of a round."""

    def stage_of(self, turn: Turn, index: Index, panel: int) -> Index:
        """Returns the stage of a panel, counted from the first of a round on; it may be another round's."""
        if self.round.turns == 1:
            return panel % self.schedule.num_stages
        later, within = divmod(panel, self.round.panels)
        return (turn.rounds_before + index + later % 2) % 2 * self.round.panels + within

    def later(self, turn: Turn, index: Scalar, panel: int) -> tuple[Scalar, Scalar, Scalar]:
        """Returns the panel that is copied while this one is multiplied: whether it is of this tile, or else of the
        next; its first token; and its number in the tile."""
        panels = self.round.panels
        coming, per_tile = index * panels + (panel + self.round.ahead), turn.rounds * panels
        inside = coming < turn.first_round * panels + per_tile
        token = inside.select(turn.here.token, turn.next.token)
        return inside, token, inside.select(coming, coming - turn.to_next * panels)


class BoxPanels(Panels):
    """Panels that come as boxes."""

    def __init__(self, p: Program, plan: PersistentPlan) -> None:
        super().__init__(p, plan)
        s, width = plan.schedule, plan.spec.x.per_panel
        self.x = p.alloc_shared(plan.spec.x.operand, (s.num_stages, s.panel_k // width, s.tokens, width), swizzle=128)
        self.full, self.empty = p.signals(s.num_stages, 1), p.signals(s.num_stages, WARPS * s.cluster)

    def copy_first(self, order: Order, first: Position, first_round: Index) -> None:
        with self.p.one_thread(order.has_tile):
            self._copy_ahead(self.plan.tiles.whole, first.token, first_round)

    def copy_first_of_slice(self, turn: Turn, order: Order) -> None:
        """Waits for products first: with anything else between the last one and its wait, the assembler may read sums
        too early."""
        p, slice_ = self.p, self.plan.tiles.slice
        if slice_ in (None, turn.shape) or not isinstance(order, TileOrder):
            return
        p.await_products(0)
        with p.one_thread(order.slice_unless(turn.has_next)):
            self._await_free_stages(turn)
            first = first_round(slice_, self.rank)
            self._copy_ahead(slice_, turn.next.token + order.slice_token, first, turn)

    def copy_later(self, turn: Turn, index: Scalar, panel: int) -> None:
        """Copies it to the stage that the panel before the last one has left."""
        p, ahead = self.p, self.round.ahead
        inside, token, column = self.later(turn, index, panel)
        with p.one_thread(inside | turn.has_next):
            stage = self.stage_of(turn, index, panel + ahead)
            p.await_signal(self.empty, stage, (self._use(turn, index, panel + ahead + 1) + 1) % 2)
            self._copy(turn.shape, stage, token, column)

    def wait(self, turn: Turn, index: Scalar, panel: int) -> Memory:
        p, stage = self.p, self.stage_of(turn, index, panel)
        p.await_signal(self.full, stage, self._use(turn, index, panel) % 2)
        return p.stage(self.x, stage)

    def release_before(self, turn: Turn, index: Scalar, panel: int) -> None:
        """Waits until that panel has been multiplied, and says so. Before the first panel of a block comes one that
        there is not: the last stage is released once more than it is filled."""
        self.p.await_products(1)
        self.p.arrive(self.empty, self.stage_of(turn, index, panel - 1), self.schedule.cluster)

    def _use(self, turn: Turn, index: Index, panels: int) -> Scalar:
        """How often stages have been gone through when so many panels of a round are over, counted in the block."""
        stages, rounds = self.schedule.num_stages, turn.rounds_before + index
        if self.round.turns == 1:
            return rounds * (self.round.panels // stages) + panels // stages
        return (rounds + panels // self.round.panels) // 2

    def _await_free_stages(self, turn: Turn) -> None:
        """Waits until warps have left the stages that the first panels are copied to."""
        rounds = self.plan.tiles.rounds
        for panel in range(self.round.ahead):
            uses = self._use(turn, rounds, panel + 1)
            self.p.await_signal(self.empty, self.stage_of(turn, rounds, panel), (uses + 1) % 2)

    def _copy_ahead(self, shape: TileShape, token: Scalar, first: Index, behind: Turn | None = None) -> None:
        """Copies the first panels of a tile or slice, from the first round on. behind: what the block has multiplied
        before, if anything."""
        for panel in range(self.round.ahead):
            stage = panel if behind is None else self.stage_of(behind, self.plan.tiles.rounds, panel)
            self._copy(shape, stage, token, first * self.round.panels + panel)

    def _copy(self, shape: TileShape, stage: Index, token: Scalar, panel: Index) -> None:
        """Starts to copy a panel of x, counted in a tile or slice."""
        p, s, name = self.p, self.schedule, self.plan.x.parameters[shape.tokens]
        p.expect(self.full, stage, shape.tokens * s.panel_k * self.spec.x.bytes)
        of_box, width = self.plan.x.boxes[name]
        copies = s.cluster if shape.split_k == 1 else 1
        column = self.plan.tiles.chains.of_panel(panel)
        for box, (source, row) in product(range(s.panel_k // width), self._boxes_of_tokens(of_box, shape.split_k)):
            where, to = (column + box * width, token + source), box * s.tokens + row
            p.copy_box(p[name], p.stage(self.x, stage), self.full, stage, where, to, copies)

    def _boxes_of_tokens(self, tokens: int, blocks: int) -> list[tuple[Index, Index]]:
        """The boxes of so many tokens that this block copies: the first token of each in the tile, and its row in the
        stage. Blocks that share x copy a box each; those that split k copy all, their own share first. blocks: how many
        split k."""
        if blocks == 1:
            return [(self.rank * tokens, self.rank * tokens)]
        return [((self.rank + turn) % blocks * tokens, turn * tokens) for turn in range(blocks)]
