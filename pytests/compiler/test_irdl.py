"""`lowbit irdl`: upstream's tools, which know nothing of this project, check our IR with the definition."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from compiled import compile_matmul

from lowbit.dialect import ops
from lowbit.dialect.assembly import parse_module
from lowbit.dialect.bindings import new_context
from lowbit.dialect.irdl_export import irdl_text
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.types import Lowbit
from lowbit.passes.targets import parse_target

TOOLS = ("mlir-opt", "heir-opt", "iree-opt", "torch-mlir-opt")
"""mlir-opt and its like; on PyPI in heir-py, iree-base-compiler and torch-mlir."""


@cache
def find_tool(*dialects: str) -> str:
    """The first of TOOLS that takes IRDL and knows the dialects; skips the test if there is none."""
    scripts = [str(Path(sys.executable).parent)]
    scripts += [str(Path(s.origin).parent) for s in [importlib.util.find_spec("heir")] if s and s.origin]
    for name in TOOLS:
        tool = shutil.which(name) or shutil.which(name, path=os.pathsep.join(scripts))
        if tool and "--irdl-file" in ask(tool, "--help"):
            known = ask(tool, "--show-dialects").removeprefix("Available Dialects: ").strip().split(",")
            if set(dialects) <= set(known):
                return tool
    pytest.skip(f"none of {', '.join(TOOLS)} here takes --irdl-file and knows {', '.join(dialects)}")


def ask(tool: str, question: str) -> str:
    return subprocess.run([tool, question], capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="module")
def stages() -> dict[str, str]:
    """A kernel with groups, zeros, codes in pieces, a bias and splits, in the generic form, which these tools read."""
    spec = MatmulSpec(40, 1024, "f6e3m2", group_size=128, zeros="float", scale="e8m0", bias=True)
    stages = compile_matmul(spec, parse_target("sm_90a"), tokens=8, keep=True).stages
    context = new_context()
    ops.register(context)
    with context:
        return {name: str(parse_module(stages[name])) for name in ("lowbit", "tile")}


@pytest.fixture
def read(tmp_path: Path):
    """read(text, *dialects) -> what the tool says of an IR that also has ops of those dialects."""

    def read(text: str, *dialects: str) -> subprocess.CompletedProcess[str]:
        definition, ir = tmp_path / "lowbit.irdl.mlir", tmp_path / "ir.mlir"
        definition.write_text(irdl_text())
        ir.write_text(text)
        command = [find_tool(*dialects), f"--irdl-file={definition}", str(ir)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return read


def test_every_type_and_operation_is_there():
    text = irdl_text()
    names = {f"irdl.type @{t._name} " for t in Lowbit.types}
    names |= {f"irdl.attribute @{a._name} " for a in Lowbit.attributes}
    names |= {f"irdl.operation @{o._op_name} " for o in Lowbit.operations}
    assert len(names) > 30 and all(name in text for name in names)


def test_tool_checks_the_lowbit_stage(read, stages):
    right = read(stages["lowbit"], "func")
    assert right.returncode == 0, right.stderr
    assert '"lowbit.matmul"(%arg0, %arg1, %arg2)' in right.stdout
    assert "!lowbit.packed<[40, 1024]" in right.stdout


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("128 : i64", '"128"', "expected base attribute 'builtin.integer' but got 'builtin.string'"),
        ("[40, 1024], ", "", "expected 5 type arguments, but had 4"),
        ("lowbit.matmul", "lowbit.multiply", "unregistered operation 'lowbit.multiply'"),
        ('"lowbit.matmul"(%arg0, %arg1, %arg2)', '"lowbit.matmul"(%arg0)', "lowbit.matmul"),
    ],
)
def test_tool_refuses_what_the_definition_excludes(read, stages, old, new, message):
    assert old in stages["lowbit"]
    wrong = read(stages["lowbit"].replace(old, new), "func")
    assert wrong.returncode == 1 and message in wrong.stderr


def test_tool_checks_the_tile_stage(read, stages):
    # IRDL cannot say that lowbit.return ends a block; an upstream terminator takes its place here.
    text = stages["tile"].replace('"lowbit.return"() : () -> ()', "llvm.unreachable")
    right = read(text, "arith", "scf", "llvm")
    assert right.returncode == 0, right.stderr
    assert right.stdout.count('"lowbit.') == text.count('"lowbit.') > 50
    wrong = read(text.replace("{axis = 0 : i64}", "{axis = \"x\"}"), "arith", "scf", "llvm")
    assert wrong.returncode == 1 and "expected base attribute 'builtin.integer'" in wrong.stderr
