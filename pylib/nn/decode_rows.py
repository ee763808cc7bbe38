"""Single rows of a packed weight as numbers, in plain operations of torch: an embedding looks its tokens up so.

A row's codes lie in the words of four lanes of each unit, beside those of the row 8 below or above it
(`dialect.formats.packing`). So the words of these lanes are gathered, taken apart, and half of the codes dropped.
Shapes follow from the number of rows, and nothing is asked of the device: it can be compiled, and recorded in a CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.bilevel import TABLE_CODE, least_code
from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.packing import BLOCK_K, ROWS, WORDS_PER_UNIT, Packing, Piece, run_of
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import TensorSlot
from lowbit.pylib.torch_types import TORCH, stored_type
from lowbit.pylib.weights.dequantized import in_order_of_x
from lowbit.pylib.weights.memory_order import RUNS
from lowbit.pylib.weights.shared_bytes import codes_of
from lowbit.pylib.weights.values import least

LANES = 4  # that hold two rows of an mma block, 8 apart
HALF = ROWS // 2


def check_rows(spec: MatmulSpec) -> None:
    """Raise SpecError for a weight whose rows can't be taken one by one."""
    for name, what in (("outliers", "outliers are stored for 16 rows at once"), ("bias", "a bias is no part of a row")):
        if getattr(spec, name):
            raise SpecError(f"{name}=True: {what}; an embedding needs {name}=False")


class Decoder(NamedTuple):
    """Turns words into numbers. It is made before: neither torch.compile nor a CUDA graph can make it.

    run      the pieces of the registers of a run of words
    levels   what each stored code stands for, in f32, before it is scaled
    bytes    the same for other tensors that `pack` takes and that are bytes in memory, by name: torch.compile does not
             know all floats of 8 bits
    """

    run: tuple[tuple[Piece, ...], ...]
    levels: Tensor
    bytes: Mapping[str, Tensor]

    @classmethod
    def of(cls, spec: MatmulSpec, device: torch.device) -> Decoder:
        """Returns the decoder of a weight on a device."""
        levels = np.roll(spec.dtype.values().astype(np.float32), -least(spec))
        tables = {slot.name: _byte_values(spec, slot).to(device) for slot in spec.given_tensors if _is_bytes(slot)}
        return cls(run_of(spec.packing.bits), torch.from_numpy(levels).to(device), tables)


def _is_bytes(slot: TensorSlot) -> bool:
    return stored_type(slot.storage) is torch.uint8


def _byte_values(spec: MatmulSpec, slot: TensorSlot) -> Tensor:
    """Returns what each byte of a tensor in memory stands for."""
    values = codes_of(slot, torch.arange(256, dtype=torch.uint8, device="cpu")).view(TORCH[slot.storage]).float()
    if slot.storage != "u8":
        return values
    if slot.code == TABLE_CODE and spec.bilevel:
        return torch.tensor(spec.bilevel.table, dtype=torch.float32, device="cpu")
    return values + (least_code(slot.code) if slot.code else least(spec))


def take_rows(spec: MatmulSpec, tensors: Mapping[str, Tensor], decoder: Decoder, rows: Tensor) -> Tensor:
    """Returns rows [count, k] of a weight in f32: those of `PackedWeight.dequantize`, bit for bit.

    tensors   of the weight, by name
    decoder   of the spec, where the tensors are
    rows      integers [count] in 0 .. n - 1
    """
    block, place = rows // ROWS, rows % ROWS
    packing, numbers = spec.packing, _Numbers(spec, tensors, decoder.bytes, block, place)
    codes = _codes(packing, decoder.run, tensors["codes"], block, place)
    values = decoder.levels[codes].view(len(rows), packing.groups, packing.padded_k // packing.groups)
    row, zero, offset = (numbers.get(name) for name in ("row_scales", "zeros", "offsets"))
    scale = numbers.of("scales")
    if row is not None:
        scale, offset = row * scale, None if offset is None else row * offset
    if zero is not None:
        values = values - zero[..., None]
    values = values * scale[..., None]
    if offset is not None:
        values = values + offset[..., None]
    result = _without_padding(spec, values)
    return in_order_of_x(result, tensors["permutation"]) if spec.permuted else result


def _codes(packing: Packing, run: Sequence[Sequence[Piece]], codes: Tensor, block: Tensor, place: Tensor) -> Tensor:
    """Returns the codes of rows, as they are stored: int64 [count, padded_k]."""
    lanes = codes.view(*codes.shape[:3], HALF, LANES, WORDS_PER_UNIT)[block, :, :, place % HALF]
    words = lanes.transpose(-1, -2).reshape(len(lanes), packing.chunks, RUNS, packing.units, LANES)
    halves = torch.stack([words, words >> 16], -1)
    registers = torch.stack([_register(halves, pieces) for pieces in run], 3)
    # registers of an mma block: columns 0 to 7 of both rows, then 8 to 15; of each, a lane has two columns
    pairs = registers.view(len(lanes), packing.padded_k // BLOCK_K, 2, 2, LANES, 2)
    lower = (place >= HALF).view(-1, 1, 1, 1, 1)
    return torch.where(lower, pairs[:, :, :, 1], pairs[:, :, :, 0]).reshape(len(lanes), packing.padded_k).long()


def _register(halves: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """Returns the codes of one register of each run, out of the words of the run at dim 3."""
    first, *others = [((halves[:, :, :, p.word] >> p.shift) & ((1 << p.bits) - 1)) << p.low for p in pieces]
    for piece in others:
        first = first | piece
    return first


def _without_padding(spec: MatmulSpec, values: Tensor) -> Tensor:
    """Returns the columns of the weight out of all columns in memory [count, groups, columns]."""
    if spec.packing.pads_groups:
        values = values[:, : spec.groups, : spec.group_size]
    return values.flatten(1)[:, : spec.k]


class _Numbers:
    """Scales, zeros and offsets of some rows, in f32.

    tables         `Decoder.bytes`
    block, place   of each row: its block of 16 rows, and where in the block it is
    """

    def __init__(
        self,
        spec: MatmulSpec,
        tensors: Mapping[str, Tensor],
        tables: Mapping[str, Tensor],
        block: Tensor,
        place: Tensor,
    ) -> None:
        self.spec = spec
        self.slots = {slot.name: slot for slot in spec.given_tensors}
        self.tensors, self.tables, self.block, self.place = tensors, tables, block, place

    def get(self, name: str) -> Tensor | None:
        """Returns what `of` does; None if the weight has no such tensor."""
        return self.of(name) if name in self.slots else None

    def of(self, name: str) -> Tensor:
        """Returns the numbers of a tensor [count, groups in memory], or [count, 1]."""
        slot = self.slots[name]
        values = self._stored(slot)
        if slot.code and self.spec.bilevel:
            groups = self.spec.bilevel.groups
            if zero := self.slots.get(f"{slot.role}_zeros"):
                values = values - self._of_groups(zero, groups)
            values = values * self._of_groups(self.slots[f"{slot.role}_scales"], groups)
            if offset := self.slots.get(f"{slot.role}_offsets"):
                values = values + self._of_groups(offset, groups)
        return values

    def _of_groups(self, slot: TensorSlot, groups: int) -> Tensor:
        """Returns the numbers of a second level, one for so many groups, for every group in memory."""
        return self._stored(slot).repeat_interleave(groups, 1)[:, : self.spec.packing.groups]

    def _stored(self, slot: TensorSlot) -> Tensor:
        stored = self.tensors[slot.tensor]
        if slot.index == "padded_row":
            values = stored[self.block * ROWS + self.place, None]
        else:
            values = stored[self.block, :, self.place if stored.shape[2] == ROWS else 0]
        return self.tables[slot.name][values.long()] if slot.name in self.tables else values.float()
