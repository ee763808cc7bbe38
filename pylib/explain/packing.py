"""Which bits of which word hold which code, as `Packing` says: what kernels decode and `pack` writes."""

from __future__ import annotations

from lowbit.dialect.formats.packing import BLOCK_K, ROWS, WORDS_PER_UNIT, Packing, run_of
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.explain.figures import Cell, Figure, Grid, Table

WORD = 32


def packing_figures(spec: MatmulSpec) -> list[Figure]:
    """The words of one lane, the lanes of a block of 16 x 16 codes, and the tensors of the weight."""
    return [words_of_lane(spec.packing), lanes_of_block(), tensors(spec)]


def words_of_lane(packing: Packing, lane: int = 0) -> Grid:
    """The words that a lane has of a chunk of its row block, bit by bit, the highest first."""
    bits: dict[tuple[int, int], Cell] = {}
    order = packing.fragment_order()[lane]
    for block in range(packing.chunk // BLOCK_K):
        for register in range(4):
            first, number = packing.place(block, register)
            for half in range(2):
                row, column = divmod(int(order[2 * register + half]), BLOCK_K)
                column += BLOCK_K * block
                for piece in run_of(packing.bits)[number]:
                    for bit in range(piece.bits):
                        where = first + piece.word, 16 * half + piece.shift + bit
                        bits[where] = _code_bit(row, column, piece.low + bit)
    words = range(packing.units * WORDS_PER_UNIT)
    unused = Cell("", "no code")
    rows = tuple((f"word {w}", tuple(bits.get((w, b), unused) for b in reversed(range(WORD)))) for w in words)
    about = (
        f"The {len(words)} words of 32 bits that lane {lane} of a warp has of {packing.chunk} columns of a block of 16 "
        f"rows: word w is word w % {WORDS_PER_UNIT} of the lane in unit w // {WORDS_PER_UNIT}, and a unit is 512 "
        "contiguous bytes. A cell is one bit, and has the column of its code; hover says its row."
    )
    return Grid("Bits of the packed weight", about, "bit", tuple(map(str, reversed(range(WORD)))), rows)


def _code_bit(row: int, column: int, bit: int) -> Cell:
    return Cell(str(column), f"bit {bit} of code (row {row}, column {column})", row + column % 2)


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
