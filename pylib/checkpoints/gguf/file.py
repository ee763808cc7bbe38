"""`lowbit.load_gguf`: the tensors of a GGUF file, as packed weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.elements import ACTS
from lowbit.dialect.errors import CheckpointError, LowbitError
from lowbit.dialect.fields import choice
from lowbit.dialect.formats.names import short_name
from lowbit.dialect.spec import Act
from lowbit.pylib.checkpoints.gguf.blocks import BLOCKS, BlockType
from lowbit.pylib.checkpoints.gguf.codebooks import CODEBOOKS
from lowbit.pylib.checkpoints.gguf.container import Entry, read_container
from lowbit.pylib.checkpoints.gguf.super_blocks import SUPER_BLOCKS
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.runtime.devices import check_torch_device
from lowbit.pylib.torch_types import type_name
from lowbit.pylib.weights.packed import PackedWeight

TYPES: dict[int, BlockType] = BLOCKS | SUPER_BLOCKS | CODEBOOKS
DENSE = {0: torch.float32, 1: torch.float16, 24: torch.int8, 25: torch.int16, 26: torch.int32, 27: torch.int64}
DENSE |= {28: torch.float64, 30: torch.bfloat16}
"""The types whose tensors are what they say."""
UNREAD = {41: "Q1_0", 4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 31: "Q4_0_4_4", 32: "Q4_0_4_8"}
UNREAD |= {33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
"""The types that can't be read, by number."""


def load_gguf(path: str | PathLike[str], act: Act = "f16", device: torch.device | str = "cpu") -> GgufFile:
    """Returns the tensors of a GGUF file by name. Nothing but the header is read until a tensor is looked up.

    path     a file, or any one of the files of a model that lies in several; the others must be beside it
    act      type of the inputs of packed weights
    device   where tensors go; they are unpacked and packed there

    Raises CheckpointError for a file that is damaged, lacks others, or is no GGUF file, and SpecError for another type
    or device.
    """
    check_torch_device(device)
    return GgufFile(Path(path), cast(Act, choice("act", short_name(act), ACTS)), device)


class GgufFile(Mapping[str, "PackedWeight | Tensor"]):
    """The tensors of a GGUF file: matrices of a quantized type as `PackedWeight`, floats and integers as tensors.

    Values are those of llama.cpp's dequantization in f32, bit for bit. Rows and columns are in the order of the file:
    converters to GGUF change some, such as the rows of q and k where llama.cpp rotates pairs side by side.

    metadata  what the file says of the model: numbers, strings, lists of strings, and NumPy arrays
    """

    def __init__(self, path: Path, act: Act, device: torch.device | str) -> None:
        self.path = path
        self.act: Act = act
        self.device = device
        self._container = read_container(path)
        self.metadata: dict[str, Any] = self._container.metadata
        self._check_whole()

    def _check_whole(self) -> None:
        """Raise CheckpointError for a file that ends before its tensors do."""
        for name, entry in self._container.entries.items():
            try:
                end = entry.start + _size(entry)
            except CheckpointError:
                continue  # a type that can't be read, which is an error when the tensor is asked for
            if end > len(entry.data):
                where = f"bytes {entry.start} to {end} of a file of {len(entry.data)}"
                raise CheckpointError(f"{entry.path}: {name}: it takes {where}; the file is cut short")

    def __iter__(self) -> Iterator[str]:
        return iter(self._container.entries)

    def __len__(self) -> int:
        return len(self._container.entries)

    def __contains__(self, name: object) -> bool:
        return name in self._container.entries

    def __getitem__(self, name: str) -> PackedWeight | Tensor:
        """Returns a tensor. Raises CheckpointError for a type that can't be read, and for a stack of matrices."""
        return self.load(name)

    def load(self, name: str, rows: Tensor | None = None, factor: Tensor | None = None) -> PackedWeight | Tensor:
        """Returns a tensor, as `file[name]` does.

        rows    which row of the file comes first, second and so on; None: as they are
        factor  f32 [1], by which a matrix of a quantized type is multiplied; None: 1
        """
        entry = self._container.entries[name]
        try:
            if entry.kind in DENSE:
                return self._dense(entry) if rows is None else self._dense(entry)[rows]
            if len(entry.shape) != 2:
                raise CheckpointError(f"shape {list(entry.shape)} is no matrix; load_experts(name) reads stacks")
            return self._packed([entry], rows, [factor])
        except LowbitError as error:
            raise CheckpointError(f"{entry.path}: {name}: {error}") from error

    def load_joined(
        self, names: Sequence[str], rows: Tensor | None, factors: Sequence[Tensor | None]
    ) -> PackedWeight | Tensor:
        """Returns rows of several matrices, one below the other: packed where all are of one quantized type, else their
        values in f32.

        rows     which row of them comes first, second and so on; None: as they are
        factors  of each matrix, as in `load`
        """
        entries = [self._container.entries[name] for name in names]
        try:
            if any(len(entry.shape) != 2 for entry in entries) or len({entry.shape[1] for entry in entries}) > 1:
                found = " and ".join(str(list(entry.shape)) for entry in entries)
                raise CheckpointError(f"shapes {found} are no matrices with equal columns")
            if len({entry.kind for entry in entries}) > 1 or entries[0].kind in DENSE:
                values = torch.cat([self.decoded(name, factor) for name, factor in zip(names, factors)])
                return values if rows is None else values[rows]
            return self._packed(entries, rows, factors)
        except LowbitError as error:
            raise CheckpointError(f"{entries[0].path}: {' and '.join(names)}: {error}") from error

    def decoded(self, name: str, factor: Tensor | None = None) -> Tensor:
        """Returns the values of a tensor of any type in f32, in its shape. factor: as in `load`, or `load_experts`."""
        if self.is_dense(name):
            return self._dense(self._container.entries[name]).float()
        if len(self.shape(name)) != 3:
            return cast(PackedWeight, self.load(name, factor=factor)).dequantize()
        return torch.stack([weight.dequantize() for weight in self.load_experts(name, factor)])

    def load_experts(self, name: str, factors: Tensor | None = None) -> list[PackedWeight]:
        """Returns the matrices of a tensor with three dimensions, of which the first is the expert.

        factors  f32 [experts], by which they are multiplied; None: 1
        """
        return self.load_joined_experts([name], None, [factors])

    def load_joined_experts(
        self, names: Sequence[str], rows: Tensor | None, factors: Sequence[Tensor | None]
    ) -> list[PackedWeight]:
        """Returns the matrices of several tensors as of `load_experts`, those of an expert one below the other.

        rows     which row of an expert comes first, second and so on; None: as they are
        factors  of each tensor, as in `load_experts`
        """
        first = self._container.entries[names[0]]
        try:
            stacks = [self._matrices(name) for name in names]
            each = [[None] * len(stacks[0]) if f is None else list(f.view(-1, 1)) for f in factors]
            return [self._packed(parts, rows, of) for parts, of in zip(zip(*stacks), zip(*each))]
        except LowbitError as error:
            raise CheckpointError(f"{first.path}: {' and '.join(names)}: {error}") from error

    def _matrices(self, name: str) -> list[Entry]:
        """Returns the matrices of a stack. Raises CheckpointError for a tensor that is none, or is dense."""
        entry = self._container.entries[name]
        if len(entry.shape) != 3:
            raise CheckpointError(f"shape {list(entry.shape)} is no stack of matrices")
        if self.is_dense(name):
            raise CheckpointError(f"type {self.type_of(name)} is not packed; file[name] is the stack")
        count, size = entry.shape[0], _size(entry) // max(1, entry.shape[0])
        return [replace(entry, shape=entry.shape[1:], start=entry.start + i * size) for i in range(count)]

    def type_of(self, name: str) -> str:
        """Returns the name of a tensor's type, such as "Q4_K" or "float32"."""
        kind = self._container.entries[name].kind
        if kind in TYPES:
            return TYPES[kind].name
        return type_name(DENSE[kind]) if kind in DENSE else UNREAD.get(kind, f"type {kind}")

    def is_dense(self, name: str) -> bool:
        """Tells whether a tensor has floats or integers, and is not packed."""
        return self._container.entries[name].kind in DENSE

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor, rows first."""
        return self._container.entries[name].shape

    def nbytes(self, name: str) -> int:
        """Returns the bytes of a tensor in the file. Raises CheckpointError for a type that can't be read."""
        entry = self._container.entries[name]
        try:
            return _size(entry)
        except LowbitError as error:
            raise CheckpointError(f"{entry.path}: {name}: {error}") from error

    def _packed(
        self, entries: Sequence[Entry], rows: Tensor | None, factors: Sequence[Tensor | None]
    ) -> PackedWeight:
        """Returns matrices of one type with equal columns, one below the other."""
        parts = [self._bytes(entry).view(entry.shape[0], -1) for entry in entries]
        data, factor = parts[0] if len(parts) == 1 else torch.cat(parts), _of_rows(entries, factors)
        if rows is not None:
            data = data[rows.to(data.device)]
            factor = factor[rows] if factor is not None and len(factor) > 1 else factor
        weight = _imported(replace(entries[0], shape=(len(data), entries[0].shape[1])), data)
        return (weight if factor is None else replace(weight, row_scales=factor)).pack(self.act)

    def _dense(self, entry: Entry) -> Tensor:
        data = self._bytes(entry)
        return data.view(DENSE[entry.kind]).view(entry.shape)

    def _bytes(self, entry: Entry) -> Tensor:
        data = entry.data[entry.start : entry.start + _size(entry)]
        return data.to(self.device, copy=entry.kind in DENSE)  # which is not the mapped memory then


def _size(entry: Entry) -> int:
    """Returns the bytes of a tensor."""
    count = math.prod(entry.shape)
    if not count:
        raise CheckpointError(f"shape {list(entry.shape)} is empty")
    if entry.kind in DENSE:
        return count * DENSE[entry.kind].itemsize
    if entry.kind not in TYPES:
        known = ", ".join(kind.name for kind in TYPES.values())
        name = UNREAD.get(entry.kind, f"type {entry.kind} of GGUF")
        raise CheckpointError(f"{name} can't be imported; what can is {known}")
    kind = TYPES[entry.kind]
    if (columns := entry.shape[-1]) % kind.columns:
        raise CheckpointError(f"{columns} columns are not blocks of {kind.columns} ({kind.name})")
    return count // kind.columns * kind.nbytes


def _of_rows(entries: Sequence[Entry], factors: Sequence[Tensor | None]) -> Tensor | None:
    """Returns the factors of rows of matrices that lie one below the other; of a single one [1], and None without."""
    if all(factor is None for factor in factors):
        return None
    if len(entries) == 1:
        return factors[0]
    each = (torch.ones(1) if factor is None else factor for factor in factors)
    return torch.cat([factor.expand(entry.shape[0]) for entry, factor in zip(entries, each)])


def _imported(entry: Entry, data: Tensor) -> Imported:
    """Returns the weight that rows of blocks make."""
    kind, (n, k) = TYPES[entry.kind], entry.shape
    weight = kind.read(data.view(-1, kind.nbytes))
    groups = {name: _rows(getattr(weight, name), n) for name in ("scales", "zeros", "offsets")}
    second = {name: numbers.reshape(n, -1) for name, numbers in weight.second_level.items()}
    return replace(weight, codes=weight.codes.reshape(n, k), second_level=second, **groups)


def _rows(numbers: Tensor | None, n: int) -> Tensor | None:
    return None if numbers is None else numbers.reshape(n, -1)
