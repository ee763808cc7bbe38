"""Which bit of a packed weight holds what, found by packing: numbers with one bit each are packed, and the bits that
are set in memory are theirs. So the pictures know of no layout: what kernels read is what `pack` has written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowbit.dialect.bilevel import least_code
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.outliers import LINE, ROW_BITS, SPAN
from lowbit.dialect.formats.packing import BLOCK_K, ROWS, WORDS_PER_UNIT, Packing
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import TensorSlot
from lowbit.pylib.explain.figures import Cell, Figure, Grid, Table
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights import shared_bytes
from lowbit.pylib.weights.outliers import Outliers, pack_lines
from lowbit.pylib.weights.values import least, to_memory

WORD = 32
MOST_WORDS = 8
"""Words of a tensor that are drawn, besides those of codes."""
_IN_ROW = 16  # numbers of a table
T = TypeVar("T")


def packing_figures(spec: MatmulSpec) -> list[Figure]:
    """The words of one lane, the lanes of a block of 16 x 16 codes, the other tensors of 16 rows word by word, what
    codes stand for, and the tensors of the weight."""
    small = unit_of(spec)
    others = [slot for slot in small.tensors if slot.role not in ("codes", "permutation")]
    figures: list[Figure] = [words_of_lane(first_chunk_of(spec)), lanes_of_block()]
    figures += [words_of_line() if slot.index == "sparse" else words_of(small, slot) for slot in others]
    return [*figures, *tables(spec), tensors(spec)]


def unit_of(spec: MatmulSpec) -> MatmulSpec:
    """Returns the least weight that is packed like a spec's: 16 rows, and columns that fill units and have whole groups
    and blocks of groups."""
    group = spec.group_size or spec.k
    columns = group * (spec.bilevel.groups if spec.bilevel else 1)
    k = min(spec.k, columns * -(-spec.packing.chunk // columns)) if spec.group_size else min(spec.k, spec.packing.chunk)
    return replace(spec, n=ROWS, k=k, experts=1, top_k=None)


def first_chunk_of(spec: MatmulSpec) -> MatmulSpec:
    """Returns the least weight whose first chunk has the codes of a spec's: 16 rows, and columns of about a chunk. A
    longer group begins with whole chunks, which are those of a weight without groups."""
    chunk, group = spec.packing.chunk, spec.group_size
    kept = group if group and group <= chunk else None
    k = min(spec.k, kept * -(-chunk // kept) if kept else chunk)
    return MatmulSpec(ROWS, k, spec.weight, kept, act=spec.act, table=spec.table, epilogue=spec.epilogue)


# -- which bit holds what


@dataclass(frozen=True)
class Bit:
    """What a bit of memory is: bit `number` of the number `at` of the tensor that `pack` takes as `slot`."""

    slot: TensorSlot
    at: tuple[int, ...]
    number: int

    @property
    def title(self) -> str:
        index = ", ".join(f"{name} {at}" for name, at in zip(_NAMES[self.slot.index], self.at))
        return f"bit {self.number} of {_ONE_OF.get(self.slot.name, self.slot.name)} ({index})"


_NAMES = {
    "element": ("row", "column"),
    "group": ("row", "group"),
    "block": ("block of rows", "block of groups"),
    "row": ("row",),
    "padded_row": ("row",),
}
_ONE_OF = {"codes": "code"}


def words_in_memory(
    spec: MatmulSpec, tensor: str, part: Any = ..., most: int | None = None
) -> tuple[list[list[Bit | None]], int]:
    """Returns what the bits of a tensor in memory, or of a part of it, are: in words of 32, the lowest bit first; None
    for padding. Of these words the first `most`, and how many there are."""
    found: dict[int, Bit] = {}
    count = 0
    for slot in spec.given_tensors:
        if slot.tensor == tensor:
            owner, number = (bits[part].ravel() for bits in _owners(spec, slot))
            count = len(owner) // WORD
            where = owner[: WORD * most if most else None].nonzero()[0]
            places = zip(*(each.tolist() for each in np.unravel_index(owner[where] - 1, slot.given)))
            found |= {bit: Bit(slot, at, of) for bit, at, of in zip(where.tolist(), places, number[where].tolist())}
    shown = min(most or count, count)
    return [[found.get(WORD * word + bit) for bit in range(WORD)] for word in range(shown)], count


def _owners(spec: MatmulSpec, slot: TensorSlot) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns of each bit in memory whose it is, counted from 1 (0: nobody's), and which of its bits: packed are
    numbers that have all bits, or none, by a digit of where they stand; and numbers that have the bits with a digit."""
    count, width = math.prod(slot.given), _width(spec, slot)
    place = torch.arange(1, count + 1).view(slot.given)
    owner = number = np.zeros((), np.int64)
    together = [range(width)] if slot.role == "codes" else [range(0, width, 2), range(1, width, 2)]  # all: NaN
    for bits in together:
        every = sum(1 << bit for bit in bits)
        for digit in range(count.bit_length()):
            owner = owner + (_lit(spec, slot, (place >> digit & 1) * every) << digit)
        for digit in range(width.bit_length()):
            some = sum(1 << bit for bit in bits if bit >> digit & 1)
            number = number + (_lit(spec, slot, torch.full_like(place, some)) << digit)
    return owner, number


def _lit(spec: MatmulSpec, slot: TensorSlot, stored: Tensor) -> NDArray[np.int64]:
    """Returns the bits in memory of a tensor that has these numbers, given as their bits, and zeros elsewhere."""
    memory = to_memory(spec, slot, _values(spec, slot, stored))
    others = dict.fromkeys((each.name for each in spec.given_tensors), torch.zeros(1, dtype=torch.uint8))
    return _as_bits(shared_bytes.join(spec, others | {slot.name: memory})[slot.tensor])


def _values(spec: MatmulSpec, slot: TensorSlot, stored: Tensor) -> Tensor:
    """Returns the values, as `pack` takes them, that are stored as these bits."""
    if slot.role == "codes":
        return stored + least(spec)
    if slot.storage == "u8":
        return stored + (least_code(slot.code) if slot.code else least(spec))
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ELEMENTS[slot.storage].bytes]
    return stored.to(integers).view(TORCH[slot.storage]).float()


def _width(spec: MatmulSpec, slot: TensorSlot) -> int:
    """Returns the bits of a number."""
    if slot.role == "codes":
        return spec.packing.bits
    return slot.bits if slot.code and slot.storage == "u8" else 8 * ELEMENTS[slot.storage].bytes


def _as_bits(memory: Tensor) -> NDArray[np.int64]:
    """Returns the bits of numbers, the lowest first: [..., bits]."""
    raw = memory.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[memory.element_size()]).numpy()
    return (raw.astype(np.int64)[..., None] >> np.arange(8 * memory.element_size())) & 1


# -- pictures


def words_of_lane(spec: MatmulSpec, lane: int = 0) -> Grid:
    """The words that a lane has of the first chunk of a row block, bit by bit, the highest first."""
    words, _ = words_in_memory(spec, "codes", np.s_[0, 0, :, lane])
    about = (
        f"The {len(words)} words of 32 bits that lane {lane} of a warp has of {spec.packing.chunk} columns of a block "
        f"of 16 rows: word w is word w % {WORDS_PER_UNIT} of the lane in unit w // {WORDS_PER_UNIT}, and a unit is 512 "
        "contiguous bytes. A cell is one bit, and has the column of its code; hover says its row."
    )
    return _grid("Bits of the packed weight", about, dict(enumerate(words)), _of_code)


def _grid(title: str, about: str, words: Mapping[int, list[T]], cell: Callable[[T], Cell]) -> Grid:
    """Words by their numbers, bit by bit, the highest first."""
    rows = tuple((f"word {number}", tuple(map(cell, reversed(word)))) for number, word in words.items())
    return Grid(title, about, "bit", tuple(map(str, reversed(range(WORD)))), rows)


def _of_code(bit: Bit | None) -> Cell:
    if bit is None:
        return Cell("", "no code")
    row, column = bit.at
    return Cell(str(column), bit.title, row + column % 2)


def words_of(spec: MatmulSpec, slot: TensorSlot, most: int = MOST_WORDS) -> Grid:
    """The first words of another tensor, bit by bit, the highest first."""
    words, count = words_in_memory(spec, slot.name, most=most)
    shared = [each.name for each in spec.given_tensors if each.tensor == slot.name]
    which = f"the first {most} of {count}" if count > most else f"all {count}"
    about = (
        f"{which.capitalize()} words of {' and '.join(shared)} for {spec.n} rows and {spec.k} columns. A cell is a "
        "bit, and has the row of its number, or the block of groups where 16 rows share one; hover says the rest."
    )
    return _grid(f"Bits of {slot.name}", about, dict(enumerate(words)), partial(_of_number, shared))


def _of_number(shared: list[str], bit: Bit | None) -> Cell:
    """A bit of a number. shared: the tensors that have their numbers side by side."""
    if bit is None:
        return Cell("", "nothing")
    initial = bit.slot.name[0] if len(shared) > 1 else ""
    place = bit.at[0] if bit.slot.given[0] > 1 else bit.at[-1]
    return Cell(f"{initial}{place}", bit.title, place + 6 * shared.index(bit.slot.name))


_FIELDS: tuple[tuple[str, int, tuple[int, int, int, int]], ...] = (
    ("the first column", 31, (1, 0, 0, 0)),
    ("the value in f16", 16, (0, 1, 0, 0)),
    ("the column, less the first", SPAN.bit_length() - 1, (0, 0, 1, 0)),
    ("the row of 16", ROW_BITS, (0, 0, 0, 1)),
)
"""What a line of outliers holds, its bits, and which argument of `_line` they are of."""


@cache
def words_of_line() -> Grid:
    """A line of outliers: two are packed, and again with one bit of them changed."""
    cells = [[Cell("", "nothing")] * WORD for _ in range(LINE)]
    plain = _line(0, 0, 0, 0)
    for hue, (name, bits, argument) in enumerate(_FIELDS):
        for bit in range(bits):
            for word, at in np.argwhere(_line(*(each << bit for each in argument)) != plain):
                cells[word][at] = Cell(str(bit), f"bit {bit} of {name}", hue)
    about = (
        f"The first and the third of the {LINE} words of a line: its first column, and an outlier, as all others. A "
        "cell is one bit, and has its number in the column, the value or the row."
    )
    return _grid("Bits of outliers", about, {0: cells[0], 2: cells[2]}, lambda cell: cell)


def _line(first: int, value: int, column: int, row: int) -> NDArray[np.int64]:
    """The line of two outliers as bits. The first is added to the columns of both; of the second these bits are
    changed, and its value is finite and no 0 then."""
    values = torch.tensor([0x3C00, 3 ^ value], dtype=torch.int32).to(torch.int16).view(torch.float16)
    columns = torch.tensor([first, first + (1 ^ column)])
    return _as_bits(pack_lines(Outliers(torch.tensor([0, 1 ^ row]), columns, values), ROWS)[-1])


def tables(spec: MatmulSpec) -> list[Grid]:
    """What the codes of a weight stand for, and those of its scales where these are places in a table."""
    found = [values_of("Values of codes", f"What the codes of {spec.dtype.name} stand for", spec.dtype.values())]
    if spec.bilevel and spec.bilevel.table:
        found.append(values_of("Values of scale codes", "The table of the spec's second level", spec.bilevel.table))
    return found


def values_of(title: str, about: str, values: Sequence[float] | NDArray[np.float64]) -> Grid:
    """A table of numbers, sixteen in a row."""
    rows: list[tuple[str, tuple[Cell, ...]]] = []
    for first in range(0, len(values), _IN_ROW):
        numbers = enumerate(map(float, values[first : first + _IN_ROW]), first)
        rows.append((str(first), tuple(Cell(f"{value:.3g}", f"code {code}: {value!r}") for code, value in numbers)))
    columns = tuple(f"+{i}" for i in range(min(_IN_ROW, len(values))))
    return Grid(title, f"{about}, sixteen in a row.", "code", columns, tuple(rows))


@cache
def lanes_of_block() -> Grid:
    """Which lane has which code of a block of 16 x 16: the A fragment of mma.m16n8k16."""
    order = Packing.fragment_order()
    owner = {int(at): (lane, i) for lane, codes in enumerate(order) for i, at in enumerate(codes)}
    rows: list[tuple[str, tuple[Cell, ...]]] = []
    for row in range(ROWS):
        held = [(column, *owner[row * BLOCK_K + column]) for column in range(BLOCK_K)]
        cells = (_owned(row, *each) for each in held)
        rows.append((f"row {row}", tuple(cells)))
    about = "The lane of a warp that has each code of 16 rows and 16 columns: the A fragment of mma.m16n8k16."
    return Grid("Lanes of a block of the weight", about, "column", tuple(map(str, range(BLOCK_K))), tuple(rows))


def _owned(row: int, column: int, lane: int, number: int) -> Cell:
    return Cell(str(lane), f"code (row {row}, column {column}): lane {lane}, register {number // 2}", lane)


def tensors(spec: MatmulSpec) -> Table:
    """The tensors of the packed weight."""
    rows = []
    for slot in spec.tensors:
        shape = " x ".join("any" if size < 0 else str(size) for size in slot.shape)
        rows.append((slot.name, slot.role.replace("_", " "), slot.storage, shape, f"{slot.nbytes:,}"))
    about = "Codes that share bytes, such as those of scales and zeros with a second level, are one tensor."
    return Table("Tensors of the packed weight", about, ("tensor", "what it is", "type", "shape", "bytes"), tuple(rows))
