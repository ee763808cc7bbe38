"""`lowbit.batch_invariant`: layers give a token the same bits, however many tokens come at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit.dialect.errors import SpecError
from lowbit.pylib.layer import by_kernel
from lowbit.pylib.layer.router import Router, Rule, route_tokens
from lowbit.pylib.nn import experts as experts_module
from lowbit.pylib.nn import stacked_experts
from lowbit.pylib.runtime.batch_invariant import MODE, called

transformers = pytest.importorskip("transformers")
from pytests.models.test_chain import IDS, fused, given, low_bit, static_cache  # noqa: E402


@torch.no_grad()
def hidden(model: Any, ends: tuple[int, ...]) -> Tensor:
    """Returns the last hidden states of tokens that are given piece by piece, behind the first five."""
    cache = static_cache(model)
    model.model(IDS[:, :5], **given(model.model, cache))
    pieces = zip((5, *ends), ends)
    found = [model.model(IDS[:, start:end], **given(model.model, cache)).last_hidden_state for start, end in pieces]
    return torch.cat(found, 1)


def layer() -> lowbit.LowbitLinear:
    torch.manual_seed(0)
    linear = torch.nn.Linear(1024, 256).bfloat16()
    return lowbit.LowbitLinear.from_linear(linear, lowbit.QuantConfig("u4", 128, method="rtn"))


def test_a_layer_gives_a_token_the_same_bits_within() -> None:
    linear, x = layer(), torch.randn(40, 1024).bfloat16()
    usual = linear(x)
    with lowbit.batch_invariant():
        together, alone = linear(x), torch.cat([linear(x[i : i + 1]) for i in range(40)])
        with lowbit.batch_invariant(False):
            assert torch.equal(linear(x), usual)
    assert torch.equal(together, alone) and not torch.equal(together, usual)
    assert torch.equal(linear(x), usual) and not MODE.on


def test_torch_compile_notices() -> None:
    linear, x = layer(), torch.randn(40, 1024).bfloat16()
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    usual = compiled(x)
    with lowbit.batch_invariant():
        assert torch.equal(compiled(x), linear(x)) and not torch.equal(compiled(x), usual)
    assert torch.equal(compiled(x), usual)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Qwen3Moe"])
def test_a_chain_decodes_the_same_bits_token_by_token_and_at_once(kind: str) -> None:
    model = fused(low_bit(kind))
    with lowbit.batch_invariant():
        one_by_one = hidden(model, (6, 7, 8, 9))
        for ends in ((7, 9), (9,), (8, 9)):
            assert torch.equal(hidden(model, ends), one_by_one), ends


def test_attention_shares_out_places_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel for one token serves all numbers of them."""
    monkeypatch.setattr(by_kernel, "_attention_of_parts", lambda *fields: fields[4])

    def parts(rows: int) -> Any:
        return by_kernel._attention_kernel(32, 8, 128, "bf16", rows, False, "sm_90a")

    assert parts(1) > parts(16)
    with lowbit.batch_invariant():
        assert {parts(rows) for rows in (1, 2, 8, 16, 64)} == {parts(1)}


@pytest.mark.parametrize(
    ("target", "compute"),
    [("cpu", None), ("emulator:sm_80", None), ("emulator:sm_90a", None), ("cpu", "i8"), ("emulator:sm_90a", "i8")],
)
def test_experts_give_a_token_the_same_bits(target: str, compute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch for all experts, of token tiles of any size, beside a token that is no number. Of all tokens there
    are tiles of 64 slots, two for the first expert."""
    for module in (stacked_experts, experts_module):
        monkeypatch.setattr(module, "target_of", lambda _: target)
    experts, x = low_bit("Qwen3Moe").model.layers[0].mlp.experts, torch.randn(66, 128).bfloat16()
    lowbit.set_compute_(experts, compute)
    ids, weights = routing(66)
    ids[:, 0], ids[:, 1] = 0, 1 + ids[:, 1] % 3
    x[37] = torch.nan
    with torch.no_grad():
        usual = experts(x, ids, weights)
        with lowbit.batch_invariant():
            together = experts(x, ids, weights)
            assert experts._stacked[True].formats and experts._stacked[False].formats
            for first, last in ((0, 1), (36, 38), (20, 33)):
                some = experts(x[first:last], ids[first:last], weights[first:last])
                torch.testing.assert_close(some, together[first:last], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(experts(x, ids, weights), usual, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("target", ["cpu", "emulator:sm_90a"])
def test_routers_give_a_token_the_same_bits(target: str) -> None:
    """Also where there are more tokens than a launch takes, and than the chosen kernel of one has."""
    x, weight = torch.randn(150, 264).bfloat16(), torch.randn(60, 264).bfloat16()
    router = Router(weight, None, None, 4, Rule(), torch.bfloat16, torch.float32)
    with lowbit.batch_invariant():
        together = route_tokens(x, router, target)
        for first, last in ((0, 1), (5, 7), (30, 43), (100, 150)):
            some = route_tokens(x[first:last], router, target)
            assert all(torch.equal(a, b[first:last]) for a, b in zip(some, together))


def routing(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(tokens, 4, generator=generator)
    weights, ids = scores.topk(2)
    return ids, weights


def test_what_can_not_be_invariant_says_so() -> None:
    mixed = lowbit.MatmulSpec(64, 256, "u4", 64, compute="i8", compute_from=17)
    assert called(mixed) == mixed
    with lowbit.batch_invariant(), pytest.raises(SpecError, match="compute_from=17 multiplies few rows in another "):
        called(mixed)


def test_a_configuration_makes_layers_invariant() -> None:
    config = lowbit.LowbitConfig("u4", 128, invariant=True)
    assert lowbit.LowbitConfig.from_dict(config.to_dict()).config.invariant
    linear = lowbit.LowbitLinear.from_linear(torch.nn.Linear(256, 64).half(), config.config)
    assert linear.spec.invariant


def test_attention_has_room_for_the_parts_of_all_tokens() -> None:
    """As many parts as one token has, for up to 64 tokens."""
    q, cache = torch.randn(1, 9, 2 * 64).bfloat16(), torch.randn(2, 1, 2, 80, 64).bfloat16()
    held, target = torch.tensor(60), "emulator:sm_90a"
    with lowbit.batch_invariant():
        together = by_kernel.attention(q, *cache, held, None, 0.125, target)
        for t in (0, 8):
            alone = by_kernel.attention(q[:, t : t + 1], *cache, held + t, None, 0.125, target)
            assert torch.equal(together[:, t : t + 1], alone)


def test_blocks_of_several_threads_end_in_any_order() -> None:
    first, second = lowbit.batch_invariant(), lowbit.batch_invariant()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert MODE.on
    second.__exit__(None, None, None)
    assert not MODE.on
