"""How the codes of a weight [n, k] sit in memory: fragments of the tensor core, in the order they are used.

Rows are cut into *row blocks* of 16 and columns into *mma blocks* of 16. A lane of a warp owns eight codes of
every 16 x 16 block, the A fragment of mma.m16n8k16 (PTX ISA 9.7.14.5.8; `fragments.MMA_M16N8K16_A`): four
*registers*, each a pair of codes. Three rules turn that into bytes.

*Pairs.* A register has its first code in the lower half of a 32-bit word and its second 16 bits above, so one mask,
and one shift at most, extract both halves of an f16x2 register.

*Runs.* A 16-bit half holds 16 // b codes of b bits side by side, lowest first, and has 16 % b bits to spare at its
top. A *run* is b words for 16 registers (both numbers divided by gcd(b, 8)). Registers that do not fit whole are cut
into the spare bits of the run's words, one after the other. Of 3-bit codes, 3 words have 15 registers in one *piece*
each and one in three pieces of a bit. Widths that divide 16 spare nothing.

*Units.* Four consecutive words of a lane make 16 bytes, and the 32 lanes of a warp a *unit* of 512 contiguous
bytes, which one instruction loads. A *chunk* is four runs, one after the other, and the smallest stretch of k that
fills whole units: 32 columns for 8 bits, 64 for 4, 128 for 2 and 6, 256 for 1, 3, 5 and 7.

The packed codes are therefore an int32 array [row blocks, chunks, units, 32 lanes, 4 words]. Scales and zeros
are [row blocks, groups, 16 rows].

Groups. A group of g columns is a whole number of chunks or a whole fraction of one that is a multiple of 16;
where it is not (g = 17, 48 or 100), every group is padded with code 0 to the next such size, and the activation
is read through `k_source`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A

ROWS = 16  # of a row block: the M of the mma
BLOCK_K = 16  # of an mma block: its K
UNIT_BYTES = 512
WORDS_PER_UNIT = 4  # 32-bit words per lane


def round_up(x: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least x."""
    return -(-x // multiple) * multiple


@dataclass(frozen=True)
class Piece:
    """Bits `low` .. low + bits - 1 of a register's two codes: at bits `shift` and 16 + `shift` of word `word` of
    the run, and on."""

    word: int
    shift: int
    low: int
    bits: int


@lru_cache(maxsize=None)
def run_of(bits: int) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of every register of a run, low bits first."""
    divisor = math.gcd(bits, 8)
    registers, words = 16 // divisor, bits // divisor
    whole, spare = divmod(16, bits)
    result: list[tuple[Piece, ...]] = [(Piece(word, i * bits, 0, bits),) for word in range(words) for i in range(whole)]
    for left in range(registers - len(result)):
        pieces: list[Piece] = []
        low = 0
        while low < bits:
            word, within = divmod(left * bits + low, spare)  # of the spare bits, strung together
            size = min(spare - within, bits - low)
            pieces.append(Piece(word, whole * bits + within, low, size))
            low += size
        result.append(tuple(pieces))
    return tuple(result)


@dataclass(frozen=True)
class Packing:
    """The memory order of an [n, k] weight of `bits`-bit codes in groups of `group` columns (None: one per row)."""

    bits: int
    n: int
    k: int
    group: int | None = None

    @cached_property
    def units(self) -> int:
        """Units of 512 bytes per row block and chunk: the words of a run."""
        return self.bits // math.gcd(self.bits, 8)

    @cached_property
    def chunk(self) -> int:
        """Columns of k in four runs, which fill whole units."""
        return 256 // math.gcd(self.bits, 8)

    @cached_property
    def row_blocks(self) -> int:
        return round_up(self.n, ROWS) // ROWS

    @cached_property
    def padded_group(self) -> int | None:
        """Columns a group takes in memory."""
        g, c = self.group, self.chunk
        if g is None or g % c == 0 or (c % g == 0 and g % BLOCK_K == 0):
            return g
        return round_up(g, c) if g > c else max(BLOCK_K, 1 << (g - 1).bit_length())

    @cached_property
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
        """Shape of the int32 array of packed codes."""
        return (self.row_blocks, self.chunks, self.units, 32, WORDS_PER_UNIT)

    @property
    def scales_shape(self) -> tuple[int, int, int]:
        return (self.row_blocks, self.groups, ROWS)

    @cached_property
    def k_source(self) -> NDArray[np.int64]:
        """The column of the weight that each column in memory holds, -1 for padding: int64 [padded_k]."""
        column = np.arange(self.padded_k)
        if self.group is None or self.padded_group is None:
            return np.where(column < self.k, column, -1)
        group, within = np.divmod(column, self.padded_group)
        source = group * self.group + within
        return np.where((within < self.group) & (source < self.k), source, -1)

    def place(self, block: int, register: int) -> tuple[int, int]:
        """Returns the first word of the run that has register 0..3 of mma block `block` of a chunk, and the register's
        number in the run, of which `run_of` has the pieces. A lane's word w of a chunk is word w % 4 of unit w // 4."""
        run, number = divmod(block * 4 + register, len(run_of(self.bits)))
        return run * self.units, number

    @staticmethod
    def fragment_order() -> NDArray[np.int64]:
        """Flat position (row * 16 + column) in a 16 x 16 block of each lane's eight codes: int64 [32, 8], two
        codes to a register."""
        index = MMA_M16N8K16_A.table()
        return (index[..., 0] * BLOCK_K + index[..., 1]).astype(np.int64)
