"""The names of `import lowbit`: what `dir`, `help` and `from lowbit import *` find."""

from __future__ import annotations

import inspect
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from types import FunctionType

import lowbit
from lowbit.passes.builder import Program


def test_dir_has_the_public_names_alone() -> None:
    names = {name for name in dir(lowbit) if not name.startswith("__")}
    assert names == {*lowbit.__all__, "dialect", "passes", "pylib"} - {"__version__"}


def test_every_public_name_has_a_docstring() -> None:
    """With the methods and properties of its own."""
    public = {name: getattr(lowbit, name) for name in lowbit.__all__ if not name.startswith("__")}
    described = dict(public)
    for name, value in public.items():
        for key, member in vars(value).items() if inspect.isclass(value) else ():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if isinstance(function, FunctionType | property | cached_property) and not key.startswith("_"):
                described[f"{name}.{key}"] = function
    assert [name for name, value in described.items() if not inspect.getdoc(value)] == []
    assert len(described) > 2 * len(public)


def test_every_operation_of_the_builder_has_a_docstring() -> None:
    methods = {name: getattr(Program, name) for name in dir(Program) if not name.startswith("_")}
    assert [name for name, method in methods.items() if not method.__doc__] == []
    assert len(methods) > 80


def test_all_names_can_be_taken_without_transformers(repo: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from lowbit import *\n"
        "import inspect, lowbit\n"
        "print(len(inspect.getmembers(lowbit)) > 50)\n"
        "try: lowbit.LowbitConfig\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=True)
    message = "LowbitConfig needs transformers 5: pip install 'transformers>=5.17' accelerate"
    assert done.stdout.splitlines() == ["True", message]
