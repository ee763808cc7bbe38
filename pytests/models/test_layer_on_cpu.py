"""Decoder layers of transformers decode in two native calls on a CPU, with any cache, as they did before."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import LowbitLinear, QuantConfig
from lowbit.pylib.nn import layer_on_cpu

transformers = pytest.importorskip("transformers")
SMALL = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": None,
}
MORE: dict[str, dict[str, Any]] = {"Gemma3": {"layer_types": ["sliding_attention", "full_attention"]}}
WINDOW: dict[str, Any] = {"sliding_window": 6}
U4 = QuantConfig("u4", 32, clip="max")
IDS = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(0))


def low_bit(kind: str = "Llama", config: QuantConfig = U4, **others: Any) -> Any:
    """Returns a small model whose norms are not all alike."""
    name = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    settings = getattr(transformers, name)(**SMALL | MORE.get(kind, {}) | others)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(settings).bfloat16().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    lowbit.quantize_(model, config, progress=False)
    return model


def fused(model: Any) -> Any:
    other = copy.deepcopy(model)
    lowbit.fuse_(other)
    return other


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the layers that decode in a CPU's programs."""
    count, decoded = list[int](), layer_on_cpu.decoded

    def counted(layer: Any, x: Tensor, given: Any) -> Tensor | None:
        if (y := decoded(layer, x, given)) is not None:
            count.append(x.shape[1])
        return y

    monkeypatch.setattr(layer_on_cpu, "decoded", counted)
    yield count


def given(model: Any, cache: Any) -> dict[str, Any]:
    """Returns a cache by the name that this version of transformers has for it."""
    names = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


@torch.no_grad()
def steps(model: Any, ends: tuple[int, ...], cache: Any) -> Tensor:
    """Returns the logits of tokens that are given piece by piece, behind the first five."""
    model(IDS[:, :5], **given(model, cache))
    found = [model(IDS[:, start:end], **given(model, cache)).logits for start, end in zip((5, *ends), ends)]
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3"])
def test_a_cpu_takes_any_cache(kind: str, chained: list[int]) -> None:
    """One that grows, and one of a window, which keeps fewer tokens than there were."""
    model = low_bit(kind, **(WINDOW if kind in ("Mistral", "Gemma3") else {}))
    for make in (transformers.DynamicCache, lambda config: transformers.StaticCache(config, max_cache_len=40)):
        expected = steps(model, (6, 8, 9), make(config=model.config))
        chained.clear()
        found = steps(fused(model), (6, 8, 9), make(config=model.config))
        assert chained == [1, 1, 2, 2, 1, 1]
        assert 0 < float((found - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same(threads: int, chained: list[int]) -> None:
    model, before = fused(low_bit("Gemma3")), torch.get_num_threads()
    found = list[Tensor]()
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            found.append(model.generate(IDS, max_new_tokens=6, do_sample=False))
    finally:
        torch.set_num_threads(before)
    assert chained and torch.equal(*found)


def test_a_mask_of_other_places_than_the_cache_has() -> None:
    model = fused(low_bit())
    cache = transformers.DynamicCache(config=model.config)
    mask = torch.ones(1, 1, 1, 9, dtype=torch.bool)
    with torch.no_grad():
        model(IDS[:1, :5], **given(model, cache))
        with pytest.raises(lowbit.SpecError, match="the mask has 9 places, and the cache 6"):
            model(IDS[:1, 5:6], attention_mask=mask, **given(model, cache))


def test_projections_of_several_formats(chained: list[int]) -> None:
    """As GGUF files mix them: those to queries, keys and values stay apart, and are chained all the same."""
    model = low_bit("Qwen3")
    for layer in model.model.layers:
        wide = layer.self_attn.v_proj.to_linear()
        layer.self_attn.v_proj = LowbitLinear.from_linear(wide, QuantConfig("i8", 32))
    expected = steps(model, (6, 7), transformers.DynamicCache(config=model.config))
    rows = lowbit.fuse_(model)
    assert any("formats differ" in row.reason for row in rows)
    found = steps(model, (6, 7), transformers.DynamicCache(config=model.config))
    assert chained == [1] * 4 and float((found - expected).norm() / expected.norm()) < 0.02


def test_other_weights_in_the_places_of_old_ones(chained: list[int]) -> None:
    """No address is kept: a layer multiplies by the weight that it has, of another format, too."""
    model = fused(low_bit())
    other = fused(low_bit(config=QuantConfig("u3", 32, clip="max")))
    steps(model, (6,), transformers.DynamicCache(config=model.config))
    expected = steps(other, (6,), transformers.DynamicCache(config=model.config))
    for name in ("o_proj", "q_k_v_proj"):
        for mine, theirs in zip(model.model.layers, other.model.layers):
            mine.self_attn._modules[name].hold(theirs.self_attn._modules[name].packed)
    for mine, theirs in zip(model.model.layers, other.model.layers):
        mine.mlp = theirs.mlp
    model.model.embed_tokens, model.lm_head = other.model.embed_tokens, other.lm_head
    assert torch.equal(steps(model, (6,), transformers.DynamicCache(config=model.config)), expected)
    assert chained == [1] * 6


def test_weights_in_formats_of_several_kinds(chained: list[int]) -> None:
    for config in (QuantConfig("nf4", 64), QuantConfig("u4", 32, zeros="float"), QuantConfig("i8", 32)):
        model = low_bit(config=config)
        expected = steps(model, (6,), transformers.DynamicCache(config=model.config))
        found = steps(fused(model), (6,), transformers.DynamicCache(config=model.config))
        assert float((found - expected).norm() / expected.norm()) < 0.02
    assert len(chained) == 6


def test_taken_back(chained: list[int]) -> None:
    model = low_bit("Gemma3")
    expected = steps(model, (6, 7), transformers.DynamicCache(config=model.config))
    lowbit.fuse_(model)
    lowbit.unfuse_(model)
    assert torch.equal(steps(model, (6, 7), transformers.DynamicCache(config=model.config)), expected)
    assert not chained


def test_hooks_gradients_and_prompts_go_the_old_way(chained: list[int]) -> None:
    model = fused(low_bit())
    with torch.no_grad():
        model(IDS, **given(model, transformers.DynamicCache(config=model.config)))  # 27 tokens
    cache = transformers.DynamicCache(config=model.config)
    model(IDS[:1, :1], **given(model, cache))  # with gradients
    assert not chained
    hook = model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: None)
    steps(model, (6,), transformers.DynamicCache(config=model.config))
    assert chained == [1]
    hook.remove()
