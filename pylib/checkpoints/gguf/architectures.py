"""What a GGUF file says of its model, in transformers' terms: the configuration, and the names of tensors.

Keys of the metadata and names of tensors are those of llama.cpp (gguf-py/gguf/constants.py). Its converters change some
tensors (convert_hf_to_gguf.py), which `Source` undoes:

    llama    rows of q and k: llama.cpp rotates neighbours, transformers the halves of a head
    gemma3   norms multiply by the weight in the file, by 1 + weight in transformers
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.dialect.spec import MOST
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
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SPECIAL_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all models with `ROPE_FACTORS` have in common; they were made with transformers' rope_type "llama3"."""


class About:
    """The metadata of a file. Methods raise CheckpointError where a value is missing, or no such number."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.name: object = file.metadata.get("general.architecture")

    def value(self, key: str) -> Any:
        """Returns a value of the architecture; None without. Of a number for each layer, all the same, the number."""
        found = self.file.metadata.get(f"{self.name}.{key}")
        if isinstance(found, np.ndarray) and found.size and bool((found == found[0]).all()):
            return found[0].item()
        return found

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
    """

    model_type: str
    names: Mapping[str, str]
    more: Callable[[About], dict[str, Any]]
    paired_rows: bool = False
    norm_shift: float = 0.0


@dataclass(frozen=True)
class Source:
    """A file as the source of a model of transformers.

    config   the fields of the model's configuration
    """

    file: GgufFile
    architecture: Architecture
    config: Mapping[str, Any]

    def names(self) -> Iterator[tuple[str, str]]:
        """Yields the tensors' names: in the file, and in the model. Raises CheckpointError for one that is unknown."""
        for name in self.file:
            if name != ROPE_FACTORS:
                yield name, self._renamed(name)

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
        return torch.arange(rows).view(-1, head // 2, 2).mT.reshape(-1)

    def shift(self, name: str) -> float:
        """Returns what the numbers of a dense tensor are larger by than in transformers."""
        return self.architecture.norm_shift if name.endswith("norm.weight") else 0.0


def read_source(file: GgufFile) -> Source:
    """Returns a file as the source of a model. Raises CheckpointError for an architecture that is not in `KNOWN`."""
    about = About(file)
    known = KNOWN.get(about.name) if isinstance(about.name, str) else None
    try:
        if known is None:
            raise CheckpointError(f"architecture {about.name!r} can't be loaded; what can is {', '.join(KNOWN)}")
        return Source(file, known, {**_common(about), **known.more(about)})
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from error


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
    for key, usual in (("rope.dimension_count", head), ("attention.value_length", head), ("expert_count", 1)):
        if (found := about.value(key)) not in (None, 0, usual):
            raise CheckpointError(f"{about.name}.{key} is {found!r}; only {usual} can be loaded")


def _special_tokens(about: About) -> dict[str, int]:
    found = {field: about.file.metadata.get(f"tokenizer.ggml.{n}_token_id") for n, field in SPECIAL_TOKENS.items()}
    return {field: number for field, number in found.items() if isinstance(number, int)}


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
    wavelengths = 2 * math.pi * base ** (torch.arange(half).double() / half)
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
        "final_logit_softcapping": about.value("final_logit_softcapping"),
    }


KNOWN: Mapping[str, Architecture] = {
    "llama": Architecture("llama", BLOCK, _llama, paired_rows=True),
    "qwen2": Architecture("qwen2", BLOCK, _qwen2),
    "qwen3": Architecture("qwen3", {**BLOCK, **HEAD_NORMS}, _qwen3),
    "gemma3": Architecture("gemma3_text", {**BLOCK, **HEAD_NORMS, **GEMMA_NORMS}, _gemma3, norm_shift=1.0),
}
"""The architectures by the names that llama.cpp gives them."""
