"""Experts on a CPU: each slot has the bits that a matmul of its expert alone gives."""

from __future__ import annotations

import pytest
import torch
from experts_apart import experts_apart

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.targets import parse_target
from lowbit.pylib.experts.routing import route
from lowbit.pylib.reference.inputs import random_inputs
from lowbit.pylib.runtime.cpu_experts import ALL_SLOTS
from lowbit.pylib.runtime.expert_matmul import expert_matmul
from lowbit.pylib.weights.packed import pack

S = MatmulSpec
SPECS = {
    "u4": S(3 * 48, 96, "u4", group_size=32, zeros="int", bias=True, experts=3),
    "outliers": S(4 * 48, 160, "u3", group_size=16, zeros="float", experts=4, outliers=True, bias=True),
    "gated": S(3 * 32, 96, "f6e3m2", experts=3, outliers=True, act="bf16", epilogue="silu_mul"),
    "permuted": S(3 * 80, 160, "nf4", group_size=32, experts=3, outliers=True, permuted=True, out="f32"),
    "two_lines": S(33 * 16, 64, "i4", experts=33, outliers=True, act="bf16"),  # the table takes two
    "invariant": S(2 * 32, 96, "u2", group_size=32, experts=2, outliers=True, invariant=True),
}


@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("name", SPECS)
def test_experts_are_those_of_matmuls_alone(name: str, tokens: int) -> None:
    """The first expert has most of the tokens, so that there are few rows and many; the last has at least one."""
    spec = SPECS[name]
    x, tensors = random_inputs(spec, tokens, seed=1)
    ids = torch.stack([torch.arange(tokens) ** 2 % 5 % spec.experts, torch.arange(tokens) % spec.experts], 1)
    ids[-1, 1] = spec.experts - 1
    routing = route(ids, spec.experts, ALL_SLOTS)
    y = expert_matmul(spec, parse_target("cpu"))(
        x, routing.rows, routing.tiles, pack(spec, **tensors).tensors, ALL_SLOTS
    )
    one, weights = experts_apart(spec, tensors, "cpu")
    slots = ids.flatten().bincount(minlength=spec.experts).tolist()
    each = [one(x[rows], w) for rows, w in zip(routing.rows.long().split(slots), weights) if len(rows)]
    assert torch.equal(y, torch.cat(each)) and y.isfinite().all()
