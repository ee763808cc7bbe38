"""The matmul kernel for any number of tokens on targets without wgmma: `passes.kernels.prefill.kernel` with mma.sync.

The idea is that of the prefill kernel: blocks stay for the whole launch and go from tile to tile, the packed weight
goes from device memory straight to registers, a round ahead, and weights are scaled there, once for all tokens of a
warp. What differs is what a target without wgmma and TMA has:

- x comes by cp.async, to which all threads contribute. A barrier per panel says that a panel is there and that all
  warps have left the one before, whose stage is filled again.
- x is read by ldmatrix, once per warp. So that shared memory keeps up with the tensor core, a warp may have 32 rows,
  for which one fragment of x serves twice, and half of the tokens of the tile; two warps then decode the same weights.
- Sums are ordinary registers, carried by loops. Two warps share a quarter of a multiprocessor and hide each other's
  decoding and waiting.

Loop nest. A block has 128 rows and `tokens` tokens at a time:

    codes, scales, zeros of the first round on their way to registers; the first `ahead` panels of x to shared memory
    for tile of this block:                          in the order of the prefill kernel
        sums = 0
        for round:                                   `step` columns
            for panel of `panel_k` columns:
                wait until x is there; barrier
                for group in panel:
                    sums += (scale * (decode(codes) - zero)) x^T
                copy a later panel, of this tile or of the next, to the stage that the panel before this one has left
                load the codes that take the place of these: of the next round, or of the next tile's first
        scale rows, add the bias, convert, store y[t, n]

Shared memory: x [stages, tokens, panel_k + 8], where the 8 spread ldmatrix over all banks; and the table of a
format that has one.
"""

from __future__ import annotations

from typing import ClassVar

from lowbit.dialect.bindings import ir
from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.layouts.fragments import MMA_M16N8_D, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import replicated, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Memory, Scalar, Tile
from lowbit.passes.kernels.prefill.epilogue import DirectStore, epilogue_of
from lowbit.passes.kernels.prefill.kernel import Kernel
from lowbit.passes.kernels.prefill.parts import parts_of_panel
from lowbit.passes.kernels.prefill.weight import WeightRegisters
from lowbit.passes.kernels.prefill_mma.panels import CopiedPanels
from lowbit.passes.kernels.prefill_mma.plan import PrefillMmaPlan
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule


class MmaKernel(Kernel):
    """Builds the program."""

    x_kind: ClassVar[str] = "pointer"

    def __init__(self, plan: PrefillMmaPlan) -> None:
        super().__init__(plan)
        s, columns = plan.schedule, plan.warp_tokens // MMA_M16N8_D.shape[1]
        along_rows, along_tokens = s.warps
        self.pitch = plan.pitch
        self.sums_layout = spatial(*s.warps).local(s.row_blocks, columns) * MMA_M16N8_D
        warps = replicated(along_rows, 2).spatial(along_tokens, 1)
        self.x_layout = warps.local(columns, s.panel_k // BLOCK_K) * MMA_M16N8K16_B_NK

    def _allocate(self) -> None:
        self.panels = self._make_panels()
        self.epilogue = epilogue_of(self.p, self.plan)
        self.out = DirectStore(self.p, self.epilogue)

    def _make_panels(self) -> CopiedPanels:
        """Makes the object that copies x."""
        return CopiedPanels(self.p, self.plan, self.pitch)

    def _await_first_factors(self) -> None:
        """Does nothing: they are waited for with the first panel of x."""

    def _tile(self, carried: list[Tile]) -> list[Tile]:
        """Computes the tile of this turn; what the next one's first round begins with."""
        p = self.p
        with p.loop(0, self.plan.rounds, [*carried, p.constant(0.0, "f32", self.sums_layout)]) as loop:
            loop.results = self._round(loop.index, loop.carried)
        *carried, total = loop.carried
        registers = self.registers.like(carried)
        self._find_next_outliers(registers)
        self._end([total])
        return registers.flat()

    def _round(self, index: Scalar, carried: list[Tile]) -> list[Tile]:
        """Multiplies the columns of a round. What the registers held is replaced by what the next round needs."""
        p, plan = self.p, self.plan
        *held, total = carried
        registers, coming, turn = self.registers.like(held), self._coming_round(index), self.turn
        number = turn.rounds_before + index
        self.weight.factors.use(number % 2)
        for panel in range(plan.panels):
            stage = self.panels.wait(turn, index, panel)
            outliers, x = self._outliers_of_panel(index, panel, registers), self._fragments_of_x(stage)
            for part in parts_of_panel(plan, panel):
                a = self.weight.fragments(part, panel, registers, outliers)
                total = p.mma(a, p.slice(x, 1, part.start, part.width), total)
            self.panels.copy_later(turn, index, panel)
            self.weight.load_next_round(registers, panel, *coming)
            if panel == 0:  # all warps are done with the round before
                self.weight.factors.copy(*coming, (number + 1) % 2)
        return [*registers.flat(), total]

    def _outliers_of_panel(self, index: Scalar, panel: int, registers: WeightRegisters) -> Tile | None:
        """The outliers of a panel as fragments, where a weight has some; their place is for the next panel's again."""
        if not self.outliers:
            return None
        self._write_outliers(index * self.plan.panels + panel, registers)
        outliers = self.outliers.fragments()
        self.outliers.erase(*registers.outliers)
        return outliers

    def _fragments_of_x(self, stage: Memory) -> Tile:
        """A panel of x as it is multiplied: [tokens, panel_k]."""
        loaded = self.p.load_matrix(stage, self.schedule.tokens, self.x_layout.unsqueeze(0))
        return self.p.reshape(loaded, self.x_layout.shape)

    def _leave(self) -> None:
        """Does nothing: no copy or product is under way when a block ends."""
        self.p.wait()


def prefill_mma_matmul(spec: MatmulSpec, schedule: PrefillMmaSchedule) -> ir.Module:
    """The tile program of a matmul, in a module of its own."""
    return MmaKernel(PrefillMmaPlan(spec, schedule)).build()
