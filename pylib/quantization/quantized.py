"""A quantized weight, before it is packed: what `lowbit.quantize` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import PackError, QuantizeError
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.quantization.grid import Codes, Grid, chunks
from lowbit.pylib.weights.dequantized import in_order_of_x
from lowbit.pylib.weights.outliers import csr_rows, split_csr
from lowbit.pylib.weights.packed import PackedWeight
from lowbit.pylib.weights.unpacked import UnpackedWeight

BY_ROW = ("codes", "scales", "zeros", "offsets", "row_scales")
"""The tensors of a quantized weight that have something for every row."""


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedWeight(UnpackedWeight):
    """A weight [n, k] as codes, scales and zeros, with the configuration that it was made by.

    column_scales   [k] in f32, of AWQ: the input has to be divided by them; None if there is nothing to divide
    outliers        a torch.sparse_csr matrix [n, k] in f16, of SpQR, which is added to the rest; else None
    """

    outliers: Tensor | None = None
    config: QuantConfig = field(kw_only=True)
    column_scales: Tensor | None = field(default=None, kw_only=True)

    @property
    def shape(self) -> tuple[int, int]:
        """n and k."""
        n, k = self.codes.shape
        return n, k

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.codes.device

    def spec(self, **others: Any) -> MatmulSpec:
        """Returns the spec of a matmul with this weight; `others` are its fields act, out, bias and epilogue."""
        return self.config.spec(*self.shape, **others)

    def pack(self, target: MatmulSpec | Matmul | None = None, bias: Tensor | None = None) -> PackedWeight:
        """Returns the weight in the kernels' memory order, for a spec or a matmul; None: for `self.spec()`.

        Where there are column scales, the kernel has to be given `prepare_input(x)` in place of x.
        """
        spec: object = target.spec if isinstance(target, Matmul) else target or self.spec(bias=bias is not None)
        if not isinstance(spec, MatmulSpec):
            raise PackError(f"target={target!r} must be a MatmulSpec, or what lowbit.compile returns")
        return self.pack_as(spec, bias)

    def prepare_input(self, x: Tensor) -> Tensor:
        """Returns the input that belongs to the codes: x divided by the column scales, or x itself without them."""
        return x if self.column_scales is None else (x.float() / self.column_scales).to(x.dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weight that x, as it was before `prepare_input`, is multiplied by: [n, k]."""
        n, k = self.shape
        grid, result = Grid(self.config, k, self.device), torch.empty(n, k, dtype=dtype, device=self.device)
        scales = self._numbers("scale", self.scales)
        if self.row_scales is not None:
            scales = self.row_scales[:, None] * scales
        zeros = torch.zeros_like(scales) if self.zeros is None else self._numbers("zero", self.zeros)
        offsets = None if self.offsets is None else self._numbers("offset", self.offsets)
        for rows in chunks(self.codes, 3):
            out = result[rows] if dtype is torch.float32 else None
            values = grid.dequantize(Codes(self.codes[rows], scales[rows], zeros[rows]), out)
            if offsets is not None:
                grid.groups(values).add_(offsets[rows, :, None])
            if self.column_scales is not None:
                values /= self.column_scales
            if out is None:
                result[rows] = values
        if self.outliers is not None:
            places = csr_rows(self.outliers), self.outliers.col_indices()
            result[places] = (result[places].float() + self.outliers.values().float()).to(dtype)
        return result if self.permutation is None else in_order_of_x(result, self.permutation)

    def _numbers(self, role: str, table: Tensor) -> Tensor:
        """Returns scales, zeros or offsets in f32, [n, groups]."""
        level = self.config.second_level
        if level is None:
            return table.float()
        n = len(table)

        def spread(second: Tensor) -> Tensor:
            return second.float().repeat_interleave(level.rows, 0)[:n].repeat_interleave(level.groups, 1)

        scales, zeros = self.second_level[f"{role}_scales"], self.second_level.get(f"{role}_zeros")
        return spread(scales) * (table.float() if zeros is None else table.float() - spread(zeros))

    @torch.no_grad()
    def fold_into(self, previous: nn.Module) -> QuantizedWeight:
        """Divide the previous layer's output by the column scales, in its weight and bias, and return the quantized
        weight without them.

        previous   a norm with a weight [k], or a linear layer with k outputs, whose output is the input of this weight
                   and of no other: siblings are quantized as one weight, row below row, and `split` afterwards.

        Norms that multiply by 1 + weight (Gemma's) are not supported.
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
        """Returns the weight in parts of so many rows: siblings that were quantized as one.

        Raises QuantizeError for sizes that do not add up, or that cut rows which share a second level.
        """
        if sum(sizes) != self.shape[0] or min(sizes, default=0) < 1:
            raise QuantizeError(f"sizes={list(sizes)} must be positive and add up to n={self.shape[0]}")
        if any(size % self._shared_rows for size in sizes[:-1]):
            rows = self._shared_rows
            rule = f"must be multiples of {rows}, but for the last: so many rows share a second level of scales"
            raise QuantizeError(f"sizes={list(sizes)} {rule}; use other sizes, or quantize the parts one by one")
        sparse = [None] * len(sizes) if self.outliers is None else split_csr(self.outliers, sizes)
        tables = {name: table for name in BY_ROW if (table := getattr(self, name)) is not None}
        rows = {name: table.split(list(sizes)) for name, table in tables.items()}
        return [
            replace(self, outliers=part, second_level=level, **{name: parts[i] for name, parts in rows.items()})
            for i, (part, level) in enumerate(zip(sparse, self._blocks(sizes)))
        ]

    @property
    def _shared_rows(self) -> int:
        """Returns how many rows share a second level; 1 without one."""
        return self.config.second_level.rows if self.config.second_level else 1

    def _blocks(self, sizes: Sequence[int]) -> list[dict[str, Tensor]]:
        """Returns the second level of each of some parts."""
        blocks = [-(-size // self._shared_rows) for size in sizes]
        cut = {name: table.split(blocks) for name, table in self.second_level.items()}
        return [{name: parts[i] for name, parts in cut.items()} for i in range(len(sizes))]

    def __repr__(self) -> str:
        return f"QuantizedWeight({self.spec()} by {self.config.method} on {self.device})"
