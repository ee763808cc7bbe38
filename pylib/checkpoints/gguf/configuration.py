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
Query = tuple[str, int, int]
"""A tensor that has the rows of q, and its rows and columns."""
LATENT_QUERY = "blk.0.attn_q_b.weight"
SOFTMAX, SIGMOID = 1, 2
"""llama.cpp's numbers of the functions by which tokens choose experts."""
TOKEN_TYPES, LONGEST = "token_types.weight", 1 << 20
SLIDING, FULL = "sliding_attention", "full_attention"
SPECIAL_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
LLAMA3_LENGTH, LLAMA3_TURNS = 8192, ((1.0, 4.0), (1.0, 1.0))
"""The settings of models with `ROPE_FACTORS`, which were made with transformers' rope_type "llama3": how long texts
were at first, and how often a slow and a fast angle turned in these, in Llama 3.1 and in Llama 4."""


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

    def count(self, key: str) -> int:
        """Returns an integer that may be 0, and is 0 where there is none."""
        return 0 if self.value(key) in (None, 0) else self.integer(key)

    def has(self, tensor: str) -> bool:
        return tensor in self.file

    @property
    def blocks(self) -> int:
        """The blocks of the model, without those that predict more tokens."""
        blocks, more = self.integer("block_count"), self.count("nextn_predict_layers")
        if more >= blocks:
            raise CheckpointError(f"{self.name}.nextn_predict_layers is {more}, but there are {blocks} blocks")
        return blocks - more


def common(about: About, query: Query) -> dict[str, Any]:
    """Returns the fields that all models have, after a look at sizes. query: a tensor of q, and its shape."""
    heads, hidden = about.integer("attention.head_count"), about.integer("embedding_length")
    head = head_of(about)
    _check_sizes(about, hidden, query)
    return {
        "vocab_size": about.file.shape(EMBEDDINGS)[0],
        "hidden_size": hidden,
        "intermediate_size": about.integer("feed_forward_length"),
        "num_hidden_layers": about.blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": about.integer("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": about.integer("context_length"),
        "tie_word_embeddings": not about.has(OUTPUT),
        **_special_tokens(about),
    }


def _check_sizes(about: About, hidden: int, query: Query) -> None:
    """Raise CheckpointError for sizes that the tensors do not have: a model takes memory for some of them."""
    blocks, (of_q, rows, columns) = about.blocks, query
    if blocks > len(about.file):
        raise CheckpointError(f"{about.name}.block_count is {blocks}, but there are {len(about.file)} tensors")
    for name, index, size in ((EMBEDDINGS, 1, hidden), (of_q, 0, rows), (of_q, 1, columns)):
        if not about.has(name):
            raise CheckpointError(f"it has no {name}, which the model needs")
        shape = about.file.shape(name)
        if len(shape) != 2 or shape[index] != size:
            raise CheckpointError(f"{name} is {list(shape)}, but by the metadata it has {size} in place {index}")


def queries(about: About) -> Query:
    """Returns the tensor of q, alone or with k and v, and its shape: heads of which all have one size."""
    heads, head = about.integer("attention.head_count"), head_of(about)
    if (found := about.value("attention.value_length")) not in (None, 0, head):
        raise CheckpointError(f"{about.name}.attention.value_length is {found!r}; only {head} can be loaded")
    name = next(filter(about.has, QUERIES), QUERIES[0])
    rows = heads + (2 * about.integer("attention.head_count_kv", heads) if name == QUERIES[1] else 0)
    return name, rows * head, about.integer("embedding_length")


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
    if not partial or not isinstance(found, int) or not 0 < found < head or found % 2:
        allowed = f"even numbers up to {head}" if partial else head
        raise CheckpointError(f"{about.name}.{key} is {found!r}; only {allowed} can be loaded")
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
    wavelengths = 2 * math.pi * base ** (torch.arange(half, dtype=torch.float64, device="cpu") / half)
    turns = LLAMA3_LENGTH / wavelengths
    for low, high in LLAMA3_TURNS:
        smooth = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns > low).double()
        if torch.allclose(factors, 1 / ((1 - smooth) / factors.max() + smooth), rtol=1e-4):
            bounds = {"low_freq_factor": low, "high_freq_factor": high}
            return {"factor": float(factors.max()), "original_max_position_embeddings": LLAMA3_LENGTH, **bounds}
    raise CheckpointError(f"{ROPE_FACTORS} are not those of Llama 3.1 and its successors")


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
    blocks = range(about.blocks)
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
    blocks, pattern = about.blocks, about.integer("attention.sliding_window_pattern", 6)
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
    blocks, heads = about.blocks, about.integer("attention.head_count")
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
    types = _layer_types(about.blocks, 4)
    return {**found, "sliding_window": about.integer("attention.sliding_window"), "layer_types": types}


def has_two_norms(about: About) -> bool:
    """Tells whether Falcon's attention and MLP have a norm each."""
    return about.has("blk.0.attn_norm_2.weight")


def falcon(about: About) -> dict[str, Any]:
    """Returns Falcon's fields: 7B has one key, 11B several and one norm, 40B and 180B two norms.

    Raises CheckpointError for Falcon RW, which has biases, and places as ALiBi has them.
    """
    if about.has("blk.0.attn_qkv.bias"):
        raise CheckpointError("blk.0.attn_qkv.bias: models with ALiBi, such as Falcon RW, can't be loaded")
    heads, keys = about.integer("attention.head_count"), about.integer("attention.head_count_kv")
    if heads % keys:
        raise CheckpointError(f"falcon.attention.head_count is {heads}, no multiple of head_count_kv, {keys}")
    norms = 2 if has_two_norms(about) else 1
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


def gpt_oss(about: About) -> dict[str, Any]:
    """Returns gpt-oss's fields. YaRN's bounds are no integers in transformers; llama.cpp rounds them."""
    rope = _rope(about)
    return {
        **_rms(about),
        **_experts(about, "num_local_experts"),
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
        "intermediate_size": about.integer("expert_feed_forward_length"),
        "sliding_window": about.integer("attention.sliding_window"),
        "layer_types": _layer_types(about.blocks, 2),
        "attention_bias": about.has("blk.0.attn_q.bias"),
    }


def llama4(about: About) -> dict[str, Any]:
    """Returns Llama 4's fields. Of its sizes, that of 128 experts has no norms of q and k."""
    experts = _experts(about, "num_local_experts")
    if experts["num_experts_per_tok"] != 1:
        raise CheckpointError("llama4.expert_used_count must be 1")
    if about.value("expert_feed_forward_length") is None or about.count("leading_dense_block_count"):
        raise CheckpointError("llama4: models without experts, or whose first layers have none, can't be loaded")
    return {
        **_rms(about),
        **experts,
        "rope_parameters": _rope(about),
        "intermediate_size": about.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": about.integer("feed_forward_length"),
        "interleave_moe_layer_step": about.integer("interleave_moe_layer_step"),
        "use_qk_norm": experts["num_local_experts"] != 128,
        "attention_bias": about.has("blk.0.attn_q.bias"),
    }


def latent_queries(about: About) -> Query:
    """Returns the tensor of q of models whose keys and values are of a latent vector, and its shape."""
    rows = about.integer("attention.head_count") * _latent_head(about, "key")
    if about.has(LATENT_QUERY):
        return LATENT_QUERY, rows, about.integer("attention.q_lora_rank")
    return QUERIES[0], rows, about.integer("embedding_length")


def _latent_head(about: About, what: str) -> int:
    """Returns the columns of a head's keys or values: newer files say under this name what they have in common."""
    mla = f"attention.{what}_length_mla"
    return about.integer(mla if about.value(mla) else f"attention.{what}_length")


def _deepseek(about: About) -> dict[str, Any]:
    """Returns what DeepSeek 2 and 3 share."""
    rotated, head = about.integer("rope.dimension_count"), _latent_head(about, "key")
    if rotated >= head:
        raise CheckpointError(f"{about.name}.rope.dimension_count is {rotated}, but heads have {head} columns")
    return {
        **_rms(about),
        **_routed(about),
        "rope_parameters": _latent_rope(about),
        "num_key_value_heads": about.integer("attention.head_count"),
        "q_lora_rank": about.integer("attention.q_lora_rank") if about.has(LATENT_QUERY) else None,
        "kv_lora_rank": about.integer("attention.kv_lora_rank"),
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": _latent_head(about, "value"),
        "attention_bias": about.has("blk.0.attn_q_a.bias"),
    }


def _routed(about: About) -> dict[str, Any]:
    """Returns how tokens choose experts, of which groups are chosen first. Files that know no groups have one."""
    groups, used = about.count("expert_group_count") or 1, about.count("expert_group_used_count") or 1
    experts = _experts(about, "n_routed_experts")
    if used > groups or experts["n_routed_experts"] % groups:
        raise CheckpointError(f"{about.name}.expert_group_count is {groups}, of which {used} are used")
    return {
        **experts,
        "first_k_dense_replace": about.count("leading_dense_block_count"),
        "moe_intermediate_size": about.integer("expert_feed_forward_length"),
        "n_shared_experts": about.integer("expert_shared_count"),
        "routed_scaling_factor": float(about.number("expert_weights_scale", 1.0)),
        "n_group": groups,
        "topk_group": used,
    }


def _latent_rope(about: About) -> dict[str, Any]:
    """Returns the rotation of a part of each head. The files have a tenth of YaRN's logarithmic multiplier."""
    rope = {"rope_theta": about.number("rope.freq_base", 10000.0), "rope_type": "default", **_scaling(about)}
    scales = {name: 10 * rope[name] for name in ("mscale_all_dim",) if name in rope}
    return {**rope, **scales, **({"mscale": scales["mscale_all_dim"]} if scales else {})}


def has_sigmoid(about: About) -> bool:
    """Tells whether tokens choose experts by sigmoids, as in DeepSeek 3, and not by softmax. Raises CheckpointError for
    other functions."""
    if (found := about.value("expert_gating_func")) not in (None, 0, SOFTMAX, SIGMOID):
        rule = f"only {SOFTMAX}, softmax, and {SIGMOID}, sigmoid, can be loaded"
        raise CheckpointError(f"{about.name}.expert_gating_func is {found!r}; {rule}")
    return found == SIGMOID


def deepseek_v2(about: About) -> dict[str, Any]:
    if about.value("expert_weights_norm"):
        raise CheckpointError("deepseek2.expert_weights_norm is true; of models with softmax, only false can be loaded")
    found = _deepseek(about)
    return {**found, "topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


def deepseek_v3(about: About) -> dict[str, Any]:
    return {**_deepseek(about), "norm_topk_prob": bool(about.value("expert_weights_norm")), "num_mtp_layers": 0}


def gated_queries(about: About) -> Query:
    """Returns the tensor of q of models whose heads have a gate each, and its shape."""
    name = f"blk.{about.integer('full_attention_interval', 4) - 1}.attn_q.weight"
    return name, 2 * about.integer("attention.head_count") * head_of(about), about.integer("embedding_length")


def qwen3_next(about: About) -> dict[str, Any]:
    blocks, every = about.blocks, about.integer("full_attention_interval", 4)
    values, inner = about.integer("ssm.time_step_rank"), about.integer("ssm.inner_size")
    if inner % values:
        raise CheckpointError(f"qwen3next.ssm.inner_size is {inner}, no multiple of ssm.time_step_rank, {values}")
    return {
        **_rms(about),
        **_qwen_experts(about),
        "rope_parameters": _rope(about, partial=True),
        "shared_expert_intermediate_size": about.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
        "layer_types": ["linear_attention" if number % every else FULL for number in range(1, blocks + 1)],
        "linear_conv_kernel_dim": about.integer("ssm.conv_kernel"),
        "linear_key_head_dim": about.integer("ssm.state_size"),
        "linear_num_key_heads": about.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": inner // values,
        "attention_bias": False,
    }


def _encoder(about: About) -> dict[str, Any]:
    """Returns what encoders share. Raises CheckpointError for lengths of more than any file: buffers are as long."""
    if about.integer("context_length") > LONGEST:
        raise CheckpointError(f"{about.name}.context_length is more than {LONGEST}")
    types = about.file.shape(TOKEN_TYPES)[0] if about.has(TOKEN_TYPES) else 1
    return {**_layer_norm(about, "layer_norm_eps"), "type_vocab_size": types}


def bert(about: About) -> dict[str, Any]:
    return {**_encoder(about), "hidden_act": "gelu"}


def nomic_bert(about: About) -> dict[str, Any]:
    padding = _special_tokens(about)["pad_token_id"] or 0  # without which transformers makes no such configuration
    return {**_encoder(about), "rope_parameters": _rope(about), "hidden_act": "silu", "pad_token_id": padding}


def glm4_moe(about: About) -> dict[str, Any]:
    if not has_sigmoid(about):
        raise CheckpointError("glm4moe.expert_gating_func must be sigmoid")
    return {
        **_rms(about),
        **_routed(about),
        "rope_parameters": _rope(about, partial=True),
        "norm_topk_prob": bool(about.value("expert_weights_norm")),
        "use_qk_norm": about.has("blk.0.attn_q_norm.weight"),
        "attention_bias": about.has("blk.0.attn_q.bias"),
    }


def modern_bert(about: About) -> dict[str, Any]:
    """Returns ModernBERT's fields: one layer in a few looks at all tokens, the first one among them."""
    every = about.integer("attention.sliding_window_pattern", 3)
    bases = {FULL: about.number("rope.freq_base", 160000.0), SLIDING: about.number("rope.freq_base_swa", 10000.0)}
    if (gate := about.value("hidden_activation") or "gelu") not in ("gelu", "silu"):
        raise CheckpointError(f"modern-bert.hidden_activation is {gate!r}; only gelu and silu can be loaded")
    _rotated(about, partial=False)
    return {
        **_layer_norm(about, "norm_eps"),
        "hidden_activation": gate,
        "layer_types": [SLIDING if number % every else FULL for number in range(about.blocks)],
        "local_attention": about.integer("attention.sliding_window"),
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
    }
