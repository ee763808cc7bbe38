"""The skeleton of matmul kernels for any number of tokens: one launch of persistent blocks.

The idea. Y' = W X' as in the decode kernel, with the same packed weight: a warp's fragments of the weight are operand A
of an engine, from registers. Arithmetic is the bound, so the tensor core must never wait, and nothing may be moved
twice that could be moved once:

- The weight goes from device memory straight to registers, a round ahead, into the very registers that the last panel
  has left: it needs neither shared memory nor barriers. It is scaled there, once for all tokens of a warp.
- Blocks stay for the whole launch and go from tile to tile. The pipeline does not run dry in between: the first panels
  of the next tile are copied while the last ones of this are multiplied.
- Blocks of a cluster have different rows and the same tokens: each copies half of x to both. Or they have the same tile
  and a part of k each (`PrefillSchedule.split_k`), where there are fewer tiles than multiprocessors, and add up sums in
  shared memory at the end (`exchange`); each stores a share of the tokens.
- Or all blocks have equal shares of the rounds of tiles that do not come out even (`stream_order`). Those that have
  parts of a tile add up sums in device memory (`workspace`).
- Tiles of an incomplete last wave may be cut along tokens into slices (`tile_order`). The same stages and registers
  serve them: the pipeline goes on from the last whole tile to the slice.

A kernel is this skeleton with four parts (`Parts`), which a family names:

    panels      how x comes: boxes of the copy engine (`panels`), or cp.async (`copied_panels`)
    weight      what is held of the weight, and what its codes become (`weight`, or bytes)
    multiplier  how a tile is multiplied: wgmma or mma.sync, numbers of x's type or bytes (`multiplier`)
    store       how y leaves: by way of shared memory, or from registers (`stores`)

Loop nest. A block has 128 rows and `tokens` tokens at a time:

    codes, scales, zeros of the first round on their way to registers; the first `ahead` panels of x to shared memory
    for tile of this block:                          as an order says: GROUP_TILES token tiles by all rows, for one
        sums = 0
        for round:                                   `step` columns, of this block's part of k
            for panel of `panel_k` columns:
                for group in panel:
                    a = scale * (decode(codes) - zero) + outliers
                wait until x is there
                sums += a x^T
                copy a later panel, of this tile or of the next, to a stage that has been left
                load the codes that take the place of these: of the next round, or of the next tile's first
        add the sums of blocks that have other parts of k
        if this block's slice comes next: copy its first panels of x
        scale rows, add the bias, convert, store y[t, n]
    this block's slice of a cut tile, if it has one, in the same way with `last_tokens` tokens and its part of k

Weights of groups are scaled before they are multiplied, and so rounded to the type of x, as `dequantize` rounds them:
to scale the sums of every group instead, products would have to be waited for (it took 1.9 times as long).

Shared memory, in this order: x, with two signals per stage where boxes come; y on its way out; scales of two rounds,
where a round has many, and of a panel, where a warp shares them; sums of other blocks that split k [other blocks x
tokens of a share / 8, threads, 4] in f32, with a signal for each warp and one more; tables; outliers of a panel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lowbit.dialect.bindings import ir
from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.persistent.exchange import Exchange
from lowbit.passes.kernels.persistent.expert_order import ExpertOrder
from lowbit.passes.kernels.persistent.multiplier import Multiplier
from lowbit.passes.kernels.persistent.panels import Panels
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.stores import Store
from lowbit.passes.kernels.persistent.stream_order import StreamOrder
from lowbit.passes.kernels.persistent.tile_order import TileOrder, Turn
from lowbit.passes.kernels.persistent.tiles import TileShape
from lowbit.passes.kernels.persistent.weight import WeightSide
from lowbit.passes.kernels.persistent.workspace import Workspace


@dataclass(frozen=True)
class Parts:
    """What makes the parts of a kernel, in the order in which they are made.

    panels      of a program and its plan
    store       of a program and its plan
    weight      of a program
    multiplier  of a program, the panels and the weight
    """

    panels: Callable[[Program, PersistentPlan], Panels]
    store: Callable[[Program, PersistentPlan], Store]
    weight: Callable[[Program], WeightSide]
    multiplier: Callable[[Program, Panels, Any], Multiplier]


class Kernel:
    """Builds the program of a plan and the parts of a family."""

    def __init__(self, plan: PersistentPlan, parts: Parts) -> None:
        self.plan, self.schedule, self._parts = plan, plan.schedule, parts
        spec, cluster = plan.spec, plan.schedule.cluster_blocks  # whose blocks are side by side along axis 1
        names = [slot.name for slot in spec.tensors] + ["x_scales"] * (spec.compute is not None)
        names += ["x_sums"] * (spec.compute is not None and plan.scaling.sums_x)
        names += [*spec.call_inputs, *["workspace"] * plan.schedule.streams, "y"]
        kinds = plan.x.kinds | dict.fromkeys(names, "pointer") | {"m": "i32"}
        resident = plan.schedule.resident
        extent = f"sm_count / {cluster}" if resident == 1 else f"sm_count * {resident}"
        self.p = Program(
            "prefill",
            plan.schedule.threads,
            (extent, cluster, 1),
            kinds,
            plan.tiles.workspace_bytes,
            resident,
            (1, cluster, 1),
            fits_blocks=resident > 1,
        )

    def build(self) -> ir.Module:
        with self.p:
            self._block()
        return self.p.module

    def _block(self) -> None:
        """Builds the program of a block."""
        p, s, tiles = self.p, self.schedule, self.plan.tiles
        of_experts = self.plan.spec.experts > 1
        self._make_parts()
        block, blocks = p.block_id(0), p.block_count(0)
        self.rank = p.block_id(1) if s.cluster_blocks > 1 else Scalar.of(0)
        self.panels.rank = self.rank
        self.exchange = Exchange(p, tiles.split, self.rank) if tiles.split else None
        self._announce_signals()
        if of_experts:  # whose table of tiles must be there
            p.grid_wait()
        self._share_out(block, blocks)
        first, first_round = self.order.first(), self.order.first_round
        self.weight.begin(first.row_tile, first_round)
        p.grid_launch_dependents()
        if not of_experts:
            p.grid_wait()
        self.panels.copy_first(self.order, first, first_round)
        self.multiplier.await_first()
        self._await_signals()
        if isinstance(self.order, ExpertOrder):
            mine = self._compute_tiles_of_experts(self.order)
        else:
            mine = self._compute_tiles(self.order)
        self._leave(mine)

    def _compute_tiles(self, order: TileOrder) -> Scalar:
        """Computes the block's tiles, and its slice if it has one. Returns how many tiles are whole."""
        p, mine = self.p, order.count()
        with p.loop(0, mine, self.weight.registers.flat()) as loop:
            loop.results = self._tile(order.turn(loop.index, mine), loop.carried)
        if slice_ := self.plan.tiles.slice:
            self._compute_slice(order, slice_, mine, loop.carried)
        return mine

    def _compute_tiles_of_experts(self, order: ExpertOrder) -> Scalar:
        """Computes the block's tiles, those of each shape in a loop of their own. Returns how many there are."""
        p, mine, first, carried = self.p, order.count(), Scalar.of(0), self.weight.registers.flat()
        shapes = self.plan.tiles.shapes
        ends = (order.count_long(), mine) if len(shapes) > 1 else (mine,)
        for shape, end in zip(shapes, ends):
            with p.loop(first, end - first, carried) as loop:
                loop.results = self._tile(order.turn(loop.index, mine, shape), loop.carried)
            first, carried = end, loop.carried
        return mine

    def _make_parts(self) -> None:
        """Makes the parts, which allocate what they need of shared memory and registers."""
        p, plan, parts = self.p, self.plan, self._parts
        self.panels, self.store = parts.panels(p, plan), parts.store(p, plan)
        self.weight = parts.weight(p)
        self.multiplier = parts.multiplier(p, self.panels, self.weight)

    def _share_out(self, block: Scalar, blocks: Scalar) -> None:
        """Finds out which tiles a block computes, of so many, and which rounds of them."""
        self.workspace = None
        if self.plan.spec.experts > 1:
            self.order: TileOrder | ExpertOrder = ExpertOrder(self.p, self.plan, block, blocks)
            return
        kind = StreamOrder if self.schedule.streams else TileOrder
        self.order = kind(self.plan, self.p["m"], block, blocks, self.rank)
        if isinstance(self.order, StreamOrder):
            self.workspace = Workspace(self.p, self.plan, self.order)

    def _announce_signals(self) -> None:
        """Blocks of a cluster say that their signals are there. Those that share x wait for one another at once."""
        if self.schedule.cluster > 1:
            self.p.barrier("cluster")
        elif self.exchange:
            self.p.barrier("cluster_arrive", relaxed=True)

    def _await_signals(self) -> None:
        """Waits until the signals of all blocks are there."""
        if self.plan.tiles.whole.split_k > 1:
            self.p.barrier("cluster_wait")

    def _compute_slice(self, order: TileOrder, slice_: TileShape, count: Scalar, carried: list[Tile]) -> None:
        """Computes this block's slice of a cut tile, if it has one, after so many whole tiles."""
        with self.p.when(order.has_slice):
            self._tile(order.turn_of_slice(slice_, count), carried)

    def _leave(self, count: Scalar) -> None:
        """Nobody leaves while another copies x to it, sends it sums, or arrives at its signals. count: whole tiles."""
        if self.schedule.cluster > 1:
            self.p.barrier("cluster")
        elif self.exchange:
            self.exchange.leave(count)
        self.multiplier.leave()

    # -- a tile

    def _tile(self, turn: Turn, carried: list[Tile]) -> list[Tile]:
        """Computes the tile or slice of a turn. Returns what the next one's first round begins with."""
        carried, sums = self.multiplier.tile(turn, self.order, carried)
        self._end(turn, sums)
        return carried

    def _end(self, turn: Turn, parts: Iterable[Tile]) -> None:
        """Stores sums, of one part of the tokens after the other, when those of all columns are added up."""
        if self.workspace:
            p, parts = self.p, list(parts)
            is_last = self.workspace.begin(turn.number)
            with p.when(is_last):
                self._store(turn, self.workspace.read(parts, own=True))
            with p.when(~is_last), p.when(self.workspace.write(parts)):
                self._store(turn, self.workspace.read(parts, own=False))
        else:
            self._store(turn, self._of_all_columns(turn, parts))

    def _store(self, turn: Turn, parts: Iterable[Tile]) -> None:
        """Scales sums of whole rows, and stores them, one part of the tokens after the other."""
        token = turn.first_stored(self.rank)
        finish = self.weight.finish_of(turn.here.row_tile)
        for total in parts:
            self.store.store(finish(total, token), turn.here, token)
            token = token + total.shape[1]

    def _of_all_columns(self, turn: Turn, parts: Iterable[Tile]) -> Iterable[Tile]:
        """Sums of all columns for the tokens that this block stores, cut like its own sums of the tile."""
        if self.exchange and turn.shape.split_k > 1:
            return self.exchange.add_up(list(parts), turn.number)
        return parts
