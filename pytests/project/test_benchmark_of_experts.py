"""`benchmarks experts` without a GPU: what is timed, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_up_results import ENVIRONMENT
from torch import Tensor, nn

from benchmarks import experts
from benchmarks.experts import MXFP4, U4, Block, bytes_of_expert, experts_hit, low_bit, measure, table, write
from benchmarks.peers.experts import ExpertsCall, ExpertsPeer, Marlin, gptq
from lowbit import LowbitLinear, QuantConfig, SpecError
from lowbit.pylib.tune.timing import Timing

transformers = pytest.importorskip("transformers")
U4_G16 = QuantConfig("u4", 16, clip="max")
RECORD = {
    "block": "mixtral-8x7b",
    "tokens": 16,
    "hit": 7.875,
    "floor_us": 160.0,
    "lowbit_us": 200.0,
    "bf16_us": 500.0,
    "lowbit_eager_us": 400.0,
    "bf16_eager_us": 600.0,
    "lowbit_error": 0.1,
}


class Same(ExpertsPeer):
    """A peer without kernels of its own."""

    def call(self, dense: nn.Module, group: int, top_k: int, tokens: Sequence[int]) -> ExpertsCall:
        assert (group, top_k, tuple(tokens)) == (16, 2, (1, 70))

        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
            return dense(x, ids.long(), weights.to(x.dtype))

        return ExpertsCall(run)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss"])
def test_experts_are_quantized(kind: str) -> None:
    torch.manual_seed(0)
    block = Block(64, 48, 4, 2, U4_G16, kind)
    dense, (x, ids, weights) = block.dense("cpu"), block.inputs(70, "cpu")[0]
    assert all(parameter.dtype == torch.bfloat16 for parameter in dense.parameters())
    packed = low_bit(dense, block.config)
    exact = dense(x, ids, weights.bfloat16())
    assert float((packed(x, ids, weights.bfloat16()) - exact).norm() / exact.norm()) < 0.2
    layers = [layers[0] for layers in (packed.gate_up, packed.down)]
    assert bytes_of_expert(packed) == sum(layer.packed.nbytes for layer in layers if isinstance(layer, LowbitLinear))


def test_each_token_goes_to_different_experts() -> None:
    inputs = Block(64, 48, 4, 2).inputs(1, "cpu")
    assert experts_hit(inputs) == 2
    assert len({tuple(ids[0].tolist()) for _, ids, _ in inputs}) > 2
    assert all(weights.shape == (1, 2) and weights.sum() == pytest.approx(1) for *_, weights in inputs)


def test_all_kinds_get_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(experts.BLOCKS, "small", Block(64, 48, 4, 2, U4_G16))
    monkeypatch.setattr(experts, "EXPERT_PEERS", {"marlin": Marlin(), "humming": Same()})
    monkeypatch.setattr(experts, "floor", lambda size: SimpleNamespace(time=Timing(1.0, 1.0, 1.0)))
    monkeypatch.setattr(experts, "graph_time", lambda calls: Timing(float(len(calls)), 1.0, 1.0))
    monkeypatch.setattr(experts, "eager_time", lambda calls, x: 7.0)
    log: list[str] = []
    one, many = measure("small", [1, 70], log.append, peers=["marlin", "humming"], device="cpu")
    assert (one["hit"], many["hit"]) == (2, 4)
    for kind in ("bf16", "lowbit", "humming"):
        assert (one[f"{kind}_us"], many[f"{kind}_us"], one[f"{kind}_eager_us"]) == (experts.CALLS, 1, 7)
    assert one["humming_error"] < 0.01 < one["lowbit_error"] < 0.2
    assert one["marlin_us"] is None and any(line.startswith("marlin failed: ") for line in log)  # it needs vLLM


def test_a_table_has_a_row_for_each_measurement() -> None:
    head, row, other = table([RECORD, {**RECORD, "marlin_us": 400.0, "lowbit_us": None}]).splitlines()
    assert head.split()[-8:] == ["bf16", "ratio", "marlin", "ratio", "lowbit", "eager", "bf16", "eager"]
    assert row.split() == ["mixtral-8x7b,", "16", "7.9", "160.0", "200.0", "500.0", "2.50", "-", "-", "400.0", "600.0"]
    assert other.split()[4:8] == ["-", "500.0", "-", "400.0"]


def test_results_have_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "environment", lambda commit: ENVIRONMENT)
    write([RECORD], tmp_path / "experts.json", None)
    assert json.loads((tmp_path / "experts.json").read_text()) == {"environment": ENVIRONMENT, "measurements": [RECORD]}


def test_gptq_packs_codes_around_8() -> None:
    weight = torch.linspace(-7, 7, 64).reshape(2, 32).bfloat16()
    packed, scales = gptq(weight, 16)
    codes = torch.stack([packed >> shift & 15 for shift in range(0, 32, 4)], 1).reshape(32, 2) - 8
    assert packed.shape == (4, 2) and scales.shape == (2, 2)
    rounded = (codes * scales.repeat_interleave(16, 0).float()).T
    assert float((rounded - weight.float()).abs().max()) <= 0.51 * float(scales.max())


@pytest.mark.parametrize("config", [MXFP4, QuantConfig("u3", 16), QuantConfig("u4", None)])
def test_peers_have_4_bits_in_groups_only(config: Any) -> None:
    with pytest.raises(SpecError, match="Marlin is measured with u4"):
        Marlin().prepare(Block(64, 48, 4, 2, U4).dense("cpu"), config, 2, [1])
