"""The prefill kernel for activations of 8 bits on targets without wgmma.

The idea. Persistent blocks, tiles, panels of x by cp.async and warps are those of `passes.kernels.prefill_mma.kernel`;
codes become bytes, and products are scaled and added to sums, as in `passes.kernels.eight_bit_prefill.kernel`.

    for panel of `panel_k` columns:
        wait until x is there; barrier
        a = bytes of the panel's codes, less zeros
        for part of the tile's tokens:
            for group in panel:
                product = a x^T                       mma.sync of 16 x 8 x 32, from zero
                sums[part] = sums[part] + scale * product
        copy a later panel of x; load the codes and scales that take the place of these
    at the end of a tile: times the scale of the token, add the bias, convert, store

A part is at most 32 tokens of a warp, so that its products take at most 32 registers beside the sums. Integers with one
scale per row need no promotion: products are added to sums in i32.

Shared memory: x [stages, parts, tokens of a part, panel_k + 16] in bytes, where the 16 spread ldmatrix over all banks.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.bindings import ir
from lowbit.dialect.formats.byte_codes import SUM_COLUMNS
from lowbit.dialect.layouts.fragments import MMA_M16N8_D, MMA_M16N8K32_B_NK
from lowbit.dialect.layouts.layout import replicated, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Index, Memory, Scalar, Tile
from lowbit.passes.kernels.eight_bit_prefill.kernel import EightBitKernel
from lowbit.passes.kernels.eight_bit_prefill.plan import Columns
from lowbit.passes.kernels.eight_bit_prefill_mma.plan import EightBitPrefillMmaPlan
from lowbit.passes.kernels.eight_bit_prefill_mma.schedule import EightBitPrefillMmaSchedule
from lowbit.passes.kernels.prefill.weight import WeightRegisters
from lowbit.passes.kernels.prefill_mma.kernel import MmaKernel
from lowbit.passes.kernels.prefill_mma.panels import CopiedPanels


@dataclass(frozen=True)
class _Weights:
    """The weights of a product: its columns, their bytes, and the scale of every row; None where nothing is scaled."""

    columns: Columns
    a: Tile
    scale: Tile | None


class _PanelsInParts(CopiedPanels):
    """Panels of x by parts of the tokens."""

    plan: EightBitPrefillMmaPlan

    def _allocate(self) -> Memory:
        """Returns the stages: [stages, parts, 1, tokens of a part, panel_k]."""
        plan, s = self.plan, self.schedule
        shape, size = (s.num_stages, plan.parts, 1, plan.part_tokens, s.panel_k), plan.part_tokens * self.pitch
        return self.p.alloc_shared(self.spec.x.operand, shape, (plan.parts * size, size, size, self.pitch, 1))

    def _copy(self, stage: int, token: Scalar, panel: Index) -> None:
        p, tokens = self.p, self.plan.part_tokens
        for part in range(self.plan.parts):
            self._copy_tokens(p.stage(p.stage(self.stages, stage), part), token + part * tokens, tokens, panel)
        p.commit()


class _EightBitMmaKernel(EightBitKernel[EightBitPrefillMmaPlan], MmaKernel):
    """Builds the program."""

    def __init__(self, plan: EightBitPrefillMmaPlan) -> None:
        super().__init__(plan)
        s, columns = plan.schedule, plan.columns_of_part
        along_rows, along_tokens = s.warps
        self.sums_layout = spatial(*s.warps).local(s.row_blocks, columns) * MMA_M16N8_D
        warps = replicated(along_rows, 2).spatial(along_tokens, 1)
        self.x_layout = warps.local(columns, s.panel_k // SUM_COLUMNS) * MMA_M16N8K32_B_NK
        self.sums_element = self.spec.x.sums if plan.keeps_sums else "f32"

    def _make_panels(self) -> CopiedPanels:
        return _PanelsInParts(self.p, self.plan, self.pitch)

    def _tile(self, carried: list[Tile]) -> list[Tile]:
        p, plan = self.p, self.plan
        zeros = [p.constant(0.0, self.sums_element, self.sums_layout) for _ in range(plan.parts)]
        with p.loop(0, plan.rounds, [*carried, *zeros]) as loop:
            loop.results = self._round(loop.index, loop.carried)
        carried, sums = loop.carried[: -plan.parts], loop.carried[-plan.parts :]
        self._end(map(self._as_f32, sums))
        return carried

    def _round(self, index: Scalar, carried: list[Tile]) -> list[Tile]:
        """Multiplies the columns of a round. What the registers held is replaced by what the next round needs."""
        registers, sums = self.registers.like(carried[: -self.plan.parts]), carried[-self.plan.parts :]
        turn, coming = self.turn, self._coming_round(index)
        here = turn.here.row_tile, index
        for panel in range(self.plan.panels):
            stage, weights = self.panels.wait(turn, index, panel), self._weights(panel, registers)
            for part, total in enumerate(sums):
                x = self._fragments_of_x(self.p.stage(stage, part))
                sums[part] = self._add_products(total, weights, x)
            self.panels.copy_later(turn, index, panel)
            self.weight.load_later(registers, panel, here, coming)
        return [*registers.flat(), *sums]

    # -- products

    def _weights(self, panel: int, registers: WeightRegisters) -> list[_Weights]:
        """The weights of a panel by product."""
        columns = self.plan.products(panel)
        made = [
            _Weights(some, self.weight.bytes_of(some, panel, registers), self.weight.scale_of(some, registers))
            for some in columns
        ]
        for some in made:
            self.p.materialize(some.a)
        return made

    def _add_products(self, total: Tile, weights: list[_Weights], x: Tile) -> Tile:
        """The sums of a part, and the products of a panel."""
        for some in weights:
            total = self._added(total, some, self.p.slice(x, 1, some.columns.start, some.columns.width))
        self.p.materialize(total)  # before the next part: the registers of products are free again
        return total

    def _added(self, total: Tile, some: _Weights, x: Tile) -> Tile:
        """total + scale * a x^T"""
        p = self.p
        if self.plan.keeps_sums:
            return p.mma(some.a, x, total)
        product = self._as_f32(p.mma(some.a, x, p.constant(0.0, self.spec.x.sums, self.sums_layout)))
        return p.add(total, product) if some.scale is None else p.fma(product, some.scale, total)

    def _as_f32(self, total: Tile) -> Tile:
        return self.p.cast(total, "f32", "signed")


def eight_bit_prefill_mma_matmul(spec: MatmulSpec, schedule: EightBitPrefillMmaSchedule) -> ir.Module:
    """The tile program of a matmul of activations of 8 bits, in a module of its own."""
    return _EightBitMmaKernel(EightBitPrefillMmaPlan(spec, schedule)).build()
