"""Scales that are codes themselves: `Bilevel`, the second level that makes numbers of them.

    s[n, g] = S[n // rows, g // groups] * (code[n, g] - B[n // rows, g // groups]), or
    s[n, g] = S[n // rows, g // groups] * code[n, g] + O[n // rows, g // groups]

and in the same way zeros (float) or offsets, which are codes of the same format with an S, a B and an O of their own.
Codes are integers of up to 8 bits (u<b>, or i<b> for signed ones), e4m3 numbers, or places in a table of 256 numbers
(lut8). This is how GGUF's K-quants (groups of one row, no B), SpQR (16 rows, B in floating point) and nested
bitsandbytes (a table, and O) store them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal, cast

import numpy as np

from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import boolean, choice
from lowbit.dialect.formats.dtypes import DType, dtype
from lowbit.dialect.formats.packing import ROWS, Packing

SuperScale = Literal["f16", "bf16", "f32"]
SCALE_CODES = ("u3", "u4", "u6", "u8", "i6", "i8")
"""The formats of integer scales. In memory they are less the least value of their format, in a byte of their own or, up
to four bits, in one with the zero or offset of the same group (`dialect.weight.GROUP_CODES`)."""
TABLE_CODE: Final = "lut8"
"""The format of scales that are places in `Bilevel.table`."""
TABLE_NUMBERS = 256


@dataclass(frozen=True)
class Bilevel:
    """The second level of scales that are codes.

    rows, groups  how many rows (1 or 16) and groups of a row (a power of two) share a number S
    scale         type of S, B and O: "f16", "bf16" or "f32"
    zeros         whether codes have a zero point B
    offsets       whether a number O is added to scaled codes; not beside B
    table         the 256 numbers of codes of lut8, rounded to f32; None for other codes
    """

    rows: int = 1
    groups: int = 8
    scale: SuperScale = "f16"
    zeros: bool = False
    offsets: bool = False
    table: tuple[float, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.rows not in (1, ROWS):
            raise SpecError(f"bilevel: rows={self.rows!r} must be 1 or {ROWS}")
        if type(self.groups) is not int or self.groups < 1 or self.groups & (self.groups - 1):
            raise SpecError(f"bilevel: groups={self.groups!r} must be a power of two, 1 included")
        choice("bilevel: scale", self.scale, ("f16", "bf16", "f32"))
        for name in ("zeros", "offsets"):
            boolean(f"bilevel: {name}", getattr(self, name))
        if self.zeros and self.offsets:
            raise SpecError("bilevel: codes have zeros=True or offsets=True, not both; drop one of them")
        if self.table is not None:
            object.__setattr__(self, "table", _table(self.table))

    @classmethod
    def read(cls, given: object) -> Bilevel:
        """Returns a second level given as itself, or as JSON has it. Raises SpecError for anything else."""
        if isinstance(given, Bilevel):
            return given
        known = [f.name for f in fields(cls)]
        if not isinstance(given, Mapping) or not set(cast(Mapping[str, Any], given)) <= set(known):
            raise SpecError(f"bilevel={given!r} must be a Bilevel, with the fields {', '.join(known)}, or None")
        return cls(**cast(Mapping[str, Any], given))

    def to_dict(self) -> dict[str, Any]:
        """Returns the second level in terms of JSON; what not all have is left out where it is not there."""
        return {name: value for name, value in asdict(self).items() if name not in ("offsets", "table") or value}

    def check_groups(self, groups: int) -> None:
        """Raises SpecError unless the groups of a row, so many, are whole blocks that share a number S."""
        if groups % self.groups:
            rule = f"must divide the {groups} groups of a row; try {groups & -groups}"
            raise SpecError(f"bilevel: groups={self.groups} {rule}")

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


def check_bilevel(scale: str, group_size: int | None, bilevel: Bilevel | None) -> None:
    """Raises SpecError unless scales of this type, one for each group, have a second level or none."""
    if bilevel is None:
        if scale in (*SCALE_CODES, TABLE_CODE):
            raise SpecError(f"scale={scale!r} is a code: it needs a second level, such as bilevel=Bilevel(groups=8)")
        return
    codes = *SCALE_CODES, TABLE_CODE, "e4m3"
    if scale not in codes:
        codes = ", ".join(map(repr, codes))
        raise SpecError(f"scale={scale!r} must be one of {codes} with bilevel=; or drop bilevel=")
    if (scale == TABLE_CODE) != (bilevel.table is not None):
        raise SpecError(f"bilevel: table= has the 256 numbers of scale={TABLE_CODE!r}, and goes with it alone")
    if group_size is None:
        raise SpecError("group_size=None has one scale per row: bilevel= needs groups, such as group_size=32")


def integers_of(code: str) -> DType:
    """Returns the format of the integers that codes of scales are: of a table they are places."""
    return dtype("u8" if code == TABLE_CODE else code)


def least_code(code: str) -> int:
    """Returns the least integer of a format of scales, which is stored as 0."""
    return int(integers_of(code).values().min())


def _table(given: object) -> tuple[float, ...]:
    """Returns the numbers of a table, rounded to f32."""
    if not isinstance(given, Sequence) or len(cast(Sequence[object], given)) != TABLE_NUMBERS:
        raise SpecError(f"bilevel: table= must be {TABLE_NUMBERS} numbers, the values of codes of {TABLE_CODE}")
    try:
        with np.errstate(over="ignore"):  # what overflows is refused below
            values = np.asarray(given, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise SpecError(f"bilevel: table= must be numbers: {error}") from None
    if not bool(np.isfinite(values).all()):
        raise SpecError("bilevel: table= must be finite numbers, within the range of f32")
    return tuple(map(float, values))
