"""Buffers that a model computes when it is built, in models that are built on meta and loaded from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import CheckpointError

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 32,
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**SMALL),
    "llama": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2),
    "llama3-rope": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=ROPE),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=32),
}
TOKENS = torch.arange(1, 13).view(2, 6)


@torch.no_grad()
def output(model: Any) -> Tensor:
    return model(TOKENS)[0]


def built(name: str) -> Any:
    return transformers.AutoModel.from_config(CONFIGS[name](), dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_them(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = built(name)
    lowbit.quantize_(model, lowbit.QuantConfig("u8", group_size=32))
    lowbit.save_checkpoint(model, tmp_path)
    with torch.device("meta"):
        empty = built(name)
    lowbit.load_checkpoint(empty, tmp_path)
    assert not [key for key, t in (*empty.named_buffers(), *empty.named_parameters()) if t.is_meta]
    buffers = dict(empty.named_buffers())
    assert all(torch.equal(buffers[key], t) for key, t in model.named_buffers())
    assert torch.equal(output(empty), output(model))


class Positions(nn.Module):
    """A layer that adds numbers to its inputs that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, dtype=torch.bfloat16)
        self.register_buffer("angles", torch.arange(32.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.angles.to(x.dtype))


def test_other_models_must_have_them(tmp_path: Path) -> None:
    model = Positions()
    lowbit.quantize_(model, lowbit.QuantConfig("u8", group_size=32))
    lowbit.save_checkpoint(model, tmp_path)
    with torch.device("meta"):
        empty = Positions()
    with pytest.raises(CheckpointError, match=r"angles: on the meta device.*build the model on the CPU"):
        lowbit.load_checkpoint(empty, tmp_path)
    assert isinstance(empty.linear, nn.Linear)
    empty.angles = torch.arange(32.0)
    lowbit.load_checkpoint(empty, tmp_path)
    x = torch.ones(2, 32, dtype=torch.bfloat16)
    assert torch.equal(empty(x), model(x))


def test_codes_are_not_read_again_after_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state dictionary compares all codes with what was packed, which takes time and memory."""
    model = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    lowbit.quantize_(model, lowbit.QuantConfig("u4", group_size=32), progress=False)
    lowbit.save_checkpoint(model, tmp_path)
    with torch.device("meta"):
        again = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    monkeypatch.setattr(lowbit.LowbitLinear, "_save_to_state_dict", None)
    lowbit.load_checkpoint(again, tmp_path, progress=False)
    assert isinstance(again[0], lowbit.LowbitLinear) and not again[0].codes.is_meta
