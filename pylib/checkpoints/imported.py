"""A weight that has been read from another library's checkpoint, before it is packed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from lowbit.dialect.bilevel import Bilevel, SuperScale
from lowbit.dialect.errors import CheckpointError
from lowbit.dialect.formats.names import short_name
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import Act, MatmulSpec, Scale, Zeros
from lowbit.pylib.weights.packed import PackedWeight
from lowbit.pylib.weights.unpacked import UnpackedWeight

BLOCKS = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}
"""The columns that share a scale of these types in MX and in NVFP4; the sizes of groups divide it, or are multiples."""


@dataclass(frozen=True, eq=False)
class Imported(UnpackedWeight):
    """A weight in the terms of `MatmulSpec` and `pack`.

    weight       element format
    table        of a lut<b>
    bias         [n]; None without
    scale_code   the format of scales that are codes, such as "u6"; None for others. Their second level is one of rows,
                 or with zeros and shared by 16 rows
    scale_table  the 256 numbers of codes of "lut8"
    """

    weight: str = field(kw_only=True)
    table: tuple[float, ...] | None = field(default=None, kw_only=True)
    bias: Tensor | None = field(default=None, kw_only=True)
    scale_code: Scale | None = field(default=None, kw_only=True)
    scale_table: tuple[float, ...] | None = field(default=None, kw_only=True)

    def spec(self, act: Act) -> MatmulSpec:
        """Returns the spec of the weight for inputs of type `act`.

        Raises CheckpointError for groups that do not divide k.
        """
        n, k = self.codes.shape
        return MatmulSpec(
            n,
            k,
            self.weight,
            group_size=self._group_size(),
            zeros=self._zeros(),
            scale=self.scale_code or _scale_type(self.scales),
            act=act,
            bias=self.bias is not None,
            table=self.table,
            row_scales=self.row_scales is not None,
            permuted=self.permutation is not None,
            bilevel=self._bilevel(),
            outliers=self.outliers is not None,
        )

    def in_order(self, order: Tensor | None) -> Imported:
        """Returns the weight with its columns in another order, in which groups are side by side; None leaves them."""
        return self if order is None else replace(self, codes=self.codes[:, order], permutation=order)

    def times(self, factors: Tensor) -> Imported:
        """Returns the weight and its bias with each row times a number of f32 [n]: in f32, scales are.

        Raises CheckpointError for a weight of which scales are not all.
        """
        if self.offsets is not None or self.second_level or self.outliers is not None:
            raise CheckpointError("rows of a weight with offsets, codes for scales, or outliers can't be scaled")
        given, factors = self.row_scales, factors.to(self.codes.device)
        bias = None if self.bias is None else self.bias.float() * factors
        if given is None and self.scales.dtype in (torch.float16, torch.bfloat16, torch.float32):
            return replace(self, scales=self.scales.float() * factors[:, None], bias=bias)
        return replace(self, row_scales=factors if given is None else given.float() * factors, bias=bias)

    def _group_size(self) -> int | None:
        """Returns the columns that share a scale; None for whole rows."""
        k, groups = self.codes.shape[1], self.scales.shape[1]
        if groups == 1 and self.scale_code is None:
            return None
        size, rest = divmod(k, groups)
        block = BLOCKS.get(self.scales.dtype, size)
        if rest or (size % block and block % size):
            said = f" of {block} columns, as {short_name(self.scales.dtype)} has" if self.scales.dtype in BLOCKS else ""
            raise CheckpointError(f"k={k} is not {groups} groups{said}; a last group that is shorter can't be read")
        return size

    def _zeros(self) -> Zeros:
        if self.zeros is None:
            return "none" if self.offsets is None else "offset"
        return "float" if self.zeros.is_floating_point() or "zero_scales" in self.second_level else "int"

    def _bilevel(self) -> Bilevel | None:
        """Returns the second level: one of rows, or with zeros and of 16 rows."""
        if not self.second_level:
            return None
        scales, zeros = self.second_level["scale_scales"], "scale_zeros" in self.second_level
        return Bilevel(
            rows=ROWS if zeros else 1,
            groups=self.scales.shape[1] // scales.shape[1],
            scale=cast(SuperScale, _scale_type(scales)),
            zeros=zeros,
            offsets="scale_offsets" in self.second_level,
            table=self.scale_table,
        )

    def pack(self, act: Act) -> PackedWeight:
        """Returns the weight as kernels read it. Raises PackError and SpecError where it is none that they can read."""
        return self.pack_as(self.spec(act), self.bias)


def _scale_type(scales: Tensor) -> Scale:
    kind = short_name(scales.dtype)
    for known in ("f16", "bf16", "f32", "e8m0", "e4m3"):
        if kind == known:
            return known
    raise CheckpointError(f"scales are {scales.dtype}; they must be f16, bf16, f32, e8m0 or e4m3")


def integers(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor, bias: Tensor | None) -> Imported:
    """Returns the weight scale * (code - zero) of unsigned codes.

    Where all zeros are 2^(bits - 1), as symmetric quantizers leave them, the codes become signed and the zeros go.
    """
    half = 1 << (bits - 1)
    if bool((zeros == half).all()):
        return Imported(signed(codes, bits), scales, weight=f"i{bits}", bias=bias)
    return Imported(codes, scales, zeros, weight=f"u{bits}", bias=bias)


def check_middle(zeros: Tensor, bits: int, symmetric: bool, said: str, hint: str = "") -> None:
    """Raise CheckpointError if a configuration says that codes are symmetric, and zeros are not the middle code.

    said, hint   how the configuration says it, and what else may be wrong
    """
    half = 1 << (bits - 1)
    if symmetric and not bool((zeros == half).all()):
        low, high = (int(bound) for bound in zeros.aminmax())
        are = f"are {low}" if low == high else f"go from {low} to {high}"
        raise CheckpointError(f"the quantization_config has {said}, so that all zeros are {half}, but they {are}{hint}")


def signed(codes: Tensor, bits: int) -> Tensor:
    """Returns code - 2^(bits - 1) as int8, of unsigned codes as uint8."""
    return (codes - (1 << (bits - 1))).view(torch.int8)  # uint8 wraps around to the two's complement
