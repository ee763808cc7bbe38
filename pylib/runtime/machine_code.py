"""Machine code in memory: a copy of an image that may be executed, and its functions."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

from lowbit.dialect.errors import TargetError

_C = ctypes.CDLL(None, use_errno=True)
_READ, _EXECUTE = 1, 4  # of mprotect


class MachineCode:
    """An image that runs wherever it lies. Its memory is given back with the object."""

    def __init__(self, image: bytes) -> None:
        self._pages = mmap.mmap(-1, len(image))
        self._pages.write(image)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        size = ctypes.c_size_t(-(-len(image) // mmap.PAGESIZE) * mmap.PAGESIZE)
        if _C.mprotect(ctypes.c_void_p(self.address), size, _READ | _EXECUTE):
            raise TargetError(
                f"this system lets no process execute code that it made ({os.strerror(ctypes.get_errno())}); "
                "the CPU target needs that, so allow it, or use a GPU"
            )

    def function(self, offset: int) -> Callable[[int], None]:
        """The function of one pointer at an offset. Calling it releases the interpreter lock."""
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address + offset)
        call.code = self  # type: ignore[attr-defined]
        return call
