"""What `lowbit.quantize` and its configurations refuse."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from quantized_weights import CONFIG, inputs_of, output_error, weight_of

import lowbit
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import SpecError
from lowbit.dialect.weight_format import SCALES
from lowbit.pylib.quantization.config import METHODS, QuantConfig

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
        ("weight is torch.float8_e4m3fn, codes of 8 bits; mult", lambda: lowbit.quantize(W.to(torch.float8_e4m3fn))),
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
        ("at most .* need scales below 0.002, the least of e4m3", lambda: lowbit.quantize(W / 1e4, IN_E4M3)),
        ("previous must be a norm or a linear layer with 64", lambda: AWQ.fold_into(torch.nn.ReLU())),
        ("target='cpu' must be a MatmulSpec, or what", lambda: AWQ.pack("cpu")),  # type: ignore[arg-type]
        (r"sizes=\[1, 1\] must be positive and add up to n=4", lambda: AWQ.split([1, 1])),
    ],
)
def test_errors_of_weights(message: str, call: Any) -> None:
    with pytest.raises(lowbit.LowbitError, match=message):
        call()


def test_small_weights_in_e4m3() -> None:
    """Zeros need no small scales, and neither do rows that have scales of their own."""
    assert not lowbit.quantize(torch.zeros(4, 64), IN_E4M3).dequantize().any()
    near = lowbit.quantize(W / 1e4, CONFIG.preset("nvfp4")).dequantize()
    assert (near - W / 1e4).norm() < 0.2 * (W / 1e4).norm()


@pytest.mark.parametrize(
    "size, config, limit",
    [
        (1e-8, CONFIG("u4", 32), "below 6e-08, the least of f16; use scale='bf16' or 'f32'"),
        (1e-8, CONFIG("u4", 32, zeros="offset"), "below 6e-08, the least of f16; use scale='bf16' or 'f32'"),
        (1e-6, CONFIG.preset("q6_k"), "below 6e-08, the least of f16; use scale='bf16' or 'f32' in bilevel="),
        (1e6, CONFIG("i4", 32, scale="e4m3"), "beyond 448, the largest of e4m3; use row_scales=True, as NVFP4 has"),
    ],
)
def test_weights_beyond_the_type_of_scales(size: float, config: lowbit.QuantConfig, limit: str) -> None:
    """Which were lost without a word."""
    weight = torch.cat([W] * 4, 1) * size
    with pytest.raises(lowbit.QuantizeError, match=f"weights of at most .* need scales {limit}"):
        lowbit.quantize(weight, config)
    if config.bilevel is None:
        near = lowbit.quantize(weight, replace(config, scale="f32")).dequantize()
        assert (near - weight).norm() < 0.2 * weight.norm()


@pytest.mark.parametrize(("size", "name"), [(1e-4, "q6_k"), (3e-4, "q6_k"), (3e-5, "q5_k")])
def test_small_scales_of_a_second_level(size: float, name: str) -> None:
    """In f16 they are rounded so far that it shows, which is said; in bf16 they are not."""
    weight = weight_of(16, 512) * size
    config = CONFIG.preset(name)
    with pytest.warns(UserWarning, match=SMALL) as told:
        rounded = lowbit.quantize(weight, config).dequantize()
    assert [warning.filename for warning in told] == [__file__]
    assert config.bilevel is not None
    exact = replace(config, bilevel=replace(config.bilevel, scale="bf16"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near = lowbit.quantize(weight, exact).dequantize()
    assert (near - weight).norm() < 0.91 * (rounded - weight).norm()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [0.1, 0.01, 1e-3])
@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_usual_scales_of_a_second_level(name: str, size: float) -> None:
    """Below 6e-5 they have fewer digits in f16 than others, but enough. Small blocks beside others add no error."""
    weight = weight_of(16, 512) * size
    lowbit.quantize(weight, CONFIG.preset(name))
    weight[:, 256:] /= 1e4
    weight[8:] = 0
    lowbit.quantize(weight, CONFIG.preset(name))
    assert not lowbit.quantize(weight * 0, CONFIG.preset(name)).dequantize().any()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [0.01, 1e-4])
def test_scales_of_methods_with_data(size: float) -> None:
    """SpQR's second level has zeros, beside which small scales say that all groups are alike. Codes that GPTQ chose are
    far from the weight."""
    weight, x = weight_of(16, 512) * size, inputs_of(600, 512)
    lowbit.quantize(weight, CONFIG.preset("spqr"), x)
    with pytest.warns(UserWarning, match=SMALL) if size < 0.01 else nullcontext():
        lowbit.quantize(weight, replace(CONFIG.preset("q6_k"), method="gptq"), x)


def test_codes_far_from_weights_in_e4m3() -> None:
    """Powers of two reach down to any weight with the least scale. What GPTQ moves to other columns is not lost."""
    config, x = CONFIG("f6e5m0", 16, scale="e4m3", method="gptq"), inputs_of(40, 64)
    result = lowbit.quantize(W, config, x)
    assert (result.dequantize() - W).norm() > W.norm() / 2
    assert output_error(W, result.dequantize(), x) < 0.1 * float((W @ x.T).square().sum())


SMALL = "scales of a second level that are a few times 6e-08, the least of f16: .* use scale='bf16' .* in bilevel="
HUGE = W.clone()
HUGE[3, 40] = 1e7
GPTQ, IN_E4M3 = CONFIG("u4", 32, method="gptq"), CONFIG("u4", 32, scale="e4m3")
AWQ = lowbit.quantize(W, CONFIG("u4", 32, method="awq"), inputs_of(100, 64))


@pytest.mark.parametrize(
    "message, change",
    [
        ("unknown weight format 'u9'", {"weight": "u9"}),
        ("weight=4 must be the name of a format", {"weight": 4}),
        ("group_size=8 must be an integer of at least 16", {"group_size": 8}),
        ("group_size=True must", {"group_size": True}),
        ("method='hqqq' must be one of .* did you mean 'hqq'", {"method": "hqqq"}),
        ("method='GPTQ' must be one of .* did you mean 'gptq'", {"method": "GPTQ"}),
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


def test_whatever_a_configuration_takes_can_be_quantized() -> None:
    """What no quantizer serves is refused when the configuration is made, by the name of a field."""
    torch.manual_seed(0)
    weight, inputs, accepted = torch.randn(2, 64), torch.randn(64, 64), 0
    levels = (None, Bilevel(groups=2))
    for format_, method, zeros, scale, level in product(
        ("u4", "f4e2m1"), METHODS, ("none", "int", "float", "offset"), SCALES, levels
    ):
        try:
            config = QuantConfig(format_, 16, zeros, scale, method, bilevel=level, steps=1, clip="max")
        except SpecError as error:
            assert re.search(r"(zeros|scale|method|bilevel)=", str(error))
            continue
        assert torch.isfinite(lowbit.quantize(weight, config, inputs).dequantize()).all()
        accepted += 1
    assert accepted > 100
