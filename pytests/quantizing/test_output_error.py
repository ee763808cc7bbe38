"""The default keeps outputs, not weights: layers in which few weights are large, and inputs go together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import QuantConfig
from lowbit.pylib.quantization import rtn

SEEDS = range(3)


def heavy(seed: int, rows: int = 96, k: int = 512) -> tuple[Tensor, Tensor]:
    """Returns a weight of kurtosis 15, and inputs that go together where its weights are large, as those of second
    feed-forward layers do: all of a row's large weights add up for what the inputs share."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, k, generator=generator) * torch.randn(rows, k, generator=generator).mul(0.6).exp()
    sign = torch.randn(k, generator=generator).sign()
    weight = torch.where(weight.abs() > 2.5, weight.abs() * sign, weight)
    x = torch.randn(3000, k, generator=generator) + 0.8 * sign * torch.randn(3000, 1, generator=generator)
    return weight / 32, x * torch.rand(k, generator=generator).add(0.2)


def usual(seed: int) -> tuple[Tensor, Tensor]:
    """Returns a weight like that of the small model of docs/quality.md, and inputs that hardly depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(96, 512, generator=generator) / 32, torch.randn(3000, 512, generator=generator)


def uneven(seed: int) -> tuple[Tensor, Tensor]:
    """Returns the same with inputs of which some columns are far larger than others."""
    weight, x = usual(seed)
    return weight, x * torch.rand(512, generator=torch.Generator().manual_seed(seed)).pow(4).mul(5).add(0.1)


def error(weight: Tensor, found: lowbit.QuantizedWeight, x: Tensor) -> float:
    """Returns the squared error of the output, on inputs that no method saw."""
    return float(((weight - found.dequantize()) @ x[2000:].T).double().square().sum())


def ratio(config: QuantConfig, other: QuantConfig, seed: int, kind: Any = heavy, seen: bool = False) -> float:
    """Returns the output error with one configuration over that with another; `seen`: on the calibration itself."""
    weight, x = kind(seed)
    x = torch.cat([x[:2000], x[:2000]]) if seen else x
    one, two = (error(weight, lowbit.quantize(weight, each, x[:2000]), x) for each in (config, other))
    return one / two


def test_the_layers_are_of_two_kinds() -> None:
    (tailed, _), (normal, _) = heavy(0), usual(0)
    kurtosis = [float((w**4).mean() / (w**2).mean() ** 2) for w in (tailed, normal)]
    assert kurtosis[0] > 10 and 2.8 < kurtosis[1] < 3.2


FORMATS = [("u4", 128), ("u3", 128), ("u2", 64), ("i4", 32), ("nf4", 64), ("f4e2m1", 32)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("weight", "group"), FORMATS)
def test_the_default_is_never_worse_than_the_whole_range(weight: Any, group: int, seed: int) -> None:
    config = QuantConfig(weight, group)
    for kind in (heavy, usual):
        assert ratio(config, replace(config, clip="max"), seed, kind) < 1.02


@pytest.mark.parametrize(("weight", "group"), [("u3", 128), ("u2", 64)])
def test_least_weight_error_costs_output_here(weight: Any, group: int) -> None:
    """So that the test above would find it."""
    config = QuantConfig(weight, group, clip="mse")
    assert min(ratio(config, replace(config, clip="max"), seed) for seed in SEEDS) > (1.03 if weight == "u3" else 1.5)
    assert max(ratio(replace(config, clip="output"), config, seed) for seed in SEEDS) < 0.92


def sticking_out(seed: int) -> tuple[Tensor, Tensor]:
    """Returns a weight one of whose columns is 40 times as large as the others: kurtosis above 200."""
    weight, x = heavy(seed)
    weight[:, 7] = torch.randn(len(weight), generator=torch.Generator().manual_seed(seed)).sign() * 40 / 32
    return weight, x


@pytest.mark.parametrize("weight", ["u8", "u6"])
def test_fine_steps_are_not_fitted_to_the_largest_weight(weight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 6 and 8 bits and a scale per row there is little to gain, and much to lose by chance."""
    config = QuantConfig(weight, None)
    kinds = [(kind, seed) for kind in (heavy, usual, sticking_out) for seed in SEEDS]
    kept = [ratio(config, replace(config, clip="max"), seed, kind) for kind, seed in kinds]
    monkeypatch.setattr(rtn, "_worth_it", lambda weight, grid, found, *losses: found)
    every = [ratio(config, replace(config, clip="max"), seed, kind) for kind, seed in kinds]
    assert max(kept) < 1.03 and max(every) > 1.04


@pytest.mark.parametrize("kind", [heavy, usual])
@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("weight", ["u2", "u3", "u4"])
def test_methods_with_data_choose_by_output(weight: Any, method: Any, kind: Any) -> None:
    """The best of several ranges for each row is no worse than the whole one for all."""
    config = QuantConfig(weight, 64, method=method)
    assert ratio(config, replace(config, clip="max"), 0, kind, seen=True) < 0.98
    assert ratio(config, replace(config, clip="max"), 0, kind) < 1.0
    assert ratio(config, replace(config, clip="mse"), 0, kind) < 1.06


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "iq4_xs", "q4_0", "q4_1", "q5_0", "iq4_nl", "mxfp4"])
def test_importances_without_a_hessian(name: str) -> None:
    """Which K-quants and all other formats take, as llama.cpp does with an importance matrix."""
    plain = QuantConfig.preset(name)
    data = {kind: replace(plain, calibration=kind) for kind in ("importance", "hessian")}
    for config in data.values():
        assert sum(ratio(config, plain, seed) for seed in SEEDS) / len(SEEDS) < 1.06
    assert ratio(data["hessian"], plain, 0, seen=True) < 0.99
    assert ratio(data["importance"], plain, 0, uneven) < (0.99 if name == "mxfp4" else 0.9)


def test_importances_given_as_such() -> None:
    weight, x = heavy(0)
    config = replace(QuantConfig.preset("q4_k"), calibration="importance")
    sums = lowbit.Calibration(512, only_importance=True)
    for batch in x.split(100):
        sums.add(batch)
    assert sums.hessian.shape == (512,)
    given = x, x.T @ x, sums, lowbit.Calibration.from_importance(x.square().sum(0))
    first, *others = (lowbit.quantize(weight, config, each).dequantize() for each in given)
    for other in others:
        assert torch.allclose(first, other, atol=2e-2) and float((first - other).norm() / first.norm()) < 5e-3


def test_importances_of_zero() -> None:
    """Columns that inputs do not reach are rounded, too, and without any importance all count alike."""
    weight, x = usual(0)
    config = QuantConfig("u4", 64, calibration="importance")
    none = lowbit.quantize(weight, config, torch.zeros(4, 512))
    assert float((none.dequantize() - weight).norm() / weight.norm()) < 0.12
    x[:, ::2] = 0
    some = lowbit.quantize(weight, config, x)
    assert float((some.dequantize() - weight)[:, ::2].norm() / weight[:, ::2].norm()) < 0.2
    weight[:, 64:128] = 0.25
    constant = lowbit.quantize(weight, config, x).dequantize()
    assert torch.allclose(constant[:, 64:128], weight[:, 64:128], rtol=0.01)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "calibration='importance' needs calibration=, inputs of the layer"),
        (torch.ones(4, 100), r"x must be \[..., k=512\], not \[4, 100\]"),
        (torch.full((4, 512), torch.nan), "x has NaN or inf in token 0"),
        (lowbit.Calibration.from_importance(torch.ones(100)), "the weight has k=512 columns"),
        (lowbit.Calibration(512, only_importance=True), "the calibration has no tokens"),
    ],
)
def test_importances_that_can_not_be_used(given: Any, message: str) -> None:
    with pytest.raises(lowbit.QuantizeError, match=message):
        lowbit.quantize(usual(0)[0], QuantConfig("u4", 64, calibration="importance"), given)


@pytest.mark.parametrize("wrong", [-torch.ones(4), torch.full((4,), torch.inf), torch.ones(4, 4)])
def test_what_is_no_importance(wrong: Tensor) -> None:
    with pytest.raises(lowbit.QuantizeError, match="importances must be finite numbers"):
        lowbit.Calibration.from_importance(wrong)


def test_what_importances_do_not_serve() -> None:
    sums = lowbit.Calibration.from_importance(torch.ones(512))
    with pytest.raises(lowbit.QuantizeError, match="has importances alone; use QuantConfig"):
        lowbit.quantize(usual(0)[0], QuantConfig("u4", 64, method="gptq"), sums)
    with pytest.raises(lowbit.QuantizeError, match="reference= needs the Hessian"):
        lowbit.Calibration(4, only_importance=True).add(torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(lowbit.SpecError, match="calibration='importance' is for method='rtn'"):
        QuantConfig("u4", 64, method="gptq", calibration="importance")
    with pytest.raises(lowbit.SpecError, match="clip='ocp' is a rule for scale='e8m0', not 'f16'"):
        QuantConfig("u4", 64, clip="ocp")


@pytest.mark.parametrize("weight", ["i2", "i4"])
def test_scales_of_either_sign(weight: Any) -> None:
    """The side with one level more goes to the larger weights: an extreme above 0 is no reason for a coarser scale."""
    values = torch.linspace(-7, 8, 32).expand(2, 32) * torch.tensor([[1.0], [-1.0]])
    found = lowbit.quantize(values, QuantConfig(weight, 32))
    assert (found.scales[:, 0] < 0).tolist() == [True, False]
    assert torch.equal(found.dequantize()[0], -found.dequantize()[1])
    assert torch.equal(found.pack().dequantize(), found.dequantize())
    positive = lowbit.quantize(values, QuantConfig(weight, 32, clip="mse"))
    assert (positive.scales > 0).all()
    assert (found.dequantize() - values).norm() < (positive.dequantize() - values)[0].norm() * 2**0.5


def test_powers_of_two_as_scales() -> None:
    """Each group takes the power of two with the least error, where the specification's takes the one below."""
    for kind in (heavy, usual):
        assert ratio(QuantConfig.preset("mxfp4"), replace(QuantConfig.preset("mxfp4"), clip="ocp"), 0, kind) < 0.96


def test_models_are_calibrated_by_importances() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    x, weight = torch.randn(500, 256) * torch.rand(256).pow(3), model[0].weight.detach().clone()
    config = QuantConfig("u3", 64, calibration="importance")
    with pytest.raises(lowbit.QuantizeError, match="0: calibration='importance' needs calibration=, a list of inputs"):
        lowbit.quantize_(model, config, act="f16")
    lowbit.quantize_(model, config, calibration=[x], act="f16", progress=False)
    expected = lowbit.quantize(weight, config.multiplied_in("f16"), x)
    assert torch.equal(model[0].dequantize(), expected.dequantize(torch.float16))  # type: ignore[operator]


def test_small_weights_are_searched_alike() -> None:
    """Powers do not leave f32: a row's weights count relative to its largest."""
    weight, _ = heavy(0)
    config = QuantConfig("u3", 64, scale="f32")
    large, small = (lowbit.quantize(weight * size, config) for size in (1.0, 2.0**-60))
    assert torch.equal(large.codes, small.codes)
