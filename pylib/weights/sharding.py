"""Parts of a packed weight for tensor parallelism, cut from the tensors as they lie in memory.

Rows are cut into blocks of 16, columns into whole groups and chunks. Parts of rows give parts of y. Parts of columns
give terms of y to be added up, so the first of them alone has the bias.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from lowbit.dialect.errors import PackError
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import TensorSlot
from lowbit.pylib.weights import outliers


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
    if dim == 1 and (slot.index in ("row", "padded_row") or (slot.index == "group" and tensor.shape[1] == 1)):
        return tensor.clone()  # one number per row is for all columns
    if slot.index == "column":
        return tensor.clone()
    if slot.index == "sparse":
        ends = [slice(0, extent) for extent in slot.given]
        size = slot.given[dim] // count
        ends[dim] = slice(index * size, (index + 1) * size)
        return outliers.cut(tensor, slot.given[0], *ends)
    size = tensor.shape[dim] // count
    return tensor.narrow(dim, index * size, size).clone()


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
