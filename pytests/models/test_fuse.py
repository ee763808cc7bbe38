"""Layers that share their input become one where that is certain, with the same results, and stay apart elsewhere."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowbit
from lowbit import LowbitLinear, QuantConfig

U4 = QuantConfig("u4", group_size=32)


class Module(nn.Module):
    """Three layers of one input length; subclasses call them in various ways."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, n, bias=bias) for n in (64, 16, 24))
        self.o_proj = nn.Linear(64, 32)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        q = self.q_proj(x).view(*x.shape[:-1], 4, 16)
        k = self.k_proj(x)
        v = self.v_proj(x) * scale
        return torch.cat([self.o_proj(q.flatten(-2)), k, v], -1)


class Gated(Module):
    """All calls in one expression, as in a gated feed-forward network; x gets its value in a branch."""

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        if scale > 1:
            x = x * scale
            return torch.cat([functional.silu(self.q_proj(x)), self.k_proj(x), self.v_proj(x)], -1)
        return self.o_proj(x)


class Renamed(Module):
    """The last call's result takes the name of its input, which is no change to what the others see."""

    def forward(self, hidden: Tensor) -> Tensor:
        rest = torch.cat([self.q_proj(hidden), self.k_proj(hidden)], -1)
        hidden = self.v_proj(hidden)
        return torch.cat([rest, hidden, hidden], -1)


class Rebound(Module):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)
        x = x * 2
        return torch.cat([q, self.k_proj(x)], -1)


class InPlace(Module):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)
        x.mul_(2)
        return torch.cat([q, self.k_proj(x)], -1)


class Alias(Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x = x + 0
        q = self.q_proj(x)
        y += 1
        return torch.cat([q, self.k_proj(x)], -1)


class GivenAway(Module):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)
        _double(x)
        return torch.cat([q, self.k_proj(x)], -1)


class Conditional(Module):
    def forward(self, x: Tensor, with_k: bool = True) -> Tensor:
        q = self.q_proj(x)
        return torch.cat([q, self.k_proj(x)], -1) if with_k else q


class Twice(Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.k_proj(x)], -1)


class UsedElsewhere(Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x)], -1) * self.size()

    def size(self) -> int:
        return self.q_proj.out_features


class Written(Module):
    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)
        k = torch.add(x, 1, out=x)
        return torch.cat([q, k, self.k_proj(x)], -1)


class Walrus(Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), (x := x + 1), self.k_proj(x)], -1)


def _double(x: Tensor) -> None:
    x *= 2


def _undecorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: function(*args)


class Decorated(Module):
    @_undecorated
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x)], -1)


def _renamed(name: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A decorator as transformers has them for parameters with other names than before."""

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def renamed(*args: Tensor, **kwargs: Tensor) -> Tensor:
            return function(*args, **{"x" if key == name else key: value for key, value in kwargs.items()})

        return renamed

    return decorate


class ByOtherNames(Module):
    @_renamed("inputs")
    @_renamed("hidden")
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x)], -1)


class UsedInDecorated(Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x)], -1)

    @_renamed("hidden")
    def other(self, x: Tensor) -> Tensor:
        return self.k_proj(x)


def low_bit(kind: type[Module], **options: bool) -> Module:
    torch.manual_seed(0)
    model = kind(**options).half()
    lowbit.quantize_(model, U4)
    return model


def names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, LowbitLinear)]


@pytest.mark.parametrize(("kind", "fused"), [(Module, "q_k_v_proj"), (Gated, "q_k_v_proj"), (Renamed, "q_k_v_proj")])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_siblings_become_one(kind: type[Module], fused: str, bias: bool) -> None:
    model, x = low_bit(kind, bias=bias), torch.randn(2, 3, 64).half()
    expected, size = model(x), sum(t.nbytes for t in model.buffers())
    (row,) = lowbit.fuse_(model)
    assert str(row) == f"{fused} = q_proj, k_proj, v_proj" and not row.reason
    assert names(model) == ["o_proj", fused] and isinstance(model, kind)
    torch.testing.assert_close(model(x), expected)
    assert sum(t.nbytes for t in model.buffers()) == size
    assert lowbit.fuse_(model) == ()


@pytest.mark.parametrize(
    "kind",
    [
        *(Rebound, InPlace, Alias, GivenAway, Conditional, Twice),
        *(UsedElsewhere, UsedInDecorated, Written, Walrus, Decorated),
    ],
    ids=lambda kind: kind.__name__,
)
@torch.no_grad()
def test_uncertain_siblings_stay_apart(kind: type[Module]) -> None:
    model, x = low_bit(kind), torch.randn(2, 64).half()
    expected = model(x.clone())
    rows = lowbit.fuse_(model)
    assert len(names(model)) == 4 and type(model) is kind
    assert torch.equal(model(x.clone()), expected)
    assert [row.reason for row in rows] == (["Decorated.forward is decorated, or uses super()"] * (kind is Decorated))


@torch.no_grad()
def test_decorators_stay_around_a_rewritten_forward() -> None:
    model, x = low_bit(ByOtherNames), torch.randn(2, 64).half()
    expected = model(x)
    (row,) = lowbit.fuse_(model)
    assert row.name == "q_k_proj" and type(model).forward.__name__ == "forward"
    assert torch.equal(model(x), expected) and torch.equal(model(hidden=x), expected)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(inputs=x), expected)


@torch.no_grad()
def test_the_rest_of_a_group_is_fused() -> None:
    model, x = Module().half(), torch.randn(2, 64).half()
    lowbit.quantize_(model, {"v_proj": None, "*": U4})
    expected = model(x)
    (row,) = lowbit.fuse_(model)
    assert row.name == "q_k_proj" and len(names(model)) == 2
    torch.testing.assert_close(model(x), expected)


def test_reasons_say_what_differs() -> None:
    model = Module().half()
    lowbit.quantize_(model, {"v_proj": QuantConfig("u3", group_size=32), "*": U4})
    (row,) = lowbit.fuse_(model)
    assert "formats differ" in row.reason and "u3" in row.reason and not row.name
    model = low_bit(Module)
    model.k_proj.register_forward_hook(lambda *_: None)
    assert "k_proj has hooks" in lowbit.fuse_(model)[0].reason
    model = low_bit(Module)
    model.alias = model.q_proj
    assert "several places" in lowbit.fuse_(model)[0].reason
    model = low_bit(Module)
    model.forward = model.forward  # type: ignore[method-assign]
    assert "replaced" in lowbit.fuse_(model)[0].reason
    model = nn.Sequential(low_bit(Module))
    odd = lowbit.quantize_(Odd().half(), U4, fuse=True).fused
    assert "blocks of 16" in odd[0].reason
    assert str(lowbit.fuse_(model)[0]) == "0: q_k_v_proj = q_proj, k_proj, v_proj"


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 24), nn.Linear(64, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) * self.up(x)


@torch.no_grad()
def test_fused_models_are_saved_copied_and_compiled() -> None:
    x = torch.randn(2, 64).half()
    model = low_bit(Module)
    assert lowbit.fuse_(model)
    expected = model(x, 0.5)
    assert torch.equal(copy.deepcopy(model)(x, scale=0.5), expected)
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded) is type(model) and torch.equal(loaded(x, 0.5), expected)
    other = low_bit(Module)
    for buffer in other.buffers():
        if buffer.is_floating_point():
            buffer.zero_()
    lowbit.fuse_(other)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x, 0.5), expected)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, 0.5), expected)
    exported = torch.export.export(model, (x, 0.5))
    assert torch.equal(exported.module()(x, 0.5), expected)


@torch.no_grad()
def test_empty_models_are_fused_for_loading() -> None:
    model, x = low_bit(Module), torch.randn(2, 64).half()
    empty = Module().half().to("meta")
    for name in names(model):
        empty.set_submodule(name, LowbitLinear.empty(model.get_submodule(name).spec, "meta"))
    expected = model(x)
    lowbit.fuse_(model)
    lowbit.fuse_(empty)
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(empty(x), expected)


@torch.no_grad()
def test_a_transformer_is_fused() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(**sizes, num_hidden_layers=2, vocab_size=50)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval()
    twin, ids = copy.deepcopy(model), torch.randint(0, 50, (1, 7))
    lowbit.quantize_(model, U4)
    report = lowbit.quantize_(twin, U4, fuse=True)
    layers = ["Qwen2DecoderLayer"] * 2
    assert [row.name for row in report.fused] == [*["q_k_v_proj", "gate_up_proj"] * 2, *layers, "Qwen2Model"]
    torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=0.02, atol=0.02)
    assert twin.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 11)
