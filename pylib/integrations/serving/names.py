"""The modules of a checkpoint that a layer of a server (vLLM, SGLang) is made of.

vLLM makes one layer, `qkv_proj`, of `q_proj`, `k_proj` and `v_proj`. The checkpoint may have a weight for each of them,
or one for all if lowbit has fused them: `q_k_v_proj`. In some models vLLM also has other names than the checkpoint for
what is around these layers.

Each tensor of a low-bit module is a parameter of vLLM's layer until all have come: `q_proj.codes` is
`qkv_proj.part0_codes`. vLLM's loaders rename what they read by `Names.renamed`. Biases are vLLM's own parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.checkpoint import EXTRA_STATE, Checkpoint
from lowbit.pylib.nn.fuse import fused_name
from lowbit.pylib.weights.saved import read_spec

Packed = Mapping[str, Sequence[str]]
"""The last names of vLLM's layers, each with those of the modules that it is made of."""

HEAD = "lm_head"
BIAS = "bias"
_WEIGHT = ".weight"


class Place(NamedTuple):
    """Where the tensors of a module go.

    layer   vLLM's name of the layer
    part    the number of the module among those that the layer is made of
    fused   whether the module has the rows of several of the model's, whose names vLLM knows
    """

    layer: str
    part: int = 0
    fused: bool = False


def parameter(part: int, tensor: str) -> str:
    """Returns what a layer calls a tensor of one of the modules that it is made of."""
    return f"part{part}_{tensor.replace('.', '_')}"


class Names:
    """The modules of a checkpoint by the names that they have in vLLM.

    low_bit   names in the checkpoint of modules that are quantized, each with the names of its tensors there, by those
              that they have in the module
    taken     those of low_bit that layers of vLLM have asked for
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        dense = [name.removesuffix(_WEIGHT) for name in checkpoint.dense if name.endswith(_WEIGHT)]
        self.low_bit = {m: checkpoint.names_of(m) | checkpoint.rotation_names_of(m) for m in checkpoint.modules}
        self._unused = {name for name in checkpoint.rotations if checkpoint.is_of_attention(name)}
        self.taken: dict[str, Place] = {}
        self._of_experts: set[str] = set()
        self._checkpoint = checkpoint
        self._modules = {name: name for name in (*checkpoint.modules, *dense)}
        self._rename: Callable[[str], str | None] = str

    @cached_property
    def tables(self) -> dict[str, tuple[int, int]]:
        """The sizes of low-bit modules that may be embeddings."""
        return _tables(self._checkpoint)

    def rename(self, renamed: Callable[[str], str | None]) -> None:
        """Take over vLLM's names, which it gives to tensors of the checkpoint; None for those that it leaves out."""
        self._rename = renamed
        found = {renamed(name + _WEIGHT): module for name, module in self._modules.items()}
        self._modules = {name.removesuffix(_WEIGHT): module for name, module in found.items() if name}

    def parts(self, layer: str, packed: Packed) -> tuple[str, ...]:
        """Returns what the modules that make a layer are called in the checkpoint; in vLLM, if it has none of them."""
        parent, _, leaf = layer.rpartition(".")
        return tuple(self._module(parent, part) for part in packed.get(leaf, (leaf,)))

    def take(self, layer: str, packed: Packed) -> tuple[str, ...]:
        """Returns the low-bit modules that make a linear layer, by the checkpoint's names; () for a dense layer.

        Raises CheckpointError for a layer of low-bit and dense modules, and for a dense layer that is to be rotated.
        """
        if found := self._take(layer, packed):
            return found
        self._check_unturned(self.parts(layer, packed), "Linear")
        return ()

    def _take(self, layer: str, packed: Packed) -> tuple[str, ...]:
        parent, _, leaf = layer.rpartition(".")
        parts = packed.get(leaf, (leaf,))
        for names in (parts, (fused_name(parts),), (leaf,)):
            found = [module for name in names if (module := self._module(parent, name)) in self.low_bit]
            if len(found) == len(names):
                fused = len(names) < len(parts)
                self.taken |= {module: Place(layer, part, fused) for part, module in enumerate(found)}
                return tuple(found)
            if found:
                dense = ", ".join(name for name in names if self._module(parent, name) not in found)
                raise CheckpointError(
                    f"the server makes one layer of {', '.join(names)}, and {dense} is dense in the checkpoint while "
                    "others are low-bit; quantize all of them or none"
                )
        return ()

    def take_table(self, layer: str, size: tuple[int, int]) -> tuple[str, ...]:
        """Returns the low-bit module that is an embedding of a size; () if it is dense.

        layer   the embedding's name, which vLLM does not say in some models: ""

        Raises CheckpointError for an embedding that is to be rotated.
        """
        found = self._take(layer, {}) if layer else self._table_of(size)
        self._check_unturned(found or self.parts(layer, {}), "Embedding")
        return found

    def _table_of(self, size: tuple[int, int]) -> tuple[str, ...]:
        found = [name for name, shape in self.tables.items() if shape == size]
        if len(found) > 1:
            names = ", ".join(found)
            raise CheckpointError(f"{names} are all of the size {list(size)}, and vLLM does not name its embedding")
        self.taken |= {module: Place(name) for name, module in self._modules.items() if module in found}
        return tuple(found)

    def renamed(self) -> dict[str, str]:
        """Returns what tensors of modules that layers have asked for are called in these layers; by their names in the
        checkpoint, and by what those would become in vLLM."""
        found: dict[str, str] = {}
        for name, module in self._modules.items():
            if (place := self.taken.get(module)) is None:
                continue
            for tensor, full in self.low_bit[module].items():
                if tensor != BIAS or place.fused:
                    inside = BIAS if tensor == BIAS else parameter(place.part, tensor)
                    found[f"{name}.{tensor}"] = wanted = f"{place.layer}.{inside}"
                    found[full] = self._before_renaming(wanted, module)
        return found

    def unused(self) -> set[str]:
        """Returns the names of tensors of rotations that cancel out, which no layer waits for: those in the checkpoint,
        and what they would become in vLLM."""
        both = ((name, self._rename(name)) for name in self._unused)
        return {name for names in both for name in names if name}

    def _before_renaming(self, wanted: str, module: str) -> str:
        """Returns a name that vLLM's own renaming turns into the wanted one, beside a module of the checkpoint.

        Raises CheckpointError if there is none.
        """
        layer, _, inside = wanted.rpartition(".")
        beside = ".".join([*module.split(".")[:-1], layer.rpartition(".")[2], inside])
        for name in (beside, wanted):
            if self._rename(name) == wanted:
                return name
        renamed = self._rename(beside)
        raise CheckpointError(f"{module}: it belongs to {layer} in vLLM, which renames {beside} to {renamed}")

    def below(self, layer: str) -> list[str]:
        """Returns the low-bit modules inside a module of vLLM with experts, by the checkpoint's names.

        Raises CheckpointError for modules that are to be rotated.
        """
        inside = [module for name, module in self._modules.items() if name.startswith(f"{layer}.")]
        self._check_unturned(inside, "Linear", may_be_scaled=True)
        found = [module for module in inside if module in self.low_bit]
        self._of_experts.update(found)
        return found

    def check_taken(self) -> None:
        """Raise CheckpointError for a low-bit module that no layer has asked for, inside a block whose other modules
        some have: the class of the model makes a dense layer of it, whose weight would never come."""
        asked = self._of_experts | self.taken.keys()
        blocks = {block for module in asked if (block := _block_of(module))}
        if left := [module for module in self.low_bit if module not in asked and _block_of(module) in blocks]:
            raise CheckpointError(
                f"{left[0]} is low-bit in the checkpoint, and the class of the model in vLLM makes a layer of it that "
                f"takes dense weights alone ({len(left)} in all); leave it dense when you quantize, by LowbitConfig("
                f"modules={{'*.{left[0].rpartition('.')[2]}': None}}), or run the model with transformers"
            )

    def _check_unturned(self, modules: Collection[str], kind: str, may_be_scaled: bool = False) -> None:
        """Raise CheckpointError for modules of the checkpoint that are to be rotated or scaled, and are no low-bit
        linear layers."""
        self._checkpoint.check_unturned(modules, kind)
        if not may_be_scaled:
            self._checkpoint.check_unscaled(modules)

    def _module(self, parent: str, leaf: str) -> str:
        name = f"{parent}.{leaf}".lstrip(".")
        return self._modules.get(name, name)


def _block_of(module: str) -> str:
    """Returns the name of the transformer block that a module is in, "" for others: up to the first number."""
    found = re.match(r"(.*?\.\d+)\.", module)
    return found[1] if found else ""


def _tables(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Returns the sizes of modules that stand alone in what is around them, as embeddings do, unlike linear layers."""
    parents = Counter(name.rpartition(".")[0] for name in checkpoint.modules)
    alone = [n for n in checkpoint.modules if parents[n.rpartition(".")[0]] == 1 and not n.endswith(HEAD)]
    if checkpoint.format is None:
        specs = {name: read_spec(checkpoint.tensors[name + EXTRA_STATE]) for name in alone}
    else:  # only tensors say sizes: those of modules in a layer, of which one may be low-bit, need not be read
        outside = [name for name in alone if not any(part.isdecimal() for part in name.split("."))]
        specs = {name: checkpoint.load_between(name, "bf16")[0].spec for name in outside}
    return {name: (spec.n, spec.k) for name, spec in specs.items()}
