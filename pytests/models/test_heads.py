"""Heads that a checkpoint lacks, as those of a classifier that is to be trained: they stay dense and start anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lowbit
from lowbit import LowbitConfig, LowbitLinear, QuantizeError

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
LLAMA = {**SMALL, "num_key_value_heads": 2, "vocab_size": 32, "dtype": "bfloat16"}
VIT = {**SMALL, "image_size": 16, "patch_size": 8, "dtype": "bfloat16"}
CASES: dict[str, tuple[Any, str, str, list[str]]] = {
    "tokens": (lambda: transformers.LlamaConfig(**LLAMA), "CausalLM", "TokenClassification", ["score"]),
    "tied": (
        lambda: transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True),
        *("CausalLM", "TokenClassification", ["score"]),
    ),
    "sequence": (
        lambda: transformers.BertConfig(**SMALL, vocab_size=32, dtype="bfloat16"),
        *("MaskedLM", "SequenceClassification", ["bert.pooler.dense", "classifier"]),
    ),
    "images": (lambda: transformers.ViTConfig(**VIT), "MaskedImageModeling", "ImageClassification", ["classifier"]),
}
CONFIG = LowbitConfig("u4", group_size=32)


def auto(name: str) -> Any:
    return getattr(transformers, f"AutoModelFor{name}")


@pytest.mark.parametrize("case", CASES)
def test_a_head_that_the_checkpoint_lacks(case: str, tmp_path: Path) -> None:
    config, base, task, heads = CASES[case]
    torch.manual_seed(0)
    auto(base).from_config(config()).save_pretrained(tmp_path / "dense")
    model = auto(task).from_pretrained(tmp_path / "dense", quantization_config=CONFIG, num_labels=3)
    check_heads(model, heads)
    model.save_pretrained(tmp_path / "ours")
    again = auto(task).from_pretrained(tmp_path / "ours")
    assert all(torch.equal(again.get_submodule(name).weight, model.get_submodule(name).weight) for name in heads)
    saved = auto(base).from_pretrained(tmp_path / "dense", quantization_config=CONFIG)
    saved.save_pretrained(tmp_path / "base")
    check_heads(auto(task).from_pretrained(tmp_path / "base", num_labels=3), heads)


def check_heads(model: Any, heads: list[str]) -> None:
    assert sum(isinstance(module, LowbitLinear) for module in model.modules()) >= 6
    for name in heads:
        head = model.get_submodule(name)
        assert isinstance(head, nn.Linear) and head.weight.isfinite().all() and head.weight.std() > 0
        assert model.hf_quantizer.stays_dense[name] == "the checkpoint has no such layer; it is initialized anew"


def test_a_layer_of_which_a_part_is_there(tmp_path: Path) -> None:
    """It is damaged, or packed in a way that lowbit does not know, and no head."""
    transformers.AutoModelForCausalLM.from_config(CASES["tokens"][0]()).save_pretrained(tmp_path)
    path, layer = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj"
    state = load_file(path)
    state[f"{layer}.something"] = state.pop(f"{layer}.weight")
    save_file(state, path, {"format": "pt"})
    with pytest.raises(QuantizeError, match=f"{layer}.weight: the checkpoint has no such tensor"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=CONFIG)


def test_adapters_and_a_head_train(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config, base, task, _ = CASES["tokens"]
    auto(base).from_config(config()).save_pretrained(tmp_path)
    model = auto(task).from_pretrained(tmp_path, quantization_config=CONFIG, num_labels=3)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["score"], task_type="TOKEN_CLS")
    model = peft.get_peft_model(model, lora)
    tokens = torch.arange(1, 9).view(2, 4)
    model(input_ids=tokens, labels=tokens % 3).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    assert any("score" in name for name in trained) and any("lora_A" in name for name in trained)
    assert lowbit.LowbitLinear in map(type, model.modules())
