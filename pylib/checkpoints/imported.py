"""A weight that has been read from another library's checkpoint, before it is packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from lowbit.dialect.bilevel import Bilevel, SuperScale
from lowbit.dialect.errors import CheckpointError
from lowbit.dialect.formats.names import short_name
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import Act, MatmulSpec, Scale, Zeros
from lowbit.pylib.packed import PackedWeight, pack


@dataclass(frozen=True, eq=False)
class Imported:
    """A weight [n, k] in the terms of `MatmulSpec` and `pack`.

    weight       element format
    codes        [n, k]: values of i<b> formats, codes of all others
    scales       [n, groups], in the type in which they are kept, or codes of `scale_code`
    zeros        [n, groups]: integers, floats of the type of the scales, or codes like them; None without
    offsets      [n, groups], in the type of the scales, or codes like them; None without
    row_scales   [n] or [1]: another factor of each row, in f32; None without
    permutation  [k]: the column of the weight that each column of codes is; None if they are the same
    table        of a lut<b>
    bias         [n]; None without
    scale_code   the format of scales that are codes, such as "u6"; None for others
    scale_scales, scale_zeros, zero_scales, zero_zeros, offset_scales, scale_offsets   the second level of these codes,
                 floats [n, blocks of groups]; where there are zeros among it, [n / 16, groups], shared by 16 rows
    scale_table  the 256 numbers of codes of "lut8"
    outliers     (row offsets, columns, values), which are added to the rest; None without
    """

    weight: str
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None
    row_scales: Tensor | None = None
    permutation: Tensor | None = None
    table: tuple[float, ...] | None = None
    bias: Tensor | None = None
    scale_code: Scale | None = None
    scale_scales: Tensor | None = None
    scale_zeros: Tensor | None = None
    zero_scales: Tensor | None = None
    zero_zeros: Tensor | None = None
    offset_scales: Tensor | None = None
    scale_offsets: Tensor | None = None
    scale_table: tuple[float, ...] | None = None
    outliers: Sequence[Tensor] | None = None

    def spec(self, act: Act) -> MatmulSpec:
        """Returns the spec of the weight for inputs of type `act`."""
        (n, k), groups = self.codes.shape, self.scales.shape[1]
        return MatmulSpec(
            n,
            k,
            self.weight,
            group_size=None if groups == 1 and self.scale_code is None else k // groups,
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

    def _zeros(self) -> Zeros:
        if self.zeros is None:
            return "none" if self.offsets is None else "offset"
        return "float" if self.zeros.is_floating_point() or self.zero_scales is not None else "int"

    def _bilevel(self) -> Bilevel | None:
        """Returns the second level: one of rows, or with zeros and of 16 rows."""
        if self.scale_scales is None:
            return None
        zeros = self.scale_zeros is not None
        return Bilevel(
            rows=ROWS if zeros else 1,
            groups=self.scales.shape[1] // self.scale_scales.shape[1],
            scale=cast(SuperScale, _scale_type(self.scale_scales)),
            zeros=zeros,
            offsets=self.scale_offsets is not None,
            table=self.scale_table,
        )

    def pack(self, act: Act) -> PackedWeight:
        """Returns the weight as kernels read it. Raises PackError and SpecError where it is none that they can read."""
        others = {name: getattr(self, name) for name in _OTHERS}
        return pack(self.spec(act), self.codes, self.scales, self.zeros, self.bias, self.outliers, **others)


_OTHERS = (
    *("offsets", "row_scales", "permutation"),
    *("scale_scales", "scale_zeros", "zero_scales", "zero_zeros", "offset_scales", "scale_offsets"),
)


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
        return Imported(f"i{bits}", signed(codes, bits), scales, bias=bias)
    return Imported(f"u{bits}", codes, scales, zeros, bias=bias)


def signed(codes: Tensor, bits: int) -> Tensor:
    """Returns code - 2^(bits - 1) as int8, of unsigned codes as uint8."""
    return (codes - (1 << (bits - 1))).view(torch.int8)  # uint8 wraps around to the two's complement
