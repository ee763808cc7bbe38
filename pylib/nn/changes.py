"""Notes that a layer has changed, so that what was made of hundreds of them need not look at each before every call.

Moving a module, loading it, `functional_call`, hooks and adapters all change the module's dictionaries. Those of layers
that were looked at are watched: each change puts a new token in `CHANGES.last`. While the token is still the one from
before the look, looking again would find the same.
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
    """Watches these dictionaries of a module (of buffers, hooks or modules) from now on, and tells whether all are
    watched. One that has hooks already is left as it is, since their handles refer to it."""
    held = vars(module)
    for name in names:
        if type(held[name]) is not Watched and not (name.endswith("hooks") and held[name]):
            held[name] = Watched(held[name])
    return all(type(held[name]) is Watched for name in names)
