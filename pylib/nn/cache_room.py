"""Room for a token in the caches of transformers, which programs write into: a part of `lowbit.fuse_`.

A cache that grows is a tensor that transformers makes anew for every token. Here it gets memory with room for more, of
which it holds a view. Tokens are appended to that memory only while the cache's layer holds the very view that it was
given, so nothing is written where another tensor may be: one that was cropped, reordered or copied gets new memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lowbit.pylib.layer.on_cpu import Places

_HOME = "transformers.cache_utils"
_LEAST_ROOM = 64  # places


def held_layers(cache: Any, indices: Sequence[int]) -> list[Any] | None:
    """Returns the parts of a cache for layers of these numbers; None for a cache that does more than to hold them."""
    layers = getattr(cache, "layers", None)
    if layers is None or getattr(cache, "offloading", False) or len(layers) <= max(indices):
        return None
    update: Any = getattr(type(cache), "update", None)
    if (update.__module__, update.__qualname__) != (_HOME, "Cache.update"):
        return None
    found = [layers[index] for index in indices]
    return found if all(type(held).__module__ == _HOME and type(held).__name__ in _KINDS for held in found) else None


def has_room(held: Any, dtype: torch.dtype, batch: int, heads: int, columns: int) -> bool:
    """Tells whether a part of a cache takes one more token of each sequence, and has tensors of this type,
    [batch, heads, places, columns], on the CPU."""
    keys, values = getattr(held, "keys", None), getattr(held, "values", None)
    if not held.is_initialized or not isinstance(keys, Tensor) or not isinstance(values, Tensor):
        return False
    shape = (batch, heads, keys.shape[-2], columns) if keys.ndim == 4 else ()
    fits = all(each.shape == shape and each.dtype is dtype and each.device.type == "cpu" for each in (keys, values))
    return fits and _KINDS[type(held).__name__].has_room(held)


def places_seen(held: Any) -> int:
    """Returns how many places one more token attends to without a mask, with its own."""
    return _KINDS[type(held).__name__].places(held)[0]


def places_held(held: Any) -> int:
    """Returns how many places a mask for one more token is about."""
    return _KINDS[type(held).__name__].places(held)[1]


def append(held: Any, mask: Tensor | None) -> Places:
    """Makes room for one more token of each sequence, and counts it. mask: of `places_held`, or None."""
    keys, values, first, length = _KINDS[type(held).__name__].append(held)
    return Places(keys, values, first, length if mask is None else mask.shape[3], mask)


_Taken = tuple[Tensor, Tensor, int, int]
"""Keys and values [b, heads, places, columns], the place of the new token, and the number of places in use."""


class _Growing:
    """Of a `DynamicLayer`."""

    @staticmethod
    def has_room(held: Any) -> bool:
        return True

    @staticmethod
    def places(held: Any) -> tuple[int, int]:
        count = held.keys.shape[2] + 1
        return count, count

    @staticmethod
    def append(held: Any) -> _Taken:
        length = held.keys.shape[2]
        held.keys, held.values = keys, values = _appended(held)
        _ROOMS[held].shown = keys, values
        return keys, values, length, length + 1


class _GrowingWindow(_Growing):
    """Of a `DynamicSlidingWindowLayer`, which keeps one token less than its window has."""

    @staticmethod
    def has_room(held: Any) -> bool:
        return not held.record_past and held.sliding_window > 1

    @staticmethod
    def append(held: Any) -> _Taken:
        length = held.keys.shape[2]
        keys, values = _appended(held)
        held.keys, held.values = (each[:, :, 1 - held.sliding_window :] for each in (keys, values))
        held.cumulative_length += 1
        _ROOMS[held].shown = held.keys, held.values
        return keys, values, length, length + 1


class _Static:
    """Of a `StaticLayer`."""

    @staticmethod
    def has_room(held: Any) -> bool:
        return int(held.cumulative_length) < held.keys.shape[2] and _are_rows(held)

    @staticmethod
    def places(held: Any) -> tuple[int, int]:
        return int(held.cumulative_length) + 1, held.keys.shape[2]

    @staticmethod
    def append(held: Any) -> _Taken:
        count = int(held.cumulative_length)
        held.cumulative_length.add_(1)
        return held.keys, held.values, count, count + 1


class _StaticWindow:
    """Of a `StaticSlidingWindowLayer`. Where it is full, the first token makes room."""

    @staticmethod
    def has_room(held: Any) -> bool:
        return _are_rows(held)

    @staticmethod
    def places(held: Any) -> tuple[int, int]:
        room = held.keys.shape[2]
        return min(held.cumulative_length_int + 1, room), room

    @staticmethod
    def append(held: Any) -> _Taken:
        count, places = held.cumulative_length_int, held.keys.shape[2]
        held.cumulative_length_int += 1
        if count < places:
            held.cumulative_length.add_(1)
            return held.keys, held.values, count, count + 1
        for each in (held.keys, held.values):
            each.copy_(each.roll(-1, 2))
        return held.keys, held.values, places - 1, places


_KINDS: dict[str, Any] = {
    "DynamicLayer": _Growing,
    "DynamicSlidingWindowLayer": _GrowingWindow,
    "StaticLayer": _Static,
    "StaticSlidingWindowLayer": _StaticWindow,
}


def _are_rows(held: Any) -> bool:
    """Tells whether places lie side by side."""
    return all(each.stride(3) == 1 and each.stride(2) == each.shape[3] for each in (held.keys, held.values))


# -- room for those that grow


@dataclass
class _Room:
    """Memory of keys and values [b, heads, room, columns].

    end     places that are taken, or were
    shown   what the cache's layer holds of it
    """

    memory: tuple[Tensor, Tensor]
    end: int
    shown: tuple[Tensor | None, Tensor | None] = None, None

    def is_shown_by(self, held: Any) -> bool:
        """Tells whether a cache's layer holds what it was given, so that nobody else appends here."""
        return self.shown[0] is held.keys and self.shown[1] is held.values


_ROOMS: WeakKeyDictionary[Any, _Room] = WeakKeyDictionary()


def _appended(held: Any) -> tuple[Tensor, Tensor]:
    """Returns views of what a cache's layer holds and of one place behind it, whose numbers are yet to be written."""
    length, room = held.keys.shape[2], _ROOMS.get(held)
    if room is None or not room.is_shown_by(held) or room.end == room.memory[0].shape[2]:
        room = _ROOMS[held] = _Room((_with_room(held.keys), _with_room(held.values)), length)
    room.end += 1
    first, count = room.end - length - 1, length + 1
    keys, values = (each.narrow(2, first, count) for each in room.memory)
    return keys, values


def _with_room(cached: Tensor) -> Tensor:
    """Returns a copy in memory with room for half as many places more."""
    b, heads, length, columns = cached.shape
    memory = torch.empty(b, heads, length + max(_LEAST_ROOM, length // 2), columns, dtype=cached.dtype)
    memory[:, :, :length] = cached
    return memory
