"""How the codes of a weight [n, k] sit in memory: fragments of the tensor core, in the order they are used.

Rows are cut into *row blocks* of 16 and columns into *mma blocks* of 16. A lane of a warp owns eight codes of
every 16 x 16 block, the A fragment of mma.m16n8k16 (PTX ISA 9.7.14.5.8; `layout.MMA_M16N8K16_A`): four
*registers*, each a pair of codes. Three rules turn that into bytes.

*Planes.* A b-bit code is the sum of fields of 8, 4, 2 or 1 bits (6 = 4 + 2, 7 = 4 + 2 + 1), low bits first; each
field goes to a plane of its own, so that no field straddles a word.

*Pairs.* A 32-bit word of a p-bit plane holds 16/p registers. A register has its first code in the lower half of the
word and its second 16 bits above, so one shift and one mask extract both halves of an f16x2 register. In the widest
plane pair j is at bit j*p. A narrower plane has its field where it is wanted, right above the wider ones' (modulo 16;
words of the widest plane that share a narrower word take turns): one shift amount then serves all planes.

*Units.* Four consecutive words of a lane make 16 bytes, and the 32 lanes of a warp a *unit* of 512 contiguous
bytes, which one instruction loads. A *chunk* is the smallest stretch of k that fills whole units in every
plane: 32 columns for 8 bits, 64 for 4, 128 for 2 and 6, 256 for 1, 3, 5 and 7.

The packed codes are therefore an int32 array [row blocks, chunks, units, 32 lanes, 4 words]. Scales and zeros
are [row blocks, groups, 16 rows].

Groups. A group of g columns is a whole number of chunks or a whole fraction of one that is a multiple of 16;
where it is not (g = 17, 48 or 100), every group is padded with code 0 to the next such size, and the activation
is read through `k_source`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dialect.layout import MMA_M16N8K16_A

ROWS = 16  # of a row block: the M of the mma
BLOCK_K = 16  # of an mma block: its K
UNIT_BYTES = 512
WORDS_PER_UNIT = 4  # 32-bit words per lane

_PLANES = {8: (8,), 7: (4, 2, 1), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,)}


def plane_bits(bits: int) -> tuple[int, ...]:
    """Widths of the fields that a code of `bits` bits is cut into, low bits first."""
    return _PLANES[bits]


def round_up(x: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least x."""
    return -(-x // multiple) * multiple


@dataclass(frozen=True)
class Plane:
    """A field of the code: `bits` bits from bit `low` on, in units first_unit .. first_unit+units-1 of a chunk."""

    bits: int
    low: int
    first_unit: int
    units: int

    @property
    def pairs_per_word(self) -> int:
        return 16 // self.bits


@dataclass(frozen=True)
class WordSlot:
    """Where a register of a chunk finds its field in one plane: word `word` of unit `unit`, codes at bits
    `shift` and 16 + `shift`."""

    unit: int
    word: int
    shift: int


@dataclass(frozen=True)
class Packing:
    """The memory order of an [n, k] weight of `bits`-bit codes in groups of `group` columns (None: one per row)."""

    bits: int
    n: int
    k: int
    group: int | None = None

    @cached_property
    def chunk(self) -> int:
        """Columns of k that fill whole units in every plane."""
        return 256 // min(_PLANES[self.bits])

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        result: list[Plane] = []
        low = unit = 0
        for bits in _PLANES[self.bits]:
            units = self.chunk * bits // 256
            result.append(Plane(bits, low, unit, units))
            low, unit = low + bits, unit + units
        return tuple(result)

    @property
    def units(self) -> int:
        """Units of 512 bytes per row block and chunk."""
        return self.chunk * self.bits // 256

    @property
    def row_blocks(self) -> int:
        return round_up(self.n, ROWS) // ROWS

    @cached_property
    def padded_group(self) -> int | None:
        """Columns a group takes in memory."""
        g, c = self.group, self.chunk
        if g is None or g % c == 0 or (c % g == 0 and g % BLOCK_K == 0):
            return g
        return round_up(g, c) if g > c else max(BLOCK_K, 1 << (g - 1).bit_length())

    @property
    def padded_k(self) -> int:
        if self.group is None or self.padded_group is None:
            return round_up(self.k, self.chunk)
        return round_up(self.k // self.group * self.padded_group, self.chunk)

    @property
    def chunks(self) -> int:
        return self.padded_k // self.chunk

    @property
    def groups(self) -> int:
        """Groups per row in memory, the padding's included."""
        return 1 if self.padded_group is None else self.padded_k // self.padded_group

    @property
    def pads_groups(self) -> bool:
        """Whether the columns in memory are not simply 0..k-1 and then padding."""
        return self.padded_group != self.group

    @property
    def codes_shape(self) -> tuple[int, int, int, int, int]:
        """Of the int32 array of packed codes."""
        return (self.row_blocks, self.chunks, self.units, 32, WORDS_PER_UNIT)

    @property
    def scales_shape(self) -> tuple[int, int, int]:
        return (self.row_blocks, self.groups, ROWS)

    @cached_property
    def k_source(self) -> NDArray[np.int64]:
        """For every column in memory the column of the weight it holds, -1 for padding: int64 [padded_k]."""
        column = np.arange(self.padded_k)
        if self.group is None or self.padded_group is None:
            return np.where(column < self.k, column, -1)
        group, within = np.divmod(column, self.padded_group)
        source = group * self.group + within
        return np.where((within < self.group) & (source < self.k), source, -1)

    def slots(self, block: int, register: int) -> tuple[WordSlot, ...]:
        """Where register 0..3 of mma block `block` of a chunk lies: one slot per plane."""
        index = block * 4 + register
        widest = self.planes[0]
        wide_word, pair = divmod(index, widest.pairs_per_word)
        result: list[WordSlot] = []
        for p in self.planes:
            unit, word = divmod(index // p.pairs_per_word, WORDS_PER_UNIT)
            turn = wide_word % (widest.bits // p.bits)  # which of the wide words that share this one
            result.append(WordSlot(p.first_unit + unit, word, (pair * widest.bits + p.low + turn * p.bits) % 16))
        return tuple(result)

    @staticmethod
    def fragment_order() -> NDArray[np.int64]:
        """Flat position (row * 16 + column) in a 16 x 16 block of each lane's eight codes: int64 [32, 8], two
        codes to a register."""
        index = MMA_M16N8K16_A.table()
        return (index[..., 0] * BLOCK_K + index[..., 1]).astype(np.int64)
