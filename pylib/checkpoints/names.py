"""Finds the names that modules and tensors of a checkpoint have in a model. transformers names some of them differently
in files, makes one tensor of several there, and the prefix of the base model may be in one of the two alone."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

MOST_BEYOND = 16  # layers
CODES = "codes"  # a tensor that every low-bit layer has


class Names:
    """Names of a checkpoint in a model of any kind.

    model     the model; transformers is asked where it is one of its own
    """

    def __init__(self, model: nn.Module) -> None:
        self._steps: list[Any] = []
        self._converters: list[Any] = []
        self._ignored: list[str] = []
        self._made: list[str] = []
        self._prefix = ""
        self._known = {name for name, _ in model.named_modules()}
        if is_of_transformers(model):
            self._ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
            self._ignored += [*_moved(model), *_beyond(model)]
            self._made = list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
            self._steps, self._converters = _conversions(model)
            self._prefix = f"{model.base_model_prefix}."

    def _placed(self, name: str) -> str:
        """Returns a name as it is, without the base model's prefix, or with it: the one of which the model has most."""
        if not self._prefix:
            return name
        return max((name, name.removeprefix(self._prefix), self._prefix + name), key=self._known_parts)

    def _known_parts(self, name: str) -> int:
        """Returns how many of the modules that a name leads through the model has."""
        parts = name.split(".")
        return next((i for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in self._known), 0)

    def renamed(self, name: str) -> str:
        """Returns what transformers calls a tensor of the checkpoint, before it looks at the prefix."""
        for step in self._steps:
            name, _ = step.rename_source_key(name)
        return name

    def tensor(self, name: str) -> str:
        """Returns what a tensor of the checkpoint is called in the model."""
        return self._placed(self.renamed(name))

    def conversion(self, name: str) -> tuple[list[str], str, Any]:
        """Returns how transformers converts a dense tensor of the checkpoint, of which it makes a part of another, or
        several: the names of what is made of it, the pattern that its own name matches, and the conversion. Without
        one, the name in the model, "" and None."""
        renamed = self.renamed(name)
        for converter in self._converters:
            target, pattern = converter.rename_source_key(renamed)
            if pattern is not None:
                first, *others = converter.target_patterns
                made = [target, *(target.replace(first, other, 1) for other in others)]
                return [self._placed(one) for one in made], pattern, converter
        return [self._placed(renamed)], "", None

    def made_of(self, tensors: Iterable[str]) -> set[str]:
        """Returns the names of the tensors of a model that tensors of a checkpoint are, or become."""
        return {made for name in tensors for made in (self.tensor(name), *self.conversion(name)[0])}

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


def _conversions(model: Any) -> tuple[list[Any], list[Any]]:
    """Returns transformers' steps from names in files to those in a model of its own, and those that convert values."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    steps = list(get_model_conversion_mapping(model))
    return [s for s in steps if isinstance(s, WeightRenaming)], [s for s in steps if isinstance(s, WeightConverter)]


def _moved(model: Any) -> list[str]:
    """Returns patterns of buffers that older files have, and that transformers computes now."""
    patterns = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
    buffers = [name for name, _ in model.named_buffers()]
    return [pattern for end, pattern in patterns.items() if any(name.endswith(end) for name in buffers)]


def _beyond(model: Any) -> list[str]:
    """Returns patterns of layers behind the last that predict more tokens, where a configuration says there are any:
    transformers knows their numbers for the largest model of a family alone."""
    config = model.config.get_text_config()
    first, count = (getattr(config, name, None) for name in ("num_hidden_layers", "num_nextn_predict_layers"))
    if not (isinstance(first, int) and isinstance(count, int)):
        return []
    return [rf"(^|\.)layers\.{number}\." for number in range(first, first + min(count, MOST_BEYOND))]
