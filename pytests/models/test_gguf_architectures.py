"""GGUF files of many architectures: `lowbit.from_gguf` computes what the model of transformers does.

Files are written as llama.cpp's converters write them: names are those of the `gguf` package's table, and each
architecture says here what its converter writes and changes (convert_hf_to_gguf.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
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
    parts    returns what a tensor of the model becomes, by the names of a file; {} for others
    signs    parameters with numbers of two signs and one size, so that they are those of any type in either direction
    kinds    the types of matrices, by a part of their names
    """

    arch: MODEL_ARCH
    config: str
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    facts: Facts = field(default_factory=Facts)
    paired: bool = False
    shift: float = 0.0
    rms: bool = True
    parts: Callable[[str, Tensor, Any], dict[str, Tensor]] = lambda *_: {}
    signs: tuple[str, ...] = ()
    kinds: Mapping[str, Kind | None] = field(default_factory=dict[str, "Kind | None"])

    @property
    def encodes(self) -> bool:
        return self.arch in (MODEL_ARCH.BERT, MODEL_ARCH.NOMIC_BERT, MODEL_ARCH.MODERN_BERT)


def block_of(name: str) -> str:
    """Returns what a file calls the block of a tensor."""
    return f"blk.{next(part for part in name.split('.') if part.isdigit())}"


def gpt_oss_parts(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """conversion/gpt_oss.py: rows of gate and up by turns, columns first; a sink has no name of its own."""
    if name.endswith("sinks"):
        return {f"{block_of(name)}.attn_sinks.weight": value}
    if "experts." not in name:
        return {}
    part, value = ("bias", value) if name.endswith("_bias") else ("weight", value.mT)
    if "down_proj" in name:
        return {f"{block_of(name)}.ffn_down_exps.{part}": value}
    gate, up = value[:, ::2], value[:, 1::2]
    return {f"{block_of(name)}.ffn_{what}_exps.{part}": rows for what, rows in (("gate", gate), ("up", up))}


def llama4_parts(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """conversion/llama4.py and llama.py: columns first, gate in front of up."""
    if name.endswith("experts.down_proj"):
        return {f"{block_of(name)}.ffn_down_exps.weight": value.mT}
    if not name.endswith("experts.gate_up_proj"):
        return {}
    gate, up = value.mT.chunk(2, 1)
    return {f"{block_of(name)}.ffn_gate_exps.weight": gate, f"{block_of(name)}.ffn_up_exps.weight": up}


def deepseek_parts(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """conversion/deepseek.py: heads of kv_b_proj apart, and their keys transposed."""
    if name.endswith("e_score_correction_bias"):
        return {f"{block_of(name)}.exp_probs_b.bias": value}
    if not name.endswith("kv_b_proj.weight"):
        return {}
    heads = value.view(config.num_attention_heads, -1, value.shape[1])
    keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
    return {f"{block_of(name)}.attn_k_b.weight": keys.mT, f"{block_of(name)}.attn_v_b.weight": values}


def glm4_moe_parts(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """conversion/glm.py: a layer more, which predicts a second token."""
    if name == "model.norm.weight":
        return {"output_norm.weight": value, f"blk.{LAYERS}.nextn.hnorm.weight": value}
    return deepseek_parts(name, value, config)


def qwen3_next_parts(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """conversion/qwen.py, Qwen3NextModel: q, k, v of all heads, z of all heads; logarithms undone."""
    if name.endswith("A_log"):
        return {f"{block_of(name)}.ssm_a": -value.exp()}
    if name.endswith("dt_bias"):
        return {f"{block_of(name)}.ssm_dt.bias": value}
    if name.endswith("conv1d.weight"):
        return {f"{block_of(name)}.ssm_conv1d.weight": value.squeeze()}
    if name.endswith("linear_attn.norm.weight"):
        return {f"{block_of(name)}.ssm_norm.weight": value}
    if name.endswith("shared_expert_gate.weight"):
        return {f"{block_of(name)}.ffn_gate_inp_shexp.weight": value.flatten()}
    if not name.endswith("in_proj_qkvz.weight"):
        return {}
    keys, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2 + [each * config.linear_value_head_dim] * 2
    q, k, v, z = (p.flatten(0, 1) for p in value.view(keys, sum(sizes), -1).split(sizes, 1))
    return {f"{block_of(name)}.attn_qkv.weight": torch.cat((q, k, v)), f"{block_of(name)}.attn_gate.weight": z}


def nomic_parts(name: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """The library's own Wqkv, which transformers has in three, and names of its own."""
    names = {"self_attn.o_proj": "attn_output", "post_attention_layernorm": "attn_output_norm"}
    names |= {"post_mlp_layernorm": "layer_output_norm"}
    names |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    found = {f"{block_of(name)}.{to}.{name.rpartition('.')[2]}": value for of, to in names.items() if of in name}
    if "self_attn" in name and "o_proj" not in name:
        found |= {f"{block_of(name)}.attn_qkv.weight": value}  # added to the others in `tensors`
    return found


DEEPSEEK = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": HEAD,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
}
DEEPSEEK_FACTS: Facts = {
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 64 + HEAD,
    "attention.value_length": 64,
    "attention.key_length_mla": 32 + HEAD,
    "attention.value_length_mla": 32,
    "rope.dimension_count": HEAD,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 64,
    "expert_shared_count": 1,
    "expert_weights_scale": 2.5,
}
YARN_7 = {"mscale": 0.707, "mscale_all_dim": 0.707}
DEEPSEEK_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 4, **YARN_7}
YARN_FACTS: Facts = {
    "rope.freq_base": 1e4,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 4,
}
NEXT = {
    "head_dim": HEAD,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": HEAD,
    "linear_value_head_dim": HEAD,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
NEXT_FACTS: Facts = {
    "rope.dimension_count": HEAD // 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": HEAD,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 4 * HEAD,
    "full_attention_interval": 4,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 64,
}
NEXT_CASE = Case(MODEL_ARCH.QWEN3NEXT, "Qwen3NextConfig", NEXT, NEXT_FACTS, shift=1.0, parts=qwen3_next_parts)
OSS_SIGNS = ("experts.gate_up_proj", "experts.down_proj")
OSS = Case(
    MODEL_ARCH.GPT_OSS,
    "GptOssConfig",
    {
        "head_dim": HEAD,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1.5e5, "factor": 8.0, "original_max_position_embeddings": 16,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    },
    {
        **YARN_FACTS,
        "rope.freq_base": 1.5e5,
        "rope.scaling.original_context_length": 16,
        "attention.sliding_window": 8,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 128,
    },
    parts=gpt_oss_parts,
    signs=OSS_SIGNS,
    kinds={"_exps": Kind.MXFP4},
)  # fmt: skip
LLAMA4 = Case(
    MODEL_ARCH.LLAMA4,
    "Llama4TextConfig",
    {
        "head_dim": HEAD,
        "intermediate_size": 64,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    {
        "rope.freq_base": 5e5,
        "expert_count": 4,
        "expert_used_count": 1,
        "expert_feed_forward_length": 64,
        "interleave_moe_layer_step": 2,
    },
    parts=llama4_parts,
    signs=OSS_SIGNS,
)
LLAMA4_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
LLAMA4_ROPE |= {"original_max_position_embeddings": 8192, "rope_type": "llama3", "rope_theta": 5e5}
V3 = Case(
    MODEL_ARCH.DEEPSEEK2,
    "DeepseekV3Config",
    {**DEEPSEEK, "q_lora_rank": 32, "n_group": 2, "topk_group": 1, "rope_parameters": {**DEEPSEEK_YARN}},
    {
        **DEEPSEEK_FACTS,
        **YARN_FACTS,
        "rope.scaling.yarn_log_multiplier": 0.0707,
        "attention.q_lora_rank": 32,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_group_count": 2,
        "expert_group_used_count": 1,
    },
    parts=deepseek_parts,
    signs=("kv_b_proj.weight",),
)
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
    "glm4moe": Case(
        MODEL_ARCH.GLM4_MOE,
        "Glm4MoeConfig",
        {
            **{key: DEEPSEEK[key] for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")},
            "head_dim": HEAD,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        {
            **{key: value for key, value in DEEPSEEK_FACTS.items() if "expert" in key or "leading" in key},
            "block_count": LAYERS + 1,
            "nextn_predict_layers": 1,
            "rope.dimension_count": HEAD // 2,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
        },
        parts=glm4_moe_parts,
    ),
    "ernie4_5": Case(MODEL_ARCH.ERNIE4_5, "Ernie4_5Config", {"head_dim": HEAD}, {"rope.freq_base": 5e5}),
    "seed_oss": Case(MODEL_ARCH.SEED_OSS, "SeedOssConfig", {"head_dim": HEAD}),
    "gpt-oss": OSS,
    "gpt-oss-dense": replace(OSS, kinds={"_exps": None}),
    "llama4": LLAMA4,
    "llama4-scout": replace(LLAMA4, fields={**LLAMA4.fields, "rope_parameters": LLAMA4_ROPE}, kinds={"_exps": None}),
    "deepseek2": Case(  # V2-Lite
        MODEL_ARCH.DEEPSEEK2,
        "DeepseekV2Config",
        {**DEEPSEEK, "q_lora_rank": None},
        DEEPSEEK_FACTS,
        parts=deepseek_parts,
        signs=("kv_b_proj.weight",),
    ),
    "deepseek2-old": Case(  # written before keys and values were apart
        MODEL_ARCH.DEEPSEEK2,
        "DeepseekV2Config",
        {**DEEPSEEK, "q_lora_rank": 32, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        {
            **{key: value for key, value in DEEPSEEK_FACTS.items() if "mla" not in key},
            "attention.head_count_kv": HEADS,
            "attention.key_length": 32 + HEAD,
            "attention.value_length": 32,
            "attention.q_lora_rank": 32,
            "expert_gating_func": 1,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
    ),
    "deepseek3": V3,
    "qwen3next": NEXT_CASE,
    "qwen3next-mixed": replace(NEXT_CASE, kinds={"attn_gate": Kind.F16}),
    "bert": Case(MODEL_ARCH.BERT, "BertConfig", {"type_vocab_size": 2}, rms=False),
    "modern-bert": Case(
        MODEL_ARCH.MODERN_BERT,
        "ModernBertConfig",
        {"local_attention": 8, "hidden_activation": "silu"},
        {
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 160000.0,
            "hidden_activation": "silu",
        },
        rms=False,
    ),
    "nomic-bert": Case(
        MODEL_ARCH.NOMIC_BERT, "NomicBertConfig", {}, {"rope.freq_base": 1000.0}, rms=False, parts=nomic_parts
    ),
}


def dense_model(case: Case) -> Any:
    """Returns a tiny model whose matrices have numbers of Q8_0, and whose norms and biases are no ones and zeros."""
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**{**TINY, **case.fields})
    if case.encodes:
        options = {} if case.arch is MODEL_ARCH.MODERN_BERT else {"add_pooling_layer": False}
        model = transformers.AutoModel.from_config(config, **options, attn_implementation="eager")
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, p in model.float().eval().named_parameters():
        if name.endswith(case.signs or "none"):
            size = 2**-3 if Kind.MXFP4 in case.kinds.values() else 127 * 2**-10
            p.data = torch.where(torch.rand_like(p) < 0.5, -size, size)
        elif p.ndim == 1 or name.endswith(("_norm.weight", "_bias", "conv1d.weight", "A_log")):
            p.data += torch.randn_like(p) / 8
        else:
            values = gguf.quants.quantize(p.data.mul(4).numpy(), gguf.GGMLQuantizationType.Q8_0)
            p.data = torch.from_numpy(gguf.quants.dequantize(values, gguf.GGMLQuantizationType.Q8_0)).view(p.shape)
    return model


def written(
    case: Case, model: Any, path: Path, change: Callable[[str, Tensor], Tensor] = lambda _, value: value
) -> Path:
    """Writes a model as llama.cpp's converter does. change: returns what becomes of a tensor of the file."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[case.arch])
    config, prefix = model.config, gguf.MODEL_ARCH_NAMES[case.arch]
    norm = "attention.layer_norm_rms_epsilon" if case.rms else "attention.layer_norm_epsilon"
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    eps = next(getattr(config, n) for n in names if hasattr(config, n))
    facts: Facts = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HEADS * HEAD,
        "feed_forward_length": 128,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS if case.encodes else config.num_key_value_heads,
        norm: eps,
        **({"attention.key_length": HEAD, "attention.value_length": HEAD} if "head_dim" in case.fields else {}),
        **case.facts,
    }
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
    for key, value in facts.items():
        adders[type(value)](f"{prefix}.{key}", value)
    for name, given in tensors(case, model).items():
        tensor = change(name, given)
        matrix = tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 and not re.search("norm|gate_inp|bias", name)
        kind = next((kind for part, kind in case.kinds.items() if part in name), Kind.Q8_0) if matrix else None
        values = tensor.contiguous().float().numpy()
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
        if parts := case.parts(name, value, model.config):
            found |= {part: torch.cat([found[part], rows]) if part in found else rows for part, rows in parts.items()}
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
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        turns = 8192 / (2 * torch.pi * rope["rope_theta"] ** (torch.arange(HEAD // 2) / (HEAD // 2)))
        found["rope_freqs.weight"] = torch.where(turns > 1, 1.0, rope["factor"])
    if rope.get("rope_type") == "longrope":
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
    """Returns the logits of a model; of an encoder what it makes of tokens."""
    return model(TOKENS)[0].float()


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


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek3", "qwen3next", "bert"])
def test_models_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = lowbit.from_gguf(written(CASES[name], dense_model(CASES[name]), tmp_path / "m.gguf"), dtype=torch.float16)
    model.save_pretrained(tmp_path / "saved")
    auto = transformers.AutoModel if CASES[name].encodes else transformers.AutoModelForCausalLM
    assert torch.equal(logits(auto.from_pretrained(tmp_path / "saved")), logits(model))


def test_every_architecture_is_tested() -> None:
    others = {"llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "gemma3"}  # test_gguf_model.py, test_gguf_experts.py
    assert {gguf.MODEL_ARCH_NAMES[case.arch] for case in CASES.values()} | others == KNOWN.keys()


def test_every_architecture_that_llama_cpp_knows_is_read_or_refused_by_its_name(tmp_path: Path) -> None:
    for name in {*gguf.MODEL_ARCH_NAMES.values(), "of tomorrow"} - KNOWN.keys():
        writer = gguf.GGUFWriter(path := tmp_path / "m.gguf", name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(CheckpointError, match=rf"architecture '{name}' can't be loaded; what can is llama"):
            lowbit.from_gguf(path)
    assert {*gguf.MODEL_ARCH_NAMES.values()} >= KNOWN.keys()


@pytest.mark.parametrize(("name", "matrix"), [("bert", "attn_q"), ("gpt-oss", "ffn_down_exps")])
def test_biases_that_are_no_numbers(name: str, matrix: str, tmp_path: Path) -> None:
    model, case = dense_model(CASES[name]), CASES[name]
    key = {"attn_q": "query.bias", "ffn_down_exps": "down_proj_bias"}[matrix]
    next(value for full, value in model.state_dict().items() if full.endswith(key)).fill_(torch.nan)
    with pytest.raises(CheckpointError, match=rf"blk.0.{matrix}.weight: bias\[0\] = nan must be finite"):
        lowbit.from_gguf(written(case, model, tmp_path / "m.gguf"))


def test_stacks_of_which_one_alone_has_biases(tmp_path: Path) -> None:
    one = replace(OSS, parts=lambda *given: {n: t for n, t in OSS.parts(*given).items() if "gate_exps.bias" not in n})
    with pytest.raises(CheckpointError, match=r"ffn_gate_exps.bias, blk.0.ffn_up_exps.bias must be biases of all"):
        lowbit.from_gguf(written(one, dense_model(one), tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("left", "message"),
    [({}, r"there is no blk.0.attn_v_b.weight"), ({"attn_v_b": 2}, r"keys \[4, 64, 32\] and values \[2, 32, 64\] are")],
)
def test_parts_of_a_matrix_that_do_not_fit(left: Mapping[str, int], message: str, tmp_path: Path) -> None:
    """A part that is missing, and keys and values of other numbers of heads."""

    def parts(*given: Any) -> dict[str, Tensor]:
        found = deepseek_parts(*given)
        values = [name for name in found if "attn_v_b" in name]
        kept = {name: found[name][: left["attn_v_b"]] for name in values} if left else {}
        return {name: tensor for name, tensor in found.items() if name not in values} | kept

    case = replace(V3, parts=parts)
    with pytest.raises(CheckpointError, match=message):
        lowbit.from_gguf(written(case, dense_model(case), tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("name", "tensor", "change", "message"),
    [
        ("falcon-11b", "attn_qkv.weight", lambda t: t[:64], "64 rows, which are not those of 4 heads of q and 2"),
        ("falcon-11b", "attn_qkv.weight", lambda t: torch.cat((t, t)), "256 rows, which are not those of 4 heads"),
        ("falcon", "attn_qkv.weight", lambda t: torch.cat((t, t)), "192 rows, which are not those of 4 heads"),
        ("granite", "attn_k.weight", lambda t: t[:24], "24 rows, which are not heads of 16"),
        ("qwen3next", "ssm_a", lambda t: -t, "numbers from .* to .*; they must be finite and below 0, as -exp"),
        ("qwen3next", "ssm_a", lambda t: t * torch.inf, "numbers from -inf to -inf; they must be finite"),
        ("qwen3next", "ssm_a", lambda t: t * 0, "numbers from -0 to -0; they must be finite"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(
    name: str, tensor: str, change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    """A tensor of other rows than the metadata say, and numbers that are no decay."""
    case, wrong = CASES[name], f"blk.1.{tensor}"
    changed = {wrong: change}
    path = written(case, dense_model(case), tmp_path / "m.gguf", lambda of, t: changed[of](t) if of in changed else t)
    with pytest.raises(CheckpointError, match=rf"m.gguf: {wrong}.* {message}"):
        lowbit.from_gguf(path)


WRONG: list[tuple[str, Facts, str]] = [
    (
        "mistral3",
        {"rope.freq_base": 1.0},
        "transformers makes no ministral3 model of what the metadata say: ZeroDivisionError: float division by zero",
    ),
    ("deepseek3", {"rope.dimension_count": 7}, "deepseek_v3 model .* requires an even rotary dimension, but got"),
    ("olmo2", {"attention.sliding_window": 8}, "olmo2.attention.sliding_window is 8, as of OLMo 3, which can't be"),
    ("olmoe", {"attention.clamp_kqv": 8.0}, "olmoe.attention.clamp_kqv: models that clamp q, k and v can't be loaded"),
    ("glm4", {"rope.dimension_count": 17}, "glm4.rope.dimension_count is 17; only even numbers up to 16 can be"),
    ("phi3", {"rope.dimension_count": 7}, "phi3.rope.dimension_count is 7; only even numbers up to 16 can be loaded"),
    ("granite", {"rope.dimension_count": 8}, "granite.rope.dimension_count is 8; only 16 can be loaded"),
    ("deepseek2", {"expert_gating_func": 3}, "deepseek2.expert_gating_func is 3; only 1, softmax, and 2, sigmoid"),
    ("deepseek2", {"expert_weights_norm": True}, "deepseek2.expert_weights_norm is true; of models with softmax"),
    ("deepseek2", {"rope.dimension_count": 48}, "deepseek2.rope.dimension_count is 48, but heads have 48 columns"),
    ("deepseek3", {"expert_group_count": 3}, "deepseek2.expert_group_count is 3, of which 1 are used"),
    ("qwen3next", {"ssm.group_count": 3}, "attn_qkv.weight and .*attn_gate.weight: 192 rows are not those of 3 key"),
    ("qwen3next", {"ssm.inner_size": 63}, "qwen3next.ssm.inner_size is 63, no multiple of ssm.time_step_rank, 4"),
    ("llama4", {"expert_used_count": 2}, "llama4.expert_used_count must be 1"),
    ("llama4", {"leading_dense_block_count": 1}, "llama4: models without experts, or whose first layers have none"),
    ("modern-bert", {"hidden_activation": "other"}, "modern-bert.hidden_activation is 'other'; only gelu and silu can"),
    ("nomic-bert", {"context_length": 1 << 30}, "nomic-bert.context_length is more than 1048576"),
    ("glm4moe", {"nextn_predict_layers": 5}, "glm4moe.nextn_predict_layers is 5, but there are 5 blocks"),
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
