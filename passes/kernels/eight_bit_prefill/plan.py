"""What follows from a spec and a schedule of a persistent kernel for activations of 8 bits: `BytesPlan`. No MLIR is
needed here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from lowbit.dialect.formats.byte_codes import PROMOTED, has_signs
from lowbit.dialect.formats.raw_codes import zero_code
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.engine import Engine
from lowbit.passes.kernels.persistent.group_columns import GroupColumns
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import ROWS_OF_TILE, WARPS, PrefillSchedule
from lowbit.passes.kernels.scales.round_tensors import RoundTensor

S = TypeVar("S", bound=PrefillSchedule)
S_co = TypeVar("S_co", bound=PrefillSchedule, covariant=True)
_HELD = ((64, 32), (128, 16), (256, 8))
"""For tiles of up to so many tokens, the registers for codes, of a piece at least."""
_CODE_STAGES = (4, 3, 2)  # pieces of codes in shared memory, as many as there is room for
_SHARED = 227 * 1024  # bytes that a block of sm_90a has


@dataclass(frozen=True)
class Products:
    """The products of bytes that a tile is multiplied by, and who adds them up."""

    base: PersistentPlan

    @property
    def keeps_sums(self) -> bool:
        """Tells whether the tensor core adds up all columns: weights of groups are scaled before they are multiplied,
        or are integers of which no group has a scale."""
        spec = self.base.spec
        return spec.fold_scales or (spec.compute == "i8" and not self.base.scaling.groups)

    def of_panel(self, panel: int) -> Iterator[GroupColumns]:
        """Yields the products of a round's panel, in order: cut where a group ends, and where f8e4m3 is promoted. Of
        scaled weights a panel is one product."""
        spec, width = self.base.spec, self.base.schedule.panel_k
        if spec.folds:
            yield GroupColumns(0, width, 0)
            return
        most = width if self.keeps_sums or spec.compute == "i8" else PROMOTED
        if self.base.schedule.order and not self.keeps_sums:
            most = self.base.tiles.chains.product_columns
        group = self.base.round.step // max(1, self.base.scaling.groups)
        first, end = panel * width, (panel + 1) * width
        while first < end:
            last = min(end, first + most, (first // group + 1) * group)
            yield GroupColumns(first % width, last - first, first // group)
            first = last

    @cached_property
    def of_round(self) -> int:
        """How many a round has."""
        return sum(len(list(self.of_panel(panel))) for panel in range(self.base.round.panels))

    def parts_of(self, tokens: int) -> int:
        """Returns the parts that a tile or slice of so many tokens is multiplied in."""
        return max(1, tokens // self.base.schedule.part_tokens)


@dataclass(frozen=True)
class Held:
    """What registers and shared memory hold of codes and scales at a time: those of a round take turns.

    ahead   numbers of a row that are in registers where bytes are made with them, if a panel needs fewer: they come
            from the L2 cache, which takes about as long as a panel
    """

    base: PersistentPlan
    products: Products
    ahead: int = 1

    @property
    def early(self) -> bool:
        """Tells whether what later panels need is loaded as soon as the codes of a panel are decoded, and not behind
        its last product: there are registers for it then if products have none of their own."""
        return self.products.keeps_sums

    @property
    def pieces(self) -> int:
        """Pieces whose codes are in registers at a time."""
        registers = next(registers for tokens, registers in _HELD if self.base.schedule.tokens <= tokens)
        of_piece, pieces = self.piece_registers, self.base.round.pieces
        fitting = (held for held in (4, 2) if held * of_piece <= registers and pieces % held == 0)
        return next(fitting, 1)

    @property
    def code_registers(self) -> int:
        """Registers for the codes of these pieces."""
        return self.pieces * self.piece_registers

    @property
    def piece_registers(self) -> int:
        """Registers for the codes of a piece, of all row blocks of a warp."""
        row_blocks = WARPS // self.base.schedule.warps[0]
        return row_blocks * (self.base.round.piece * self.base.spec.packing.bits // 64)

    @cached_property
    def code_stages(self) -> int:
        """Pieces of codes in shared memory; 0 where codes go straight to registers. A thread counts its copies: there
        are none where it copies x, too."""
        base, piece, pieces = self.base, self.base.round.piece, self.base.round.pieces
        if not base.x.by_boxes:
            return 0
        if piece > base.schedule.panel_k and not self.products.keeps_sums:
            return 0  # half of a piece would take registers beside products
        of_piece, room = ROWS_OF_TILE * piece * base.spec.packing.bits // 8, _SHARED - base.shared_bytes
        return next((n for n in _CODE_STAGES if pieces % n == 0 and n * of_piece <= room), 0)

    def of(self, tensor: RoundTensor) -> int:
        """Returns how many of the numbers of a row in a round are in registers at a time. They divide the round's, so
        that a number has the same place in every round."""
        least = self.least(tensor.count)
        most = max(least, self.ahead) if self._makes_bytes(tensor) else least
        return next(held for held in range(most, 0, -1) if tensor.count % held == 0)

    def least(self, count: int) -> int:
        """Returns the fewest that can be, of `count` in a round: those of the pieces, and all of a panel."""
        step, width, pieces = self.base.round.step, self.base.schedule.panel_k, self.base.round.pieces
        columns = step // count
        of_panels = ((first + width - 1) // columns - first // columns + 1 for first in range(0, step, width))
        least = max(count * self.pieces // pieces, *of_panels)
        return next(held for held in range(least, count + 1) if count % held == 0)

    def _makes_bytes(self, tensor: RoundTensor) -> bool:
        """Tells whether bytes are made with these numbers, so that products wait for them."""
        return self.base.spec.folds or (tensor.slot.name == "zeros" and not self.base.scaling.sums_x)


@dataclass(frozen=True)
class BytesPlan(Generic[S_co]):
    """A persistent plan whose codes become bytes.

    base      what it shares with those that multiply numbers of x's type
    schedule  that of the base
    ahead     see `Held`; a kernel has more by `registers.with_numbers_ahead`
    """

    base: PersistentPlan
    schedule: S_co
    ahead: int = 1

    @property
    def spec(self) -> MatmulSpec:
        return self.base.spec

    @cached_property
    def products(self) -> Products:
        return Products(self.base)

    @cached_property
    def held(self) -> Held:
        return Held(self.base, self.products, self.ahead)

    @property
    def subtracts(self) -> bool:
        """Tells whether zeros and offsets are subtracted from codes, and not made up for by sums of x."""
        return not self.base.scaling.sums_x

    @property
    def offset(self) -> int:
        """The number that is subtracted from every code where there are no zeros, and codes have no signs."""
        offset = self.subtracts and self.spec.zeros != "int" and not self._are_signed
        return int(zero_code(self.spec.dtype)) if offset else 0

    @property
    def has_signs(self) -> bool:
        """Tells whether integers are negative, too, as they are multiplied."""
        return self._are_signed or (self.subtracts and self.spec.zeros == "int")

    @property
    def _are_signed(self) -> bool:
        """Whether codes become signed numbers with nothing subtracted."""
        return has_signs(self.spec.dtype, self.spec.byte_type, self.spec.zeros)

    @property
    def in_f16(self) -> BytesPlan[S_co]:
        """The plan of weights that are scaled in f16, whatever the type of x was before it got 8 bits."""
        spec = replace(self.spec, act="f16", out=self.spec.out_dtype)
        return replace(self, base=replace(self.base, spec=spec))


def bytes_plan(spec: MatmulSpec, schedule: S, engine: Engine) -> BytesPlan[S]:
    """Returns the plan of a spec and a schedule."""
    return BytesPlan(PersistentPlan(spec, schedule, engine), schedule)
