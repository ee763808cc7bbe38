"""Parts of a packed weight for tensor parallelism, cut from the tensors as they lie in memory.

Rows are cut into blocks of 16, columns into whole groups and chunks. Parts of rows give parts of y. Parts of columns
give terms of y to be added up, so the first of them alone has the bias. A `Part` may be cut elsewhere, too: then the
weight is packed anew, in smaller groups where a cut divides some, which have the same scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.dialect.errors import PackError, SpecError
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import TensorSlot
from lowbit.pylib.weights import outliers


@dataclass(frozen=True)
class Part:
    """Some rows and columns of a weight.

    rows      ranges, (first, count), which lie one below the other in the part; those that follow each other are one
    columns   one range
    """

    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _joined(self.rows))

    def is_cut_in_memory(self, spec: MatmulSpec) -> bool:
        """Tells whether the part's tensors are slices of the weight's, as they lie in memory."""
        return self._is_in_steps(spec) and not any(slot.index == "sparse" for slot in spec.tensors)

    def _is_in_steps(self, spec: MatmulSpec) -> bool:
        rows = math.lcm(ROWS, spec.bilevel.rows if spec.bilevel else 1)
        by_rows = self.rows == ((0, spec.n),) or (not spec.n % rows and _are_multiples(rows, *self.rows))
        all_columns = self.columns == (0, spec.k)
        return by_rows and (all_columns or (not spec.permuted and _are_multiples(_column_step(spec), self.columns)))

    def spec(self, spec: MatmulSpec) -> MatmulSpec:
        """Returns the spec of the part.

        Raises PackError where there is none: for columns that leave groups too small, or that are permuted.
        """
        (first, columns), rows = self.columns, sum(count for _, count in self.rows)
        found = replace(spec, n=rows, bias=spec.bias and first == 0)
        if columns == spec.k:
            return found
        if spec.permuted:
            raise PackError("columns of a permuted weight can't be cut: its parts would need all of x; cut rows, dim=0")
        if spec.group_size is None or self._is_in_steps(spec):
            return replace(found, k=columns)
        group = math.gcd(spec.group_size, first, columns)
        where = f"{columns} of {spec.k} columns, from column {first} on, cut groups of {spec.group_size} into {group}"
        if spec.bilevel or spec.outliers:
            raise PackError(f"{where}, which a weight with a second level of scales or with outliers can't have")
        try:
            return replace(found, k=columns, group_size=group)
        except SpecError as error:
            raise PackError(f"{where}, which no kernel takes: {error}; cut it into fewer parts") from None

    def of(self, slot: TensorSlot, tensor: Tensor, spec: MatmulSpec) -> Tensor:
        """Returns the part's of a tensor as it lies in memory; of one range of rows a view. The part is
        `is_cut_in_memory`."""
        rows = [tensor] if self.rows == ((0, spec.n),) else [_taken(tensor, 0, *each, spec.n) for each in self.rows]
        if slot.index == "column":
            rows = [tensor]
        found = torch.cat(rows) if len(rows) > 1 else rows[0]
        if self.columns != (0, spec.k) and not _is_for_all_columns(slot, found):
            found = _taken(found, 1, *self.columns, spec.k)
        return found

    def copy_of(self, slot: TensorSlot, tensor: Tensor, spec: MatmulSpec) -> Tensor:
        """Returns the same in memory of its own."""
        found = self.of(slot, tensor, spec)
        if found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            found = found.clone(memory_format=torch.contiguous_format)
        return found.contiguous()

    def of_given(self, slot: TensorSlot, tensor: Tensor, spec: MatmulSpec) -> Tensor:
        """Returns the part's of a tensor as `pack` takes it."""
        if slot.index == "column":
            return tensor
        found = torch.cat([tensor[first : first + count] for first, count in self.rows])
        (first, columns), size = self.columns, self.spec(spec).group_size
        if slot.index == "element":
            return found[:, first : first + columns]
        if slot.index != "group" or size is None or spec.group_size is None:
            return found
        groups = torch.arange(first, first + columns, size, device=tensor.device) // spec.group_size
        return found[:, groups]


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns ranges with those made one that follow each other."""
    found = list(ranges[:1])
    for first, count in ranges[1:]:
        before, size = found[-1]
        if before + size == first:
            found[-1] = before, size + count
        else:
            found.append((first, count))
    return tuple(found)


def _are_multiples(step: int, *ranges: Sequence[int]) -> bool:
    return not any(number % step for each in ranges for number in each)


def part_of(spec: MatmulSpec, dim: int, index: int, count: int) -> MatmulSpec:
    """Returns the spec of part `index` of `count` along dim 0 (rows) or 1 (columns).

    Raises PackError where the weight can't be cut so.
    """
    if dim not in (0, 1):
        raise PackError(f"dim={dim!r} must be 0, for rows, or 1, for columns")
    if not (isinstance(count, int) and isinstance(index, int) and 0 <= index < count):
        raise PackError(f"index={index!r} must be one of 0 .. count - 1, with count={count!r}")
    if spec.experts > 1:
        raise PackError(f"a weight of experts={spec.experts} can't be cut; cut that of each, of a spec with experts=1")
    if dim == 0:
        _check_size("n", spec.n, count, ROWS)
        return replace(spec, n=spec.n // count)
    if spec.permuted:
        raise PackError("columns of a permuted weight can't be cut: its parts would need all of x; cut rows, dim=0")
    _check_size("k", spec.k, count, _column_step(spec))
    return replace(spec, k=spec.k // count, bias=spec.bias and index == 0)


def cut(slot: TensorSlot, tensor: Tensor, dim: int, index: int, count: int) -> Tensor:
    """Returns the part of a tensor, in memory of its own."""
    if slot.index == "column" or (dim == 1 and _is_for_all_columns(slot, tensor)):
        return tensor.clone()
    if slot.index == "sparse":
        ends = [slice(0, extent) for extent in slot.given]
        size = slot.given[dim] // count
        ends[dim] = slice(index * size, (index + 1) * size)
        return outliers.cut(tensor, slot.given[0], *ends)
    return _taken(tensor, dim, index, 1, count).clone()


def _is_for_all_columns(slot: TensorSlot, tensor: Tensor) -> bool:
    """Tells whether a tensor has one number per row."""
    return slot.index in ("row", "padded_row") or (slot.index == "group" and tensor.shape[1] == 1)


def _taken(tensor: Tensor, dim: int, first: int, count: int, whole: int) -> Tensor:
    """Returns the rows (dim 0) or columns of a tensor that belong to `count` of `whole` of the weight."""
    size = tensor.shape[dim]
    return tensor.narrow(dim, first * size // whole, count * size // whole)


def _column_step(spec: MatmulSpec) -> int:
    """Returns the fewest columns that are whole groups and fill whole chunks."""
    packing = spec.packing
    if packing.group is None or packing.padded_group is None:
        return packing.chunk
    of_chunk = max(1, packing.chunk // packing.padded_group)
    return packing.group * math.lcm(of_chunk, spec.bilevel.groups if spec.bilevel else 1)


def _check_size(name: str, size: int, count: int, step: int) -> None:
    if size % (count * step):
        most = max((c for c in range(1, count + 1) if size % (c * step) == 0), default=1)
        raise PackError(
            f"{name}={size} can't be cut into {count} parts of a multiple of {step}; "
            f"the most parts up to {count} are {most}"
        )
