"""Sizes of well-known language models by name, as their config.json has them, and the matmuls of their layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import did_you_mean


class Size(NamedTuple):
    """The size of a matmul's weight [n, k], which may be of several experts, of which a token has top_k."""

    n: int
    k: int
    experts: int = 1
    top_k: int = 1


@dataclass(frozen=True)
class ModelShape:
    """A transformer.

    hidden        numbers that a token has between layers
    heads         of queries; kv_heads of keys and values, each of `head` numbers
    feed_forward  numbers in the middle of the gated feed-forward network
    layers        of the model
    vocabulary    number of different tokens
    model_type    the architecture's name in transformers
    """

    hidden: int
    heads: int
    kv_heads: int
    head: int
    feed_forward: int
    layers: int
    vocabulary: int
    model_type: str = "llama"

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs (n, k) of the linear layers as inference engines run them: the projections to query, key
        and value are one, and so are the two of the gated feed-forward network."""
        attention = self.heads * self.head
        return {
            "qkv": (attention + 2 * self.kv_heads * self.head, self.hidden),
            "o": (self.hidden, attention),
            "gate_up": (2 * self.feed_forward, self.hidden),
            "down": (self.hidden, self.feed_forward),
        }

    @property
    def config(self) -> dict[str, int]:
        """Returns the sizes by the names that a configuration of transformers gives them."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
        }


@dataclass(frozen=True)
class MixtureShape:
    """A transformer whose feed-forward networks are mixtures of experts. Fields that it shares with ModelShape mean the
    same.

    experts   of a layer; top_k of a token
    width     numbers in the middle of an expert
    """

    hidden: int
    heads: int
    kv_heads: int
    head: int
    experts: int
    top_k: int
    width: int
    layers: int
    vocabulary: int
    model_type: str

    @property
    def of_experts(self) -> dict[str, Size]:
        """The two matrices of all experts of a layer."""
        rows = {"gate_up": (2 * self.width, self.hidden), "down": (self.hidden, self.width)}
        return {name: Size(self.experts * n, k, self.experts, self.top_k) for name, (n, k) in rows.items()}

    @property
    def config(self) -> dict[str, int]:
        """Returns the sizes by the names that a configuration of transformers gives them."""
        dense = ModelShape(
            self.hidden, self.heads, self.kv_heads, self.head, self.width, self.layers, self.vocabulary
        ).config
        names = ("num_experts", "num_local_experts")
        return {
            **dense,
            **dict.fromkeys(names, self.experts),
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.width,
        }


MODELS: Mapping[str, ModelShape] = {
    "Llama-2-7B": ModelShape(4096, 32, 32, 128, 11008, layers=32, vocabulary=32000),
    "Llama-3.1-8B": ModelShape(4096, 32, 8, 128, 14336, layers=32, vocabulary=128256),
    "Llama-3.1-70B": ModelShape(8192, 64, 8, 128, 28672, layers=80, vocabulary=128256),
    "Qwen2.5-7B": ModelShape(3584, 28, 4, 128, 18944, layers=28, vocabulary=152064, model_type="qwen2"),
    "Qwen2.5-32B": ModelShape(5120, 40, 8, 128, 27648, layers=64, vocabulary=152064, model_type="qwen2"),
    "Gemma-2-9B": ModelShape(3584, 16, 8, 256, 14336, layers=42, vocabulary=256000, model_type="gemma2"),
    "tiny": ModelShape(128, 4, 2, 32, 256, layers=2, vocabulary=256),  # to try things out
}

MIXTURES: Mapping[str, MixtureShape] = {
    "Qwen3-30B-A3B": MixtureShape(2048, 32, 4, 128, 128, 8, 768, 48, vocabulary=151936, model_type="qwen3_moe"),
    "gpt-oss-20b": MixtureShape(2880, 64, 8, 64, 32, 4, 2880, 24, vocabulary=201088, model_type="gpt_oss"),
    "Mixtral-8x7B": MixtureShape(4096, 32, 8, 128, 8, 2, 14336, 32, vocabulary=32000, model_type="mixtral"),
    "tiny-moe": MixtureShape(128, 4, 2, 32, 4, 2, 64, 2, vocabulary=256, model_type="qwen3_moe"),
}
"""Models with experts."""

_Shape = TypeVar("_Shape")


def find_model(name: str) -> ModelShape | None:
    """Returns the dense model of this name, in any case; None for an unknown one."""
    return find(name, MODELS)


def find(name: str, models: Mapping[str, _Shape]) -> _Shape | None:
    """Returns which of some models has this name, in any case; None for an unknown one."""
    return next((shape for known, shape in models.items() if known.lower() == name.lower()), None)


def known_models(name: str, models: Iterable[str] = MODELS) -> str:
    """Returns what an error about an unknown name says: the names there are, and the nearest."""
    return ", ".join(models) + did_you_mean(name, models)


def matmul_sizes(names: Iterable[str], experts: int = 1, top_k: int = 1) -> list[Size]:
    """Returns the sizes that names stand for, each once: the experts of a mixture ("Qwen3-30B-A3B"), one of their
    matrices ("Qwen3-30B-A3B/down"), or what `linear_sizes` knows.

    experts, top_k   of the latter

    Raises SpecError for an unknown name.
    """
    found: list[Size] = []
    for name in names:
        mixture = find(name.partition("/")[0], MIXTURES)
        others = [] if mixture else linear_sizes([name])
        found += _of_mixture(name, mixture) if mixture else [Size(n, k, experts, top_k) for n, k in others]
    return list(dict.fromkeys(found))


def _of_mixture(name: str, shape: MixtureShape) -> list[Size]:
    model, _, layer = name.partition("/")
    if layer and layer not in shape.of_experts:
        raise SpecError(f"shape {name!r}: the matrices of the experts of {model} are {', '.join(shape.of_experts)}")
    return [shape.of_experts[layer]] if layer else list(shape.of_experts.values())


def linear_sizes(names: Iterable[str]) -> list[tuple[int, int]]:
    """Returns the (n, k) that names stand for: a model ("Llama-3.1-8B", in any case), one of its layers
    ("Llama-3.1-8B/qkv"), or a size ("4096x11008"); each once. Raises SpecError for an unknown name."""
    return list(dict.fromkeys(size for name in names for size in _sizes(name)))


def _sizes(name: str) -> list[tuple[int, int]]:
    n, _, k = name.partition("x")
    if n.isdecimal() and k.isdecimal():
        return [(int(n), int(k))]
    model, _, layer = name.partition("/")
    shape = find_model(model)
    if shape is None:
        known = known_models(model, [*MODELS, *MIXTURES])
        raise SpecError(f"shape {name!r} must be a size such as 4096x11008 or one of {known}")
    if layer and layer not in shape.linears:
        raise SpecError(f"shape {name!r}: the layers of {model} are {', '.join(shape.linears)}")
    return [shape.linears[layer]] if layer else list(shape.linears.values())
