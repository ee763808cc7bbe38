"""Whether modules are still as they were found: `Snapshot` remembers what is in them, and looks again in one pass.

To find out what hundreds of modules compute takes as long as a good part of their matmuls for one token. Whoever has
found it out takes a snapshot, and need not do so again while that holds. The pass compares objects, not values, in
loops that Python runs in C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, call, is_, is_not, itemgetter
from typing import Any
from weakref import ref

from torch import Tensor, nn

_OF_ALL = frozenset(vars(nn.Module())) - {"training"}  # attributes that every module has
_INSIDE = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Snapshot:
    """What modules were made of: classes, attributes, children and tensors, where these were in memory, how often they
    had been written to, and the number of hooks. Attributes whose names begin with _ are a module's own affair.

    modules    whose tensors are not kept alive; those of modules that are taken out of a model are, with the snapshot
    settings   other objects whose attributes count, all of them
    """

    def __init__(self, modules: Iterable[nn.Module], settings: Iterable[object] = ()) -> None:
        found = list(modules)
        self._modules, self._classes = [*map(ref, found)], [*map(type, found)]
        self._hooks: list[Any] = [getattr(module, name) for module in found for name in _HOOKS]
        inside: list[Any] = [getattr(module, name) for module in found for name in _INSIDE]
        own, others = [*map(vars, found)], [*map(vars, settings)]
        values = [(each, name) for each in own for name in each if _counts(name)]
        values += [(each, name) for each in others for name in each]
        values += [(each, name) for each in inside for name in each if each[name] is None]
        held = [(each, name) for each in inside for name in each if each[name] is not None]
        self._values, self._held = _Entries(values), _Entries(held)
        self._before, now = self._values.now(), self._held.now()
        self._references = [*map(ref, now)]
        tensors = [n for n, each in enumerate(now) if type(each) in (Tensor, nn.Parameter)]
        counted = [n for n in tensors if not now[n].is_inference()]  # torch counts what is written to others
        self._tensors, self._counted = _picked(tensors), _picked(counted)
        self._sized = [*own, *others, *inside]
        self._sizes, self._memory = self._sizes_now(), self._memory_now(now)

    def holds(self) -> bool:
        """Tells whether all of it is as it was."""
        if self._sizes_now() != self._sizes or not all(map(is_, self._values.now(), self._before)):
            return False
        if not all(map(is_, map(type, map(call, self._modules)), self._classes)):
            return False
        now = self._held.now()
        same = all(map(is_not, now, repeat(None))) and all(map(is_, now, map(call, self._references)))
        return same and self._memory_now(now) == self._memory

    def _sizes_now(self) -> tuple[int, int]:
        """Returns the numbers of hooks, and of entries, by which new ones are found."""
        return sum(map(len, self._hooks)), sum(map(len, self._sized))

    def _memory_now(self, entries: list[Any]) -> tuple[list[int], list[int]]:
        return [*map(Tensor.data_ptr, self._tensors(entries))], [*map(_VERSION, self._counted(entries))]


_VERSION = attrgetter("_version")


def _counts(name: str) -> bool:
    """Tells whether an attribute of a module counts: those of its class, and the dictionaries that are looked into."""
    return name in (*_INSIDE, *_HOOKS) or (name not in _OF_ALL and name[:1] != "_")


def _picked(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Returns a function that returns the elements at some places."""
    if len(places) < 2:  # of which itemgetter makes no tuple
        return lambda values: [values[n] for n in places]
    return itemgetter(*places)


class _Entries:
    """Entries of dictionaries."""

    def __init__(self, places: Sequence[tuple[dict[str, Any], str]]) -> None:
        self._dicts, self._names = [each for each, _ in places], [name for _, name in places]

    def now(self) -> list[Any]:
        """Returns the values that they have; None for those that are gone."""
        return [*map(dict.get, self._dicts, self._names)]
