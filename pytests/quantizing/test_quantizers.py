"""Quantizers: each against the definition in its paper, written here once more, slowly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from quantized_weights import CONFIG, inputs_of, output_error, same, weight_of
from torch import Tensor

import lowbit
from lowbit.pylib.quantization import gptq, grid
from lowbit.pylib.quantization.hqq import NORM, shrink, slope


def test_shrinkage_is_the_proximal_step() -> None:
    """shrink(x) is close to the minimum of |e|^p + beta/p' (e - x)^2: it zeroes small errors and keeps large ones."""
    x = torch.linspace(-3, 3, 121)
    shrunk = shrink(x, slope(x), 10.0)
    expected = x.sign() * torch.relu(x.abs() - x.abs().pow(NORM - 1) / 10)
    assert torch.allclose(shrunk, expected.nan_to_num(0.0)) and float(shrunk.abs().max()) > 2.9
    assert (shrunk[x.abs() < 0.15] == 0).all()


def test_hqq_by_its_definition() -> None:
    """Badri and Shaji's loop, for one group at a time in f64."""
    weight = weight_of(3, 64)
    config = CONFIG("u3", 32, method="hqq", scale="f32")
    result, start = lowbit.quantize(weight, config), lowbit.quantize(weight, replace(config, method="rtn"))
    for row in range(3):
        for g in range(2):
            w, scale = weight[row, 32 * g : 32 * g + 32].double().numpy(), float(start.scales[row, g])
            zero = slow_hqq(w, scale, float(start.zeros[row, g]))  # type: ignore[index]
            assert float(result.zeros[row, g]) == pytest.approx(zero, abs=1e-4)  # type: ignore[index]


def slow_hqq(w: np.ndarray, scale: float, zero: float) -> float:
    best, least, beta = zero, np.inf, 10.0 * scale ** (NORM - 2)  # in units of the weight
    for _ in range(21):
        q = np.clip(np.round(w / scale + zero), 0, 7)
        rest = w - scale * (q - zero)
        norm = np.sum(np.abs(rest) ** NORM)
        if norm < least:
            best, least = zero, norm
        e = np.sign(rest) * np.maximum(np.abs(rest) - np.abs(rest) ** (NORM - 1) / beta, 0)
        zero = np.mean(q - (w - e) / scale)
        beta *= 1.01
    return best


@pytest.mark.parametrize("weight", ["u3", "nf4", "f4e2m1"])
@pytest.mark.parametrize("shifted", [False, True])
def test_gptq_by_its_definition(weight: Any, shifted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimal brain quantization: after each column, the rest is the solution of a least-squares problem.

    With `shifted` inputs of a quantized model: the rest has to make up for their difference, too.
    """
    monkeypatch.setattr(gptq, "BLOCK", 20)  # two blocks and a part of one
    w, reference = weight_of(4, 48), inputs_of(100, 48) + weight_of(100, 48, seed=1)
    x = reference + 0.2 * weight_of(100, 48, seed=2) if shifted else reference
    config = CONFIG(weight, 16, method="gptq", clip="max", damping=1e-9)
    calibration = lowbit.Calibration(48)
    calibration.add(x, reference if shifted else None)
    result = lowbit.quantize(w, config, calibration)
    slow = slow_gptq(w, x.double().numpy(), reference.double().numpy(), config)
    agree = np.isclose(result.dequantize().numpy(), slow, atol=1e-5)
    assert agree.mean() > 0.97  # ties may fall either way, and then the rest differs, too
    assert output_error(w, torch.from_numpy(slow), x) == pytest.approx(output_error(w, result.dequantize(), x), rel=0.1)


def slow_gptq(weight: Tensor, x: np.ndarray, reference: np.ndarray, config: lowbit.QuantConfig) -> np.ndarray:
    """Columns by falling |x|^2, each rounded to nearest; then lstsq for what is left."""
    target = np.linalg.lstsq(x, reference @ weight.double().numpy().T, rcond=None)[0].T
    start = lowbit.quantize(torch.from_numpy(target).float(), replace(config, method="rtn"))
    scales = np.repeat(start.scales.double().numpy(), config.group_size or 1, axis=1)
    zeros = np.zeros_like(scales)
    if start.zeros is not None:
        zeros = np.repeat(start.zeros.double().numpy(), config.group_size or 1, axis=1)
    wanted, result, rest = x @ target.T, np.zeros_like(target), target.copy()
    left = list(np.argsort(-np.square(x).sum(0)))
    while left:
        j = left.pop(0)
        codes = config.dtype.encode(rest[:, j] / scales[:, j] + zeros[:, j])
        result[:, j] = scales[:, j] * (config.dtype.decode(codes) - zeros[:, j])
        wanted = wanted - x[:, [j]] * result[:, j]
        rest[:, left] = np.linalg.lstsq(x[:, left], wanted, rcond=None)[0].T
    return result


def test_gptq_makes_up_for_quantized_inputs() -> None:
    w, reference = weight_of(8, 64), inputs_of(300, 64)
    x = reference + 0.1 * inputs_of(300, 64, seed=2)
    errors: dict[bool, float] = {}
    for corrected in (False, True):
        calibration = lowbit.Calibration(64)
        calibration.add(x, reference if corrected else None)
        result = lowbit.quantize(w, CONFIG("u4", 32, method="gptq"), calibration).dequantize()
        errors[corrected] = float((reference @ w.T - x @ result.T).square().sum())
    assert errors[True] < 0.9 * errors[False]


def test_gptq_of_inputs_that_miss_columns() -> None:
    """Where inputs say nothing, the nearest code is taken; and no Cholesky factor fails."""
    w, x = weight_of(4, 64), inputs_of(10, 64)
    x[:, 32:] = 0
    config = CONFIG("u4", 32, method="gptq")
    result, rounded = lowbit.quantize(w, config, x), lowbit.quantize(w, replace(config, method="rtn"))
    assert torch.equal(result.codes[:, 32:], nearest_codes(w, result)[:, 32:])
    calibration = lowbit.Calibration(64)
    calibration.add(x, x + 0.01 * x.flip(0))
    corrected = lowbit.quantize(w, config, calibration)
    assert torch.equal(corrected.codes[:, 32:], nearest_codes(w, corrected)[:, 32:])
    nothing = lowbit.quantize(w, config, torch.zeros(10, 64))
    assert same(nothing, replace(rounded, config=config))


def nearest_codes(weight: Tensor, result: lowbit.QuantizedWeight) -> Tensor:
    assert result.zeros is not None
    groups = weight.unflatten(1, (-1, 32)) / result.scales[..., None].float() + result.zeros[..., None]
    return groups.round().clamp(0, 15).flatten(1).to(torch.uint8)


def test_a_hessian_serves_as_calibration() -> None:
    w, x = weight_of(6, 64), inputs_of(100, 64)
    config, sums = CONFIG("u3", 32, method="gptq"), lowbit.Calibration(64)
    for batch in x.view(4, 5, 5, 64):
        sums.add(batch)
    hessian = x.double().T @ x.double()
    assert torch.allclose(sums.hessian, hessian, rtol=1e-4, atol=1e-3) and sums.tokens == 100
    results = [lowbit.quantize(w, config, given) for given in (x, sums, (hessian + hessian.T) / 2)]
    errors = [output_error(w, result.dequantize(), x) for result in results]
    assert errors == pytest.approx([errors[0]] * 3, rel=0.02)


def test_awq_by_its_definition() -> None:
    """The best alpha of a loop over the grid, with errors computed from the inputs themselves."""
    w, x = weight_of(8, 64), inputs_of(200, 64)
    config = CONFIG("u3", 32, method="awq", clip="mse")
    result = lowbit.quantize(w, config, x)
    magnitude, errors = x.abs().mean(0), []
    for alpha in np.arange(20) / 20:
        scales = magnitude**alpha
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = lowbit.quantize(w * scales, replace(config, method="rtn")).dequantize() / scales
        errors.append(output_error(w, rounded, x))
    assert output_error(w, result.dequantize(), x) == pytest.approx(min(errors), rel=1e-4) and min(errors) < errors[0]


@pytest.mark.parametrize("previous", [torch.nn.LayerNorm(64), torch.nn.RMSNorm(64), torch.nn.Linear(16, 64)])
def test_awq_folds_into_the_layer_before(previous: torch.nn.Module) -> None:
    w, given = weight_of(8, 64), inputs_of(50, 16 if isinstance(previous, torch.nn.Linear) else 64)
    with torch.no_grad():
        x = previous(given)
        result = lowbit.quantize(w, CONFIG("u4", 32, method="awq"), inputs_of(200, 64))
        expected = x @ result.dequantize().T
        folded = result.fold_into(previous)
        assert folded.column_scales is None and folded.fold_into(previous) is folded
        assert torch.allclose(previous(given) @ folded.dequantize().T, expected, atol=1e-3)
        assert not torch.allclose(x @ folded.dequantize().T, expected, atol=1e-3)


def test_siblings_share_column_scales() -> None:
    q, k, x = weight_of(8, 64), weight_of(4, 64, seed=3), inputs_of(200, 64)
    both = lowbit.quantize(torch.cat([q, k]), CONFIG("u4", 32, method="awq"), x)
    parts = both.split([8, 4])
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), both.dequantize())


def test_signround_by_its_definition() -> None:
    """The paper's update, step by step for one row, in f64."""
    w, x = weight_of(1, 16, seed=2), inputs_of(64, 16, seed=3)
    config = CONFIG("u3", 16, "float", "f32", method="signround", clip="max", steps=20)
    hessian = (x.T @ x).double()
    hessian /= hessian.diagonal().mean()
    errors = []
    offsets, a, b = torch.zeros(16).double(), torch.ones(1).double(), torch.ones(1).double()
    for step in range(20):
        variables = [v.requires_grad_() for v in (offsets, a, b)]
        values = slow_fake_quantize(w[0].double(), *variables)
        error = w[0].double() - values
        loss = error @ hessian @ error
        errors.append(loss.item())
        gradients = torch.autograd.grad(loss, variables)
        rate = (1 - step / 20) / 20
        offsets, a, b = (v.detach() - rate * g.sign() for v, g in zip(variables, gradients))
        offsets, a, b = offsets.clamp(-0.5, 0.5), a.clamp(0, 1), b.clamp(0, 1)
    difference = (w - lowbit.quantize(w, config, x).dequantize())[0].double()
    assert float(difference @ hessian @ difference) == pytest.approx(min(errors), rel=1e-3)
    assert min(errors) < 0.5 * errors[0] and float(offsets.abs().max()) > 0.2


def slow_fake_quantize(w: Tensor, offsets: Tensor, a: Tensor, b: Tensor) -> Tensor:
    low, high = w.min() * b, w.max() * a
    scale = (high - low) / 7
    zero = -low / scale
    x = w / scale + zero + offsets
    return scale * ((x + (x.round() - x).detach()).clamp(0, 7) - zero)


CHUNKED = [CONFIG("u4", 64), CONFIG("u3", 64, method="hqq"), lowbit.QuantConfig.preset("q4_k")]


@pytest.mark.parametrize("config", CHUNKED)
def test_threads_work_on_chunks_of_their_own(config: lowbit.QuantConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation is that of one thread, whose result does not depend on how many there are."""
    monkeypatch.setattr(grid, "CACHED", 1 << 18)
    weight, before, seen = torch.randn(100, 512), torch.get_num_threads(), set[int]()
    assert len(list(grid.chunks(weight, 6))) > 2
    torch.set_num_threads(1)
    expected = lowbit.quantize(weight, config)
    each = grid.Grid.groups
    monkeypatch.setattr(grid.Grid, "groups", lambda *given: (seen.add(torch.get_num_threads()), each(*given))[1])
    try:
        torch.set_num_threads(3)
        found = lowbit.quantize(weight, config)
        assert seen == {1} and torch.get_num_threads() == 3
        with torch.inference_mode():
            assert torch.equal(lowbit.quantize(weight, config).codes, expected.codes)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.dequantize(), expected.dequantize())
