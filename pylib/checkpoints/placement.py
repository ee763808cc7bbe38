"""Finds which modules of a model the quantized layers of a checkpoint belong to: the same for every way to load one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.checkpoint import Checkpoint
from lowbit.pylib.checkpoints.expert_places import Place, check_places, place_of
from lowbit.pylib.checkpoints.names import Names
from lowbit.pylib.checkpoints.transforms import check_applied
from lowbit.pylib.nn.embedding import LowbitEmbedding
from lowbit.pylib.nn.linear_like import may_be_low_bit
from lowbit.pylib.nn.owners import why_changed
from lowbit.pylib.nn.plan import naming


@dataclass(frozen=True)
class Placement:
    """The places of quantized layers, each with the name of the layer in the checkpoint.

    linears     by the name of a linear layer of the model
    embeddings  by the name of an embedding
    experts     by the name of a module with experts, and by what of it a layer is
    """

    linears: dict[str, str] = field(default_factory=dict[str, str])
    embeddings: dict[str, str] = field(default_factory=dict[str, str])
    experts: dict[str, dict[Place, str]] = field(default_factory=dict[str, "dict[Place, str]"])

    @property
    def names(self) -> list[str]:
        """The names of the modules that are replaced."""
        return [*self.linears, *self.embeddings, *self.experts]

    @property
    def count(self) -> int:
        """The number of modules that are replaced."""
        return len(self.names)

    def layers_of(self, name: str) -> list[str]:
        """Returns the layers of the checkpoint that one of these modules is made of."""
        single = self.linears | self.embeddings
        return [single[name]] if name in single else list(self.experts[name].values())


def placed(layers: Mapping[str, str], modules: Mapping[str, nn.Module], where: str) -> Placement:
    """Returns the places of layers in a model. Raises CheckpointError where there is none, or experts lack layers.

    layers    names in the checkpoint, each with the name in the model
    modules   those of the model by name
    where     what errors start with: the checkpoint's folder
    """
    found = Placement()
    for name, here in layers.items():
        module = modules.get(here)
        if place := place_of(here, modules):
            found.experts.setdefault(place.owner, {})[place] = name
        elif isinstance(module, nn.Embedding | LowbitEmbedding):
            found.embeddings[here] = name
        elif here and may_be_low_bit(module):
            _check_owner(here, modules, f"{where}: {name}")
            found.linears[here] = name
        else:
            what = "the model has no such layer" if module is None else f"it is a {type(module).__name__} in the model"
            raise CheckpointError(f"{where}: {name} is quantized, but {what}")
    with naming(where):
        for owner, places in found.experts.items():
            check_places(owner, modules[owner], list(places))
    return found


def _check_owner(here: str, modules: Mapping[str, nn.Module], where: str) -> None:
    """Raise CheckpointError for a layer that the model changes when it is called."""
    path, _, leaf = here.rpartition(".")
    if why := why_changed(modules[path], leaf, modules[here]):
        raise CheckpointError(f"{where} is quantized, but in the model {why}")


def check_rotations(
    checkpoint: Checkpoint, names: Names, modules: Mapping[str, nn.Module], placement: Placement
) -> None:
    """Raise CheckpointError where a checkpoint rotates what goes into modules of a model, or comes out of them, that it
    has not quantized, and where it scales what goes into embeddings."""
    with naming(str(checkpoint.tensors.folder)):
        checkpoint.check_unscaled(placement.embeddings.values())
    if not checkpoint.transforms:
        return
    called: dict[str, list[str]] = {}
    for tensor in checkpoint.dense:
        called.setdefault(names.tensor(tensor).rpartition(".")[0], []).append(tensor.rpartition(".")[0])
    others = {name: (module, called.get(name, [])) for name, module in modules.items() if name not in placement.linears}
    with naming(str(checkpoint.tensors.folder)):
        check_applied(checkpoint.transforms, others)


def wanted_layers(checkpoint: Checkpoint, names: Names, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Returns the quantized layers of a checkpoint, and what they are called in a model, without those that
    transformers leaves out: layers that predict more tokens, say.

    Raises CheckpointError for a layer of which a tensor is missing, or of which one is unknown.
    """
    found = {name: names.module(name) for name in checkpoint.modules}
    wanted = {name: here for name, here in found.items() if here in modules or not names.is_ignored(name)}
    for name in wanted:
        checkpoint.check_layer(name)
    return wanted
