"""The low-bit modules that take the places of a model's own when a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import CheckpointError
from lowbit.dialect.spec import Act
from lowbit.pylib.checkpoints.checkpoint import Checkpoint
from lowbit.pylib.nn.embedding import LowbitEmbedding, tied_linears, with_tied
from lowbit.pylib.nn.experts import MATRICES, LowbitExperts, count_of, dense_bias, dense_weight, is_experts
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.linear_like import as_linear, may_be_low_bit
from lowbit.pylib.packed import PackedWeight

LISTS = {"gate_up_proj": "gate_up", "down_proj": "down"}
"""Where `LowbitExperts` keeps the layers that are made of a parameter of dense experts."""


def home(t: Tensor) -> torch.device:
    """Returns where to load what takes the place of a tensor."""
    return torch.device("cpu") if t.is_meta else t.device


@dataclass(frozen=True)
class Loader:
    """Makes modules for a model out of a checkpoint. Methods raise CheckpointError where they don't fit the model.

    modules   those of the model by name, each by all of its names
    act       as in `Checkpoint.load`
    device    where to load; None: where the model's own modules are
    """

    modules: Mapping[str, nn.Module]
    checkpoint: Checkpoint
    act: Act | None
    device: torch.device | str | None

    def replacements(self) -> dict[str, nn.Module]:
        """Returns a module for each name of a layer, or of experts, that are quantized in the checkpoint, and for the
        linear layers that are tied to an embedding among them."""
        experts: dict[str, list[str]] = {}
        layers: dict[str, nn.Module] = {}
        for name in self.checkpoint.modules:
            if owner := self._owner(name):
                experts.setdefault(owner, []).append(name)
            elif isinstance(old := self.modules.get(name), nn.Embedding):
                layers |= self._embedding(name, old)
            else:
                layers[name] = self._layer(name)
        return layers | {owner: self._experts(owner, names) for owner, names in experts.items()}

    def _owner(self, name: str) -> str | None:
        """Returns the name of the model's experts that a quantized layer belongs to; None for a layer of its own."""
        path, _, last = name.rpartition(".")
        owner, _, matrix = path.rpartition(".") if last.isdecimal() else (path, "", last)
        found = self.modules.get(owner)
        known = {*LISTS.values()} if last.isdecimal() else {*MATRICES}
        return owner if matrix in known and found is not None and is_experts(found) else None

    def _layer(self, name: str) -> LowbitLinear:
        old = self.modules.get(name)
        if old is None or not (name and may_be_low_bit(old)):
            found = "the model has no such layer" if old is None else f"{type(old).__name__} in the model"
            raise CheckpointError(f"{self.checkpoint.tensors.folder}: {name!r} is quantized, but {found}")
        place = next((t for t in (*old.parameters(), *old.buffers())), torch.empty(0))
        linear = as_linear(old)
        shape = linear.out_features, linear.in_features
        packed = self.checkpoint.load(name, self.act, self.device or home(place), shape)
        self._check(name, packed, shape, linear.bias is not None)
        return LowbitLinear.from_packed(packed).train(old.training)

    def _embedding(self, name: str, old: nn.Embedding) -> Mapping[str, nn.Module]:
        packed = self.checkpoint.load(name, self.act, self.device or home(old.weight))
        self._check(name, packed, (old.num_embeddings, old.embedding_dim), False)
        embedding = LowbitEmbedding.from_packed(packed).in_place_of(old)
        return with_tied([name], embedding, tied_linears(self.modules.items(), old))

    def _experts(self, owner: str, names: Sequence[str]) -> LowbitExperts:
        dense = self.modules[owner]
        lists = [self._matrix(dense, owner, matrix, names) for matrix in MATRICES]
        return LowbitExperts(dense, *lists)

    def _matrix(self, dense: nn.Module, owner: str, matrix: str, names: Sequence[str]) -> list[LowbitLinear]:
        """Returns a layer for each expert, of layers of their own or of a stack of them."""
        weight, count = dense_weight(dense, matrix), count_of(dense)
        device, stack = self.device or home(weight), f"{owner}.{matrix}"
        if stack in names:
            packed = self.checkpoint.load_experts(stack, self.act, device)
        else:
            each = [f"{owner}.{LISTS[matrix]}.{expert}" for expert in range(count)]
            if missing := [name for name in each if name not in names]:
                raise CheckpointError(f"{self.checkpoint.tensors.folder} has no {missing[0]}, which the model needs")
            packed = [self.checkpoint.load(name, self.act, device) for name in each]
        if len(packed) != count:
            raise CheckpointError(f"{self.checkpoint.tensors.folder}: {stack} has {len(packed)} experts, not {count}")
        for one in packed:
            self._check(stack, one, weight.shape[1:], dense_bias(dense, matrix) is not None)
        return [LowbitLinear.from_packed(one) for one in packed]

    def _check(self, name: str, packed: PackedWeight, shape: Sequence[int], has_bias: bool) -> None:
        spec, (n, k), biases = packed.spec, shape, {True: "a bias", False: "no bias"}
        if (spec.n, spec.k, spec.bias) != (n, k, has_bias):
            raise CheckpointError(
                f"{self.checkpoint.tensors.folder}: {name} is {spec.n} x {spec.k} with {biases[spec.bias]}, "
                f"but {n} x {k} with {biases[has_bias]} in the model"
            )
