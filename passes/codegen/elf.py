"""Object code to an image that runs wherever it is loaded: the linker of the CPU target.

LLVM writes a relocatable ELF file. Its sections lie one after the other in the image, each aligned as it asks; code
refers to code and to constants by distance alone, and distances do not change when the image moves. So all that there
is to link is done here, once, and loading an image is a copy (Generic ABI, "Object Files"; psABI x86-64, "Relocation").
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lowbit.dialect.errors import PassError

_SYMTAB, _RELA, _NOBITS = 2, 4, 8  # kinds of sections
_ALLOC = 2  # flag of a section that is loaded
_DISTANCES = {2: "R_X86_64_PC32", 4: "R_X86_64_PLT32"}


class _Section(NamedTuple):
    """An entry of the section header table."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


@dataclass(frozen=True)
class Image:
    """Linked code: its bytes, and at which of them a function begins."""

    code: bytes
    functions: dict[str, int]

    def only(self, functions: Iterable[str]) -> Image:
        """The same with no more functions than these."""
        return Image(self.code, {name: self.functions[name] for name in functions})


def link(elf: bytes) -> Image:
    """The image of a relocatable x86-64 ELF file.

    Raises PassError where the code calls a function that it does not hold, or refers to anything by its address.
    """
    sections = _sections(elf)
    image, start = _place(elf, sections)
    symbols = _symbols(elf, sections, start)
    for section in sections:
        if section.kind == _RELA and section.info in start:
            _relocate(elf, section, image, start[section.info], symbols)
    functions = {name: address for name, address in symbols if name and address is not None}
    return Image(bytes(image), functions)


def _sections(elf: bytes) -> list[_Section]:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise PassError("the object code is no little-endian 64-bit ELF file")
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    return [_Section(*struct.unpack_from("<IIQQQQIIQQ", elf, offset + size * i)) for i in range(count)]


def _place(elf: bytes, sections: list[_Section]) -> tuple[bytearray, dict[int, int]]:
    """The image before relocation, and where in it each of its sections begins."""
    image = bytearray()
    start: dict[int, int] = {}
    for number, section in enumerate(sections):
        if section.flags & _ALLOC and section.size:
            image.extend(bytes(-len(image) % max(1, section.alignment)))
            start[number] = len(image)
            is_zero = section.kind == _NOBITS
            image += bytes(section.size) if is_zero else elf[section.offset : section.offset + section.size]
    return image, start


def _symbols(elf: bytes, sections: list[_Section], start: dict[int, int]) -> list[tuple[str, int | None]]:
    """Name and place in the image of every symbol; None where it has none."""
    (table,) = (section for section in sections if section.kind == _SYMTAB)
    names = sections[table.link].offset
    found: list[tuple[str, int | None]] = []
    for place in range(table.offset, table.offset + table.size, table.entry_size):
        name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", elf, place)
        text = elf[names + name : elf.index(b"\0", names + name)].decode()
        found.append((text, start[section] + value if section in start else None))
    return found


def _relocate(
    elf: bytes, table: _Section, image: bytearray, start: int, symbols: list[tuple[str, int | None]]
) -> None:
    """Writes the distances that a table lists into one section."""
    for entry in range(table.offset, table.offset + table.size, table.entry_size):
        offset, info, addend = struct.unpack_from("<QQq", elf, entry)
        kind, (name, target) = info & 0xFFFFFFFF, symbols[info >> 32]
        if target is None:
            raise PassError(f"host code refers to {name}, which it does not hold")
        if kind not in _DISTANCES:
            raise PassError(f"host code has relocation {kind}; allowed: {', '.join(_DISTANCES.values())}")
        place = start + offset
        struct.pack_into("<i", image, place, target + addend - place)
