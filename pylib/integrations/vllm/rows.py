"""The weights of the modules that make a layer of vLLM, put together: `Rows`.

A `Source` says which tensors a module has, before they are read, and makes a weight of them when they have come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import CheckpointError, PackError
from lowbit.dialect.spec import Act, MatmulSpec, interned
from lowbit.pylib.checkpoints.checkpoint import EXTRA_STATE, Checkpoint, open_checkpoint
from lowbit.pylib.checkpoints.registry import import_weight, without_zero_bias
from lowbit.pylib.integrations.vllm.names import BIAS
from lowbit.pylib.nn.fuse import concatenated, why_apart
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import PackedWeight
from lowbit.pylib.weights.saved import SPEC, check_same, read_spec

ACTS: dict[torch.dtype, Act] = {torch.float16: "f16", torch.bfloat16: "bf16"}


class Rows(nn.ModuleList):
    """Low-bit layers that share their input and whose results are joined. Neighbours of one format become one layer."""

    def __init__(self, parts: Sequence[LowbitLinear], joined: bool = False) -> None:
        runs = [[part] for part in parts] if joined else _runs(parts)
        super().__init__([concatenated(run) if len(run) > 1 else run[0] for run in runs])

    @property
    def linears(self) -> list[LowbitLinear]:
        """The layers, from top to bottom."""
        return [cast(LowbitLinear, layer) for layer in self]

    def with_bias(self, bias: Tensor) -> Rows:
        """Returns layers with these weights that add a bias [n]: its memory is theirs."""
        begins = accumulate((layer.out_features for layer in self.linears), initial=0)
        return Rows([_with_bias(layer, bias[begin:]) for layer, begin in zip(self.linears, begins)], joined=True)

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
    """Returns the checkpoint in a folder. It is kept while layers are made; `opened.cache_clear()` closes it."""
    return open_checkpoint(folder)


def check_whole(folder: Path) -> None:
    """Raise CheckpointError for files that hold the parts of several processes: they do not say what is low-bit."""
    if ranks := {file.name.split("-")[2] for file in folder.glob("model-rank-*-part-*.safetensors")}:
        raise CheckpointError(
            f"{folder} has the parts of {len(ranks)} processes (sharded state), which do not say what is low-bit; "
            "serve the folder that they were made of, with load_format='auto' and any tensor_parallel_size"
        )


@dataclass(frozen=True, eq=False)
class Source:
    """A low-bit module as its files describe it. Its tensors come later.

    module     its name in the checkpoint
    tensors    those that it has, on meta, by their names in the module; without the bias
    has_bias   whether the files have a bias of it
    adds       whether that is not all zeros
    config     another library's description of the checkpoint; None for lowbit's own
    about      what lowbit's own files say of the weight
    """

    module: str
    tensors: Mapping[str, Tensor]
    has_bias: bool
    adds: bool
    config: Mapping[str, Any] | None
    about: Tensor | None

    @classmethod
    def of(cls, checkpoint: Checkpoint, module: str) -> Source:
        """Returns what the files say of a module. Raises CheckpointError for one that lacks a tensor."""
        checkpoint.check_layer(module)
        tensors = {short: checkpoint.tensors[full] for short, full in checkpoint.names_of(module).items()}
        bias = tensors.pop(BIAS, None)
        on_meta = {short: tensor.to("meta") for short, tensor in tensors.items()}
        config = None if checkpoint.format is None else checkpoint.quantization_config
        about = None if config is not None else tensors[EXTRA_STATE[1:]].clone()
        return cls(module, on_meta, bias is not None, bias is not None and bool(bias.any()), config, about)

    def check_bias(self, expected: bool) -> None:
        """Raise CheckpointError unless the module has a bias where the model has one."""
        if expected != (self.has_bias if expected else self.adds):
            has, lacks = ("model", "checkpoint") if expected else ("checkpoint", "model")
            raise CheckpointError(f"{self.module}: it has a bias in the {has}, and none in the {lacks}")

    def spec(self, act: Act) -> MatmulSpec:
        """Returns what the weight is, without a bias. Raises CheckpointError for another library's, which says it in
        its tensors."""
        if self.about is None:
            raise CheckpointError("only the tensors of another library's files say what it is; use load_format='auto'")
        return interned(replace(read_spec(self.about), act=act, bias=False))

    def packed(self, tensors: Mapping[str, Tensor], act: Act) -> PackedWeight:
        """Returns the weight that these tensors make, without a bias."""
        if self.config is not None:
            return import_weight(self.config, tensors, act, name=self.module)
        given = dict(tensors)
        about = given.pop(EXTRA_STATE[1:])
        check_same(read_spec(about), read_spec(cast(Tensor, self.about)))
        spec = replace(read_spec(about), act=act)
        if spec.bias:
            given[BIAS] = torch.zeros(spec.slot(BIAS).shape, dtype=TORCH[spec.out_dtype], device=about.device)
        return without_zero_bias(PackedWeight.from_state_dict({**given, SPEC: about}, spec))


def _with_bias(layer: LowbitLinear, bias: Tensor) -> LowbitLinear:
    """Returns a layer with another's weight that adds the first rows of a bias."""
    spec = interned(replace(layer.spec, bias=True))
    return LowbitLinear(spec, {**layer.packed, BIAS: bias[: layer.out_features]})


def rows_of(weights: Mapping[str, PackedWeight], share: Share) -> Rows:
    """Returns the layer that the weights of modules make, or the part of it that this process has.

    weights   by the names of the modules, from top to bottom
    """
    parts: list[LowbitLinear] = []
    fused = len(weights) < len(share.rows)
    for (module, packed), rows in zip(weights.items(), [sum(share.rows)] if fused else share.rows, strict=True):
        with naming(module):
            if fused and packed.spec.n > rows:  # its parts are those of each matrix
                raise PackError("fused layers can't be split over processes; save the model without fuse")
            parts.append(LowbitLinear.from_packed(share.of(packed, rows)))
    return Rows(parts)


def quantize_rows(weight: Tensor, sizes: Sequence[int], configs: Sequence[QuantConfig]) -> Rows:
    """Returns the layer of a dense weight whose rows are those of several matrices, each with a configuration."""
    parts = zip(weight.split(list(sizes)), configs, strict=True)
    return Rows([LowbitLinear.from_linear(_linear(part), config) for part, config in parts])


def _linear(weight: Tensor) -> nn.Linear:
    """Returns a layer of torch that shares its weight."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], False, "meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
