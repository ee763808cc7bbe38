"""Code that runs once another library has been imported. `import lowbit` imports none of them.

transformers looks quantizers up in a table, which lowbit has to be in before `from_pretrained` is called; it has no
entry points for that. So where transformers is loaded already, lowbit registers at once. Where it is not, a finder at
the front of `sys.meta_path` waits for the module that has the table: it lets the other finders look for the module,
and registers when the module has run. The import of all other modules costs one comparison of names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def when_imported(name: str, action: Callable[[], object]) -> None:
    """Call `action` once the module of this name has been imported; now, if it is."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Waiting(name, action))


class _Waiting(MetaPathFinder):
    """Finds one module, once, as the usual finder does, with a loader that calls an action afterwards."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self)
        return spec

    def done(self) -> None:
        """The module has been imported."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self.action()


class _Telling(Loader):
    """Loads a module as its own loader does, and tells who waits for it."""

    def __init__(self, loader: Loader, waiting: _Waiting) -> None:
        self.loader = loader
        self.waiting = waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.waiting.done()
