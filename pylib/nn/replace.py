"""Puts modules into a model where it holds others."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lowbit.pylib.nn.embedding import LowbitEmbedding, with_tied
from lowbit.pylib.nn.plan import Planned


def replace_module(model: nn.Module, names: Iterable[str], module: nn.Module) -> None:
    """Put a module where the model holds the one of these names."""
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)


def replace_planned(model: nn.Module, entry: Planned, module: nn.Module) -> None:
    """Put a module where the model holds the one that was planned for, and what shares its table where that is."""
    replace_module(model, entry.names, module)
    if isinstance(module, LowbitEmbedding):
        for name, tied in with_tied((), module, entry.tied).items():
            replace_module(model, [name], tied)
