"""The prefill kernel for activations of 8 bits: `passes.kernels.prefill.kernel` with another compute side.

The idea. Codes become bytes, less their zeros, and are multiplied by x of 8 bits, which has been written in the order
of columns that this gives (`dialect.formats.byte_codes`). What a product is scaled by differs from group to group, so
products of a group are added to sums in f32 in other registers; f8e4m3, of whose products tensor cores keep 13 to 14
bits of a sum, is added after 128 columns even where rows have one scale. Integers with one scale per row need none of
this: the tensor core adds them up.

    for panel of `panel_k` columns:
        a = bytes of the panel's codes, less zeros
        load codes and scales of later panels, if the tensor core adds up all columns
        wait until x is there
        for group in panel, part of the tile's tokens:
            product = a x^T                           begun in the registers that are free
            wait until the product before has ended
            sums = sums + scale * that product        beside this one, if there are two sets of registers
        load codes and scales of later panels otherwise
    at the end of a tile: times the scale of the token, add the bias, convert, store

A tile of T tokens takes T / 2 registers of a thread for its sums, and T / 2 / parts for each set for products. So there
are none for codes of later panels: they wait in shared memory, a few panels ahead (`eight_bit_prefill.codes`). Blocks
that split k need that room for sums, and have codes of the next panel in registers. Scales and zeros of later panels
go to registers, too. Where products have no registers of their own, all of these are loaded before a panel's products
begin, and otherwise while the last one of a panel is under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from lowbit.dialect.bindings import ir
from lowbit.dialect.layouts.fragments import MMA_M16N8_D
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Scalar, Tile
from lowbit.passes.kernels.eight_bit_prefill.folded_weight import FoldedWeight
from lowbit.passes.kernels.eight_bit_prefill.plan import EightBitPlan, EightBitPrefillPlan
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.eight_bit_prefill.sums import KeptSums, Product, PromotedSums, Sums
from lowbit.passes.kernels.eight_bit_prefill.weight import EightBitWeight
from lowbit.passes.kernels.prefill.kernel import Kernel
from lowbit.passes.kernels.prefill.schedule import ROWS_OF_TILE

P = TypeVar("P", bound=EightBitPlan)


class EightBitKernel(Kernel, Generic[P]):
    """The base of the prefill kernels for activations of 8 bits: the weight as bytes, and the end of a tile."""

    plan: P
    weight: EightBitWeight

    def _make_weight(self) -> None:
        kind = FoldedWeight if self.spec.folds else EightBitWeight
        self.weight = kind(self.p, self.plan)

    def _load_first(self, row_tile: Scalar) -> None:
        self.registers = self.weight.begin_round(row_tile, self.first_round)

    def _store(self, parts: Iterable[Tile]) -> None:
        token = self._first_stored()
        for total in parts:
            self._store_part(total, token)
            token = token + total.shape[1]

    def _store_part(self, total: Tile, token: Scalar) -> None:
        """Stores sums times the scales of rows, if rows have one for all columns, and of tokens."""
        p, row_tile = self.p, self.turn.here.row_tile
        if not self.plan.groups:
            total = p.mul(total, self.weight.row_scale(row_tile))
        if self.spec.row_scales:
            total = p.mul(total, self.epilogue.per_row("row_scales", "f32", total, row_tile * ROWS_OF_TILE))
        scales = p.global_view(p["x_scales"], "f32", (1, -1), (0, 1), sizes=[p["m"]])
        total = p.mul(total, p.load(scales, (0, token), total.layout.reduce((0,)), ("none", "clamp")))
        self.out.store(total, row_tile, token)


class _WgmmaKernel(EightBitKernel[EightBitPrefillPlan]):
    """Builds the program."""

    products: Sums

    def _make_sums(self) -> None:
        self.products_of = {tokens: self._sums_of(tokens) for tokens in self.plan.tile_tokens}

    def _sums_of(self, tokens: int) -> Sums:
        """The sums of a tile or slice of so many tokens."""
        p, plan = self.p, self.plan
        parts = plan.parts_of(tokens)
        layout = plan.rows.local(1, tokens // parts // MMA_M16N8_D.shape[1]) * MMA_M16N8_D
        if plan.keeps_sums:
            return KeptSums(p, layout, self.spec.x.sums)
        return PromotedSums(p, layout, parts, self.spec.x.sums, plan.schedule.banks)

    def _tile(self, carried: list[Tile]) -> list[Tile]:
        p, turn = self.p, self.turn
        self.products = self.products_of[turn.shape.tokens]
        self.products.begin_tile()
        with p.loop(turn.first_round, turn.rounds, carried) as loop:
            loop.results = self._round(loop.index, loop.carried)
        self.panels.copy_first_of_slice(turn, self.order)
        self._end(self.products.end_tile())
        return loop.carried

    def _round(self, index: Scalar, carried: list[Tile]) -> list[Tile]:
        registers, turn, coming = self.registers.like(carried), self.turn, self._coming_round(index)
        here = turn.here.row_tile, index
        for panel in range(self.plan.panels):
            columns = list(self.plan.products(panel))
            self.weight.read_codes(panel)
            weights = [self.weight.bytes_of(some, panel, registers) for some in columns]
            scales = [self.weight.scale_of(some, registers) for some in columns]
            for a in weights:
                self.p.materialize(a)
            if self.plan.loads_early:
                self.weight.load_later(registers, panel, here, coming)
            x = self.panels.wait(turn, index, panel)
            factors = zip(columns, weights, scales, strict=True)
            self.products.begin_panel([Product(a, x, some.start, scale) for some, a, scale in factors])
            self.panels.copy_later(turn, index, panel)
            self.panels.release_before(panel)
            self.products.begin_others()
            if not self.plan.loads_early:
                self.weight.load_later(registers, panel, here, coming)
            self.products.end_panel()
        self.products.end_round()
        return registers.flat()

    def _leave(self) -> None:
        super()._leave()
        if self.plan.code_stages:
            self.p.wait()


def eight_bit_prefill_matmul(spec: MatmulSpec, schedule: EightBitPrefillSchedule) -> ir.Module:
    """The tile program of a matmul of activations of 8 bits, in a module of its own."""
    return _WgmmaKernel(EightBitPrefillPlan(spec, schedule)).build()
