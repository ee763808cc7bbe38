"""Exported folders on a GPU: against float64, in CUDA graphs, from several threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from c_runtime import compiler

import lowbit
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.runtime.devices import this_machine

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/exported_on_gpu.py"
S = MatmulSpec


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    specs = {
        "usual": S(256, 512, "u4", group_size=64, zeros="int", bias=True),
        "permuted": S(256, 512, "u4", group_size=64, permuted=True),
        "gated": S(256, 512, "i4", group_size=64, epilogue="silu_mul"),
        "experts": S(4 * 128, 256, "u4", group_size=64, experts=4, permuted=True, epilogue="silu_mul"),
    }
    compiler("gcc")
    lowbit.export(specs, this_machine(), tmp_path)
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": right;") == len(specs)
