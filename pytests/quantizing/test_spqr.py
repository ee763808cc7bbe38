"""SpQR: its definition on small cases, and what its parts are for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit.dialect.errors import QuantizeError, SpecError
from lowbit.pylib.nn.fuse import concatenated
from lowbit.pylib.quantization import gptq
from lowbit.pylib.quantization import grid as grid_module
from lowbit.pylib.quantization.gptq import damped, factor, ordered_factor
from lowbit.pylib.quantization.grid import Grid
from lowbit.pylib.quantization.spqr import statistics
from lowbit.pylib.quantization.spqr_search import Group, multiplied
from lowbit.pylib.quantization.two_levels import coded
from lowbit.pylib.weights.packed import pack

F64 = torch.float64


def layer(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight with a few weights that are much larger than all others, and inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator)
    weight = torch.where(torch.rand(n, k, generator=generator) < 0.03, 6 * weight, weight)
    inputs = torch.randn(4 * k, k, generator=generator) * (torch.rand(k, generator=generator) + 0.2)
    return weight, inputs @ (torch.eye(k) + 0.3 * torch.randn(k, k, generator=generator) / k**0.5)


def output_error(weight: Tensor, rounded: Tensor, inputs: Tensor) -> float:
    return float(((weight - rounded) @ inputs.T).square().sum())


def range_of(values: Tensor, bits: int) -> tuple[float, float]:
    scale = (values.max() - values.min()) / (2**bits - 1)
    return float(scale), float(-values.min() / scale)


def rounded(values: Tensor, scale: float, zero: float, bits: int) -> Tensor:
    return ((values / scale + zero).round().clamp(0, 2**bits - 1) - zero) * scale


def stored(values: Tensor, config: lowbit.QuantConfig) -> Tensor:
    """The values of codes: as they are where the second level is stored, else in f16."""
    numbers = coded(values, config.scale_rows, config.scale_bits).values(config.scale_rows)
    return (numbers if config.scale_rows == 16 else numbers.half()).double()


def by_definition(weight: Tensor, hessian: Tensor, config: lowbit.QuantConfig) -> tuple[Tensor, Tensor]:
    """The paper's algorithm weight by weight, without blocks of columns: the weight as it is multiplied, and a mask of
    its outliers."""
    u, bits, size = factor(damped(hessian.double(), config.damping)[0]), config.dtype.bits, config.group_size or 0
    rest, d = weight.double().clone(), u.diagonal()
    relative = config.outlier_threshold or torch.inf
    limit = relative * float((rest.var(dim=0, correction=0) / d.square()).mean())
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    n, k = weight.shape
    for j in range(k):
        if j % size == 0:
            scales, zeros = torch.empty(n, dtype=F64), torch.empty(n, dtype=F64)
            for row in range(n):
                group, weights = rest[row, j : j + size], d[j : j + size]

                def error(part: Tensor, at: Tensor) -> float:
                    return float((((part - rounded(part, *range_of(part, bits), bits)) / at) ** 2).sum())

                keep = [[i for i in range(size) if i != left] for left in range(size)]
                gains = [error(group, weights) - error(group[some], weights[some]) for some in keep]
                likely = torch.tensor(gains) > limit
                others = torch.where(likely, group[~likely].mean(), group)
                scales[row], zeros[row] = range_of(others, bits)
            scales, zeros = stored(scales.float(), config), stored(zeros.float(), config)
        levels = (rest[:, j] / scales + zeros).round().clamp(0, 2**bits - 1)
        difference = rest[:, j] - (levels - zeros) * scales
        mask[:, j] = (difference / d[j]) ** 2 > limit
        difference = torch.where(mask[:, j], difference - difference.half().double(), difference)
        rest[:, j + 1 :] -= (difference / d[j])[:, None] * u[j, j + 1 :]
        rest[:, j] -= difference
    return rest, mask


def best_first(hessian: Tensor) -> Tensor:
    """Columns so that each is that, of those not yet taken, whose error the others make up for worst."""
    left, order = list(range(len(hessian))), []
    while left:
        error = 1 / hessian[left][:, left].inverse().diagonal()  # squared, that is left of an error of 1
        order.append(left.pop(int(error.argmax())))
    return torch.tensor(order)


@pytest.mark.parametrize("block", [128, 16])
def test_order_and_factor(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "BLOCK", block)
    _, inputs = layer(1, 40)
    hessian = inputs.double().T @ inputs.double()
    order, u = ordered_factor(hessian)
    assert torch.equal(order, best_first(hessian)) and torch.equal(u, u.triu())
    assert torch.allclose(u.T @ u, hessian[order][:, order].inverse(), rtol=1e-9)
    assert torch.allclose(u, factor(hessian[order][:, order]), rtol=1e-9)
    ordered, plain = (1 / d.diagonal().square() for d in (u, factor(hessian)))
    assert torch.allclose(ordered.log().sum(), plain.log().sum()) and ordered.sum() < plain.sum()


@pytest.mark.parametrize(("threshold", "rows"), [(0.1, 16), (0.5, 8), (None, 16)])
@pytest.mark.parametrize("act_order", [False, True])
def test_spqr_by_its_definition(threshold: float | None, rows: int, act_order: bool) -> None:
    weight, inputs = layer(20, 48)
    config = lowbit.QuantConfig(
        "u3", 16, method="spqr", clip="max", outlier_threshold=threshold, act_order=act_order, scale_rows=rows
    )
    result = lowbit.quantize(weight, config, inputs)
    hessian = inputs.double().T @ inputs.double()
    order = best_first(damped(hessian, config.damping)[0]) if act_order else torch.arange(48)
    expected, mask = by_definition(weight[:, order], hessian[order][:, order], config)
    found = result.dequantize()[:, order].double()
    same = (found - expected).abs() < 1e-3 * weight.abs().max()
    assert same.double().mean() > 0.99  # f32 and f64 may round a tie, and then the rest of a row, to different codes
    if threshold is None:
        assert result.outliers is None and not result.spec().outliers
    else:
        assert result.outliers is not None
        outliers = result.outliers.to_dense() != 0
        assert (outliers == mask).double().mean() > 0.99 and 0.005 < mask.double().mean() < 0.2


def test_second_level_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 4.4, 8.0, 3.0, 3.0, 3.0, 3.0, 5.0])
    by_four = coded(values, 4, 3)
    assert by_four.codes.tolist()[:4] == [0, 1, 3, 7] and by_four.scales.tolist()[0] == 1
    assert by_four.values(4).tolist() == pytest.approx([1, 2, 4, 8, 3, 3, 3, 3, 5], rel=2e-3)
    assert coded(values, 1, 3).values(1).tolist() == pytest.approx(values.tolist(), rel=2**-11)
    spread = torch.rand(160) + 0.5
    found = coded(spread, 16, 3).values(16)
    assert all(2 < len(row.unique()) <= 8 for row in found.view(-1, 16))
    assert float((found - spread).abs().max()) <= 1.02 * 0.5 / 7


@pytest.mark.parametrize("bits", [3, 8])
def test_second_level_of_values_that_hardly_differ(bits: int) -> None:
    """They keep the precision of f16, values above 0 stay there, and zeros are zeros."""
    for size in (1e-4, 0.3, 7e4):
        values = size * (1 + 1e-4 * torch.rand(40))
        found = coded(values, 16, bits).values(16)
        assert float((found / values - 1).abs().max()) < 2**-10
        assert torch.equal(coded(-values, 16, bits).values(16).sign(), -torch.ones(40))
    assert torch.equal(coded(torch.zeros(40), 16, bits).values(16), torch.zeros(40))
    apart = torch.tensor([2.0**-14, 6e4]).repeat(8)
    assert bool((coded(apart, 16, bits).values(16) > 0).all())


def test_outliers_keep_large_weights() -> None:
    """A weight far from all others stays as it is to the precision of f16, and its group keeps its fine scale."""
    weight, inputs = layer(32, 64)
    weight[5, 20] = 100.0
    hessian = inputs.T @ inputs
    kept = lowbit.quantize(weight, lowbit.QuantConfig("u3", 16, method="spqr"), (hessian + hessian.T) / 2).dequantize()
    assert abs(float(kept[5, 20]) - 100) < 0.1
    lost = lowbit.quantize(weight, lowbit.QuantConfig("u3", 16, method="gptq"), inputs).dequantize()
    row = slice(16, 32)
    assert (kept - weight)[5, row].square().sum() < 0.2 * (lost - weight)[5, row].square().sum()


def test_the_lower_the_threshold_the_less_the_error() -> None:
    weight, inputs = layer(64, 128)
    found = []
    for threshold in (0.05, 0.2, 1.0, None):
        config = lowbit.QuantConfig("u3", 16, method="spqr", outlier_threshold=threshold)
        result = lowbit.quantize(weight, config, inputs)
        count = 0 if result.outliers is None else result.outliers.values().numel()
        found.append((count, output_error(weight, result.dequantize(), inputs)))
    assert [c for c, _ in found] == sorted((c for c, _ in found), reverse=True)
    assert [e for _, e in found] == sorted(e for _, e in found)
    gptq = lowbit.quantize(weight, lowbit.QuantConfig("u3", 16, method="gptq"), inputs)
    assert found[1][1] < 0.5 * output_error(weight, gptq.dequantize(), inputs)


@pytest.mark.parametrize("act_order", [False, True])
def test_matmul_of_a_quantized_weight(act_order: bool) -> None:
    weight, inputs = layer(40, 64)
    config = lowbit.QuantConfig("u3", 16, method="spqr", act_order=act_order)
    result = lowbit.quantize(weight, config, inputs)
    spec = result.spec(out="f32")
    assert spec.outliers and spec.permuted == act_order
    mm, x = lowbit.compile(spec, "cpu"), inputs[:5].half()
    y = mm(x, result.pack(mm))
    assert torch.allclose(y, x.float() @ result.dequantize().T, atol=2e-2 * float(y.abs().max()) ** 0.5)
    parts = result.split([16, 24])
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), result.dequantize())
    layer_ = lowbit.LowbitLinear.from_linear(torch.nn.Linear(64, 40).half(), config, inputs)
    assert layer_.spec.outliers and layer_(x).shape == (5, 40)


@pytest.mark.parametrize(("bits", "n"), [(3, 40), (4, 16), (6, 5), (8, 33)])
@pytest.mark.parametrize("scale", ["f16", "f32"])
def test_scales_and_zeros_are_stored_as_codes(bits: int, n: int, scale: Any) -> None:
    """They equal the expanded numbers bit for bit, also in a last block of fewer than 16 rows."""
    weight, inputs = layer(n, 128)
    config = lowbit.QuantConfig("u3", 16, method="spqr", scale_bits=bits, scale=scale)
    result = lowbit.quantize(weight, config, inputs)
    spec = result.spec(out="f32")
    assert (spec.scale, spec.bilevel) == (f"u{bits}", lowbit.Bilevel(16, 1, scale, zeros=True))
    assert result.scales.dtype == torch.uint8 and int(result.scales.max()) == 2**bits - 1
    levels = {name: t.float().repeat_interleave(16, 0)[:n] for name, t in result.second_level.items()}
    scales = (result.scales.float() - levels["scale_zeros"]) * levels["scale_scales"]
    assert result.zeros is not None
    zeros = (result.zeros.float() - levels["zero_zeros"]) * levels["zero_scales"]
    expanded = pack(replace(spec, scale="f32", bilevel=None), result.codes, scales, zeros, outliers=result.outliers)
    packed, x = result.pack(spec), inputs[:5].half()
    assert torch.equal(packed.dequantize(), expanded.dequantize())
    assert torch.equal(packed.dequantize(), result.dequantize())
    y = lowbit.compile(spec, "cpu")(x, packed)
    assert torch.allclose(y, x.float() @ result.dequantize().T, atol=2e-2 * float(y.abs().max()) ** 0.5)


@pytest.mark.parametrize(
    "change", [{"scale_bits": 5}, {"scale_rows": 8}, {"scale_rows": 1}, {"group_size": None}], ids=str
)
def test_other_scales_are_stored_as_numbers(change: dict[str, Any]) -> None:
    weight, inputs = layer(20, 64)
    config = lowbit.QuantConfig(**{"weight": "u3", "group_size": 16, "method": "spqr", **change})
    result = lowbit.quantize(weight, config, inputs)
    assert result.scales.dtype == torch.float16 and not result.second_level and result.spec().bilevel is None
    assert torch.equal(result.pack().dequantize(), result.dequantize())


def test_two_levels_take_fewer_bytes() -> None:
    coded_, expanded = (
        lowbit.QuantConfig("u3", 16, method="spqr", scale_bits=bits, outlier_threshold=None).spec(4096, 4096)
        for bits in (3, 5)
    )
    assert 8 * coded_.bytes / 4096**2 < 4.3 and 8 * expanded.bytes / 4096**2 >= 5


def test_split_of_two_levels() -> None:
    weight, inputs = layer(40, 64)
    result = lowbit.quantize(weight, lowbit.QuantConfig.preset("spqr"), inputs)
    with pytest.raises(QuantizeError, match=r"sizes=\[20, 20\] must be multiples of 16, but for the last"):
        result.split([20, 20])
    parts = [lowbit.LowbitLinear.from_packed(part.pack()) for part in result.split([32, 8])]
    assert torch.equal(concatenated(parts).packed.dequantize(), result.dequantize())


def test_models_with_two_levels(tmp_path: Path) -> None:
    """`quantize_`, `plan` and checkpoints have them like all others."""
    weight, inputs = layer(24, 64)
    linear = torch.nn.Linear(64, 24, bias=False)
    linear.weight.data = weight
    config = lowbit.QuantConfig.preset("spqr")
    model = torch.nn.Sequential(linear).half()
    chosen = lowbit.plan(model, bytes=5000, calibration=[inputs[:64].half()], candidates=[config])
    assert chosen["0"] == config
    lowbit.quantize_(model, chosen, calibration=[inputs[:64].half()])
    lowbit.save_checkpoint(model, tmp_path)
    empty = torch.nn.Sequential(torch.nn.Linear(64, 24, bias=False).half())
    lowbit.load_checkpoint(empty, tmp_path)
    x = inputs[:3].half()
    (low_bit,) = model
    assert isinstance(low_bit, lowbit.LowbitLinear) and low_bit.spec.bilevel
    assert torch.equal(empty(x), model(x))


def test_columns_without_inputs() -> None:
    weight, inputs = layer(8, 64)
    inputs[:, 10:30] = 0
    assert lowbit.quantize(weight, lowbit.QuantConfig.preset("spqr"), inputs).dequantize().isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": "nf4"}, "method='spqr' needs an integer weight"),
        ({"zeros": "int"}, "method='spqr' optimizes float zeros and can't have zeros='int'"),
        ({"scale": "bf16"}, "method='spqr' has scales in f16, not bf16"),
        ({"outlier_threshold": 0}, "outlier_threshold=0 must be a number above 0"),
        ({"scale_bits": 9}, r"scale_bits=9 must be an integer in 1\.\.8"),
        ({"scale_rows": True}, "scale_rows=True must be an integer"),
        ({"act_order": 1}, "act_order=1 must be True or False"),
        ({"act_order": True, "method": "gptq"}, "act_order=True is SpQR's"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        lowbit.QuantConfig(**{"weight": "u3", "group_size": 16, "method": "spqr", **change})


def test_weights_beyond_f16() -> None:
    weight, inputs = layer(4, 64)
    weight[2, 3] = 1e10
    with pytest.raises(QuantizeError, match="beyond f16"):
        lowbit.quantize(weight, lowbit.QuantConfig.preset("spqr"), inputs)


# -- scales and zeros that are tried out


def group(rows: int = 21, size: int = 16, limit: float = 2.0, **config: Any) -> Group:
    """A group in the middle of a layer, some of whose weights are large."""
    weight, inputs = layer(rows, 3 * size)
    u = factor(damped(inputs.double().T @ inputs.double(), 0.01)[0])[size : 2 * size, size : 2 * size].float()
    grid = Grid(lowbit.QuantConfig("u3", 16, method="spqr", **config), size, weight.device)
    return Group(weight[:, size : 2 * size].contiguous(), u / u.diagonal().mean(), grid, limit)


@pytest.mark.parametrize("cached", [16 << 20, 4096])
def test_losses_by_their_definition(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight by weight, in f64; the same for any number of rows at a time."""
    monkeypatch.setattr(grid_module, "CACHED", cached)
    g = group(rows=5, size=8)
    scales, zeros = torch.rand(5, 3) * 0.6 + 0.2, torch.rand(5, 3) * 7
    expected, kept = torch.zeros(5, 3), 0
    for row, candidate in itertools.product(range(5), range(3)):
        rest, s, z = g.weight[row].double().clone(), float(scales[row, candidate]), float(zeros[row, candidate])
        for j in range(8):
            error = (rest[j] - ((rest[j] / s + z).round().clamp(0, 7) - z) * s) / g.u[j, j]
            if error**2 > g.limit:
                expected[row, candidate], kept = expected[row, candidate] + g.limit, kept + 1
            else:
                expected[row, candidate] += error**2
                rest[j + 1 :] -= error * g.u[j, j + 1 :]
    assert torch.allclose(g.losses(scales, zeros), expected, rtol=1e-4) and 0 < kept < 60


@pytest.mark.parametrize(
    "change", [{}, {"scale_bits": 4}, {"scale_bits": 8}, {"scale_rows": 8}, {"scale_bits": 5}], ids=str
)
def test_codes_that_are_tried_out_lose_less(change: dict[str, Any]) -> None:
    """Than those of the paper, also in a last block with fewer rows; and each block by itself."""
    g = group(**change)
    rows = g.grid.config.scale_rows
    paper = statistics(g.weight, g.u.diagonal(), g.grid, g.limit)
    found = g.levels()
    losses = [g.losses(*(table[:, None] for table in multiplied(*pair, g.grid)))[:, 0] for pair in (found, paper)]
    blocks = [[float(part.sum()) for part in loss.split(rows)] for loss in losses]
    assert all(new < old for new, old in zip(*blocks)) and sum(blocks[0]) < 0.95 * sum(blocks[1])
    most = (1 << g.grid.config.scale_bits) - 1
    for level in found:
        assert level.codes.dtype == torch.uint8 and int(level.codes.max()) <= most
        assert level.scales.shape == level.zeros.shape == (-(-21 // rows),)
    if rows == 16:
        alone = Group(g.weight[:16].contiguous(), g.u, g.grid, g.limit).levels()
        assert all(torch.equal(a.codes, b.codes[:16]) for a, b in zip(alone, found))


def test_trying_out_and_order_lessen_the_error() -> None:
    weight, inputs = layer(32, 128)

    def found(**change: Any) -> tuple[float, int]:
        result = lowbit.quantize(weight, lowbit.QuantConfig("u3", 16, method="spqr", **change), inputs)
        assert result.outliers is not None
        return output_error(weight, result.dequantize(), inputs), result.outliers.values().numel()

    paper, searched, ordered = found(clip="max"), found(), found(act_order=True)
    assert searched[0] < 0.9 * paper[0] and ordered[0] < 0.95 * searched[0]
    assert max(searched[1], ordered[1]) < 0.9 * paper[1]


@pytest.mark.parametrize("size", [128, None])
def test_large_groups(size: int | None) -> None:
    """Errors are made up for in small groups only while losses are compared; the rest is the same."""
    weight, inputs = layer(20, 128)
    searched, paper = (
        lowbit.quantize(weight, lowbit.QuantConfig("u3", size, method="spqr", clip=clip), inputs)  # type: ignore[arg-type]
        for clip in ("mse", "max")
    )
    errors = [output_error(weight, result.dequantize(), inputs) for result in (searched, paper)]
    assert errors[0] < errors[1]


def test_losses_of_large_groups_take_errors_as_independent() -> None:
    g = group(rows=5, size=80)
    scales, zeros = torch.rand(5, 3) * 0.6 + 0.2, torch.rand(5, 3) * 7
    s, z = scales[..., None], zeros[..., None]
    errors = (g.weight[:, None] - ((g.weight[:, None] / s + z).round().clamp(0, 7) - z) * s) / g.u.diagonal()
    assert torch.allclose(g.losses(scales, zeros), errors.square().clamp(max=g.limit).sum(-1), rtol=1e-4)
