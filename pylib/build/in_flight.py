"""Kernels that are being compiled by others for this process: whoever loads one of them waits, and does not compile it
as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import RLock

from lowbit.passes.kernels.base import KernelRequest

_ends: dict[KernelRequest, Callable[[], None]] = {}
_waiting = RLock()  # of one thread at a time; what ends the wait may load kernels itself


def announce(kernels: Iterable[KernelRequest], end: Callable[[], None]) -> None:
    """Have those who load one of these kernels call a function first, which waits until it is on disk. That takes the
    kernels back."""
    _ends.update(dict.fromkeys(kernels, end))


def take_back(kernels: Iterable[KernelRequest]) -> None:
    """Let these kernels be loaded at once."""
    for kernel in kernels:
        _ends.pop(kernel, None)


def wait_for(kernel: KernelRequest) -> None:
    """Returns when nobody is compiling a kernel any more."""
    if kernel in _ends:
        with _waiting:
            end = _ends.get(kernel)  # another thread may have waited
            if end is not None:
                end()
