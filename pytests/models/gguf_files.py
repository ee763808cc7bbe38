"""Small GGUF files of random models, written with the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

SCALES = {"Q4_K": (0, 4), "Q5_K": (0, 4), "Q2_K": (80, 84), "Q4_1": (0, 4), "Q5_1": (0, 4)}
"""Where a block has its f16 numbers, if these are not its first or last two bytes."""
LAST = {"Q3_K", "Q6_K", "TQ1_0", "TQ2_0"}

VOCABULARY, HIDDEN, INNER = 96, 256, 512
MIXED = {"attn_q": "Q5_0", "attn_v": "Q6_K", "attn_output": "Q4_1", "ffn_down": "Q6_K", "ffn_down_exps": "Q6_K",
         "token_embd": "Q8_0"}
"""Types as llama.cpp mixes them; what is not named is of `USUAL`."""
USUAL = "Q4_K"
WITH_EXPERTS, EXPERTS = ("mixtral", "qwen2moe", "qwen3moe"), 4


def blocks(name: str, rows: int, columns: int, seed: int = 0, size: float = 1 / 64) -> NDArray[np.uint8]:
    """Returns random bytes [rows, nbytes] of a type, with finite scales that have all bits."""
    rng, (width, nbytes) = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[Kind[name]]
    data = rng.integers(0, 256, (rows, columns // width, nbytes), dtype=np.uint8)
    first, last = SCALES.get(name, (nbytes - 2, nbytes) if name in LAST else (0, 2))
    if name == "MXFP4":
        data[..., 0] = rng.integers(118, 128, data.shape[:2])
    elif name == "NVFP4":
        data[..., :4] &= 0x7F
    elif name == "IQ1_M":  # whose scale is in the upper bits of four words
        scales = (rng.standard_normal((rows, columns // width, 1)) * size).astype(np.float16).view(np.uint16)
        words = np.ascontiguousarray(data[..., 48:]).view(np.uint16)
        words = words & 0xFFF | scales >> np.array([0, 4, 8, 12], np.uint16) << np.uint16(12)
        data[..., 48:] = words.astype(np.uint16).view(np.uint8)
    else:
        scales = (rng.standard_normal((rows, columns // width, (last - first) // 2)) * size).astype(np.float16)
        data[..., first:last] = scales.view(np.uint8)
    return data.reshape(rows, -1)


Tensors = dict[str, "tuple[NDArray[Any], Kind | None]"]


def head_size(architecture: str) -> int:
    """Returns the columns of a head: those that transformers assumes, whatever a file says."""
    return 256 if architecture == "gemma3" else 128


def model_tensors(architecture: str, layers: int, kinds: Mapping[str, str]) -> Tensors:
    """Returns the tensors of a model, which has one head of keys and values."""
    rng, found = np.random.default_rng(1), Tensors()

    def matrix(name: str, *shape: int) -> None:
        kind, columns = kinds.get(name.split(".")[-2], USUAL), shape[-1]
        values = (rng.standard_normal(shape) / np.sqrt(columns)).astype(np.float32)
        if kind.endswith("_K"):  # which the package does not quantize
            size = {"Q4_K": 2e-4, "Q6_K": 4e-5}[kind]
            data = blocks(kind, values.size // columns, columns, len(found), size)
            found[name] = (data.reshape(*shape[:-1], -1), Kind[kind])
        else:
            found[name] = (gguf.quants.quantize(values, Kind[kind]), Kind[kind])

    def vector(name: str, length: int, middle: float) -> None:
        found[name] = ((middle + rng.standard_normal(length) / 8).astype(np.float32), None)

    matrix("token_embd.weight", VOCABULARY, HIDDEN)
    vector("output_norm.weight", HIDDEN, 1)
    for block in range(layers):
        for name, length in _norms(architecture).items():
            vector(f"blk.{block}.{name}.weight", length, 1)
        for name, shape in _matrices(architecture).items():
            matrix(f"blk.{block}.{name}.weight", *shape)
            if architecture in ("qwen2", "qwen2moe") and name in ("attn_q", "attn_k", "attn_v"):
                vector(f"blk.{block}.{name}.bias", shape[0], 0)
        if architecture in WITH_EXPERTS:
            router = rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
            found[f"blk.{block}.ffn_gate_inp.weight"] = (router, None)
        if architecture == "qwen2moe":
            vector(f"blk.{block}.ffn_gate_inp_shexp.weight", HIDDEN, 0)
    return found


def _norms(architecture: str) -> dict[str, int]:
    found = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
    if architecture in ("qwen3", "qwen3moe", "gemma3"):
        found |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), head_size(architecture))
    if architecture == "gemma3":
        found |= dict.fromkeys(("post_attention_norm", "post_ffw_norm"), HIDDEN)
    return found


def _matrices(architecture: str) -> dict[str, tuple[int, ...]]:
    head = head_size(architecture)
    found: dict[str, tuple[int, ...]] = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (head, HIDDEN),
        "attn_v": (head, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
    }
    inner = {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    if architecture not in WITH_EXPERTS:
        return {**found, **inner}
    found |= {f"{name}_exps": (EXPERTS, *shape) for name, shape in inner.items()}
    if architecture == "qwen2moe":
        found |= {f"{name}_shexp": shape for name, shape in inner.items()}
    return found


def write_model(
    path: Path,
    architecture: str = "llama",
    layers: int = 2,
    kinds: Mapping[str, str] = MIXED,
    change: Callable[[Tensors, dict[str, Any]], object] | None = None,
    padding: int = 0,
    split: int = 0,
) -> Path:
    """Writes a model. change: gets the tensors and the metadata before they are written; padding: the token of it;
    split: how many tensors a file has, if there are several, of which the first is returned.

    Mixtral is what files call llama, with experts.
    """
    tensors, head = model_tensors(architecture, layers, kinds), head_size(architecture)
    facts = {
        "block_count": layers,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "vocab_size": VOCABULARY,
        "attention.head_count": HIDDEN // head,
        "attention.head_count_kv": 1,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 50000.0,
        **({"attention.sliding_window": 8} if architecture == "gemma3" else {}),
    }
    if architecture in WITH_EXPERTS:
        facts |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": INNER}
    if architecture == "qwen2moe":
        facts["expert_shared_feed_forward_length"] = INNER
    architecture = "llama" if architecture == "mixtral" else architecture
    if change:
        change(tensors, facts)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    adders: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders |= {bool: writer.add_bool, list: writer.add_array}
    for key, value in facts.items():
        adders[type(value)](f"{architecture}.{key}", value)
    for key, number in (("bos", 1), ("eos", 2), ("padding", padding)):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", number)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))), path)
