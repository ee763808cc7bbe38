"""Checkpoints of other libraries in transformers: imported without loss, run in our kernels, saved as our own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lowbit
from lowbit import CheckpointError, LowbitConfig, LowbitEmbedding, LowbitExperts, LowbitLinear, SpecError
from lowbit.pylib.nn.embedding import TiedLinear
from lowbit.pylib.nn.rotated import RotatedLinear

transformers = pytest.importorskip("transformers")

FIXTURES = Path(__file__).parents[1] / "fixtures/checkpoints"
MODULE = "model.layers.0.mlp.up_proj"
TOKENS = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(0))
NAMES = (
    *("gptq-2", "gptq-4-act-order", "gptq-8", "gptq-v2-3", "awq", "bnb-fp4", "bnb-nf4-nested", "bnb-nf4-nested-wide"),
    *("bnb-int8", "ct-pack-4-asym", "ct-int8-asym", "ct-fp8", "ct-fp8-block", "ct-mxfp4", "ct-mxfp6", "ct-nvfp4"),
    *("fp8-block", "fp8-tensor", "hqq-3", "hqq-4", "torchao-int4", "torchao-int8", "torchao-float8"),
    *("spqr-csr", "spqr-ptcsr", "spqr-dense", "auto-round-4", "auto-round-awq", "modelopt-fp8", "modelopt-nvfp4"),
    *("mlx-4", "bitnet", "fbgemm-fp8", "metal-4", "gemma-4", "gemma-8"),
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
        ({"mlp_bias": False}, f"{MODULE} is 32 x 128 with a bias, but 32 x 128 with no bias in the model"),
        ({"num_hidden_layers": 0}, f"{MODULE} is quantized, but the model has no such layer"),
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
        ("ct-pack-4", "transform_config", "has transform_config=.*; R4 has type=None; what can be applied is"),
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
    about["quantization_config"]["quant_method"] = "higgs"
    (path / "config.json").write_text(json.dumps(about))
    with pytest.raises(SpecError, match="quantized already, by higgs: name the dense model"):
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
    (path / "config.json").write_text(json.dumps(about))
    for config in (LowbitConfig("u4", None), LowbitConfig(from_checkpoint=True)):
        with pytest.raises(CheckpointError, match=rf"{MODULE}.weight is F8_E4M3: it is quantized already"):
            loaded(path, quantization_config=config)
    (path / "config.json").write_text(json.dumps(about | {"quantization_config": {"quant_method": "exl9"}}))
    with pytest.raises(SpecError, match="the checkpoint is quantized already, by exl9: name the dense model"):
        loaded(path, quantization_config=LowbitConfig("u4", None))
    with pytest.raises(CheckpointError, match=r"config.json: quant_method='exl9' can't be imported; what can is"):
        loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))


PLACES: dict[str, Any] = {
    "a part": lambda entries: {"llm_config": {"quantization_config": entries}},
    "a part of a part": lambda entries: {"thinker_config": {"llm_config": {"quantization_config": entries}}},
    "two parts": lambda entries: {name: {"quantization_config": entries} for name in ("llm_config", "audio_config")},
    "quant_config.json": lambda entries: {},
    "quantize_config.json": lambda entries: {},
    "quantize_config.json of AWQ": lambda entries: {},
    "quantization_config.json": lambda entries: {},
    "hf_quant_config.json": lambda entries: {},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_description_in_another_place(place: str, tmp_path: Path) -> None:
    """config.json may describe the parts of a model, and libraries have files of their own."""
    names = {"quantize_config.json": "gptq-4", "hf_quant_config.json": "modelopt-nvfp4"}
    name = (names | {"quantization_config.json": "auto-round-4"}).get(place, "awq")
    path = llama(name, tmp_path)
    about = json.loads((path / "config.json").read_text())
    entries = about.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(about | PLACES[place](entries)))
    if place in ("quant_config.json", "quantize_config.json of AWQ"):  # as AWQ had it at first
        del entries["quant_method"]
        early = {"w_bit": entries.pop("bits"), "q_group_size": entries.pop("group_size"), **entries}
        (path / place.removesuffix(" of AWQ")).write_text(json.dumps(early))
    elif place in ("quantize_config.json", "quantization_config.json"):
        (path / place).write_text(json.dumps(entries))
    elif place == "hf_quant_config.json":
        written = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"], "kv_cache_quant_algo": None}
        (path / place).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": written}))
    expected = lowbit.open_checkpoint(FIXTURES / name).load(MODULE, "bf16").dequantize()
    assert torch.equal(lowbit.open_checkpoint(path).load(MODULE, "bf16").dequantize(), expected)
    model = loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))
    assert torch.equal(model.get_submodule(MODULE).packed.dequantize(), expected)
    empty = transformers.LlamaForCausalLM(model.config)
    lowbit.load_checkpoint(empty, path, act="bf16")
    assert torch.equal(empty.get_submodule(MODULE).packed.dequantize(), expected)
    with pytest.raises(SpecError, match="quantized already, by"):
        loaded(path, quantization_config=LowbitConfig("u4", None))
    model.save_pretrained(path / "ours")
    saved = (path / "ours" / "config.json").read_text()
    assert json.loads(saved)["quantization_config"]["quant_method"] == "lowbit" and saved.count("quant_method") == 1


def test_descriptions_that_differ(tmp_path: Path) -> None:
    path = llama("awq", tmp_path)
    parts = {name: {"quantization_config": {"quant_method": name}} for name in ("a_config", "b_config")}
    (path / "config.json").write_text(json.dumps(parts))
    with pytest.raises(CheckpointError, match=r"config.json has several quantization_configs that differ"):
        lowbit.open_checkpoint(path)


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


def int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes of 8 bits with a scale for each row."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scales).round().to(torch.int8), scales


@pytest.mark.parametrize("is_tied", [False, True])
def test_quantized_embeddings(is_tied: bool, tmp_path: Path) -> None:
    """Both ways of loading read an embedding that another library quantized, and a head that is tied to it."""
    path = llama("ct-int8", tmp_path)
    state, embedding = load_file(path / "model.safetensors"), "model.embed_tokens"
    codes, scales = int8(state.pop(f"{embedding}.weight"))
    state |= {f"{embedding}.weight": codes, f"{embedding}.weight_scale": scales.bfloat16()}
    if is_tied:
        del state["lm_head.weight"]
    save_file(state, path / "model.safetensors", {"format": "pt"})
    about = json.loads((path / "config.json").read_text())
    group = about["quantization_config"]["config_groups"]["group_0"]
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    about["quantization_config"]["config_groups"]["1"] = {**group, "targets": ["Embedding"], "weights": weights}
    (path / "config.json").write_text(json.dumps(about | {"tie_word_embeddings": is_tied}))
    model = loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))
    assert isinstance(model.model.embed_tokens, LowbitEmbedding)
    expected = codes.float() * scales.bfloat16().float()
    assert torch.equal(model.model.embed_tokens.packed.dequantize(), expected)
    assert isinstance(model.lm_head, TiedLinear) == is_tied
    with torch.device("meta"):
        empty = empty_like(model)
    lowbit.load_checkpoint(empty, path, act="bf16")
    given = logits(model)
    assert given.isfinite().all() and torch.equal(logits(empty), given)
    model.save_pretrained(path / "ours")
    assert torch.equal(logits(loaded(path / "ours")), given)


def empty_like(model: Any) -> Any:
    """Returns a dense model of the same sizes."""
    entries = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    config = type(model.config)(**entries)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def test_scales_of_caches_and_activations_are_left_out(tmp_path: Path) -> None:
    """They are none of the model's, and of 8-bit activations, which stay in 16 bits."""
    path = llama("fp8-block", tmp_path)
    state, layer = load_file(path / "model.safetensors"), "model.layers.0"
    extra = (f"{layer}.self_attn.k_scale", f"{layer}.self_attn.v_scale", f"{MODULE}.activation_scale")
    state |= {name: torch.ones(()) for name in extra} | {f"{layer}.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    save_file(state, path / "model.safetensors", {"format": "pt"})
    model = loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))
    empty = empty_like(model)
    lowbit.load_checkpoint(empty, path, act="bf16")
    assert torch.equal(empty.get_submodule(MODULE).packed.dequantize(), model.get_submodule(MODULE).packed.dequantize())


def test_files_of_mlx(tmp_path: Path) -> None:
    """They name no method, and have a quantized embedding."""
    path, embedding = llama("mlx-4", tmp_path), "model.embed_tokens"
    state = load_file(path / "model.safetensors")
    state |= {
        f"{embedding}.weight": torch.randint(0, 1 << 32, (64, 16)).to(torch.uint32),
        f"{embedding}.scales": torch.rand(64, 2).bfloat16() / 16,
        f"{embedding}.biases": -torch.rand(64, 2).bfloat16() / 2,
    }
    save_file(state, path / "model.safetensors", {"format": "pt"})
    about = json.loads((path / "config.json").read_text())
    entries = {"bits": 4, "group_size": 64, MODULE: {"bits": 4, "group_size": 64}}
    about |= {"quantization": entries, "quantization_config": entries}
    (path / "config.json").write_text(json.dumps(about))
    model = loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))
    checkpoint = lowbit.open_checkpoint(path)
    assert set(checkpoint.modules) == {MODULE, embedding}
    assert torch.equal(model.model.embed_tokens.packed.dequantize(), checkpoint.load(embedding, "bf16").dequantize())
    empty = empty_like(model)
    lowbit.load_checkpoint(empty, path, act="bf16")
    assert torch.equal(logits(empty), logits(model))
    with pytest.raises(SpecError, match=r"quantized already: LowbitConfig\(from_checkpoint=True\) imports it"):
        loaded(path, quantization_config=LowbitConfig("u4", 64))
    with pytest.raises(ValueError, match="quant_method"):
        loaded(path)


# -- rotations at each call

ROTATED = FIXTURES.parent / "rotated"
DOWN, Q = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"


def rotated_llama(name: str, folder: Path) -> Path:
    """Writes a small Llama with the three layers of a rotated checkpoint, whose other layers are dense."""
    tensors = load_file(ROTATED / name / "model.safetensors")
    sizes = {"hidden_size": 192, "intermediate_size": 128, "head_dim": 32, "vocab_size": 64, "num_hidden_layers": 1}
    biases = {"attention_bias": True, "mlp_bias": True}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, **biases, dtype="float16", tie_word_embeddings=True)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    layers = (MODULE, DOWN, Q)
    dense = {key: t for key, t in load_file(folder / "model.safetensors").items() if not key.startswith(layers)}
    save_file(dense | tensors, folder / "model.safetensors", {"format": "pt"})
    written = json.loads((ROTATED / name / "config.json").read_text())
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"quantization_config": written["quantization_config"]}))
    return folder


@pytest.mark.parametrize(
    ("name", "rotated"), [("rotated-hadamard", {DOWN}), ("rotated-output", {Q}), ("rotated-permuted", {DOWN})]
)
def test_rotated_layers(name: str, rotated: set[str], tmp_path: Path) -> None:
    path, expected = rotated_llama(name, tmp_path / "theirs"), load_file(ROTATED / name / "expected.safetensors")
    model = loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))
    for layer in (MODULE, DOWN, Q):
        module = model.get_submodule(layer)
        assert isinstance(module, RotatedLinear if layer in rotated else LowbitLinear)
        y = expected[f"{layer}.y"]
        assert float((module(expected[f"{layer}.x"]) - y).norm() / y.norm()) < 5e-3
    given = logits(model)
    model.save_pretrained(tmp_path / "ours")
    assert torch.equal(logits(loaded(tmp_path / "ours")), given)
    again = empty_like(model)
    lowbit.load_checkpoint(again, tmp_path / "ours")
    assert torch.equal(logits(again), given)
    again = empty_like(model)
    lowbit.load_checkpoint(again, path)
    assert torch.equal(logits(again), given)


def test_dense_layers_that_are_to_be_rotated(tmp_path: Path) -> None:
    path = rotated_llama("rotated-random", tmp_path)
    with pytest.raises(CheckpointError, match="is a Linear that is not quantized, and the transform_config"):
        loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))


def test_transformers_reads_one_tensor_of_each_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are read by lowbit, a layer at a time, and not by threads that are ahead of it."""
    from transformers import core_model_loading

    path, read = llama("gptq-4-act-order", tmp_path), list[tuple[int, ...]]()
    materialize = core_model_loading.spawn_materialize

    def spy(pool: Any, tensor: Any, *rest: Any, **more: Any) -> Any:
        read.append(tuple(tensor.get_shape()))
        return materialize(pool, tensor, *rest, **more)

    monkeypatch.setattr(core_model_loading, "spawn_materialize", spy)
    loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))
    shapes = {name: tuple(t.shape) for name, t in load_file(path / "model.safetensors").items()}
    dense = [shape for name, shape in shapes.items() if MODULE not in name]
    smallest = min((shape for name, shape in shapes.items() if MODULE in name), key=math.prod)
    assert sorted(read) == sorted([*dense, smallest])


def test_gemma_of_several_widths(tmp_path: Path) -> None:
    """Layers of 2 bits and of 4, told apart by the columns of the model, and an embedding of 2 that the head shares."""
    gemma = pytest.importorskip("transformers.integrations.gemma_quant")
    path = llama("gemma-4", tmp_path)
    state, dense = load_file(path / "model.safetensors"), {}
    n, k = state["model.embed_tokens.weight"].shape
    table = gemma.QuantizedEmbedding(n, k, torch.float32, num_bits=2)
    low = gemma.QuantizedLinear(k, 24, num_bits=2)
    for packed in (table.embedding_quantized, low.weight):
        packed.data = torch.randint(0, 256, packed.shape, dtype=torch.uint8)
    for scale in (table.embedding_scale, low.weight_scale):
        scale.data = torch.rand(scale.shape) / 50 + 0.01
    gate = MODULE.replace("up_proj", "gate_proj")
    dense = {"model.embed_tokens": table.weight, gate: low._dequantize_weights()}
    for name in ("model.embed_tokens.weight", "lm_head.weight", f"{gate}.weight"):
        state.pop(name, None)
    state |= {f"model.embed_tokens.{name}": t.detach() for name, t in table.state_dict().items()}
    state |= {f"{gate}.{name}": t.detach() for name, t in low.state_dict().items() if name != "bias"}
    save_file({name: t.clone() for name, t in state.items()}, path / "model.safetensors", {"format": "pt"})
    about = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": True, "mlp_bias": True}
    about["quantization_config"]["module_quant_configs"] = {"gate_proj$": {"num_bits": 2}, "embed": {"num_bits": 2}}
    (path / "config.json").write_text(json.dumps(about))
    state[f"{gate}.bias"] = torch.zeros(24)
    save_file({name: t.clone() for name, t in state.items()}, path / "model.safetensors", {"format": "pt"})
    model = loaded(path, quantization_config=LowbitConfig(from_checkpoint=True))
    assert isinstance(model.model.embed_tokens, LowbitEmbedding) and isinstance(model.lm_head, TiedLinear)
    assert model.get_submodule(gate).spec.weight == "i2" and model.get_submodule(MODULE).spec.weight == "i4"
    for name, expected in dense.items():
        assert torch.equal(model.get_submodule(name).packed.dequantize(), expected.float()), name
    with pytest.raises(CheckpointError, match="has codes of 2 and 4 bits; give the shape of the weight"):
        lowbit.open_checkpoint(path).load(gate, "bf16")
