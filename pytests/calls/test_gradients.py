"""Gradients to x: dx = dy W, as a dense layer with the dequantized weight gives them; the weight has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit.pylib.reference import random_problem

TARGETS = ["cpu", "emulator:sm_90a"]
SPECS = [
    lowbit.MatmulSpec(n=48, k=128, weight="u4", group_size=64, zeros="int", bias=True),
    lowbit.MatmulSpec(n=40, k=128, weight="nf4", group_size=32, act="bf16"),
    lowbit.MatmulSpec(n=32, k=64, weight="f6e3m2", scale="f32", out="f32"),
]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    torch._dynamo.reset()
    return request.param


def _make(spec: lowbit.MatmulSpec, target: str, m: int = 5) -> tuple[Tensor, lowbit.Matmul, lowbit.PackedWeight]:
    x, *weight = random_problem(spec, m)
    mm = lowbit.compile(spec, target)
    return x, mm, mm.pack(*weight)


def _gradient(layer: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    layer(x).backward(dy)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gradient_of_x(spec: lowbit.MatmulSpec, target: str) -> None:
    """Eagerly, under torch.compile, for a batch of any shape, and for a Parameter: the gradient of a dense layer."""
    x, mm, w = _make(spec, target)
    weight = mm.dequantize(w).float()
    dy = torch.randn_like(mm(x, w))
    expected = dy.float() @ weight
    close = {"rtol": 2**-7 if spec.act == "bf16" else 2**-10, "atol": 1e-3 * float(expected.abs().max())}
    compiled = torch.compile(lambda x: mm(x, w), fullgraph=True, backend="aot_eager")
    for layer in (lambda x: mm(x, w), compiled):
        dx = _gradient(layer, x, dy)
        assert dx.dtype is x.dtype
        torch.testing.assert_close(dx.float(), expected, **close)
        assert torch.equal(_gradient(layer, x[None], dy[None])[0], dx)
    parameter = torch.nn.Parameter(x)
    assert torch.equal(mm(parameter, w).detach(), mm(x, w))
    (dx,) = torch.autograd.grad(mm(parameter, w), parameter, dy)
    torch.testing.assert_close(dx.float(), expected, **close)


def test_a_result_can_be_added_to_in_place(target: str) -> None:
    """As adapters of PEFT do."""
    x, mm, w = _make(SPECS[0], target)
    x = x[None].requires_grad_()
    y = mm(x, w)
    y += 1
    y.sum().backward()
    assert torch.equal(y, mm(x, w) + 1)
    torch.testing.assert_close(x.grad, mm.dequantize(w).sum(0).expand_as(x), rtol=1e-2, atol=1e-2)


def test_second_gradient() -> None:
    """The gradient to dy of a function of dx: a matmul is linear, so it is that of a dense layer."""
    x, mm, w = _make(SPECS[0], "cpu")
    x.requires_grad_()
    dy = torch.ones(5, SPECS[0].n, dtype=x.dtype, requires_grad=True)
    (dx,) = torch.autograd.grad(mm(x, w), x, dy, create_graph=True)
    (given,) = torch.autograd.grad(dx, dy, torch.ones_like(dx))
    torch.testing.assert_close(given, torch.ones_like(dx) @ mm.dequantize(w).T)


def test_gradient_where_there_is_none(target: str) -> None:
    x, mm, w = _make(SPECS[0], target)
    assert not mm(x, w).requires_grad
    with torch.no_grad():
        assert not mm(x.clone().requires_grad_(), w).requires_grad
    scales = w.scales.clone().requires_grad_()
    frozen = lowbit.PackedWeight(w.spec, {**w, "scales": scales})
    assert not mm(x, frozen).requires_grad
    assert not torch.ops.lowbit.matmul.packed(x, list(frozen.tensors), mm.description).requires_grad
    mm(x.clone().requires_grad_(), frozen).sum().backward()
    assert scales.grad is None


class LowRank(torch.nn.Module):
    """A LoRA around a frozen linear layer: x W^T + (x A) B, behind a trained layer, which dx reaches through both."""

    def __init__(self, frozen: Callable[[Tensor], Tensor], n: int, k: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = frozen
        self.before = torch.nn.Parameter(torch.eye(k))
        self.a = torch.nn.Parameter(torch.randn(k, 4) / 16)
        self.b = torch.nn.Parameter(torch.zeros(4, n))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.before
        return self.frozen(x.half()).float() + x @ self.a @ self.b


def _train(model: LowRank, x: Tensor, wanted: Tensor) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for _ in range(8):
        loss = (model(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_lora_trains_as_beside_a_dense_layer(compiled: bool) -> None:
    spec = SPECS[0]
    x, mm, w = _make(spec, "cpu", m=32)
    dense, bias = mm.dequantize(w), w.bias
    wanted = torch.randn(32, spec.n, generator=torch.Generator().manual_seed(1))
    low_bit = LowRank(lambda x: mm(x, w), spec.n, spec.k)
    if compiled:
        low_bit = torch.compile(low_bit, fullgraph=True, backend="aot_eager")
    losses = _train(low_bit, x.float(), wanted)
    expected = _train(LowRank(lambda x: torch.nn.functional.linear(x, dense, bias), spec.n, spec.k), x.float(), wanted)
    assert losses[-1] < 0.8 * losses[0]
    assert losses == pytest.approx(expected, rel=5e-3)
