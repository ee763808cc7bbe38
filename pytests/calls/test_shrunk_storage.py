"""Tensors whose storage was shrunk under them (`untyped_storage().resize_`): no kernel and no copy may read behind its
end, which ends the process or gives numbers that are nobody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit.dialect.errors import PackError, SpecError
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.reference import random_problem
from lowbit.pylib.weights.tensor_checks import bytes_needed, is_shrunk

PLAIN = lowbit.MatmulSpec(n=64, k=256, weight="u4", group_size=64)
PERMUTED = lowbit.MatmulSpec(n=64, k=256, weight="u4", group_size=64, permuted=True)
EIGHT_BIT = lowbit.MatmulSpec(n=64, k=256, weight="u4", group_size=64, compute="i8")
TARGETS = ("cpu", "emulator:sm_90a")
Call = Callable[[Matmul, Tensor, lowbit.PackedWeight], Any]


def shrunk(t: Tensor, size: int = 8) -> Tensor:
    t.untyped_storage().resize_(size)
    return t


def made(spec: lowbit.MatmulSpec, target: str) -> tuple[Matmul, Tensor, lowbit.PackedWeight]:
    mm = lowbit.compile(spec, target)
    x, codes, scales, *_ = random_problem(spec, 4)
    others = {"permutation": torch.randperm(spec.k).int()} if spec.permuted else {}
    return mm, x, mm.pack(codes, scales, **others)


X: dict[str, Call] = {
    "plain": lambda mm, x, w: mm(shrunk(x), w),
    "as an operator": lambda mm, x, w: mm(shrunk(x).requires_grad_(), w),
    "transposed": lambda mm, x, w: mm(shrunk(x.T.contiguous().T), w),
    "transposed and freed": lambda mm, x, w: mm(shrunk(x.T.contiguous().T, 0), w),
    "the last rows": lambda mm, x, w: mm(shrunk(x[2:], x[2:].nbytes), w),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", [PLAIN, PERMUTED, EIGHT_BIT], ids=["plain", "permuted", "eight bits"])
@pytest.mark.parametrize("call", X)
def test_x(call: str, spec: lowbit.MatmulSpec, target: str) -> None:
    mm, x, w = made(spec, target)
    with pytest.raises(SpecError, match=r"x has a storage of \d+ bytes, but its shape and strides need 2048; .* anew"):
        X[call](mm, x, w)


def of_8_bits(x: Tensor) -> Tensor:
    return torch.ones(x.shape, dtype=torch.int8)


ACTIVATIONS: dict[str, Call] = {
    "quantized here": lambda mm, x, w: lowbit.quantize_activation(shrunk(x), "i8", target=mm.target.name),
    "by the operator": lambda mm, x, w: torch.ops.lowbit.quantize_activation(shrunk(x), "i8", mm.target.name),
    "with its scales": lambda mm, x, w: mm(shrunk(of_8_bits(x)), w, x_scale=torch.ones(len(x))),
    "shrunk later": lambda mm, x, w: mm(shrunk_later(x), w),
}


def shrunk_later(x: Tensor) -> lowbit.QuantizedActivation:
    q = lowbit.quantize_activation(x, "i8", target="cpu")
    shrunk(q.values)
    return q


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("call", ACTIVATIONS)
def test_activations_of_8_bits(call: str, target: str) -> None:
    mm, x, w = made(EIGHT_BIT, target)
    with pytest.raises(SpecError, match="x has a storage of 8 bytes"):
        ACTIVATIONS[call](mm, x, w)


WEIGHTS: dict[str, Call] = {
    "matmul": lambda mm, x, w: mm(x, w),
    "as an operator": lambda mm, x, w: mm(x.requires_grad_(), w),
    "dequantize": lambda mm, x, w: mm.dequantize(w),
    "in torch": lambda mm, x, w: w.dequantize(),
    "saved": lambda mm, x, w: w.state_dict(),
    "made anew": lambda mm, x, w: lowbit.PackedWeight(w.spec, dict(zip(w, w.tensors))),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", [PLAIN, PERMUTED, EIGHT_BIT], ids=["plain", "permuted", "eight bits"])
@pytest.mark.parametrize("call", WEIGHTS)
def test_weight(call: str, spec: lowbit.MatmulSpec, target: str) -> None:
    for i, slot in enumerate(spec.tensors):
        mm, x, w = made(spec, target)
        shrunk(w.tensors[i])
        with pytest.raises(PackError, match=rf"packed {slot.name} has a storage of 8 bytes, .* need \d+; .* anew"):
            WEIGHTS[call](mm, x, w)


def test_a_weight_that_was_multiplied_before() -> None:
    mm, x, w = made(PLAIN, "cpu")
    tensors = list(w.tensors)
    for run in (lambda: mm(x, w), lambda: torch.ops.lowbit.matmul.packed(x, tensors, mm.description)):
        run()
    shrunk(w.codes)
    for run in (lambda: mm(x, w), lambda: torch.ops.lowbit.matmul.packed(x, tensors, mm.description)):
        with pytest.raises(PackError, match="packed codes has a storage of 8 bytes"):
            run()


@pytest.mark.parametrize("name", ["codes", "scales"])
def test_what_is_packed(name: str) -> None:
    _, codes, scales, *_ = random_problem(PLAIN, 1)
    given = {"codes": codes.clone(), "scales": scales.clone()}  # in memory of torch's, not of NumPy's
    shrunk(given[name])
    with pytest.raises(PackError, match=f"{name} has a storage of 8 bytes"):
        lowbit.compile(PLAIN, "cpu").pack(**given)


def test_what_views_need() -> None:
    """To the last element that they reach, and no more."""
    base = torch.zeros(8, 6)
    views = [base, base.T, base[3:, 1:4], base[:, ::5], base[:1].expand(4, 6), base[:0], base[8:], base[2, 3]]
    assert [bytes_needed(v) for v in views] == [192, 192, 184, 192, 24, 0, 0, 64]
    assert not any(map(is_shrunk, views))
    base.untyped_storage().resize_(64)
    assert list(map(is_shrunk, views)) == [True, True, True, True, False, False, False, False]
