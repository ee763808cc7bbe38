"""Sums of x of 8 bits, with which zeros and offsets are made up for where codes are multiplied as they are stored.

`SumsOfX` adds up over the columns of products, or of chains, what has been written with x, a sum of every 32 columns.
`Offsets` are what they are multiplied by.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lowbit.dialect.formats.byte_codes import SUM_COLUMNS, byte_exponent
from lowbit.dialect.formats.raw_codes import zero_code
from lowbit.dialect.layouts.layout import Layout, column_spatial, local, replicated
from lowbit.passes.builder import Memory, Program, Scalar, Tile
from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan
from lowbit.passes.kernels.persistent.group_columns import GroupColumns
from lowbit.passes.kernels.persistent.schedule import WARPS, PrefillSchedule
from lowbit.passes.kernels.persistent.tile_order import Turn
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters
from lowbit.passes.kernels.scales.conversion import ScaleConversion
from lowbit.passes.kernels.scales.round_scales import RoundScales

_THREADS = 32 * WARPS


class SumsOfX:
    """Sums in shared memory [stages x products of a panel, 1, tokens] in f32, or of one chain: all threads share them
    out. Those of a panel are written once, and read until its stage is filled again."""

    def __init__(self, p: Program, plan: BytesPlan[PrefillSchedule]) -> None:
        self.p, self.plan, self._chains, s = p, plan, plan.base.tiles.chains, plan.base.schedule
        self._columns = self._chains.product_columns
        self._count = s.panel_k // self._columns if self._columns else 1
        self._buffer = p.alloc_shared("f32", (s.num_stages * self._count if self._columns else 1, 1, s.tokens))
        self._sums = plan.spec.k // SUM_COLUMNS

    def read(self, turn: Turn, index: Scalar, panel: int) -> Tile:
        """Starts to read those of a panel of the round of this number."""
        width = self.plan.base.schedule.panel_k
        return self._read(turn, index, panel * width, width, self._count)

    def _read(self, turn: Turn, index: Scalar, column: int, columns: int, count: int) -> Tile:
        """Returns so many sums [count, 1, tokens] of columns of a round, from one on, that are side by side."""
        p, tokens, pieces = self.p, turn.shape.tokens, columns // SUM_COLUMNS
        first = self._chains.start(index) * (self._chains.unit // SUM_COLUMNS)
        place = first + self._chains.offset(column) // SUM_COLUMNS
        view = p.global_view(p["x_sums"], "f32", (self._sums, -1), (1, self._sums), sizes=[p["m"]])
        layout = local(pieces, 1) * self._spread(tokens)
        exact = self.plan.base.tiles.covers_columns
        boundary = ("none" if exact else "zero", "clamp")
        loaded = p.load(view, (place, turn.here.token), layout, boundary)
        return p.reduce(p.reshape(loaded, (count, pieces // count, tokens)), 1)

    def _spread(self, tokens: int) -> Layout:
        """Returns who has the sums of which tokens [1, tokens]."""
        side = math.gcd(tokens, _THREADS)
        return replicated(_THREADS // side, 2) * local(1, tokens // side) * column_spatial(1, side)

    def write(self, sums: Tile, panel: int) -> None:
        """Stores those of a panel, and waits for all warps to have done so."""
        self.p.materialize(sums, by_all=True)  # before some lanes store
        self.p.store(sums, self._buffer, (self._first(panel), 0, 0))
        self.p.barrier()

    def of(self, panel: int, product: int) -> Memory:
        """Returns the sums of a product of a panel [1, tokens]."""
        return self.p.stage(self._buffer, self._first(panel) + product)

    def _first(self, panel: int) -> int:
        return panel % self.plan.base.schedule.num_stages * self._count

    def of_chain(self, turn: Turn, chain: Scalar) -> Memory:
        """Returns the sums over a chain, by its number [1, tokens]."""
        p, rounds, step = self.p, self._chains.rounds, self.plan.base.round.step
        runs, unit = step // self._chains.unit, self._chains.unit
        nothing = p.constant(0.0, "f32", self._spread(turn.shape.tokens).reshape((1, 1, turn.shape.tokens)))
        with p.loop(chain * rounds, rounds, [nothing]) as loop:
            (total,) = loop.carried
            for run in range(runs):
                total = p.add(total, self._read(turn, loop.index, run * unit, unit, 1))
            loop.results = [total]
        p.barrier()  # all have read those of the chain before
        self.write(loop.carried[0], 0)
        return self.of(0, 0)


class Offsets:
    """Minus the zero of every row [rows, 1] in f32, or minus the offset of signed codes."""

    def __init__(self, p: Program, plan: BytesPlan[PrefillSchedule], scales: RoundScales) -> None:
        self.p, self.plan, self.spec, self._scales = p, plan, plan.spec, scales
        power = byte_exponent(plan.spec.dtype, plan.spec.byte_type, plan.spec.zeros)
        self._convert = ScaleConversion(p, plan.spec, zero_code(plan.spec.dtype), power=power)

    def of_product(self, columns: GroupColumns, registers: WeightRegisters) -> Tile:
        """Returns those of the group of a product."""
        return self._made_of(lambda name: registers.of_group(name, columns.group))

    def of_rows(self, row_tile: Scalar) -> Tile:
        """Returns those of rows that have one scale."""
        return self._made_of(lambda name: self._scales.rows_at(self.spec.slot(name), row_tile).load())

    def _made_of(self, loaded: Callable[[str], Tile]) -> Tile:
        def number(name: str) -> Tile:
            as_f32 = self._convert.as_f32(loaded(name), self.spec.slot(name).storage)
            return self.p.reshape(as_f32, self._scales.row_layout.shape)

        return self._convert.minus_stored(self._scales.row_layout, number)
