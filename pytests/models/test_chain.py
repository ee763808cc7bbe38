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
from lowbit.pylib.nn import chain, layer_on_cpu, stack_on_cpu
from lowbit.pylib.nn.chain import ChainedLayer
from lowbit.pylib.nn.decoder_forms import KNOWN
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
WINDOW = {"sliding_window": 8}
MORE: dict[str, dict[str, Any]] = {
    "Dots1": {"first_k_dense_replace": 2},
    "Gemma2": WINDOW | {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0},
    "Gemma3": WINDOW | {"query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "Glm": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "Glm4": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "Glm4Moe": {"first_k_dense_replace": 2, "use_qk_norm": True},
    "GptOss": WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 4},
    "Granite": {"residual_multiplier": 0.25, "attention_multiplier": 0.1},
    "GraniteMoe": {"residual_multiplier": 0.25, "num_local_experts": 4, "num_experts_per_tok": 4},
    "Ministral": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "Mistral": {"sliding_window": None},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "Phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    "Qwen2Moe": {
        "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64
    },
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64},
    "SmolLM3": {"no_rope_layers": [1, 0]},
}  # fmt: skip
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
KINDS = [name.rpartition(".")[2].removesuffix("DecoderLayer") for name in KNOWN]
WINDOWED = ("Gemma2", "Gemma3", "GptOss", "Ministral")
U4 = QuantConfig("u4", 32, clip="max")
IDS = torch.randint(3, 128, (3, 10), generator=torch.Generator().manual_seed(0))


def low_bit(kind: str = "Llama", config: QuantConfig = U4, **others: Any) -> Any:
    """Returns a small model whose norms are not all alike, and whose attention counts."""
    settings = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))(**SMALL | MORE.get(kind, {}) | others)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(settings).bfloat16().eval()
    for name, parameter in model.named_parameters():
        std = 0.1 if "self_attn" in name else 0.05
        nn.init.normal_(parameter, std=std) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
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
    without_programs(monkeypatch)  # test_layer_on_cpu.py has those of a CPU
    yield count


def without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out a CPU's programs, which round otherwise."""
    for module in (layer_on_cpu, stack_on_cpu):
        monkeypatch.setattr(module, "decoded", lambda *_: None)


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
def steps(model: Any, ends: tuple[int, ...], cache: Any, step: Any = None, ids: Tensor = IDS) -> Tensor:
    """Returns the logits of tokens that are given piece by piece, behind the first five."""
    model(ids[:, :5], **given(model, cache))
    found = [
        (step or model)(ids[:, start:end], **given(model, cache)).logits for start, end in zip((5, *ends), ends)
    ]
    return torch.cat(found, 1)


# -- what is computed


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_as_before(kind: str, chained: list[int]) -> None:
    model = low_bit(kind)
    before = steps(model, (6, 7, 8, 9, 10), static_cache(model))
    rows = lowbit.fuse_(model)
    assert sum(row.name.endswith("DecoderLayer") for row in rows) == 2 and lowbit.fuse_(model) == ()
    after = steps(model, (6, 7, 8, 9, 10), static_cache(model))
    assert chained == [1] * 10
    assert 0 < apart(after, before) < 0.03  # eager and sdpa of transformers differ by up to 0.018


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("Gemma2", "self_attn.attn_logit_softcapping", None),
        ("Gemma3", "self_attn.scaling", 1.0),
        ("GptOss", "self_attn.sinks", nn.Parameter(torch.tensor([20.0, -20.0, 20.0, -20.0]).bfloat16())),
        ("Granite", "residual_multiplier", 1.0),
        ("Granite", "self_attn.scaling", 1.0),
        ("SmolLM3", "self_attn.use_rope", 0),
    ],
)
def test_numbers_of_modules_count(kind: str, name: str, value: Any, chained: list[int]) -> None:
    """What is not in the norms and matmuls of a layer is read in every call, and changes what is computed."""
    model = fused(low_bit(kind))
    before = steps(model, (6, 7), static_cache(model))
    module = model.model.layers[0].get_submodule(name.rpartition(".")[0])
    setattr(module, name.rpartition(".")[2], value)
    assert apart(steps(model, (6, 7), static_cache(model)), before) > 0.03 and chained


@pytest.mark.parametrize("kind", WINDOWED)
def test_windows(kind: str, chained: list[int]) -> None:
    """Tokens that a window's cache has no room for are dropped one by one; several at once go the old way."""
    model = low_bit(kind)
    other, ends = fused(model), (6, 8, 9, 10, 12, 13, 20)
    caches = [static_cache(each) for each in (model, other)]
    windowed = sum(hasattr(layer, "cumulative_length_int") for layer in caches[0].layers)
    ids = torch.randint(3, 128, (3, 20), generator=torch.Generator().manual_seed(1))
    expected, found = (steps(each, ends, cache, ids=ids) for each, cache in zip((model, other), caches))
    assert apart(found, expected) < 0.03 and windowed > 0
    full = [1, 2, 1, 1, 2, 1, 7]
    assert sorted(chained) == sorted(full * (2 - windowed) + [1, 2, 1, 1, 1] * windowed)
    for mine, other_layer in zip(*(cache.layers for cache in caches)):
        if hasattr(mine, "cumulative_length_int"):
            assert mine.cumulative_length_int == other_layer.cumulative_length_int == 20


@pytest.mark.parametrize("kind", ["Gemma3", "GptOss"])
def test_windows_compiled_without_a_break(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_programs(monkeypatch)
    model = fused(low_bit(kind))
    expected = steps(model, (6, 7, 8, 9, 10), static_cache(model))
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    found = steps(model, (6, 7, 8, 9, 10), static_cache(model), step)
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


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


@pytest.mark.parametrize("kind", ["Gemma3", "GptOss"])
def test_padding_on_the_left_in_a_window(kind: str, chained: list[int]) -> None:
    """A prompt longer than the window, of which padding is in the window, too."""
    model, attention = low_bit(kind), torch.ones_like(IDS)
    attention[0, :6] = attention[1, :4] = 0
    before, after = (generated(each, attention_mask=attention) for each in (model, fused(model)))
    assert len(chained) == 10 and distance(before, after) < 0.03
    assert distance(before, generated(fused(model))) > 0.05


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


def test_compiled_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    without_programs(monkeypatch)
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
    assert other(IDS).logits.shape == (3, 10, 128) and chained == []  # none at all


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


def test_masks_that_are_added(chained: list[int]) -> None:
    """The attention that transformers call eager has masks of numbers."""
    model = low_bit(attn_implementation="eager")
    expected, attention = steps(model, (6, 8), static_cache(model)), torch.ones_like(IDS)
    other = fused(model)
    assert apart(steps(other, (6, 8), static_cache(other)), expected) < 0.02 and chained == [1, 1, 2, 2]
    attention[0, :4] = attention[1, :2] = 0
    before, after = (generated(each, attention_mask=attention) for each in (model, other))
    assert distance(before, after) < 0.02


def test_sinks_of_other_heads_go_the_old_way(chained: list[int]) -> None:
    model = fused(low_bit("GptOss"))
    cache = static_cache(model)
    with torch.no_grad():
        model(IDS[:, :5], **given(model, cache))
        model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(8).bfloat16())
        with pytest.raises(RuntimeError, match="size"):
            model(IDS[:, 5:6], **given(model, cache))
    assert chained == []


def test_other_attention_goes_the_old_way() -> None:
    model = fused(low_bit())
    layer, x = model.model.layers[0], torch.zeros(1, 1, 128).bfloat16()
    assert chain._is_as_fused(layer, x)
    layer.self_attn.config._attn_implementation = "sdpa_paged"
    assert not chain._is_as_fused(layer, x)
    layer.self_attn.config._attn_implementation, layer.self_attn.is_causal = "sdpa", False
    assert not chain._is_as_fused(layer, x)


def test_more_rows_than_kernels_have(chained: list[int]) -> None:
    model = fused(low_bit())
    cache, ids = static_cache(model), torch.randint(3, 128, (33, 4))
    with torch.no_grad():
        for end in (1, 3, 4):
            model(ids[:, end - (2 if end == 3 else 1) : end], **given(model, cache))
    assert chained == [1, 1]  # 33 tokens, but not 66


# -- what is fused


def test_what_stays_as_it_is() -> None:
    rows = lowbit.fuse_(low_bit("Olmo2"))
    assert "how a Olmo2DecoderLayer decodes is not known; docs/howto/fastest-decode.md" in str(rows[-1])
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


class Mean(nn.Module):
    """A norm that takes the mean away."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(128)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, eps=self.eps)


class Ones(Mean):
    """A root-mean-square norm whose gain is added to one."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)) * (1 + self.weight)


def test_norms_are_tried() -> None:
    model = low_bit()
    model.model.layers[0].input_layernorm = Mean()
    model.model.layers[1].input_layernorm = Ones()
    reasons = {row.module: row.reason for row in lowbit.fuse_(model)}
    assert reasons["model.layers.0"] == "Mean is no root-mean-square norm with one gain"
    assert reasons["model.layers.1"] == "its norms are of several kinds"
    model = low_bit("Qwen3")
    model.model.layers[0].self_attn.q_norm.weight = nn.Parameter(torch.ones(256))
    assert "have 256 columns, heads have 64" in lowbit.fuse_(model)[-1 - 1].reason


def test_rotations_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    model = low_bit()
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * cos, k * sin))
    assert lowbit.fuse_(model)[-1].reason == "its heads are rotated in another way than by halves or pairs of columns"


def test_forms_are_those_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs/howto/fastest-decode.md").read_text()
    assert [kind for kind in KINDS if f"`{kind}`" not in page] == []


def test_devices_that_differ() -> None:
    model = low_bit()
    model.model.layers[0].mlp.to("meta")
    reasons = {row.module: row.reason for row in lowbit.fuse_(model)}
    assert reasons["model.layers.0"] == "its tensors are on cpu, meta"


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe", "Gemma3", "GptOss", "Phi3"])
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
    assert isinstance(attention.q_k_v_proj, nn.Sequential) and generated(model).sequences.shape == (3, 16)


@pytest.mark.parametrize("kind", ["Llama", "Gemma3", "Phi3"])
def test_copies_pickles_and_states(kind: str) -> None:
    model = fused(low_bit(kind))
    expected = generated(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.model.layers[0]) is type(model.model.layers[0])
        assert distance(expected, generated(other)) == 0
    empty = fused(low_bit(kind))
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


@pytest.mark.parametrize("kind", ["Llama", "Gemma3", "GptOss", "Phi3"])
def test_saved_and_loaded(kind: str, tmp_path: Path, chained: list[int]) -> None:
    pytest.importorskip("accelerate")
    load = transformers.AutoModelForCausalLM.from_pretrained
    low_bit(kind).save_pretrained(tmp_path / "plain")  # whose rotations were rounded to bf16; those of loaded ones not
    model = load(tmp_path / "plain")
    assert not any(isinstance(module, ChainedLayer) for module in model.modules())
    lowbit.fuse_(model)
    expected = generated(model)
    model.save_pretrained(tmp_path / "fused")
    again = load(tmp_path / "fused")
    chained.clear()
    assert distance(expected, generated(again)) == 0 and len(chained) == 10
    is_gated = type(model.model.layers[0].mlp._modules.get("gate_up_proj"))
    assert type(again.model.layers[0].mlp._modules.get("gate_up_proj")) is is_gated
    assert is_gated is GatedLinear or kind == "GptOss"
