"""The programs of the CPU target that search scales and offsets, beside the same search in torch's operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit.dialect.errors import TargetError
from lowbit.pylib.quantization import group_fit, k_quants, rtn
from lowbit.pylib.quantization.grid import Grid
from lowbit.pylib.quantization.losses import POWER, SAFE_POWER, counts
from lowbit.pylib.runtime import cpu_groups

PRESETS = ["q2_k", "q3_k", "q4_k", "q6_k", "q4_1"]
OTHERS = {
    "signed codes with offsets": lowbit.QuantConfig("i4", group_size=24, zeros="offset"),
    "two levels": lowbit.QuantConfig("u1", group_size=16, zeros="offset", clip="mse"),
    "a group a row": lowbit.QuantConfig("u4", group_size=None, zeros="offset", scale="bf16"),
}
AT_ONCE = {
    **{name: lowbit.QuantConfig.preset(name) for name in ("q4_0", "q5_0", "q8_0", "q4_1", "q5_1")},
    "squares": lowbit.QuantConfig("i4", 32, clip="mse"),
    "squares with offsets": lowbit.QuantConfig("u4", 32, zeros="offset", clip="mse"),
    "levels from 0 on": lowbit.QuantConfig("u4", 32, zeros="none", scale="f32"),
    "signed codes with offsets of 24": lowbit.QuantConfig("i4", 24, zeros="offset"),
    "few levels in bf16": lowbit.QuantConfig("i2", 24, scale="bf16"),
    "a group in each row": lowbit.QuantConfig("i4", None),
}
"""What one program rounds (`group_plans.Round`)."""
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


@pytest.mark.parametrize("rows", [7, 33])
@pytest.mark.parametrize("has_importance", [False, True])
@pytest.mark.parametrize("config", AT_ONCE.values(), ids=AT_ONCE)
def test_one_program_rounds_as_the_steps_do(
    config: lowbit.QuantConfig, rows: int, has_importance: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, calibration = weights(rows, 264 if config.group_size == 24 else 608), None
    seeded = torch.Generator().manual_seed(0)
    if has_importance:
        config, inputs = replace(config, calibration="importance"), torch.rand(weight.shape[1], generator=seeded)
        calibration = lowbit.Calibration.from_importance(inputs.square_())
    at_once, found = config.multiplied_in("f16"), lowbit.quantize(weight, config, calibration)
    for module in (rtn, k_quants):
        monkeypatch.setattr(module, "rounds_at_once", lambda *_: False)
    expected, grid = lowbit.quantize(weight, config, calibration), Grid(at_once, weight.shape[1], weight.device)
    power = POWER if has_importance or config.by_k_quant else SAFE_POWER
    each = counts(weight, grid, None if calibration is None else calibration.importance, power)
    new, old = ((grid.groups(q.dequantize() - weight).square() * each).sum(-1) for q in (found, expected))
    assert found.codes.dtype == expected.codes.dtype and found.scales.dtype == expected.scales.dtype
    assert float(new.sum()) <= 1.001 * float(old.sum())
    assert (new <= 1.02 * old + 1e-10).float().mean() > 0.97  # sums in another order choose another range now and then
    same = (found.codes == expected.codes).float().mean(1)
    same = same[[row for row in range(rows) if row not in (1, 5)]]  # where several codes are as good
    assert same.min() > 0.9 and same.mean() > 0.99


@pytest.mark.parametrize("name", ["q4_0", "q5_1"])
def test_one_program_rounds_rows_alike_wherever_they_are(name: str) -> None:
    weight, config = weights(40, 288), lowbit.QuantConfig.preset(name)
    together = lowbit.quantize(weight, config)
    for rows in (slice(0, 1), slice(6, 23), slice(39, 40)):
        alone = lowbit.quantize(weight[rows], config)
        assert torch.equal(alone.codes, together.codes[rows]) and torch.equal(alone.scales, together.scales[rows])


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q5_1"])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_size_of_weights_makes_no_difference(name: str, scale: float) -> None:
    config, weight = replace(lowbit.QuantConfig.preset(name), scale="f32"), weights(40, 256)[6:]
    power = 2.0 ** round(torch.log2(torch.tensor(scale)).item() / 4)
    found, expected = (lowbit.quantize(each, config).codes for each in (weight * power, weight))
    assert (found == expected).float().mean() > 0.999
