"""Weights whose columns are stored in another order than x's (GPTQ's act-order)."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowbit
from lowbit.dialect.errors import PackError
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib import reference
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.tune.timing import random_weight
from lowbit.pylib.weights.packed import PackedWeight, pack

SPEC = MatmulSpec(n=40, k=96, weight="u4", group_size=32, zeros="int", bias=True, permuted=True)
TARGETS = ["cpu", "emulator:sm_80", "emulator:sm_90a"]


def problem(spec: MatmulSpec, m: int, seed: int = 0) -> tuple[Tensor, dict[str, Tensor], PackedWeight]:
    x, tensors = reference.random_inputs(spec, m, seed)
    return x, tensors, pack(spec, **tensors)


def test_gptq_with_act_order() -> None:
    """As its files have it: w[:, i] = s[g_idx[i]] (q[:, i] - z[g_idx[i]]), g_idx in no order."""
    generator = torch.Generator().manual_seed(0)
    g_idx = torch.arange(96).remainder(3)[torch.randperm(96, generator=generator)]
    q = torch.randint(0, 16, (40, 96), generator=generator)
    s, z = torch.rand(40, 3, generator=generator).half(), torch.randint(1, 17, (40, 3), generator=generator)
    expected = s.float()[:, g_idx] * (q - z[:, g_idx])

    permutation = g_idx.argsort(stable=True)
    w = pack(replace(SPEC, bias=False), q[:, permutation], s, z, permutation=permutation)
    assert torch.equal(w.dequantize(), expected)
    assert torch.equal(w.unpack(), q[:, permutation].to(torch.uint8))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("m", [0, 1, 9, 300])
def test_targets(target: str, m: int) -> None:
    if m == 300 and target == "emulator:sm_90a":
        m = 100  # the emulator takes its time
    x, tensors, w = problem(SPEC, m)
    mm = lowbit.compile(SPEC, target)
    bound = reference.tolerance(SPEC, x, **tensors, dequantized=m > 8)  # type: ignore[arg-type]
    expected = reference.matmul(SPEC, x, **tensors)
    assert reference.agrees(mm(x, w), expected, bound).all()
    if m:
        in_order = {**tensors, "permutation": torch.arange(96)}
        assert not reference.agrees(mm(x, w), reference.matmul(SPEC, x, **in_order), bound).all()


@pytest.mark.parametrize("target", TARGETS)
def test_dequantize_is_in_the_order_of_x(target: str) -> None:
    _, tensors, w = problem(SPEC, 1)
    plain = replace(SPEC, permuted=False)
    in_order = pack(plain, **{name: t for name, t in tensors.items() if name != "permutation"})
    stored = lowbit.compile(plain, target).dequantize(in_order)
    assert torch.equal(lowbit.compile(SPEC, target).dequantize(w)[:, tensors["permutation"]], stored)
    assert torch.equal(w.dequantize()[:, tensors["permutation"]], in_order.dequantize())


def test_kernels_are_those_of_a_weight_in_order() -> None:
    ptx = [lowbit.compile(spec, "emulator:sm_80").ptx for spec in (SPEC, replace(SPEC, permuted=False))]
    assert ptx[0] == ptx[1] and "permutation" not in ptx[0]


def test_gradient_compiled_and_exported() -> None:
    spec = replace(SPEC, out="f32")
    x, _, w = problem(spec, 5)
    mm = lowbit.compile(spec, "cpu")
    y = mm(x, w)
    dx, compiled_dx = (
        torch.autograd.grad(f(leaf := x.clone().requires_grad_()).square().sum(), leaf)[0]
        for f in (lambda x: mm(x, w), torch.compile(lambda x: mm(x, w), fullgraph=True, backend="aot_eager"))
    )
    expected = 2 * (y - w.bias) @ w.dequantize() + 2 * w.bias @ w.dequantize()  # type: ignore[operator]
    assert torch.equal(dx, compiled_dx) and torch.allclose(dx.float(), expected, rtol=2**-8, atol=2**-5)
    layer = LowbitLinear.from_packed(w)
    program = torch.export.export(layer, (x,)).module()
    assert torch.equal(program(x), y) and torch.equal(layer(x[0]), mm(x[0], w))


def test_layer() -> None:
    """The permutation is a buffer, which conversions leave alone; an empty layer loads it."""
    x, _, w = problem(SPEC, 3)
    layer = LowbitLinear.from_packed(w)
    empty = LowbitLinear.empty(SPEC, "meta")
    empty.load_state_dict(layer.state_dict(), assign=True)
    for other in (copy.deepcopy(layer), layer.half(), empty):
        assert other.permutation.dtype == torch.int32 and torch.equal(other(x), layer(x))


@pytest.mark.parametrize("same", [True, False])
def test_fused_layers_share_their_order(same: bool) -> None:
    from lowbit.pylib.nn.fuse import _same_order, concatenated

    spec = replace(SPEC, n=32)
    x, tensors, w = problem(spec, 3)
    others = tensors if same else {**tensors, "permutation": tensors["permutation"].flip(0)}
    parts = [LowbitLinear.from_packed(w), LowbitLinear.from_packed(pack(spec, **others))]
    assert _same_order(*parts) == same
    if same:
        assert torch.equal(concatenated(parts)(x), torch.cat([part(x) for part in parts], 1))


@settings(max_examples=20)
@given(
    st.sampled_from([(None, 40), (16, 5), (48, 3)]), st.sampled_from(["none", "float", "offset"]), st.integers(0, 99)
)
def test_cpu(groups: tuple[int | None, int], zeros: Any, seed: int) -> None:
    group, count = groups
    spec = MatmulSpec(24, (group or 1) * count, "u3", group, zeros=zeros, permuted=True, row_scales=seed % 2 > 0)
    x, tensors, w = problem(spec, 7, seed)
    y = lowbit.compile(spec, "cpu")(x, w)
    bound = reference.tolerance(spec, x, **tensors)  # type: ignore[arg-type]
    assert reference.agrees(y, reference.matmul(spec, x, **tensors), bound).all()


def test_saved_and_cut() -> None:
    x, tensors, w = problem(replace(SPEC, n=32), 2)
    loaded = PackedWeight.from_state_dict(w.state_dict())
    assert torch.equal(loaded.permutation, tensors["permutation"].int())  # type: ignore[arg-type]
    rows = [w.shard(0, i, 2) for i in range(2)]
    ys = [lowbit.compile(part.spec, "cpu")(x, part) for part in rows]
    assert torch.equal(torch.cat(ys, 1), lowbit.compile(w.spec, "cpu")(x, w))
    with pytest.raises(PackError, match=r"columns of a permuted weight can't be cut.*; cut rows, dim=0"):
        w.shard(1, 0, 3)
    assert sorted(random_weight(SPEC, "cpu")["permutation"].tolist()) == list(range(96))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.float(), r"permutation must be integers, not torch.float32; use .int\(\)"),
        (lambda p: p[:-1], r"permutation must be \[k\] of each expert = \[96\], not \[95\]"),
        (lambda p: p.where(p != 5, 96), r"permutation\[\d+\] = 96 must be in 0..95"),
        (lambda p: p.where(p != 5, 6), r"permutation\[\d+\] = 6 is there twice; every column must be there once"),
        (lambda p: None, "needs permutation; pass permutation="),
    ],
)
def test_what_is_no_permutation(change: Any, message: str) -> None:
    _, tensors, w = problem(SPEC, 1)
    wrong = change(tensors["permutation"])
    with pytest.raises(PackError, match=message):
        pack(SPEC, **{**tensors, "permutation": wrong})
    if wrong is not None and len(wrong) == 96 and not wrong.is_floating_point():
        with pytest.raises(PackError, match=message):
            PackedWeight.from_state_dict({**w.state_dict(), "permutation": wrong.int()})


def test_a_weight_in_order_has_none() -> None:
    _, tensors, _ = problem(SPEC, 1)
    with pytest.raises(PackError, match="has no permutation; drop permutation or set permuted= in the spec"):
        pack(replace(SPEC, permuted=False), **tensors)


# -- of several experts

EXPERTS = replace(SPEC, n=3 * 32, experts=3)


def each_alone(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors of each expert."""
    return [{name: t.chunk(3)[expert] for name, t in tensors.items()} for expert in range(3)]


def test_every_expert_has_its_own_order() -> None:
    _, tensors, w = problem(EXPERTS, 1)
    one = replace(EXPERTS, n=32, experts=1)
    alone = [pack(one, **of_one).dequantize() for of_one in each_alone(tensors)]
    assert torch.equal(w.dequantize(), torch.cat(alone)) and w["permutation"].shape == (3 * 96,)
    assert torch.equal(w.unpack_tensor("permutation"), tensors["permutation"])
    again = PackedWeight.from_state_dict(w.state_dict())
    assert again.spec == EXPERTS and torch.equal(again.dequantize(), w.dequantize())
    assert torch.equal(torch.from_numpy(reference.dequantize(EXPERTS, **tensors)).float(), w.dequantize())  # type: ignore[arg-type]


@pytest.mark.parametrize("epilogue", [None, "silu_mul"])
def test_the_definition_of_experts_is_that_of_each(epilogue: Any) -> None:
    spec = replace(EXPERTS, epilogue=epilogue)
    x, tensors, _ = problem(spec, 5)
    one = replace(spec, n=32, experts=1)
    for function in (reference.matmul, reference.tolerance):
        found = function(spec, x, **tensors)  # type: ignore[arg-type]
        alone = [function(one, x, **of_one) for of_one in each_alone(tensors)]  # type: ignore[arg-type]
        assert (found == np.concatenate(alone, axis=1)).all() and found.shape == (5, 3 * spec.outputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[:96], r"permutation must be \[k\] of each expert = \[288\], not \[96\]"),
        (lambda p: p.roll(1), r"permutation\[0\] = \d+ is there twice; every column must be there once"),
        (lambda p: torch.arange(288), r"permutation\[96\] = 96 must be in 0..95"),
    ],
    ids=["of one", "of others", "of all"],
)
def test_orders_that_are_none(change: Any, message: str) -> None:
    _, tensors, _ = problem(EXPERTS, 1)
    with pytest.raises(PackError, match=message):
        pack(EXPERTS, **{**tensors, "permutation": change(tensors["permutation"])})


def test_a_weight_of_experts_is_cut_by_expert() -> None:
    """Its halves would be of other experts."""
    _, _, w = problem(EXPERTS, 1)
    with pytest.raises(PackError, match="a weight of experts=3 can't be cut; cut that of each"):
        w.shard(0, 0, 2)
