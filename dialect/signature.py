"""What a kernel is called with: its parameters by name and kind, and the number of its blocks. No MLIR is needed here.

A grid is three extents. An extent is a constant, depends on an i32 parameter, or depends on the GPU:

    8                 eight blocks
    "ceil(m / 16)"    a block for every 16 of the m rows, the last one of which may be partial
    "sm_count * 2"    two blocks for every multiprocessor, as a persistent kernel wants
    "sm_count / 2"    a block for every two multiprocessors: beside an extent of 2, clusters of a persistent kernel

This is how extents are written in Python, in the IR and in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lowbit.dialect.errors import SpecError

ParamKind = Literal["pointer", "i32", "f32", "tensor_map"]
#: The type of a parameter in the IR. A tensor map is passed by value; the kernel has its address.
PARAM_TYPES: dict[ParamKind, str] = {
    "pointer": "!llvm.ptr<1>",
    "i32": "i32",
    "f32": "f32",
    "tensor_map": "!llvm.ptr",
}
TENSOR_MAP_BYTES, TENSOR_MAP_ALIGN = 128, 64
WORKSPACE = "workspace"
"""The pointer parameter that the runtime fills in, for kernels that ask for a workspace."""
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
"""Blocks of a grid along x, y and z (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""
_MOST_MULTIPROCESSORS = 1024  # no GPU has more
_MOST_I32 = 2**31 - 1


@dataclass(frozen=True)
class Param:
    """One parameter of a kernel."""

    name: str
    kind: ParamKind


@dataclass(frozen=True)
class Extent:
    """The number of blocks along one axis of a grid.

    number   the constant, the divisor, or the blocks per multiprocessor or the multiprocessors per block
    rule     what `number` means
    param    the i32 parameter that is divided; "" for the other rules
    """

    number: int
    rule: Literal["constant", "ceil", "sm_count", "sm_part"] = "constant"
    param: str = ""

    @staticmethod
    def parse(written: Any) -> Extent:
        """Reads an extent as it is written (see above). Raises SpecError for anything else."""
        if isinstance(written, int) and not isinstance(written, bool) and written >= 1:
            return Extent(written)
        text = written if isinstance(written, str) else ""
        if found := re.fullmatch(r"ceil\((\w+) / ([1-9]\d{0,18})\)", text):
            return Extent(int(found[2]), "ceil", found[1])
        if found := re.fullmatch(r"sm_count \* ([1-9]\d{0,18})", text):
            return Extent(int(found[1]), "sm_count")
        if found := re.fullmatch(r"sm_count / ([1-9]\d{0,18})", text):
            return Extent(int(found[1]), "sm_part")
        raise SpecError(
            "grid: expected numbers of at least 1, 'ceil(PARAMETER / NUMBER)', 'sm_count * NUMBER' or "
            f"'sm_count / NUMBER', got {written!r}"
        )

    @property
    def written(self) -> int | str:
        """The inverse of `parse`."""
        if self.rule == "constant":
            return self.number
        if self.rule == "ceil":
            return f"ceil({self.param} / {self.number})"
        return f"sm_count {'*' if self.rule == 'sm_count' else '/'} {self.number}"

    def blocks(self, arguments: Mapping[str, Any], sm_count: int) -> int:
        """Evaluates the extent for the arguments of a launch, by name, on a GPU of `sm_count` multiprocessors."""
        if self.rule == "ceil":
            return -(-int(arguments[self.param]) // self.number)
        if self.rule == "sm_part":
            return max(1, sm_count // self.number)
        return self.number * (sm_count if self.rule == "sm_count" else 1)

    def most(self, blocks: int) -> int:
        """Returns the largest `number` that is allowed along an axis of so many blocks at most."""
        return {"constant": blocks, "sm_count": blocks // _MOST_MULTIPROCESSORS}.get(self.rule, _MOST_I32)

    def is_multiple_of(self, n: int) -> bool:
        """Tells whether every value of the extent can be divided by `n`."""
        return n == 1 or (self.rule in ("constant", "sm_count") and self.number % n == 0)


Grid = tuple[Extent, Extent, Extent]


def parse_grid(written: Sequence[Any]) -> Grid:
    """Reads the three extents of a grid. Raises SpecError for anything else, and for more blocks than a GPU takes."""
    if len(written) != 3:
        raise SpecError(f"grid: expected three extents, got {list(written)}")
    x, y, z = map(Extent.parse, written)
    for axis, extent, blocks in zip("xyz", (x, y, z), MOST_BLOCKS):
        if extent.number > (most := extent.most(blocks)):
            raise SpecError(f"grid: expected a number of at most {most} along {axis}, got {extent.written!r}")
    return x, y, z


def check_blocks(blocks: Sequence[int], what: str) -> None:
    """Raises SpecError that begins with `what` where the three extents of a grid are more blocks than a GPU takes."""
    for axis, given, most in zip("xyz", blocks, MOST_BLOCKS):
        if given > most:
            raise SpecError(f"{what} has {given} blocks along {axis}; a GPU takes at most {most}")
