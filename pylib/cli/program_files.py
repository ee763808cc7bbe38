"""Tile programs in the user's files: `my_kernel.py:name` on the command line. Slow imports are inside functions."""

from __future__ import annotations

import inspect
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lowbit.dialect.errors import SpecError
from lowbit.pylib.build import knobs

if TYPE_CHECKING:
    from lowbit.passes.pipeline import CompiledKernel


def compile_file(given: str, target: str | None) -> CompiledKernel:
    """Compiles the program that `FILE.py:NAME` names, a `Program` or a function without arguments that returns one.

    The file is executed, with its folder in front of sys.path, as `import` does it. Raises SpecError where there is no
    such file or name, or the function takes arguments; and as `lowbit.compile_program` does.
    """
    from lowbit.passes.pipeline import lower_program
    from lowbit.pylib.runtime.kernel import gpu_target

    chosen = gpu_target(target)
    return lower_program(program_named(given), chosen, lines=knobs.line_info())


def program_named(given: str) -> Any:
    """Returns what `FILE.py:NAME` names. Raises SpecError as `compile_file` does."""
    path, _, name = given.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise SpecError(f"{given!r} must be FILE.py:NAME, the program of a file of yours, such as my_kernel.py:scale")
    if not Path(path).is_file():
        raise SpecError(f"{given}: there is no file {path}")
    values = vars(_imported(Path(path)))
    if name not in values:
        raise SpecError(f"{given}: {path} defines no {name!r}; it must be a Program or a function that returns one")
    program = values[name]
    needed = [p.name for p in _parameters(program) if p.default is p.empty]
    if needed:
        raise SpecError(f"{given}: {name} takes {', '.join(needed)}; name a function that is called without arguments")
    return program


def _parameters(program: Any) -> list[inspect.Parameter]:
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(program).parameters.values() if callable(program) else ()
    return [each for each in parameters if each.kind not in several]


def _imported(path: Path) -> Any:
    """Executes a file as a module of its name."""
    loader = SourceFileLoader(path.stem, str(path))
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    loader.exec_module(module)
    return module
