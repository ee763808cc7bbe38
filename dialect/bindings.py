"""The MLIR Python bindings, behind one module.

Two packages carry the same upstream API: a real ``mlir`` package (built from LLVM), and ``torch_mlir``, whose
wheel is on PyPI. The first that has every module we use serves; nothing else in the project imports either.
Their types are in ``typings/torch_mlir``. Bindings of LLVM 23 and 24 serve; where they differ, this module makes up
for it. ``docs/toolchain.md`` lists what is used of them.
"""

import sys
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING

from lowbit.dialect.errors import TargetError

_PACKAGES = ("mlir", "torch_mlir")
"""Import names, in order of preference."""

_MODULES = ("ir", "passmanager")
_DIALECTS = ("arith", "builtin", "ext", "func", "gpu", "irdl", "llvm", "memref", "nvvm", "scf", "vector")


def _load() -> tuple[str, dict[str, ModuleType]]:
    """Returns the name of the first usable package, and its modules by their last name."""
    reasons: list[str] = []
    for package in _PACKAGES:
        try:
            modules = {name: import_module(f"{package}.{name}") for name in _MODULES}
            dialects = {name: import_module(f"{package}.dialects.{name}") for name in _DIALECTS}
        except ImportError as error:
            reasons.append(f"{package}: {error}")
            continue
        return package, modules | dialects
    raise TargetError(
        f"no usable MLIR Python bindings ({'; '.join(reasons)}); install one of: pip install 'torch-mlir>=20261001'; "
        "another wheel of LLVM 23 or 24 that imports as torch_mlir; LLVM built with MLIR_ENABLE_BINDINGS_PYTHON, its "
        "python_packages/mlir_core on PYTHONPATH"
    )


if TYPE_CHECKING:
    from torch_mlir import ir, passmanager
    from torch_mlir.dialects import arith, builtin, ext, func, gpu, irdl, llvm, memref, nvvm, scf, vector
else:
    globals().update(_load()[1])

ISOLATED_FROM_ABOVE = [ir.IsIsolatedFromAboveTrait] if hasattr(ir, "IsIsolatedFromAboveTrait") else []
"""The traits of an operation whose region uses no value from around it. LLVM 23's bindings cannot say so."""


def new_context() -> "ir.Context":
    """A context of its own with every upstream dialect, and without threads.

    Python verifiers and passes run under the interpreter lock, so a pool of MLIR threads would only deadlock
    on it; compile in several processes instead.
    """
    context = ir.Context()
    context.enable_multithreading(False)
    return context


def load_dialect(dialect: type[ext.Dialect]) -> None:
    """Make a dialect that is defined in Python known in the current context, unless it is known there already.

    LLVM 23's bindings take a dialect to another context only where `reload` says so; LLVM 24's always do. Whenever they
    come across an operation, the bindings import the module of its dialect, in vain and anew each time if there is
    none: that took a fifth of a compilation.
    """
    sys.modules.setdefault(f"{ext.__package__}.{dialect.DIALECT_NAMESPACE}", sys.modules[dialect.__module__])
    try:
        ir.Context.current.dialects[dialect.DIALECT_NAMESPACE]
    except IndexError:
        anew = {"reload": True} if "reload" in signature(dialect.load).parameters else {}
        dialect.load(**anew)


__all__ = [
    "ISOLATED_FROM_ABOVE",
    "arith",
    "builtin",
    "ext",
    "func",
    "gpu",
    "ir",
    "irdl",
    "llvm",
    "load_dialect",
    "memref",
    "new_context",
    "nvvm",
    "passmanager",
    "scf",
    "vector",
]
