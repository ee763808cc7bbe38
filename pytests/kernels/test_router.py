"""The kernel of a router, emulated, against numbers in f64; and its sizes on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.router import RouterPlan, router_program
from lowbit.passes.pipeline import lower_program
from lowbit.passes.targets import parse_target
from lowbit.pylib.layer.router import Router, Rule, by_torch, route_tokens

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TARGETS = pytest.mark.parametrize("target", ["emulator:sm_90a", "emulator:sm_80", "cpu"])
ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def tensors(m: int, hidden: int, experts: int, x: torch.dtype, weight: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + hidden + experts)
    numbers = torch.randn((m + experts, hidden), generator=generator)
    return numbers[:m].to(x), (numbers[m:] * hidden**-0.5).to(weight)


def exact(
    x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, top_k: int, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logits, weights and ids in f64."""
    logits = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scores = logits.softmax(-1) if rule.softmax else logits.sigmoid()
    choice = scores if correction is None else scores + correction.double()
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, ids)
    return logits, (chosen / chosen.sum(-1, keepdim=True) if rule.renormalized else chosen) * rule.scale, ids


def assert_routes(
    m: int,
    hidden: int,
    experts: int,
    top_k: int,
    rule: Rule,
    target: str,
    x: torch.dtype = BF16,
    weight: torch.dtype = BF16,
    biased: bool = False,
    corrected: bool = False,
    device: str = "cpu",
) -> None:
    tokens, rows = tensors(m, hidden, experts, x, weight)
    bias = tensors(1, experts, 1, weight, F32)[0][0] if biased else None
    correction = tensors(1, experts, 2, F32, F32)[0][0] * 0.1 if corrected else None
    given = [None if each is None else each.to(device) for each in (tokens, rows, bias, correction)]
    routed = Router(*given[1:], top_k, rule, weight, F32)  # type: ignore[arg-type]
    logits, scores, ids = route_tokens(given[0], routed, target)  # type: ignore[arg-type]
    expected = exact(tokens, rows, bias, correction, top_k, rule)
    eps = torch.finfo(weight).eps
    torch.testing.assert_close(logits.cpu().double(), expected[0], rtol=eps, atol=1e-5)
    assert logits.dtype is weight and scores.dtype is F32 and ids.dtype is torch.int64
    assert torch.equal(ids.cpu(), expected[2])
    torch.testing.assert_close(scores.cpu().double(), expected[1], rtol=1e-4, atol=1e-6)


SOFTMAX, WHOLE = Rule(), Rule(renormalized=False)
SIGMOID = Rule(softmax=False, renormalized=True, scale=2.5)


@TARGETS
@pytest.mark.parametrize("m", [1, 4, 6])
def test_softmax_over_all_and_over_those_chosen(m: int, target: str) -> None:
    for rule in (SOFTMAX, WHOLE):
        assert_routes(m, 264, 60, 4, rule, target)


@TARGETS
@pytest.mark.parametrize(
    ("experts", "top_k"), [(2, 1), (3, 3), (8, 2), (128, 8), (300, 6)], ids=lambda value: str(value)
)
def test_numbers_of_experts(experts: int, top_k: int, target: str) -> None:
    assert_routes(2, 64, experts, top_k, SOFTMAX, target, F16, F16)


def test_as_many_tokens_as_a_launch_takes() -> None:
    """The logits of all are in the workspace."""
    assert_routes(64, 8, 24, 2, SOFTMAX, "emulator:sm_90a", F32, F32)


@TARGETS
def test_a_bias(target: str) -> None:
    assert_routes(2, 2880, 32, 4, SOFTMAX, target, biased=True)


@TARGETS
def test_sigmoids_and_their_correction(target: str) -> None:
    assert_routes(3, 128, 64, 6, SIGMOID, target, BF16, F32, corrected=True)
    assert_routes(1, 128, 64, 6, Rule(softmax=False, renormalized=False), target, F32, F32)


@TARGETS
def test_equal_numbers_are_in_order(target: str) -> None:
    x, weight = torch.ones(2, 64, dtype=BF16), torch.zeros(16, 64, dtype=BF16)
    weight[[3, 9, 12]] = 1.0
    _, scores, ids = route_tokens(x, Router(weight, None, None, 5, SOFTMAX, BF16, F32), target)
    if target != "cpu":  # torch says nothing of their order
        assert ids.tolist() == [[3, 9, 12, 0, 1]] * 2
    assert torch.equal(scores[:, :3], scores[:, :1].expand(2, 3))


@TARGETS
def test_what_is_no_number_stays_with_its_token(target: str) -> None:
    x, weight = tensors(5, 64, 16, BF16, BF16)
    expected = route_tokens(x, Router(weight, None, None, 4, SOFTMAX, BF16, F32), target)
    x[2, 5] = torch.nan
    found = route_tokens(x, Router(weight, None, None, 4, SOFTMAX, BF16, F32), target)
    others = [0, 1, 3, 4]
    assert all(torch.equal(a[others], b[others]) for a, b in zip(found, expected))
    assert found[1][2].isnan().all() and ((found[2] >= 0) & (found[2] < 16)).all()


@TARGETS
def test_infinite_logits(target: str) -> None:
    x, weight = torch.ones(1, 64, dtype=BF16), torch.zeros(8, 64, dtype=BF16)
    weight[:5, 0] = -torch.inf
    _, scores, ids = route_tokens(x, Router(weight, None, None, 4, SOFTMAX, BF16, F32), target)
    assert sorted(ids[0, :3].tolist()) == [5, 6, 7] and ids[0, 3] < 5
    torch.testing.assert_close(scores, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]]))


def test_what_no_kernel_has_is_computed_by_torch() -> None:
    x, weight = tensors(65, 64, 8, BF16, BF16)
    for tokens, columns in ((65, 64), (0, 64), (2, 60)):
        router = Router(weight[:, :columns].contiguous(), None, None, 2, SOFTMAX, BF16, F32)
        found = route_tokens(x[:tokens, :columns], router, "emulator:sm_90a")
        expected = by_torch(x[:tokens, :columns], router)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize(
    ("hidden", "experts", "top_k", "tokens"), [(2048, 128, 8, 4), (7168, 384, 8, 4), (4096, 8, 2, 1)]
)
def test_nothing_is_spilled(hidden: int, experts: int, top_k: int, tokens: int, target: str) -> None:
    plan = RouterPlan(hidden, experts, top_k, "bf16", "bf16", "bf16", "f32", tokens=tokens)
    compiled = lower_program(router_program(plan), parse_target(target))
    usage = resource_usage(compiled.ptx, parse_target(target))
    assert usage.spill_stores == 0


@pytest.mark.gpu
@ON_A_GPU
def test_on_a_gpu() -> None:
    from lowbit.pylib.runtime.devices import target_at

    for m in (1, 3, 8, 64):
        for sizes in ((2048, 128, 8), (4096, 8, 2), (2880, 128, 4), (7168, 384, 8)):
            assert_routes(m, *sizes, SOFTMAX, target_at(0), x=F32, weight=F32, device="cuda")
            assert_routes(m, *sizes, SIGMOID, target_at(0), x=F32, weight=F32, corrected=True, device="cuda")
