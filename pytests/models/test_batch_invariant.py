"""`lowbit.batch_invariant`: layers give a token the same bits, however many tokens come at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit.dialect.errors import SpecError
from lowbit.pylib.layer import by_kernel
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


def test_experts_are_called_one_by_one() -> None:
    model = low_bit("Qwen3Moe").model.layers[0].mlp
    x = torch.randn(1, 9, 128).bfloat16()
    with torch.no_grad(), lowbit.batch_invariant():
        together = model.experts(x[0], *routing(9))
        ids, weights = routing(9)
        alone = torch.cat([model.experts(x[0, i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(9)])
    assert torch.equal(together, alone)


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
