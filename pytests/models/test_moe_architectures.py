"""The mixtures of experts of transformers, each as a tiny model: quantized, run, saved, loaded; and in one launch.

docs/experts.md has the table of these classes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import LowbitConfig, LowbitExperts, LowbitLinear, QuantConfig
from lowbit.pylib.nn import experts as experts_module
from lowbit.pylib.nn import stacked_experts
from lowbit.pylib.nn.gated_linear import GatedLinear

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(3, 120, (1, 12), generator=torch.Generator().manual_seed(0))
U8 = QuantConfig("u8", 16, clip="max")  # without a search, which takes longest
STATIC = {"cache_implementation": "static"}
EXPERTS = 4

TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("decoder_sparse_step", "n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 0),
    "mlp_layer_types": ["sparse", "sparse"],
}
LATENT = {
    "head_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
"""The sizes of multi-head latent attention."""
INDEXED = {**LATENT, "index_topk": 16, "index_n_heads": 2, "index_head_dim": 32}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "use_mamba_kernels": False}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""The sizes of layers of linear attention."""

MODELS: dict[str, dict[str, Any]] = {
    "Afmoe": {},
    "AriaText": {},
    "Cohere2Moe": {},
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT,
    "DeepseekV32": INDEXED,  # has linear layers whose names transformers keeps in f32
    "Dots1": {},
    "Ernie4_5_Moe": {"moe_k": 2, "moe_num_shared_experts": 1},
    "ExaoneMoe": {},
    "FlexOlmo": {},
    "Gemma4Text": {"enable_moe_block": True, "top_k_experts": 2, "num_kv_shared_layers": 0, "global_head_dim": 16},
    "Glm4Moe": {},
    "GptOss": {},  # transposed, with biases, gate and up in turn
    "GraniteMoe": {},
    "GraniteMoeHybrid": {**MAMBA, "layer_types": ["full_attention", "linear_attention"]},
    "GraniteMoeShared": {},
    "HunYuanMoEV1": {"moe_topk": 2},
    "Jamba": {**MAMBA, **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2), "attn_layer_offset": 0},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"]},
    "Llama4Text": {"intermediate_size_mlp": 64, "interleave_moe_layer_step": 1},  # rows come sorted by expert
    "MiniMax": {},
    "MiniMaxM2": {},
    "Mixtral": {},
    "Olmoe": {},
    "OpenAIPrivacyFilter": {},
    "Phimoe": {},
    "Qwen2Moe": {},
    "Qwen3Moe": {},
    "Qwen3Next": LINEAR,
    "Qwen3_5MoeText": LINEAR,
    "SolarOpen": {},
}
"""By the name of a configuration: what it has besides, or of another size."""


def tiny(name: str, more: dict[str, Any]) -> Any:
    """Returns a tiny model in f16, with random weights."""
    config = getattr(transformers, f"{name}Config")
    fields = {*vars(config()), *config.attribute_map}
    known = {key: value for key, value in TINY.items() if key in fields}
    torch.manual_seed(0)
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForTokenClassification, transformers.AutoModel)
    auto = next(kind for kind in kinds if config in kind._model_mapping)
    return auto.from_config(config(**known | more), dtype=torch.float16).eval()


def low_bit_experts(model: nn.Module) -> dict[str, LowbitExperts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LowbitExperts)}


def output(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS)[0].float()


def with_weights_of(dense: Any, low: nn.Module) -> Any:
    """Returns a dense model with what the weights of a low-bit one are dequantized to."""
    for name, experts in low_bit_experts(low).items():
        module = dense.get_submodule(name)
        for parameter, layers in ((module.gate_up_proj, experts.gate_up), (module.down_proj, experts.down)):
            weights = torch.stack([layer.weight.clone() for layer in layers])
            parameter.data.copy_(weights.transpose(1, 2) if experts.is_transposed else weights)
    for name, layer in low.named_modules():
        if isinstance(layer, LowbitLinear) and name.rpartition(".")[0].rpartition(".")[0] not in low_bit_experts(low):
            dense.get_submodule(name).weight.data.copy_(layer.weight.clone())
    return dense


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_what_its_weights_say_and_comes_back(name: str, tmp_path: Path) -> None:
    dense = tiny(name, MODELS[name])
    low = copy.deepcopy(dense)
    report = lowbit.quantize_(low, U8, progress=False)
    experts, found = low_bit_experts(low), output(low)
    assert experts and not any("xperts" in row.name for row in report.dense)
    expected = output(with_weights_of(dense, low))
    assert float((found - expected).norm()) < 0.01 * float(expected.norm())
    low.save_pretrained(tmp_path)
    back = type(low).from_pretrained(tmp_path)
    assert list(low_bit_experts(back)) == list(experts) and torch.equal(output(back), found)


@pytest.mark.parametrize("name", MODELS)
def test_one_launch_multiplies_all_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    low = tiny(name, MODELS[name])
    lowbit.quantize_(low, U8, progress=False)
    experts = next(iter(low_bit_experts(low).values()))
    calls: list[tuple[Any, ...]] = []
    experts.register_forward_pre_hook(lambda _, given: calls.append(given))
    output(low)
    x, *routing = calls[0]
    given = [x[:12].clone(), *(tensor[:12] for tensor in routing)]
    with torch.no_grad():
        expected = experts(*given).float()
        for module in (stacked_experts, experts_module):
            monkeypatch.setattr(module, "target_of", lambda _: "emulator:sm_80")
        found = experts(*given).float()
    assert experts._stacked[False].formats
    assert all(isinstance(layer, GatedLinear) for layer in experts.gate_up)
    assert float((found - expected).norm()) < 0.01 * float(expected.norm())


@pytest.mark.parametrize("name", ["GptOss", "Llama4Text", "Qwen3Moe"])
def test_a_static_cache_generates_the_same(name: str) -> None:
    model = tiny(name, MODELS[name])
    lowbit.quantize_(model, U8, progress=False)
    found = [model.generate(TOKENS, max_new_tokens=5, do_sample=False, **kind) for kind in ({}, STATIC)]
    assert found[0].shape == (1, 17) and torch.equal(*found)


@pytest.mark.parametrize("name", ["Llama4Text", "Qwen3Moe"])
def test_experts_are_quantized_on_load(name: str, tmp_path: Path) -> None:
    dense = tiny(name, MODELS[name])
    dense.save_pretrained(tmp_path)
    model = type(dense).from_pretrained(tmp_path, quantization_config=LowbitConfig(U8), dtype=torch.float16)
    lowbit.quantize_(dense, U8, progress=False)
    assert len(low_bit_experts(model)) == 2 and torch.equal(output(model), output(dense))


def test_gptq_looks_at_rows_that_are_sorted_by_expert() -> None:
    """Llama 4 sends each token to one expert here."""
    dense = tiny("Llama4Text", {**MODELS["Llama4Text"], "num_experts_per_tok": 1})
    config = {"*.experts": QuantConfig("u4", 16, method="gptq", clip="max")}
    report = lowbit.quantize_(dense, config, calibration=[TOKENS] * 3, progress=False)
    notes = [row.note for row in report.quantized]
    assert len(notes) == 4 and all("experts got" in note and "36 tokens" not in note for note in notes), notes


DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "JetMoe": ("JetMoeParallelExperts has experts kept or called in a way of their own", {}),
    "LongcatFlash": ("LongcatFlashExperts has experts kept or called in a way of their own", LATENT),
    "MuseSparkText": ("MuseSparkExperts has experts with a norm behind each", {}),
    "NemotronH": ("NemotronHExperts has experts without a gate", {"layers_block_type": ["moe", "attention"]}),
}
"""By the name of a configuration: why its experts stay dense, and what it has besides."""


@pytest.mark.parametrize("name", DENSE)
def test_other_experts_stay_dense_and_are_told_of(name: str) -> None:
    reason, more = DENSE[name]
    model = tiny(name, more)
    report = lowbit.quantize_(model, U8, progress=False)
    assert not low_bit_experts(model) and report.quantized
    assert reason in {row.reason for row in report.dense}


def test_experts_of_linear_layers_are_linear_layers() -> None:
    layers = ("num_layers", "num_decoder_layers", "num_sparse_encoder_layers", "num_sparse_decoder_layers")
    more = {**dict.fromkeys(layers, 1), "d_model": 64, "d_kv": 16, "d_ff": 64, "num_heads": 4}
    report = lowbit.quantize_(tiny("SwitchTransformers", more), U8, progress=False)
    assert report["encoder.block.0.layer.1.mlp.experts.expert_3.wo"] in report.quantized


def test_the_page_has_all_of_them(repo: Path) -> None:
    page = (repo / "docs/experts.md").read_text()
    for name in (*MODELS, *DENSE, "Dbrx", "SwitchTransformers", "NllbMoe"):
        assert f"`{name}`" in page, name
