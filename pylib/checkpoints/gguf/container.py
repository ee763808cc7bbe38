"""The container of GGUF: a header with metadata and a list of tensors, and after it the tensors' bytes.

A large model lies in several files, model-00001-of-00003.gguf and so on. The first one has the metadata of the model.

All numbers are little-endian. Every length is compared with the bytes that are left before anything is read, so that a
damaged file costs no more time and memory than its size. (The reader of the `gguf` package takes 9 s and more, not 0.4,
for a vocabulary of 150,000 tokens with merges, and answers damaged lengths with NumPy's errors.)
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError

VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, unless the metadata have general.alignment
ALIGNMENT_STEP = 8  # bytes, of which the format has multiples
MOST_DIMS = 4
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of metadata that are numbers, as `struct` and NumPy know them."""

PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
"""The name of one of several files, as llama.cpp's gguf-split makes them."""

Info = tuple[str, tuple[int, ...], int, int]
"""A tensor's entry in the header: its name, shape and type, and where it begins after the header."""


@dataclass(frozen=True)
class Entry:
    """A tensor: `shape` as torch has it, the number of its type, and where its bytes begin in `data`, which are all of
    the file `path`."""

    shape: tuple[int, ...]
    kind: int
    start: int
    data: Tensor
    path: Path


@dataclass(frozen=True)
class Container:
    """A file, or several that are one, mapped into memory.

    metadata  by key: numbers, strings, lists of strings, and NumPy arrays of numbers
    entries   the tensors by name
    """

    metadata: dict[str, Any]
    entries: dict[str, Entry]


def read_container(path: Path) -> Container:
    """Returns what a file has, together with the others where it is one of several.

    Raises CheckpointError if one of them is no GGUF file, is damaged, or is not there.
    """
    given = _read_file(path)
    count = given.metadata.get("split.count", 1)
    if not isinstance(count, int) or count < 2:
        return given
    name = PART.fullmatch(path.name)
    if name is None or int(name[2]) != count:
        raise CheckpointError(f"{path} is one of {count} files; their names must end with -00001-of-{count:05}.gguf")
    parts = [_part(path.with_name(f"{name[1]}-{i + 1:05}-of-{count:05}.gguf"), i, count) for i in range(count)]
    return Container(parts[0].metadata, _joined(path, parts))


def _part(path: Path, number: int, count: int) -> Container:
    if not path.exists():
        raise CheckpointError(f"{path} is not there, of the {count} files of this model; put all into one folder")
    part = _read_file(path)
    said = part.metadata.get("split.no"), part.metadata.get("split.count")
    if said != (number, count):
        found = f"{said[0]!r} and {said[1]!r}"
        raise CheckpointError(f"{path}: split.no and split.count are {found}, not {number}, {count}")
    return part


def _joined(path: Path, parts: Sequence[Container]) -> dict[str, Entry]:
    """Returns the tensors of all parts."""
    found = dict[str, Entry]()
    for part in parts:
        if twice := found.keys() & part.entries.keys():
            raise CheckpointError(f"{path}: {min(twice)} is in two of the files of this model")
        found |= part.entries
    said = parts[0].metadata.get("split.tensors.count", len(found))
    if said != len(found):
        raise CheckpointError(f"{path}: its files have {len(found)} tensors, but split.tensors.count={said!r}")
    return found


def _read_file(path: Path) -> Container:
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} can't be read: {reason}") from error
    try:
        return _read(mapped, path)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read(mapped: mmap.mmap, path: Path) -> Container:
    cursor = _Cursor(mapped)
    if cursor.take(4) != b"GGUF":
        raise CheckpointError("it does not begin with GGUF")
    if (version := cursor.number("I")).to_bytes(4, "big") in [known.to_bytes(4, "little") for known in VERSIONS]:
        raise CheckpointError("it is big-endian; gguf-convert-endian of the gguf package makes it little-endian")
    if version not in VERSIONS:
        raise CheckpointError(f"GGUF version {version} can't be read; versions 2 and 3 can")
    tensors, entries = cursor.number("Q"), cursor.number("Q")
    metadata = {cursor.string(): cursor.value(cursor.number("I")) for _ in range(entries)}
    infos = [(cursor.string(), *cursor.info()) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment % ALIGNMENT_STEP:
        raise CheckpointError(f"general.alignment is {alignment!r}; it must be a positive multiple of {ALIGNMENT_STEP}")
    _check(infos, alignment)
    start, data = -(-cursor.at // alignment) * alignment, torch.frombuffer(mapped, dtype=torch.uint8)
    entries = {name: Entry(shape, kind, start + offset, data, path) for name, shape, kind, offset in infos}
    return Container(metadata, entries)


def _check(infos: Sequence[Info], alignment: int) -> None:
    """Raise CheckpointError for tensors that begin at no multiple of the alignment, or of one name."""
    found = set[str]()
    for name, _, _, offset in infos:
        if offset % alignment:
            raise CheckpointError(f"{name}: it begins at {offset}, which is no multiple of the alignment, {alignment}")
        if name in found:
            raise CheckpointError(f"two tensors are called {name}")
        found.add(name)


class _Cursor:
    """Reads one thing after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise CheckpointError(f"the file ends within its header, at byte {self.at}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self, kind: int, may_nest: bool = True) -> Any:
        """Returns a value of the metadata."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or not may_nest:
            raise CheckpointError(f"metadata of type {kind} at byte {self.at} can't be read")
        inner, count = self.number("I"), self.number("Q")
        if inner not in NUMBERS:
            return [self.value(inner, may_nest=False) for _ in range(count)]
        numbers = np.dtype("<" + NUMBERS[inner]) if inner != 7 else np.dtype(np.bool_)
        return np.frombuffer(self.take(count * numbers.itemsize), numbers)

    def info(self) -> tuple[tuple[int, ...], int, int]:
        """Returns the shape of a tensor, its type and where it begins after the header."""
        dims = self.number("I")
        if not 1 <= dims <= MOST_DIMS:
            raise CheckpointError(f"a tensor has {dims} dimensions; those of 1 to {MOST_DIMS} can be read")
        shape = tuple(self.number("Q") for _ in range(dims))
        return shape[::-1], self.number("I"), self.number("Q")
