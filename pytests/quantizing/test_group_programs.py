"""The programs of the CPU target that search scales and offsets, beside the same search in torch's operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit.dialect.errors import TargetError
from lowbit.pylib.quantization import group_fit
from lowbit.pylib.quantization.grid import Grid
from lowbit.pylib.quantization.losses import counts
from lowbit.pylib.runtime import cpu_groups

PRESETS = ["q2_k", "q3_k", "q4_k", "q6_k", "q4_1"]
OTHERS = {
    "signed codes with offsets": lowbit.QuantConfig("i4", group_size=24, zeros="offset"),
    "two levels": lowbit.QuantConfig("u1", group_size=16, zeros="offset", clip="mse"),
    "a group a row": lowbit.QuantConfig("u4", group_size=None, zeros="offset", scale="bf16"),
}
CONFIGS = {name: lowbit.QuantConfig.preset(name) for name in PRESETS} | OTHERS


def weights(rows: int, k: int) -> Tensor:
    """Returns weights of which some groups have one sign, some are equal, zero, or next to the ends of f32."""
    weight = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)) * 0.02
    weight[0], weight[1] = weight[0].abs(), 0.25
    weight[2], weight[3] = 0.0, -weight[3].abs()
    weight[4] *= 1e-30
    weight[5, ::7] = 3.0
    return weight


@pytest.fixture(params=CONFIGS)
def grid(request: pytest.FixtureRequest) -> Grid:
    k = 264 if CONFIGS[request.param].group_size == 24 else 768
    return Grid(CONFIGS[request.param].multiplied_in("f16"), k, torch.device("cpu"))


def both(grid: Grid, weight: Tensor, importance: Tensor | None) -> tuple[group_fit.Fit, group_fit.Fit]:
    """Returns the searches by programs and in torch."""
    groups, counted = grid.groups(weight), counts(weight, grid, importance)
    return group_fit._OnCpu(groups, counted, grid), group_fit._InTorch(groups, counted, grid)


@pytest.mark.parametrize("rows", [7, 32])
@pytest.mark.parametrize("has_importance", [False, True])
def test_programs_find_what_torch_finds(grid: Grid, rows: int, has_importance: bool) -> None:
    weight, importance = weights(rows, grid.k), torch.rand(grid.k, generator=torch.Generator().manual_seed(0))
    importance[:2] = 0.0
    programs, in_torch = both(grid, weight, importance if has_importance else None)
    assert torch.equal(programs.low, in_torch.low) and torch.equal(programs.high, in_torch.high)
    has_offsets = grid.config.zeros == "offset"
    errors = []
    for found in (programs, in_torch):
        scales, offsets = found.fitted()
        assert scales.isfinite().all() and offsets.isfinite().all()
        given = scales, offsets if has_offsets else None
        errors.append(in_torch.errors(*given))
        assert torch.allclose(programs.errors(*given), errors[-1], rtol=1e-3, atol=1e-12)
    # Sums in another order choose another range now and then, where two are about as good.
    assert float(errors[0].sum()) == pytest.approx(float(errors[1].sum()), rel=2e-3)
    assert (errors[0] <= 1.02 * errors[1] + 1e-10).float().mean() > 0.98


def test_groups_of_zeros_have_scales_of_zero() -> None:
    grid = Grid(lowbit.QuantConfig.preset("q3_k").multiplied_in("f16"), 256, torch.device("cpu"))
    for found in both(grid, torch.zeros(2, 256), None):
        scales, offsets = found.fitted()
        assert not scales.any() and not offsets.any() and not found.errors(scales, None).any()


def test_torch_searches_where_there_are_no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, config = weights(38, 768)[6:], lowbit.QuantConfig.preset("q4_k")
    expected = lowbit.quantize(weight, config).dequantize()

    def missing(*_: object) -> bytes:
        raise TargetError("no LLVM")

    monkeypatch.setattr(cpu_groups, "load_plan", missing)
    cpu_groups._function.cache_clear()
    cpu_groups.has_group_programs.cache_clear()
    try:
        found = lowbit.quantize(weight, config).dequantize()
    finally:
        cpu_groups.has_group_programs.cache_clear()
    before, after = ((each - weight).square().sum() for each in (expected, found))
    assert 0.99 < after / before < 1.01
