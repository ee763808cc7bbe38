"""Translates what a GGUF file says of its model for transformers: the configuration, and the names of tensors.

Keys of the metadata and names of tensors are those of llama.cpp (gguf-py/gguf/constants.py). Its converters change some
tensors (convert_hf_to_gguf.py), which `Source` undoes:

    llama    rows of q and k: llama.cpp rotates neighbours, transformers the halves of a head
    gemma3   norms multiply by the weight in the file, by 1 + weight in transformers

Of NVFP4 it writes the scale of the whole matrix beside it, f32 [1], or [experts] of a stack: `blk.0.attn_q.scale` is a
factor of `blk.0.attn_q.weight`. A matrix without one has 1. `input_scale` is for activations in f4, and is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.dialect.fields import MOST
from lowbit.pylib.checkpoints.gguf.file import GgufFile

EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROUTER = {"ffn_gate_inp": "mlp.gate"}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
STACKS = {"gate_up_proj": ("ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
"""The matrices of experts in transformers, and what their rows may be in a file, from the top down."""
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
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


@dataclass(frozen=True)
class Architecture:
    """A kind of model.

    model_type    what transformers calls it
    names         modules of a block, by what they are called in a file
    more          returns the fields of the configuration that not all architectures have
    paired_rows   rows of q and k are in the order in which llama.cpp rotates them
    norm_shift    what the weights of norms are larger by than in transformers
    with_experts  the kind of a model that a file calls the same, but that has experts; None if there is none
    """

    model_type: str
    names: Mapping[str, str]
    more: Callable[[About], dict[str, Any]]
    paired_rows: bool = False
    norm_shift: float = 0.0
    with_experts: Architecture | None = None

    @property
    def has_experts(self) -> bool:
        """Tells whether blocks of the architecture may have experts."""
        return ROUTER.keys() <= self.names.keys()


@dataclass(frozen=True)
class Source:
    """A file as the source of a model of transformers.

    config   the fields of the model's configuration
    """

    file: GgufFile
    architecture: Architecture
    config: Mapping[str, Any]

    def names(self) -> Iterator[tuple[str, str]]:
        """Yields the names of tensors but for stacks of experts: in the file, and in the model. Raises CheckpointError
        for one that is unknown."""
        stacks = {name for matrices in self.experts().values() for names in matrices.values() for name in names}
        for name in self.file:
            if name != ROPE_FACTORS and name not in stacks and not self._belongs_to_matrix(name):
                yield name, self._renamed(name)

    def _belongs_to_matrix(self, name: str) -> bool:
        """Tells whether a tensor is a factor of a matrix of a quantized type, or of its inputs."""
        path, _, part = name.rpartition(".")
        weight = f"{path}.weight"
        return part in ("scale", "input_scale") and weight in self.file and not self.file.is_dense(weight)

    def factors(self, name: str) -> Tensor | None:
        """Returns by what a matrix of a quantized type is multiplied, or each of a stack: f32 [1] or [experts]; None
        without."""
        beside = f"{name.removesuffix('weight')}scale"
        if beside not in self.file or not self._belongs_to_matrix(beside):
            return None
        count = self.file.shape(name)[0] if len(self.file.shape(name)) == 3 else 1
        if self.file.shape(beside) != (count,) or self.file.type_of(beside) != "float32":
            found = f"{self.file.type_of(beside)} {list(self.file.shape(beside))}"
            raise CheckpointError(f"{self.file.path}: {beside} is {found}, but must be float32 [{count}]")
        return cast(Tensor, self.file[beside])

    def experts(self) -> dict[str, dict[str, list[str]]]:
        """Returns what each matrix of the experts of a block is made of, by the name of their module in the model."""
        blocks = range(self.config["num_hidden_layers"] if self.architecture.has_experts else 0)
        found = {f"model.layers.{block}.mlp.experts": self._matrices(f"blk.{block}") for block in blocks}
        return {module: matrices for module, matrices in found.items() if matrices}

    def _matrices(self, block: str) -> dict[str, list[str]]:
        found = {
            matrix: [name for stack in stacks if (name := f"{block}.{stack}.weight") in self.file]
            for matrix, stacks in STACKS.items()
        }
        return {matrix: names for matrix, names in found.items() if names}

    def _renamed(self, name: str) -> str:
        path, _, part = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d{1,9})\.(\w+)", path)
        module = self.architecture.names.get(block[2]) if block else TOP.get(path)
        if module is None or part not in ("weight", "bias"):
            raise CheckpointError(f"{self.file.path}: {name} is no tensor of {self.architecture.model_type} models")
        return f"model.layers.{block[1]}.{module}.{part}" if block else f"{module}.{part}"

    def order(self, name: str) -> Tensor | None:
        """Returns which row of a tensor comes first, second and so on in transformers; None if none moves."""
        if not self.architecture.paired_rows or not re.search(r"\.attn_[qk]\.", name):
            return None
        rows, head = self.file.shape(name)[0], self.config["head_dim"]
        if rows % head or head % 2:
            raise CheckpointError(f"{self.file.path}: {name} has {rows} rows, which are not heads of {head}")
        return torch.arange(rows, device="cpu").view(-1, head // 2, 2).mT.reshape(-1)

    def dense(self, name: str, value: Tensor) -> Tensor:
        """Returns a dense tensor as transformers has it."""
        if name.endswith(".ffn_gate_inp_shexp.weight"):
            return value.view(1, -1)
        shift = self.architecture.norm_shift if name.endswith("norm.weight") else 0.0
        return value.float() - shift if shift else value


def read_source(file: GgufFile) -> Source:
    """Returns a file as the source of a model. Raises CheckpointError for an architecture that is not in `KNOWN`."""
    about = About(file)
    try:
        known = _architecture(about)
        return Source(file, known, {**_common(about), **known.more(about)})
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from error


def _architecture(about: About) -> Architecture:
    known = KNOWN.get(about.name) if isinstance(about.name, str) else None
    if known is None:
        raise CheckpointError(f"architecture {about.name!r} can't be loaded; what can is {', '.join(KNOWN)}")
    if known.has_experts or (count := about.value("expert_count")) in (None, 0, 1):
        return known
    if known.with_experts is None:
        raise CheckpointError(f"{about.name}.expert_count is {count!r}; only 1 can be loaded")
    return known.with_experts


def _common(about: About) -> dict[str, Any]:
    heads, hidden = about.integer("attention.head_count"), about.integer("embedding_length")
    head = about.integer("attention.key_length", hidden // heads)
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
        "rms_norm_eps": about.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not about.has(OUTPUT),
        **_special_tokens(about),
    }


def _check_sizes(about: About, hidden: int, rows: int, head: int) -> None:
    """Raise CheckpointError for sizes that the tensors do not have: a model takes memory for some of them."""
    blocks, query = about.integer("block_count"), "blk.0.attn_q.weight"
    if blocks > len(about.file):
        raise CheckpointError(f"{about.name}.block_count is {blocks}, but there are {len(about.file)} tensors")
    for name, index, size in ((EMBEDDINGS, 1, hidden), (query, 0, rows), (query, 1, hidden)):
        if not about.has(name):
            raise CheckpointError(f"it has no {name}, which the model needs")
        shape = about.file.shape(name)
        if len(shape) != 2 or shape[index] != size:
            raise CheckpointError(f"{name} is {list(shape)}, but by the metadata it has {size} in place {index}")
    for key, usual in (("rope.dimension_count", head), ("attention.value_length", head)):
        if (found := about.value(key)) not in (None, 0, usual):
            raise CheckpointError(f"{about.name}.{key} is {found!r}; only {usual} can be loaded")


def _special_tokens(about: About) -> dict[str, int]:
    """Returns those that the model has embeddings of; llama.cpp does without the others, too."""
    found = {field: about.file.metadata.get(f"tokenizer.ggml.{n}_token_id") for n, field in SPECIAL_TOKENS.items()}
    vocabulary = about.file.shape(EMBEDDINGS)[0]
    return {field: number for field, number in found.items() if type(number) is int and 0 <= number < vocabulary}


# -- what the architectures do not share


def _rope(about: About) -> dict[str, Any]:
    """Returns the rotation of all layers."""
    rope = {"rope_theta": about.number("rope.freq_base", 10000.0), "rope_type": "default"}
    if about.has(ROPE_FACTORS):
        return {**rope, "rope_type": "llama3", **_llama3(about, rope["rope_theta"])}
    return {**rope, **_scaling(about)}


def _scaling(about: About) -> dict[str, Any]:
    kind = about.value("rope.scaling.type")
    if kind in (None, "none"):
        return {}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{about.name}.rope.scaling.type is {kind!r}; only none, linear and yarn can be loaded")
    scaling = {"rope_type": kind, "factor": float(about.number("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = about.integer("rope.scaling.original_context_length")
    return scaling


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


def _llama(about: About) -> dict[str, Any]:
    return {
        "rope_parameters": _rope(about),
        "attention_bias": about.has("blk.0.attn_q.bias"),
        "mlp_bias": about.has("blk.0.ffn_up.bias"),
    }


def _qwen2(about: About) -> dict[str, Any]:
    return {"rope_parameters": _rope(about)}


def _qwen3(about: About) -> dict[str, Any]:
    return {"rope_parameters": _rope(about), "attention_bias": about.has("blk.0.attn_q.bias")}


def _experts(about: About, count: str) -> dict[str, Any]:
    """Returns how many experts there are, by the name `count`, and how many a token has."""
    found = {count: about.integer("expert_count"), "num_experts_per_tok": about.integer("expert_used_count")}
    if found["num_experts_per_tok"] > found[count]:
        raise CheckpointError(f"{about.name}.expert_used_count is more than {about.name}.expert_count, {found[count]}")
    return found


def _mixtral(about: About) -> dict[str, Any]:
    return {"rope_parameters": _rope(about), **_experts(about, "num_local_experts")}


def _qwen_experts(about: About) -> dict[str, Any]:
    blocks = range(about.integer("block_count"))
    return {
        **_experts(about, "num_experts"),
        "moe_intermediate_size": about.integer("expert_feed_forward_length"),
        "mlp_only_layers": [block for block in blocks if not about.has(f"blk.{block}.ffn_gate_inp.weight")],
    }


def _qwen2_moe(about: About) -> dict[str, Any]:
    shared = about.integer("expert_shared_feed_forward_length")
    return {**_qwen2(about), **_qwen_experts(about), "shared_expert_intermediate_size": shared}


def _qwen3_moe(about: About) -> dict[str, Any]:
    return {**_qwen3(about), **_qwen_experts(about), "norm_topk_prob": True}


def _gemma3(about: About) -> dict[str, Any]:
    """Returns what Gemma 3 has of its own; of its sizes, 27B alone scales scores by the hidden size."""
    blocks, pattern = about.integer("block_count"), about.integer("attention.sliding_window_pattern", 6)
    head, heads = about.integer("attention.key_length", 256), about.integer("attention.head_count")
    every = {"rope_theta": about.number("rope.freq_base", 1e6), "rope_type": "default", **_scaling(about)}
    local = {"rope_theta": about.number("rope.freq_base_swa", 10000.0), "rope_type": "default"}
    sliding, full = "sliding_attention", "full_attention"
    return {
        "head_dim": head,
        "query_pre_attn_scalar": about.integer("embedding_length") // heads if blocks == 62 else head,
        "sliding_window": about.integer("attention.sliding_window"),
        "layer_types": [sliding if number % pattern else full for number in range(1, blocks + 1)],
        "rope_parameters": {full: every, sliding: local},
        "attention_bias": False,
        "final_logit_softcapping": _softcap(about),
    }


def _softcap(about: About) -> float | None:
    """Returns what logits are kept below by a tanh; None where they are not."""
    key = "final_logit_softcapping"
    return None if about.value(key) in (None, 0) else float(about.number(key))


_MIXTRAL = Architecture("mixtral", {**BLOCK, **ROUTER}, _mixtral, paired_rows=True)
KNOWN: Mapping[str, Architecture] = {
    "llama": Architecture("llama", BLOCK, _llama, paired_rows=True, with_experts=_MIXTRAL),
    "qwen2": Architecture("qwen2", BLOCK, _qwen2),
    "qwen3": Architecture("qwen3", {**BLOCK, **HEAD_NORMS}, _qwen3),
    "qwen2moe": Architecture("qwen2_moe", {**BLOCK, **ROUTER, **SHARED_EXPERT}, _qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", {**BLOCK, **HEAD_NORMS, **ROUTER}, _qwen3_moe),
    "gemma3": Architecture("gemma3_text", {**BLOCK, **HEAD_NORMS, **GEMMA_NORMS}, _gemma3, norm_shift=1.0),
}
"""The architectures by the names that llama.cpp gives them."""
