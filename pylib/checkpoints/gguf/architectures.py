"""Translates what a GGUF file says of its model for transformers: the configuration, and the names of tensors.

Keys of the metadata and names of tensors are those of llama.cpp (gguf-py/gguf/constants.py). Its converters change some
tensors (convert_hf_to_gguf.py), which `Source` undoes:

    llama, granite, smollm3,
    mistral3                   rows of q and k: llama.cpp rotates neighbours, transformers the halves of a head
    gemma, gemma2, gemma3      norms multiply by the weight in the file, by 1 + weight in transformers
    falcon                     rows of q, k and v: those of all queries, all keys and all values in the file; in
                               transformers those of each key with its queries and its value
                               (conversion/falcon.py, FalconModel.modify_tensors)

In all other architectures llama.cpp rotates q and k as transformers does.

Of NVFP4 it writes the scale of the whole matrix beside it, f32 [1], or [experts] of a stack: `blk.0.attn_q.scale` is a
factor of `blk.0.attn_q.weight`. A matrix without one has 1. `input_scale` is for activations in f4, and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.gguf import configuration
from lowbit.pylib.checkpoints.gguf.configuration import EMBEDDINGS, LONG_ROPE, ROPE_FACTORS, About
from lowbit.pylib.checkpoints.gguf.file import GgufFile

__all__ = ["EMBEDDINGS", "KNOWN", "Source", "read_source"]

BLOCKS = "model.layers"
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
AFTER = {name: GEMMA_NORMS[name] for name in ("post_attention_norm", "post_ffw_norm")}
"""The norms of models that have none before attention and MLP."""
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
FALCON_TOP = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
FALCON = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
TWO_NORMS = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
GLM_NORMS = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}


@dataclass(frozen=True)
class Architecture:
    """A kind of model.

    model_type    what transformers calls it
    names         modules of a block, by what they are called in a file
    more          returns the fields of the configuration that not all architectures have
    paired_rows   rows of q and k are in the order in which llama.cpp rotates them
    facts         tensors that say something of the configuration
    norm_shift    what the weights of norms are larger by than in transformers
    with_experts  the kind of a model that a file calls the same, but that has experts; None if there is none
    others        kinds that a file calls the same, each by a tensor that it alone has
    top           modules that are in no block, likewise
    blocks        what the list of blocks is called
    grouped_qkv   rows of q, k and v in one matrix are together by keys
    unknown       fields that most configurations have, and this one has not
    """

    model_type: str
    names: Mapping[str, str]
    more: Callable[[About], dict[str, Any]]
    paired_rows: bool = False
    facts: Collection[str] = (ROPE_FACTORS,)
    norm_shift: float = 0.0
    with_experts: Architecture | None = None
    others: Mapping[str, Architecture] = field(default_factory=dict[str, "Architecture"])
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    blocks: str = BLOCKS
    grouped_qkv: bool = False
    unknown: Collection[str] = ()

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
            if name not in self.architecture.facts and name not in stacks and not self._belongs_to_matrix(name):
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
        module = self.architecture.names.get(block[2]) if block else self.architecture.top.get(path)
        if module is None or part not in ("weight", "bias"):
            raise CheckpointError(f"{self.file.path}: {name} is no tensor of {self.architecture.model_type} models")
        return f"{self.architecture.blocks}.{block[1]}.{module}.{part}" if block else f"{module}.{part}"

    def order(self, name: str) -> Tensor | None:
        """Returns which row of a tensor comes first, second and so on in transformers; None if none moves."""
        if self.architecture.grouped_qkv and ".attn_qkv." in name:
            return self._by_keys()
        if not self.architecture.paired_rows or not re.search(r"\.attn_[qk]\.", name):
            return None
        rows, head = self.file.shape(name)[0], self.config["head_dim"]
        if rows % head or head % 2:
            raise CheckpointError(f"{self.file.path}: {name} has {rows} rows, which are not heads of {head}")
        return torch.arange(rows, device="cpu").view(-1, head // 2, 2).mT.reshape(-1)

    def _by_keys(self) -> Tensor:
        """Returns the order of rows by which each key has its queries in front and its value behind."""
        queries, keys, head = (self.config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        with torch.device("cpu"):
            heads = torch.arange(queries + 2 * keys)
            grouped = torch.cat((heads[:queries].view(keys, -1), heads[queries:].view(2, keys).T), 1)
            return (grouped.reshape(-1, 1) * head + torch.arange(head)).flatten()

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
        return Source(file, known, {**configuration.common(about), **known.more(about)})
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from error


def _architecture(about: About) -> Architecture:
    known = KNOWN.get(about.name) if isinstance(about.name, str) else None
    if known is None:
        raise CheckpointError(f"architecture {about.name!r} can't be loaded; what can is {', '.join(KNOWN)}")
    known = next((other for tensor, other in known.others.items() if about.has(tensor)), known)
    if known.has_experts or (count := about.value("expert_count")) in (None, 0, 1):
        return known
    if known.with_experts is None:
        raise CheckpointError(f"{about.name}.expert_count is {count!r}; only 1 can be loaded")
    return known.with_experts


def _without(*names: str) -> dict[str, str]:
    """Returns the modules of a block, but for some."""
    return {name: module for name, module in BLOCK.items() if name not in names}


_HEADS, _NORMS = {**BLOCK, **HEAD_NORMS}, ("attn_norm", "ffn_norm")
_MIXTRAL = Architecture("mixtral", {**BLOCK, **ROUTER}, configuration.mixtral, paired_rows=True)
_MLP = {**_without("ffn_gate"), "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_QKV = {**_without("attn_q", "attn_k", "attn_v", "ffn_gate"), **FUSED}
_GLM = {**_without("ffn_gate"), "ffn_up": FUSED["ffn_up"], **GLM_NORMS}
_SEED = {**_without("ffn_norm"), "post_attention_norm": BLOCK["ffn_norm"]}
_FALCON: dict[str, Any] = {
    "more": configuration.falcon,
    "top": FALCON_TOP,
    "blocks": "transformer.h",
    "grouped_qkv": True,
    "unknown": ("head_dim", "intermediate_size", "num_key_value_heads"),
}
_FALCON_40B = Architecture("falcon", {**FALCON, **TWO_NORMS}, **_FALCON)
KNOWN: Mapping[str, Architecture] = {
    "llama": Architecture("llama", BLOCK, configuration.llama, paired_rows=True, with_experts=_MIXTRAL),
    "qwen2": Architecture("qwen2", BLOCK, configuration.qwen2),
    "qwen3": Architecture("qwen3", _HEADS, configuration.qwen3),
    "qwen2moe": Architecture("qwen2_moe", {**BLOCK, **ROUTER, **SHARED_EXPERT}, configuration.qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", {**_HEADS, **ROUTER}, configuration.qwen3_moe),
    "gemma": Architecture("gemma", BLOCK, configuration.gemma, norm_shift=1.0),
    "gemma2": Architecture("gemma2", {**BLOCK, **GEMMA_NORMS}, configuration.gemma2, norm_shift=1.0),
    "gemma3": Architecture("gemma3_text", {**_HEADS, **GEMMA_NORMS}, configuration.gemma3, norm_shift=1.0),
    "falcon": Architecture("falcon", FALCON, others={"blk.0.attn_norm_2.weight": _FALCON_40B}, **_FALCON),
    "phi3": Architecture("phi3", _QKV, configuration.phi3, facts=LONG_ROPE.values()),
    "command-r": Architecture("cohere", {**_without("ffn_norm"), **HEAD_NORMS}, configuration.cohere),
    "cohere2": Architecture("cohere2", _without("ffn_norm"), configuration.cohere2),
    "granite": Architecture("granite", BLOCK, configuration.granite, paired_rows=True),
    "mistral3": Architecture("ministral3", BLOCK, configuration.mistral3, paired_rows=True),
    "olmo2": Architecture("olmo2", {**_without(*_NORMS), **HEAD_NORMS, **AFTER}, configuration.olmo2),
    "olmoe": Architecture("olmoe", {**_HEADS, **ROUTER}, configuration.olmoe),
    "smollm3": Architecture("smollm3", BLOCK, configuration.smollm3, paired_rows=True),
    "stablelm": Architecture("stablelm", BLOCK, configuration.stablelm),
    "starcoder2": Architecture("starcoder2", _MLP, configuration.starcoder2),
    "glm4": Architecture("glm4", _GLM, configuration.glm4),
    "ernie4_5": Architecture("ernie4_5", BLOCK, configuration.ernie4_5),
    "seed_oss": Architecture("seed_oss", _SEED, configuration.seed_oss),
}
"""The architectures by the names that llama.cpp gives them."""
