"""LoRA beside low-bit layers: PEFT finds the layer of ours, which says what can't be done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit import LowbitLinear, QuantConfig, QuantizeError, SpecError

peft = pytest.importorskip("peft")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = LowbitLinear.from_linear(nn.Linear(64, 32).bfloat16(), QuantConfig("u4", 32))
        self.dense = nn.Linear(32, 8).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(torch.relu(self.first(x)))


def adapted(**options: Any) -> Any:
    return peft.get_peft_model(Model(), peft.LoraConfig(r=4, target_modules=["first", "dense"], **options))


@pytest.mark.parametrize("init", [True, "gaussian"])
def test_adapters_train_and_the_weight_stays(init: bool | str) -> None:
    model = adapted(init_lora_weights=init)
    layer, x = model.base_model.model.first, torch.randn(16, 64).bfloat16()
    codes, expected = layer.base_layer.codes.clone(), Model()(x)
    assert type(layer).__name__ == "LowbitLora" and torch.equal(model(x), expected)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert layer.lora_A["default"].weight.grad.abs().max() > 0 and layer.lora_B["default"].weight.abs().max() > 0
    assert not torch.equal(model(x), expected) and torch.equal(layer.base_layer.codes, codes)
    with model.disable_adapter():
        assert torch.equal(model(x), expected)


def test_saved_and_loaded(tmp_path: Path) -> None:
    model, x = adapted(init_lora_weights=False), torch.randn(3, 64).bfloat16()
    model.save_pretrained(tmp_path)
    assert torch.equal(peft.PeftModel.from_pretrained(Model(), tmp_path)(x), model.eval()(x))


@pytest.mark.parametrize("call", ["merge_adapter", "merge_and_unload"])
def test_merging_is_refused(call: str) -> None:
    model, x = adapted(init_lora_weights=False), torch.randn(3, 64).bfloat16()
    expected = model(x)
    with pytest.raises(QuantizeError, match="keep it beside the layer"):
        getattr(model, call)()
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("options", [{"init_lora_weights": "pissa"}, {"use_dora": True}])
def test_adapters_that_need_the_dense_weight_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="weight"):
        adapted(**options)


def test_adapters_stay_dense() -> None:
    """Those of a dense model that is quantized afterwards, in its type, too."""
    options = {"target_modules": ["0"], "r": 32}
    dense = peft.get_peft_model(
        nn.Sequential(nn.Linear(64, 64).bfloat16()), peft.LoraConfig(**options), autocast_adapter_dtype=False
    )
    report = lowbit.quantize_(dense, QuantConfig("u4", 32), progress=False)
    assert [row.name.rpartition("0.")[2] for row in report.quantized] == ["base_layer"]
    assert [row.reason[:29] for row in report.dense] == ["it is of an adapter of PEFT, "] * 2
    x = torch.randn(3, 64).bfloat16()
    dense(x).sum().backward()
    assert dense.base_model.model[0].lora_B["default"].weight.grad.abs().max() > 0


def test_dense_models_are_as_ever() -> None:
    model = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8)), peft.LoraConfig(target_modules=["0"], use_dora=True))
    assert type(model.base_model.model[0]).__module__.startswith("peft.")
    model.merge_and_unload()


@pytest.mark.parametrize("order", ["lowbit, peft", "peft, lowbit"])
def test_registered_in_either_order(order: str, repo: Path) -> None:
    code = f"import {order}\nassert lowbit.LowbitLinear in peft.LoraConfig()._custom_modules"
    subprocess.run([sys.executable, "-c", code], cwd=repo, check=True)


@pytest.mark.parametrize("called", [False, True])
def test_adapters_of_experts(called: bool) -> None:
    """Also of experts whose weights a call has stacked, with rows in another order."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).bfloat16()
    lowbit.quantize_(model, QuantConfig("u4", 32, clip="max"), progress=False)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        before = model(tokens).logits if called else None
    names = [f"experts.{matrix}.{expert}" for matrix in ("gate_up", "down") for expert in range(2)]
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names))
    assert "2 experts of u4[128, 64]" in str(model)
    if before is not None:
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits, before, rtol=0.02, atol=0.02)
    model(tokens, labels=tokens).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if "lora_B" in name}
    assert len(gradients) == 4 and all(bool(grad.any()) for grad in gradients.values())


def test_experts_take_no_adapter_as_a_whole() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).bfloat16()
    lowbit.quantize_(model, QuantConfig("u4", 32, clip="max"), progress=False)
    with pytest.raises(SpecError, match=r"take no adapter as a whole; name the layers of each .* 'experts.gate_up.0'"):
        peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["experts"]))
