"""Checkpoints of other libraries in transformers: imported without loss, run in our kernels, saved as our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lowbit
from lowbit import CheckpointError, LowbitConfig, LowbitExperts, LowbitLinear, SpecError

transformers = pytest.importorskip("transformers")

FIXTURES = Path(__file__).parents[1] / "fixtures/checkpoints"
MODULE = "model.layers.0.mlp.up_proj"
TOKENS = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(0))
NAMES = (
    *("gptq-2", "gptq-4-act-order", "gptq-8", "gptq-v2-3", "awq", "bnb-fp4", "bnb-nf4-nested", "bnb-nf4-nested-wide"),
    *("bnb-int8", "ct-pack-4-asym", "ct-int8-asym", "ct-fp8", "ct-fp8-block", "ct-mxfp4", "ct-mxfp6", "ct-nvfp4"),
    *("fp8-block", "fp8-tensor", "hqq-3", "hqq-4", "torchao-int4", "torchao-int8", "torchao-float8"),
    *("spqr-csr", "spqr-ptcsr", "spqr-dense"),
)


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def loaded(path: Path, **arguments: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, **arguments)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(TOKENS).logits


def llama(name: str, folder: Path) -> Path:
    """Writes a small Llama, one layer of which is that of another library's checkpoint."""
    tensors = load_file(FIXTURES / name / "model.safetensors")
    written = json.loads((FIXTURES / name / "config.json").read_text())
    packed = lowbit.open_checkpoint(FIXTURES / name).load(MODULE, "bf16")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=packed.spec.k,
        intermediate_size=packed.spec.n,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        mlp_bias=packed.spec.bias,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    dense = transformers.AutoModelForCausalLM.from_config(config)
    dense.save_pretrained(folder)
    state = {key: t for key, t in load_file(folder / "model.safetensors").items() if not key.startswith(MODULE)}
    save_file(state | tensors, folder / "model.safetensors", {"format": "pt"})
    about = json.loads((folder / "config.json").read_text())
    about["quantization_config"] = written["quantization_config"]
    (folder / "config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_imported_without_loss_and_saved_as_our_own(name: str, tmp_path: Path) -> None:
    path = llama(name, tmp_path / "theirs")
    model = loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))
    layer = model.get_submodule(MODULE)
    expected = lowbit.open_checkpoint(FIXTURES / name).load(MODULE, "bf16")
    assert isinstance(layer, LowbitLinear) and layer.spec == expected.spec
    assert torch.equal(layer.packed.dequantize(), expected.dequantize())
    assert (layer.bias is None) == (expected.bias is None)
    assert layer.bias is None or torch.equal(layer.bias, expected.bias)
    given = logits(model)
    model.save_pretrained(tmp_path / "ours")
    again = loaded(tmp_path / "ours")
    assert again.get_submodule(MODULE).spec == layer.spec and torch.equal(logits(again), given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_bias": False}, f"{MODULE}: it is 32 x 128 with a bias in the checkpoint, but 32 x 128 with no bias"),
        ({"num_hidden_layers": 0}, f"{MODULE} is quantized in the checkpoint, and no linear layer"),
    ],
)
def test_model_that_does_not_fit(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = llama("gptq-v2-3", tmp_path)
    about = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(about | change))
    with pytest.raises(CheckpointError, match=message):
        loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))


@pytest.mark.parametrize(
    ("name", "lost", "kind"),
    [("fp8-block", "weight_scale_inv", "F8"), ("ct-int8", "weight_scale", "I8"), ("gptq-4", "qweight", "I32")],
)
def test_codes_that_lack_a_tensor(name: str, lost: str, kind: str, tmp_path: Path) -> None:
    """One layer of two has lost its scales, or its codes; what is left of it must not be taken for a dense layer."""
    path = llama(name, tmp_path)
    tensors, other = load_file(path / "model.safetensors"), MODULE.replace("up_proj", "gate_proj")
    tensors = {key: t for key, t in tensors.items() if not key.startswith(other)}
    tensors |= {key.replace(MODULE, other): t.clone() for key, t in tensors.items() if key.startswith(MODULE)}
    del tensors[f"{other}.{lost}"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    message = rf"{other}\.\w+ is {kind}.*, of a quantized layer that lacks a tensor: none called \*\..*{lost}"
    with pytest.raises(CheckpointError, match=message):
        loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    with pytest.raises(CheckpointError, match=message):
        lowbit.load_checkpoint(model, path)


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("gptq-4-act-order", "g_idx", "g_idx is missing, though the quantization_config has desc_act=True"),
        ("ct-pack-4-asym", "weight_zero_point", "weight_zero_point is missing, though .* has symmetric=False"),
        ("ct-pack-4", "u_input.weight", "u_input.weight is no tensor of such a layer, and may change its results"),
        ("ct-pack-4", "transform_config", "the quantization_config has transform_config=.*; rotations of what"),
    ],
)
def test_layers_that_the_files_do_not_describe(name: str, key: str, message: str, tmp_path: Path) -> None:
    """A tensor that the configuration requires is gone, or there is more to a layer than its format knows."""
    path = llama(name, tmp_path)
    dense = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    if key == "transform_config":
        about = json.loads((path / "config.json").read_text())
        about["quantization_config"][key] = {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}
        (path / "config.json").write_text(json.dumps(about))
    else:
        tensors = load_file(path / "model.safetensors")
        if tensors.pop(f"{MODULE}.{key}", None) is None:
            tensors[f"{MODULE}.{key}"] = torch.ones(2)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))
    with pytest.raises(CheckpointError, match=message):
        lowbit.load_checkpoint(dense, path)
    with pytest.raises(CheckpointError, match=message):
        lowbit.load_checkpoint(dense, path, ignore=[f"*.{key}"])


def test_a_recipe_is_no_way_to_import(tmp_path: Path) -> None:
    path = llama("awq", tmp_path)
    with pytest.raises(SpecError, match=r"quantized already, by awq: LowbitConfig\(from_checkpoint=True\)"):
        loaded(path, quantization_config=LowbitConfig("u4", 64))
    about = json.loads((path / "config.json").read_text())
    about["quantization_config"]["quant_method"] = "auto-round"
    (path / "config.json").write_text(json.dumps(about))
    with pytest.raises(SpecError, match="quantized already, by auto-round: name the dense model"):
        loaded(path, quantization_config=LowbitConfig("u4", 64))
    with pytest.raises(SpecError, match="drop all other fields"):
        LowbitConfig("u3", from_checkpoint=True)


def test_dense_checkpoint_needs_a_recipe(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(SpecError, match="the checkpoint is dense"):
        loaded(tmp_path, quantization_config=LowbitConfig(from_checkpoint=True))


def test_codes_are_not_taken_for_weights(tmp_path: Path) -> None:
    """transformers ignores what config.json says of a library that it does not know."""
    path = llama("fp8-block", tmp_path)
    about = json.loads((path / "config.json").read_text())
    del about["quantization_config"]
    for written in ({"quantization_config": {"quant_method": "modelopt"}}, {}):
        (path / "config.json").write_text(json.dumps(about | written))
        with pytest.raises(CheckpointError, match=rf"{MODULE}.weight is F8_E4M3: it is quantized already"):
            loaded(path, quantization_config=LowbitConfig("u4", None))
        with pytest.raises(SpecError, match="names a library that transformers does not know"):
            loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """A matrix of all experts in MXFP4, with a bias, becomes a layer for each expert."""
    config = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        dtype="bfloat16",
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    experts = "model.layers.0.mlp.experts"
    state = load_file(tmp_path / "model.safetensors")
    expected = {}
    for matrix, (n, k) in {"gate_up_proj": (64, 64), "down_proj": (64, 32)}.items():
        del state[f"{experts}.{matrix}"]
        state[f"{experts}.{matrix}_blocks"] = torch.randint(0, 256, (2, n, k // 32, 16), dtype=torch.uint8)
        state[f"{experts}.{matrix}_scales"] = torch.randint(118, 122, (2, n, k // 32), dtype=torch.uint8)
        theirs = {key: state[f"{experts}.{matrix}_{key}"] for key in ("blocks", "scales", "bias")}
        expected[matrix] = lowbit.import_experts({"quant_method": "mxfp4"}, theirs, "bf16")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | {"quantization_config": {"quant_method": "mxfp4"}}))
    model = loaded(tmp_path, quantization_config=LowbitConfig(from_checkpoint=True))
    found = model.get_submodule(experts)
    assert isinstance(found, LowbitExperts)
    for layers, weights in zip((found.gate_up, found.down), expected.values()):
        for layer, weight in zip(layers, weights, strict=True):
            assert all(torch.equal(layer.packed[name], weight[name]) for name in weight)
    given = logits(model)
    model.save_pretrained(tmp_path / "ours")
    assert given.isfinite().all() and torch.equal(logits(loaded(tmp_path / "ours")), given)
