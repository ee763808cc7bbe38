"""Matmuls of activations of 8 bits as users call them: shapes, operators of torch, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from eight_bit_problems import ADA, HOPPER
from torch import Tensor

import lowbit
from lowbit.dialect.errors import PackError, SpecError, TargetError
from lowbit.passes.kernels.eight_bit.schedule import EightBitSchedule
from lowbit.passes.kernels.quantize.family import quantize_spec
from lowbit.passes.kernels.quantize.schedule import QuantizeSchedule
from lowbit.passes.kernels.registry import request
from lowbit.passes.targets import parse_target
from lowbit.pylib.operator.calls import OperatorCalls
from lowbit.pylib.reference import random_problem
from lowbit.pylib.runtime.activation import quantize_rows
from lowbit.pylib.runtime.matmul_runtimes import MatmulRuntimes


@pytest.fixture(params=["cpu", HOPPER])
def target(request: pytest.FixtureRequest) -> str:
    torch._dynamo.reset()
    return request.param


SPEC = lowbit.MatmulSpec(48, 256, "u4", 64, zeros="int", compute="i8")


def made(spec: lowbit.MatmulSpec, target: str, m: int = 5) -> tuple[Tensor, lowbit.Matmul, lowbit.PackedWeight]:
    x, *weight = random_problem(spec, m)
    mm = lowbit.compile(spec, target)
    return x, mm, mm.pack(*weight)


def test_one_activation_for_several_matmuls(target: str) -> None:
    x, first, w = made(SPEC, target)
    _, second, v = made(lowbit.MatmulSpec(16, 256, "u8", compute="i8"), target)
    q = lowbit.quantize_activation(x, "i8", target=target)
    assert torch.equal(first(q, w), first(x, w)) and torch.equal(second(q, v), second(x, v))


def test_shapes(target: str) -> None:
    x, mm, w = made(SPEC, target, m=135)
    y = mm(x, w)
    assert torch.equal(mm(x.view(3, 45, 256), w), y.view(3, 45, 48))
    assert torch.equal(mm(x.t().contiguous().t()[:4], w), y[:4])
    assert torch.equal(mm(x[7], w), y[7]) and mm(x[:0], w).shape == (0, 48)
    assert mm(x.view(3, 45, 256)[:, :0], w).shape == (3, 0, 48)
    values, scales = quantize_rows(x.view(3, 45, 256)[:, 5:7], "i8")
    assert torch.equal(mm(values, w, x_scale=scales), y.view(3, 45, 48)[:, 5:7])


def test_under_compile_and_with_a_gradient(target: str) -> None:
    """The gradient goes straight through the quantization: it is that of the dequantized weight."""
    x, mm, w = made(SPEC, target)

    def layer(x: Tensor) -> Tensor:
        q = lowbit.quantize_activation(x, "i8", target=target)
        return mm(q, w) + mm(x, w)

    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    needs = x.clone().requires_grad_()
    dy = torch.randn(5, 48).half()
    mm(needs, w).backward(dy)
    assert torch.equal(needs.grad, dy @ mm.dequantize(w))
    arguments = (*lowbit.quantize_activation(x, "i8", target=target).tensors, list(w.tensors), mm.description)
    torch.library.opcheck(torch.ops.lowbit.matmul.quantized, arguments)
    torch.library.opcheck(torch.ops.lowbit.quantize_activation.default, (x, "i8", target))


def test_the_operator_refuses_parts_that_do_not_fit(target: str) -> None:
    """A saved graph calls the operator, with tensors that nothing else has looked at."""
    x, mm, w = made(SPEC, target)
    q = lowbit.quantize_activation(x, "i8", target=target)
    calls = OperatorCalls(SPEC, MatmulRuntimes(SPEC, mm.target, None))
    for _ in range(2):  # the second time the weight is known
        assert torch.equal(calls.quantized_matmul(q.tensors, w.tensors), mm(x, w))
    with pytest.raises(TargetError, match=r"x is on meta, but the weight is on cpu; use w.to\('meta'\)"):
        calls.quantized_matmul((q.values.to("meta"), q.scales, q.sums), w.tensors)
    with pytest.raises(SpecError, match="not of the same rows"):
        calls.quantized_matmul((q.values, q.scales[:2], q.sums), w.tensors)
    with pytest.raises(PackError, match="takes 3 tensors, codes, scales, zeros, not 2"):
        calls.quantized_matmul(q.tensors, w.tensors[:2])


def test_a_spec_keeps_its_type() -> None:
    spec = lowbit.MatmulSpec(48, 256, "u4", compute=torch.float8_e4m3fn)
    assert spec.compute == "f8e4m3" and lowbit.MatmulSpec.from_dict(spec.to_dict()) == spec
    assert lowbit.MatmulSpec(48, 256, "u4", compute="int8").compute == "i8"
    assert "compute" not in lowbit.MatmulSpec(48, 256, "u4").to_dict()


def test_more_rows_take_launches_of_the_widest_tile() -> None:
    """Where no kernel serves any number of rows."""
    choices = lowbit.compile(lowbit.MatmulSpec(256, 1024, "u8", 128, zeros="int", compute="i8"), ADA).choices
    assert [rows.token_tiles for rows in choices.rows] == [(8,), (16,), (32,), (64,), (64,)]


WRONG_SPECS: list[tuple[str, dict[str, Any]]] = [
    ("compute='f8e4m3' multiplies u1, .*f8e4m3, not 'u5'; use one of them", {"weight": "u5", "compute": "f8e4m3"}),
    ("compute='i8' multiplies u1, .*i8, not 'f4e2m1'", {"weight": "f4e2m1", "zeros": "none"}),
    ("compute='i8' multiplies .*, not 'nf4'", {"weight": "nf4", "zeros": "none"}),
    ("compute='i8' has no zeros='float'; use 'int' or 'none'", {"zeros": "float"}),
    ("compute='i8' needs k=240 to be a multiple of 32", {"k": 240, "group_size": None}),
    ("compute='i8' needs k=65568 to be a multiple of 32 up to 65536", {"k": 65568, "group_size": None}),
    ("needs group_size=16 to be a multiple of 32 that divides 64 or is a multiple of it", {"group_size": 16}),
    ("needs group_size=96 to be", {"k": 288, "group_size": 96}),
    ("compute='e5m2' must be one of 'f8e4m3', 'i8'", {"compute": "e5m2"}),
    ("compute='f16' must be one of 'f8e4m3', 'i8'", {"compute": torch.float16}),
]


@pytest.mark.parametrize(("message", "change"), WRONG_SPECS, ids=lambda v: str(v)[:40])
def test_wrong_specs(message: str, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=message):
        replace(SPEC, **change)


def test_wrong_calls(target: str) -> None:
    x, mm, w = made(SPEC, target)
    values, scales = quantize_rows(x, "i8")
    q = lowbit.quantize_activation(x, "i8")
    cut = replace(q, scales=q.scales[:2]), replace(q, sums=q.sums[:, :4])
    calls: list[tuple[type[lowbit.LowbitError], str, Any]] = [
        (SpecError, r"x is torch.int8 and needs its scales, one per row: mm\(x, w, x_scale=", lambda: mm(values, w)),
        (SpecError, r"needs its scales, .* must be f32 \[5\]", lambda: lowbit.quantize_activation(values, "i8")),
        (SpecError, r"scales of x must be torch.float32 \[5\]", lambda: mm(values, w, x_scale=scales[:2])),
        (SpecError, r"must be torch.float32 \[5\].*not torch.float16", lambda: mm(values, w, x_scale=scales.half())),
        (SpecError, "must be torch.float32.*not float", lambda: mm(values, w, x_scale=1.0)),
        (SpecError, "takes values in torch.int8", lambda: mm(values.to(torch.float8_e4m3fn), w, x_scale=scales)),
        (SpecError, "has its scales; drop x_scale=", lambda: mm(q, w, x_scale=scales)),
        (SpecError, "quantized to 'f8e4m3', but", lambda: mm(lowbit.quantize_activation(x, "f8e4m3"), w)),
        (SpecError, r"x must be \[..., k=256\]", lambda: mm(lowbit.quantize_activation(x[:, :64], "i8"), w)),
        (SpecError, r"values \[5, 256\], scales \[2\] and .* not of the same", lambda: mm(cut[0], w)),
        (SpecError, r"and sums \[5, 4\], .* not of the same", lambda: mm(cut[1], w)),
        (SpecError, "multiple of 32 up to 65536, not", lambda: lowbit.quantize_activation(x[:, :40], "i8")),
        (SpecError, "compute='i4' must be one of", lambda: lowbit.quantize_activation(x, "i4")),
        (SpecError, "x is torch.float32; it must be", lambda: lowbit.quantize_activation(x.float(), "i8")),
        (SpecError, "drop them, or give values", lambda: lowbit.quantize_activation(x, "i8", scales=scales)),
        (SpecError, "no gradient", lambda: lowbit.quantize_activation(x.clone().requires_grad_(), "i8")),
        (SpecError, "x must be a torch tensor", lambda: lowbit.quantize_activation(cast(Any, [1.0]), "i8")),
        (TargetError, "unknown target", lambda: lowbit.quantize_activation(x, "i8", target="sm_1")),
        (PackError, "packed for", lambda: mm(q, made(replace(SPEC, n=16), target)[2])),
    ]
    for error, message, call in calls:
        with pytest.raises(error, match=message):
            call()
    plain = lowbit.compile(replace(SPEC, compute=None), target)
    with pytest.raises(SpecError, match=r"x has 8 bits, but .* multiplies in f16; use a spec with compute="):
        plain(q, w)
    assert torch.equal(mm(x, w), mm(values, w, x_scale=scales))


def test_a_schedule_of_another_family() -> None:
    for schedule in (lowbit.Schedule(8), EightBitSchedule(8)):
        spec = SPEC if type(schedule) is lowbit.Schedule else replace(SPEC, compute=None)
        with pytest.raises(SpecError, match=r"needs an EightBitSchedule|needs compute='f8e4m3' or 'i8'"):
            request(spec, parse_target(HOPPER), schedule)
    with pytest.raises(SpecError, match="eight_bit needs preload_weights=False"):
        EightBitSchedule(8, num_stages=1, preload_weights=True)
    with pytest.raises(SpecError, match="threads=33 must be a multiple of 32"):
        request(quantize_spec(64, "f16", "i8"), parse_target(HOPPER), QuantizeSchedule(33))
