"""How the persistent skeleton has a tile multiplied: `Multiplier`, which every engine and kind of numbers implements.

numbers of x's type   `wgmma`, `mma`; in an order of sums `prefill_in_order`, `prefill_mma_in_order`
bytes                 `passes.kernels.eight_bit_prefill.wgmma`, `passes.kernels.eight_bit_prefill_mma.mma`
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from lowbit.passes.builder import Tile
from lowbit.passes.kernels.persistent.tile_order import Order, Turn


class Multiplier(Protocol):
    """Multiplies tiles, of a weight and panels that it was made with."""

    def await_first(self) -> None:
        """Waits for what the first round needs of scales, when the first panels of x are on their way."""

    def tile(self, turn: Turn, order: Order, carried: list[Tile]) -> tuple[list[Tile], Iterable[Tile]]:
        """Multiplies the rounds of a tile or slice.

        carried: what registers hold of the weight when its first round begins. Returns what they hold at the end, of
        what comes next, and the sums in f32, of one part of the tokens after the other.
        """
        ...

    def leave(self) -> None:
        """Waits for what is still under way when a block has computed its last tile."""
