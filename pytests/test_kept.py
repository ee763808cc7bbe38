"""What tests keep: taken where nothing has changed, and nowhere else."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled import compile_matmul

import lowbit
from lowbit.dialect.errors import EmulatorError, PassError
from lowbit.dialect.signature import Param, parse_grid
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.codegen.cubin import Resources, resource_usage
from lowbit.passes.kernels.epilogue import Epilogue
from lowbit.passes.launch import Launch
from lowbit.passes.targets import parse_target
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.reference import random_inputs
from lowbit.pylib.runtime.tensor_map import TensorMap
from pytests import kept, patches
from pytests.kept import FOLDER, KeptEmulator

# Adds m to x[0], and leaves the map alone.
PTX = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 x, .param .u64 y, .param .u32 m, .param .align 64 .b8 map[128])
{
    .reg .b64 %x, %y;
    .reg .b32 %m, %v;
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    ld.param.u32 %m, [m];
    ld.global.b32 %v, [%x];
    add.u32 %v, %v, %m;
    st.global.b32 [%y], %v;
    ret;
}
"""
PARAMS = (Param("x", "pointer"), Param("y", "pointer"), Param("m", "i32"), Param("map", "map"))
LAUNCH = Launch("kernel", parse_grid((1, 1, 1)), 1, 0, PARAMS)
X = np.arange(8, dtype=np.int32) + 40
MAP = TensorMap(np.zeros((16, 64), np.uint8), "u8", (16, 64), (8, 32))
GIVEN: dict[str, Any] = {"ptx": PTX, "launch": LAUNCH, "x": X, "m": 2, "map": MAP, "options": {"racecheck": False}}
SPEC = MatmulSpec(n=16, k=64, weight="u4")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def is_made(what: str, make: Callable[[], object]) -> bool:
    """Whether something is compiled or emulated, and not taken."""
    before = kept.made[what]
    make()
    return kept.made[what] > before


def runs(given: dict[str, Any]) -> bool:
    """Whether a launch runs; its result is right in either case."""

    def run() -> None:
        x, y = given["x"].copy(), np.zeros(1, np.int32)
        emulator = KeptEmulator(given["ptx"])
        emulator.run(given["launch"], {"x": x, "y": y, "m": given["m"], "map": given["map"]}, **given["options"])
        assert y[0] == x.view(np.int32)[0] + given["m"]
        assert emulator.stats["st.global.b32"] == emulator.stats.global_bytes_stored / 4 > 0

    return is_made("launch", run)


def compiles(spec: MatmulSpec = SPEC, target: str = "sm_80") -> bool:
    return is_made("kernel", lambda: compile_matmul(spec, parse_target(target)))


# -- launches


def test_a_launch_runs_once() -> None:
    assert [runs(GIVEN), runs(GIVEN)] == [True, False]


@pytest.mark.parametrize(
    "change",
    [
        {"ptx": PTX + "\n"},
        {"launch": Launch("kernel", parse_grid((2, 1, 1)), 1, 0, PARAMS)},
        {"x": X[::-1].copy()},
        {"x": X.view(np.uint32)},
        {"map": TensorMap(MAP.address, "u8", (16, 64), (8, 16))},
        {"map": TensorMap(np.ones((16, 64), np.uint8), "u8", (16, 64), (8, 32))},
        {"m": 3},
        {"options": {"racecheck": True}},
    ],
    ids=["ptx", "launch", "memory", "type", "box", "memory of a map", "number", "options"],
)
def test_whatever_changes_runs_again(change: dict[str, Any]) -> None:
    assert runs(GIVEN)
    assert runs(GIVEN | change)
    assert not runs(GIVEN)


def test_which_arguments_are_the_same_memory_is_in_the_key() -> None:
    def run(y: np.ndarray, x: np.ndarray) -> None:
        KeptEmulator(PTX).run(LAUNCH, {"x": x, "y": y, "m": 2, "map": MAP})

    assert is_made("launch", lambda: run(X.copy(), X.copy()))
    both = X.copy()
    assert is_made("launch", lambda: run(both, both))
    both = X.copy()
    assert not is_made("launch", lambda: run(both, both))
    assert both[0] == X[0] + 2
    both = np.concatenate([X, X])
    for _ in range(2):
        with pytest.raises(EmulatorError, match="overlaps"):
            run(both[4:12], both[:8])


@pytest.mark.parametrize("compute", [None, "i8"])
def test_calls_run_once(compute: Any) -> None:
    """Whatever was in the memory of their results before."""
    spec = MatmulSpec(n=16, k=256, weight="u4", out="f32", compute=compute)
    x, tensors = random_inputs(spec, 3, seed=1)
    mm = lowbit.compile(spec, "emulator:sm_90a")
    weight = mm.pack(**tensors)

    def call(garbage: float) -> torch.Tensor:
        torch.full((3, 16), garbage)
        return mm(x, weight)

    assert is_made("launch", lambda: call(1.0))
    assert not is_made("launch", lambda: call(2.0)) and torch.equal(call(3.0), call(4.0))


def test_memory_that_the_emulator_refuses_is_refused_again() -> None:
    assert runs(GIVEN)
    with pytest.raises(EmulatorError, match="contiguous"):
        KeptEmulator(PTX).run(LAUNCH, {"x": np.repeat(X, 2)[::2], "y": np.zeros(1, np.int32), "m": 2, "map": MAP})


def test_failures_are_not_kept(folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(EmulatorError, match="out of bounds"):
            KeptEmulator(PTX).run(LAUNCH, {"x": np.zeros(0, np.int32), "y": X.copy(), "m": 2, "map": MAP})
        with pytest.raises(EmulatorError, match="frob"):
            KeptEmulator(PTX.replace("add.u32", "frob.u32"))
    assert len(list(folder.glob("??/*.kernel"))) == 1, "that the first PTX can be read"


def test_what_was_read_before_is_read_when_it_is_wanted() -> None:
    assert "module" in vars(KeptEmulator(PTX))
    emulator = KeptEmulator(PTX)
    assert "module" not in vars(emulator)
    y = np.zeros(1, np.int32)
    emulator.launch("kernel", block=1, args=[X, y, 2, MAP])
    assert y[0] == X[0] + 2 and list(emulator.module.kernels) == ["kernel"]
    with pytest.raises(AttributeError, match="has no color"):
        _ = emulator.color


def test_a_patched_emulator_keeps_and_takes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowbit.pylib.emulator.launch.SM_COUNT", 3)
        assert not runs(GIVEN), "it runs, but beside the store"
        assert not list(folder.glob("??/*"))
    assert runs(GIVEN)
    monkeypatch.setattr(Epilogue, "wrong", None, raising=False)
    assert "module" not in vars(KeptEmulator(PTX)), "what makes the PTX is not what runs it"


def test_the_emulators_sources_are_in_the_key(repo: Path) -> None:
    """All that it imports from the package."""
    files = kept.emulator_sources()
    assert repo / "pylib/emulator/isa/atomics.py" in files
    named = {f"lowbit.{file.relative_to(repo).with_suffix('')}".replace("/", ".") for file in files}
    imported = {name for file in files for name in top_level_imports(file)}
    assert {name.removesuffix(".__init__") for name in named} >= {name for name in imported if "lowbit" in name}


def top_level_imports(file: Path) -> Iterator[str]:
    """Yields the modules that a file imports when it is imported."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from below if node.module == "lowbit.pylib.emulator.isa" else [str(node.module)]


# -- kernels


def test_a_kernel_is_compiled_once() -> None:
    first, second = (compile_matmul(SPEC, parse_target("sm_80")) for _ in range(2))
    assert first == second and first.launch.roles and not compiles()


def test_every_other_request_is_compiled() -> None:
    assert compiles()
    assert compiles(MatmulSpec(n=16, k=64, weight="u4", bias=True))
    assert compiles(target="sm_90a")
    assert not compiles()


def test_every_stage_is_compiled_for_whoever_asks() -> None:
    assert compiles()
    stages = compile_matmul(SPEC, parse_target("sm_80"), keep=True).stages
    assert {"lowbit", "tile", "ll", "ptx"} <= set(stages)


@pytest.mark.parametrize(
    "replace",
    [
        lambda patch: patch.setattr(Epilogue, "wrong", None, raising=False),
        lambda patch: patch.setattr("lowbit.passes.pipeline.emit_ptx", lambda *_: "wrong"),
        lambda patch: patch.setattr("lowbit.pylib.build.cache.key", lambda **_: "0" * 64),
        lambda patch: patch.setitem({}, "lowbit.barrier", None),
        lambda patch: patch.delattr("lowbit.passes.pipeline.read_launches"),
    ],
    ids=["class", "module", "key", "dictionary", "removed"],
)
def test_a_patched_compiler_keeps_and_takes_nothing(replace: Callable[[Any], None], folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        replace(patch)
        with suppress(NameError):  # of what was removed
            assert not compiles(), "it compiles, but beside the store"
        assert not list(folder.glob("??/*"))
    assert compiles()


def test_a_wrong_kernel_is_not_kept() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowbit.passes.pipeline.emit_ptx", lambda *_: "wrong")
        assert compile_matmul(SPEC, parse_target("sm_80")).ptx == "wrong"
    assert compile_matmul(SPEC, parse_target("sm_80")).ptx != "wrong"


def test_what_pylib_replaces_leaves_the_compiler_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiles()
    monkeypatch.setattr(Matmul, "pack", None)
    assert not compiles() and patches.homes() == {"lowbit.pylib.matmul"}
    monkeypatch.undo()
    assert not patches.homes()


def test_nothing_is_kept_after_a_source_has_changed(folder: Path) -> None:
    source = folder / "pass.py"
    source.write_text("as it was")
    state = kept.state([source])
    assert kept.get_or_make("0" * 64, lambda: {"a": b"1"}, state) == {"a": b"1"}
    assert kept.get_or_make("0" * 64, lambda: {"a": b"2"}, state) == {"a": b"1"}
    source.write_text("edited")
    assert kept.get_or_make("1" * 64, lambda: {"a": b"3"}, state) == {"a": b"3"}
    assert kept.get_or_make("1" * 64, lambda: {"a": b"4"}, state) == {"a": b"4"}


def test_sources_are_looked_at_again_when_a_module_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory stays as it is: an edit counts from the next module on, which may be from it."""
    looks: list[bool] = []
    monkeypatch.setattr(kept, "_are_as_before", lambda before: looks.append(True) or len(looks) < 3)
    monkeypatch.setattr(kept, "_loaded", 0)
    assert [kept._is_code_as_before() for _ in range(3)] == [True] * 3 and len(looks) == 1
    monkeypatch.setitem(sys.modules, "a_module_more", sys)
    assert [kept._is_code_as_before() for _ in range(3)] == [True] * 3 and len(looks) == 2
    monkeypatch.setitem(sys.modules, "another_module", sys)
    assert [kept._is_code_as_before() for _ in range(2)] == [False] * 2


def test_a_hash_of_sources_makes_them_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_loaded", len(sys.modules))
    kept._fingerprint(("pytests/kept.py", "pytests/patches.py"))
    assert kept._loaded == 0


# -- cubins


def assembles(target: str = "sm_80") -> bool:
    """Whether a kernel is assembled; the result is right in either case."""

    def assemble() -> None:
        resources = resource_usage(kernel.ptx, parse_target(target))
        assert 16 < resources.registers < 256 and kernel.cubin().startswith(b"\x7fELF")

    kernel = compile_matmul(SPEC, parse_target("sm_80"))
    return is_made("cubin", assemble)


def test_a_cubin_is_assembled_once_for_each_target() -> None:
    assert [assembles(), assembles(), assembles("sm_90a"), assembles()] == [True, False, True, False]


def test_a_patched_assembler_keeps_and_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.passes.codegen.cubin._resources", lambda log, target: Resources(99, 0, 0, 0, 0))
    assert [assembles(), assembles()] == [False, False]


def test_what_the_assembler_refuses_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(PassError, match="refuses the PTX"):
            resource_usage(PTX.replace("add.u32", "frob.u32"), parse_target("sm_90a"))


# -- the store


def test_nothing_is_kept_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, "")
    assert [runs(GIVEN), runs(GIVEN), compiles(), compiles()] == [True] * 4


def test_what_was_not_used_for_longest_is_deleted(folder: Path) -> None:
    for number in range(4):
        key = str(number) * 64
        kept.get_or_make(key, lambda: {"a": os.urandom(1000)})
        os.utime(folder / key[:2] / f"{key}.kernel", (number, number))
    kept.get_or_make("0" * 64, dict)  # used again
    kept.trim(folder, most=10_000)
    assert len(list(folder.glob("??/*.kernel"))) == 4
    kept.trim(folder, most=4000)
    assert sorted(path.name[0] for path in folder.glob("??/*.kernel")) == ["0"]


def test_tests_replace_things_by_monkeypatch_alone(repo: Path) -> None:
    """Since `patches` sees nothing else: no mock, and no assignment to what is imported from lowbit."""
    for file in sorted((repo / "pytests").glob("**/*.py")):
        found = list(other_ways(ast.parse(file.read_text())))
        assert not found or file.name == "kept.py", file


@pytest.mark.parametrize(
    "text",
    [
        "from unittest import mock",
        "import unittest.mock",
        "from lowbit.passes import emit\nemit.store = None",
        "from lowbit.passes.emit import RULES\nRULES['a'] = None",
        "from lowbit.passes import emit\ndef test():\n    emit.a.b += 1",
        "import lowbit\ndel lowbit.compile",
        "from lowbit.passes import emit\nsetattr(emit, 'a', 1)",
        "from lowbit.passes.emit import RULES\nRULES.update(a=1)",
    ],
)
def test_other_ways_are_found(text: str) -> None:
    assert list(other_ways(ast.parse(text)))


def other_ways(tree: ast.Module) -> Iterator[str]:
    """Yields where a file replaces something of lowbit's, or may, without MonkeyPatch."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    yield from (ast.unparse(node) for node in imports if "mock" in ast.unparse(node))
    ours = [node for node in imports if "lowbit" in ast.unparse(node)]
    names = {(alias.asname or alias.name).split(".")[0] for node in ours for alias in node.names}
    for node in ast.walk(tree):
        yield from (ast.unparse(node) for target in _replaced(node) if _first_name(target) in names)


def _replaced(node: ast.AST) -> list[ast.expr]:
    """What a statement or a call changes a part of."""
    if isinstance(node, ast.Assign | ast.Delete):
        return [target for target in node.targets if not isinstance(target, ast.Name)]
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [] if isinstance(node.target, ast.Name) else [node.target]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        return node.args[:1]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return [node.func.value] if node.func.attr in ("update", "setdefault", "pop", "clear") else []
    return []


def _first_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_no_two_modules_of_tests_have_one_name(repo: Path) -> None:
    """Folders of tests are all on the path, so that one would be imported in place of the other."""
    every = (file.name for file in (repo / "pytests").glob("**/*.py"))
    names = sorted(name for name in every if name not in ("__init__.py", "conftest.py"))
    assert names == sorted(set(names))
