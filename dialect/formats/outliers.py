"""How the outliers of a weight [n, k] sit in memory: numbers in f16 that are added to single elements of the weight.

Outliers are cut into row blocks of 16 rows, as the codes are, and stand in *lines* of 32 words: 128 bytes, a word for
every lane of a warp. The first word of a line is the least column in it. Each other word is an outlier:

    bits 31 .. 16   its value in f16
    bits 15 .. 4    its column less that of the line
    bits 3 .. 0     its row in the row block

Outliers of a row block are sorted by column, and by row within a column. A line ends where 31 outliers are in it, and
where the next multiple of 4096 columns begins; what is left of it is 0, which adds nothing. Which row an outlier is in
does not matter to its place, so that the work on a row block depends on their number alone: one row with all of them
and sixteen with a share each take the same time.

The tensor is int32 [lines, 32]. It begins with a table, in as many lines as it takes: word i of it is the first line of
row block i, and the word after the last row block's is the number of lines.
"""

from __future__ import annotations

from lowbit.dialect.formats.packing import ROWS

LINE = 32  # words
ENTRIES = LINE - 1  # outliers of a full line
SPAN = 1 << 12  # columns that a line can reach
ROW_BITS = ROWS.bit_length() - 1
VALUE_SHIFT = 16


def table_lines(n: int) -> int:
    """Returns how many lines the table of a weight with n rows takes."""
    row_blocks = -(-n // ROWS)
    return -(-(row_blocks + 1) // LINE)


LANE_SUMS = 4 * ROWS * LINE  # bytes of a warp in which each lane has a sum for each row, in f32
INDEX_ENDS = 2  # numbers of an index of lines that are the same for all lanes
SPARE = 8  # columns of zeros behind those of a step, where outliers are multiplied step by step
A_ROW = 80  # bytes of a row of operand A in a warp's shared memory: 32 numbers, and 16 to spread rows over banks


def scratch_terms(act: str) -> int:
    """Returns how many numbers of x's type it takes to make an outlier."""
    return 1 if act == "f16" else 2


def scratch_words(act: str, tokens: int) -> int:
    """Returns the words of shared memory in which a warp has a line as operands of mma: A [16, 32] and B [32, tokens]
    in x's type."""
    return (scratch_terms(act) * ROWS * A_ROW + LINE * tokens * 2) // 4


def lines_at_once(tokens: int) -> int:
    """Returns how many lines a warp has under way: more tokens need the registers themselves."""
    return max(1, 32 // tokens)
