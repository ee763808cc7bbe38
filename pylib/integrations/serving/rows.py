"""The weights of the modules that make a layer of a server, put together: `Rows`.

A `Source` says which tensors a module has, before they are read. Its `SharedSource` says which slices of them a process
wants, and makes a weight of these when they have come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.dialect.epilogue import Epilogue
from lowbit.dialect.errors import CheckpointError, PackError, SpecError
from lowbit.dialect.spec import Act, MatmulSpec, interned
from lowbit.pylib.checkpoints.checkpoint import EXTRA_STATE, Checkpoint, check_dense, open_checkpoint
from lowbit.pylib.checkpoints.layers import layer_of
from lowbit.pylib.checkpoints.registry import import_between, without_zero_bias
from lowbit.pylib.checkpoints.transforms import Rotations, are_alike
from lowbit.pylib.integrations.serving.names import BIAS
from lowbit.pylib.nn.fuse import concatenated, why_apart
from lowbit.pylib.nn.gated_linear import Gate, with_gate, without_gate
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.nn.rotated import Beside, RotatedLinear
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.tune.timing import random_weight
from lowbit.pylib.weights import gated_rows
from lowbit.pylib.weights.packed import PackedWeight
from lowbit.pylib.weights.saved import SPEC, check_same, read_spec, write_spec
from lowbit.pylib.weights.sharding import Part

_ABOUT = EXTRA_STATE[1:]

ACTS: dict[torch.dtype, Act] = {torch.float16: "f16", torch.bfloat16: "bf16"}


Layer = LowbitLinear | RotatedLinear


class Rows(nn.ModuleList):
    """Low-bit layers that share their input and whose results are joined. Neighbours of one format whose inputs are
    rotated alike become one layer."""

    def __init__(self, parts: Sequence[Layer], joined: bool = False) -> None:
        super().__init__([_as_one(run) for run in ([[part] for part in parts] if joined else _runs(parts))])

    @property
    def linears(self) -> list[Layer]:
        """The layers, from top to bottom."""
        return [cast(Layer, layer) for layer in self]

    @property
    def turns_outputs(self) -> bool:
        """Whether results are rotated, which a bias would have to be, too."""
        return any(len(_rotations_of(layer).outputs) for layer in self.linears)

    def check_adds(self, skips: bool) -> None:
        """Raise SpecError for results that are rotated together with a bias that the model adds later.

        skips   whether the model has a bias of this layer, and adds it itself
        """
        if skips and self.turns_outputs:
            raise SpecError("what comes out of this layer is rotated with its bias, which the model adds later itself")

    def with_bias(self, bias: Tensor) -> Rows:
        """Returns layers with these weights that add a bias [n]: its memory is theirs."""
        begins = accumulate((layer.out_features for layer in self.linears), initial=0)
        return Rows([_with_bias(layer, bias[begin:]) for layer, begin in zip(self.linears, begins)], joined=True)

    def with_gate(self, gate: Gate) -> Rows | None:
        """Returns a layer with these weights that applies a gated activation; None for weights of several formats,
        rotated ones, and those that can't be stored for a gate."""
        if [type(layer) for layer in self.linears] != [LowbitLinear]:
            return None
        with suppress(SpecError, PackError):  # 16 rows share a second level, say
            return Rows([LowbitLinear.from_packed(with_gate(self.linears[0].packed, gate))])
        return None

    def plus(self, y: Tensor, bias: Tensor) -> Tensor:
        """Returns results y [..., n], and a bias [n] rotated as they have been, added up."""
        if not self.turns_outputs:
            return y + bias
        sizes = [layer.out_features for layer in self.linears]
        return y + torch.cat([_turned(layer, part) for layer, part in zip(self.linears, bias.split(sizes))])

    def forward(self, x: Tensor) -> Tensor:
        """Returns y [..., n] of all layers for x [..., k]."""
        results = [layer(x) for layer in self]
        return results[0] if len(results) == 1 else torch.cat(results, -1)


def _rotations_of(layer: Layer) -> Rotations:
    if isinstance(layer, LowbitLinear):
        return Rotations()
    return Rotations(*(tuple(cast(Any, turns)) for turns in (layer.input_rotations, layer.output_rotations)))


def _turned(layer: Layer, bias: Tensor) -> Tensor:
    return bias if isinstance(layer, LowbitLinear) else layer.output_rotations(bias)


def _runs(parts: Sequence[Layer]) -> list[list[Layer]]:
    """Returns the layers in order, in lists of those that can be put together."""
    runs = [[parts[0]]]
    for part in parts[1:]:
        inputs = (_rotations_of(layer).inputs for layer in (runs[-1][0], part))
        if why_apart(cast(list[LowbitLinear], [*runs[-1], part])) or not are_alike(*inputs):
            runs.append([part])
        else:
            runs[-1].append(part)
    return runs


def _as_one(run: Sequence[Layer]) -> Layer:
    """Returns layers, one below the other, as one."""
    if len(run) == 1:
        return run[0]
    weight, each = concatenated(cast(list[LowbitLinear], run)), [_rotations_of(layer) for layer in run]
    outputs = [(layer.out_features, rotations.outputs) for layer, rotations in zip(run, each)]
    beside = [Beside(outputs)] if any(rotations.outputs for rotations in each) else []
    return layer_of(weight.packed, Rotations(each[0].inputs, tuple(beside)))


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
        return Part(tuple((begin + first, count) for begin, (first, count) in zip(begins, ranges)), columns)

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


@lru_cache(maxsize=2)
def opened(folder: Path) -> Checkpoint:
    """Returns the checkpoint in a folder. It is kept while layers are made; `opened.cache_clear()` closes it.

    Raises CheckpointError for codes that belong to no low-bit layer: a server would take them for a dense layer's.
    """
    checkpoint = open_checkpoint(folder)
    check_dense(checkpoint, checkpoint.dense)
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
    turns      those among them that say how it is rotated
    rotations  returns what is done to its inputs and outputs, of its rows and columns and of those tensors
    has_bias   whether the files have a bias of it
    adds       whether that is not all zeros
    config     another library's description of the checkpoint; None for lowbit's own
    about      what lowbit's own files say of the weight
    """

    module: str
    tensors: Mapping[str, Tensor]
    turns: frozenset[str]
    rotations: Callable[[int, int, Mapping[str, Tensor]], Rotations]
    has_bias: bool
    adds: bool
    config: Mapping[str, Any] | None
    about: Tensor | None

    @classmethod
    def of(cls, checkpoint: Checkpoint, module: str) -> Source:
        """Returns what the files say of a module. Raises CheckpointError for one that lacks a tensor."""
        checkpoint.check_layer(module)
        turns = checkpoint.rotation_names_of(module)
        names = checkpoint.names_of(module) | turns
        tensors = {short: checkpoint.tensors[full] for short, full in names.items()}
        bias = tensors.pop(BIAS, None)
        on_meta = {short: tensor.to("meta") for short, tensor in tensors.items()}
        config = None if checkpoint.format is None else checkpoint.quantization_config
        about = None if config is not None else tensors[_ABOUT].clone()
        adds = bias is not None and bool(bias.any())
        rotations = partial(checkpoint.rotations_of, module) if _is_rotated(checkpoint, module) else _no_rotations
        return cls(module, on_meta, frozenset(turns), rotations, bias is not None, adds, config, about)

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
            return SharedSource(self, share, matrices, act, None, None, None)
        with naming(self.module):
            stored = interned(replace(read_spec(self.about), act=act, bias=False))
            whole = interned(replace(stored, epilogue=None)) if stored.is_gated else stored
            part = share.part(whole, matrices)
            part.spec(whole)
            return SharedSource(self, share, matrices, act, stored, whole, part)


def _is_rotated(checkpoint: Checkpoint, module: str) -> bool:
    """Tells whether anything is done to the inputs or outputs of a module."""
    return bool(checkpoint.rotation_names_of(module)) or any(t.matches([module]) for t in checkpoint.transforms)


def _no_rotations(n: int, k: int, came: Mapping[str, Tensor]) -> Rotations:
    return Rotations()


@dataclass(frozen=True, eq=False)
class SharedSource:
    """The share of a process in a module.

    stored  what the files have of the module, without a bias; None for another library's, which says it in its tensors
    whole   the same of a server, which applies a gate itself: rows of the gate are above the others
    part    what this process has of it; None for another library's
    """

    source: Source
    share: Share
    matrices: slice
    act: Act
    stored: MatmulSpec | None
    whole: MatmulSpec | None
    part: Part | None

    @cached_property
    def is_sliced(self) -> bool:
        """Whether slices of the files' tensors make the part: then no more of them is read."""
        whole, given = self.whole, self.source.tensors
        if whole is None or self.part is None or whole is not self.stored or not self.part.is_cut_in_memory(whole):
            return False
        return all(slot.name in given and given[slot.name].shape == slot.shape for slot in whole.tensors)

    def waited_for(self) -> dict[str, Tensor]:
        """Returns the tensors that are wanted of the files, on meta, by their names in the module."""
        return {name: self.sliced(name, tensor) for name, tensor in self.source.tensors.items()}

    def sliced(self, name: str, tensor: Tensor) -> Tensor:
        """Returns what is wanted of a tensor of the files: all of it, or the slice of this process."""
        if not self.is_sliced or name == _ABOUT or name in self.source.turns:
            return tensor
        whole, part = cast(MatmulSpec, self.whole), cast(Part, self.part)
        return part.of(whole.slot(name), tensor, whole)

    def spec(self) -> MatmulSpec:
        """Returns what this process's part of the weight is. Raises CheckpointError for another library's."""
        if self.whole is None or self.part is None:
            raise CheckpointError("only the tensors of another library's files say what it is; use load_format='auto'")
        return interned(self.part.spec(self.whole))

    def layer(self, tensors: Mapping[str, Tensor]) -> Layer:
        """Returns this process's part of the module, without a bias, of the tensors that were waited for."""
        turns = {name: tensors[name] for name in self.source.turns}
        weight, whole, part = self._weight({name: t for name, t in tensors.items() if name not in turns})
        rotations = self.source.rotations(whole.outputs, whole.k, turns)
        types = TORCH[weight.spec.act], TORCH[weight.spec.out_dtype]
        return layer_of(weight, rotations.to(weight.device, *types).part(part))

    def _weight(self, tensors: dict[str, Tensor]) -> tuple[PackedWeight, MatmulSpec, Part]:
        """Returns this process's part of the weight, what the whole is, and which part that is."""
        if self.stored is None or self.whole is None or self.part is None:
            config = cast(Mapping[str, Any], self.source.config)
            packed = without_zero_bias(import_between(config, tensors, self.act, name=self.source.module))
            part = self.share.part(packed.spec, self.matrices)
            return packed.part(part), packed.spec, part
        check_same(read_spec(tensors.pop(_ABOUT)), read_spec(cast(Tensor, self.source.about)))
        spec = self.spec() if self.is_sliced else self.stored
        packed = PackedWeight.from_state_dict({**tensors, SPEC: write_spec(spec)}, spec)
        if self.stored.is_gated:
            packed = without_gate(packed, Gate(cast(Epilogue, self.stored.epilogue), pairs=False))
        return packed if self.is_sliced else packed.part(self.part), self.whole, self.part

    def bias_of(self, loaded: Tensor) -> Tensor:
        """Returns a bias in the order of the rows, of one that the server has loaded from the files.

        Raises CheckpointError where it has loaded a part of one that is stored for a gate.
        """
        if self.stored is None or not self.stored.is_gated or not self.source.adds:
            return loaded
        if len(loaded) != self.stored.n:
            raise CheckpointError(
                f"{self.source.module}: its bias is stored for a gate that the server applies itself, and can't be cut;"
                " use one process, or quantize with fuse=False"
            )
        return gated_rows.given(self.stored, loaded)

    def random(self, device: str) -> Layer:
        """Returns the same with random numbers. Raises CheckpointError for another library's, whose tensors say what
        it is."""
        weight = random_weight(self.spec(), device)
        whole, part = cast(MatmulSpec, self.whole), cast(Part, self.part)
        return layer_of(weight, self.source.rotations(whole.outputs, whole.k, {}).to(weight.device).part(part))


def _with_bias(layer: Layer, bias: Tensor) -> Layer:
    """Returns a layer with another's weight that adds the first rows of a bias."""
    spec = interned(replace(layer.spec, bias=True))
    packed = PackedWeight(spec, {**layer.packed, BIAS: bias[: layer.out_features]})
    return layer_of(packed, _rotations_of(layer))


def shares_of(sources: Sequence[Source], share: Share, act: Act) -> list[SharedSource]:
    """Returns the shares of a process in the modules of a layer, from top to bottom; one module may be all matrices."""
    fused = len(sources) < len(share.rows)
    slices = [slice(None)] if fused else [slice(i, i + 1) for i in range(len(share.rows))]
    return [source.shared(share, matrices, act) for source, matrices in zip(sources, slices, strict=True)]


def put_bias_in_order(bias: Tensor | None, shares: Sequence[SharedSource]) -> None:
    """Puts a layer's bias, as the server has loaded it, in the order of its rows, in place. Only a module that is all
    matrices of the layer may be stored in another.

    Raises CheckpointError as `SharedSource.bias_of` does.
    """
    if bias is not None and len(shares) == 1:
        bias.data.copy_(shares[0].bias_of(bias.data))


def quantize_rows(weight: Tensor, sizes: Sequence[int], configs: Sequence[QuantConfig]) -> Rows:
    """Returns the layer of a dense weight whose rows are those of several matrices, each with a configuration."""
    parts = zip(weight.split(list(sizes)), configs, strict=True)
    return Rows([LowbitLinear.from_linear(_linear(part), config) for part, config in parts])


def _linear(weight: Tensor) -> nn.Linear:
    """Returns a layer of torch that shares its weight."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], False, "meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
