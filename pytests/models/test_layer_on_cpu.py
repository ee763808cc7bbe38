"""Decoder layers of transformers decode in native calls on a CPU, with any cache, as they did before: all of a model in
one call, or a layer in two."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import LowbitLinear, QuantConfig
from lowbit.pylib.nn import layer_on_cpu, stack_on_cpu

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
    """Counts the layers that decode in a CPU's programs, each in two calls or all in one."""
    count, decoded, stacked = list[int](), layer_on_cpu.decoded, stack_on_cpu.decoded

    def counted(layer: Any, x: Tensor, given: Any) -> Tensor | None:
        if (y := decoded(layer, x, given)) is not None:
            count.append(x.shape[1])
        return y

    def counted_all(model: Any, given: Any) -> Tensor | None:
        if (y := stacked(model, given)) is not None:
            count.extend([1] * len(model.layers))
        return y

    monkeypatch.setattr(layer_on_cpu, "decoded", counted)
    monkeypatch.setattr(stack_on_cpu, "decoded", counted_all)
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


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3"])
def test_a_short_prompt_with_padding_on_the_left(kind: str, chained: list[int]) -> None:
    """Its padding looks at no place, and stays numbers: they are the keys and values of what comes behind."""
    model = low_bit(kind)
    mask = torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 1]])
    with torch.no_grad():
        caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
        expected, found = (
            each(IDS[:, :3], attention_mask=mask, **given(each, cache)).logits
            for each, cache in zip((model, fused(model)), caches)
        )
    here = mask.bool()
    assert chained == [3, 3] and found.isfinite().all()
    assert float((found - expected)[here].norm() / expected[here].norm()) < 0.02


class Doubled(nn.Module):
    """A norm of another kind."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x * self.weight


class Wrapped(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner = norm

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def replace_norm(kind: type[nn.Module]) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        layer.input_layernorm = kind(layer.input_layernorm)

    return change


def set_eps(layer: Any) -> None:
    layer.input_layernorm.variance_epsilon = layer.post_attention_layernorm.variance_epsilon = 1.0


def set_scaling(layer: Any) -> None:
    layer.self_attn.scaling = 1.0


CHANGES = {"eps": set_eps, "scaling": set_scaling, "norm": replace_norm(Doubled), "wrapper": replace_norm(Wrapped)}


@pytest.mark.parametrize("make", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_after_fusing_counts(name: str, make: str) -> None:
    """Also what a class of the chain, which takes a static cache, looks at."""
    kind = "Llama" if make == "DynamicCache" else "SmolLM3"
    model = low_bit(kind)
    other = fused(model)

    def run(each: Any) -> Tensor:
        caches = {"DynamicCache": {}, "StaticCache": {"max_cache_len": 40}}
        return steps(each, (6, 7), getattr(transformers, make)(config=each.config, **caches[make]))

    before = run(other)
    for layer in (*model.model.layers, *other.model.layers):
        CHANGES[name](layer)
    expected, found = run(model), run(other)
    assert float((found - expected).norm() / expected.norm()) < 0.02
    assert float((before - expected).norm() / expected.norm()) > 0.05


@pytest.mark.parametrize("gain", [torch.empty(128, dtype=torch.bfloat16, device="meta"), torch.ones(64).bfloat16()])
def test_gains_that_do_not_fit_go_the_old_way(gain: Tensor, chained: list[int]) -> None:
    """Where torch refuses them: their addresses are not read."""
    model = fused(low_bit())
    model.model.layers[0].input_layernorm.weight = nn.Parameter(gain, requires_grad=False)
    with pytest.raises((RuntimeError, NotImplementedError)):
        steps(model, (6,), transformers.DynamicCache(config=model.config))
    assert not chained


def test_norms_of_a_class_of_another_name(chained: list[int]) -> None:
    """What a norm adds to its gain is tried."""
    model = low_bit("Gemma3")
    norm = type(model.model.layers[0].input_layernorm)
    other = type("FastNorm", (norm,), {})
    for module in model.modules():
        if type(module) is norm:
            module.__class__ = other
    expected = steps(model, (6,), transformers.DynamicCache(config=model.config))
    found = steps(fused(model), (6,), transformers.DynamicCache(config=model.config))
    assert len(chained) == 2 and float((found - expected).norm() / expected.norm()) < 0.02


def tripled(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns a class whose outcome is another one than that of transformers, of which it is made."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        y = cls.forward(self, *args, **kwargs)
        return (3 * y[0], *y[1:]) if isinstance(y, tuple) else 3 * y

    return type(f"My{cls.__name__}", (cls,), {"forward": forward})


@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_parts_of_a_class_of_its_own_go_the_old_way(part: str) -> None:
    model = low_bit()
    for layer in model.model.layers:
        layer._modules[part].__class__ = tripled(type(layer._modules[part]))
    for make in (transformers.DynamicCache, lambda config: transformers.StaticCache(config, max_cache_len=40)):
        expected = steps(model, (6,), make(config=model.config))
        found = steps(fused(model), (6,), make(config=model.config))
        assert float((found - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("name", ["LlamaAttention", "LlamaDecoderLayer"])
def test_a_patched_class_goes_the_old_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = getattr(transformers.models.llama.modeling_llama, name)
    monkeypatch.setattr(cls, "forward", halved(cls.forward))
    model = low_bit()
    other = copy.deepcopy(model)
    rows = lowbit.fuse_(other)
    assert any("is not that of transformers" in row.reason for row in rows)
    expected, found = (steps(each, (6,), transformers.DynamicCache(config=model.config)) for each in (model, other))
    assert float((found - expected).norm() / expected.norm()) < 0.02


def halved(forward: Any) -> Any:
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        y = forward(self, *args, **kwargs)
        return (y[0] / 2, *y[1:]) if isinstance(y, tuple) else y / 2

    return patched


def test_saved_with_projections_of_several_formats(chained: list[int], tmp_path: Path) -> None:
    model = low_bit("Qwen3")
    for layer in model.model.layers:
        layer.self_attn.v_proj = LowbitLinear.from_linear(layer.self_attn.v_proj.to_linear(), QuantConfig("i8", 32))
    lowbit.fuse_(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    expected, found = (steps(each, (6,), transformers.DynamicCache(config=model.config)) for each in (model, again))
    assert len(chained) == 4
    assert float((found - expected).norm() / expected.norm()) < 0.02  # angles are rounded in the model alone
