"""The kernel that brings rows of x into the orders of columns that experts have, as `passes.kernels.permute` does for a
weight that is not of several: a row for each slot, which a token has for each of its experts.

    y[s, j] = x[rows[s], permutation[e, j]]      for the slots s of an expert e, which token tiles say
    numbers[s] = s                               the rows of x of a matmul that reads y in place of x

So rows of x are no longer gathered by the matmul behind it. The blocks take turns at pieces of token tiles, of some
slots each; a piece beyond the end of its tile has none.

    wait for the kernel in front
    for each piece of a token tile:   columns = permutation[expert, part of the block]
                                      rows of x named by the list, to shared memory
                                      y[slots, part] = row[columns], slot by slot

Shared memory: [slots of a piece, k] of x, if the schedule stages rows; else columns are gathered from device memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowbit.dialect.layouts.layout import Layout, local, spatial
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.passes.kernels.expert_tiles import ExpertTiles
from lowbit.passes.kernels.permute.family import permute_spec
from lowbit.passes.kernels.permute.schedule import PermuteSchedule, piece_columns

if TYPE_CHECKING:
    from lowbit.passes.builder import Memory, Program, Scalar

_BLOCKS = 4  # of a multiprocessor: one copies while another gathers


def permute_slots_program(k: int, act: Act, experts: int, schedule: PermuteSchedule) -> Program:
    """Returns the program for rows of k columns of this type.

    schedule  of the permute kernel for such rows; its rows are the slots of a piece

    Parameters: x [rows, k], permutation i32 [experts, k], rows i32 [m] and tiles i32 [m + 1, 3] of a `Routing`, y
    [m, k], numbers i32 [m], the number of slots, m, and `tile`, the most slots of a token tile.
    """
    from lowbit.passes.builder import Program

    spec = permute_spec(k, act)
    parts = -(-k // (piece_columns(spec) * schedule.threads * schedule.pieces))
    pointers = ("x", "permutation", "rows", "tiles", "y", "numbers")
    names: dict[str, str] = dict.fromkeys(pointers, "pointer")
    names |= dict.fromkeys(("m", "tile"), "i32")
    p = Program("permute_slots", schedule.threads, (f"sm_count * {_BLOCKS}", parts, 1), names)
    with p:
        p.grid_launch_dependents()
        p.grid_wait()
        with p.when(p.block_id(1) == 0):
            _write_numbers(p, schedule.threads)
        _Block(p, spec, experts, schedule).permute()
    return p


def _write_numbers(p: Program, threads: int) -> None:
    """Writes 0, 1 ... for every slot, also for those in no tile, whose rows may be copied and not read."""
    m, at_once = p["m"], p.block_count(0) * threads
    numbers = p.global_view(p["numbers"], "i32", (-1,), sizes=[m])
    with p.loop(0, (m + at_once - 1) // at_once) as loop:
        start = loop.index * at_once + p.block_id(0) * threads
        p.store(p.iota(0, spatial(threads)) + p.splat(start, "i32", spatial(threads)), numbers, (start,), ("skip",))


class _Block:
    """What one block does: its part of the columns, for the pieces of token tiles that are its turns."""

    def __init__(self, p: Program, spec: MatmulSpec, experts: int, s: PermuteSchedule) -> None:
        self.p, self.spec, self.schedule, self.width = p, spec, s, piece_columns(spec)
        self.pieces, self.table = spec.k // self.width, ExpertTiles(p)
        self.first_piece = p.block_id(1) * (s.threads * s.pieces)
        self.orders = p.global_view(p["permutation"], "i32", (experts, self.pieces, self.width))
        self.x = p.global_view(p["x"], spec.act, (-1, spec.k), sizes=[p["m"]])
        if s.staged:
            self.buffer = p.alloc_shared(spec.act, (s.rows, spec.k))

    def permute(self) -> None:
        p, rows = self.p, self.schedule.rows
        of_tile, blocks = (p["tile"] + rows - 1) // rows, p.block_count(0)
        turns = (self.table.count * of_tile + blocks - 1 - p.block_id(0)) // blocks
        with p.loop(0, turns) as loop:
            turn = p.block_id(0) + loop.index * blocks
            expert, first, end = self.table.tile(turn // of_tile)
            slot = first + turn % of_tile * rows
            with p.when(slot < end):
                self._permute_piece(expert, slot, end)

    def _permute_piece(self, expert: Scalar, first: Scalar, end: Scalar) -> None:
        """Writes y of some slots, up to the end of their tile."""
        p, s = self.p, self.schedule
        columns = p.load(self.orders, (expert, self.first_piece, 0), self._layout(s.pieces), self._bounds("zero"))
        rows = self._rows(first, end)
        source, places = (self._staged(rows), range(s.rows)) if s.staged else (self.x, rows)
        y = p.global_view(p["y"], self.spec.act, (-1, self.pieces, self.width), sizes=[end])
        skip = ("skip" if s.rows > 1 else "none", *self._bounds("skip")[1:])
        for number, place in enumerate(places):
            p.store(p.gather(source, (place,), columns), y, (first + number, self.first_piece, 0), skip)
        p.barrier()  # before the buffer is filled again

    def _rows(self, first: Scalar, end: Scalar) -> list[Scalar]:
        """Returns the rows of x of slots from `first` on; that of the last again beyond it."""
        p = self.p
        rows = p.global_view(p["rows"], "i32", (-1,), sizes=[end])
        return [p.read_index(rows, ((first + number).min(end - 1),)) for number in range(self.schedule.rows)]

    def _staged(self, rows: list[Scalar]) -> Memory:
        """Returns these rows of x in shared memory, [rows, k]."""
        p, threads = self.p, self.schedule.threads
        rounds = -(-self.pieces // threads)
        whole = rounds * threads == self.pieces
        x = p.global_view(p["x"], self.spec.act, (-1, self.pieces, self.width), sizes=[p["m"]])
        bounds = ("none", "none" if whole else "zero", "none")
        every = [p.load(x, (row, 0, 0), self._layout(rounds), bounds) for row in rows]
        for number, numbers in enumerate(every):
            row = p.reshape(numbers, (1, rounds * threads * self.width))
            p.store(row, self.buffer, (number, 0), ("none", "none" if whole else "skip"))
        p.barrier()
        return self.buffer

    def _layout(self, pieces: int) -> Layout:
        """Returns the layout of a row, of so many pieces of each thread."""
        return local(1, pieces, 1) * spatial(1, self.schedule.threads, 1) * local(1, 1, self.width)

    def _bounds(self, beyond: str) -> tuple[str, str, str]:
        """Returns what becomes of pieces of the block's part that are beyond the row's end."""
        part = self.schedule.threads * self.schedule.pieces
        return ("none", "none" if self.pieces % part == 0 else beyond, "none")
