"""Routers of transformers compute few tokens in one launch, and go the old way wherever that is not the same."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit.pylib.layer.router import Rule
from lowbit.pylib.nn import router
from lowbit.pylib.nn.router import FusedRouter, route_apart_, route_together_
from pytests.models.test_chain import low_bit, static_cache, steps

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 64, "num_experts_per_tok": 3}
NAMES = ("num_experts", "num_local_experts", "n_routed_experts")
BF16 = torch.bfloat16

FOUND = {
    "mixtral.MixtralTopKRouter": Rule(),
    "qwen3_moe.Qwen3MoeTopKRouter": Rule(renormalized=False),
    "qwen2_moe.Qwen2MoeTopKRouter": Rule(renormalized=False),
    "gpt_oss.GptOssTopKRouter": Rule(),
    "olmoe.OlmoeTopKRouter": Rule(renormalized=False),
    "glm4_moe.Glm4MoeTopkRouter": Rule(softmax=False, scale=1.5),
    "deepseek_v3.DeepseekV3TopkRouter": Rule(softmax=False, scale=1.5),
}
"""Routers, by module and class, and the rule of each with the settings below."""


def made(name: str, experts: int = 16, **others: Any) -> Any:
    """Returns a router of transformers with random numbers."""
    module, _, kind = name.partition(".")
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    settings = next(
        value
        for key, value in vars(modeling).items()
        if isinstance(value, type) and issubclass(value, transformers.PretrainedConfig) and key.endswith("Config")
        if value is not transformers.PretrainedConfig
    )()
    more = {"routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1}
    for key, value in {**SIZES, **dict.fromkeys(NAMES, experts), **more, **others}.items():
        if hasattr(settings, key):
            setattr(settings, key, value)
    found = getattr(modeling, kind)(settings).eval()
    torch.manual_seed(0)
    for tensor in (*found.parameters(), *found.buffers()):
        nn.init.normal_(tensor, std=0.3)
    return found


def tokens(count: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn((count, 64), generator=torch.Generator().manual_seed(count)).to(dtype)


def assert_same(found: Any, expected: Any) -> None:
    """Asserts that logits, weights and experts are the same but for rounding and order."""
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    torch.testing.assert_close(found[0].float(), expected[0].float(), rtol=2**-6, atol=1e-3)
    assert torch.equal(found[2].sort(-1)[0], expected[2].sort(-1)[0])
    pairs = [scores.float().gather(1, ids.argsort(-1)) for _, scores, ids in (found, expected)]
    torch.testing.assert_close(*pairs, rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("name", FOUND)
def test_rule_is_found_by_trying(name: str) -> None:
    module = made(name)
    routing = router._routing_of(module)
    assert routing and routing.rule == FOUND[name] and routing.top_k == 3


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["f32", "bf16"])
@torch.no_grad()
def test_computes_as_before(name: str, dtype: torch.dtype) -> None:
    module = made(name).to(dtype)
    if "Deepseek" in name or "Glm" in name:
        module.float()  # as models have it
    x = tokens(9, dtype)
    before = module(x)
    assert route_together_(module) and isinstance(module, FusedRouter) and not route_together_(module)
    assert_same(module(x), before)
    route_apart_(module)
    assert all(torch.equal(a, b) for a, b in zip(module(x), before))


def test_settings_count() -> None:
    """Layers with other settings are tried by themselves."""
    rules = [router._routing_of(made("qwen3_moe.Qwen3MoeTopKRouter", norm_topk_prob=norm)) for norm in (True, False)]
    assert [routing and routing.rule for routing in rules] == [Rule(), Rule(renormalized=False)]
    scaled = router._routing_of(made("glm4_moe.Glm4MoeTopkRouter", routed_scaling_factor=2.5))
    assert scaled and scaled.rule.scale == 2.5


def test_is_tried_while_a_model_is_built_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_KNOWN", {})
    with torch.device("meta"):
        module = made("mixtral.MixtralTopKRouter").to(BF16)
        assert module.weight.is_meta and route_together_(module)


@pytest.mark.parametrize(("experts", "groups", "kept", "top_k"), [(160, 8, 4, 2), (16, 4, 3, 2), (64, 8, 7, 4)])
def test_routers_with_groups_of_experts_stay(experts: int, groups: int, kept: int, top_k: int) -> None:
    name, sizes = "deepseek_v3.DeepseekV3TopkRouter", {"n_group": groups, "topk_group": kept}
    assert not route_together_(made(name, experts, num_experts_per_tok=top_k, **sizes))


def test_settings_that_change_and_types_go_the_old_way() -> None:
    module = made("qwen3_moe.Qwen3MoeTopKRouter", norm_topk_prob=True).to(BF16)
    route_together_(module)
    module.norm_topk_prob = False
    with torch.no_grad():
        found, expected = module(tokens(3)), type(module).__mro__[1].forward(module, tokens(3))
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        assert module.half()(tokens(3, torch.float16))[0].dtype is torch.float16
        assert module.double()(tokens(3, torch.float64))[0].dtype is torch.float64


def test_several_sequences_keep_their_shape() -> None:
    module = made("gpt_oss.GptOssTopKRouter").to(BF16)
    with torch.no_grad():
        before = module(tokens(6).unflatten(0, (2, 3)).flatten(0, 1))
        assert route_together_(module)
        assert module(tokens(6))[0].shape == before[0].shape


def test_a_bias_of_another_type_is_added_as_it_is() -> None:
    module = made("gpt_oss.GptOssTopKRouter").to(BF16)
    module.bias.data = module.bias.data.float()
    given = tokens(3), module.weight, module.bias, None, 3, True, True, 1.0, BF16, BF16
    with torch.no_grad():
        found, expected = (torch.ops.lowbit.router(*given, target) for target in ("emulator:sm_90a", "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_what_a_configuration_says_is_tried_in_each_layer() -> None:
    class Configured(type(made("mixtral.MixtralTopKRouter"))):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Any:
            logits = nn.functional.linear(hidden_states, self.weight)
            scores, ids = logits.float().softmax(-1).topk(self.top_k)
            return logits, scores / scores.sum(-1, keepdim=True) if self.config["norm"] else scores, ids

    rules: list[Any] = []
    for norm in (True, False):
        module = made("mixtral.MixtralTopKRouter")
        module.__class__, module.config = Configured, {"norm": norm}
        rules.append(router._routing_of(module))
    assert [each.rule.renormalized for each in rules] == [True, False]


def test_a_router_of_no_known_rule_stays() -> None:
    grouped = made("deepseek_v3.DeepseekV3TopkRouter", n_group=4, topk_group=2)
    assert not route_together_(grouped)

    class Capped(type(made("mixtral.MixtralTopKRouter"))):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Any:
            logits = nn.functional.linear(hidden_states, self.weight).clamp(-2, 2)
            scores, ids = logits.float().softmax(-1).topk(self.top_k)
            return logits, scores / scores.sum(-1, keepdim=True), ids

    capped = made("mixtral.MixtralTopKRouter")
    capped.__class__ = Capped
    assert not route_together_(capped)
    assert not route_together_(nn.Linear(8, 4)) and not route_together_(nn.Embedding(8, 4))


@pytest.mark.parametrize(
    "change",
    [
        lambda module, x: (module.train(), x),
        lambda module, x: (module, x.repeat(20, 1)),
        lambda module, x: (module, x[:0]),
        lambda module, x: (setattr(module, "top_k", 2) or module, x),
    ],
    ids=["training", "many", "none", "top_k"],
)
@torch.no_grad()
def test_goes_the_old_way(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = made("mixtral.MixtralTopKRouter").to(BF16)
    route_together_(module)
    module, x = change(module, tokens(5))
    expected = type(module).__mro__[1].forward(module, x)
    found = module(x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_has_gradients() -> None:
    module = made("mixtral.MixtralTopKRouter")
    route_together_(module)
    x = tokens(3, torch.float32).requires_grad_()
    module(x)[1].square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


@torch.no_grad()
def test_in_a_model() -> None:
    model = low_bit("Qwen3Moe", num_experts=16, num_experts_per_tok=3)
    before = steps(model, (6, 7, 8), static_cache(model))
    rows = [str(row) for row in lowbit.fuse_(model)]
    assert "model.layers.1.mlp: Qwen3MoeTopKRouter = gate" in rows and lowbit.fuse_(model) == ()
    after = steps(model, (6, 7, 8), static_cache(model))
    assert 0 < float((after - before).norm() / before.norm()) < 0.02
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(steps(model, (6, 7, 8), static_cache(model), lambda *a, **k: compiled(*a, **k)), after)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other.model.layers[0].mlp.gate, FusedRouter)
        assert torch.equal(steps(other, (6, 7, 8), static_cache(other)), after)
    assert "model.layers.0.mlp.gate" in lowbit.unfuse_(model)
    assert torch.equal(steps(model, (6, 7, 8), static_cache(model)), before)


def test_operator_passes_torchs_checks() -> None:
    x, weight = tokens(3, torch.float32), torch.randn(8, 64)
    how = (None, None, 2, True, True, 1.0, torch.float32, torch.float32, "")
    torch.library.opcheck(torch.ops.lowbit.router.default, (x, weight, *how))
