"""The weights of the modules that make a layer of a server, put together: `Rows`.

A `Source` says which tensors a module has, before they are read. Its `SharedSource` says which slices of them a process
wants, and makes a weight of these when they have come.
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
from lowbit.pylib.integrations.serving.names import BIAS
from lowbit.pylib.nn.fuse import concatenated, why_apart
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.weights.packed import PackedWeight
from lowbit.pylib.weights.saved import SPEC, check_same, read_spec, write_spec
from lowbit.pylib.weights.sharding import Part

_ABOUT = EXTRA_STATE[1:]

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

    def part(self, spec: MatmulSpec, matrices: slice) -> Part:
        """Returns what this process has of a module, which is one of the matrices or several of them, fused.

        Raises PackError if it has nothing of it.
        """
        rows = self.rows[matrices]
        wholes = self._whole_rows(rows, spec.n)
        columns = self._range(self.columns, spec.k)
        if not wholes or columns is None:
            raise PackError(
                f"its weight is {spec.n} x {spec.k}, and the server wants {sum(rows)} x {self.columns} of it in each "
                f"of {self.processes} processes; use one process, or leave the layer dense"
            )
        ranges = [cast(tuple[int, int], self._range(*each)) for each in zip(rows, wholes)]
        begins = accumulate(wholes, initial=0)
        return Part(_joined([(begin + first, count) for begin, (first, count) in zip(begins, ranges)]), columns)

    def _whole_rows(self, rows: Sequence[int], n: int) -> list[int]:
        """Returns the rows of the matrices in all processes, which are n; nothing if there are no such matrices. Heads
        of keys and values may be fewer than processes: then several have the same."""
        if len(rows) == 1:
            return [n] if self._range(rows[0], n) else []
        for same in range(1, self.processes + 1):
            first, *others = (count * self.processes for count in rows)
            wholes = [first, *(count // same for count in others)]
            if sum(wholes) == n and all(self._range(*each) for each in zip(rows, wholes)):
                return wholes
        return []

    def _range(self, size: int, whole: int) -> tuple[int, int] | None:
        """Returns the first of this process's rows or columns, and their number; None if it has none."""
        count = whole // size
        if count * size != whole or not count or self.processes % count:
            return None
        return self.rank * count // self.processes * size, size


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns ranges with those made one that follow each other."""
    found = [ranges[0]]
    for first, count in ranges[1:]:
        before, size = found[-1]
        if before + size == first:
            found[-1] = before, size + count
        else:
            found.append((first, count))
    return tuple(found)


@lru_cache(maxsize=2)
def opened(folder: Path) -> Checkpoint:
    """Returns the checkpoint in a folder. It is kept while layers are made; `opened.cache_clear()` closes it."""
    checkpoint = open_checkpoint(folder)
    if checkpoint.rotations or checkpoint.transforms:
        raise CheckpointError(
            f"{folder} rotates or scales what goes into layers or comes out of them at each call, which servers don't "
            "do yet; load it with lowbit.load_checkpoint or from_pretrained, or serve a checkpoint without"
        )
    return checkpoint


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
        about = None if config is not None else tensors[_ABOUT].clone()
        return cls(module, on_meta, bias is not None, bias is not None and bool(bias.any()), config, about)

    def check_bias(self, expected: bool) -> None:
        """Raise CheckpointError unless the module has a bias where the model has one."""
        if expected != (self.has_bias if expected else self.adds):
            has, lacks = ("model", "checkpoint") if expected else ("checkpoint", "model")
            raise CheckpointError(f"{self.module}: it has a bias in the {has}, and none in the {lacks}")

    def shared(self, share: Share, matrices: slice, act: Act) -> SharedSource:
        """Returns the share of a process in the module.

        matrices   those of the layer that the module is made of

        Raises PackError, now if lowbit's own files say what the module is, where it can't be cut so.
        """
        if self.about is None:
            return SharedSource(self, share, matrices, act, None, None)
        with naming(self.module):
            whole = interned(replace(read_spec(self.about), act=act, bias=False))
            part = share.part(whole, matrices)
            part.spec(whole)
            return SharedSource(self, share, matrices, act, whole, part)


@dataclass(frozen=True, eq=False)
class SharedSource:
    """The share of a process in a module.

    whole   what the module is, without a bias; None for another library's, which says it in its tensors
    part    what this process has of it; None for another library's
    """

    source: Source
    share: Share
    matrices: slice
    act: Act
    whole: MatmulSpec | None
    part: Part | None

    @property
    def is_sliced(self) -> bool:
        """Whether slices of the files' tensors make the part: then no more of them is read."""
        whole, given = self.whole, self.source.tensors
        if whole is None or self.part is None or not self.part.is_cut_in_memory(whole):
            return False
        return all(slot.name in given and given[slot.name].shape == slot.shape for slot in whole.tensors)

    def waited_for(self) -> dict[str, Tensor]:
        """Returns the tensors that are wanted of the files, on meta, by their names in the module."""
        return {name: self.sliced(name, tensor) for name, tensor in self.source.tensors.items()}

    def sliced(self, name: str, tensor: Tensor) -> Tensor:
        """Returns what is wanted of a tensor of the files: all of it, or the slice of this process."""
        if not self.is_sliced or name == _ABOUT:
            return tensor
        whole, part = cast(MatmulSpec, self.whole), cast(Part, self.part)
        return part.of(whole.slot(name), tensor, whole)

    def spec(self) -> MatmulSpec:
        """Returns what this process's part of the weight is. Raises CheckpointError for another library's."""
        if self.whole is None or self.part is None:
            raise CheckpointError("only the tensors of another library's files say what it is; use load_format='auto'")
        return interned(self.part.spec(self.whole))

    def packed(self, tensors: Mapping[str, Tensor]) -> PackedWeight:
        """Returns this process's part of the weight, without a bias, of the tensors that were waited for."""
        if self.whole is None or self.part is None:
            packed = import_weight(
                cast(Mapping[str, Any], self.source.config), tensors, self.act, name=self.source.module
            )
            packed = without_zero_bias(packed)
            return packed.part(self.share.part(packed.spec, self.matrices))
        given = dict(tensors)
        check_same(read_spec(given.pop(_ABOUT)), read_spec(cast(Tensor, self.source.about)))
        spec = self.spec() if self.is_sliced else self.whole
        packed = PackedWeight.from_state_dict({**given, SPEC: write_spec(spec)}, spec)
        return packed if self.is_sliced else packed.part(self.part)


def _with_bias(layer: LowbitLinear, bias: Tensor) -> LowbitLinear:
    """Returns a layer with another's weight that adds the first rows of a bias."""
    spec = interned(replace(layer.spec, bias=True))
    return LowbitLinear(spec, {**layer.packed, BIAS: bias[: layer.out_features]})


def shares_of(sources: Sequence[Source], share: Share, act: Act) -> list[SharedSource]:
    """Returns the shares of a process in the modules of a layer, from top to bottom; one module may be all matrices."""
    fused = len(sources) < len(share.rows)
    slices = [slice(None)] if fused else [slice(i, i + 1) for i in range(len(share.rows))]
    return [source.shared(share, matrices, act) for source, matrices in zip(sources, slices, strict=True)]


def rows_of(weights: Mapping[str, PackedWeight]) -> Rows:
    """Returns the layer that the weights of modules make.

    weights   by the names of the modules, from top to bottom
    """
    parts: list[LowbitLinear] = []
    for module, packed in weights.items():
        with naming(module):
            parts.append(LowbitLinear.from_packed(packed))
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
