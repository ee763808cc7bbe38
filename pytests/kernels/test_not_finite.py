"""The rule for infinities and NaN in x (docs/formats.md): they reach every number of their row of y, and no other."""

from __future__ import annotations

import pytest
import torch

import lowbit
from lowbit.passes.kernels.registry import family_of
from lowbit.pylib.reference import random_problem

TARGETS = ["cpu", "emulator:sm_80", "emulator:sm_90a"]
SPECS = [
    lowbit.MatmulSpec(n=40, k=96, weight="u4", group_size=32, zeros="int"),
    lowbit.MatmulSpec(n=16, k=80, weight="i4", act="bf16"),
    lowbit.MatmulSpec(n=32, k=64, weight="u3", group_size=32, zeros="float", bias=True),
    lowbit.MatmulSpec(n=16, k=64, weight="u1", act="bf16", out="f32"),
    lowbit.MatmulSpec(n=16, k=64, weight="nf4", group_size=32, scale="f32"),
    lowbit.MatmulSpec(n=16, k=64, weight="f4e2m1", group_size=32, scale="e8m0"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_rows(spec: lowbit.MatmulSpec, target: str) -> None:
    mm = lowbit.compile(spec, target)
    values = (float("inf"), float("-inf"), float("nan"))
    for m, rows in ((1, (0,)), (8, (1, 4, 7)), (70, (35, 68, 3)), (200, (100, 1, 198))):
        x, *weight = random_problem(spec, m)
        w = mm.pack(*weight)
        expected, others = mm(x, w), torch.tensor([row not in rows for row in range(m)])
        for some in [values] if m > 1 else [(value,) for value in values]:
            x[list(rows), 5] = torch.tensor(some, dtype=x.dtype)
            y = mm(x, w)
            assert torch.equal(y[others], expected[others])
            for row, value in zip(rows, some):
                wrong = y[row].isnan() if value != value else ~y[row].isfinite()
                assert wrong.all()


def test_one_token_in_integers() -> None:
    """Limbs of a fixed-point number have no infinity: even there the rule holds."""
    spec = lowbit.MatmulSpec(n=16, k=256, weight="u2", group_size=128)
    x, *weight = random_problem(spec, 1)
    mm = lowbit.compile(spec, "emulator:sm_80", lowbit.IntegerSchedule(row_blocks=1, warps_k=2, step_k=128))
    assert family_of(mm.kernel(1).schedule).name == "decode_integer"
    w = mm.pack(*weight)
    for value in (float("inf"), float("-inf"), float("nan")):
        x[0, 5] = value
        assert not mm(x, w).isfinite().any()


@pytest.mark.parametrize("target", TARGETS)
def test_scales_are_finite(target: str) -> None:
    """Neither packing nor loading takes others, on any target."""
    spec = SPECS[0]
    _, codes, scales, zeros, _ = random_problem(spec, 1)
    mm = lowbit.compile(spec, target)
    w = mm.pack(codes, scales, zeros)
    for value in (float("inf"), float("nan")):
        scales[7, 1] = value
        with pytest.raises(lowbit.PackError, match=r"scales\[7, 1\] = .* must be finite"):
            mm.pack(codes, scales, zeros)
        saved = {name: tensor.clone() for name, tensor in w.state_dict().items()}
        saved["scales"].view(-1)[0] = value
        with pytest.raises(lowbit.PackError, match=r"saved scales hold .*: must be finite"):
            lowbit.PackedWeight.from_state_dict(saved)
