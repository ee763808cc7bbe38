"""The modules of a checkpoint that a layer of vLLM is made of.

vLLM makes one layer, `qkv_proj`, of `q_proj`, `k_proj` and `v_proj`. The checkpoint may have a weight for each of them,
or one for all if lowbit has fused them: `q_k_v_proj`. In some models vLLM also has other names than the checkpoint for
what is around these layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.checkpoint import EXTRA_STATE, Checkpoint
from lowbit.pylib.nn.fuse import fused_name
from lowbit.pylib.weights.saved import read_spec

Packed = Mapping[str, Sequence[str]]
"""The last names of vLLM's layers, each with those of the modules that it is made of."""

HEAD = "lm_head"
_WEIGHT = ".weight"


class Names:
    """The modules of a checkpoint by the names that they have in vLLM.

    low_bit   names in the checkpoint of modules that are quantized
    tables    the sizes of those among them that may be embeddings
    taken     those of low_bit that layers of vLLM have asked for
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        dense = [name.removesuffix(_WEIGHT) for name in checkpoint.dense if name.endswith(_WEIGHT)]
        self.low_bit = frozenset(checkpoint.modules)
        self.tables = _tables(checkpoint)
        self.taken: set[str] = set()
        self._modules = {name: name for name in (*checkpoint.modules, *dense)}

    def rename(self, renamed: Callable[[str], str | None]) -> None:
        """Take over vLLM's names, which it gives to tensors of the checkpoint; None for those that it leaves out."""
        found = {renamed(name + _WEIGHT): module for name, module in self._modules.items()}
        self._modules = {name.removesuffix(_WEIGHT): module for name, module in found.items() if name}

    def parts(self, layer: str, packed: Packed) -> tuple[str, ...]:
        """Returns what the modules that make a layer are called in the checkpoint; in vLLM, if it has none of them."""
        parent, _, leaf = layer.rpartition(".")
        return tuple(self._module(parent, part) for part in packed.get(leaf, (leaf,)))

    def take(self, layer: str, packed: Packed) -> tuple[str, ...]:
        """Returns the low-bit modules that make a layer, by the checkpoint's names; () for a dense layer.

        Raises CheckpointError for a layer of low-bit and dense modules.
        """
        parent, _, leaf = layer.rpartition(".")
        parts = packed.get(leaf, (leaf,))
        for names in (parts, (fused_name(parts),), (leaf,)):
            found = [module for name in names if (module := self._module(parent, name)) in self.low_bit]
            if len(found) == len(names):
                self.taken.update(found)
                return tuple(found)
            if found:
                dense = ", ".join(name for name in names if self._module(parent, name) not in found)
                raise CheckpointError(
                    f"vLLM makes one layer of {', '.join(names)}, and {dense} is dense in the checkpoint while others "
                    "are low-bit; quantize all of them or none"
                )
        return ()

    def take_table(self, layer: str, size: tuple[int, int]) -> tuple[str, ...]:
        """Returns the low-bit module that is an embedding of a size; () if it is dense.

        layer   the embedding's name, which vLLM does not say in some models: ""
        """
        if layer:
            return self.take(layer, {})
        found = [name for name, shape in self.tables.items() if shape == size]
        if len(found) > 1:
            names = ", ".join(found)
            raise CheckpointError(f"{names} are all of the size {list(size)}, and vLLM does not name its embedding")
        self.taken.update(found)
        return tuple(found)

    def of_taken(self) -> re.Pattern[str]:
        """Returns a pattern of the names of tensors that layers have asked for, in the checkpoint and in vLLM."""
        names = {name for pair in self._modules.items() if pair[1] in self.taken for name in pair}
        return re.compile(rf"^(?:{'|'.join(map(re.escape, sorted(names)))})\." if names else r"(?!)")

    def below(self, layer: str) -> list[str]:
        """Returns the low-bit modules inside a module of vLLM, by the checkpoint's names."""
        return [m for name, m in self._modules.items() if m in self.low_bit and name.startswith(f"{layer}.")]

    def _module(self, parent: str, leaf: str) -> str:
        name = f"{parent}.{leaf}".lstrip(".")
        return self._modules.get(name, name)


def _tables(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Returns the sizes of modules that stand alone in what is around them, as embeddings do, unlike linear layers."""
    if checkpoint.format is not None:
        return {}
    parents = Counter(name.rpartition(".")[0] for name in checkpoint.modules)
    alone = [n for n in checkpoint.modules if parents[n.rpartition(".")[0]] == 1 and not n.endswith(HEAD)]
    specs = {name: read_spec(checkpoint.tensors[name + EXTRA_STATE]) for name in alone}
    return {name: (spec.n, spec.k) for name, spec in specs.items()}
