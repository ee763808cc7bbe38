"""`benchmarks experts` without a GPU: what is timed, and how it is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from made_up_results import ENVIRONMENT

from benchmarks import experts
from benchmarks.experts import Block, bytes_of_expert, experts_hit, low_bit, table, write
from lowbit import LowbitExperts, LowbitLinear, QuantConfig

transformers = pytest.importorskip("transformers")
RECORD = {
    "block": "mixtral-8x7b",
    "tokens": 16,
    "hit": 7.875,
    "floor_us": 160.0,
    "lowbit_us": 200.0,
    "bf16_us": 500.0,
    "lowbit_eager_us": 400.0,
    "bf16_eager_us": 600.0,
    "error": 0.1,
}


@torch.no_grad()
def test_the_experts_of_a_block_are_quantized() -> None:
    torch.manual_seed(0)
    dense = Block(64, 48, 4, 2).dense("cpu")
    packed, x = low_bit(dense, QuantConfig("u4", 16, clip="max")), torch.randn(1, 5, 64).bfloat16()
    assert isinstance(packed.experts, LowbitExperts) and not isinstance(dense.experts, LowbitExperts)
    assert torch.equal(packed.gate(x[0])[2], dense.gate(x[0])[2])  # type: ignore[operator]
    assert float((packed(x) - dense(x)).norm() / dense(x).norm()) < 0.2
    layers = [layers[0] for layers in (packed.experts.gate_up, packed.experts.down)]
    assert bytes_of_expert(packed) == sum(layer.spec.bytes for layer in layers if isinstance(layer, LowbitLinear))
    assert experts_hit(packed, [x[:, :1], x[:, :1]]) == 2


def test_a_table_has_a_row_for_each_measurement() -> None:
    head, row = table([RECORD]).splitlines()
    assert head.split()[-1] == "ratio"
    assert row.split() == ["mixtral-8x7b,", "16", "7.9", "160.0", "200.0", "500.0", "2.50", "400.0", "600.0", "1.50"]


def test_results_have_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "environment", lambda commit: ENVIRONMENT)
    write([RECORD], tmp_path / "experts.json", None)
    assert json.loads((tmp_path / "experts.json").read_text()) == {"environment": ENVIRONMENT, "measurements": [RECORD]}
