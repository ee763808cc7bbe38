"""The MLIR bindings: which package serves, and where their versions differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType

import pytest

from lowbit.dialect import bindings, ops
from lowbit.dialect.bindings import ir, new_context
from lowbit.dialect.errors import TargetError


def test_contexts_have_no_threads(context: ir.Context) -> None:
    assert context.get_num_threads() == 1


def _importer(broken: Callable[[str], bool]) -> Callable[[str], ModuleType]:
    def import_module(name: str) -> ModuleType:
        if broken(name):
            raise ImportError(f"No module named {name!r}")
        return ModuleType(name)

    return import_module


@pytest.mark.parametrize(
    ("broken", "package"),
    [(r"^$", "mlir"), (r"^mlir\.ir", "torch_mlir"), (r"^mlir\.dialects\.ext", "torch_mlir")],
)
def test_the_first_complete_package_serves(monkeypatch: pytest.MonkeyPatch, broken: str, package: str) -> None:
    monkeypatch.setattr(bindings, "import_module", _importer(lambda name: bool(re.search(broken, name))))
    found, modules = bindings._load()
    assert found == package
    assert modules["nvvm"].__name__ == f"{package}.dialects.nvvm"
    assert modules["passmanager"].__name__ == f"{package}.passmanager"


def test_a_dialect_is_loaded_once_a_context(context: ir.Context) -> None:
    """And in any number of contexts, whichever version the bindings have."""
    for each in (context, new_context(), context):
        for _ in range(2):
            ops.register(each)
        with each, ir.Location.unknown():
            module = ir.Module.parse('"lowbit.commit"() : () -> ()')
            assert type(module.body.operations[0]) is ops.CommitOp


def test_bindings_of_llvm_23(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask for `reload` where another context has the dialect, and have no trait for isolation."""
    asked: list[bool] = []

    class Old:
        DIALECT_NAMESPACE = "of_llvm_23"

        @classmethod
        def load(cls, *, reload: bool = False) -> None:
            asked.append(reload)

    with new_context():
        bindings.load_dialect(Old)  # type: ignore[arg-type]
    assert asked == [True]


def test_missing_bindings_name_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "import_module", _importer(lambda _: True))
    with pytest.raises(TargetError, match=r"torch_mlir\.ir.*pip install 'torch-mlir>=\d+'; another wheel .*; LLVM"):
        bindings._load()
