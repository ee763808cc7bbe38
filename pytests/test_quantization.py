"""Quantizers: each against the definition in its paper, written here once more, slowly; and laws that hold for all."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowbit
from lowbit.dialect.formats.dtypes import all_names, dtype
from lowbit.pylib.quantization import gptq
from lowbit.pylib.quantization import grid as grid_module
from lowbit.pylib.quantization.config import FLOAT_ZEROS, METHODS, PRESETS
from lowbit.pylib.quantization.grid import Grid
from lowbit.pylib.quantization.hqq import NORM, shrink, slope
from lowbit.pylib.reference import agrees, matmul, tolerance

CONFIG: Any = lowbit.QuantConfig
CPU = torch.device("cpu")
PLAIN = [method for method in METHODS if method != "spqr"]  # whose outliers and levels test_spqr.py looks at


def weight_of(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def inputs_of(tokens: int, k: int, seed: int = 1) -> Tensor:
    """Inputs as layers have them: columns depend on each other, and some are much larger."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, k, generator=generator) @ torch.randn(k, k, generator=generator) / k**0.5
    return mixed * torch.rand(k, generator=generator).pow(4).mul(5).add(0.1)


def output_error(weight: Tensor, other: Tensor, x: Tensor) -> float:
    return float(((weight - other).double() @ x.double().T).square().sum())


def same(a: lowbit.QuantizedWeight, b: lowbit.QuantizedWeight) -> bool:
    tensors = [(getattr(a, name), getattr(b, name)) for name in ("codes", "scales", "zeros", "column_scales")]
    return all((s is None and t is None) or torch.equal(s.float(), t.float()) for s, t in tensors)


@st.composite
def configs(draw: st.DrawFn) -> lowbit.QuantConfig:
    method = draw(st.sampled_from(PLAIN))
    integers = [name for name in all_names() if dtype(name).kind in ("uint", "int")]
    weight = draw(st.sampled_from(integers if method in ("hqq", "signround") else all_names()))
    kinds = ["float", "int", "none"] if weight in integers else ["float", "none"]
    if dtype(weight).max > 1000:  # zeros of that size are beyond f16
        kinds.remove("float")
    zeros = "float" if method == "hqq" else draw(st.sampled_from(kinds))
    return CONFIG(
        weight,
        draw(st.sampled_from((16, 32, 48, None))),
        zeros,
        draw(st.sampled_from(("f16", "bf16", "f32", "e8m0", "e4m3"))),
        method,
        symmetric=zeros != "none" and method != "hqq" and draw(st.booleans()),
        clip=draw(st.sampled_from(("mse", "max"))),
        steps=3,
        beams=draw(st.sampled_from((1, 4))) if method == "gptq" else 1,
    )


@settings(max_examples=30)
@given(configs(), st.integers(0, 2**31), st.sampled_from((torch.float16, torch.bfloat16, torch.float32, torch.float64)))
def test_laws_of_every_method(config: lowbit.QuantConfig, seed: int, kind: torch.dtype) -> None:
    """Codes can be packed and mean what `dequantize` says; strides don't matter, and nothing is random."""
    weight, x = weight_of(5, 96, seed).to(kind), inputs_of(40, 96, seed)
    weight[1], weight[2], weight[3, :48] = 0, 0.25, weight[3, :48].abs()
    result = lowbit.quantize(weight, config, x)
    packed = result.pack()  # which refuses codes, scales and zeros out of range
    assert torch.equal(packed.unpack(), result.codes)
    columns = 1.0 if result.column_scales is None else result.column_scales.numpy()
    assert np.allclose(definition(result) / columns, result.dequantize().numpy(), rtol=1e-5, atol=1e-5)
    strided = torch.empty(96, 5, dtype=kind).T.copy_(weight)
    assert not strided.is_contiguous() and same(result, lowbit.quantize(strided, config, x))


def definition(result: lowbit.QuantizedWeight) -> np.ndarray:
    values = result.config.dtype.values()[result.codes.numpy().astype(np.int64) & (result.config.dtype.codes - 1)]
    repeat = values.shape[1] // result.scales.shape[1]
    scales = np.repeat(result.scales.float().numpy().astype(np.float64), repeat, axis=1)
    zeros = 0.0 if result.zeros is None else np.repeat(result.zeros.double().numpy(), repeat, axis=1)
    return scales * (values - zeros)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("weight, zeros", [("u4", "int"), ("u2", "float"), ("i3", "none")])
def test_no_method_is_worse_than_rounding_on_its_own_objective(method: Any, weight: Any, zeros: Any) -> None:
    if method in FLOAT_ZEROS:
        zeros = "float"
    for seed in range(3):
        w, x = weight_of(8, 128, seed), inputs_of(200, 128, seed + 100)
        config = CONFIG(weight, 32, zeros, method=method, steps=10)
        rounded = lowbit.quantize(w, replace(config, method="rtn"))
        result = lowbit.quantize(w, config, x)
        if method == "hqq":
            assert (lp_errors(w, result) <= lp_errors(w, rounded) * (1 + 1e-5)).all()
        else:
            assert output_error(w, result.dequantize(), x) <= output_error(w, rounded.dequantize(), x) * (1 + 1e-3)


def lp_errors(weight: Tensor, result: lowbit.QuantizedWeight) -> Tensor:
    """The lp norm of each group's error in units of its scale."""
    error = (weight - result.dequantize()).abs().unflatten(1, (result.scales.shape[1], -1))
    return (error / result.scales.float()[..., None]).pow(NORM).sum(-1)


@pytest.mark.parametrize("method, at_most", [("gptq", 0.6), ("signround", 0.85), ("hqq", 0.99)])
def test_methods_gain_something(method: Any, at_most: float) -> None:
    w, x = weight_of(16, 128), inputs_of(300, 128)
    config = CONFIG("u3", 32, "float", method=method)
    error, rounded = (lowbit.quantize(w, replace(config, method=m), x).dequantize() for m in (method, "rtn"))
    assert output_error(w, error, x) < at_most * output_error(w, rounded, x)


# Rounding to nearest.


@pytest.mark.parametrize("name", all_names())
def test_nearest_code_of_every_format(name: str) -> None:
    """As `DType.encode`, ties and values out of range included."""
    t = dtype(name)
    levels = np.unique(t.values()[np.isfinite(t.values())])
    ties = (levels[1:] + levels[:-1]) / 2
    x = np.concatenate([levels, ties, levels * 1.01, [-1e6, 1e6]]).astype(np.float32)
    codes = Grid(CONFIG(name), 128, CPU).encode(torch.from_numpy(x)).numpy()
    assert (codes.astype(np.int64) & (t.codes - 1) == t.encode(x)).all()


def test_asymmetric_rounding_by_hand() -> None:
    """Of -1 .. 2 in u2: s = 3/3, z = 1, codes 0 .. 3."""
    weight = torch.tensor([[-1.0, 2.0, 0.4, 0.6] * 4])
    result = lowbit.quantize(weight, CONFIG("u2", None, clip="max"))
    assert result.codes[0, :4].tolist() == [0, 3, 1, 2] and result.codes.dtype == torch.uint8
    assert result.scales.tolist() == [[1.0]] and result.zeros is not None and result.zeros.tolist() == [[1]]


def test_symmetric_rounding_by_hand() -> None:
    weight = torch.tensor([[-1.75, 1.0, 0.3, 0.0] * 4])
    signed = lowbit.quantize(weight, CONFIG("i4", None, clip="max"))
    assert signed.zeros is None and signed.codes.dtype == torch.int8
    assert math.isclose(float(signed.scales), 1.75 / 8, rel_tol=1e-3)
    unsigned = lowbit.quantize(weight, CONFIG("u4", None, symmetric=True, clip="max"))
    assert unsigned.zeros is not None and unsigned.zeros.tolist() == [[8]]
    assert torch.equal(unsigned.codes.int() - 8, signed.codes.int())


def test_fp6_llm() -> None:
    """FP6-LLM: the scale is max|w| / 28, in f16, and the codes are the nearest ones."""
    weight = weight_of(4, 64)
    result = lowbit.quantize(weight, CONFIG.preset("fp6_llm"))
    scales = (weight.abs().amax(1, keepdim=True) / 28).half()
    assert torch.equal(result.scales, scales)
    assert (result.codes.numpy() == dtype("f6e3m2").encode((weight / scales.float()).numpy())).all()


def test_mx_scales() -> None:
    """MX: 2^(floor(log2 max|w|) - 2) for e2m1, whose largest value is 1.5 * 2^2; so 7.9 is clipped to 6."""
    weight = torch.zeros(2, 32)
    weight[0, 3], weight[1, 5] = 7.9, -0.3
    result = lowbit.quantize(weight, CONFIG.preset("mxfp4"))
    assert result.scales.float().flatten().tolist() == [1.0, 2.0**-4]
    assert float(result.dequantize()[0, 3]) == 6.0


@pytest.mark.parametrize("config", [CONFIG("u3", 16), CONFIG("nf4", 32), CONFIG("i2", 48, scale="bf16")])
def test_searched_range_is_the_best_of_the_ratios(config: lowbit.QuantConfig) -> None:
    """Against a loop over groups and ratios, in f64."""
    weight, t = weight_of(3, 96), config.dtype
    found = lowbit.quantize(weight, config)
    errors = (weight - found.dequantize()).unflatten(1, (-1, config.group_size or 96)).double().square().sum(-1)
    for row, groups in enumerate(weight.unflatten(1, (-1, config.group_size or 96))):
        for g, group in enumerate(groups):
            assert float(errors[row, g]) == pytest.approx(best_error(group.numpy(), t, config), rel=1e-3)


def best_error(group: np.ndarray, t: Any, config: lowbit.QuantConfig) -> float:
    kind = torch.bfloat16 if config.scale == "bf16" else torch.float16
    values, least = t.values(), np.inf
    for ratio in np.arange(1.0, 0.19, -0.02):
        low, high, zero = ratio * group.min(), ratio * group.max(), 0.0
        if config.zeros == "int":
            scale = (max(high, 0) - min(low, 0)) / (values.max() - values.min())
        else:
            scale = max(high / values.max(), low / values.min())
        scale = float(torch.tensor(scale).to(kind))
        if config.zeros == "int":
            zero = round(-min(low, 0) / scale)
        least = min(least, np.square(scale * (t.decode(t.encode(group / scale + zero)) - zero) - group).sum())
    return least


def test_search_beats_the_whole_range() -> None:
    weight = weight_of(8, 128)
    for name in ("u2", "u4", "f4e2m1", "nf4"):
        errors = [
            float((weight - lowbit.quantize(weight, CONFIG(name, 64, clip=clip)).dequantize()).square().sum())
            for clip in ("mse", "max")
        ]
        assert errors[0] < 0.97 * errors[1]


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_of(7, 64), inputs_of(80, 64)
    for method in METHODS:
        config = CONFIG("u3", 32, "float", method=method, steps=4)
        whole = lowbit.quantize(weight, config, x)
        with monkeypatch.context() as patch:
            patch.setattr(grid_module, "CACHED", 1)  # a row at a time
            parts = lowbit.quantize(weight, config, x)
        assert torch.allclose(whole.dequantize(), parts.dequantize(), atol=1e-5)


# HQQ.


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


# GPTQ.


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
    assert torch.equal(result.codes[:, 32:], rounded.codes[:, 32:])
    calibration = lowbit.Calibration(64)
    calibration.add(x, x + 0.01 * x.flip(0))
    corrected = lowbit.quantize(w, config, calibration)
    assert torch.equal(corrected.codes[:, 32:], rounded.codes[:, 32:])
    nothing = lowbit.quantize(w, config, torch.zeros(10, 64))
    assert same(nothing, replace(rounded, config=config))


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


# AWQ.


def test_awq_by_its_definition() -> None:
    """The best alpha of a loop over the grid, with errors computed from the inputs themselves."""
    w, x = weight_of(8, 64), inputs_of(200, 64)
    config = CONFIG("u3", 32, method="awq")
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


# SignRound.


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


# What comes out runs.


RUN = {name: preset for name, preset in PRESETS.items() if preset.method in PLAIN}
RUN |= {"i3": CONFIG("i3", 32), "u1": CONFIG("u1", 32, "float", symmetric=True)}


@pytest.mark.parametrize("config", RUN.values(), ids=RUN)
def test_matmul_of_a_quantized_weight(config: lowbit.QuantConfig) -> None:
    """quantize -> pack -> matmul is x times the dequantized weight."""
    result = lowbit.quantize(weight_of(48, 256), replace(config, steps=2), inputs_of(300, 256))
    bias = weight_of(1, 48)[0].half()
    mm = lowbit.compile(result.spec(bias=True), target="cpu")
    x = inputs_of(3, 256, seed=5).half()
    prepared = result.prepare_input(x)
    given = (mm.spec, prepared, result.codes, result.scales, result.zeros, bias)
    tables = {name: getattr(result, name) for name in ("offsets", "row_scales")}
    others = dict(result.second_level) | {name: table for name, table in tables.items() if table is not None}
    y = mm(prepared, result.pack(mm, bias))
    assert agrees(y, matmul(*given, **others), tolerance(*given, **others)).all()
    expected = x.float() @ result.dequantize().T + bias
    assert torch.allclose(y.float(), expected, atol=0.01 * float(expected.abs().max()))


# Configurations and errors.


@pytest.mark.parametrize("config", [*PRESETS.values(), CONFIG("lut1", table=(-1, 2))])
def test_configurations_are_json(config: lowbit.QuantConfig) -> None:
    assert CONFIG.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@settings(max_examples=20)
@given(st.floats(-1e4, 1e4, width=16), st.sampled_from(("u4", "u8", "i4", "nf4")), st.sampled_from(("float", None)))
def test_constant_weights(value: float, weight: Any, zeros: Any) -> None:
    result = lowbit.quantize(torch.full((2, 32), value), CONFIG(weight, 32, zeros, "f32"))
    assert torch.allclose(result.dequantize(), torch.full((2, 32), value), rtol=1e-2, atol=1e-30)


W = weight_of(4, 64)
BAD = W.clone()
BAD[2, 33] = float("nan")


@pytest.mark.parametrize(
    "message, call",
    [
        (r"weight\[2, 33\] = nan must be finite; 1 values are not", lambda: lowbit.quantize(BAD)),
        (r"weight must be \[n, k\], not \[4, 8, 8\]", lambda: lowbit.quantize(W.view(4, 8, 8))),
        ("weight must be a tensor of floats .* not torch.int64", lambda: lowbit.quantize(W.long())),
        ("weight must be a tensor of floats .* not ndarray", lambda: lowbit.quantize(W.numpy())),  # type: ignore[arg-type]
        ("weight is on meta", lambda: lowbit.quantize(W.to("meta"))),
        ("group_size=128 must divide k=64; try 64", lambda: lowbit.quantize(W)),
        ("config='u4' must be a QuantConfig", lambda: lowbit.quantize(W, "u4")),  # type: ignore[arg-type]
        ("method='gptq' needs calibration=", lambda: lowbit.quantize(W, CONFIG("u4", 32, method="gptq"))),
        ("must be .*k=64.*not .*10, 32", lambda: lowbit.quantize(W, GPTQ, W.new_ones(10, 32))),
        ("is of inputs .*32.*, but the weight has k=64", lambda: lowbit.quantize(W, GPTQ, lowbit.Calibration(32))),
        ("not positive definite", lambda: lowbit.quantize(W, GPTQ, -torch.eye(64))),
        ("has no tokens", lambda: lowbit.quantize(W, GPTQ, lowbit.Calibration(64))),
        ("x has NaN or inf in token 2", lambda: lowbit.Calibration(64).add(BAD)),
        ("reference must be of x's tokens", lambda: lowbit.Calibration(64).add(W, W[:2])),
        ("group 1 of row 3 needs a scale beyond f16", lambda: lowbit.quantize(HUGE, CONFIG("i4", 32))),
        ("previous must be a norm or a linear layer with 64", lambda: AWQ.fold_into(torch.nn.ReLU())),
        (r"sizes=\[1, 1\] must be positive and add up to n=4", lambda: AWQ.split([1, 1])),
    ],
)
def test_errors_of_weights(message: str, call: Any) -> None:
    with pytest.raises(lowbit.LowbitError, match=message):
        call()


HUGE = W.clone()
HUGE[3, 40] = 1e7
GPTQ = CONFIG("u4", 32, method="gptq")
AWQ = lowbit.quantize(W, CONFIG("u4", 32, method="awq"), inputs_of(100, 64))


@pytest.mark.parametrize(
    "message, change",
    [
        ("unknown weight format 'u9'", {"weight": "u9"}),
        ("weight=4 must be the name of a format", {"weight": 4}),
        ("group_size=8 must be an integer of at least 16", {"group_size": 8}),
        ("group_size=True must", {"group_size": True}),
        ("method='hqqq' must be one of .* did you mean 'hqq'", {"method": "hqqq"}),
        ("method='hqq' needs an integer weight .* not 'nf4'", {"weight": "nf4", "method": "hqq"}),
        ("method='hqq' optimizes float zeros and can't have zeros='int'", {"zeros": "int", "method": "hqq"}),
        ("method='signround' needs an integer weight", {"weight": "f4e2m1", "method": "signround"}),
        ("zeros='int' needs an integer weight", {"weight": "nf4", "zeros": "int"}),
        ("zeros='floats' must be one of", {"zeros": "floats"}),
        ("scale='f8' must be one of", {"scale": "f8"}),
        ("clip=None must be one of", {"clip": None}),
        ("symmetric=1 must be True or False", {"symmetric": 1}),
        ("symmetric=True needs zeros", {"symmetric": True, "weight": "i4"}),
        ("damping=0 must be", {"damping": 0}),
        ("steps=0 must be", {"steps": 0}),
        ("lut2 needs table= with 4 values", {"weight": "lut2"}),
    ],
)
def test_errors_of_configurations(message: str, change: dict[str, Any]) -> None:
    with pytest.raises(lowbit.SpecError, match=message):
        CONFIG(**change)


def test_method_by_default() -> None:
    """HQQ where there are float zeros to move."""
    assert CONFIG("u4", zeros="float").method == "hqq"
    given = [CONFIG("u4"), CONFIG("i4"), CONFIG("nf4", zeros="float"), CONFIG("u1", zeros="float", symmetric=True)]
    assert {config.method for config in given} == {"rtn"}


def test_errors_of_names() -> None:
    with pytest.raises(lowbit.SpecError, match=r"preset='fp6-llm' must be one of .* did you mean 'fp6_llm'"):
        CONFIG.preset("fp6-llm")
    with pytest.raises(lowbit.SpecError, match="of version 9 can't be read"):
        CONFIG.from_dict({"version": 9})
    with pytest.raises(lowbit.SpecError, match="a configuration has no 'bits'"):
        CONFIG.from_dict({"version": 1, "bits": 4})
