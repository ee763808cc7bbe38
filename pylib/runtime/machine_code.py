"""Machine code in memory: an object file, linked and loaded by LLVM's ORC, and its function.

To load llvmlite takes 30 ms in the first process that finds its programs in the disk cache; to link, 1 ms a program.

It is linked by JITLink, which gives a program one block of memory. ORC's other linker, RuntimeDyld, maps each section
by itself, and ends the process where constants come to lie 2 GiB or more from the instructions that read them: among
what is in use there may be a hole that one section fits in, and another does not.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

from lowbit.dialect.errors import TargetError
from lowbit.passes.codegen.llvm import binding


def load(code: bytes, name: str) -> Callable[[int], None]:
    """Returns the function of one pointer that an object file for this machine defines.

    Calling it releases the interpreter lock. Its memory is given back with it. Raises TargetError where the file can't
    be linked, or where the system lets no process execute code that it made.
    """
    llvm = binding()
    try:
        machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine()
        jit = llvm.create_lljit_compiler(machine, use_jit_link=True, suppress_errors=True)
        library = llvm.JITLibraryBuilder().add_object_img(code).export_symbol(name).link(jit, name)
    except RuntimeError as error:
        raise TargetError(
            f"machine code for this CPU can't be loaded ({error}); the CPU target needs a process that may execute "
            "code that it made, so allow it, or use a GPU"
        ) from error
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(library[name])
    weakref.finalize(function, _unload, library, jit).atexit = False  # threads may run it until the process ends
    return function


def _unload(library: Any, jit: Any) -> None:
    """Gives memory back, the library before its linker: the other way round LLVM would end the process."""
    library.close()
    jit.close()
