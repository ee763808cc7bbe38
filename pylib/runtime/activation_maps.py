"""Kernels that take x by tensor maps: these hold the address of x and its size, so every call needs its own.

The driver takes some microseconds to make a map. Activations come at the same addresses again and again, and in a CUDA
graph always, so the last ones are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.runtime.driver import Function, PreparedLaunch
from lowbit.pylib.runtime.tensor_map import TensorMap

_KEPT = 256  # maps of a kernel, of 128 bytes


Boxes = Mapping[str, tuple[int, int]]
"""Tokens and columns of the boxes of x, by the parameter that takes a tensor map of them."""


def maps_of_x(x: Any, spec: MatmulSpec, m: int, boxes: Boxes) -> dict[str, TensorMap]:
    """The tensor maps of m rows of x, given by its address or (for the emulator) as an array: rows of the boxes are as
    wgmma reads them."""
    element, width = "u8" if spec.compute else spec.act, spec.x.bytes
    return {name: TensorMap(x, element, (m, spec.k), box, swizzle=box[1] * width) for name, box in boxes.items()}


class BoxedFunction:
    """A loaded kernel that is called with the address of x as any other, and gets tensor maps. Safe to call from any
    thread."""

    def __init__(self, function: Function, spec: MatmulSpec, boxes: Boxes, order: Sequence[str]) -> None:
        """order: the names of the arguments of a call; x is the first. The function takes the maps in place of it."""
        self._function, self._m = function, list(order).index("m") - 1

        def encoded(x: int, m: int) -> list[bytes]:
            return [each.encode() for each in maps_of_x(x, spec, m, boxes).values()]

        self._encoded = lru_cache(maxsize=_KEPT)(encoded)

    def __call__(self, stream: int, overlap: bool, x: int, *others: int) -> None:
        """Starts the kernel; see `Function`."""
        self._function(stream, overlap, *self._encoded(x, others[self._m]), *others)

    def prepared(self, x: int, *others: int) -> PreparedBoxedLaunch:
        """Returns launches with these arguments; see `Function.prepared`."""

        def maps(x: int) -> list[bytes]:
            return self._encoded(x, others[self._m])

        return PreparedBoxedLaunch(self._function.prepared(*maps(x), *others), maps)


class PreparedBoxedLaunch:
    """Launches of a kernel that gets tensor maps of x, like `PreparedLaunch`."""

    def __init__(self, launch: PreparedLaunch, maps: Callable[[int], list[bytes]]) -> None:
        self._launch, self._maps, self.start = launch, maps, launch.start

    def set(self, x: int, *others: int) -> None:
        """Writes all arguments."""
        self._launch.set(*self._maps(x), *others)
