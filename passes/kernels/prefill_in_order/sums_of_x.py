"""Sums of x over the columns of products, with which zeros and offsets are made up for: `SumsOfX`.

In kernels for few tokens every warp makes them, as products of ones and x. Here tiles have many tokens, and all rows of
a block need the same sums: its warps share them out, by mma.sync, while the first product of the panel is under way.
"""

from __future__ import annotations

import math

from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.layouts.fragments import MMA_M16N8_D, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import Layout, local, spatial
from lowbit.passes.builder import Index, Memory, Program, Tile
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import WARPS
from lowbit.passes.kernels.prefill_in_order.products import MMA_TOKENS, Products


class SumsOfX:
    """Sums of the panels in shared memory [stages x products of a panel, 1, tokens] in f32: a panel's are written once,
    and are read until its stage is filled again. Where rows have one scale there is a sum over each chain, to which
    warps add step by step in registers."""

    def __init__(self, p: Program, plan: PersistentPlan, products: Products) -> None:
        self.p, self.plan, self._products, s = p, plan, products, plan.schedule
        self._columns, self._count = products.sum_columns, products.per_panel
        self._buffer = p.alloc_shared("f32", (s.num_stages * self._count if products.columns else 1, 1, s.tokens))

    def fill(self, x: Memory, stage: Index, tokens: int) -> None:
        """Adds up the panel of a stage, `x`, and waits for all warps to have done so."""
        p, step = self.p, self._products.sharing(tokens)[0]
        every = {first: self._added(x, first, tokens) for first in range(0, self._count, step)}
        for sums in every.values():  # all before the first is stored, by some lanes
            p.materialize(sums, by_all=True)
        for first, sums in every.items():
            p.store(sums, self._buffer, (stage * self._count + first, 0, 0))
        p.barrier()

    def zero(self, tokens: int) -> Tile:
        """Returns a warp's share of the sums over a chain, before its first panel."""
        return self.p.constant(0.0, "f32", self._row(self._products.sharing(tokens), tokens))

    def add(self, total: Tile, x: Memory, tokens: int) -> Tile:
        """Returns this share with a panel, whose stage is `x`, added step by step."""
        for step in range(self.plan.schedule.panel_k // self._columns):
            total = self.p.add(total, self._added(x, step, tokens))
        return total

    def of_chain(self, total: Tile) -> Memory:
        """Stores the sums over a chain, when all have read those of the chain before. Returns them [1, tokens]."""
        self.p.barrier()
        self.p.materialize(total, by_all=True)  # before it is stored, by some lanes
        self.p.store(total, self._buffer, (0, 0, 0))
        self.p.barrier()
        return self.p.stage(self._buffer, 0)

    def _added(self, x: Memory, first: int, tokens: int) -> Tile:
        """Returns the sums of as many products as warps share out, from a panel's product on [products, 1, tokens]."""
        warps, width = self._products.sharing(tokens), self.plan.spec.x.per_panel
        start, columns, fragments = first * self._columns, warps[0] * self._columns, self._layout(warps, tokens)
        inner = min(width, columns)
        boxes = fragments.permute((1, 0, 2)).reshape((tokens, columns // inner, inner)).permute((1, 0, 2))
        of_panel = self.p.load(x, (start // width, 0, start % width), boxes)
        return self.p.row_sums(self.p.view(of_panel, self.plan.spec.act, fragments), self._row(warps, tokens))

    def _split(self, warps: tuple[int, int], tokens: int) -> Layout:
        """Returns who has which products, and which fragments of 8 tokens [products, fragments, 1]."""
        copies = WARPS // math.prod(warps)
        return spatial(*warps, 1).replicated(copies).local(1, tokens // (MMA_TOKENS * warps[1]), 1)

    def _layout(self, warps: tuple[int, int], tokens: int) -> Layout:
        """Returns the layout of x as fragments [products, tokens, columns]."""
        return self._split(warps, tokens) * local(1, 1, self._columns // BLOCK_K) * MMA_M16N8K16_B_NK.unsqueeze(0)

    def _row(self, warps: tuple[int, int], tokens: int) -> Layout:
        """Returns the layout of sums [products, 1, tokens]."""
        return self._split(warps, tokens).permute((0, 2, 1)) * MMA_M16N8_D.reduce((0,)).reshape((1, 1, MMA_TOKENS))

    def of(self, stage: Index, product: int) -> Memory:
        """Returns the sums of a product of the panel of a stage [1, tokens]."""
        return self.p.stage(self._buffer, stage * self._count + product)
