"""What a low-bit weight has in memory: `WeightFormat`, one of the parts of a `MatmulSpec`.

A format is independent of how large the weight is and of what it is multiplied by. Numbers that have no type of their
own in memory, such as zeros beside scales of 8 bits, take that of x; so methods ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

from lowbit.dialect.bilevel import SCALE_CODES, TABLE_CODE, Bilevel, check_bilevel
from lowbit.dialect.call import Call
from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import boolean, choice, did_you_mean, floats, integer
from lowbit.dialect.formats.dtypes import DType, all_names, dtype
from lowbit.dialect.formats.names import plain_name, short_name, weight_advice
from lowbit.dialect.formats.packing import Packing
from lowbit.dialect.shape import MIN_K, Shape
from lowbit.dialect.weight import Storage, TensorSlot, weight_tensors

Zeros = Literal["none", "int", "float", "offset"]
Scale = Literal["f16", "bf16", "f32", "e8m0", "e4m3", "u3", "u4", "u6", "u8", "i6", "i8", "lut8"]

SCALES = ("f16", "bf16", "f32", "e8m0", "e4m3", *SCALE_CODES, TABLE_CODE)


@dataclass(frozen=True)
class WeightFormat:
    """What is stored of a weight, whatever its shape. `MatmulSpec` explains the fields.

    weight      element format, such as "u4"
    group_size  columns that share a scale, at least 16; None: one scale per row
    zeros       "none", "int", "float" or "offset"
    scale       type of the scales
    bias        whether there is a bias
    table       the 2^b values of weight="lut<b>"
    row_scales  whether every row has an f32 scale besides those of its groups
    permuted    whether columns are stored in another order than x's
    outliers    whether there is a sparse matrix S of f16 numbers besides
    bilevel     the second level of scales that are codes

    Raises SpecError that names the field, what was given, what is allowed, and a fix.
    """

    weight: str
    group_size: int | None = None
    zeros: Zeros = "none"
    scale: Scale = "f16"
    bias: bool = False
    table: tuple[float, ...] | None = None
    row_scales: bool = False
    permuted: bool = False
    outliers: bool = False
    bilevel: Bilevel | None = None

    def __post_init__(self) -> None:
        if self.group_size is not None:
            object.__setattr__(self, "group_size", integer("group_size", self.group_size, MIN_K))
        choice("zeros", self.zeros, ("none", "int", "float", "offset"))
        object.__setattr__(self, "scale", choice("scale", short_name(self.scale), SCALES))
        for name in ("bias", "row_scales", "permuted", "outliers"):
            boolean(name, getattr(self, name))
        if self.table is not None:
            object.__setattr__(self, "table", floats("table", self.table))
        if self.bilevel is not None:
            object.__setattr__(self, "bilevel", Bilevel.read(self.bilevel))
        check_bilevel(self.scale, self.group_size, self.bilevel)
        self._check_weight()

    def _check_weight(self) -> None:
        given = plain_name(self.weight)
        if not isinstance(given, str):
            raise SpecError(f"weight={given!r} must be the name of a format, such as 'u4', 'f6e3m2' or 'nf4'")
        try:
            kind = dtype(given, self.table).kind
        except SpecError as error:
            raise SpecError(_advice(given, error)) from None
        if self.zeros == "int" and kind not in ("uint", "int"):
            raise SpecError(
                f"zeros='int' needs an integer weight (u1..u8, i1..i8), not {given!r}; use 'float' or 'none'"
            )

    @cached_property
    def dtype(self) -> DType:
        """The element format."""
        return dtype(self.weight, self.table)

    @cached_property
    def scale_kind(self) -> Storage:
        """Type of a scale in memory: u8 for codes that are integers, or places in a table."""
        return "u8" if self.scale in (*SCALE_CODES, TABLE_CODE) else cast(Storage, self.scale)

    def zero_kind(self, act: Storage) -> Storage | None:
        """Returns the type of a zero in memory where x has type `act`: u8 for integers; for floats the scale's, or act
        where that has 8 bits; with two levels the scale's. None without zeros."""
        if self.zeros == "int":
            return "u8"
        return self._float_kind(act) if self.zeros == "float" else None

    def offset_kind(self, act: Storage) -> Storage | None:
        """Returns the type of an offset in memory where x has type `act`: the scale's, or act where that has 8 bits;
        with two levels the scale's. None without offsets."""
        return self._float_kind(act) if self.zeros == "offset" else None

    def _float_kind(self, act: Storage) -> Storage:
        return act if self.scale in ("e8m0", "e4m3") and not self.bilevel else self.scale_kind

    def zero_span(self, act: Storage) -> int:
        """Integer zeros are lo .. lo + this. In bf16 up to 7 bits are decoded by taking away 128 + zero - lo, which is
        exact up to 256."""
        return 128 if act == "bf16" and self.dtype.bits < 8 else 255

    def packing(self, shape: Shape) -> Packing:
        """Returns how a weight of this shape sits in memory."""
        return Packing(self.dtype.bits, shape.n, shape.k, self.group_size)

    def tensors(self, packing: Packing, call: Call) -> tuple[TensorSlot, ...]:
        """Returns the tensors that `pack` takes of a weight that is packed and called so: zeros may have x's type, and
        a bias has y's."""
        return weight_tensors(
            packing,
            self.scale_kind,
            zero=self.zero_kind(call.act),
            offset=self.offset_kind(call.act),
            row_scale="f32" if self.row_scales else None,
            bias=call.out_dtype if self.bias else None,
            outliers="i32" if self.outliers else None,
            permutation="i32" if self.permuted else None,
            bilevel=self.bilevel,
            integer_zeros=self.zeros == "int",
            code=self.scale,
            experts=call.experts,
        )

    def described(self, shape: Shape) -> str:
        """Returns a line about a weight of this shape, its bias aside: "u4[64, 256] f16 scale per 128, int zeros"."""
        group = "row" if self.group_size is None else str(self.group_size)
        zeros = {"none": "", "offset": ", offsets"}.get(self.zeros, f", {self.zeros} zeros")
        others = (", row scales" if self.row_scales else "") + (", permuted" if self.permuted else "")
        outliers = " + outliers" if self.outliers else ""
        scale = self.scale if self.bilevel is None else f"{self.scale} * {self.bilevel.scale}"
        return f"{self.weight}{shape} {scale} scale per {group}{zeros}{others}{outliers}"


def _advice(given: str, error: SpecError) -> str:
    """Returns what to say of a format that is none."""
    if advice := weight_advice(given):
        return f"weight={given!r}: use {advice}"
    known = (*all_names(), *(f"lut{b}" for b in range(1, 9)))
    return f"weight: {error}{'' if given in known else did_you_mean(given, known)}"
