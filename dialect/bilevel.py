"""Scales that are codes themselves: `Bilevel`, the second level that makes numbers of them.

    s[n, g] = S[n // rows, g // groups] * (code[n, g] - B[n // rows, g // groups])

and in the same way zeros (float) or offsets, which are codes of the same format with an S and a B of their own. Codes
are integers of up to 8 bits (u<b>, or i<b> for signed ones) or e4m3 numbers. This is how GGUF's K-quants (groups of one
row, no B) and SpQR (16 rows, B in floating point) store them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.formats.packing import ROWS, Packing

SuperScale = Literal["f16", "bf16", "f32"]
SCALE_CODES = ("u3", "u4", "u6", "u8", "i6", "i8")
"""The formats of integer scales. Each takes a byte in memory, less the least value of its format."""


@dataclass(frozen=True)
class Bilevel:
    """The second level of scales that are codes.

    rows, groups  how many rows (1 or 16) and groups of a row (a power of two) share a number S
    scale         type of S (and B): "f16", "bf16" or "f32"
    zeros         whether codes have a zero point B
    """

    rows: int = 1
    groups: int = 8
    scale: SuperScale = "f16"
    zeros: bool = False

    def __post_init__(self) -> None:
        if self.rows not in (1, ROWS):
            raise SpecError(f"bilevel: rows={self.rows!r} must be 1 or {ROWS}")
        if type(self.groups) is not int or self.groups < 1 or self.groups & (self.groups - 1):
            raise SpecError(f"bilevel: groups={self.groups!r} must be a power of two, 1 included")
        if self.scale not in ("f16", "bf16", "f32"):
            raise SpecError(f"bilevel: scale={self.scale!r} must be one of 'f16', 'bf16', 'f32'")
        if type(self.zeros) is not bool:
            raise SpecError(f"bilevel: zeros={self.zeros!r} must be True or False")

    @classmethod
    def read(cls, given: object) -> Bilevel:
        """Returns a second level given as itself, or as JSON has it. Raises SpecError for anything else."""
        if isinstance(given, Bilevel):
            return given
        known = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(cast(Mapping[str, Any], given)) <= set(known):
            raise SpecError(f"bilevel={given!r} must be a Bilevel, with the fields {', '.join(known)}, or None")
        return cls(**cast(Mapping[str, Any], given))

    def columns(self, packing: Packing) -> int:
        """Columns in memory that share a number S."""
        return self.groups * (packing.padded_group or packing.padded_k)

    def lanes(self, packing: Packing) -> int:
        """Numbers in memory for 16 rows. A number that 16 rows share stands there twice where a chunk would have fewer
        than 4 bytes of them, the least that an asynchronous copy moves."""
        if self.rows == 1:
            return ROWS
        return 1 if self.scale == "f32" or packing.chunk >= 2 * self.columns(packing) else 2

    def shapes(self, packing: Packing) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """Returns the shape of S in memory, and the one in which `pack` takes it."""
        given = -(-packing.n // self.rows), packing.k // (packing.group or packing.k) // self.groups
        return (packing.row_blocks, -(-packing.groups // self.groups), self.lanes(packing)), given


def check_bilevel(scale: str, group_size: int | None, groups: int, bilevel: Bilevel | None) -> None:
    """Raises SpecError unless scales of this type, one for each of `groups` of a row, have a second level or none."""
    if bilevel is None:
        if scale in SCALE_CODES:
            raise SpecError(f"scale={scale!r} is a code: it needs a second level, such as bilevel=Bilevel(groups=8)")
        return
    if scale not in (*SCALE_CODES, "e4m3"):
        codes = ", ".join(map(repr, (*SCALE_CODES, "e4m3")))
        raise SpecError(f"scale={scale!r} must be one of {codes} with bilevel=; or drop bilevel=")
    if group_size is None:
        raise SpecError("group_size=None has one scale per row: bilevel= needs groups, such as group_size=32")
    if groups % bilevel.groups:
        rule = f"must divide the {groups} groups of a row; try {groups & -groups}"
        raise SpecError(f"bilevel: groups={bilevel.groups} {rule}")


def least_code(code: str) -> int:
    """Returns the least value of a format of scales, which is stored as 0."""
    return int(dtype(code).values().min())
