"""Weights whose values are beyond the activation's type: the same row of x gives the same y at every m."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import lowbit
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.targets import parse_target
from lowbit.pylib.build.kernels import Artifacts
from lowbit.pylib.reference import agrees, dequantize, matmul, random_problem, tolerance
from lowbit.pylib.weights.packed import pack

TARGETS = ["cpu", "emulator:sm_80", "emulator:sm_90a"]
FLOAT_ZEROS = lowbit.MatmulSpec(n=16, k=64, weight="u4", group_size=32, zeros="float", scale="f32")
SPECS = [
    (FLOAT_ZEROS, 1e4),
    (FLOAT_ZEROS, 1e-8),
    (lowbit.MatmulSpec(n=16, k=64, weight="i8", group_size=32, scale="f16"), 2e4),
    (lowbit.MatmulSpec(n=16, k=64, weight="f4e2m1", group_size=32, scale="f16"), 6e-8),
    (lowbit.MatmulSpec(n=16, k=64, weight="u4", group_size=32, zeros="int", scale="e8m0"), 2.0**15),
]


def _problem(spec: lowbit.MatmulSpec, scale: float, m: int) -> tuple[Tensor, ...]:
    """A problem with scales around `scale`, and an x for which y is a number of its type, if not a normal one."""
    x, codes, scales, *others = random_problem(spec, m)
    factor = scale / scales.float().mean().item()
    x = (x.float() * min(1.0, 1.0 / factor) * 2.0**4).to(x.dtype) if factor > 1 else x * 8
    if spec.scale == "e8m0":
        factor = 2.0 ** round(math.log2(factor))
    return x, codes, (scales.float() * factor).to(scales.dtype), *others


@pytest.mark.parametrize(("spec", "scale"), SPECS, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_same_row_at_every_m(spec: lowbit.MatmulSpec, scale: float, target: str) -> None:
    spec = replace(spec, out="f32")
    x, *weight = _problem(spec, scale, 400)
    mm = lowbit.compile(spec, target)
    w = mm.pack(*weight)
    assert w.wide_range
    bound = tolerance(spec, x, *weight)
    expected = matmul(spec, x, *weight)
    assert (abs(expected) > 8 * bound).any(axis=1).all()
    for m in (1, 8, 64, 65, 200, 400):
        for y in (mm(x[:m], w), torch.ops.lowbit.matmul.packed(x[:m], list(w.tensors), mm.description)):
            assert agrees(y, expected[:m], bound[:m]).all()
        loaded = lowbit.PackedWeight.from_state_dict(w.state_dict())
        assert torch.equal(mm(x[:m], loaded), y)


@pytest.mark.parametrize("spec", [spec for spec, _ in SPECS if spec.scale != "e8m0"], ids=str)
def test_ordinary_weights(spec: lowbit.MatmulSpec) -> None:
    """They keep their kernels; so does a row of zeros."""
    _, codes, scales, *others = random_problem(spec, 1)
    assert not pack(spec, codes, scales, *others).wide_range
    scales[3] = 0
    assert not pack(spec, codes, scales, *others).wide_range


def test_the_values_decide() -> None:
    """Small scales with large codes are ordinary, with small codes they are not; one large value is enough."""
    spec = lowbit.MatmulSpec(n=20, k=64, weight="i8", group_size=32)
    scales = torch.full((20, 2), 1e-5).half()
    codes = torch.ones(20, 64, dtype=torch.int8)
    codes[:, 5] = -100
    assert not pack(spec, codes, scales).wide_range
    codes[17] = 1
    assert pack(spec, codes, scales).wide_range
    codes[17] = 0
    assert not pack(spec, codes, scales).wide_range
    scales[18, 0] = 3e4
    assert pack(spec, codes, scales).wide_range
    codes[18] = 2
    assert not pack(spec, codes, scales).wide_range


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning", "ignore:.torch.jit.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("target", TARGETS)
def test_weights_made_while_torch_traces(target: str) -> None:
    """Nothing can be looked at then, and the weight passes for one of a wide range until it can."""
    spec = replace(FLOAT_ZEROS, out="f32")
    x, *weight = _problem(spec, 1e4, 200)
    mm = lowbit.compile(spec, target)
    w = mm.pack(*weight)
    bound, expected = tolerance(spec, x, *weight), matmul(spec, x, *weight)
    made: list[lowbit.PackedWeight] = []

    def call(x: Tensor) -> Tensor:
        made.append(lowbit.PackedWeight(spec, {name: t.clone() for name, t in w.items()}))
        return mm(x, made[-1])

    graphs = [torch.jit.trace(call, x, check_trace=False), *(make_fx(call, pre_dispatch=p)(x) for p in (False, True))]
    for graph in graphs:
        assert agrees(graph(x), expected, bound).all()
    for late in made:
        assert late.ordinary_spec is None
        assert agrees(mm(x, late), expected, bound).all()
    _, *ordinary = random_problem(spec, 1)
    tensors = {name: t.clone() for name, t in mm.pack(*ordinary).items()}
    with FakeTensorMode():
        unseen = lowbit.PackedWeight(spec, tensors)
    assert unseen.ordinary_spec is None
    assert not unseen.wide_range and unseen.ordinary_spec == mm.spec


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_that_change_in_place(compiled: bool) -> None:
    """A layer that is loaded with other values, eagerly and by the operator."""
    spec = replace(FLOAT_ZEROS, out="f32")
    x, *wide = _problem(spec, 1e4, 400)
    _, *ordinary = random_problem(spec, 1)
    mm = lowbit.compile(spec, "emulator:sm_90a")
    tensors = {name: t.clone() for name, t in mm.pack(*ordinary).items()}

    def call() -> Tensor:
        w = lowbit.PackedWeight(spec, tensors)
        return torch.ops.lowbit.matmul.packed(x, list(w.tensors), mm.description) if compiled else mm(x, w)

    call()
    for name, t in mm.pack(*wide).items():
        tensors[name].copy_(t)
    assert agrees(call(), matmul(spec, x, *wide), tolerance(spec, x, *wide)).all()


@pytest.mark.parametrize("scale", [1e4, 1e-8])
@pytest.mark.parametrize("target", ["cpu", "emulator:sm_90a"])
def test_gradient(scale: float, target: str) -> None:
    """dx is right where W overflows the act type; `dequantize` rounds to it, and gives infinities."""
    spec = replace(FLOAT_ZEROS, bias=True)
    x, *weight = _problem(spec, scale, 3)
    mm = lowbit.compile(spec, target)
    w = mm.pack(*weight)
    exact = torch.from_numpy(dequantize(spec, *weight[:3]))
    dy = torch.rand(3, spec.n, dtype=torch.float64).to(x.dtype) * (2.0**-6 if scale > 1 else 2.0**13)
    (dx,) = torch.autograd.grad(mm(x.requires_grad_(), w), x, dy)
    torch.testing.assert_close(dx.double(), dy.double() @ exact, rtol=2**-7, atol=1e-3 * float(dx.abs().max()))
    assert torch.equal(mm.dequantize(w), exact.to(x.dtype))


def test_zeros_count() -> None:
    """With wgmma s q - s z is computed from s z, and zeros are rounded, too."""
    spec = replace(FLOAT_ZEROS, scale="f32")
    codes, scales = torch.ones(16, 64, dtype=torch.uint8), torch.ones(16, 2)
    assert not pack(spec, codes, scales, torch.zeros(16, 2)).wide_range
    assert pack(spec, codes, scales, torch.full((16, 2), 1e5)).wide_range
    assert pack(spec, codes, 1e4 * scales, torch.full((16, 2), 7.0)).wide_range


@pytest.mark.parametrize("spec", [spec for spec, _ in SPECS], ids=str)
def test_no_kernel_rounds_weights(spec: lowbit.MatmulSpec) -> None:
    """For any m, and whatever schedule is given."""
    given = lowbit.Schedule(tokens=64, row_blocks=1, warps_n=4, warps_k=1, step_k=64, wgmma=True)
    artifacts = Artifacts(spec, parse_target("emulator:sm_90a"), given, late_scaling=True)
    for m in (1, 8, 40, 64, 65, 5000):
        tiles = artifacts.token_tiles(m)
        assert tiles is not None and sum(tiles) >= m > sum(tiles[:-1])
        for tile in tiles:
            schedule = artifacts.request(tile).schedule
            assert not any(KernelPlan(spec, schedule).rounding.values())
