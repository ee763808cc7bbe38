"""Translates what a GGUF file says of its model for transformers: the configuration, and the names of tensors.

Keys of the metadata and names of tensors are those of llama.cpp (gguf-py/gguf/constants.py). Its converters change some
tensors (convert_hf_to_gguf.py), which `Source` undoes:

    llama, granite, smollm3,
    mistral3                   rows of q and k: llama.cpp rotates neighbours, transformers the halves of a head
    gemma, gemma2, gemma3      norms multiply by the weight in the file, by 1 + weight in transformers
    falcon                     rows of q, k and v: those of all queries, all keys and all values in the file; in
                               transformers those of each key with its queries and its value
                               (conversion/falcon.py, FalconModel.modify_tensors)
    gpt-oss                    rows of gate and up: apart in the file, by turns in transformers
    deepseek2                  kv_b_proj: keys transposed and values, heads apart, in newer files
    qwen3next                  in_proj_qkvz: q, k and v, and z, each of all heads; by key heads in transformers.
                               ssm_a is -exp(A_log), and norms are as of Gemma but for that of linear attention
    nomic-bert                 q, k and v: one matrix

In all other architectures llama.cpp rotates q and k as transformers does.

Of NVFP4 it writes the scale of the whole matrix beside it, f32 [1], or [experts] of a stack: `blk.0.attn_q.scale` is a
factor of `blk.0.attn_q.weight`. A matrix without one has 1. `input_scale` is for activations in f4, and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.gguf import configuration
from lowbit.pylib.checkpoints.gguf.configuration import LONG_ROPE, ROPE_FACTORS, About, Query
from lowbit.pylib.checkpoints.gguf.file import GgufFile

__all__ = ["KNOWN", "LOOKED_UP", "Made", "Source", "read_source"]

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
SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
LINEAR_ATTENTION = {
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
FEED_FORWARD = {
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
    "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
    "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
}
ENCODER_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
MODERN_TOP = {
    "token_embd": "embeddings.tok_embeddings",
    "token_embd_norm": "embeddings.norm",
    "output_norm": "final_norm",
}
MODERN = {
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}
ENCODER_NORMS = {"attn_output_norm": "post_attention_layernorm", "layer_output_norm": "post_mlp_layernorm"}
LOOKED_UP = {f"{name}.weight" for name in ("token_embd", "position_embd", "token_types")}
"""The matrices of which a model takes rows."""
UNSHIFTED = "ssm_norm.weight"
"""A norm that multiplies by its weight where others multiply by 1 + weight."""


def _logarithm(decay: Tensor) -> Tensor:
    """Returns A_log of -exp(A_log)."""
    if not bool((decay.isfinite() & (decay < 0)).all()):
        low, high = (float(bound) for bound in decay.float().aminmax())
        raise CheckpointError(f"numbers from {low:g} to {high:g}; they must be finite and below 0, as -exp(A_log) is")
    return decay.float().neg().log()


UNDONE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "ffn_gate_inp_shexp.weight": lambda value: value.view(1, -1),
    "ssm_a": _logarithm,
    "ssm_conv1d.weight": lambda value: value.unsqueeze(-2),
}
"""What is done with dense tensors of a block, to have them as in transformers."""
TWO_NORMS = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
GLM_NORMS = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}


@dataclass(frozen=True)
class Made:
    """A matrix of transformers that a file has in parts, or as a part.

    parts   what it is made of, by what a file calls it in a block
    rows    returns which row of the parts, one below the other, comes first, second and so on, for a configuration and
            the number of rows; None: as they are
    values  returns the matrix [n, k] of the parts' values, where it has others than their rows; None: rows
    """

    parts: Sequence[str]
    rows: Callable[[Mapping[str, Any], int], Tensor] | None = None
    values: Callable[..., Tensor] | None = None


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
    others        kinds that a file calls the same, each behind what tells it from the rest
    top           modules that are in no block, likewise
    blocks        what the list of blocks is called
    grouped_qkv   rows of q, k and v in one matrix are together by keys
    unknown       fields that most configurations have, and this one has not
    queries       returns a tensor of q and its shape, by which sizes are checked
    whole         tensors of a block whose last parts have other names, too
    made          matrices of a block that are made of others
    experts       what the module of experts is called in a block
    by_turns      rows of gate and up come by turns
    transposed    dense experts have columns first
    encoder       arguments of a model that has no output layer; None of others
    """

    model_type: str
    names: Mapping[str, str]
    more: Callable[[About], dict[str, Any]]
    paired_rows: bool = False
    facts: Collection[str] = (ROPE_FACTORS,)
    norm_shift: float = 0.0
    with_experts: Architecture | None = None
    others: Sequence[tuple[Callable[[About], bool], Architecture]] = ()
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    blocks: str = BLOCKS
    grouped_qkv: bool = False
    unknown: Collection[str] = ()
    queries: Callable[[About], Query] = configuration.queries
    whole: Mapping[str, str] = field(default_factory=dict[str, str])
    made: Mapping[str, Made] = field(default_factory=dict[str, Made])
    experts: str = "mlp.experts"
    by_turns: bool = False
    transposed: bool = False
    encoder: Mapping[str, Any] | None = None

    @property
    def has_experts(self) -> bool:
        """Tells whether blocks of the architecture may have experts."""
        return ROUTER.keys() <= self.names.keys()


@dataclass(frozen=True)
class Source:
    """A file as the source of a model of transformers.

    config   the fields of the model's configuration
    blocks   how many blocks the file has, those that predict more tokens included
    """

    file: GgufFile
    architecture: Architecture
    config: Mapping[str, Any]
    blocks: int

    def names(self) -> Iterator[tuple[str, str]]:
        """Yields the names of tensors that are one in the model: in the file, and in the model. Raises CheckpointError
        for one that is unknown."""
        stacks = {name for matrices in self.experts().values() for names in matrices.values() for name in names}
        others = {*stacks, *map(_bias, stacks), *self.architecture.facts}
        others |= {part for _, parts, _ in self.made() for part in parts}
        for name in self.file:
            if name not in others and not self._belongs_to_matrix(name) and not self._predicts_more(name):
                yield name, self._renamed(name)

    def made(self) -> Iterator[tuple[str, list[str], Made]]:
        """Yields the matrices that are made of others: their names in the model, and what they are made of."""
        for block, (module, made) in product(self._blocks(), self.architecture.made.items()):
            parts = [f"blk.{block}.{part}.weight" for part in made.parts]
            if any(part in self.file for part in parts):
                if missing := [part for part in parts if part not in self.file]:
                    raise CheckpointError(f"{self.file.path}: there is no {missing[0]}, which the model needs")
                yield f"{self.architecture.blocks}.{block}.{module}.weight", parts, made

    def _blocks(self) -> range:
        return range(self.config["num_hidden_layers"])

    def _predicts_more(self, name: str) -> bool:
        """Tells whether a tensor is of a block that predicts more tokens, for which transformers has no module."""
        block = re.match(r"blk\.(\d{1,9})\.", name)
        first = self.config["num_hidden_layers"]
        return block is not None and first <= int(block[1]) < self.blocks

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
        names, blocks = self.architecture, self._blocks() if self.architecture.has_experts else range(0)
        found = {f"{names.blocks}.{block}.{names.experts}": self._matrices(f"blk.{block}") for block in blocks}
        return {module: matrices for module, matrices in found.items() if matrices}

    def rows_of_experts(self, matrix: str, rows: int) -> Tensor | None:
        """Returns which row of a matrix of an expert comes first, second and so on; None if none moves."""
        if not self.architecture.by_turns or matrix != "gate_up_proj":
            return None
        return torch.arange(rows, device="cpu").view(2, -1).T.reshape(-1)

    def biases(self, names: Sequence[str], rows: Tensor | None) -> Tensor | None:
        """Returns the biases [experts, n] of a matrix of experts, whose rows are in this order; None without any.

        Raises CheckpointError where some stacks of the matrix have biases of their rows, and others have not.
        """
        shapes = {self.file.shape(_bias(name)) if _bias(name) in self.file else () for name in names}
        if shapes == {()}:
            return None
        if shapes != {self.file.shape(names[0])[:2]} or not all(self.file.is_dense(_bias(name)) for name in names):
            raise CheckpointError(f"{self.file.path}: {', '.join(map(_bias, names))} must be biases of all rows")
        biases = torch.cat([cast(Tensor, self.file[_bias(name)]) for name in names], 1)
        return biases if rows is None else biases[:, rows]

    def _matrices(self, block: str) -> dict[str, list[str]]:
        found = {
            matrix: [name for stack in stacks if (name := f"{block}.{stack}.weight") in self.file]
            for matrix, stacks in STACKS.items()
        }
        return {matrix: names for matrix, names in found.items() if names}

    def _renamed(self, name: str) -> str:
        path, _, part = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d{1,9})\.(\w+)", path)
        if whole := re.fullmatch(r"blk\.(\d{1,9})\.(.+)", name):
            if (other := self.architecture.whole.get(whole[2])) is not None:
                return f"{self.architecture.blocks}.{whole[1]}.{other}"
        module = self.architecture.names.get(block[2]) if block else self.architecture.top.get(path)
        if module is None or part not in ("weight", "bias"):
            raise CheckpointError(f"{self.file.path}: {name} is no tensor of {self.architecture.model_type} models")
        return f"{self.architecture.blocks}.{block[1]}.{module}.{part}" if block else f"{module}.{part}"

    def order(self, name: str) -> Tensor | None:
        """Returns which row of a tensor comes first, second and so on in transformers; None if none moves."""
        if self.architecture.grouped_qkv and ".attn_qkv." in name:
            return self._by_keys(name)
        if not self.architecture.paired_rows or not re.search(r"\.attn_[qk]\.", name):
            return None
        rows, head = self.file.shape(name)[0], self.config["head_dim"]
        if rows % head or head % 2:
            raise CheckpointError(f"{self.file.path}: {name} has {rows} rows, which are not heads of {head}")
        return torch.arange(rows, device="cpu").view(-1, head // 2, 2).mT.reshape(-1)

    def _by_keys(self, name: str) -> Tensor:
        """Returns the order of rows by which each key has its queries in front and its value behind."""
        queries, keys, head = (self.config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        if (rows := self.file.shape(name)[0]) != (queries + 2 * keys) * head:
            heads = f"{queries} heads of q and {keys} each of k and v, of {head} rows"
            raise CheckpointError(f"{self.file.path}: {name} has {rows} rows, which are not those of {heads}")
        with torch.device("cpu"):
            heads = torch.arange(queries + 2 * keys)
            grouped = torch.cat((heads[:queries].view(keys, -1), heads[queries:].view(2, keys).T), 1)
            return (grouped.reshape(-1, 1) * head + torch.arange(head)).flatten()

    def dense(self, name: str, value: Tensor) -> Tensor:
        """Returns a dense tensor as transformers has it. Raises CheckpointError for numbers that it can't have."""
        if undo := next((undo for part, undo in UNDONE.items() if name.endswith(f".{part}")), None):
            try:
                return undo(value)
            except CheckpointError as error:
                raise CheckpointError(f"{self.file.path}: {name}: {error}") from error
        shifts = name.endswith("norm.weight") and not name.endswith(UNSHIFTED)
        shift = self.architecture.norm_shift if shifts else 0.0
        return value.float() - shift if shift else value


def read_source(file: GgufFile) -> Source:
    """Returns a file as the source of a model. Raises CheckpointError for an architecture that is not in `KNOWN`."""
    about = About(file)
    try:
        known = _architecture(about)
        if known.encoder is None and about.value("attention.causal") in (False,):
            raise CheckpointError(f"{about.name}.attention.causal is False; tokens that see later ones can't be loaded")
        config = {**configuration.common(about, known.queries(about)), **known.more(about)}
        return Source(file, known, config, about.integer("block_count"))
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from error


def _architecture(about: About) -> Architecture:
    known = KNOWN.get(about.name) if isinstance(about.name, str) else None
    if known is None:
        raise CheckpointError(f"architecture {about.name!r} can't be loaded; what can is {', '.join(KNOWN)}")
    known = next((other for is_it, other in known.others if is_it(about)), known)
    if known.has_experts or (count := about.value("expert_count")) in (None, 0, 1):
        return known
    if known.with_experts is None:
        raise CheckpointError(f"{about.name}.expert_count is {count!r}; only 1 can be loaded")
    return known.with_experts


def _bias(name: str) -> str:
    return f"{name.removesuffix('weight')}bias"


def _absorbed(keys: Tensor, values: Tensor) -> Tensor:
    """Returns kv_b_proj [heads * (a + b), rank] of keys [heads, rank, a] and values [heads, b, rank]."""
    if keys.ndim != 3 or values.ndim != 3 or (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2]):
        raise CheckpointError(f"keys {list(keys.shape)} and values {list(values.shape)} are not of the same heads")
    return torch.cat((keys.mT, values), 1).flatten(0, 1)


def _by_key_heads(config: Mapping[str, Any], count: int) -> Tensor:
    """Returns the order of rows of q, k, v and z, each of all heads, by which each key head has its own together."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, value = keys * config["linear_key_head_dim"], values * config["linear_value_head_dim"]
    if count != 2 * (key + value) or values % keys:
        raise CheckpointError(f"{count} rows are not those of {keys} key heads and {values} value heads")
    parts = torch.arange(count, device="cpu").split([key, key, value, value])
    return torch.cat([part.view(keys, -1) for part in parts], 1).flatten()


def _third(number: int) -> Callable[[Mapping[str, Any], int], Tensor]:
    """Returns what gives the rows of q, k or v, by its number."""

    def rows(config: Mapping[str, Any], count: int) -> Tensor:
        if count != 3 * config["hidden_size"]:
            raise CheckpointError(f"{count} rows are not those of q, k and v, {config['hidden_size']} each")
        return torch.arange(count, device="cpu").view(3, -1)[number]

    return rows


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
_NEXT = {**_HEADS, **ROUTER, **SHARED_EXPERT, **LINEAR_ATTENTION, "post_attention_norm": BLOCK["ffn_norm"]}
_ROUTING_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_DEEPSEEK: dict[str, Any] = {
    "names": {**_without("attn_k", "attn_v"), **ROUTER, **SHARED_EXPERTS, **LATENT},
    "queries": configuration.latent_queries,
    "whole": _ROUTING_BIAS,
    "made": {"self_attn.kv_b_proj": Made(("attn_k_b", "attn_v_b"), values=_absorbed)},
}
_DEEPSEEK_3 = Architecture("deepseek_v3", more=configuration.deepseek_v3, **_DEEPSEEK)
_THIRDS = {f"self_attn.{part}_proj": Made(("attn_qkv",), _third(number)) for number, part in enumerate("qkv")}
_ENCODER: dict[str, Any] = {"top": ENCODER_TOP, "encoder": {"add_pooling_layer": False}}
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
    "falcon": Architecture("falcon", FALCON, others=[(configuration.has_two_norms, _FALCON_40B)], **_FALCON),
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
    "glm4moe": Architecture(
        "glm4_moe", {**_SEED, **HEAD_NORMS, **ROUTER, **SHARED_EXPERTS}, configuration.glm4_moe, whole=_ROUTING_BIAS
    ),
    "ernie4_5": Architecture("ernie4_5", BLOCK, configuration.ernie4_5),
    "seed_oss": Architecture("seed_oss", _SEED, configuration.seed_oss),
    "gpt-oss": Architecture(
        "gpt_oss",
        {**_SEED, "ffn_gate_inp": "mlp.router"},
        configuration.gpt_oss,
        whole={"attn_sinks.weight": "self_attn.sinks"},
        by_turns=True,
        transposed=True,
    ),
    "llama4": Architecture(
        "llama4_text",
        {**BLOCK, **FEED_FORWARD},
        configuration.llama4,
        experts="feed_forward.experts",
        transposed=True,
    ),
    "deepseek2": Architecture(
        "deepseek_v2", more=configuration.deepseek_v2, others=[(configuration.has_sigmoid, _DEEPSEEK_3)], **_DEEPSEEK
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        _NEXT,
        configuration.qwen3_next,
        norm_shift=1.0,
        queries=configuration.gated_queries,
        whole={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
        made={"linear_attn.in_proj_qkvz": Made(("attn_qkv", "attn_gate"), _by_key_heads)},
    ),
    "bert": Architecture("bert", BERT, configuration.bert, blocks="encoder.layer", **_ENCODER),
    "modern-bert": Architecture(
        "modernbert", MODERN, configuration.modern_bert, top=MODERN_TOP, blocks="layers", encoder={}
    ),
    "nomic-bert": Architecture(
        "nomic_bert",
        {**{name: module for name, module in BLOCK.items() if "norm" not in name}, **ENCODER_NORMS},
        configuration.nomic_bert,
        blocks="layers",
        made=_THIRDS,
        **_ENCODER,
    ),
}
"""The architectures by the names that llama.cpp gives them."""
