"""One module for each file, whichever name it is imported by.

From a checkout, `pylib`, `passes` and `dialect` can be imported by the names of their folders; a wheel has `pylib` too.
Such a name stands for the module of the same file in `lowbit`: `pylib.compile is lowbit.compile`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_aliased: set[str] = set()


def alias(package: str) -> None:
    """Let the top-level `package` and its submodules stand for those of `lowbit`; nothing for `lowbit` itself."""
    if package.startswith("lowbit.") or package in _aliased:
        return
    if not _aliased:
        sys.meta_path.insert(0, _Finder())
    _aliased.add(package)
    sys.modules[package] = import_module(f"lowbit.{package}")


class _Finder(MetaPathFinder, Loader):
    """Finds `pylib.x` where `pylib` is aliased, and loads `lowbit.pylib.x` for it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.partition(".")[0] in _aliased else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(f"lowbit.{spec.name}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        """Give the module its own spec back, which the import system has just replaced by that of the alias."""
        module.__spec__ = module.__spec__.loader_state
