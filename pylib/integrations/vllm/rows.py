"""The weights of the modules that make a layer of vLLM, put together: `Rows`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import CheckpointError, PackError
from lowbit.dialect.spec import Act
from lowbit.pylib.checkpoints.checkpoint import Checkpoint, open_checkpoint
from lowbit.pylib.checkpoints.registry import without_zero_bias
from lowbit.pylib.nn.fuse import concatenated, why_apart
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.weights.packed import PackedWeight

ACTS: dict[torch.dtype, Act] = {torch.float16: "f16", torch.bfloat16: "bf16"}


class Rows(nn.ModuleList):
    """Low-bit layers that share their input and whose results are joined. Neighbours of one format become one layer."""

    def __init__(self, parts: Sequence[LowbitLinear]) -> None:
        super().__init__([concatenated(run) if len(run) > 1 else run[0] for run in _runs(parts)])

    def forward(self, x: Tensor) -> Tensor:
        """Returns y [..., n] of all layers for x [..., k]."""
        results = [layer(x) for layer in self]
        return results[0] if len(results) == 1 else torch.cat(results, -1)


def _runs(parts: Sequence[LowbitLinear]) -> list[list[LowbitLinear]]:
    """Returns the layers in order, in lists of those that can be put together."""
    runs = [[parts[0]]]
    for part in parts[1:]:
        if why_apart([*runs[-1], part]):
            runs.append([part])
        else:
            runs[-1].append(part)
    return runs


@dataclass(frozen=True)
class Share:
    """The share of one process in a layer that is split over several.

    rows      of each matrix that the layer is made of
    columns   of all of them
    """

    rows: Sequence[int]
    columns: int
    rank: int = 0
    processes: int = 1

    def of(self, packed: PackedWeight, rows: int) -> PackedWeight:
        """Returns the part of a matrix that this process has, so many rows of it. Raises PackError if there is none."""
        whole, part = (packed.spec.n, packed.spec.k), (rows, self.columns)
        for dim in (0, 1):
            count = whole[dim] // part[dim]
            if count * part[dim] != whole[dim] or not count or self.processes % count:
                raise PackError(
                    f"its weight is {whole[0]} x {whole[1]}, and vLLM wants {part[0]} x {part[1]} of it in each of "
                    f"{self.processes} processes; use tensor_parallel_size=1, or leave the layer dense"
                )
            if count > 1:
                packed = packed.shard(dim, self.rank * count // self.processes, count)
        return packed


@lru_cache(maxsize=2)
def opened(folder: Path) -> Checkpoint:
    """Returns the checkpoint in a folder."""
    return open_checkpoint(folder)


def load_weight(folder: Path, module: str, act: Act, device: torch.device, *, bias: bool) -> PackedWeight:
    """Returns the weight of a module. Raises CheckpointError unless it has a bias where the model has one."""
    packed = opened(folder).load(module, act, device)
    packed = packed if bias else without_zero_bias(packed)
    if packed.spec.bias != bias:
        has, lacks = ("checkpoint", "model") if packed.spec.bias else ("model", "checkpoint")
        raise CheckpointError(f"{module}: it has a bias in the {has}, and none in the {lacks}")
    return packed


def load_rows(
    folder: Path, modules: Sequence[str], share: Share, act: Act, device: torch.device, *, bias: bool
) -> Rows:
    """Returns the layer that modules of a checkpoint make, or the part of it that this process has."""
    parts: list[LowbitLinear] = []
    fused = len(modules) < len(share.rows)
    for module, rows in zip(modules, [sum(share.rows)] if fused else share.rows, strict=True):
        packed = load_weight(folder, module, act, device, bias=bias)
        with naming(module):
            if fused and packed.spec.n > rows:  # its parts are those of each matrix
                raise PackError("fused layers can't be split over processes; save the model without fuse")
            parts.append(LowbitLinear.from_packed(share.of(packed, rows)))
    return Rows(parts)


def quantize_rows(weight: Tensor, bias: Tensor | None, sizes: Sequence[int], configs: Sequence[QuantConfig]) -> Rows:
    """Returns the layer of a dense weight whose rows are those of several matrices, each with a configuration."""
    biases = bias.split(list(sizes)) if bias is not None else [None] * len(sizes)
    parts = zip(weight.split(list(sizes)), biases, configs, strict=True)
    return Rows([LowbitLinear.from_linear(_linear(part, cast(Tensor | None, b)), config) for part, b, config in parts])


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Returns a layer of torch that shares its tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, "meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
