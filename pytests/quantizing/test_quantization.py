"""Quantizing: laws that hold for every method, and rounding to every format."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_weights import CONFIG, inputs_of, output_error, same, weight_of
from torch import Tensor

import lowbit
from lowbit.dialect.formats.dtypes import all_names, dtype
from lowbit.dialect.presets import IQ4_TABLE, dynamic_table
from lowbit.pylib.quantization import grid as grid_module
from lowbit.pylib.quantization.cells import Cells
from lowbit.pylib.quantization.config import FLOAT_ZEROS, METHODS, PRESETS
from lowbit.pylib.quantization.grid import Grid
from lowbit.pylib.quantization.hqq import NORM
from lowbit.pylib.reference import agrees, matmul, tolerance

CPU = torch.device("cpu")
PLAIN = [method for method in METHODS if method != "spqr"]  # whose outliers and levels test_spqr.py looks at


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
        clip=draw(st.sampled_from(("output", "mse", "max"))),
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


@pytest.mark.parametrize("name", all_names())
def test_nearest_code_of_every_format(name: str) -> None:
    """As `DType.encode`, ties and values out of range included."""
    t = dtype(name)
    levels = np.unique(t.values()[np.isfinite(t.values())])
    ties = (levels[1:] + levels[:-1]) / 2
    x = np.concatenate([levels, ties, levels * 1.01, [-1e6, 1e6]]).astype(np.float32)
    codes = Grid(CONFIG(name), 128, CPU).encode(torch.from_numpy(x)).numpy()
    assert (codes.astype(np.int64) & (t.codes - 1) == t.encode(x)).all()


@pytest.mark.parametrize("name", [name for name in all_names() if dtype(name).kind == "float"])
def test_nearest_level_of_every_float(name: str) -> None:
    """What the search for ranges rounds to is the level of the code: at every tie, a last place beside it, far out."""
    grid = Grid(CONFIG(name), 128, CPU)
    levels = torch.from_numpy(np.unique(dtype(name).values()[np.isfinite(dtype(name).values())])).double()
    ties = ((levels[1:] + levels[:-1]) / 2).float()
    beside = [ties.nextafter(torch.tensor(end)) for end in (-1e30, 1e30)]
    rest = [-0.0, 1e-45, 1e38, -1e38, torch.inf, -torch.inf]
    x = torch.cat([levels.float(), ties, *beside, levels.float() * 1.01, torch.tensor(rest)])
    assert torch.equal(grid.nearest(x.clone()), grid.decode(grid.encode(x)))


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
    result = lowbit.quantize(weight, replace(CONFIG.preset("mxfp4"), clip="ocp"))
    assert result.scales.float().flatten().tolist() == [1.0, 2.0**-4]
    assert float(result.dequantize()[0, 3]) == 6.0


SQUARES: Any = {"clip": "mse"}


@pytest.mark.parametrize(
    "config", [CONFIG("u3", 16, **SQUARES), CONFIG("nf4", 32, **SQUARES), CONFIG("i2", 48, scale="bf16", **SQUARES)]
)
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


@pytest.mark.parametrize("name", ["nf4", "iq4", "f2e2m0", "far", "two", "dynamic"])
def test_cells_are_those_of_bucketize(name: str) -> None:
    """Next to every bound and to every edge of a cell, far outside, and for infinities."""
    tables: dict[str, list[float]] = {
        "nf4": dtype("nf4").values().tolist(), "iq4": [float(x) for x in IQ4_TABLE], "f2e2m0": [-2.0, -1.0, 0.5, 1.0],
        "far": [-1e30, 0.0, 1e30], "two": [0.1, 0.3], "dynamic": sorted(dynamic_table()),
    }  # fmt: skip
    bounds = torch.tensor(tables[name])
    cells = Cells(bounds)
    edges = torch.linspace(float(bounds[0]), float(bounds[-1]), 5000)
    inf = torch.tensor(torch.inf)
    near = [bounds, bounds.nextafter(inf), bounds.nextafter(-inf), edges, edges.nextafter(inf), 3 * edges]
    x = torch.cat([*near, torch.tensor([-1e38, 1e38, -torch.inf, torch.inf, 0.0, -0.0])])
    assert torch.equal(cells.find(x), torch.bucketize(x, bounds, out_int32=True))
    assert int(cells.find(torch.tensor([torch.nan]))) in range(len(bounds) + 1)


def test_search_beats_the_whole_range() -> None:
    weight = weight_of(8, 128)
    for name in ("u2", "u4", "f4e2m1", "nf4"):
        errors = [
            float((weight - lowbit.quantize(weight, CONFIG(name, 64, clip=clip)).dequantize()).square().sum())
            for clip in ("output", "max")
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


@contextmanager
def defaults(device: str, kind: torch.dtype) -> Iterator[None]:
    """Sets torch's defaults, as code does that loads a model in 16 bits or on meta."""
    torch.set_default_dtype(kind)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


MADE = {name: PRESETS[name] for name in ("hqq4", "mxfp4", "nvfp4", "q3_k", "q4_k", "signround2", "spqr")}
MADE["beams"] = CONFIG("u3", 64, method="gptq", beams=2)


@pytest.mark.parametrize("config", MADE.values(), ids=MADE)
def test_torchs_defaults_do_not_matter(config: lowbit.QuantConfig) -> None:
    """New tensors have types and devices that do not depend on what is usual in the program around."""
    weight, inputs = weight_of(16, 256), inputs_of(64, 256)

    def quantized() -> list[Tensor]:
        result = lowbit.quantize(weight, replace(config, steps=2), inputs)
        w = result.pack()
        return [result.dequantize(), w.dequantize(), *w.tensors]

    expected = quantized()
    with defaults("meta", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(expected, quantized(), strict=True))


@pytest.mark.parametrize("target", ["cpu", "emulator:sm_80"])
@pytest.mark.parametrize("compute", [None, "i8"])
def test_torchs_defaults_do_not_matter_to_a_matmul(compute: Any, target: str) -> None:
    w = lowbit.quantize(weight_of(16, 128), CONFIG("u4", 128, compute=compute)).pack()
    x, mm = inputs_of(2, 128).half(), lowbit.compile(w.spec, target)
    expected = mm(x, w)
    with defaults("meta", torch.bfloat16):
        assert torch.equal(mm(x, w), expected)


@pytest.mark.parametrize("config", [*PRESETS.values(), CONFIG("lut1", table=(-1, 2))])
def test_configurations_are_json(config: lowbit.QuantConfig) -> None:
    assert CONFIG.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@settings(max_examples=20)
@given(st.floats(-1e4, 1e4, width=16), st.sampled_from(("u4", "u8", "i4", "nf4")), st.sampled_from(("float", None)))
def test_constant_weights(value: float, weight: Any, zeros: Any) -> None:
    result = lowbit.quantize(torch.full((2, 32), value), CONFIG(weight, 32, zeros, "f32"))
    assert torch.allclose(result.dequantize(), torch.full((2, 32), value), rtol=1e-2, atol=1e-30)


@pytest.mark.parametrize("method", ["gptq", "spqr"])
def test_calibrations_of_few_tokens(method: Any) -> None:
    """A Hessian that was summed elsewhere does not say of how many."""
    config = lowbit.QuantConfig("u3", 16, zeros="float" if method == "spqr" else "none", method=method)
    weight, x = torch.randn(32, 64), torch.randn(64, 64)
    with pytest.warns(UserWarning, match=r"fewer tokens than the layer has columns \(k=64\)"):
        lowbit.quantize(weight, config, x[:63])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for enough in (x, x[:2].T @ x[:2]):
            lowbit.quantize(weight, config, enough)


def test_awq_of_doubles() -> None:
    """A weight in f64 is rounded as the same numbers in f32 are, where scales are checked for their range, too."""
    config = lowbit.QuantConfig("f8e4m3", 16, zeros="float", scale="e4m3", method="awq")
    weight, x = (torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)) for rows in (8, 32))
    single, double = (lowbit.quantize(weight.to(kind), config, x.to(kind)) for kind in (torch.float32, torch.float64))
    assert torch.equal(single.codes, double.codes)
