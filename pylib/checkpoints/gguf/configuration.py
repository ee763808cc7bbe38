"""What the metadata of a GGUF file say of a model, as fields of transformers' configurations.

Keys are those of llama.cpp (gguf-py/gguf/constants.py). Some facts are in no file, and stand in llama.cpp's code alone:
which layers of Gemma 2 and Cohere 2 look at a window, and how Gemma 2 of 27B scales scores.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.dialect.fields import MOST
from lowbit.pylib.checkpoints.gguf.file import GgufFile

EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
LONG_ROPE = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
QUERIES = ("blk.0.attn_q.weight", "blk.0.attn_qkv.weight")
SLIDING, FULL = "sliding_attention", "full_attention"
SPECIAL_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings that all models with `ROPE_FACTORS` share; they were made with transformers' rope_type "llama3"."""


class About:
    """The metadata of a file. Methods raise CheckpointError where a value is missing, or no such number."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.name: object = file.metadata.get("general.architecture")

    def value(self, key: str) -> Any:
        """Returns a value of the architecture; None without. A list with the same number for
        each layer is that number."""
        found = self.file.metadata.get(f"{self.name}.{key}")
        if not isinstance(found, np.ndarray):
            return found
        if not found.size or (found != found[0]).any():
            rule = "only one number, the same for all layers, can be loaded"
            raise CheckpointError(f"{self.name}.{key} is {found}; {rule}")
        return found[0].item()

    def number(self, key: str, default: float | None = None) -> float:
        found = self.value(key)
        if found is None and default is not None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float) or not (math.isfinite(found) and found > 0):
            raise CheckpointError(f"{self.name}.{key} is {found!r}; it must be a positive number")
        return found

    def integer(self, key: str, default: int | None = None) -> int:
        found = self.number(key, default)
        if not isinstance(found, int) or found > MOST:
            raise CheckpointError(f"{self.name}.{key} is {found!r}; it must be an integer up to {MOST}")
        return found

    def has(self, tensor: str) -> bool:
        return tensor in self.file


def common(about: About) -> dict[str, Any]:
    """Returns the fields that all models have, after a look at sizes."""
    heads, hidden = about.integer("attention.head_count"), about.integer("embedding_length")
    head = head_of(about)
    _check_sizes(about, hidden, heads * head, head)
    return {
        "vocab_size": about.file.shape(EMBEDDINGS)[0],
        "hidden_size": hidden,
        "intermediate_size": about.integer("feed_forward_length"),
        "num_hidden_layers": about.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": about.integer("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": about.integer("context_length"),
        "tie_word_embeddings": not about.has(OUTPUT),
        **_special_tokens(about),
    }


def _check_sizes(about: About, hidden: int, rows: int, head: int) -> None:
    """Raise CheckpointError for sizes that the tensors do not have: a model takes memory for some of them."""
    blocks, query = about.integer("block_count"), next(filter(about.has, QUERIES), QUERIES[0])
    if blocks > len(about.file):
        raise CheckpointError(f"{about.name}.block_count is {blocks}, but there are {len(about.file)} tensors")
    rows += 2 * about.integer("attention.head_count_kv", rows // head) * head if query == QUERIES[1] else 0
    for name, index, size in ((EMBEDDINGS, 1, hidden), (query, 0, rows), (query, 1, hidden)):
        if not about.has(name):
            raise CheckpointError(f"it has no {name}, which the model needs")
        shape = about.file.shape(name)
        if len(shape) != 2 or shape[index] != size:
            raise CheckpointError(f"{name} is {list(shape)}, but by the metadata it has {size} in place {index}")
    if (found := about.value("attention.value_length")) not in (None, 0, head):
        raise CheckpointError(f"{about.name}.attention.value_length is {found!r}; only {head} can be loaded")


def _special_tokens(about: About) -> dict[str, int | None]:
    """Returns those that the model has embeddings of; llama.cpp does without the others, too. Without one for padding
    there is none: that of transformers' configurations may be beyond the embeddings."""
    found = {field: about.file.metadata.get(f"tokenizer.ggml.{n}_token_id") for n, field in SPECIAL_TOKENS.items()}
    vocabulary = about.file.shape(EMBEDDINGS)[0]
    known = {field: number for field, number in found.items() if type(number) is int and 0 <= number < vocabulary}
    return {SPECIAL_TOKENS["padding"]: None, **known}


def head_of(about: About) -> int:
    """Returns the columns of a head."""
    heads, hidden = about.integer("attention.head_count"), about.integer("embedding_length")
    return about.integer("attention.key_length", hidden // heads)


def _rms(about: About, name: str = "rms_norm_eps") -> dict[str, Any]:
    return {name: about.number("attention.layer_norm_rms_epsilon")}


def _layer_norm(about: About, name: str) -> dict[str, Any]:
    return {name: about.number("attention.layer_norm_epsilon")}


def _rope(about: About, partial: bool = False) -> dict[str, Any]:
    """Returns the rotation of all layers. partial: whether a part of a head may be rotated."""
    rope = {"rope_theta": about.number("rope.freq_base", 10000.0), "rope_type": "default", **_rotated(about, partial)}
    if about.has(ROPE_FACTORS):
        return {**rope, "rope_type": "llama3", **_llama3(about, rope["rope_theta"])}
    return {**rope, **_scaling(about)}


def _rotated(about: About, partial: bool) -> dict[str, Any]:
    """Returns which part of a head is rotated."""
    head, key = head_of(about), "rope.dimension_count"
    found = about.value(key) or head
    if found == head:
        return {"partial_rotary_factor": 1.0} if partial else {}
    if not partial or not isinstance(found, int) or not 0 < found < head:
        raise CheckpointError(f"{about.name}.{key} is {found!r}; only {head} can be loaded")
    return {"partial_rotary_factor": found / head}


def _scaling(about: About) -> dict[str, Any]:
    kind = about.value("rope.scaling.type")
    if kind in (None, "none"):
        return {}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{about.name}.rope.scaling.type is {kind!r}; only none, linear and yarn can be loaded")
    scaling = {"rope_type": kind, "factor": float(about.number("rope.scaling.factor"))}
    if kind == "yarn":
        scaling |= _yarn(about)
    return scaling


def _yarn(about: About) -> dict[str, Any]:
    """Returns YaRN's settings. Raises CheckpointError for two that transformers has in other ways, or not at all."""
    for key in ("yarn_ext_factor", "yarn_attn_factor"):
        if (found := about.value(f"rope.scaling.{key}")) not in (None, 1):
            raise CheckpointError(f"{about.name}.rope.scaling.{key} is {found!r}; only 1 can be loaded")
    given = {name: about.value(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    betas = {name: float(about.number(f"rope.scaling.yarn_{name}")) for name, value in given.items() if value}
    log = about.value("rope.scaling.yarn_log_multiplier")
    scales = {"mscale": 1.0, "mscale_all_dim": float(about.number("rope.scaling.yarn_log_multiplier"))} if log else {}
    length = about.integer("rope.scaling.original_context_length")
    return {"original_max_position_embeddings": length, **betas, **scales}


def _llama3(about: About, base: float) -> dict[str, Any]:
    """Returns the parameters of which the converter made the factors that the file has in place of them."""
    given = about.file[ROPE_FACTORS]
    if not isinstance(given, Tensor) or given.ndim != 1 or not len(given):
        raise CheckpointError(f"{ROPE_FACTORS} must be a vector of floats")
    factors, half = given.double(), len(given)
    scaling = {"factor": float(factors.max()), **LLAMA3_ROPE}
    wavelengths = 2 * math.pi * base ** (torch.arange(half, dtype=torch.float64, device="cpu") / half)
    turns = LLAMA3_ROPE["original_max_position_embeddings"] / wavelengths
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(factors, 1 / ((1 - smooth) / scaling["factor"] + smooth), rtol=1e-4):
        raise CheckpointError(f"{ROPE_FACTORS} are not those of Llama 3.1 and its successors")
    return scaling


def llama(about: About) -> dict[str, Any]:
    return {
        **_rms(about),
        "rope_parameters": _rope(about),
        "attention_bias": about.has("blk.0.attn_q.bias"),
        "mlp_bias": about.has("blk.0.ffn_up.bias"),
    }


def qwen2(about: About) -> dict[str, Any]:
    return {**_rms(about), "rope_parameters": _rope(about)}


def qwen3(about: About) -> dict[str, Any]:
    return {**qwen2(about), "attention_bias": about.has("blk.0.attn_q.bias")}


def _experts(about: About, count: str) -> dict[str, Any]:
    """Returns how many experts there are, by the name `count`, and how many a token has."""
    found = {count: about.integer("expert_count"), "num_experts_per_tok": about.integer("expert_used_count")}
    if found["num_experts_per_tok"] > found[count]:
        raise CheckpointError(f"{about.name}.expert_used_count is more than {about.name}.expert_count, {found[count]}")
    return found


def mixtral(about: About) -> dict[str, Any]:
    return {**qwen2(about), **_experts(about, "num_local_experts")}


def _qwen_experts(about: About) -> dict[str, Any]:
    blocks = range(about.integer("block_count"))
    return {
        **_experts(about, "num_experts"),
        "moe_intermediate_size": about.integer("expert_feed_forward_length"),
        "mlp_only_layers": [block for block in blocks if not about.has(f"blk.{block}.ffn_gate_inp.weight")],
    }


def qwen2_moe(about: About) -> dict[str, Any]:
    shared = about.integer("expert_shared_feed_forward_length")
    return {**qwen2(about), **_qwen_experts(about), "shared_expert_intermediate_size": shared}


def qwen3_moe(about: About) -> dict[str, Any]:
    return {**qwen3(about), **_qwen_experts(about), "norm_topk_prob": True}


def gemma3(about: About) -> dict[str, Any]:
    """Returns what Gemma 3 has of its own; of its sizes, 27B alone scales scores by the hidden size."""
    blocks, pattern = about.integer("block_count"), about.integer("attention.sliding_window_pattern", 6)
    head, heads = about.integer("attention.key_length", 256), about.integer("attention.head_count")
    every = {"rope_theta": about.number("rope.freq_base", 1e6), "rope_type": "default", **_scaling(about)}
    local = {"rope_theta": about.number("rope.freq_base_swa", 10000.0), "rope_type": "default"}
    _rotated(about, partial=False)
    return {
        **_rms(about),
        "head_dim": head,
        "query_pre_attn_scalar": about.integer("embedding_length") // heads if blocks == 62 else head,
        "sliding_window": about.integer("attention.sliding_window"),
        "layer_types": _layer_types(blocks, pattern),
        "rope_parameters": {FULL: every, SLIDING: local},
        "attention_bias": False,
        "final_logit_softcapping": _softcap(about, "final"),
    }


def _softcap(about: About, what: str) -> float | None:
    """Returns what logits, or scores, are kept below by a tanh; None where they are not."""
    key = f"{what}_logit_softcapping"
    return None if about.value(key) in (None, 0) else float(about.number(key))


def _layer_types(blocks: int, every: int) -> list[str]:
    """Returns the kinds of layers, of which one in `every` looks at all tokens, the others at a window."""
    return [SLIDING if number % every else FULL for number in range(1, blocks + 1)]


def gemma(about: About) -> dict[str, Any]:
    return qwen3(about)


def gemma2(about: About) -> dict[str, Any]:
    """Returns what Gemma 2 has of its own; of its sizes, 27B alone scales scores by the hidden size."""
    blocks, heads = about.integer("block_count"), about.integer("attention.head_count")
    return {
        **qwen3(about),
        "query_pre_attn_scalar": about.integer("embedding_length") // heads if blocks == 46 else head_of(about),
        "sliding_window": about.integer("attention.sliding_window"),
        "layer_types": _layer_types(blocks, 2),
        "attn_logit_softcapping": _softcap(about, "attn"),
        "final_logit_softcapping": _softcap(about, "final"),
    }


def phi3(about: About) -> dict[str, Any]:
    return {
        **_rms(about),
        "rope_parameters": {**_rope(about, partial=True), **_long_rope(about)},
        "sliding_window": about.value("attention.sliding_window") or None,
    }


def _long_rope(about: About) -> dict[str, Any]:
    """Returns the factors for short and long texts, which are tensors in a file."""
    if not any(map(about.has, LONG_ROPE.values())):
        return {}
    found = {name: about.file[tensor] if about.has(tensor) else None for name, tensor in LONG_ROPE.items()}
    if not all(isinstance(t, Tensor) and t.ndim == 1 and t.is_floating_point() for t in found.values()):
        raise CheckpointError(f"{' and '.join(LONG_ROPE.values())} must be two vectors of floats")
    length = about.integer("rope.scaling.original_context_length")
    factors: dict[str, Any] = {name: t.tolist() for name, t in found.items() if isinstance(t, Tensor)}
    return {"rope_type": "longrope", "original_max_position_embeddings": length, **factors}


def cohere(about: About) -> dict[str, Any]:
    return {
        **_layer_norm(about, "layer_norm_eps"),
        "rope_parameters": _rope(about),
        "logit_scale": about.number("logit_scale"),
        "attention_bias": about.has("blk.0.attn_q.bias"),
        "use_qk_norm": about.has("blk.0.attn_q_norm.weight"),
    }


def cohere2(about: About) -> dict[str, Any]:
    found = cohere(about)
    del found["use_qk_norm"]
    types = _layer_types(about.integer("block_count"), 4)
    return {**found, "sliding_window": about.integer("attention.sliding_window"), "layer_types": types}


def falcon(about: About) -> dict[str, Any]:
    """Returns Falcon's fields: 7B has one key, 11B several and one norm, 40B and 180B two norms.

    Raises CheckpointError for Falcon RW, which has biases, and places as ALiBi has them.
    """
    if about.has("blk.0.attn_qkv.bias"):
        raise CheckpointError("blk.0.attn_qkv.bias: models with ALiBi, such as Falcon RW, can't be loaded")
    heads, keys = about.integer("attention.head_count"), about.integer("attention.head_count_kv")
    if heads % keys:
        raise CheckpointError(f"falcon.attention.head_count is {heads}, no multiple of head_count_kv, {keys}")
    norms = 2 if about.has("blk.0.attn_norm_2.weight") else 1
    return {
        **_layer_norm(about, "layer_norm_epsilon"),
        "rope_parameters": _rope(about),
        "ffn_hidden_size": about.integer("feed_forward_length"),
        "num_kv_heads": keys,
        "multi_query": True,
        "new_decoder_architecture": keys > 1 or norms > 1,
        "num_ln_in_parallel_attn": norms,
        "alibi": False,
        "bias": False,
        "parallel_attn": True,
    }


def granite(about: About) -> dict[str, Any]:
    """Returns Granite's factors, which are 1 where a file has none."""
    keys = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
    keys |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
    return {**llama(about), **{field: float(about.number(key, 1.0)) for field, key in keys.items()}}


def mistral3(about: About) -> dict[str, Any]:
    """Returns what Ministral 3 has beside Llama: queries of long texts are scaled (attention.temperature_scale)."""
    rope, length = _rope(about), about.integer("context_length")
    beta = about.value("attention.temperature_scale")
    scaled = {"llama_4_scaling_beta": float(about.number("attention.temperature_scale")) if beta else 0.0}
    return {**_rms(about), "rope_parameters": {"original_max_position_embeddings": length, **rope, **scaled}}


def olmo2(about: About) -> dict[str, Any]:
    if window := about.value("attention.sliding_window"):
        raise CheckpointError(f"olmo2.attention.sliding_window is {window!r}, as of OLMo 3, which can't be loaded")
    return qwen3(about)


def smollm3(about: About) -> dict[str, Any]:
    return {**llama(about), "no_rope_layer_interval": 4}


def stablelm(about: About) -> dict[str, Any]:
    return {
        **_layer_norm(about, "layer_norm_eps"),
        "rope_parameters": _rope(about, partial=True),
        "use_qkv_bias": about.has("blk.0.attn_q.bias"),
        "use_parallel_residual": bool(about.value("use_parallel_residual")),
    }


def starcoder2(about: About) -> dict[str, Any]:
    return {
        **_layer_norm(about, "norm_epsilon"),
        "rope_parameters": _rope(about),
        "use_bias": about.has("blk.0.attn_q.bias"),
    }


def glm4(about: About) -> dict[str, Any]:
    if about.value("rope.dimension_sections"):
        raise CheckpointError("glm4.rope.dimension_sections: rotations for images can't be loaded")
    rope = _rope(about, partial=True)
    return {**_rms(about), "rope_parameters": rope, "attention_bias": about.has("blk.0.attn_q.bias")}


def ernie4_5(about: About) -> dict[str, Any]:
    return {**qwen2(about), "use_bias": about.has("blk.0.attn_q.bias")}


def seed_oss(about: About) -> dict[str, Any]:
    return {**qwen3(about), "attention_out_bias": about.has("blk.0.attn_output.bias"), "mlp_bias": False}


def olmoe(about: About) -> dict[str, Any]:
    if about.value("attention.clamp_kqv"):
        raise CheckpointError("olmoe.attention.clamp_kqv: models that clamp q, k and v can't be loaded")
    return {**qwen3(about), **_experts(about, "num_experts"), "norm_topk_prob": False}
