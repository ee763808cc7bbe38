"""Which file imports which: one way between packages, in no circle, and MLIR and torch only where they belong.

Imports are read off the syntax tree. Those inside functions count like any other: they put the loading off, but do not
make a file depend on less. Those under `if TYPE_CHECKING:` do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("dialect", "passes", "pylib")
MAY_USE_ALL = ("benchmarks", "examples", "pytests", "lit_tests")
BINDINGS = "dialect/bindings.py"
FOREIGN = {"dialect": {"torch", "llvmlite", "cuda"}, "passes": {"torch"}}
"""What a layer must not import, besides MLIR and the layers above it."""


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the dotted name of each import in a file; of `from a import b` it is "a.b"."""
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=0):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in names)
            case ast.ImportFrom():
                yield node.lineno, "."
            case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(name)), *_]):
                yield node.lineno, name
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
                pending += orelse
                continue
        pending += ast.iter_child_nodes(node)


def files() -> dict[str, Path]:
    """Returns every file of the three layers and of `lowbit` itself by the name of its module."""
    paths = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
    modules = {_module(("lowbit", *path.relative_to(ROOT).parts)): path for path in paths}
    return modules | {_module(("lowbit", path.name)): path for path in sorted((ROOT / "lowbit").glob("*.py"))}


def _module(parts: tuple[str, ...]) -> str:
    return ".".join(parts).removesuffix(".py").removesuffix(".__init__")


def depends(modules: dict[str, str]) -> dict[str, set[str]]:
    """Returns the modules that each module imports, for module names and sources."""

    def owner(name: str) -> str | None:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name or None

    found = {name: {owner(target) for _, target in imported(source)} for name, source in modules.items()}
    return {name: {other for other in others if other not in (None, name)} for name, others in found.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Returns the modules of one circle, the first once more at the end; [] if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def _where(path: Path, line: int, name: str) -> str:
    return f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_imports_go_one_way() -> None:
    """pylib -> passes -> dialect."""
    wrong: list[str] = []
    for above in range(1, len(LAYERS)):
        for layer, upper in ((layer, upper) for layer in LAYERS[:above] for upper in LAYERS[above:]):
            for path in sorted((ROOT / layer).rglob("*.py")):
                names = imported(path.read_text())
                wrong += [_where(path, line, name) for line, name in names if name.startswith(f"lowbit.{upper}.")]
    assert not wrong, f"move what is shared down a layer ({' -> '.join(reversed(LAYERS))}):\n" + "\n".join(wrong)


def test_layers_are_imported_as_parts_of_lowbit() -> None:
    """`passes.base` and a relative import would load a second copy of a module, or a stranger's `passes.py`."""
    wrong = [
        _where(path, line, name)
        for path in files().values()
        for line, name in imported(path.read_text())
        if name.partition(".")[0] in ("", *LAYERS)
    ]
    assert not wrong, "write lowbit.dialect, lowbit.passes, lowbit.pylib:\n" + "\n".join(wrong)


def test_foreign_packages_stay_where_they_belong() -> None:
    """MLIR behind one file, torch above the compiler."""
    wrong: list[str] = []
    for folder in (*LAYERS, *MAY_USE_ALL):
        for path in sorted((ROOT / folder).rglob("*.py")):
            banned = {"mlir", "torch_mlir"} | FOREIGN.get(folder, set())
            if str(path.relative_to(ROOT)) == BINDINGS:
                banned -= {"mlir", "torch_mlir"}
            names = imported(path.read_text())
            wrong += [_where(path, line, name) for line, name in names if name.partition(".")[0] in banned]
    assert not wrong, f"MLIR comes from {BINDINGS}, torch is for pylib:\n" + "\n".join(wrong)


def test_no_test_reads_the_clock() -> None:
    """On a busy machine anything takes any time: tests count work, or wait for each other. `benchmarks` has times."""
    clocks = {"time", "timeit", "datetime"}
    paths = sorted((ROOT / "pytests").rglob("*.py"))
    names = [(path, line, name) for path in paths for line, name in imported(path.read_text())]
    found = [_where(*place) for place in names if place[2].partition(".")[0] in clocks]
    assert paths and not found, "\n".join(found)


def test_no_circle_between_files() -> None:
    found = circle(depends({name: path.read_text() for name, path in files().items()}))
    assert not found, f"these files import each other, move what they share to a third: {' -> '.join(found)}"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import a.b, c", ["a.b", "c"]),
        ("def f():\n    from a import b, c", ["a.b", "a.c"]),
        ("from . import b", ["."]),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", ["b"]),
        ("x = import_module('a.b')", ["a.b"]),
    ],
)
def test_what_counts_as_an_import(source: str, names: list[str]) -> None:
    assert [name for _, name in imported(source)] == names


def test_a_circle_through_a_function_is_found() -> None:
    modules = {"p.a": "import p.b", "p.b": "def f():\n    from p.c import x", "p.c": "from p import a"}
    found = circle(depends(modules))
    assert found[0] == found[-1] and set(found) == {"p.a", "p.b", "p.c"}
    assert all(b in depends(modules)[a] for a, b in pairwise(found))
    assert circle(depends(modules | {"p.c": "if TYPE_CHECKING:\n    from p import a"})) == []
