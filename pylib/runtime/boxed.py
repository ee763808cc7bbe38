"""Kernels that take x by a tensor map: it holds the address of x and its size, so every call needs its own.

The driver takes some microseconds to make a map. Activations come at the same addresses again and again, and in a CUDA
graph always, so the last ones are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.runtime.driver import Function
from lowbit.pylib.tensor_map import TensorMap

_KEPT = 256  # maps of a kernel, of 128 bytes


def map_of_x(x: Any, spec: MatmulSpec, m: int, box: tuple[int, int]) -> TensorMap:
    """The tensor map of m rows of x, given by its address or (for the emulator) as an array: rows of the box are as
    wgmma reads them."""
    element = "u8" if spec.compute else spec.act
    return TensorMap(x, element, (m, spec.k), box, swizzle=box[1] * spec.x.bytes)


class BoxedFunction:
    """A loaded kernel that is called with the address of x as any other, and gets a tensor map. Safe to call from any
    thread."""

    def __init__(self, function: Function, spec: MatmulSpec, box: tuple[int, int], order: Sequence[str]) -> None:
        """order: the names of the arguments of a call; x is the first."""
        self._function, self._m = function, list(order).index("m") - 1
        self._encoded = lru_cache(maxsize=_KEPT)(lambda x, m: map_of_x(x, spec, m, box).encode())

    def __call__(self, stream: int, overlap: bool, x: int, *others: int) -> None:
        """Starts the kernel; see `Function`."""
        self._function(stream, overlap, self._encoded(x, others[self._m]), *others)
