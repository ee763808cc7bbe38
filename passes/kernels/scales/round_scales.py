"""Scales, zeros and offsets in persistent kernels: how those of a round come to a warp, and the numbers they become.

They come a round ahead: few straight to registers, many to shared memory, a buffer of every warp for each of two
rounds. Codes of numbers (`Bilevel`) become numbers where a group's weights are made, once for all tokens of a tile.
"""

from __future__ import annotations

from itertools import product

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.fragments import MMA_M16N8_D
from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.dialect.weight import TensorSlot
from lowbit.passes.builder import Index, Memory, Program, Scalar, Tile
from lowbit.passes.kernels.copy_layout import copy_layout
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import WARPS
from lowbit.passes.kernels.persistent.weight_read import WeightRead
from lowbit.passes.kernels.scales.conversion import ScaleConversion
from lowbit.passes.kernels.scales.round_tensors import RoundTensor


class RoundScales:
    """Loads scales, zeros and offsets in program `p`, and makes numbers of them.

    loaded   those that come to registers
    staged   those that come to shared memory: for each its buffer [2, runs, 1, warps, numbers of a row block]. A run is
             what a round has of columns that are side by side
    """

    def __init__(self, p: Program, plan: PersistentPlan) -> None:
        self.p, self.plan, self.spec, tiles = p, plan, plan.spec, plan.tiles
        self.convert = ScaleConversion(p, plan.spec, plan.scaling.stored_offset, plan.scaling.raw_codes)
        self.row_layout = (tiles.rows * MMA_M16N8_D).reduce((1,))
        self._rows = self.row_layout.reshape((1, WARPS, ROWS))
        self._row_boundary = "none" if tiles.covers_rows else "clamp"
        self._k_boundary = "none" if tiles.covers_columns else "clamp"
        self.loaded, self._all = plan.tensors.loaded, plan.tensors.every
        self.staged = {name: self._buffer(tensor) for name, tensor in plan.tensors.staged.items()}
        self._stage: Index = 0

    @property
    def _runs(self) -> int:
        return self.plan.round.step // self.plan.tiles.chains.unit

    def _buffer(self, tensor: RoundTensor) -> Memory:
        element, numbers = ScaleConversion.element(tensor.slot.storage), tensor.count // self._runs * tensor.lanes
        return self.p.alloc_shared(element, (2, self._runs, 1, WARPS, numbers))

    def _run(self, name: str, run: int) -> Memory:
        """Returns the numbers of a run of the round that is multiplied [1, warps, numbers of a row block]."""
        return self.p.stage(self.p.stage(self.staged[name], self._stage), run)

    def fill_table(self) -> None:
        """Fills the table in which scales are places, if they are, in shared memory."""
        self.convert.alloc_table()
        self.convert.fill_table()

    # -- to registers

    def at(self, name: str, row_tile: Scalar, index: Index, i: int) -> WeightRead:
        """Number `i` of every row in the round that begins at `index` (`Chains.start`), as it is in memory."""
        tensor, chains = self._all[name], self.plan.tiles.chains
        if tensor.slot.index == "padded_row" or self.spec.group_size is None:
            return self.rows_at(tensor.slot, row_tile)
        if chains.are_whole:
            number = (index * tensor.count + i) // tensor.repeat
        else:
            number = (index * chains.unit + chains.offset(i * tensor.columns)) // (tensor.columns * tensor.repeat)
        return self.rows_at(tensor.slot, row_tile, number, self._k_boundary)

    def rows_at(self, slot: TensorSlot, row_tile: Scalar, number: Index = 0, boundary: str = "none") -> WeightRead:
        """One number of every row, as it is in memory."""
        numbers, lanes = slot.shape[1:] if len(slot.shape) == 3 else (1, ROWS)
        shape, strides = (numbers, self.spec.packing.row_blocks, ROWS), (lanes, numbers * lanes, int(lanes == ROWS))
        view = self.p.global_view(self.p[slot.name], ScaleConversion.element(slot.storage), shape, strides)
        words = (boundary, self._row_boundary, "none")
        return WeightRead(self.p, view, (number, row_tile * self.plan.tiles.unit, 0), self._rows, words)

    # -- to shared memory

    def copy(self, row_tile: Scalar, index: Index, stage: Index) -> None:
        """Starts to copy what a round has."""
        if not self.staged:
            return
        chains, runs = self.plan.tiles.chains, range(self._runs)
        for (name, buffer), run in product(self.staged.items(), runs):
            first = index + chains.offset(run * chains.unit) // chains.unit if run else index
            self._copy(self._all[name], self.p.stage(self.p.stage(buffer, stage), run), row_tile, first)
        self.p.commit()

    def _copy(self, tensor: RoundTensor, target: Memory, row_tile: Scalar, index: Index) -> None:
        numbers, lanes = tensor.slot.shape[1:]
        width, total, element = tensor.count // self._runs * lanes, numbers * lanes, ELEMENTS[tensor.slot.storage]
        counted = self.plan.tiles.all_rounds * self._runs
        shape, strides = (counted, self.spec.packing.row_blocks, width), (width, total, 1)
        view = self.p.global_view(self.p[tensor.slot.name], element.mlir, shape, strides)
        sizes = width * element.bytes, total * element.bytes
        vector = next(v for v in (16, 8, 4) if all(size % v == 0 for size in sizes))
        layout = spatial(1, WARPS, 1) * copy_layout((1, 1, width), 32, vector // element.bytes)
        limit = () if self.plan.tiles.covers_columns else (width, 0, 1, total)
        boundary = ("none", self._row_boundary, "none")
        self.p.copy_async(view, target, (index, row_tile * self.plan.tiles.unit, 0), layout, boundary, limit)

    def await_copies(self) -> None:
        """Waits for the copies of the next round, and lets those of the one behind it take this one's place."""
        if self.staged:
            self.p.wait()
            self.p.barrier("warps", 1)

    def use(self, stage: Scalar) -> None:
        """Takes the numbers in shared memory from this stage."""
        self._stage = stage

    def _from_stage(self, name: str, i: int) -> Tile:
        lanes = self._all[name].lanes
        layout: Layout = self._rows if lanes == ROWS else self._rows.reduce((2,))
        run, number = divmod(i, self._all[name].count // self._runs)
        return self.p.load(self._run(name, run), (0, 0, number * lanes), layout)

    # -- to numbers

    def of_groups(self, name: str, first: int, layout: Layout) -> Tile:
        """Numbers of a tensor in f32, of the groups of a round from `first` on: [warps, groups, 16] in a layout of this
        shape. All come from shared memory, and rows share their second level."""

        def staged(name: str, layout: Layout) -> Tile:
            _, groups, rows = layout.shape
            flat = layout.reshape((1, WARPS, groups * rows))
            return self.p.reshape(self.p.load(self._run(name, 0), (0, 0, first * rows), flat), layout.shape)

        def second_level(name: str, bilevel: Bilevel) -> Tile:
            return self.convert.as_f32(staged(name, layout.reduce((2,))), bilevel.scale)

        slot = self.spec.slot(name)
        return self.convert.two_level(slot, staged(slot.tensor, layout), second_level)

    def in_two(self, scale: Tile) -> tuple[Tile, Tile]:
        """A scale in f32 as the sum of two numbers of x's type, times the power of two that decoding leaves out."""
        p, act = self.p, self.spec.act
        scale = self.convert.with_exponent(scale)
        high = p.cast(scale, act)
        return high, p.cast(p.sub(scale, p.cast(high, "f32")), act)

    def number(self, name: str, loaded: dict[str, list[Tile]], column: int) -> Tile:
        """Numbers of a tensor [rows, 1] in f32, of the group that a column of a round is in."""

        def at(name: str) -> Tile:
            i = column // self._all[name].columns
            return self._from_stage(name, i) if name in self.staged else loaded[name][i]

        def second_level(name: str, bilevel: Bilevel) -> Tile:
            return self.convert.as_f32(at(name), bilevel.scale)

        slot = self.spec.slot(name)
        number = self.convert.two_level(slot, at(slot.tensor), second_level)
        return self.p.reshape(number, self.row_layout.shape)

    def row_scale(self, row_tile: Scalar) -> Tile | None:
        """Returns the scales of the sums over all of k that weights have not got, [rows, 1] in f32."""
        scale: Tile | None = None
        for slot in self.spec.tensors:
            if slot.role != "scale" or slot.name in self._all:
                continue
            loaded = self.convert.as_f32(self.rows_at(slot, row_tile).load(), slot.storage)
            loaded = self.p.reshape(loaded, self.row_layout.shape)
            loaded = self.convert.with_exponent(loaded) if slot.index == "group" else loaded
            scale = loaded if scale is None else self.p.mul(scale, loaded)
        return scale
