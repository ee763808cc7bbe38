"""The matmul kernel for any number of tokens, made for more than the decode kernels take: one launch of persistent
blocks.

The idea. Y' = W X' as in the decode kernel, with the same packed weight: a warp's fragments of the weight are operand A
of wgmma, from registers; x is operand B, which the instruction reads from shared memory. Arithmetic is the bound, so
the tensor core must never wait, and nothing may be moved twice that could be moved once:

- x comes by the copy engine (TMA), asked for by one thread: no thread computes addresses of x, and what lies beyond the
  last token or column arrives as zeros. Two warpgroups with rows of their own share it.
- The weight goes from device memory straight to registers, a round ahead, into the very registers that the last panel
  has left: it needs neither shared memory nor barriers.
- Products are begun and not waited for (`lowbit.accumulate`): while one panel of columns is multiplied, the fragments
  of the next are decoded. Sums stay in their registers for a whole tile.
- Blocks stay for the whole launch and go from tile to tile. The pipeline does not run dry in between: the first panels
  of the next tile are copied while the last ones of this are multiplied.
- Blocks of a cluster have different rows and the same tokens: each copies half of x to both.
- Or they have the same tile and a part of k each (`PrefillSchedule.split_k`), where there are fewer tiles than
  multiprocessors. At the end of a tile they add up sums in shared memory (`prefill.exchange`); each stores a share of
  the tokens.
- Or all blocks have equal shares of the rounds of tiles that do not come out even (`prefill.stream_order`). Those that
  have parts of a tile add up sums in device memory (`prefill.workspace`).
- Tiles of an incomplete last wave may be cut along tokens into slices (`prefill.tile_order`). The same stages and
  registers serve them: the pipeline goes on from the last whole tile to the slice, whose panels are copied by boxes of
  fewer tokens and read from the first rows of a stage. Blocks of a cluster may share a slice and split its k.

Loop nest. A block has 128 rows and `tokens` tokens at a time, whose sums are in registers:

    codes, scales, zeros of the first round on their way to registers; the first `ahead` panels of x to shared memory
    for tile of this block:                          GROUP_TILES token tiles by all rows, then the next ones
        clear the sums
        write the first panel's outliers to shared memory, among zeros
        for round:                                   `step` columns, of this block's part of k
            for panel of `panel_k` columns:
                for group in panel:
                    a = scale * (decode(codes) - zero) + outliers
                wait until x is there                signal full[stage]
                sums += a x^T                        begun, not waited for
                make the places of outliers zero again, write those of the next panel
                one thread: wait until the panel two before this has left its stage, copy a later panel there
                load the codes that take the place of these: of the next round, or of the next tile's first
                compute the next panel's scales and zeros from their codes, if a warp shares them (PanelFactors)
                wait until the panel before this has been multiplied
                say so                               signal empty[its stage], once per warp
        add the sums of blocks that have other parts of k
        if this block's slice comes next: copy its first panels of x
        scale rows, add the bias, convert; turn around in shared memory, store y[t, n] in 16-byte pieces
    this block's slice of a cut tile, if it has one, in the same way with `last_tokens` tokens and its part of k

Weights of groups are scaled before they are multiplied, and so rounded to the type of x, as `dequantize` rounds them:
to scale the sums of every group instead, products would have to be waited for (it took 1.9 times as long). Scales that
are no numbers of that type multiply in f32 (`PrefillPlan.scales_in_f32`), or as two that are (`scales_in_two`).

What a warp does between the begin of a product and the wait for the one before is hidden behind that one. What it does
after the wait is hidden behind the product begun last and the other warpgroup's, and if it takes longer, these end
first. So only fragments are made there; outliers, and numbers that codes of scales stand for, are ready by then.

One product may be under way while the next one's fragments are decoded, and no more: of three sets of registers that
take turns, the assembler uses one too early, says so (C7513) and runs products one by one.

Shared memory: x [stages, panel_k / 64, tokens, 64], swizzled in rows of 128 bytes; two signals per stage; the table of
a format that has one; per warp [tokens at a time, 16 + 8] numbers of y on their way out; where a round has many
scales, those of two rounds; with outliers the fragments of a panel; and for the sums of other blocks that split k
[other blocks x tokens of a share / 8, threads, 4] in f32, a signal for each warp and one more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from lowbit.dialect.bindings import ir
from lowbit.dialect.layouts.fragments import MMA_M16N8_D
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Index, Program, Scalar, Tile
from lowbit.passes.kernels.prefill.epilogue import StagedStore, Store, epilogue_of
from lowbit.passes.kernels.prefill.exchange import Exchange
from lowbit.passes.kernels.prefill.outliers import Outliers
from lowbit.passes.kernels.prefill.panel_factors import PanelFactors
from lowbit.passes.kernels.prefill.panels import BoxPanels, Panels
from lowbit.passes.kernels.prefill.parts import Part, parts_of_panel
from lowbit.passes.kernels.prefill.plan import PrefillPlan, TileShape
from lowbit.passes.kernels.prefill.schedule import PrefillSchedule
from lowbit.passes.kernels.prefill.stream_order import StreamOrder
from lowbit.passes.kernels.prefill.tile_order import TileOrder
from lowbit.passes.kernels.prefill.weight import Weight, WeightRegisters
from lowbit.passes.kernels.prefill.workspace import Workspace


class Kernel:
    """Builds the program. x_kind: how it gets x, as a kind of parameter."""

    x_kind: ClassVar[str] = "tensor_map"
    panels: Panels

    def __init__(self, plan: PrefillPlan) -> None:
        self.plan, self.spec, self.schedule = plan, plan.spec, plan.schedule
        names = [slot.name for slot in plan.spec.tensors] + ["x_scales"] * (plan.spec.compute is not None)
        names += plan.spec.call_inputs
        names += ["workspace"] * plan.schedule.streams
        kinds = dict.fromkeys(plan.boxes, self.x_kind) | dict.fromkeys([*names, "y"], "pointer") | {"m": "i32"}
        cluster = plan.schedule.cluster_blocks  # the blocks of a cluster are side by side along axis 1
        grid = (f"sm_count / {cluster}", cluster, 1)
        threads, workspace = plan.schedule.threads, plan.workspace_bytes
        self.p = Program("prefill", threads, grid, kinds, workspace, max_blocks=1, cluster=(1, cluster, 1))

    def build(self) -> ir.Module:
        with self.p:
            self._block()
        return self.p.module

    def _block(self) -> None:
        """Builds the program of a block."""
        p, s, plan = self.p, self.schedule, self.plan
        self._allocate()
        self._make_weight()
        block, blocks = p.block_id(0), p.block_count(0)
        self.rank = p.block_id(1) if s.cluster_blocks > 1 else Scalar.of(0)
        self.panels.rank = self.rank
        self.exchange = Exchange(p, plan.split, self.rank) if plan.split else None
        self._announce_signals()
        self._share_out(block, blocks)
        first, self.first_round = self.order.first(), self.order.first_round
        self._load_first(first.row_tile)
        self.weight.fill_table()
        self._begin_outliers(first.row_tile)
        p.grid_launch_dependents()
        p.grid_wait()
        self.panels.copy_first(self.order, first.token, self.first_round)
        self._await_first_factors()
        self._prepare_first_factors()
        self._await_signals()
        self.mine = self.order.count()
        with p.loop(0, self.mine, self.registers.flat()) as loop:
            self.turn = self.order.turn(loop.index, self.mine)
            loop.results = self._tile(loop.carried)
        if plan.slice:
            self._compute_slice(plan.slice, loop.carried)
        self._leave()

    def _share_out(self, block: Scalar, blocks: Scalar) -> None:
        """Finds out which tiles a block computes, of so many, and which rounds of them."""
        kind, self.workspace = StreamOrder if self.schedule.streams else TileOrder, None
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
        if self.plan.whole.split_k > 1:
            self.p.barrier("cluster_wait")

    def _compute_slice(self, slice_: TileShape, carried: list[Tile]) -> None:
        """Computes this block's slice of a cut tile, if it has one."""
        with self.p.when(self.order.has_slice):
            self.turn = self.order.turn_of_slice(slice_, self.mine)
            self._tile(carried)

    def _leave(self) -> None:
        """Nobody leaves while another copies x to it, sends it sums, or arrives at its signals."""
        if self.schedule.cluster > 1:
            self.p.barrier("cluster")
        elif self.exchange:
            self.exchange.leave(self.mine)

    def _begin_outliers(self, row_tile: Scalar) -> None:
        """Finds the outliers of the first tile, where there are some."""
        self.outliers = Outliers(self.p, self.plan) if self.spec.outliers else None
        if self.outliers:
            self.outliers.clear()
            self.registers.outliers = [self.outliers.first(row_tile)]

    def _allocate(self) -> None:
        """Shared memory for x and for y on its way out, signals, and registers for the sums."""
        self.panels = BoxPanels(self.p, self.plan)
        self.epilogue = epilogue_of(self.p, self.plan)
        self.out: Store = StagedStore(self.p, self.plan, self.epilogue)
        self._make_sums()

    def _make_sums(self) -> None:
        """Registers for the sums of tiles and slices, by their tokens."""
        layouts = {tokens: self.plan.rows.local(1, tokens // 8) * MMA_M16N8_D for tokens in self.plan.tile_tokens}
        self.sums = {tokens: self.p.accumulator(layout) for tokens, layout in layouts.items()}

    def _make_weight(self) -> None:
        """Makes the object that loads and decodes the weight."""
        self.weight = Weight(self.p, self.plan)

    def _load_first(self, row_tile: Scalar) -> None:
        """Starts to load the first round of the first tile."""
        self.registers = self.weight.load_round(row_tile, self.first_round)
        self.weight.factors.copy(row_tile, self.first_round, 0)

    def _find_next_outliers(self, registers: WeightRegisters) -> None:
        """Starts to look where the outliers of the next tile are, while sums are stored."""
        if self.outliers:
            registers.outliers = [self.outliers.first(self.turn.next.row_tile)]

    def _await_first_factors(self) -> None:
        """Waits for the scales of the first round that come by way of shared memory."""
        self.weight.factors.await_copies()

    def _prepare_first_factors(self) -> None:
        """Computes what the first panel of the first round is multiplied by, if a warp shares it."""
        if self.weight.of_panel:
            self.weight.factors.use(Scalar.of(0))
            self.weight.of_panel.fill(0)

    def _prepare_next_factors(self, of_panel: PanelFactors, panel: int, number: Scalar) -> None:
        """The same for the panel after this one. Behind the last panel of a round come the numbers of the next."""
        if panel == self.plan.panels - 1:
            self.weight.factors.await_copies()
            self.weight.factors.use((number + 1) % 2)
        of_panel.fill((panel + 1) % self.plan.panels)

    def _write_outliers(self, panel: Index, registers: WeightRegisters) -> None:
        """Writes the outliers of a panel, counted in the tile, to where its fragments are read."""
        if self.outliers:
            column = panel * self.schedule.panel_k
            registers.outliers = [self.outliers.write(column, *registers.outliers)]

    # -- a tile

    def _tile(self, carried: list[Tile]) -> list[Tile]:
        """Computes the tile or slice of this turn; what the next one's first round begins with."""
        p, turn, registers = self.p, self.turn, self.registers.like(carried)
        sums = self.sums[turn.shape.tokens]
        p.clear(sums)
        self._write_outliers(0, registers)
        with p.loop(turn.first_round, turn.rounds, registers.flat()) as loop:
            loop.results = self._round(loop.index, loop.carried)
        self.panels.copy_first_of_slice(turn, self.order)
        registers, total = self.registers.like(loop.carried), p.read(sums)
        self._find_next_outliers(registers)
        self._end([total])
        return registers.flat()

    def _end(self, parts: Iterable[Tile]) -> None:
        """Stores sums, of one part of the tokens after the other, when those of all columns are added up."""
        if self.workspace:
            p, parts = self.p, list(parts)
            is_last = self.workspace.begin(self.turn.number)
            with p.when(is_last):
                self._store(self.workspace.read(parts, own=True))
            with p.when(~is_last), p.when(self.workspace.write(parts)):
                self._store(self.workspace.read(parts, own=False))
        else:
            self._store(self._of_all_columns(parts))

    def _store(self, parts: Iterable[Tile]) -> None:
        """Scales sums of whole rows, and stores them, one part of the tokens after the other."""
        row_tile, token = self.turn.here.row_tile, self._first_stored()
        scale = self.weight.factors.row_scale(row_tile)
        for total in parts:
            scaled = total if scale is None else self.p.mul(total, scale)
            self.out.store(scaled, row_tile, token)
            token = token + total.shape[1]

    def _of_all_columns(self, parts: Iterable[Tile]) -> Iterable[Tile]:
        """Sums of all columns for the tokens that this block stores, cut like its own sums of the tile."""
        if self.exchange and self.turn.shape.split_k > 1:
            return self.exchange.add_up(list(parts), self.turn.number)
        return parts

    def _first_stored(self) -> Scalar:
        """The first token of the tile that this block stores."""
        here, shape = self.turn.here, self.turn.shape
        return here.token + self.rank * shape.share if shape.split_k > 1 else here.token

    def _round(self, index: Scalar, carried: list[Tile]) -> list[Tile]:
        """Multiplies the columns of a round. What the registers held is replaced by what the next round needs."""
        plan, turn, registers = self.plan, self.turn, self.registers.like(carried)
        coming, factors, number = self._coming_round(index), self.weight.factors, turn.rounds_before + index
        factors.copy(*coming, (number + 1) % 2)
        factors.use(number % 2)
        sums = self.sums[turn.shape.tokens]
        for panel in range(plan.panels):
            parts = list(parts_of_panel(plan, panel))
            ready = self._fragments(parts, panel, registers)
            x = self.panels.wait(turn, index, panel)
            for part, a in zip(parts, ready):
                self.p.accumulate(a, x, part.start, sums, row=0, held=part is not parts[-1])
            self._go_on_to_outliers_of(index * plan.panels + (panel + 1), registers)
            self.panels.copy_later(turn, index, panel)
            self.weight.load_next_round(registers, panel, *coming)
            if self.weight.of_panel:
                self._prepare_next_factors(self.weight.of_panel, panel, number)
            self.panels.release_before(panel)
        if not self.weight.of_panel:
            factors.await_copies()
        return registers.flat()

    def _coming_round(self, index: Scalar) -> tuple[Scalar, Scalar]:
        """The round after this one, or the next tile's first: its tile of rows, and its number."""
        turn = self.turn
        inside = index + 1 < turn.first_round + turn.rounds
        row_tile = inside.select(turn.here.row_tile, turn.next.row_tile)
        return row_tile, inside.select(index + 1, turn.next_round)

    def _go_on_to_outliers_of(self, panel: Scalar, registers: WeightRegisters) -> None:
        """Writes the outliers of the next panel, counted in the tile, in place of this one's. Behind the last panel of
        a tile there are none."""
        if self.outliers:
            self.outliers.erase(*registers.outliers)
            self._write_outliers(panel, registers)

    def _fragments(self, parts: list[Part], panel: int, registers: WeightRegisters) -> list[Tile]:
        """The weights of a panel as they are multiplied, decoded before the panel of x is waited for."""
        outliers = self.outliers.fragments() if self.outliers else None
        ready = [self.weight.fragments(part, panel, registers, outliers) for part in parts]
        for a in ready:
            self.p.materialize(a)
        return ready


def prefill_matmul(spec: MatmulSpec, schedule: PrefillSchedule) -> ir.Module:
    """The tile program of a matmul, in a module of its own."""
    return Kernel(PrefillPlan(spec, schedule)).build()
