"""Kernels of lowbit's own tile programs are compiled once, and kept as those of matmuls are."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lowbit.dialect.errors import TargetError
from lowbit.passes.kernels.router import RouterPlan, router_program
from lowbit.pylib.runtime import own_kernels
from lowbit.pylib.runtime.own_kernels import own_kernel

PLAN = RouterPlan(64, 8, 2, "f16", "f16", "f16", "f32")
PROGRAM = partial(router_program, PLAN)
OTHER = partial(router_program, replace(PLAN, renormalized=False))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("LOWBIT_NO_CACHE", raising=False)
    return tmp_path


def unwanted(*_: Any) -> Any:
    raise AssertionError("compiled although it is kept")


@pytest.mark.parametrize("target", ["sm_90a", "emulator:sm_90a"])
def test_a_kernel_is_compiled_once(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = own_kernel(PROGRAM, target)
    monkeypatch.setattr(own_kernels, "_build", unwanted)
    second = own_kernel(PROGRAM, target)
    assert (second.ptx, second.launch, second.target) == (first.ptx, first.launch, first.target)
    if target == "sm_90a":
        assert second.cubin == first.cubin and second.cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("program", "target"), [(PROGRAM, "emulator:sm_80"), (OTHER, "emulator:sm_90a")], ids=["target", "plan"]
)
def test_another_is_compiled(program: Any, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own_kernel(PROGRAM, "emulator:sm_90a")
    monkeypatch.setattr(own_kernels, "_build", unwanted)
    with pytest.raises(AssertionError, match="compiled although"):
        own_kernel(program, target)


def test_what_is_damaged_is_compiled_again(cache: Path) -> None:
    first = own_kernel(PROGRAM, "emulator:sm_90a")
    (entry,) = cache.glob("??/*.kernel")
    entry.write_bytes(entry.read_bytes()[:-1])
    assert own_kernel(PROGRAM, "emulator:sm_90a").ptx == first.ptx
    (again,) = cache.glob("??/*.kernel")
    assert len(again.read_bytes()) > 1000


def test_a_kept_kernel_is_found_without_mlir(repo: Path) -> None:
    """What says which kernel it is, a program's function and its plan, loads neither MLIR nor LLVM."""
    own = (file.stem for file in (repo / "passes" / "kernels").glob("*.py") if "_program(" in file.read_text())
    names = [f"lowbit.passes.kernels.{name}" for name in sorted(own)]
    assert "lowbit.passes.kernels.rope" in names and len(names) >= 11
    code = (
        f"import sys, {', '.join(names)}\n"
        "print([m for m in ('torch_mlir', 'mlir', 'llvmlite') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_cpu_has_none() -> None:
    with pytest.raises(TargetError, match="tile programs are for GPUs"):
        own_kernel(PROGRAM, "cpu")
