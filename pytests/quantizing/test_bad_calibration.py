"""Calibration that says little, or can't be used: for every method that looks at inputs, and for rounding without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import QuantConfig

K, ROWS, TOKENS = 256, 32, 600
U4, Q4_K = QuantConfig("u4", 64), QuantConfig.preset("q4_k")
WITH_DATA = {
    "GPTQ": replace(U4, method="gptq"),
    "GPTQ, beams": replace(U4, method="gptq", beams=4),
    "GPTQ, nf4": QuantConfig("nf4", 64, method="gptq"),
    "GPTQ, q4_k": replace(Q4_K, method="gptq"),
    "AWQ": replace(U4, method="awq"),
    "importances": replace(U4, calibration="importance"),
    "importances, q4_k": replace(Q4_K, calibration="importance"),
    "ranges": replace(U4, calibration="hessian"),
    "ranges, q4_k": replace(Q4_K, calibration="hessian"),
    "SpQR": QuantConfig.preset("spqr"),
    "SignRound": QuantConfig("u4", 64, method="signround", steps=20),
}
ALL = {**WITH_DATA, "rounding": U4, "q4_k": Q4_K}


def inputs() -> Tensor:
    return torch.randn(TOKENS, K, generator=torch.Generator().manual_seed(0))


def weight() -> Tensor:
    return torch.randn(ROWS, K, generator=torch.Generator().manual_seed(1)) / 16


def changed(columns: slice, value: float) -> Tensor:
    x = inputs()
    x[:, columns] = value
    return x


USABLE = {
    "a constant column": changed(slice(3, 4), 5.0),
    "a constant group": changed(slice(64, 128), -1.0),
    "all constant": changed(slice(None), 2.0),
    "columns of zero": changed(slice(0, 128), 0.0),
    "all zero": changed(slice(None), 0.0),
}


@pytest.mark.filterwarnings("ignore:a calibration has fewer tokens")
@pytest.mark.parametrize("given", USABLE)
@pytest.mark.parametrize("method", ALL)
def test_inputs_that_say_little(method: str, given: str) -> None:
    """The output stays as near as by rounding, and columns that inputs do not reach keep their weights."""
    w, x, config = weight(), USABLE[given], ALL[method]
    found = lowbit.quantize(w, config, x).dequantize() - w
    plain = replace(config, method="rtn", calibration=None, act_order=False, beams=1)
    rounded = lowbit.quantize(w, plain).dequantize() - w
    assert bool(found.isfinite().all())
    assert float((x @ found.T).norm()) <= 1.05 * float((x @ rounded.T).norm()) + 1e-3
    assert float(found.norm()) < 0.25 * float(w.norm())


@pytest.mark.parametrize("given", [torch.zeros(K), torch.eye(K)[3], torch.ones(K).index_fill(0, torch.arange(64), 0.0)])
@pytest.mark.parametrize("method", ["importances", "importances, q4_k"])
def test_importances_of_zero(method: str, given: Tensor) -> None:
    w = weight()
    for calibration in (lowbit.Calibration.from_importance(given), given.diag()):
        found = lowbit.quantize(w, ALL[method], calibration).dequantize()
        assert float((found - w).norm()) < 0.15 * float(w.norm())


UNUSABLE: dict[str, tuple[Any, str]] = {
    "NaN": (inputs().index_fill(0, torch.tensor([7]), torch.nan), "x has NaN or inf in token 7; drop it, or"),
    "inf": (inputs().index_fill(0, torch.tensor([9]), torch.inf), "x has NaN or inf in token 9; drop it, or"),
    "other columns": (inputs()[:, :100], r"x must be \[..., k=256\], not \[600, 100\]; give inputs of this layer"),
    "integers": (torch.ones(4, K, dtype=torch.int64), r"x must be a tensor of floats \[..., k=256\], not torch.int64"),
    "a list": ([inputs()], r"x must be a tensor of floats \[..., k=256\], not list"),
    "no tokens": (lowbit.Calibration(K), "has no tokens; add inputs of the layer before quantizing"),
    "another layer's": (lowbit.Calibration.from_hessian(torch.eye(100)), r"\[..., 100\], but the weight has k=256"),
    "nothing": (None, "needs calibration=, inputs of the layer .*; without any use 'hqq' or 'rtn'"),
}


@pytest.mark.parametrize("given", UNUSABLE)
@pytest.mark.parametrize("method", ALL)
def test_calibration_that_can_not_be_used(method: str, given: str) -> None:
    """It is an error that says what to do; rounding without data does not look at it."""
    calibration, message = UNUSABLE[given]
    if method not in WITH_DATA:
        lowbit.quantize(weight(), ALL[method], calibration)
        return
    with pytest.raises(lowbit.QuantizeError, match=message):
        lowbit.quantize(weight(), WITH_DATA[method], calibration)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(K, 64), nn.ReLU(), nn.Linear(64, 64)
    return nn.Sequential(*layers).half().requires_grad_(False)


OF_MODELS = {
    "NaN": (inputs().index_fill(0, torch.tensor([7]), torch.nan), "0: .* NaN.*; drop it, or .* bf16 or f32"),
    "other columns": (inputs()[:, :100], r"^0: (x must be \[..., k=256\], not|the model can't be run on input 0)"),
}


@pytest.mark.parametrize("given", OF_MODELS)
@pytest.mark.parametrize("method", WITH_DATA)
def test_errors_in_models_name_the_layer(method: str, given: str) -> None:
    """And the fix; the model stays as it was."""
    calibration, message = OF_MODELS[given]
    config, tried = WITH_DATA[method], model()
    before = list(tried)
    with pytest.raises(lowbit.QuantizeError, match=message):
        lowbit.quantize_(tried, config, calibration=[calibration.half()], progress=False)
    assert all(layer is old for layer, old in zip(tried, before, strict=True))


@pytest.mark.filterwarnings("ignore:a calibration has fewer tokens")
@pytest.mark.parametrize("given", USABLE)
@pytest.mark.parametrize("method", ["GPTQ", "AWQ", "importances"])
def test_models_with_inputs_that_say_little(method: str, given: str) -> None:
    tried, x = model(), USABLE[given].half()
    expected = tried(x)
    lowbit.quantize_(tried, WITH_DATA[method], calibration=[x], progress=False)
    assert float((tried(x) - expected).norm()) <= 0.15 * float(expected.norm()) + 1e-3
