"""The table of token tiles of a matmul of experts, in device memory: `ExpertTiles`.

Rows of x come sorted by expert (as *slots*: a token has one for each of its experts), and a table says where. So
nothing depends on how many slots an expert has but what is read there: a graph that was captured once serves any
routing. A *token tile* is a tile's worth of slots of one expert, or what is left of them.

    tiles [1 + most, 3] of i32:   row 0: how many token tiles there are, what kernels do not read, and how many of
                                         them are short: the last ones, with `short_slots` slots at most
                                  each other row: an expert, the first slot, and the slot before which the tile ends

A kernel multiplies short tiles by narrower products, if its schedule says so. A table may have none of them: 0 is
right for any order of tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowbit.passes.builder import Program, Scalar


COLUMNS = 3  # of the table


class ExpertTiles:
    """The table as program `p` reads it.

    count  how many token tiles there are
    """

    def __init__(self, p: Program) -> None:
        self.p = p
        self._table = p.global_view(p["tiles"], "i32", (-1, COLUMNS), sizes=[p["m"] + 1])
        self.count = p.read_index(self._table, (0, 0))

    def short(self) -> Scalar:
        """Returns how many of them are short: the last ones."""
        return self.p.read_index(self._table, (0, 2))

    def tile(self, number: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Returns the expert of a token tile, its first slot, and the slot before which it ends."""
        expert, first, end = (self.p.read_index(self._table, (number + 1, column)) for column in range(COLUMNS))
        return expert, first, end
