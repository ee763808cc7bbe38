"""GGUF files of many architectures: `lowbit.from_gguf` computes what the model of transformers does.

Files are written as llama.cpp's converters write them: names are those of the `gguf` package's table, and each
architecture says here what its converter writes and changes (convert_hf_to_gguf.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.constants import MODEL_ARCH
from torch import Tensor

import lowbit
from lowbit import CheckpointError
from lowbit.pylib.checkpoints.gguf.architectures import KNOWN

transformers = pytest.importorskip("transformers")

HEADS, KV_HEADS, HEAD, LAYERS = 4, 2, 16, 4
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": HEADS * HEAD,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(0))
Facts = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """An architecture: its name in gguf's table, the configuration of a tiny model, and what its converter does.

    facts    metadata beside those of all
    paired   rows of q and k are exchanged, as llama.cpp rotates neighbours
    shift    what is added to the weights of norms
    """

    arch: MODEL_ARCH
    config: str
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    facts: Facts = field(default_factory=Facts)
    paired: bool = False
    shift: float = 0.0
    rms: bool = True


LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 5e4, "original_max_position_embeddings": 64, **LONG}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 4}
YARN |= {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}
MINISTRAL_ROPE = {**YARN, "llama_4_scaling_beta": 0.5}
GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 12.0, "residual_multiplier": 0.2, "logits_scaling": 4}
CASES = {
    "gemma": Case(MODEL_ARCH.GEMMA, "GemmaConfig", {"head_dim": HEAD}, shift=1.0),
    "gemma2": Case(
        MODEL_ARCH.GEMMA2,
        "Gemma2Config",
        {"head_dim": HEAD, "sliding_window": 8, "query_pre_attn_scalar": HEAD, "attn_logit_softcapping": 5.0},
        {"attention.sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
        shift=1.0,
    ),
    "phi3": Case(MODEL_ARCH.PHI3, "Phi3Config", {"sliding_window": 8}, {"attention.sliding_window": 8}),
    "phi3-long": Case(
        MODEL_ARCH.PHI3,
        "Phi3Config",
        {"rope_parameters": {**LONG_ROPE, "partial_rotary_factor": 1.0}},
        {"rope.freq_base": 5e4, "rope.scaling.original_context_length": 64},
    ),
    "phi3-partial": Case(
        MODEL_ARCH.PHI3,
        "Phi3Config",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
        {"rope.dimension_count": 12},
    ),
    "falcon": Case(
        MODEL_ARCH.FALCON,
        "FalconConfig",
        {"multi_query": True, "new_decoder_architecture": False, "num_kv_heads": 1},
        {"attention.head_count_kv": 1, "feed_forward_length": 256},
        rms=False,
    ),
    "falcon-11b": Case(
        MODEL_ARCH.FALCON,
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS, "num_ln_in_parallel_attn": 1},
        {"feed_forward_length": 256},
        rms=False,
    ),
    "falcon-40b": Case(
        MODEL_ARCH.FALCON,
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS, "tie_word_embeddings": False},
        {"feed_forward_length": 256},
        rms=False,
    ),
    "command-r": Case(
        MODEL_ARCH.COMMAND_R,
        "CohereConfig",
        {"logit_scale": 0.25, "use_qk_norm": True},
        {"logit_scale": 0.25, "rope.freq_base": 5e5, "rope.scaling.type": "none"},
        rms=False,
    ),
    "cohere2": Case(
        MODEL_ARCH.COHERE2,
        "Cohere2Config",
        {"logit_scale": 0.25, "sliding_window": 8},
        {"logit_scale": 0.25, "attention.sliding_window": 8, "rope.dimension_count": HEAD},
        rms=False,
    ),
    "granite": Case(
        MODEL_ARCH.GRANITE,
        "GraniteConfig",
        GRANITE,
        {"attention.scale": 0.3, "embedding_scale": 12.0, "residual_scale": 0.2, "logit_scale": 4.0},
        paired=True,
    ),
    "mistral3": Case(  # conversion/mistral3.py: LlamaModel's tensors, and two facts more
        MODEL_ARCH.MISTRAL3,
        "Ministral3Config",
        {"head_dim": HEAD, "rope_parameters": MINISTRAL_ROPE},
        {
            "rope.freq_base": 1e4,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 4,
            "rope.scaling.yarn_beta_fast": 4.0,
            "rope.scaling.yarn_beta_slow": 0.5,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.5,
        },
        paired=True,
    ),
    "mistral3-short": Case(
        MODEL_ARCH.MISTRAL3,
        "Ministral3Config",
        {"head_dim": HEAD, "rope_parameters": {**MINISTRAL_ROPE, "rope_type": "default", "llama_4_scaling_beta": 0.0}},
        {"rope.freq_base": 1e4},
        paired=True,
    ),
    "olmo2": Case(MODEL_ARCH.OLMO2, "Olmo2Config"),
    "olmoe": Case(
        MODEL_ARCH.OLMOE,
        "OlmoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "smollm3": Case(MODEL_ARCH.SMOLLM3, "SmolLM3Config", {}, {"rope.freq_base": 2e6}, paired=True),
    "stablelm": Case(
        MODEL_ARCH.STABLELM,
        "StableLmConfig",
        {"use_qkv_bias": True},
        {"rope.dimension_count": HEAD // 4, "use_parallel_residual": False},
        rms=False,
    ),
    "starcoder2": Case(MODEL_ARCH.STARCODER2, "Starcoder2Config", {"sliding_window": None}, rms=False),
    "glm4": Case(MODEL_ARCH.GLM4, "Glm4Config", {"head_dim": HEAD}, {"rope.dimension_count": HEAD // 2}),
    "ernie4_5": Case(MODEL_ARCH.ERNIE4_5, "Ernie4_5Config", {"head_dim": HEAD}, {"rope.freq_base": 5e5}),
    "seed_oss": Case(MODEL_ARCH.SEED_OSS, "SeedOssConfig", {"head_dim": HEAD}),
}


def dense_model(case: Case) -> Any:
    """Returns a tiny model whose matrices have numbers of Q8_0, and whose norms and biases are no ones and zeros."""
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**{**TINY, **case.fields})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, p in model.named_parameters():
        if p.ndim == 1 or name.endswith("_norm.weight"):
            p.data += torch.randn_like(p) / 8
        else:
            values = gguf.quants.quantize(p.data.mul(4).numpy(), gguf.GGMLQuantizationType.Q8_0)
            p.data = torch.from_numpy(gguf.quants.dequantize(values, gguf.GGMLQuantizationType.Q8_0)).view(p.shape)
    return model


def written(case: Case, model: Any, path: Path) -> Path:
    """Writes a model as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[case.arch])
    config, prefix = model.config, gguf.MODEL_ARCH_NAMES[case.arch]
    norm = "attention.layer_norm_rms_epsilon" if case.rms else "attention.layer_norm_epsilon"
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    eps = next(getattr(config, n) for n in names if hasattr(config, n))
    facts: Facts = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HEADS * HEAD,
        "feed_forward_length": 128,
        "attention.head_count": HEADS,
        "attention.head_count_kv": config.num_key_value_heads,
        norm: eps,
        **({"attention.key_length": HEAD, "attention.value_length": HEAD} if "head_dim" in case.fields else {}),
        **case.facts,
    }
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
    for key, value in facts.items():
        adders[type(value)](f"{prefix}.{key}", value)
    for name, tensor in tensors(case, model).items():
        matrix = tensor.ndim > 1 and "norm" not in name and tensor.shape[-1] % 32 == 0 and "gate_inp" not in name
        kind = gguf.GGMLQuantizationType.Q8_0 if matrix else None
        values = tensor.contiguous().numpy()
        writer.add_tensor(name, gguf.quants.quantize(values, kind) if kind else values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(case: Case, model: Any) -> dict[str, Tensor]:
    """Returns the tensors of a file, by llama.cpp's names."""
    names = gguf.get_tensor_name_map(case.arch, LAYERS)
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            block = name.split(".")[2]
            gate, up = value.chunk(2, 1)
            found |= {f"blk.{block}.ffn_gate_exps.weight": gate, f"blk.{block}.ffn_up_exps.weight": up}
            continue
        key = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert key is not None, name
        key += ".weight" if key.endswith("_exps") else ""
        found[key] = changed(case, name, value)
    if "rope_type" in (rope := model.config.rope_parameters) and rope["rope_type"] == "longrope":
        found |= {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")}
    return found


def changed(case: Case, name: str, value: Tensor) -> Tensor:
    """Returns a tensor as a converter changes it."""
    if case.paired and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = len(value) // HEAD
        return value.reshape(heads, 2, HEAD // 2, -1).swapaxes(1, 2).reshape(value.shape)
    if case.arch is MODEL_ARCH.FALCON and name.endswith("query_key_value.weight"):  # conversion/falcon.py
        groups = value.view(case.fields["num_kv_heads"], -1, HEAD, HEADS * HEAD)
        parts = groups[:, :-2], groups[:, [-2]], groups[:, [-1]]
        return torch.cat([part.reshape(-1, HEADS * HEAD) for part in parts])
    return value + case.shift if name.endswith("norm.weight") else value


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(TOKENS).logits.float()


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    expected = dense_model(CASES[name])
    model = lowbit.from_gguf(written(CASES[name], expected, tmp_path / "m.gguf"), dtype=torch.float16)
    assert model.config.model_type == expected.config.model_type
    right = logits(expected)
    assert float((logits(model) - right).norm() / right.norm()) < 0.01
    assert any(isinstance(module, lowbit.LowbitLinear) for module in model.modules())


def test_every_architecture_is_tested() -> None:
    others = {"llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "gemma3"}  # test_gguf_model.py, test_gguf_experts.py
    assert {gguf.MODEL_ARCH_NAMES[case.arch] for case in CASES.values()} | others == KNOWN.keys()


WRONG: list[tuple[str, Facts, str]] = [
    ("olmo2", {"attention.sliding_window": 8}, "olmo2.attention.sliding_window is 8, as of OLMo 3, which can't be"),
    ("olmoe", {"attention.clamp_kqv": 8.0}, "olmoe.attention.clamp_kqv: models that clamp q, k and v can't be loaded"),
    ("glm4", {"rope.dimension_count": 17}, "glm4.rope.dimension_count is 17; only 16 can be loaded"),
    ("granite", {"rope.dimension_count": 8}, "granite.rope.dimension_count is 8; only 16 can be loaded"),
    (
        "mistral3",
        {"rope.scaling.yarn_ext_factor": 0.5},
        "mistral3.rope.scaling.yarn_ext_factor is 0.5; only 1 can be loaded",
    ),
    (
        "falcon-11b",
        {"attention.head_count": 10, "attention.head_count_kv": 3, "attention.key_length": 8},
        "falcon.attention.head_count is 10, no multiple of head_count_kv, 3",
    ),
    ("granite", {"attention.head_count_kv": 1}, "self_attn.k_proj.weight is .* but .* in the model"),
]


@pytest.mark.parametrize(("name", "facts", "message"), WRONG)
def test_facts_that_can_not_be_loaded(name: str, facts: Facts, message: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = dense_model(case)
    path = written(replace(case, facts={**case.facts, **facts}), model, tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=message):
        lowbit.from_gguf(path)
