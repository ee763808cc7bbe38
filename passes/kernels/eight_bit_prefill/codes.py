"""How codes come to the threads that decode them: straight to registers, or by way of shared memory.

A round has more pieces of codes than there are registers or stages for, and they take turns: number i has place i
modulo the places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import UNIT
from lowbit.passes.builder import Index, Memory, Program, Scalar, Tile
from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan
from lowbit.passes.kernels.persistent.schedule import WARPS, PrefillSchedule
from lowbit.passes.kernels.persistent.weight_read import WeightRead
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters

Round = tuple[Scalar, Index]
"""The number of a tile of rows, and of a round in it."""
CodesAt = Callable[[Scalar, Index, int], WeightRead]
"""Where the codes of a piece of a round are in device memory."""


class Codes(Protocol):
    """What the weight side needs of codes."""

    def begin(self, round_: Round) -> list[Tile]:
        """Starts to bring the first pieces of a round. Returns what is in registers from one round to the next."""
        ...

    def read(self, piece: int) -> None:
        """Brings a piece to registers from shared memory, if that is where it waits."""

    def of(self, registers: WeightRegisters, piece: int) -> Tile:
        """Returns the codes of a piece that has been read."""
        ...

    def bring_later(self, registers: WeightRegisters, piece: int, here: Round, coming: Round) -> None:
        """Starts to bring what takes the place of this piece of the round `here`, which has been decoded."""


class HeldCodes:
    """Codes in registers, a few pieces ahead. They come from the L2 cache: device memory would be too late, so a round
    ahead of its load a piece is asked to be brought there."""

    def __init__(self, plan: BytesPlan[PrefillSchedule], codes_at: CodesAt) -> None:
        self._held, self._pieces, self._codes_at = plan.held.pieces, plan.base.round.pieces, codes_at

    def begin(self, round_: Round) -> list[Tile]:
        codes = [self._codes_at(*round_, piece).load() for piece in range(self._held)]
        for piece in range(self._held, self._pieces):
            self._codes_at(*round_, piece).prefetch()
        return codes

    def read(self, piece: int) -> None:
        """It is there."""

    def of(self, registers: WeightRegisters, piece: int) -> Tile:
        return registers.codes[piece % self._held]

    def bring_later(self, registers: WeightRegisters, piece: int, here: Round, coming: Round) -> None:
        place, number, round_ = turn(piece, self._held, self._pieces, here, coming)
        registers.codes[place] = self._codes_at(*round_, number).load()
        self._codes_at(*coming, piece).prefetch()


class StagedCodes:
    """Codes in shared memory, which come straight from device memory, up to a round ahead. A thread copies what it
    reads itself: it waits for its own copies, and for no other thread. So registers have codes only while these are
    decoded: those of one piece at a time, the one that was read last."""

    _read: Tile

    def __init__(self, p: Program, plan: BytesPlan[PrefillSchedule], codes_at: CodesAt, layout: Layout) -> None:
        """layout: how the units of a piece lie in the registers of a warp."""
        self.p, self._codes_at, self._layout = p, codes_at, layout
        self._count, self._pieces, packing = plan.held.code_stages, plan.base.round.pieces, plan.spec.packing
        shape = (self._count, plan.base.round.piece // packing.chunk, WARPS, packing.units * 32)
        self._stages = p.alloc_shared(UNIT, shape)

    def begin(self, round_: Round) -> list[Tile]:
        for piece in range(self._count):
            self._copy(piece, round_, piece)
        return []

    def read(self, piece: int) -> None:
        self.p.wait(self._count - 1)
        self._read = self.p.load(self._stage(piece % self._count), (0, 0, 0), self._layout)

    def of(self, registers: WeightRegisters, piece: int) -> Tile:
        return self._read

    def bring_later(self, registers: WeightRegisters, piece: int, here: Round, coming: Round) -> None:
        place, number, round_ = turn(piece, self._count, self._pieces, here, coming)
        self._copy(place, round_, number)

    def _copy(self, place: int, round_: Round, number: int) -> None:
        source = self._codes_at(*round_, number)
        self.p.copy_async(source.view, self._stage(place), source.offsets, source.layout, source.boundary)
        self.p.commit()

    def _stage(self, place: int) -> Memory:
        return self.p.stage(self._stages, place)


def turn(number: int, held: int, count: int, here: Round, coming: Round) -> tuple[int, int, Round]:
    """Returns what follows number `number` of the `count` of a round: its place, its number, and its round."""
    later = number + held
    return (number % held, later, here) if later < count else (number % held, later - count, coming)
