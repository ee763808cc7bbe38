"""Weights that have a name: what `MatmulSpec.preset` makes of it, and that these weights run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit.dialect.errors import SpecError
from lowbit.dialect.presets import PRESETS
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib import reference
from lowbit.pylib.checkpoints.gguf.file import TYPES
from lowbit.pylib.weights.packed import pack

NAMES = {name.upper() for name in PRESETS}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "formats.md"


def row(name: str) -> str:
    """Returns the row of the table in docs/formats.md: outliers come on top of the bits."""
    spec = MatmulSpec.preset(name, 4096, 4096)
    level = (
        f" codes, {spec.bilevel.rows} x {spec.bilevel.groups} share one in {spec.bilevel.scale}" if spec.bilevel else ""
    )
    more = [
        text
        for field, text in (("row_scales", "row scales"), ("outliers", "outliers"), ("permuted", "a permutation"))
        if getattr(spec, field)
    ]
    cells = (
        f"`{name}`",
        f"`{spec.weight}`",
        spec.group_size or "row",
        f"{spec.scale}{level}",
        ", ".join([spec.zeros, *more]),
    )
    return f"| {' | '.join(map(str, cells))} | {spec.bytes * 8 / (spec.n * spec.k):.2f} |"


def test_the_page_has_the_table() -> None:
    """Fix: put these rows into docs/formats.md, below the heading "Weights that have a name"."""
    rows = [row(name) for name in PRESETS]
    assert "\n".join(rows) in PAGE.read_text(), "\n".join(rows)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_runs(name: str) -> None:
    spec = MatmulSpec.preset(name, 32, 512, out="f32")
    x, tensors = reference.random_inputs(spec, 3)
    y = lowbit.compile(spec, "cpu")(x, pack(spec, **tensors))
    given = [tensors.pop(key) for key in ("codes", "scales")] + [tensors.pop(key, None) for key in ("zeros", "bias")]
    right, error = (f(spec, x, *given, **tensors) for f in (reference.matmul, reference.tolerance))
    assert reference.agrees(y, right, error).all()


@pytest.mark.parametrize("kind", [kind for kind in TYPES.values() if kind.name in NAMES], ids=lambda kind: kind.name)
def test_presets_are_what_files_hold(kind: object) -> None:
    """The spec of an imported block of GGUF is that of the preset of its name."""
    name, columns, nbytes, read = (getattr(kind, field) for field in ("name", "columns", "nbytes", "read"))
    data = torch.zeros(1, nbytes, dtype=torch.uint8)
    found = read(data).spec("f16")
    preset = MatmulSpec.preset(name, 1, columns)
    same = {"weight", "zeros", "scale", "table", "bilevel", "row_scales"}
    if name in ("TQ1_0", "TQ2_0"):  # a block of zero bytes
        same -= {"zeros", "weight"}
    if name == "NVFP4":
        same -= {"row_scales"}  # in GGUF the factor of a matrix is a tensor of its own
    assert {f: getattr(found, f) for f in same} == {f: getattr(preset, f) for f in same}
    assert (found.group_size or columns) == (preset.group_size or columns)


def test_fields_beside_a_name() -> None:
    assert MatmulSpec.preset("GPTQ4", 64, 256, group_size=64, act="bf16") == MatmulSpec(
        64, 256, "u4", 64, "int", act="bf16"
    )
    assert MatmulSpec.preset("Q4-K", 64, 256) == MatmulSpec.preset("q4_k", 64, 256)


def test_names_that_are_none() -> None:
    with pytest.raises(SpecError, match=re.escape("preset='q4_kk' must be one of 'mxfp4'") + ".*did you mean 'q4_k'"):
        MatmulSpec.preset("q4_kk", 64, 256)
    with pytest.raises(SpecError, match="did you mean 'mxfp6_e3m2' or 'mxfp6_e2m3'"):
        MatmulSpec.preset("mxfp6", 64, 256)
    with pytest.raises(SpecError, match="preset=4 must be one of"):
        MatmulSpec.preset(4, 64, 256)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="must divide the 9 groups of a row"):
        MatmulSpec.preset("q4_k", 64, 288)
