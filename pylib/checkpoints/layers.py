"""The low-bit modules that take the places of a model's own when a checkpoint is loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import CheckpointError
from lowbit.dialect.spec import Act
from lowbit.pylib.checkpoints.checkpoint import Checkpoint
from lowbit.pylib.checkpoints.expert_places import Place
from lowbit.pylib.checkpoints.expert_scales import scales_of_experts
from lowbit.pylib.checkpoints.placement import Placement
from lowbit.pylib.checkpoints.registry import without_zero_bias
from lowbit.pylib.checkpoints.transforms import Rotations
from lowbit.pylib.nn.dense_experts import MATRICES, count_of, dense_bias, dense_weight
from lowbit.pylib.nn.embedding import LowbitEmbedding, tied_linears, with_tied
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.linear_like import as_linear
from lowbit.pylib.nn.packed_module import PackedModule
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.nn.progress import LayerBar
from lowbit.pylib.nn.rotated import RotatedLinear
from lowbit.pylib.weights.packed import PackedWeight

AT_ONCE = 32 << 20  # codes


def home(t: Tensor) -> torch.device:
    """Returns where to load what takes the place of a tensor."""
    return torch.device("cpu") if t.is_meta else t.device


def _home_of(module: nn.Module) -> torch.device:
    """Returns where to load what takes the place of a module."""
    return home(next((t for t in (*module.parameters(), *module.buffers())), torch.empty(0, device="cpu")))


@dataclass
class Scraps:
    """Returns memory to the system that lies between weights, where others have been unpacked: glibc keeps it, more
    with each layer. What is returned is asked for again by the next layer, so it is done once for many."""

    unpacked: int = 0

    def add(self, module: nn.Module) -> None:
        """A module has been unpacked, at a byte a code."""
        self.unpacked += sum(m.spec.n * m.spec.k for m in module.modules() if isinstance(m, PackedModule))
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None and self.unpacked >= AT_ONCE:
            trim(0)
            self.unpacked = 0


def layer_of(packed: PackedWeight, rotations: Rotations) -> LowbitLinear | RotatedLinear:
    """Returns the linear layer of a weight, with rotations if there are some."""
    if not rotations:
        return LowbitLinear.from_packed(packed)
    return RotatedLinear.from_packed(packed, rotations.inputs, rotations.outputs)


@dataclass(frozen=True)
class Loader:
    """Makes modules for a model out of a checkpoint. Methods raise CheckpointError where they don't fit the model.

    modules     those of the model by name, each by all of its names
    placement   where the quantized layers of the checkpoint belong among them
    act         as in `Checkpoint.load`
    device      where to load; None: where the model's own modules are
    progress    show a bar, if standard error is a terminal
    scraps      what lies between weights
    """

    modules: Mapping[str, nn.Module]
    placement: Placement
    checkpoint: Checkpoint
    act: Act | None
    device: torch.device | str | None
    progress: bool = True
    scraps: Scraps = field(default_factory=Scraps)

    def replacements(self) -> dict[str, nn.Module]:
        """Returns a module for each name of a layer, or of experts, that are quantized in the checkpoint, and for the
        linear layers that are tied to an embedding among them."""
        found: dict[str, nn.Module] = {}
        with LayerBar(self.progress, self.placement.count, self.device) as bar:
            for name in self.placement.names:
                bar.begin(name)
                found |= self.load(name)
                bar.end()
        return found

    def load(self, here: str) -> Mapping[str, nn.Module]:
        """Returns the module for one of these names, with the linear layers that are tied to it."""
        linears, embeddings = self.placement.linears, self.placement.embeddings
        found: Mapping[str, nn.Module]
        if here in linears:
            found = {here: self._layer(linears[here], here)}
        elif here in embeddings:
            found = self._embedding(embeddings[here], here)
        else:
            found = {here: self._experts(here, self.placement.experts[here])}
        self.scraps.add(found[here])
        return found

    def _layer(self, name: str, here: str) -> LowbitLinear | RotatedLinear:
        old = self.modules[here]
        linear = as_linear(old)
        shape = linear.out_features, linear.in_features
        packed, rotations = self.checkpoint.load_between(name, self.act, self.device or _home_of(old), shape)
        packed = packed if linear.bias is not None else without_zero_bias(packed)
        self._check(name, packed, shape, linear.bias is not None)
        return layer_of(packed, rotations).train(old.training)

    def _embedding(self, name: str, here: str) -> Mapping[str, nn.Module]:
        old = cast(nn.Embedding | LowbitEmbedding, self.modules[here])
        shape = old.num_embeddings, old.embedding_dim
        packed = self.checkpoint.load(name, self.act, self.device or _home_of(old), shape)
        self._check(name, packed, shape, False)
        embedding = LowbitEmbedding.from_packed(packed).in_place_of(old)
        return with_tied([here], embedding, tied_linears(self.modules.items(), old))

    def _experts(self, owner: str, places: Mapping[Place, str]) -> LowbitExperts:
        dense, folder = self.modules[owner], self.checkpoint.tensors.folder
        with naming(str(folder)):
            scales = scales_of_experts(self.checkpoint, places, dense)
        rows = scales.rows, dict[int, Tensor]()
        matrices = [self._matrix(dense, owner, matrix, places, each) for matrix, each in zip(MATRICES, rows)]
        inputs = [scaling.to(matrices[0][0].codes.device) for scaling in scales.inputs]
        return LowbitExperts(dense, *matrices, inputs=inputs)

    def _matrix(
        self, dense: nn.Module, owner: str, matrix: str, places: Mapping[Place, str], rows: Mapping[int, Tensor]
    ) -> list[LowbitLinear]:
        """Returns a layer for each expert, of layers of their own or of a stack of them.

        rows   numbers for rows of the last part of an expert
        """
        weight, count = dense_weight(dense, matrix), count_of(dense)
        device = self.device or home(weight)
        names: dict[int | None, list[str]] = {}
        for place in sorted((p for p in places if p.matrix == matrix), key=lambda p: p.part):
            names.setdefault(place.expert, []).append(places[place])
        if None in names:
            packed = self.checkpoint.load_experts(names[None][0], self.act, device)
        else:
            packed = [self._load(names[expert], device, rows.get(expert)) for expert in range(count)]
        if len(packed) != count:
            folder = self.checkpoint.tensors.folder
            raise CheckpointError(f"{folder}: {owner}.{matrix} has {len(packed)} experts, not {count}")
        has_bias = dense_bias(dense, matrix) is not None
        packed = packed if has_bias else [without_zero_bias(one) for one in packed]
        for one in packed:
            self._check(f"{owner}.{matrix}", one, weight.shape[1:], has_bias)
        return [LowbitLinear.from_packed(one) for one in packed]

    def _load(self, names: Sequence[str], device: torch.device | str, factors: Tensor | None) -> PackedWeight:
        """Returns a weight, or several as the rows of one, behind the scaling of its inputs."""
        if len(names) == 1:
            return self.checkpoint.load_between(names[0], self.act, device)[0]
        return self.checkpoint.load_rows_between(names, self.act, device, factors)

    def _check(self, name: str, packed: PackedWeight, shape: Sequence[int], has_bias: bool) -> None:
        spec, (n, k), biases = packed.spec, shape, {True: "a bias", False: "no bias"}
        if (spec.n, spec.k, spec.bias) != (n, k, has_bias):
            raise CheckpointError(
                f"{self.checkpoint.tensors.folder}: {name} is {spec.n} x {spec.k} with {biases[spec.bias]}, "
                f"but {n} x {k} with {biases[has_bias]} in the model"
            )
