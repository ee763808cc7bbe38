"""All decoder layers of a model in one native call for a token give what they give one by one, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_layer_on_cpu import IDS, U4, WINDOW, fused, given, low_bit, steps
from torch import Tensor, nn

import lowbit
from lowbit import QuantConfig
from lowbit.pylib.nn import cache_room, stack_on_cpu

transformers = pytest.importorskip("transformers")
CACHES: dict[str, Callable[..., Any]] = {
    "dynamic": transformers.DynamicCache,
    "static": lambda config: transformers.StaticCache(config, max_cache_len=40),
}
ENDS = (6, 7, 8, 9)
Stacked = list[bool]


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stacked]:
    """Notes of each call of a model whether one native call did it."""
    found, decoded = Stacked(), stack_on_cpu.decoded

    def noted(model: Any, kwargs: Any) -> Tensor | None:
        y = decoded(model, kwargs)
        found.append(y is not None)
        return y

    monkeypatch.setattr(stack_on_cpu, "decoded", noted)
    yield found


def one_by_one(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """Returns what layers give one by one."""
    with monkeypatch.context() as patch:
        patch.setattr(stack_on_cpu, "decoded", lambda *_: None)
        return run()


@torch.no_grad()
def told(model: Any, cache: Any, tokens: Tensor, **others: Any) -> Tensor:
    """Returns the logits of more tokens."""
    return model(tokens, **given(model, cache), **others).logits


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3"])
def test_bits_are_those_of_layers_one_by_one(
    kind: str, make: Callable[..., Any], stacked: Stacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beyond a window, which the fourth token leaves."""
    model = fused(low_bit(kind, **(WINDOW if kind in ("Mistral", "Gemma3") else {})))
    expected = one_by_one(monkeypatch, lambda: steps(model, ENDS, make(config=model.config)))
    stacked.clear()
    assert torch.equal(steps(model, ENDS, make(config=model.config)), expected)
    assert stacked == [False, True, True, True, True]


@pytest.mark.parametrize("kind", ["Llama", "Gemma3"])
def test_generate_gives_the_same(kind: str, stacked: Stacked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts in several sequences, also with padding, which layers take one by one, and of beams, whose cache is
    put in another order."""
    model = fused(low_bit(kind))
    padded = torch.ones_like(IDS)
    padded[0, :3] = 0
    for how in ({}, {"attention_mask": padded}, {"num_beams": 2}, {"cache_implementation": "static"}):
        how = {"max_new_tokens": 80, "do_sample": False, **how}
        expected = one_by_one(monkeypatch, lambda how=how: model.generate(IDS, **how))
        stacked.clear()
        assert torch.equal(model.generate(IDS, **how), expected)
        assert any(stacked) == ("attention_mask" not in how)


def test_caches_that_share_memory_keep_their_tokens(stacked: Stacked) -> None:
    """Nothing is written where another tensor is: of a cache that was copied, or one that was cropped."""
    model = fused(low_bit())
    cache = transformers.DynamicCache(config=model.config)
    told(model, cache, IDS[:1, :5])
    told(model, cache, IDS[:1, 5:6])
    other = copy.copy(cache)
    other.layers = [copy.copy(held) for held in cache.layers]
    before = [held.keys for held in cache.layers]
    were = [each.clone() for each in before]
    expected = [told(model, copy.deepcopy(cache), IDS[1:2, n : n + 1]) for n in (6, 7)]
    found = [told(model, each, IDS[1:2, n : n + 1]) for n, each in ((6, cache), (7, other))]
    assert all(map(torch.equal, found, expected)) and all(stacked[1:])
    cache.crop(-1)
    kept = [held.keys for held in other.layers]
    held_there = [each.clone() for each in kept]
    assert torch.equal(told(model, cache, IDS[1:2, 7:8]), expected[1])
    assert all(map(torch.equal, before, were)) and all(map(torch.equal, kept, held_there))


def test_a_cache_gets_room_again_and_again(stacked: Stacked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_room, "_LEAST_ROOM", 1)
    model = fused(low_bit("Gemma3", **WINDOW))
    tokens = torch.randint(3, 128, (1, 30), generator=torch.Generator().manual_seed(1))
    found = list[list[Tensor]]()
    for run in (lambda work: work(), lambda work: one_by_one(monkeypatch, work)):
        cache = transformers.DynamicCache(config=model.config)
        told(model, cache, tokens[:, :4])
        found.append([run(lambda n=n, c=cache: told(model, c, tokens[:, n : n + 1])) for n in range(4, 30)])
        assert [held.get_seq_length() for held in cache.layers] == [30, 30]
        assert [held.keys.shape[2] for held in cache.layers] == [5, 30]
    assert all(map(torch.equal, *found)) and any(stacked)


def test_layers_go_on_where_one_call_has_ended(stacked: Stacked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one token and of several, with any cache."""
    model = fused(low_bit("Gemma3", **WINDOW))
    for make in CACHES.values():
        ends = (6, 8, 9)
        expected = one_by_one(monkeypatch, lambda make=make: steps(model, (6, 8, 9), make(config=model.config)))
        stacked.clear()
        assert torch.equal(steps(model, ends, make(config=model.config)), expected)
        assert stacked == [False, True, False, True]


def set_gain(model: Any) -> None:
    model.model.layers[1].input_layernorm.weight.data = torch.full((128,), 3.0, dtype=torch.bfloat16)


def write_gain(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.mul_(2)


def set_weight(model: Any) -> None:
    other = fused(low_bit(config=QuantConfig("u3", 32, clip="max"))).model.layers[1].mlp.down_proj
    model.model.layers[0].mlp.down_proj.hold(other.packed)


def set_eps(model: Any) -> None:
    model.model.norm.variance_epsilon = 1.0


def drop_layer(model: Any) -> None:
    model.config.num_hidden_layers = 1


def swap_layers(model: Any) -> None:
    first, second = model.model.layers
    first.mlp, second.mlp = second.mlp, first.mlp


def hook_layer(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, y: y.flip(-1))


def replace_norm(model: Any) -> None:
    model.model.norm = nn.Identity()


CHANGES = {
    each.__name__: each
    for each in (set_gain, write_gain, set_weight, set_eps, drop_layer, swap_layers, hook_layer, replace_norm)
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_calls_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused(low_bit())

    def run() -> Tensor:
        return steps(model, (6, 7), transformers.DynamicCache(config=model.config))

    before = run()
    CHANGES[name](model)
    found = run()
    assert torch.equal(found, one_by_one(monkeypatch, run))
    assert float((found - before).norm() / before.norm()) > 0.05


def test_codes_that_were_written_to_are_an_error() -> None:
    model = fused(low_bit())
    cache = transformers.DynamicCache(config=model.config)
    told(model, cache, IDS[:1, :5])
    told(model, cache, IDS[:1, 5:6])
    model.model.layers[1].mlp.down_proj.codes.add_(1)
    with pytest.raises(lowbit.PackError, match="were written to"):
        told(model, cache, IDS[:1, 6:7])


def test_calls_that_ask_for_more_go_layer_by_layer(stacked: Stacked) -> None:
    model = fused(low_bit())
    cache = transformers.DynamicCache(config=model.config)
    told(model, cache, IDS[:1, :5])
    with torch.no_grad():
        y = model(IDS[:1, 5:6], **given(model, cache), output_hidden_states=True)
    assert len(y.hidden_states) == 3 and not any(stacked)
    model.train()
    told(model, cache, IDS[:1, 6:7])
    model(IDS[:1, 7:8], **given(model, cache))  # with gradients
    assert not any(stacked)


def test_a_hook_of_all_modules_sees_all_layers(stacked: Stacked) -> None:
    model = fused(low_bit())
    cache = transformers.DynamicCache(config=model.config)
    told(model, cache, IDS[:1, :5])
    seen = list[str]()
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        told(model, cache, IDS[:1, 5:6])
    finally:
        hook.remove()
    assert seen.count("LlamaDecoderLayer") == 2 and not any(stacked)


def test_several_threads_of_python_at_once(stacked: Stacked) -> None:
    model = fused(low_bit("Gemma3"))

    def run(row: int) -> Tensor:
        with torch.no_grad():
            return model.generate(IDS[row : row + 1], max_new_tokens=12, do_sample=False)

    expected = [run(row) for row in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert all(map(torch.equal, pool.map(run, range(3)), expected))
    assert any(stacked)


def test_it_is_reported_and_taken_back(stacked: Stacked) -> None:
    model = low_bit(config=U4)
    kind = type(model.model)
    rows = lowbit.fuse_(model)
    assert "model: LlamaModel = layers" in map(str, rows)
    assert lowbit.fuse_(model) == ()
    steps(copy.deepcopy(model), (6,), transformers.DynamicCache(config=model.config))
    assert stacked == [False, True]
    assert "model" in lowbit.unfuse_(model)
    assert type(model.model) is kind
    stacked.clear()
    steps(model, (6,), transformers.DynamicCache(config=model.config))
    assert not stacked
