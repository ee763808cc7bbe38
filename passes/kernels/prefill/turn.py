"""`Turn`: what a block of the prefill kernel computes at a time, and what it computes after that."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.passes.builder import Index, Scalar
from lowbit.passes.kernels.prefill.plan import TileShape


@dataclass(frozen=True)
class Position:
    """Where a tile or a slice is: the number of its tile of rows, and its first token."""

    row_tile: Scalar
    token: Scalar


@dataclass(frozen=True)
class Turn:
    """A whole tile or a slice.

    number         of a whole tile, counted in the block; 0 for a slice
    here           where it is
    next           where the tile or slice is that comes after it; where `has_next` is false, one that is there
    has_next       whether a whole tile comes after it
    first_round    the first round of this block's part of k
    rounds         how many that part has
    next_round     the same of what comes after it
    to_next        how much less the number of a round is, counted in what comes after it
    rounds_before  how many rounds the block has behind it, less `first_round`
    """

    shape: TileShape
    number: Scalar
    here: Position
    next: Position
    has_next: Scalar
    first_round: Index
    rounds: Index
    next_round: Index
    to_next: Index
    rounds_before: Scalar
