"""Outliers between a sparse matrix [n, k] and the kernels' memory order (`dialect.formats.outliers`), in torch.

`pack` takes them as a `torch.sparse_csr` tensor, or as its three parts: row offsets [n + 1], columns, and values. A
value of 0 is no outlier and is dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.errors import PackError
from lowbit.dialect.formats.outliers import ENTRIES, LINE, ROW_BITS, SPAN, VALUE_SHIFT, table_lines
from lowbit.dialect.formats.packing import ROWS


class Outliers(NamedTuple):
    """The outliers of a weight in any order: int64 rows and columns, and values in f16."""

    rows: Tensor
    columns: Tensor
    values: Tensor


def sparse_csr(outliers: Outliers, n: int, k: int) -> Tensor:
    """Returns outliers that are sorted by row and column as a `torch.sparse_csr` tensor [n, k]."""
    offsets = row_offsets(outliers.rows, n)
    with warnings.catch_warnings():  # once per process: the layout is a beta, and nothing is checked, as is asked for
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks)")
        parts = offsets, outliers.columns, outliers.values
        return torch.sparse_csr_tensor(*parts, (n, k), device=offsets.device, check_invariants=False)


def row_offsets(rows: Tensor, n: int) -> Tensor:
    """Returns where each of n rows begins among outliers that are sorted by row, and how many there are."""
    offsets = torch.zeros(n + 1, dtype=torch.int64, device=rows.device)
    offsets[1:] = torch.bincount(rows, minlength=n).cumsum(0)
    return offsets


def csr_rows(matrix: Tensor) -> Tensor:
    """Returns the row of each number of a `torch.sparse_csr` tensor."""
    offsets = matrix.crow_indices().long()
    return torch.arange(len(offsets) - 1, device=offsets.device).repeat_interleave(offsets.diff())


def split_csr(matrix: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Returns a sparse matrix in parts of so many rows."""
    rows, columns, values = of_csr(matrix)
    ends = matrix.crow_indices()[[0, *torch.tensor(sizes, device="cpu").cumsum(0).tolist()]].tolist()
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = zip(sizes, first, ends, ends[1:])
    return [
        sparse_csr(Outliers(rows[a:b] - start, columns[a:b], values[a:b]), size, matrix.shape[1])
        for size, start, a, b in parts
    ]


def read_csr(given: object, n: int, k: int) -> Tensor:
    """Returns what `pack` was given as outliers as a sparse matrix in f16, checked. Raises PackError."""
    offsets, columns, values = _parts(given, n, k)
    count = _check_offsets(offsets, n, len(columns))
    if len(values) != count:
        raise PackError(f"outliers have {count} columns, but {len(values)} values")
    rows = torch.arange(n, device=offsets.device).repeat_interleave(offsets.diff())
    _check_columns(rows, columns, k)
    kept = values != 0
    half = values.to(torch.float16)
    for wrong, rule in ((~values.isfinite(), "must be finite"), (~half.isfinite(), "overflows f16")):
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            place = f"outliers[{int(rows[at])}, {int(columns[at])}]"
            raise PackError(f"{place} = {float(values[at]):g} {rule}")
    order = (rows * k + columns)[kept].argsort()
    return sparse_csr(Outliers(*(part[kept][order] for part in (rows, columns, half))), n, k)


def _parts(given: object, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns row offsets, columns and values."""
    if isinstance(given, Tensor) and given.layout is torch.sparse_csr:
        if list(given.shape) != [n, k]:
            raise PackError(f"outliers must be [n, k] = {[n, k]}, not {list(given.shape)}")
        given = given.crow_indices(), given.col_indices(), given.values()
    if not (isinstance(given, tuple | list) and len(cast(tuple[object, ...], given)) == 3):
        what = given.layout if isinstance(given, Tensor) else type(given).__name__
        rule = "must be a torch.sparse_csr tensor or (row offsets, columns, values)"
        raise PackError(f"outliers {rule}, not {what}; use .to_sparse_csr()")
    names = ("row offsets", "columns", "values")
    parts = [_vector(name, part) for name, part in zip(names, cast(tuple[object, ...], given))]
    for name, part in zip(names[:2], parts):
        if part.is_floating_point() or part.is_complex() or part.dtype is torch.bool:
            raise PackError(f"{name} of outliers must be integers, not {part.dtype}")
    if not parts[2].is_floating_point():
        raise PackError(f"values of outliers must be floats, not {parts[2].dtype}; use .float()")
    return parts[0].long(), parts[1].long(), parts[2]


def _vector(name: str, given: object) -> Tensor:
    part = torch.from_numpy(given) if isinstance(given, np.ndarray) else given
    if not isinstance(part, Tensor) or part.ndim != 1:
        what = list(part.shape) if isinstance(part, Tensor) else type(given).__name__
        raise PackError(f"{name} of outliers must be a tensor of one dim, not {what}")
    return part.detach()


def _check_offsets(offsets: Tensor, n: int, count: int) -> int:
    """Returns the number of outliers."""
    if len(offsets) != n + 1:
        raise PackError(f"row offsets of outliers must be n + 1 = {n + 1} numbers, not {len(offsets)}")
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != count:
        raise PackError(f"row offsets of outliers must go from 0 to {count}, not from {first} to {last}")
    falls = (offsets.diff() < 0).nonzero()
    if len(falls):
        row = int(falls[0])
        a, b = int(offsets[row]), int(offsets[row + 1])
        raise PackError(f"row offsets of outliers must not fall: row {row} goes from {a} to {b}")
    return count


def _check_columns(rows: Tensor, columns: Tensor, k: int) -> None:
    outside = ((columns < 0) | (columns >= k)).nonzero()
    if len(outside):
        at = int(outside[0])
        raise PackError(f"an outlier of row {int(rows[at])} is in column {int(columns[at])}; it must be in 0..{k - 1}")
    keys, _ = (rows * k + columns).sort()
    repeated = (keys.diff() == 0).nonzero()
    if len(repeated):
        key = int(keys[repeated[0]])
        raise PackError(f"outliers[{key // k}, {key % k}] is there twice; add them up")


# -- memory order


def to_lines(matrix: Tensor) -> Tensor:
    """Returns a checked sparse matrix in memory order: int32 [lines, 32]."""
    return pack_lines(of_csr(matrix), matrix.shape[0])


def of_csr(matrix: Tensor) -> Outliers:
    """Returns the numbers of a `torch.sparse_csr` tensor."""
    return Outliers(csr_rows(matrix), matrix.col_indices(), matrix.values())


def pack_lines(outliers: Outliers, n: int) -> Tensor:
    """Returns outliers, no two of one place, in memory order."""
    block, row = outliers.rows // ROWS, outliers.rows % ROWS
    order = (row + (outliers.columns << ROW_BITS)).argsort(stable=True)
    order = order[block[order].argsort(stable=True)]
    block, row, column, values = (t[order] for t in (block, row, outliers.columns, outliers.values))
    line, place = _lines_of(block, column)
    count, head = int(line[-1]) + 1 if len(line) else 0, table_lines(n)
    result = torch.zeros(head + count, LINE, dtype=torch.int64, device=values.device)
    starts = place == 0
    result[head:, 0][line[starts]] = column[starts]
    bits = values.view(torch.int16).long() & 0xFFFF
    words = (bits << VALUE_SHIFT) | ((column - result[head:, 0][line]) << ROW_BITS) | row
    result[head + line, place + 1] = words
    blocks = -(-n // ROWS)
    per_block = torch.bincount(block[starts], minlength=blocks)
    table = result[:head].view(-1)
    table[0] = head
    table[1 : blocks + 1] = head + per_block.cumsum(0)
    return result.to(torch.int32)  # the upper half of a value wraps around, as bits do


def _lines_of(block: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Returns for each outlier, in order, its line, counted over all row blocks, and its place in the line."""
    number = torch.arange(len(block), device=block.device)
    if not len(block):
        return number, number
    span = column // SPAN
    begins = torch.ones_like(block, dtype=torch.bool)  # a stretch of one row block within one span
    begins[1:] = (block.diff() != 0) | (span.diff() != 0)
    first = number[begins][begins.cumsum(0) - 1]
    place = (number - first) % ENTRIES
    return (place == 0).cumsum(0) - 1, place


def unpack_lines(lines: Tensor, n: int) -> Outliers:
    """Returns the outliers of a tensor in memory order, in that order."""
    head, blocks = table_lines(n), -(-n // ROWS)
    table = lines[:head].reshape(-1)[: blocks + 1].long()
    block = torch.arange(blocks, device=lines.device).repeat_interleave(table.diff())
    words = lines[head:].long()
    entries = words[:, 1:] & 0xFFFFFFFF
    bits = entries >> VALUE_SHIFT
    row = block[:, None] * ROWS + (entries & (ROWS - 1))
    column = words[:, :1] + ((entries >> ROW_BITS) & (SPAN - 1))
    there = entries != 0
    values = (bits - ((bits & 0x8000) << 1)).to(torch.int16).view(torch.float16)
    return Outliers(row[there], column[there], values[there])


def to_csr(lines: Tensor, n: int, k: int) -> Tensor:
    """Returns the sparse matrix that `to_lines` has brought into memory order."""
    return sorted_csr(unpack_lines(lines, n), n, k)


def sorted_csr(outliers: Outliers, n: int, k: int) -> Tensor:
    """Returns outliers in any order as a sparse matrix."""
    order = (outliers.rows * k + outliers.columns).argsort()
    return sparse_csr(Outliers(*(part[order] for part in outliers)), n, k)


def largest(lines: Tensor, n: int) -> float:
    """Returns the largest magnitude of an outlier; 0 without any."""
    values = unpack_lines(lines, n).values
    return float(values.abs().max()) if len(values) else 0.0


def check_lines(lines: Tensor, n: int, k: int) -> None:
    """Raises PackError for a saved tensor that `to_lines` never gives, and with which a kernel would read elsewhere."""
    head, blocks = table_lines(n), -(-n // ROWS)
    table = lines[:head].reshape(-1)[: blocks + 1].long()
    rising = int(table[0]) == head and int(table[-1]) == len(lines) and bool((table.diff() >= 0).all())
    if not rising:
        raise PackError("saved outliers: the table of lines is damaged; pack again")
    found = unpack_lines(lines, n)
    if len(found.rows) and (bool((found.rows >= n).any()) or bool(((found.columns < 0) | (found.columns >= k)).any())):
        raise PackError(f"saved outliers lie outside [n, k] = {[n, k]}; the file is damaged, or pack again")
    if not bool(found.values.isfinite().all()):
        raise PackError("saved outliers must be finite; the file is damaged, or pack again")
    order = found.rows * k + found.columns
    if len(order.unique()) != len(order) or not torch.equal(pack_lines(found, n), lines):
        raise PackError("saved outliers are repeated or out of order; the file is damaged, or pack again")


def cut(lines: Tensor, n: int, rows: slice, columns: slice) -> Tensor:
    """Returns the outliers of a part of a weight in memory order, in memory of their own."""
    found = unpack_lines(lines, n)
    inside = (found.rows >= rows.start) & (found.rows < rows.stop)
    inside &= (found.columns >= columns.start) & (found.columns < columns.stop)
    part = Outliers(found.rows[inside] - rows.start, found.columns[inside] - columns.start, found.values[inside])
    return pack_lines(part, rows.stop - rows.start)


def stack(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Returns the outliers of weights one below the other, of so many rows each, in memory order."""
    found = [unpack_lines(lines, n) for lines, n in zip(parts, sizes)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    rows = torch.cat([part.rows + start for part, start in zip(found, starts)])
    columns, values = (torch.cat([part[i] for part in found]) for i in (1, 2))
    return pack_lines(Outliers(rows, columns, values), sum(sizes))


def draw(n: int, k: int, density: float, generator: torch.Generator, device: torch.device | str = "cpu") -> Tensor:
    """Returns random outliers N(0, 1) of about this density as a sparse matrix."""
    count = min(round(density * n * k), n * k)
    flat = torch.randint(n * k, (count,), generator=generator, device=device).unique()
    values = torch.randn(len(flat), generator=generator, dtype=torch.float32, device=device).to(torch.float16)
    kept = values != 0
    return sparse_csr(Outliers(flat[kept] // k, flat[kept] % k, values[kept]), n, k)
