"""Finds the names that modules and tensors of a checkpoint have in a model. transformers names some of them differently
in files, and the prefix of the base model may be in one of the two alone."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

CODES = "codes"  # a tensor that every low-bit layer has


class Names:
    """Names of a checkpoint in a model of any kind.

    model     the model; transformers is asked where it is one of its own
    modules   names of modules in the checkpoint, by which the prefix of the base model is found
    """

    def __init__(self, model: nn.Module, modules: Sequence[str]) -> None:
        self._steps: list[Any] = []
        self._ignored: list[str] = []
        self._made: list[str] = []
        self._way: Callable[[str], str] = str
        if is_of_transformers(model):
            self._ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
            self._made = list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
            self._steps = _renamings(model)
            self._way = self._way_of_prefix(model, modules)

    def _way_of_prefix(self, model: Any, modules: Sequence[str]) -> Callable[[str], str]:
        """Returns what to do with the prefix of the base model, for modules to be found."""
        prefix, known = f"{model.base_model_prefix}.", {name for name, _ in model.named_modules()}
        ways: list[Callable[[str], str]] = [str, lambda name: name.removeprefix(prefix), lambda name: prefix + name]
        return next((way for way in ways if any(way(self.module(name)) in known for name in modules)), str)

    def renamed(self, name: str) -> str:
        """Returns what transformers calls a tensor of the checkpoint, before it looks at the prefix."""
        for step in self._steps:
            name, _ = step.rename_source_key(name)
        return name

    def tensor(self, name: str) -> str:
        """Returns what a tensor of the checkpoint is called in the model."""
        return self._way(self.renamed(name))

    def module(self, name: str) -> str:
        """Returns what a module of the checkpoint is called in the model."""
        return self.tensor(f"{name}.{CODES}").removesuffix(f".{CODES}")  # patterns may end with the dot behind a module

    def is_ignored(self, name: str) -> bool:
        """Tells whether transformers leaves out what has this name in a checkpoint and is not in the model, as layers
        that predict more tokens."""
        return any(re.search(pattern, name) for pattern in self._ignored)

    def is_made(self, name: str) -> bool:
        """Tells whether a model makes a tensor of this name itself where a checkpoint has none, as some positions."""
        return any(re.search(pattern, name) for pattern in self._made)


def is_of_transformers(model: nn.Module) -> bool:
    """Tells whether a model is one of transformers, without loading it."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(model, loaded.PreTrainedModel)


def _renamings(model: Any) -> list[Any]:
    """Returns transformers' steps from names in files to those in a model of its own."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    return [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]
