"""Machine code that needs no linker: an object file as one piece of memory, which runs wherever it is mapped.

The programs for a CPU call nothing and have no data but constants, which they reach relative to the instruction. So an
object file is linked by laying its sections out one after the other and filling in these distances. What comes out is
a file that a C program maps read-only and executable, and calls.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from lowbit.dialect.errors import TargetError

ALIGN = 64
"""Bytes, to a multiple of which an image must be mapped: its vectors of constants are aligned so."""
_MAGIC, _X86_64 = b"\x7fELF\x02\x01", 62
_SYMTAB, _RELA, _NOBITS, _ALLOC = 2, 4, 8, 2  # section types and a flag (ELF-64 object file format)
_RELATIVE = (2, 4)  # R_X86_64_PC32 and R_X86_64_PLT32: symbol + addend - place, in 32 bits (psABI x86-64, 4.4)


@dataclass(frozen=True)
class Image:
    """A linked program: its memory, and the offset at which its function begins."""

    code: bytes
    entry: int


@dataclass(frozen=True)
class _Section:
    """A row of the table of sections."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int


def link(code: bytes, name: str) -> Image:
    """Returns the image of an object file for x86-64 that defines the function `name`.

    Raises TargetError for a file of another kind, and for one that refers to what it does not define.
    """
    if code[:6] != _MAGIC or struct.unpack_from("<H", code, 18) != (_X86_64,):
        raise TargetError("machine code for a CPU is exported for x86-64 alone; export on such a machine")
    sections = _sections(code)
    memory, starts = _laid_out(code, sections)
    symbols = next(_symbols(code, sections, each) for each in sections if each.kind == _SYMTAB)
    for each in sections:
        if each.kind == _RELA and each.info in starts:
            _relocate(memory, code, each, starts, symbols)
    for label, section, value in symbols:
        if label == name and section in starts:
            return Image(bytes(memory), starts[section] + value)
    raise TargetError(f"machine code for a CPU defines no {name}")


def _sections(code: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    return [_Section(*struct.unpack_from("<IIQQQQIIQQ", code, table + i * size)) for i in range(count)]


def _laid_out(code: bytes, sections: list[_Section]) -> tuple[bytearray, dict[int, int]]:
    """Returns the memory of all sections that a program has when it runs, and where each begins, by its number."""
    memory, starts = bytearray(), dict[int, int]()
    for number, each in enumerate(sections):
        if each.flags & _ALLOC and each.size:
            if each.kind == _NOBITS or each.align > ALIGN:
                raise TargetError("machine code for a CPU has variables, or data of an odd alignment")
            memory += bytes(-len(memory) % max(1, each.align))
            starts[number] = len(memory)
            memory += code[each.offset : each.offset + each.size]
    return memory, starts


def _symbols(code: bytes, sections: list[_Section], table: _Section) -> list[tuple[str, int, int]]:
    """Returns name, section and offset of every symbol."""
    names = sections[table.link].offset

    def read(at: int) -> tuple[str, int, int]:
        name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", code, at)
        return code[names + name : code.index(0, names + name)].decode(), section, value

    return [read(at) for at in range(table.offset, table.offset + table.size, table.entry_size)]


def _relocations(code: bytes, table: _Section) -> Iterator[tuple[int, int, int, int]]:
    """Yields place, kind, number of the symbol, and addend."""
    for at in range(table.offset, table.offset + table.size, table.entry_size):
        place, about, addend = struct.unpack_from("<QQq", code, at)
        yield place, about & 0xFFFFFFFF, about >> 32, addend


def _relocate(
    memory: bytearray, code: bytes, table: _Section, starts: dict[int, int], symbols: list[tuple[str, int, int]]
) -> None:
    """Fills in the distances that a section has to what it refers to."""
    for offset, kind, number, addend in _relocations(code, table):
        name, section, value = symbols[number]
        if kind not in _RELATIVE or section not in starts:
            raise TargetError(f"machine code for a CPU refers to {name or 'a section'} in a way that needs a linker")
        place = starts[table.info] + offset
        struct.pack_into("<i", memory, place, starts[section] + value + addend - place)
