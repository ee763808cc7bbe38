"""`EightBitPrefillPlan`: what follows from a spec and a schedule of the prefill kernel for activations of 8 bits. No
MLIR is needed here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowbit.dialect.formats.byte_codes import PROMOTED
from lowbit.dialect.formats.raw_codes import zero_code
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.prefill.legality import shared_bytes
from lowbit.passes.kernels.prefill.plan import PrefillPlan
from lowbit.passes.kernels.prefill.schedule import ROWS_OF_TILE

_HELD = ((64, 32), (128, 16), (256, 8))
"""For tiles of up to so many tokens, the registers for codes, of a piece at least."""
_CODE_STAGES = (4, 2)  # pieces of codes in shared memory, as many as there is room for
_SHARED = 227 * 1024  # bytes that a block of sm_90a has


@dataclass(frozen=True)
class Columns:
    """Columns of a panel that are one product: the first, how many, and the group that they are of, in the round."""

    start: int
    width: int
    group: int


@dataclass(frozen=True)
class EightBitPlan(PrefillPlan):
    """The sizes and choices that follow from a spec and any schedule for activations of 8 bits."""

    @property
    def scales_weights(self) -> bool:
        """Products are scaled, and weights are not, unless scales are folded into them."""
        return self.spec.folds

    @property
    def scales_in_rounds(self) -> bool:
        return self.groups > 0

    @property
    def scales_in_f32(self) -> bool:
        """Whether weights are scaled in f32, and rounded to f16 once, as the definition has it."""
        return self.spec.folds and not self.spec.folds_in_f16

    @property
    def groups(self) -> int:
        """Groups in a round, 1 if a group is longer; 0 for one scale per row."""
        group = self.spec.packing.padded_group
        return 0 if group is None else max(1, self.step // group)

    @property
    def keeps_sums(self) -> bool:
        """Whether the tensor core adds up all columns: weights of groups are scaled before they are multiplied, or are
        integers of which no group has a scale."""
        return self.spec.fold_scales or (self.spec.compute == "i8" and not self.groups)

    @property
    def loads_early(self) -> bool:
        """Whether what later panels need is loaded as soon as the codes of a panel are decoded, and not behind its last
        product: there are registers for it then if products have none of their own."""
        return self.keeps_sums

    @property
    def offset(self) -> int:
        """The number that is subtracted from every code where there are no zeros."""
        return 0 if self.spec.zeros == "int" else int(zero_code(self.spec.dtype))

    @property
    def has_signs(self) -> bool:
        """Whether integers are negative, too, once zeros and offsets are subtracted."""
        return self.spec.zeros == "int" or self.offset > 0

    @property
    def held_pieces(self) -> int:
        """Pieces whose codes are in registers at a time. A round's take turns."""
        registers = next(registers for tokens, registers in _HELD if self.schedule.tokens <= tokens)
        fitting = (held for held in (4, 2) if held * self.piece_registers <= registers and self.pieces % held == 0)
        return next(fitting, 1)

    @property
    def code_stages(self) -> int:
        """Pieces of codes in shared memory; 0 where codes go straight to registers."""
        return 0

    @property
    def piece_registers(self) -> int:
        """Registers for the codes of a piece."""
        return self.piece * self.spec.packing.bits // 64

    @property
    def held_groups(self) -> int:
        """Groups whose scales are in registers at a time."""
        return self.held(max(1, self.groups))

    def held(self, count: int) -> int:
        """Returns how many of `count` numbers of a row in a round are in registers at a time: those of the pieces, and
        all of a panel. They divide the round's, so that a number has the same place in every round."""
        columns, width = self.step // count, self.schedule.panel_k
        of_panels = ((first + width - 1) // columns - first // columns + 1 for first in range(0, self.step, width))
        least = max(count * self.held_pieces // self.pieces, *of_panels)
        return next(held for held in range(least, count + 1) if count % held == 0)

    def products(self, panel: int) -> Iterator[Columns]:
        """The products of a round's panel, in order: cut where a group ends, and where f8e4m3 is promoted. Of scaled
        weights a panel is one product."""
        width = self.schedule.panel_k
        if self.spec.folds:
            yield Columns(0, width, 0)
            return
        most = width if self.keeps_sums or self.spec.compute == "i8" else PROMOTED
        group = self.step // max(1, self.groups)
        first, end = panel * width, (panel + 1) * width
        while first < end:
            last = min(end, first + most, (first // group + 1) * group)
            yield Columns(first % width, last - first, first // group)
            first = last


@dataclass(frozen=True)
class EightBitPrefillPlan(EightBitPlan):
    """Numbers that follow from a spec and a schedule. A *bank* is a set of registers for a product."""

    schedule: EightBitPrefillSchedule

    @property
    def part_tokens(self) -> int:
        return self.schedule.tokens // self.schedule.parts

    @property
    def code_stages(self) -> int:
        if self.piece > self.schedule.panel_k and not self.keeps_sums:
            return 0  # half of a piece would take registers beside products
        of_piece, room = ROWS_OF_TILE * self.piece * self.spec.packing.bits // 8, _SHARED - shared_bytes(self)
        return next((n for n in _CODE_STAGES if self.pieces % n == 0 and n * of_piece <= room), 0)

    def parts_of(self, tokens: int) -> int:
        """Parts that a tile or slice of so many tokens is multiplied in."""
        return max(1, tokens // self.part_tokens)
