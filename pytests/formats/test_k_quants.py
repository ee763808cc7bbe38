"""Scales of two levels: K-quants, and NVFP4 with a factor for each row."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowbit
from lowbit import Bilevel, QuantConfig, SpecError
from lowbit.pylib.quantization import k_quants
from lowbit.pylib.quantization.calibration import output_errors
from lowbit.pylib.quantization.config import PRESETS
from lowbit.pylib.quantization.grid import Grid
from lowbit.pylib.quantization.losses import counts

NAMES = [name for name, preset in PRESETS.items() if preset.by_k_quant]
COLUMNS = 512


def weight_of(rows: int, columns: int = COLUMNS, seed: int = 0) -> Tensor:
    """Weights some of whose groups are much larger than others."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(rows, columns // 16, generator=generator).exp().repeat_interleave(16, 1)
    return torch.randn(rows, columns, generator=generator) * spread / 32


def errors(weight: Tensor, result: lowbit.QuantizedWeight) -> Tensor:
    """Returns the squared error of each block of 256 columns."""
    return (result.dequantize() - weight).double().square().unflatten(1, (-1, 256)).sum(-1)


@settings(max_examples=25)
@given(st.sampled_from(NAMES), st.sampled_from(("output", "mse", "max")), st.integers(0, 2**31))
def test_laws(name: str, clip: Any, seed: int) -> None:
    """What is packed means what `dequantize` says, bit for bit; strides don't matter, nor does a weight of zeros."""
    weight = weight_of(6, seed=seed)
    weight[1], weight[2], weight[3, :48], weight[4] = 0, 0.25, weight[3, :48].abs(), -weight[4].abs()
    result = lowbit.quantize(weight, replace(QuantConfig.preset(name), clip=clip))
    packed = result.pack()  # which refuses codes out of range
    assert packed.spec == lowbit.MatmulSpec.preset(name, 6, COLUMNS)
    assert torch.equal(packed.dequantize(), result.dequantize())
    assert torch.equal(packed.unpack(), result.codes) and not result.dequantize()[1].any()
    again = lowbit.quantize(weight.T.contiguous().T, result.config)
    assert torch.equal(again.codes, result.codes) and torch.equal(again.scales, result.scales)


@pytest.mark.parametrize("name", NAMES)
def test_search_is_worth_it(name: str) -> None:
    """No block is worse than by the whole ranges of its groups, and all in all there is a gain."""
    weight, config = weight_of(24), QuantConfig.preset(name)
    searched, ranges = (errors(weight, lowbit.quantize(weight, replace(config, clip=c))) for c in ("mse", "max"))
    assert (searched <= ranges * (1 + 1e-5)).all()
    assert float(searched.sum()) < 0.9 * float(ranges.sum())


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("q2_k", "q4_k", "q5_k")])
def test_second_levels_fit_the_codes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block has a larger error by them, all in all it is less, and signs stay those of GGUF."""
    weight, config = weight_of(24), replace(QuantConfig.preset(name), clip="mse")
    found = lowbit.quantize(weight, config)
    fitted = errors(weight, found)
    monkeypatch.setattr(k_quants, "REFITS", 0)
    before = errors(weight, lowbit.quantize(weight, config))
    assert (fitted <= before * (1 + 1e-5)).all()
    assert float(fitted.sum()) < 0.996 * float(before.sum())
    supers = found.second_level
    assert bool((supers["scale_scales"] >= 0).all() and (supers["offset_scales"] <= 0).all())


@pytest.mark.parametrize("name", ["q3_k", "q6_k"])
def test_gptq_searches_more_ranges(name: str) -> None:
    """Its scales have less error before codes are chosen by it, all in all; with offsets all methods take as many."""
    weight, config = weight_of(48), QuantConfig.preset(name)

    def error(method: Any) -> float:
        grid = Grid(replace(config, method=method).multiplied_in("f16"), COLUMNS, weight.device)
        found = k_quants.k_quant(weight, grid).dequantize(grid)
        return float(((found - weight).square() * counts(weight, grid).flatten(1)).double().sum())

    assert error("gptq") < 0.9995 * error("rtn")


@pytest.mark.parametrize("name", NAMES)
def test_larger_scales_do_not_matter(name: str) -> None:
    """A power of two in the weight is one in the second level, and changes nothing else."""
    weight = weight_of(4)
    small, large = (lowbit.quantize(w, QuantConfig.preset(name)) for w in (weight, 64 * weight))
    assert torch.allclose(64 * small.dequantize(), large.dequantize(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("name", "beams"), [*((name, 1) for name in NAMES), ("q2_k", 3), ("iq4_xs", 3)])
def test_gptq_has_less_output_error(name: str, beams: int) -> None:
    """With the two levels of the type: no row is worse than rounded to nearest, and most are far better."""
    weight, generator = weight_of(24), torch.Generator().manual_seed(5)
    weight[1], weight[2], weight[3, :48] = 0, 0.25, 0
    x = torch.randn(2048, 32, generator=generator) @ torch.randn(32, COLUMNS, generator=generator)
    x += torch.randn(x.shape, generator=generator)
    config = QuantConfig.preset(name)
    rounded, result = (lowbit.quantize(weight, c, x) for c in (config, replace(config, method="gptq", beams=beams)))
    packed = result.pack()
    assert packed.spec == rounded.spec() and torch.equal(packed.dequantize(), result.dequantize())
    hessian = (x.T @ x).double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(COLUMNS)
    old, new = (output_errors((each.dequantize() - weight).double(), hessian) for each in (rounded, result))
    assert (new <= old * (1 + 1e-4)).all() and float(new[4:].sum()) < 0.3 * float(old[4:].sum())


def test_nearly_the_best_scale_and_offset() -> None:
    """Other scales and offsets of some groups have no much smaller error: all of a fine grid are tried."""
    weight, found, least = weight_of(6, 32, seed=3), 0.0, 0.0
    config = QuantConfig("u3", 32, "offset", "f32", clip="mse")
    for w, result in zip(weight, lowbit.quantize(weight, config).dequantize()):
        low, high = float(w.min()), float(w.max())
        best = np.inf
        for part, first in product(np.linspace(0.6, 1.1, 60), np.linspace(-0.15, 0.35, 60)):
            s, o = part * (high - low) / 7, low + first * (high - low)
            levels = ((w - o) / s).round().clamp(0, 7)
            best = min(best, float((levels * s + o - w).square().sum()))
        found, least = found + float((result - w).square().sum()), least + best
    assert found < 1.06 * least


@pytest.mark.parametrize("name", ["q4_k", "q2_k"])
def test_offsets_are_never_positive(name: str) -> None:
    """So 0 is between the levels of every group, and GGUF's unsigned codes can hold them."""
    result = lowbit.quantize(weight_of(4).abs() + 0.1, QuantConfig.preset(name))
    assert result.offsets is not None and result.offsets.dtype is torch.uint8
    assert (result.second_level["offset_scales"] <= 0).all() and (result.second_level["scale_scales"] >= 0).all()


def test_other_formats_and_levels() -> None:
    """The second level is one of the configuration, not only one of GGUF's."""
    weight = weight_of(5)
    config = QuantConfig("nf4", 64, scale="u8", bilevel=Bilevel(groups=2, scale="f32"))
    result = lowbit.quantize(weight, config)
    assert result.second_level["scale_scales"].dtype is torch.float32
    assert torch.equal(result.pack().dequantize(), result.dequantize())
    one_level = lowbit.quantize(weight, QuantConfig("nf4", 64, scale="f32"))
    assert float(errors(weight, result).sum()) < 1.05 * float(errors(weight, one_level).sum())


def test_configuration_as_json() -> None:
    for name in NAMES:
        config = QuantConfig.preset(name)
        assert QuantConfig.from_dict(config.to_dict()) == config and config.to_dict()["weight"] == config.weight


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale": "u6"}, r"scale='u6' is a code: it needs a second level"),
        ({"bilevel": Bilevel(groups=8)}, r"scale='f16' must be one of 'u3', .* with bilevel="),
        ({"scale": "e4m3", "bilevel": Bilevel(), "zeros": "none"}, r"scale='e4m3' can't be quantized with bilevel=; "),
        ({"scale": "u6", "bilevel": Bilevel(groups=8), "zeros": "int"}, r"bilevel= goes with zeros='none' or 'offset'"),
        ({"scale": "lut8", "bilevel": Bilevel(1, 4, table=(0.5,) * 256)}, r"rows=1 and no zeros, offsets or table"),
        ({"scale": "u6", "bilevel": Bilevel(rows=16), "zeros": "none"}, r"rows=1 and no zeros, offsets or table"),
        ({"scale": "u6", "bilevel": Bilevel(), "zeros": "none", "group_size": None}, r"bilevel= needs groups"),
        ({"zeros": "offset", "method": "awq"}, r"method='awq' has no zeros='offset'; use method='rtn' or 'gptq'"),
        ({"row_scales": True}, r"row_scales=True goes with scale='e4m3', zeros='none' and method='rtn' or 'gptq'"),
        ({"scale": "u6", "bilevel": 3}, r"bilevel=3 must be a Bilevel"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        QuantConfig(**{"group_size": 32, **fields})


def test_sizes_that_blocks_do_not_divide() -> None:
    with pytest.raises(SpecError, match=r"bilevel: groups=8 must divide the 4 groups of a row"):
        lowbit.quantize(weight_of(4, 128), QuantConfig.preset("q4_k"))
    model = nn.Sequential(nn.Linear(128, 16), nn.Linear(80, 16), nn.Linear(256, 16)).bfloat16()
    lowbit.quantize_(model, QuantConfig.preset("q4_k"), per_row_if_indivisible=True)
    fewer, per_row, whole = (layer.spec for layer in model if isinstance(layer, lowbit.LowbitLinear))
    assert whole == lowbit.MatmulSpec.preset("q4_k", 16, 256, act="bf16", bias=True)
    assert whole.bilevel and fewer == replace(whole, k=128, bilevel=replace(whole.bilevel, groups=4))
    assert (per_row.bilevel, per_row.scale, per_row.group_size, per_row.zeros) == (None, "f16", None, "offset")


def test_large_numbers_are_errors() -> None:
    weight = weight_of(4)
    weight[2, 300] = 1e9
    with pytest.raises(lowbit.QuantizeError, match=r"group 1 of row 2 needs a scale beyond f16; use scale='bf16'"):
        lowbit.quantize(weight, QuantConfig.preset("q4_k"))


@pytest.mark.parametrize("size", [2.0**-30, 1.0, 2.0**20])
def test_rows_of_any_size(size: float) -> None:
    """NVFP4's scales have few exponents: a factor for each row makes them fit, at any magnitude equally well."""
    weight, config = weight_of(6), QuantConfig.preset("nvfp4")
    weight[2] *= 1000
    weight[3] = 0
    result, usual = lowbit.quantize(weight * size, config), lowbit.quantize(weight, config)
    assert torch.equal(result.dequantize(), usual.dequantize() * size)
    packed = result.pack()
    assert packed.spec == lowbit.MatmulSpec.preset("nvfp4", 6, COLUMNS)
    assert torch.equal(packed.dequantize(), result.dequantize())
    relative = (result.dequantize() / size - weight).norm(dim=1) / weight.norm(dim=1).clamp(min=1e-9)
    assert float(relative.max()) < 0.12
    assert torch.equal(torch.cat([part.dequantize() for part in result.split([2, 4])]), result.dequantize())


def test_split() -> None:
    result = lowbit.quantize(weight_of(10), QuantConfig.preset("q4_k"))
    parts = result.split([3, 7])
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), result.dequantize())
    assert torch.equal(parts[1].pack().dequantize(), parts[1].dequantize())
