"""A weight as `pack` takes it, wherever it comes from: a quantizer, or another library's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.weights.packed import PackedWeight, pack


@dataclass(frozen=True, eq=False, repr=False)
class UnpackedWeight:
    """The tensors of a weight [n, k], before they are in the kernels' memory order.

    codes         [n, k]: int8 values for i<b> formats, uint8 codes for all others
    scales        [n, groups], in the type in which they are kept, or codes where there is a second level
    zeros         [n, groups]: integers, floats, or codes like the scales; None without zeros
    offsets       [n, groups] like the scales; None without offsets
    row_scales    [n] or [1] in f32: another factor of each row; None without
    permutation   [k]: column j of the codes is column permutation[j] of the weight; None if they are the same
    outliers      a sparse matrix [n, k] that is added to the rest, as `pack` takes it; None without
    second_level  what makes numbers of scales, zeros and offsets that are codes, by the names that `pack` has for it:
                  scale_scales, zero_scales, scale_offsets ..., floats [n / rows, blocks of groups]; empty without
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None
    row_scales: Tensor | None = None
    permutation: Tensor | None = None
    outliers: Tensor | Sequence[Tensor] | None = None
    second_level: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def pack_as(self, spec: MatmulSpec, bias: Tensor | None = None) -> PackedWeight:
        """Returns the weight in the kernels' memory order; outliers are left out if the spec has none."""
        return pack(
            spec,
            self.codes,
            self.scales,
            self.zeros,
            bias,
            self.outliers if spec.outliers else None,
            offsets=self.offsets,
            row_scales=self.row_scales,
            permutation=self.permutation,
            **self.second_level,
        )
