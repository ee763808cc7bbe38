"""Decoder layers of transformers decode in a chain of launches, and go the old way wherever that is not the same."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import LowbitLinear, QuantConfig
from lowbit.pylib.model_speed.runner import Runner, Step
from lowbit.pylib.nn import chain
from lowbit.pylib.nn.chain import ChainedLayer
from lowbit.pylib.nn.gated_linear import GatedLinear

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
MORE: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": None},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64},
}
KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe")
U4 = QuantConfig("u4", 32, clip="max")
IDS = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(0))


def low_bit(kind: str = "Llama", config: QuantConfig = U4, **others: Any) -> Any:
    """Returns a small model whose norms are not all alike."""
    settings = getattr(transformers, f"{kind}Config")(**SMALL | MORE.get(kind, {}) | others)
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
    """Counts the layers that decode in a chain."""
    count, decode = list[int](), chain._decode

    def counted(layer: Any, x: Tensor, at: Any) -> Tensor:
        count.append(x.shape[1])
        return decode(layer, x, at)

    monkeypatch.setattr(chain, "_decode", counted)
    yield count


def generated(model: Any, **arguments: Any) -> Any:
    given = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    how = {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(IDS, **given | how | arguments)


def distance(a: Any, b: Any) -> float:
    """Returns how far logits are apart, next to their size."""
    first, second = (torch.stack(each.logits).double() for each in (a, b))
    return float((first - second).norm() / first.norm())


def static_cache(model: Any) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=40)


def given(model: Any, cache: Any) -> dict[str, Any]:
    """Returns a cache by the name that this version of transformers has for it."""
    names = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


@torch.no_grad()
def steps(model: Any, ends: tuple[int, ...], cache: Any, step: Any = None) -> Tensor:
    """Returns the logits of tokens that are given piece by piece, behind the first five."""
    model(IDS[:, :5], **given(model, cache))
    found = [
        (step or model)(IDS[:, start:end], **given(model, cache)).logits for start, end in zip((5, *ends), ends)
    ]
    return torch.cat(found, 1)


# -- what is computed


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_as_before(kind: str, chained: list[int]) -> None:
    model = low_bit(kind)
    before = steps(model, (6, 7, 8), static_cache(model))
    rows = lowbit.fuse_(model)
    assert sum(row.name.endswith("DecoderLayer") for row in rows) == 2 and lowbit.fuse_(model) == ()
    after = steps(model, (6, 7, 8), static_cache(model))
    assert chained == [1] * 6
    assert 0 < float((after - before).norm() / before.norm()) < 0.02


def test_generates(chained: list[int]) -> None:
    model = low_bit()
    before, after = generated(model), generated(fused(model))
    assert chained == [1] * 10  # five tokens of two layers: the first comes from the prompt
    assert 0 < distance(before, after) < 0.02 and torch.equal(before.sequences, after.sequences)


def test_padding_on_the_left(chained: list[int]) -> None:
    model, attention = low_bit(), torch.ones_like(IDS)
    attention[0, :4] = attention[1, :2] = 0
    before, after = (generated(each, attention_mask=attention) for each in (model, fused(model)))
    assert chained and distance(before, after) < 0.02
    assert distance(before, generated(fused(model))) > 0.05  # padding counts


def test_several_tokens_at_once(chained: list[int]) -> None:
    model = low_bit("Qwen3")
    expected, found = (steps(each, (8, 9), static_cache(each)) for each in (model, fused(model)))
    assert chained == [3, 3, 1, 1]
    assert float((found - expected).norm() / expected.norm()) < 0.02


def test_counts_the_tokens_of_a_cache() -> None:
    model = fused(low_bit())
    cache = static_cache(model)
    steps(model, (8, 9), cache)
    assert [int(layer.cumulative_length) for layer in cache.layers] == [9, 9]


def test_a_cache_that_is_used_again(chained: list[int]) -> None:
    """The layer keeps no pointer: another cache, or the same one emptied, gives the same."""
    model = fused(low_bit())
    cache = static_cache(model)
    first = steps(model, (6, 7), cache)
    cache.reset()
    assert torch.equal(steps(model, (6, 7), cache), first)
    assert torch.equal(steps(model, (6, 7), static_cache(model)), first) and len(chained) == 12


def test_compiled_without_a_break() -> None:
    model = fused(low_bit())
    expected = steps(model, (6, 7), static_cache(model))
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    cache = static_cache(model)
    torch.testing.assert_close(steps(model, (6, 7), cache, step), expected, rtol=2e-2, atol=2e-2)
    assert [int(layer.cumulative_length) for layer in cache.layers] == [7, 7]


def test_bench_model_decodes_in_a_chain(chained: list[int]) -> None:
    runner = Runner(fused(low_bit()), Step(batch=2, tokens=1, context=20), compiled=False)
    assert chained == [1, 1] and runner.output.shape == (2,)  # the first call makes the cache
    expected = Runner(low_bit(), Step(batch=2, tokens=1, context=20), compiled=False).output
    assert runner.output.shape == expected.shape and len(chained) == 2


# -- what goes the old way


def plain_calls(model: Any, chained: list[int], cache: Any = None) -> Tensor:
    chained.clear()
    found = steps(model, (6,), cache or static_cache(model))
    assert chained == []
    return found


def test_other_caches_go_the_old_way(chained: list[int]) -> None:
    model = low_bit()
    other = fused(model)
    expected = steps(model, (6,), transformers.DynamicCache(config=model.config))
    found = plain_calls(other, chained, transformers.DynamicCache(config=model.config))
    assert float((found - expected).norm() / expected.norm()) < 0.02
    sliding = fused(low_bit("Mistral", sliding_window=8))
    plain_calls(sliding, chained)
    assert other(IDS).logits.shape == (3, 9, 128) and chained == []  # none at all


def test_hooks_and_adapters_go_the_old_way(chained: list[int]) -> None:
    model = fused(low_bit())
    seen = list[int]()
    layers = model.model.layers
    hooks = [
        layers[0].self_attn.register_forward_hook(lambda *_: seen.append(0)),
        layers[1].mlp.gate_up_proj.register_forward_hook(lambda *_: seen.append(1)),
    ]
    steps(model, (6,), static_cache(model))
    assert chained == [1] and seen == [0, 1, 0, 1]  # a hook of the network leaves attention in the chain
    for hook in hooks:
        hook.remove()
    layers[0].self_attn.o_proj = nn.Sequential(layers[0].self_attn.o_proj)
    chained.clear()
    steps(model, (6,), static_cache(model))
    assert chained == [1]


def test_training_and_gradients_go_the_old_way(chained: list[int]) -> None:
    model = fused(low_bit())
    with torch.enable_grad():
        cache = static_cache(model)
        with torch.no_grad():
            model(IDS[:, :5], **given(model, cache))
        model(IDS[:, 5:6], **given(model, cache))
        assert chained == []
    model.train()
    plain_calls(model, chained)
    model.gradient_checkpointing_enable()
    model(IDS, labels=IDS).loss.backward()
    assert chained == []


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_other_attention_goes_the_old_way(attention: str, chained: list[int]) -> None:
    model = fused(low_bit(attn_implementation="eager")) if attention == "eager" else fused(low_bit())
    if attention != "eager":
        model.model.layers[0].self_attn.config._attn_implementation = "sdpa_paged"
        layer = model.model.layers[0]
        assert not chain._is_as_fused(layer, torch.zeros(1, 1, 128).bfloat16())
        return
    plain_calls(model, chained)


def test_more_rows_than_kernels_have(chained: list[int]) -> None:
    model = fused(low_bit())
    cache, ids = static_cache(model), torch.randint(3, 128, (33, 4))
    with torch.no_grad():
        for end in (1, 3, 4):
            model(ids[:, end - (2 if end == 3 else 1) : end], **given(model, cache))
    assert chained == [1, 1]  # 33 tokens, but not 66


# -- what is fused


def test_what_stays_as_it_is() -> None:
    rows = lowbit.fuse_(low_bit("Gemma2"))
    assert "how a Gemma2DecoderLayer decodes is not known; that of LlamaDecoderLayer" in str(rows[-1])
    half = low_bit(config=U4)
    half.model.layers[0].self_attn.o_proj = half.model.layers[0].self_attn.o_proj.to_linear()
    reasons = {row.module: row.reason for row in lowbit.fuse_(half)}
    assert reasons["model.layers.0"] == "self_attn.o_proj is a Linear, not a LowbitLinear"
    assert not reasons["model.layers.1"]
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    assert lowbit.fuse_(dense) == ()
    replaced = low_bit()
    replaced.model.layers[1].forward = lambda *_: None
    assert "was replaced by another" in lowbit.fuse_(replaced)[-1].reason


def test_devices_that_differ() -> None:
    model = low_bit()
    model.model.layers[0].mlp.to("meta")
    reasons = {row.module: row.reason for row in lowbit.fuse_(model)}
    assert reasons["model.layers.0"] == "its tensors are on cpu, meta"


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_unfused_models_are_those_of_before(kind: str) -> None:
    model = low_bit(kind)
    before, kinds = generated(model), [type(module) for module in model.modules()]
    state = {name: copy.deepcopy(tensor) for name, tensor in model.state_dict().items()}
    lowbit.fuse_(model)
    assert any(isinstance(module, ChainedLayer) for module in model.modules())
    assert "model.layers.0" in lowbit.unfuse_(model) and lowbit.unfuse_(model) == ()
    assert sorted(map(str, kinds)) == sorted(str(type(module)) for module in model.modules())
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())
    assert distance(before, generated(model)) == 0


def test_unfusing_leaves_adapters_alone() -> None:
    model = fused(low_bit())
    attention = model.model.layers[0].self_attn
    attention.q_k_v_proj = nn.Sequential(attention.q_k_v_proj)
    names = lowbit.unfuse_(model)
    assert "model.layers.0.self_attn" not in names and "model.layers.1.self_attn" in names
    assert isinstance(attention.q_k_v_proj, nn.Sequential) and generated(model).sequences.shape == (3, 15)


def test_copies_pickles_and_states() -> None:
    model = fused(low_bit())
    expected = generated(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.model.layers[0]) is type(model.model.layers[0])
        assert distance(expected, generated(other)) == 0
    empty = fused(low_bit())
    empty.load_state_dict(model.state_dict())
    assert distance(expected, generated(empty)) == 0


def test_states_without_a_gate_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of before had gate and up in the order of plain layers."""
    model = low_bit()
    plain = copy.deepcopy(model)
    with monkeypatch.context() as without:
        without.setattr(chain, "_gate", lambda network: None)
        lowbit.fuse_(plain)
    other = fused(model)
    assert type(other.model.layers[0].mlp.gate_up_proj) is GatedLinear
    other.load_state_dict(plain.state_dict())
    assert type(other.model.layers[0].mlp.gate_up_proj) is LowbitLinear
    assert distance(generated(model), generated(other)) < 0.02


def test_saved_and_loaded(tmp_path: Path, chained: list[int]) -> None:
    pytest.importorskip("accelerate")
    load = transformers.AutoModelForCausalLM.from_pretrained
    low_bit().save_pretrained(tmp_path / "plain")  # whose rotations were rounded to bf16; those of loaded ones are not
    model = fused(load(tmp_path / "plain"))
    expected = generated(model)
    model.save_pretrained(tmp_path / "fused")
    again = load(tmp_path / "fused")
    chained.clear()
    assert distance(expected, generated(again)) == 0 and len(chained) == 10
    assert type(again.model.layers[0].mlp.gate_up_proj) is GatedLinear
