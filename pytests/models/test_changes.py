"""Dictionaries of modules whose changes are noted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
from torch import nn

from lowbit.pylib.nn.changes import CHANGES, Watched, watch

CHANGING: dict[str, Callable[[Watched[str, int]], object]] = {
    "set": lambda d: d.__setitem__("a", 3),
    "delete": lambda d: d.__delitem__("a"),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: d.popitem(),
    "clear": lambda d: d.clear(),
    "update": lambda d: d.update(c=1),
    "setdefault": lambda d: d.setdefault("c", 1),
    "or": lambda d: d.__ior__({"c": 1}),
}


def is_noted(change: Callable[[], object]) -> bool:
    before = CHANGES.last
    change()
    return CHANGES.last is not before


@pytest.mark.parametrize("name", CHANGING)
def test_every_change_is_noted(name: str) -> None:
    watched, plain = Watched(a=1, b=2), {"a": 1, "b": 2}
    CHANGING[name](plain)  # type: ignore[arg-type]
    assert is_noted(lambda: CHANGING[name](watched)) and watched == plain


def test_reading_is_no_change() -> None:
    watched = Watched(a=1, b=2)
    assert not is_noted(lambda: (watched["a"], watched.get("c"), list(watched.items()), "b" in watched, len(watched)))


def test_a_copy_is_watched() -> None:
    watched = Watched(a=[1])
    for copied in (copy.deepcopy(watched), pickle.loads(pickle.dumps(watched))):
        assert copied == watched and copied["a"] is not watched["a"]
        assert is_noted(lambda copied=copied: copied.update(b=2)) and "b" not in watched


def test_hooks_that_are_there_keep_their_dictionary() -> None:
    """Whose handles know it; those that come later are noted, as they go, too."""
    module = nn.Linear(2, 2)
    handle = module.register_forward_hook(lambda *_: None)
    assert not watch(module, "_buffers", "_forward_hooks")
    handle.remove()
    assert not module._forward_hooks and watch(module, "_buffers", "_forward_hooks")
    assert is_noted(lambda: module.register_buffer("b", None))
    assert is_noted(lambda: setattr(module, "b", module.weight.data))
    handles = list[object]()
    assert is_noted(lambda: handles.append(module.register_forward_hook(lambda *_: None, prepend=True)))
    assert is_noted(lambda: handles[0].remove())  # type: ignore[attr-defined]
