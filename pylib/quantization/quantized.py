"""A quantized weight, before it is packed: what `lowbit.quantize` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import QuantizeError
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.dequantized import in_order_of_x
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.outliers import csr_rows, split_csr
from lowbit.pylib.packed import PackedWeight, pack
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.quantization.grid import Codes, Grid, chunks


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight:
    """A weight [n, k] as codes, scales and zeros.

    config          how it was made
    codes           [n, k]: int8 values for i<b> formats, uint8 codes for all others
    scales          [n, groups] in the type config.scale
    zeros           [n, groups]: int32, or floats; None without zeros
    column_scales   [k] in f32, of AWQ: the input has to be divided by them; None if there is nothing to divide
    outliers        a torch.sparse_csr matrix [n, k] in f16, of SpQR, which is added to the rest; else None
    permutation     [k], of SpQR in act-order: column j of all else is column permutation[j] of the weight; else None
    """

    config: QuantConfig
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    column_scales: Tensor | None = None
    outliers: Tensor | None = None
    permutation: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """n and k."""
        n, k = self.codes.shape
        return n, k

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def spec(self, **others: Any) -> MatmulSpec:
        """Returns the spec of a matmul with this weight; `others` are its fields act, out and bias."""
        return self.config.spec(*self.shape, **others)

    def pack(self, target: MatmulSpec | Matmul | None = None, bias: Tensor | None = None) -> PackedWeight:
        """Returns the weight in the kernels' memory order, for a spec or a matmul; None: for `self.spec()`.

        Where there are column scales, the kernel has to be given `prepare_input(x)` in place of x.
        """
        spec = target.spec if isinstance(target, Matmul) else target or self.spec(bias=bias is not None)
        outliers = self.outliers if spec.outliers else None
        others = {} if self.permutation is None else {"permutation": self.permutation}
        return pack(spec, self.codes, self.scales, self.zeros, bias, outliers, **others)

    def prepare_input(self, x: Tensor) -> Tensor:
        """Returns the input that belongs to the codes: x divided by the column scales, or x itself without them."""
        return x if self.column_scales is None else (x.float() / self.column_scales).to(x.dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weight that x, as it was before `prepare_input`, is multiplied by: [n, k]."""
        n, k = self.shape
        grid, result = Grid(self.config, k, self.device), torch.empty(n, k, dtype=dtype, device=self.device)
        zeros = torch.zeros(self.scales.shape, device=self.device) if self.zeros is None else self.zeros.float()
        for rows in chunks(self.codes, 3):
            values = grid.dequantize(Codes(self.codes[rows], self.scales[rows].float(), zeros[rows]))
            result[rows] = values if self.column_scales is None else values / self.column_scales
        if self.outliers is not None:
            places = csr_rows(self.outliers), self.outliers.col_indices()
            result[places] = (result[places].float() + self.outliers.values().float()).to(dtype)
        return result if self.permutation is None else in_order_of_x(result, self.permutation)

    @torch.no_grad()
    def fold_into(self, previous: nn.Module) -> QuantizedWeight:
        """Divide what the layer before gives by the column scales, in its own weight (and bias), and return the
        quantized weight without them.

        previous   a norm with a weight [k], or a linear layer with k outputs, whose output is the input of this weight
                   and of no other: siblings are quantized as one weight, row below row, and `split` afterwards.

        A norm that multiplies by 1 + weight, as Gemma's does, is none of these.
        """
        if self.column_scales is None:
            return self
        weight, k = getattr(previous, "weight", None), self.shape[1]
        if not isinstance(weight, Tensor) or weight.ndim not in (1, 2) or weight.shape[0] != k:
            size = f" with a weight {list(weight.shape)}" if isinstance(weight, Tensor) else ""
            given = type(previous).__name__ + size
            raise QuantizeError(f"previous must be a norm or a linear layer with {k} outputs, not {given}")
        bias = getattr(previous, "bias", None)
        weight.copy_(weight.float() / (self.column_scales[:, None] if weight.ndim == 2 else self.column_scales))
        if isinstance(bias, Tensor):
            bias.copy_(bias.float() / self.column_scales)
        return replace(self, column_scales=None)

    def split(self, sizes: Sequence[int]) -> list[QuantizedWeight]:
        """Returns the weight in parts of so many rows: siblings that were quantized as one."""
        if sum(sizes) != self.shape[0] or min(sizes, default=0) < 1:
            raise QuantizeError(f"sizes={list(sizes)} must be positive and add up to n={self.shape[0]}")
        zeros = [None] * len(sizes) if self.zeros is None else self.zeros.split(list(sizes))
        sparse = [None] * len(sizes) if self.outliers is None else split_csr(self.outliers, sizes)
        parts = zip(self.codes.split(list(sizes)), self.scales.split(list(sizes)), zeros, sparse)
        return [replace(self, codes=q, scales=s, zeros=z, outliers=part) for q, s, z, part in parts]

    def __repr__(self) -> str:
        return f"QuantizedWeight({self.spec()} by {self.config.method} on {self.device})"
