"""`benchmarks layer` without a GPU: what is timed, and how it is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_up_results import ENVIRONMENT

from benchmarks import layer
from benchmarks.layer import FusedLayer, Inputs, Layer, Sizes, error, table, table_of_parts, write
from lowbit import MatmulSpec

SPEC = MatmulSpec(16, 64, "u4", act="bf16", group_size=64, zeros="int")
LLAMA, ATTENTION = Sizes(128, 192, 4, 2, 64), Sizes(128, 0, 4, 1, 64, normed=True)
RECORD = {
    "layer": "llama-3.1-8b",
    "batch": 1,
    "context": 512,
    "error": 0.005,
    "bytes": 115_000_000,
    "floor_us": 27.0,
    "fused_us": 36.0,
    "lowbit_us": 54.0,
    "bf16_us": 150.0,
    "alone_us": {"norm": 2.0, "qkv": 4.0},
    "without_us": {"norm": 4.5, "qkv": 2.5},
    "parts_us": 5.5,
}


@torch.no_grad()
@pytest.mark.parametrize("sizes", [LLAMA, ATTENTION], ids=["llama", "attention"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_fused_layer_is_the_plain_one(sizes: Sizes, batch: int) -> None:
    torch.manual_seed(0)
    assert 0 < error(sizes, SPEC, batch, 40, "cpu") < 0.02


@torch.no_grad()
def test_an_error_shows_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "normed_after", lambda x, *_: x)
    assert error(LLAMA, SPEC, 1, 40, "cpu") > 0.1


@torch.no_grad()
@pytest.mark.parametrize(("sizes", "count"), [(LLAMA, 8), (ATTENTION, 5)])
def test_a_layer_is_made_of_its_launches(sizes: Sizes, count: int) -> None:
    given = Inputs.of(sizes, 2, 40, "cpu")
    parts = FusedLayer(Layer(sizes, SPEC, 2, 40, "cpu")).parts(given.x, given.cos, given.sin, given.mask)
    assert len(parts) == count
    assert all(part().shape[:2] == (2, 1) for part in parts.values())


def test_bytes_are_those_of_weights_and_context() -> None:
    found = Layer(LLAMA, SPEC, 3, 40, "cpu")
    weights = sum(replace(SPEC, n=n, k=k).bytes for n, k in LLAMA.linears.values())
    assert found.nbytes == weights + 2 * 3 * 2 * 40 * 64 * 2


def test_tables() -> None:
    head, row = table([RECORD]).splitlines()
    assert head.split()[-1] == "error"
    assert row.split()[-7:] == ["27.0", "36.0", "0.75", "54.0", "0.50", "150.0", "5.0e-03"]
    rows = table_of_parts(RECORD).splitlines()
    assert rows[1].split() == ["norm", "2.00", "1.00"] and rows[-1].split() == ["all", "6.00", "5.50"]


def test_results_have_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "environment", lambda commit: ENVIRONMENT)
    write([RECORD], tmp_path / "layer.json", None)
    assert json.loads((tmp_path / "layer.json").read_text()) == {"environment": ENVIRONMENT, "measurements": [RECORD]}
