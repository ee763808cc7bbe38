"""`EightBitPrefillMmaPlan`: what follows from a spec and a schedule of the prefill kernel for activations of 8 bits
with mma.sync. No MLIR is needed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowbit.passes.kernels.eight_bit_prefill.plan import EightBitPlan
from lowbit.passes.kernels.eight_bit_prefill_mma.schedule import EightBitPrefillMmaSchedule
from lowbit.passes.kernels.prefill_mma.plan import PrefillMmaPlan

_MOST_COLUMNS = 4  # of eight tokens that a warp multiplies before it adds the products to its sums


@dataclass(frozen=True)
class EightBitPrefillMmaPlan(EightBitPlan, PrefillMmaPlan):
    """Numbers that follow from a spec and a schedule: weights and products are those of `EightBitPlan`, warps
    and panels those of `PrefillMmaPlan`.

    A tile's tokens are cut into `parts` of `part_tokens`, of which every warp has some: so products that are not added
    yet take few registers. Rounds are short: the more the assembler sees at once, the more it begins early, until
    registers spill.
    """

    least_pieces: ClassVar[int] = 1

    schedule: EightBitPrefillMmaSchedule

    @property
    def columns_of_part(self) -> int:
        """Columns of eight tokens that a warp has of a part."""
        columns = self.warp_tokens // 8
        return next(some for some in range(_MOST_COLUMNS, 0, -1) if columns % some == 0)

    @property
    def part_tokens(self) -> int:
        """Tokens of a part, of all warps."""
        return 8 * self.columns_of_part * self.schedule.warps[1]

    @property
    def parts(self) -> int:
        return self.schedule.tokens // self.part_tokens

    @property
    def piece_registers(self) -> int:
        """Registers for the codes of a piece, of all row blocks of a warp."""
        return self.schedule.row_blocks * super().piece_registers
