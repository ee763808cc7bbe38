"""Matmuls on a CPU in C: bit for bit what Python computes there."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest
import torch
from c_runtime import CMatmul
from exported import read_manifest, seal

import lowbit
from lowbit.dialect.errors import TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.aot.cpu import LEVELS
from lowbit.pylib.reference.inputs import random_inputs, random_residual
from lowbit.pylib.runtime.cpu import CpuMatmul
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import pack

S = MatmulSpec
SPECS = {
    "u4": S(200, 384, "u4", group_size=128, zeros="int"),
    "i3": S(37, 256, "i3", group_size=64, out="f32", bias=True),
    "nf4": S(48, 192, "nf4", group_size=64, epilogue="residual"),
    "f6": S(33, 272, "f6e3m2"),
    "mx": S(64, 96, "f4e2m1", group_size=32, scale="e8m0", act="bf16", epilogue="silu_mul"),
    "u2": S(16, 160, "u2", group_size=32, zeros="float", act="bf16", outliers=True, permuted=True),
}
ROWS = (1, 7, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported")
    lowbit.export(SPECS, "cpu", path)
    return path


@pytest.mark.parametrize("name", SPECS)
def test_results_are_those_of_python(folder: Path, name: str) -> None:
    spec, mm = SPECS[name], lowbit.compile(SPECS[name], "cpu")
    x, tensors = random_inputs(spec, max(ROWS), seed=1)
    w = pack(spec, **tensors)
    with CMatmul(folder, name) as c:
        for m in ROWS:
            others = random_residual(spec, m)
            y = torch.full((m, spec.outputs), torch.nan, dtype=TORCH[spec.out_dtype])
            c.multiply(x[:m], w.tensors, y, list(others.values()))
            assert torch.equal(y, mm(x[:m], w, **others))
        if not (spec.permuted or spec.is_gated):
            assert torch.equal(c.dequantize(w.tensors, torch.zeros(spec.n, spec.k, dtype=x.dtype)), mm.dequantize(w))


@pytest.mark.parametrize("level", LEVELS)
def test_levels_of_processors(folder: Path, level: str, tmp_path: Path) -> None:
    """The code for lesser processors, in a folder that has no other."""
    other = copytree(folder, tmp_path / "folder")
    manifest = read_manifest(other)
    for matmul in manifest["matmuls"]:
        matmul["targets"] = [target for target in matmul["targets"] if target["target"] == level]
    seal(other, manifest)
    for name in ("u4", "mx"):
        try:
            mm = CpuMatmul(SPECS[name], level)
        except TargetError as error:
            pytest.skip(str(error))
        x, tensors = random_inputs(SPECS[name], 20)
        w = pack(SPECS[name], **tensors)
        with CMatmul(other, name) as c:
            assert c.target == level
            for m in (2, 20):
                y = torch.full((m, SPECS[name].outputs), torch.nan, dtype=TORCH[SPECS[name].out_dtype])
                assert torch.equal(c.multiply(x[:m], w.tensors, y), mm.matmul(x[:m], w.tensors))


def test_many_rows_go_in_slabs(folder: Path) -> None:
    """1100 rows take two calls of the program."""
    spec = SPECS["nf4"]
    x, tensors = random_inputs(spec, 1100)
    w, others = pack(spec, **tensors), random_residual(spec, 1100)
    expected = lowbit.compile(spec, "cpu")(x, w, **others)
    with CMatmul(folder, "nf4") as c:
        y = c.multiply(x, w.tensors, torch.zeros_like(expected), list(others.values()))
    assert torch.equal(y, expected)
