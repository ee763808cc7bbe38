"""Mixtures of experts in checkpoints of other libraries, which have a module for each layer of each expert."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lowbit
from lowbit import CheckpointError, LowbitConfig, LowbitExperts

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "dtype": "bfloat16",
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
LLAMA4 = {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 1, "head_dim": 32}
DEEPSEEK = {"n_routed_experts": 3, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MODELS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=3),  # block_sparse_moe.experts.0.w1
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SIZES, head_dim=32, num_experts=3, moe_intermediate_size=32),
    "deepseek": lambda: transformers.DeepseekV3Config(**SIZES, **LATENT, **DEEPSEEK, moe_intermediate_size=32),
    "llama-4": lambda: transformers.Llama4TextConfig(**SIZES, **LLAMA4, num_local_experts=3),  # dense, a stack of all
}
DENSE = ("gate", "router", "lm_head", "embed_tokens")
State = dict[str, Tensor]


def gptq(weight: Tensor, layer: str = "") -> tuple[State, Tensor]:
    """Returns the tensors of a weight in 4 bits with a scale and a zero for 32 columns, and what they stand for."""
    groups = weight.float().unflatten(1, (-1, 32))
    scales = ((groups.amax(2) - groups.amin(2)) / 15).half()
    zeros = (-groups.amin(2) / scales).round().clamp(1, 15)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    dense = ((codes - zeros[..., None]) * scales[..., None].float()).flatten(1)
    words = {"qweight": codes.flatten(1).T, "qzeros": zeros.T - 1}
    state = {"qweight": packed(words["qweight"], 0), "qzeros": packed(words["qzeros"], 1)}
    return state | {"scales": scales.T.contiguous()}, dense


def act_order(weight: Tensor, layer: str) -> tuple[State, Tensor]:
    """Returns the same with groups of columns in an order that all layers of an expert with the same input have, and
    those of no other."""
    owner, _, leaf = layer.rpartition(".")
    name = owner + ("" if leaf in ("gate_proj", "up_proj", "w1", "w3") else leaf)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(sum(name.encode())))
    state, dense = gptq(weight[:, order])
    g_idx = (torch.arange(len(order)) // 32).to(torch.int32)[order.argsort()]
    codes = unpacked(state["qweight"])[order.argsort()]
    return {**state, "qweight": packed(codes, 0), "g_idx": g_idx}, dense[:, order.argsort()]


def unpacked(words: Tensor) -> Tensor:
    """Returns the codes [k, n] of words of eight along the first dimension."""
    return (words[:, None] >> torch.arange(0, 32, 4).view(1, 8, 1) & 15).flatten(0, 1)


def packed(codes: Tensor, dim: int) -> Tensor:
    """Returns words of eight codes that follow each other along a dimension."""
    eight = codes.long().unflatten(dim, (-1, 8))
    shifts = torch.arange(0, 32, 4).view([8 if axis == dim + 1 else 1 for axis in range(3)])
    return (eight << shifts).sum(dim + 1).to(torch.int32)


def fp8(weight: Tensor, layer: str = "") -> tuple[State, Tensor]:
    """Returns the tensors of a weight in f8e4m3 with a scale for 16 x 32 values, and what they stand for."""
    rows, columns = 16, 32
    blocks = weight.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = blocks.abs().amax((1, 3)) / 448
    each = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    codes = (weight.float() / each).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * each


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 32]}
FORMATS: dict[str, tuple[Mapping[str, Any], Callable[[Tensor, str], tuple[State, Tensor]]]] = {
    "gptq": (GPTQ, gptq),
    "gptq-act-order": (GPTQ | {"desc_act": True}, act_order),
    "fp8": (FP8, fp8),
}


def write(name: str, format: str, folder: Path) -> dict[str, Tensor]:
    """Writes a small model as another library would, whose layers but for routers and the output are quantized; returns
    their dense values by their names in the files."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(MODELS[name]()).save_pretrained(folder)
    return rewrite(folder, format)


def rewrite(folder: Path, format: str) -> dict[str, Tensor]:
    """Quantizes a dense model in a folder; returns what `write` does."""
    config, quantized = FORMATS[format]
    state, dense = State(), dict[str, Tensor]()
    for key, t in apart(load_file(folder / "model.safetensors")).items():
        layer, _, last = key.rpartition(".")
        if last == "weight" and t.ndim == 2 and layer.rpartition(".")[2] not in DENSE:
            tensors, dense[layer] = quantized(t, layer)
            state |= {f"{layer}.{short}": value for short, value in tensors.items()}
        else:
            state[key] = t
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config=config)
    return dense


def apart(state: State) -> State:
    """Returns a state in which each expert has layers of its own, in place of stacks [experts, k, n]."""
    found = State()
    for key, t in state.items():
        if t.ndim < 3:
            found[key] = t
            continue
        path, _, last = key.rpartition(".")
        names = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for number, weight in enumerate(t):
            parts = weight.T.contiguous().chunk(len(names))
            found |= {f"{path}.{number}.{name}.weight": part for name, part in zip(names, parts)}
    return found


def edit_config(folder: Path, **changes: Any) -> None:
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | changes))


def edit(folder: Path, change: Callable[[State], State]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(TOKENS).logits


def by_transformers(folder: Path) -> Any:
    config = LowbitConfig(from_checkpoint=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def by_lowbit(folder: Path, name: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]())
    lowbit.load_checkpoint(model, folder, act="bf16")
    return model


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_experts_are_imported_without_loss(name: str, format: str, tmp_path: Path) -> None:
    dense = write(name, format, tmp_path / "theirs")
    model = by_transformers(tmp_path / "theirs")
    inside = {"mixtral": "block_sparse_moe", "llama-4": "feed_forward"}.get(name, "mlp")
    layer = model.model.layers[1]
    experts = (layer.feed_forward if name == "llama-4" else layer.mlp).experts
    assert isinstance(experts, LowbitExperts)
    gate, up, down = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for number in range(3):
        layers = [dense[f"model.layers.1.{inside}.experts.{number}.{leaf}"] for leaf in (gate, up, down)]
        assert torch.equal(experts.gate_up[number].packed.dequantize(), torch.cat(layers[:2]))
        assert torch.equal(experts.down[number].packed.dequantize(), layers[2])
        assert experts.gate_up[number].spec.permuted == ("order" in format)
    expected = logits(model)
    assert torch.equal(logits(by_lowbit(tmp_path / "theirs", name)), expected)
    model.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(logits(again), expected)
    assert torch.equal(logits(by_lowbit(tmp_path / "ours", name)), expected)


def test_experts_of_some_layers_are_dense(tmp_path: Path) -> None:
    dense = write("qwen3-moe", "fp8", tmp_path)
    first = "model.layers.0.mlp.experts."

    def change(state: State) -> State:
        kept = {key: t for key, t in state.items() if not key.startswith(first)}
        return kept | {f"{key}.weight": t.bfloat16() for key, t in dense.items() if key.startswith(first)}

    edit(tmp_path, change)
    layers = by_transformers(tmp_path).model.layers
    assert not isinstance(layers[0].mlp.experts, LowbitExperts) and isinstance(layers[1].mlp.experts, LowbitExperts)
    expected = torch.cat([dense[f"{first}2.{leaf}_proj"] for leaf in ("gate", "up")]).bfloat16()
    assert torch.equal(layers[0].mlp.experts.gate_up_proj[2], expected)
    assert torch.equal(logits(by_lowbit(tmp_path, "qwen3-moe")), logits(by_transformers(tmp_path)))
    edit(tmp_path, lambda state: {key: t for key, t in state.items() if key != f"{first}1.up_proj.weight"})
    with pytest.raises(CheckpointError, match=f"{first}.* and others can't be converted"):
        by_lowbit(tmp_path, "qwen3-moe")


@pytest.mark.parametrize("name", MODELS)
def test_dense_experts_are_read_under_the_names_of_files(name: str, tmp_path: Path) -> None:
    """A model that is all dense, and one of which lowbit quantized all but the experts. Llama 4's are one tensor."""
    torch.manual_seed(0)
    dense = transformers.AutoModelForCausalLM.from_config(MODELS[name]())
    dense.save_pretrained(tmp_path / "dense")
    keys = load_file(tmp_path / "dense" / "model.safetensors")
    assert any(".experts.2." in key for key in keys) == (name != "llama-4")
    assert torch.equal(logits(by_lowbit(tmp_path / "dense", name)), logits(dense))
    config = LowbitConfig("u4", group_size=32, modules={"*experts*": None}, per_row_if_indivisible=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    model.save_pretrained(tmp_path / "ours")
    assert torch.equal(logits(by_lowbit(tmp_path / "ours", name)), logits(model))


@pytest.mark.parametrize("number", [61, 2])
def test_a_layer_that_predicts_more_tokens_is_left_out(number: int, tmp_path: Path) -> None:
    """DeepSeek's files have a layer 61 that transformers does not read, those of smaller models one behind the last."""
    write("deepseek", "fp8", tmp_path)
    expected = logits(by_transformers(tmp_path))
    state = load_file(tmp_path / "model.safetensors")
    more = {key.replace("layers.1.", f"layers.{number}."): t for key, t in state.items()}
    edit(tmp_path, lambda state: {key: t.clone() for key, t in (state | more).items()})
    if number == 2:
        edit_config(tmp_path, num_nextn_predict_layers=0)
        with pytest.raises(CheckpointError, match=r"layers.2.* is quantized, but the model has no such layer"):
            by_transformers(tmp_path)
        edit_config(tmp_path, num_nextn_predict_layers=1)
    model = by_transformers(tmp_path)
    assert torch.equal(logits(model), expected)
    empty = transformers.AutoModelForCausalLM.from_config(dense_config(model))
    lowbit.load_checkpoint(empty, tmp_path, act="bf16")
    assert torch.equal(logits(empty), expected)


def dense_config(model: Any) -> Any:
    entries = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    return type(model.config)(**entries)


def test_zeros_that_are_all_the_middle_one(tmp_path: Path) -> None:
    """Such a weight is imported as one of signed codes; as a part of another it keeps its zeros."""
    dense = write("qwen3-moe", "gptq", tmp_path / "theirs")
    name = "model.layers.0.mlp.experts.1.up_proj"

    def change(state: State) -> State:
        return state | {f"{name}.qzeros": torch.full_like(state[f"{name}.qzeros"], 0x77777777)}

    edit(tmp_path / "theirs", change)
    model = by_transformers(tmp_path / "theirs")
    assert lowbit.open_checkpoint(tmp_path / "theirs").load(name, "bf16").spec.weight == "i4"
    layer = model.model.layers[0].mlp.experts.gate_up[1]
    assert layer.spec.weight == "u4" and torch.equal(
        layer.packed.dequantize()[:32], dense[name.replace("up_", "gate_")]
    )
    model.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(logits(again), logits(model))


def test_biases_of_zeros_are_those_of_layers_without(tmp_path: Path) -> None:
    """AutoGPTQ gives every layer a bias."""
    write("qwen3-moe", "gptq", tmp_path)
    expected = logits(by_transformers(tmp_path))

    def change(state: State) -> State:
        scales = {key: t for key, t in state.items() if key.endswith(".scales")}
        return state | {key.replace("scales", "bias"): torch.zeros(t.shape[1]).half() for key, t in scales.items()}

    edit(tmp_path, change)
    assert torch.equal(logits(by_transformers(tmp_path)), expected)
    assert torch.equal(logits(by_lowbit(tmp_path, "qwen3-moe")), expected)


def test_experts_of_different_formats_are_saved(tmp_path: Path) -> None:
    write("qwen3-moe", "gptq", tmp_path / "theirs")
    zeros = "model.layers.0.mlp.experts.1.down_proj.qzeros"
    edit(tmp_path / "theirs", lambda state: state | {zeros: torch.full_like(state[zeros], 0x77777777)})
    model = by_transformers(tmp_path / "theirs")
    down = model.model.layers[0].mlp.experts.down
    assert [layer.spec.weight for layer in down] == ["u4", "i4", "u4"]
    model.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(logits(again), logits(model))


EXPERT = "model.layers.1.mlp.experts.2"
OWNER = "model.layers.1.mlp.experts"
BAD: dict[str, tuple[Callable[[State], State], str]] = {
    "no expert": (
        lambda state: {key: t for key, t in state.items() if not key.startswith(EXPERT)},
        f"{OWNER}: the checkpoint lacks down_proj of expert 2; the model has 3 experts",
    ),
    "one more": (
        lambda state: state | {key.replace(EXPERT, f"{OWNER}.3"): t.clone() for key, t in state.items()},
        f"{OWNER}: the checkpoint has down_proj of expert 3; the model has 3 experts",
    ),
    "no gate": (
        lambda state: {key: t for key, t in state.items() if not key.startswith(f"{EXPERT}.gate_proj")},
        f"{OWNER}: the checkpoint lacks a part of gate_up_proj of expert 2",
    ),
    "other groups": (
        lambda state: state | {f"{EXPERT}.up_proj.scales": state[f"{EXPERT}.up_proj.scales"][:1].clone()},
        "scales \\[1, 32\\] don't fit 32 x 64 in groups of 32",
    ),
    "another order": (
        lambda state: state | {f"{EXPERT}.up_proj.g_idx": torch.arange(64, dtype=torch.int32) % 2},
        "layers that become the rows of one matrix have different orders of columns",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_can_not_be_imported(what: str, tmp_path: Path) -> None:
    write("qwen3-moe", "gptq", tmp_path)
    change, message = BAD[what]
    edit(tmp_path, change)
    for load in (by_transformers, lambda folder: by_lowbit(folder, "qwen3-moe")):
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)


def test_a_checkpoint_without_quantized_layers(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(MODELS["qwen3-moe"]()).save_pretrained(tmp_path)
    edit_config(tmp_path, quantization_config=FP8)
    with pytest.raises(CheckpointError, match=r"config.json says 'fp8', but no layer is quantized so"):
        by_transformers(tmp_path)
