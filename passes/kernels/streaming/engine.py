"""`Engine`: how a warp multiplies one step of codes by x, and adds the products to its sums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

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
    def end(self, carried: list[Tile]) -> list[Tile]:
        """Returns the sums of all steps, scaled, of each of a warp's chains: [warps_k, rows, tokens] f32."""


def zero_sums(block: Block, sums: Layout, element: str = "f32") -> list[Tile]:
    """Returns sums of products from zero, a tile for each chain, and behind them as many sums of x where zeros of rows
    are made up for at the end."""
    p, plan, chains = block.p, block.plan, block.schedule.chains
    carried = [p.constant(0.0, element, sums) for _ in range(chains)]
    if plan.arithmetic.zeros_in_sums and not plan.steps.groups:
        carried += [p.constant(0.0, "f32", sums.reduce((1,))) for _ in range(chains)]
    return carried


def by_chain(block: Block, carried: Sequence[Tile]) -> list[list[Tile]]:
    """Returns what `zero_sums` began chain by chain: sums of products, and of x if there are some."""
    return [list(carried[chain :: block.schedule.chains]) for chain in range(block.schedule.chains)]


def side_by_side(chains: Sequence[Sequence[Tile]]) -> list[Tile]:
    """Returns sums chain by chain in the order of `zero_sums`."""
    return [tile for kind in zip(*chains, strict=True) for tile in kind]
