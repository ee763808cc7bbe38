"""What an engine demands of the persistent skeleton: `Engine`. No MLIR is needed here."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Engine:
    """A way to multiply, as far as rounds and stages depend on it.

    asynchronous  whether a panel is multiplied while the next one is decoded
    least_step    columns of a round, at least
    least_pieces  pieces of a round, at least
    least_rounds  rounds of a tile, at least, of which x and the weight may have less
    busy_stages   stages of x that cannot be filled while a panel is multiplied
    """

    asynchronous: bool
    least_step: int
    least_pieces: int
    least_rounds: int
    busy_stages: int


WGMMA = Engine(asynchronous=True, least_step=256, least_pieces=2, least_rounds=2, busy_stages=2)
"""A stage is filled a panel after the last warp has left it. Of one round, the assembler orders products and the sums'
first values wrongly, and says so (C7514)."""
MMA = Engine(asynchronous=False, least_step=128, least_pieces=2, least_rounds=1, busy_stages=1)
"""The barrier of a panel frees the stage of the one before."""
BYTES_MMA = replace(MMA, least_pieces=1)
"""Rounds of bytes are short: the more the assembler sees at once, the more it begins early, until registers spill."""
