"""How the decoder layers of transformers are made: a table by class, and what is found by trying a layer's modules.

A layer adds to x what attention makes of it, and then what a feed-forward network does. Classes differ in the norms
before and after both; the table says where these are. What a norm computes, and which columns of heads belong together
in a rotation, is tried with random numbers on a CPU, so that a class of another kind is told apart from those of the
table, whatever its name. Everything else is a number or a tensor of the module, which is read in every call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import QuantizeError
from lowbit.pylib.layer import reference
from lowbit.pylib.operator.constants import constant

ATTENTION = "self_attn"
_COLUMNS = 16  # of what is tried


@dataclass(frozen=True)
class Form:
    """The names of a layer's modules.

    before    the norms of x in front of attention and of the network
    after     the norms of what these give; "": none
    network   the feed-forward network
    """

    before: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] = ("", "")
    network: str = "mlp"

    @property
    def norms(self) -> tuple[str, ...]:
        """Returns the names of all norms."""
        return tuple(name for name in (*self.before, *self.after) if name)

    @property
    def children(self) -> tuple[str, ...]:
        """Returns the names of all modules, in the order in which they compute."""
        parts = zip(self.before, (ATTENTION, self.network), self.after)
        return tuple(name for names in parts for name in names if name)


PLAIN = Form()
_BOTH = Form(
    ("input_layernorm", "pre_feedforward_layernorm"), ("post_attention_layernorm", "post_feedforward_layernorm")
)
_GLM = Form(after=("post_self_attn_layernorm", "post_mlp_layernorm"))
_FORMS = {
    "apertus.Apertus": Form(("attention_layernorm", "feedforward_layernorm")),
    "arcee.Arcee": PLAIN,
    "cwm.Cwm": PLAIN,
    "dots1.Dots1": PLAIN,
    "gemma.Gemma": PLAIN,
    "gemma2.Gemma2": _BOTH,
    "gemma3.Gemma3": _BOTH,
    "glm.Glm": PLAIN,
    "glm4.Glm4": _GLM,
    "glm4_moe.Glm4Moe": PLAIN,
    "gpt_oss.GptOss": PLAIN,
    "granite.Granite": PLAIN,
    "granitemoe.GraniteMoe": Form(network="block_sparse_moe"),
    "llama.Llama": PLAIN,
    "ministral.Ministral": PLAIN,
    "mistral.Mistral": PLAIN,
    "mixtral.Mixtral": PLAIN,
    "phi3.Phi3": PLAIN,
    "qwen2.Qwen2": PLAIN,
    "qwen2_moe.Qwen2Moe": PLAIN,
    "qwen3.Qwen3": PLAIN,
    "qwen3_moe.Qwen3Moe": PLAIN,
    "seed_oss.SeedOss": PLAIN,
    "smollm3.SmolLM3": PLAIN,
}
KNOWN = {
    f"transformers.models.{module}.modeling_{module}.{name}DecoderLayer": form
    for (module, name), form in ((key.split("."), form) for key, form in _FORMS.items())
}
"""The form of each class whose forward is: norm, attention, norm, sum, and the same with a network; in each layer norms
have one kind, and every part's result may have a scale, `residual_multiplier`."""


def form_of(layer: nn.Module) -> Form | None:
    """Returns the form of a decoder layer; None for a class that is not known."""
    return KNOWN.get(f"{type(layer).__module__}.{type(layer).__qualname__}")


@dataclass(frozen=True)
class Facts:
    """What is known of a layer besides its modules' tensors and numbers.

    form       where its norms are
    shift      what they add to their gains
    repeated   whether both halves of cos and sin are given, which are equal
    beside     whether columns that are rotated together are neighbours, and not in halves
    scaled     whether what its parts give has a scale
    """

    form: Form
    shift: float
    repeated: bool
    beside: bool
    scaled: bool

    @property
    def joins(self) -> bool:
        """Tells whether more is done to what a part gives than to add it to x."""
        return self.scaled or any(self.form.after)


def facts_of(layer: nn.Module) -> Facts:
    """Returns what is known of a layer whose class is. Raises QuantizeError that says what is of an unknown kind."""
    form, attention = cast(Form, form_of(layer)), cast(Any, layer._modules[ATTENTION])
    norms = norms_of(layer, form)
    shifts = {_shift(norm) for norm in norms}
    if len(shifts) > 1:
        raise QuantizeError("its norms are of several kinds")
    for norm in head_norms(attention):
        if (size := cast(Tensor, norm.weight).numel()) != attention.head_dim:
            raise QuantizeError(f"norms of queries and keys have {size} columns, heads have {attention.head_dim}")
    rotation = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    return Facts(form, shifts.pop(), *_tried_rotation(rotation), hasattr(layer, "residual_multiplier"))


def head_norms(attention: nn.Module) -> list[nn.Module]:
    """Returns the norms of queries and keys, if there are some."""
    return [norm for name in ("q_norm", "k_norm") if (norm := attention._modules.get(name)) is not None]


def norms_of(layer: nn.Module, form: Form) -> list[nn.Module]:
    """Returns all norms of a layer, those of queries and keys last."""
    modules: dict[str, Any] = layer._modules
    return [modules[name] for name in form.norms] + head_norms(modules[ATTENTION])


def eps_of(norm: Any) -> float:
    """Returns what a norm adds to the mean of squares."""
    found = vars(norm).get("variance_epsilon")
    return norm.eps if found is None else found


def is_of_its_file(module: nn.Module, layer: nn.Module) -> bool:
    """Tells whether a part of a layer is of the class that transformers has for it, or of one that `fuse_` has made of
    that: not of one derived from it, whose forward may be any."""
    return _is_of(type(module), type(layer).__module__)


@constant
def _is_of(cls: type[nn.Module], home: str) -> bool:
    found = vars(sys.modules[home]).get(cls.__name__)
    return cls.__module__ == home and isinstance(found, type) and issubclass(cls, found)


def was_patched(module: nn.Module) -> bool:
    """Tells whether the forward of a class of transformers is not that of its file."""
    found = vars(sys.modules[type(module).__module__]).get(type(module).__name__)
    code = getattr(inspect.unwrap(getattr(found, "forward", None)), "__code__", None)  # type: ignore[arg-type]
    return code is None or code.co_filename != sys.modules[type(module).__module__].__file__


def has_hooks(module: nn.Module) -> bool:
    """Tells whether calls of a module do more than its class says."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def are_norms_as_fused(layer: Any, x: Tensor) -> bool:
    """Tells whether the norms of a layer compute what those did that were fused, with gains for an x [..., hidden]."""
    facts: Facts = layer.facts
    norms, own = norms_of(layer, facts.form), len(facts.form.norms)
    sizes = [x.shape[-1]] * own + [layer._modules[ATTENTION].head_dim] * (len(norms) - own)
    return all(
        _shift_of(norm) == facts.shift and not has_hooks(norm) and _is_gain(norm._parameters["weight"], size, x)
        for norm, size in zip(norms, sizes)
    )


def _is_gain(gain: Tensor | None, size: int, x: Tensor) -> bool:
    """Tells whether so many numbers of x's type are in one piece where x is."""
    return (
        gain is not None
        and gain.shape == (size,)
        and gain.dtype is x.dtype
        and gain.device == x.device
        and gain.is_contiguous()
    )


def cache_of(given: Mapping[str, Any]) -> Any:
    """Returns the cache that a layer is called with, by the name of this version of transformers or of those before."""
    return given.get("cache", given.get("past_key_values"))


def _shift(norm: nn.Module) -> float:
    """Returns what a root-mean-square norm adds to its gain. Raises QuantizeError for a norm of another kind."""
    shift = _shift_of(norm)
    if shift is None:
        raise QuantizeError(f"{type(norm).__name__} is no root-mean-square norm with one gain")
    return shift


def _shift_of(norm: nn.Module) -> float | None:
    """Returns what a norm adds to its gain; None for one of another kind."""
    return _tried_norm(type(norm)) if norm._parameters.keys() == {"weight"} else None


@constant
def _tried_norm(cls: type[nn.Module]) -> float | None:
    """Returns what a norm of a class adds to its gain; None for one of another kind."""
    return _try_norm(cls)


@lru_cache(maxsize=None)
def _try_norm(cls: type[nn.Module]) -> float | None:
    """Tries a norm of a class: its forward, with a gain and an eps of our own."""
    x, gain = (each.view(-1, _COLUMNS) for each in _random(5 * _COLUMNS).tensor_split([4 * _COLUMNS]))
    norm = cls.__new__(cls)
    nn.Module.__init__(norm)
    norm.weight = nn.Parameter(gain[0], requires_grad=False)
    norm.__dict__ |= {"eps": 0.1, "variance_epsilon": 0.1}
    found = _tried(lambda: norm(x))
    same = (shift for shift in (0.0, 1.0) if _is_like(found, reference.rms_norm(x, gain[0], 0.1, shift)))
    return next(same, None)


@lru_cache(maxsize=None)
def _tried_rotation(rotate: Callable[..., Any] | None) -> tuple[bool, bool]:
    """Tries a function that rotates queries and keys; returns `repeated` and `beside` of `Facts`.

    Raises QuantizeError for one of another kind.
    """
    q, k, turn = _random(4 * _COLUMNS).view(4, 1, 1, 1, _COLUMNS).tensor_split([1, 2])
    half = turn[:, 0, ..., : _COLUMNS // 2]
    cos, sin = whole = torch.cat([half, half], -1)
    for repeated, beside in ((True, False), (False, False), (True, True)):
        given = whole if repeated else half
        found = _tried(lambda given=given: rotate(q[0], k[0], *given)) if rotate else None
        expected = [reference.rotated(each[0].transpose(1, 2), cos, sin, beside).transpose(1, 2) for each in (q, k)]
        if isinstance(found, tuple) and all(map(_is_like, found, expected)):
            return repeated, beside
    raise QuantizeError("its heads are rotated in another way than by halves or pairs of columns")


def _random(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


def _tried(call: Callable[[], Any]) -> Any:
    """Returns what a function gives; None if it raises."""
    try:
        with torch.inference_mode(), torch.device("cpu"):  # a model may be being built elsewhere
            return call()
    except Exception:  # of a function that is of another kind, it may be any
        return None


def _is_like(found: Any, expected: Tensor) -> bool:
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)
