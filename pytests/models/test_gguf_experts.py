"""`lowbit.from_gguf` on files with experts, beside models made here of what the `gguf` package dequantizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import EXPERTS, HIDDEN, INNER, VOCABULARY, WITH_EXPERTS, Tensors, write_model
from torch import Tensor

import lowbit
from lowbit import CheckpointError, LowbitExperts, LowbitLinear

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(3, VOCABULARY, (1, 8), generator=torch.Generator().manual_seed(0))
MODELS = {
    "mixtral": ("MixtralConfig", {"num_local_experts": EXPERTS}),
    "qwen2moe": (
        "Qwen2MoeConfig",
        {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "shared_expert_intermediate_size": INNER},
    ),
    "qwen3moe": (
        "Qwen3MoeConfig", {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "norm_topk_prob": True},
    ),
}  # fmt: skip
LAYERS = 2
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(TOKENS).logits.float()


def dense(path: Path, architecture: str) -> Any:
    """Returns the model of a file in f32."""
    name, more = MODELS[architecture]
    config = getattr(transformers, name)(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        num_experts_per_tok=2,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=True,
        **more,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    state = state_of({name: torch.from_numpy(np.array(t)) for name, t in tensors.items()}, architecture)
    missing, unknown = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unknown
    return model


def state_of(tensors: dict[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """Returns the state dictionary of the tensors of a file."""
    state = {"model.embed_tokens.weight": tensors["token_embd.weight"]}
    state["model.norm.weight"] = tensors["output_norm.weight"]
    for name, value in tensors.items():
        _, block, part, kind = found if len(found := name.split(".")) == 4 else ("", "", "", "")
        if part in ("attn_q", "attn_k") and architecture == "mixtral":  # llama.cpp rotates neighbours
            value = value.view(-1, 64, 2, HIDDEN).transpose(1, 2).reshape(value.shape)
        if part in NAMES:
            shape = (1, -1) if part == "ffn_gate_inp_shexp" else value.shape
            state[f"model.layers.{block}.{NAMES[part]}.{kind}"] = value.reshape(shape)
    for block in range(LAYERS):
        gate, up, down = (tensors[f"blk.{block}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        state[f"model.layers.{block}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        state[f"model.layers.{block}.mlp.experts.down_proj"] = down
    return state


@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_model_is_the_dequantized_one(architecture: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", architecture, LAYERS)
    model, expected = lowbit.from_gguf(path, torch.float16), dense(path, architecture)
    packed = [name for name, module in model.named_modules() if isinstance(module, LowbitLinear)]
    for name, module in expected.named_modules():
        layer = model.get_submodule(name)
        if name.endswith("experts"):
            for part, matrix in ((layer.gate_up, module.gate_up_proj), (layer.down, module.down_proj)):
                assert torch.equal(torch.stack([expert.packed.dequantize() for expert in part]), matrix)
        elif name in packed:
            assert torch.equal(layer.packed.dequantize(), module.weight)
    assert len(packed) == LAYERS * (4 + 2 * EXPERTS + (3 if architecture == "qwen2moe" else 0))
    right = logits(expected)
    assert float((logits(model) - right).abs().max()) < 0.02 * float(right.abs().max())


def test_saved_and_loaded_again(tmp_path: Path) -> None:
    model = lowbit.from_gguf(write_model(tmp_path / "m.gguf", "qwen3moe", LAYERS))
    model.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert isinstance(again.model.layers[1].mlp.experts, LowbitExperts) and torch.equal(logits(again), logits(model))


def one_stack(tensors: Tensors, _: dict[str, Any]) -> None:
    """Makes one stack of gate and up, as newer files have it."""
    (gate, kind), (up, _) = (tensors.pop(f"blk.0.ffn_{part}_exps.weight") for part in ("gate", "up"))
    tensors["blk.0.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], 1), kind


def test_other_stacks(tmp_path: Path) -> None:
    """Gate and up may be one tensor, a block may have no experts, and all stacks may be dense."""
    usual = lowbit.from_gguf(write_model(tmp_path / "m.gguf", "qwen3moe", 1))
    model = lowbit.from_gguf(write_model(tmp_path / "m.gguf", "qwen3moe", 1, change=one_stack))
    assert torch.equal(logits(model), logits(usual))

    def without_experts(tensors: Tensors, _: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("blk.1.ffn") and "norm" not in name]:
            del tensors[name]
        for part in ("gate", "up", "down"):
            data, kind = tensors[f"blk.0.ffn_{part}_exps.weight"]
            tensors[f"blk.1.ffn_{part}.weight"] = data[0], kind

    model = lowbit.from_gguf(write_model(tmp_path / "m.gguf", "qwen3moe", change=without_experts))
    assert model.config.mlp_only_layers == [1] and isinstance(model.model.layers[1].mlp.up_proj, LowbitLinear)

    kinds = dict.fromkeys((f"ffn_{part}_exps" for part in ("gate", "up", "down")), "F16")
    path = write_model(tmp_path / "m.gguf", "qwen3moe", 1, kinds)
    model = lowbit.from_gguf(path, torch.float16)
    gate, up = (lowbit.load_gguf(path)[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up"))
    assert torch.equal(model.model.layers[0].mlp.experts.gate_up_proj, torch.cat([gate, up], 1))
    with pytest.raises(CheckpointError, match=r"ffn_up_exps.weight: type float16 is not packed"):
        lowbit.load_gguf(path).load_experts("blk.0.ffn_up_exps.weight")


def test_scales_of_whole_matrices(tmp_path: Path) -> None:
    """One for each expert. Where the gate's are all 1, the file has those of the up projection alone."""
    scales = np.float32([0.5, 1, 0.3, 2])

    def add(tensors: Tensors, _: dict[str, Any]) -> None:
        tensors["blk.0.ffn_up_exps.scale"] = scales, None

    plain, path = tmp_path / "plain.gguf", tmp_path / "m.gguf"
    write_model(plain, "qwen3moe", 1)
    write_model(path, "qwen3moe", 1, change=add)
    of_file, experts = (lowbit.from_gguf(each).model.layers[0].mlp.experts for each in (plain, path))
    for expert, scale in enumerate(scales):
        expected = of_file.gate_up[expert].packed.dequantize()
        expected[INNER:] *= float(scale)
        torch.testing.assert_close(experts.gate_up[expert].packed.dequantize(), expected, rtol=1e-6, atol=1e-9)
    assert not experts.down[0].spec.row_scales


def test_what_does_not_fit(tmp_path: Path) -> None:
    def stack(name: str, kind: str, *shape: int) -> Any:
        data = gguf.quants.quantize(np.zeros(shape, np.float32), Kind[kind]), Kind[kind]
        return lambda tensors, _: tensors.update({f"blk.0.{name}.weight": data})

    changes: list[tuple[Any, str]] = [
        (lambda t, _: t.pop("blk.0.ffn_up_exps.weight"), r"gate_up_proj is \[4, 512, 256\], but \[4, 1024, 256\]"),
        (lambda t, _: t.pop("blk.0.ffn_down_exps.weight"), r"there is no model.layers.0.mlp.experts.down_proj"),
        (lambda t, _: t.pop("blk.0.ffn_gate_inp.weight"), r"there is model.layers.0.mlp.experts.gate_up_proj"),
        (stack("ffn_up_exps", "Q8_0", EXPERTS, INNER, HIDDEN), r"are Q4_K and Q8_0; rows of one matrix must have one"),
        (stack("ffn_down_exps", "F16", EXPERTS, HIDDEN, INNER), r"some are dense; all or none must be"),
        (stack("ffn_up_exps", "Q8_0", 3, INNER, HIDDEN), r"ffn_up_exps.weight is \[3, 512, 256\]; it must be"),
        (lambda _, facts: facts.update(expert_used_count=5), r"expert_used_count is more than .*expert_count, 4"),
        (lambda _, facts: facts.update(expert_count=1 << 29), r"mlp.experts.gate_up_proj is|mlp.gate.weight is"),
        (lambda _, facts: facts.pop("expert_used_count"), r"expert_used_count is None; it must be a positive number"),
    ]
    for change, message in changes:
        with pytest.raises(CheckpointError, match=rf"m.gguf: .*{message}"):
            lowbit.from_gguf(write_model(tmp_path / "m.gguf", "qwen3moe", 1, change=change))
