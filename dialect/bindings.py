"""The MLIR Python bindings, behind one module.

Two packages carry the same upstream API: a real ``mlir`` package (built from LLVM), and ``torch_mlir``, whose
wheel is on PyPI. The first that has every module we use serves; nothing else in the project imports either.
Their types are in ``typings/torch_mlir``.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from lowbit.dialect.errors import TargetError

_PACKAGES = {"mlir": "mlir-python-bindings", "torch_mlir": "torch-mlir"}
"""Import name -> distribution name, in order of preference."""

_MODULES = ("ir", "passmanager", "rewrite")
_DIALECTS = ("arith", "builtin", "ext", "func", "gpu", "irdl", "llvm", "memref", "nvvm", "scf", "vector")


def _load() -> tuple[str, dict[str, ModuleType]]:
    """The first usable package's name, and its modules by their last name."""
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
        f"no usable MLIR Python bindings ({'; '.join(reasons)}); install them: pip install 'lowbit[compile]'"
    )


def _version(package: str, ir_module: ModuleType) -> str:
    """Name and version of the bindings, to report."""
    try:
        return f"{package} {version(_PACKAGES[package])}"
    except PackageNotFoundError:  # a build tree on PYTHONPATH: a rebuild must not look like the build before
        library = Path(str(ir_module.__file__)).parent / "_mlir_libs"
        newest = max((file.stat().st_mtime_ns for file in library.glob("*.so*")), default=0)
        return f"{package} built {newest}"


if TYPE_CHECKING:
    from torch_mlir import ir, passmanager, rewrite
    from torch_mlir.dialects import arith, builtin, ext, func, gpu, irdl, llvm, memref, nvvm, scf, vector

    BINDINGS_VERSION: str = ""
else:
    _package, _modules = _load()
    BINDINGS_VERSION = _version(_package, _modules["ir"])
    globals().update(_modules)


def new_context() -> "ir.Context":
    """A context of its own with every upstream dialect, and without threads.

    Python verifiers and passes run under the interpreter lock, so a pool of MLIR threads would only deadlock
    on it; compile in several processes instead.
    """
    context = ir.Context()
    context.enable_multithreading(False)
    return context


__all__ = [
    "BINDINGS_VERSION",
    "arith",
    "builtin",
    "ext",
    "func",
    "gpu",
    "ir",
    "irdl",
    "llvm",
    "memref",
    "new_context",
    "nvvm",
    "passmanager",
    "rewrite",
    "scf",
    "vector",
]
