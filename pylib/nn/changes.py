"""Notes that a layer has changed, so that what was made of hundreds of them need not look at each before every call.

Whatever changes a module does so by its dictionaries: moving it, loading, `functional_call`, hooks, adapters. Those of
layers that are looked at are watched: a change of one puts another token in `CHANGES.last`. Who looked when the token
was there, and finds it there still, would see the same.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

from torch import nn

K = TypeVar("K")
V = TypeVar("V")


class _Changes:
    """The token of the last change of any layer, in any thread."""

    last = object()


CHANGES = _Changes()


def note_change() -> None:
    """Notes that something has changed; to be called after it has."""
    CHANGES.last = object()


class Watched(OrderedDict[K, V]):
    """A dictionary whose changes are noted. It is one of those that keep an order, which torch moves hooks in."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        note_change()

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        note_change()

    def clear(self) -> None:
        super().clear()
        note_change()

    def pop(self, key: K, *default: Any) -> Any:
        value = super().pop(key, *default)
        note_change()
        return value

    def popitem(self, last: bool = True) -> tuple[K, V]:
        item = super().popitem(last)
        note_change()
        return item


def watch(module: nn.Module, *names: str) -> bool:
    """Watches these dictionaries of a module from now on: of its buffers, hooks or modules. Tells whether all are
    watched: not those of hooks that there are already, whose handles know the dictionary."""
    held = vars(module)
    for name in names:
        if type(held[name]) is not Watched and not (name.endswith("hooks") and held[name]):
            held[name] = Watched(held[name])
    return all(type(held[name]) is Watched for name in names)
