"""`Engine`: how a warp multiplies one step of codes by x, and adds the products to its sums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from lowbit.dialect.layouts.layout import Layout
from lowbit.passes.builder import Tile
from lowbit.passes.kernels.scales.block_scales import Scales
from lowbit.passes.kernels.streaming.block import Block


class Engine(ABC):
    """The engine of a block. It is made when the operands have their buffers, and allocates what it needs beside them.

    sums    the layout of a warp's sums [warps_k, rows, columns]
    scales  those of the block's rows
    """

    sums: Layout
    scales: Scales

    @abstractmethod
    def begin(self) -> list[Tile]:
        """Returns the sums that steps carry, from zero."""

    @abstractmethod
    def step(self, carried: list[Tile], words: Callable[[], Tile]) -> list[Tile]:
        """Returns the sums with the products of one step of every warp. words: gives its units of codes."""

    @abstractmethod
    def end(self, carried: list[Tile]) -> Tile:
        """Returns the sums of all steps, scaled: [warps_k, rows, tokens] f32."""


def zero_sums(block: Block, sums: Layout, element: str = "f32") -> list[Tile]:
    """Returns sums of products from zero, and behind them sums of x where zeros of rows are made up for at the end."""
    p, plan = block.p, block.plan
    carried = [p.constant(0.0, element, sums)]
    if plan.arithmetic.zeros_in_sums and not plan.steps.groups:
        carried.append(p.constant(0.0, "f32", sums.reduce((1,))))
    return carried
