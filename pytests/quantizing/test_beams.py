"""Rounding with several candidates for each row: what it finds, and what `settle` does with it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit.dialect.errors import SpecError
from lowbit.pylib.quantization.beams import Beam, settle
from lowbit.pylib.quantization.calibration import output_errors
from lowbit.pylib.quantization.gptq import damped, factor
from lowbit.pylib.quantization.grid import Grid

CONFIG: Any = lowbit.QuantConfig
CPU = torch.device("cpu")


def problem(k: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    """A weight [k, rows], a column of the layer a row, and the Hessian of inputs that depend on each other."""
    generator = torch.Generator().manual_seed(k)
    inputs = torch.randn(4 * k, k, generator=generator) @ (0.3 + torch.randn(k, k, generator=generator))
    return torch.randn(k, rows, generator=generator), damped((inputs.T @ inputs).double(), 0.01)[0]


def rounded(target: Tensor, hessian: Tensor, weight: Any, count: int, limit: float = torch.inf) -> Any:
    """The path through one block, with one scale and zero in the middle for all, and what its weights are."""
    u, grid = factor(hessian).float(), Grid(CONFIG(weight, 16, "float"), 16, CPU)
    scale, zero = 3.5 / (grid.most - grid.least), (grid.most + grid.least) / 2
    beam = Beam(target, u, grid, count, limit)
    for _ in range(len(target)):
        beam.round(torch.full((target.shape[1],), scale), torch.full((target.shape[1],), zero))
    path = beam.path()
    return path, (path.levels - zero) * scale + path.kept.float()


def test_all_candidates_are_an_exhaustive_search() -> None:
    """With 2^7 candidates for 7 columns of one bit, no codes have a smaller output error."""
    target, hessian = problem(7)
    path, found = rounded(target, hessian, "u1", 2**7)
    every = torch.tensor(list(itertools.product((-1.75, 1.75), repeat=7)))
    best = torch.stack([output_errors(row - every, hessian.float()).min() for row in target.T])
    errors = output_errors((target - found).T, hessian.float())
    assert torch.allclose(errors, best, rtol=1e-4)
    assert torch.allclose(path.errors.square().sum(0), best, rtol=1e-3)  # what the method takes for the error
    greedy = output_errors((target - rounded(target, hessian, "u1", 1)[1]).T, hessian.float())
    assert (greedy >= 0.999 * best).all() and (greedy > 1.1 * best).any()


@pytest.mark.parametrize("weight", ["u3", "nf4"])
def test_more_candidates_lose_less(weight: str) -> None:
    target, hessian = problem(48, rows=64)
    errors = [
        float(output_errors((target - rounded(target, hessian, weight, count)[1]).T, hessian.float()).sum())
        for count in (1, 2, 8, 64)
    ]
    assert errors == sorted(errors, reverse=True) and errors[2] < 0.92 * errors[0]


def test_two_nearest_levels() -> None:
    """Of integers and tables; beyond the ends, too, and of one level alone."""
    x = torch.tensor([-3.0, 0.2, 0.8, 1.0, 1.4, 9.0])
    levels = Grid(CONFIG("u2"), 128, CPU).two_nearest(x)
    assert levels.tolist() == [[0, 1], [0, 1], [1, 0], [1, 0], [1, 2], [3, 2]]
    table = Grid(CONFIG("lut2", table=(4, -1, 0.5, 1)), 128, CPU).two_nearest(x)
    assert table.tolist() == [[-1, 0.5], [0.5, -1], [1, 0.5], [1, 0.5], [1, 4], [4, 1]]
    one = Grid(CONFIG("lut1", table=(2, 2)), 128, CPU).two_nearest(x)
    assert one.tolist() == [[2, 2]] * 6


def test_outliers_of_candidates() -> None:
    """Errors above the limit are kept, cost as much as the limit, and leave what f16 does not hold."""
    target, hessian = problem(20)
    target[3, 2] = 40.0
    limit = 0.5 / float(factor(hessian).diagonal().square().mean())
    path, found = rounded(target, hessian, "u3", 4, limit)
    assert path.kept[3, 2] > 30 and 1 <= int((path.kept != 0).sum()) < 40
    assert float(path.errors.square().max()) <= limit
    assert float((target - found)[3, 2].abs()) < 1


def test_settling() -> None:
    """At the end each level is the best for the others as they are, and so is what outliers keep."""
    target, hessian = problem(32)
    grid, h = Grid(CONFIG("u3", 16, "float"), 16, CPU), hessian.float()
    limit = 2.0 / float(factor(hessian).diagonal().square().mean())
    path, before = rounded(target, hessian, "u3", 1, limit)
    tables = torch.full_like(target, 0.5), torch.full_like(target, 3.5)
    levels, kept = path.levels, path.kept
    errors = [output_errors((target - before).T, h)]
    for _ in range(5):
        levels, kept = settle(target, levels, kept, *tables, h, grid)
        found = (levels - 3.5) * 0.5 + kept.float()
        errors.append(output_errors((target - found).T, h))
        assert (errors[-1] <= errors[-2] * (1 + 1e-4)).all()
    assert float(errors[-1].sum()) < 0.95 * float(errors[0].sum())
    assert (kept[path.kept == 0] == 0).all() and bool((path.kept != 0).any())
    assert bool((levels == levels.round()).all()) and float(levels.min()) >= 0 and float(levels.max()) <= 7
    for j, row in itertools.product(range(32), range(6)):
        for step in (-0.5, 0.5):
            other = found[:, row].clone()
            other[j] += step
            possible = 0 <= levels[j, row] + 2 * step <= 7 and path.kept[j, row] == 0
            error = float(output_errors((target[:, row] - other)[None], h))
            assert not possible or error >= float(errors[-1][row]) * (1 - 1e-4)


@pytest.mark.parametrize("change", [{"method": "gptq"}, {"method": "spqr"}, {"method": "spqr", "act_order": True}])
def test_beams_of_a_method(change: dict[str, Any]) -> None:
    """Less output error, and by SpQR no more outliers for it; the result is packed like any other."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 256, generator=generator)
    inputs = torch.randn(1000, 256, generator=generator) @ torch.randn(256, 256, generator=generator)
    config = {"weight": "u3", "group_size": 16, "zeros": "float", **change}
    one, many = (lowbit.quantize(weight, CONFIG(**config, beams=beams), inputs) for beams in (1, 8))
    errors = [float(((found.dequantize() - weight) @ inputs.T).square().sum()) for found in (one, many)]
    assert errors[1] < 0.96 * errors[0]
    if one.outliers is not None and many.outliers is not None:
        assert many.outliers.values().numel() <= 1.1 * one.outliers.values().numel()
    assert torch.equal(many.pack().dequantize(), many.dequantize())


@pytest.mark.parametrize("beams", [0, True, 1.5, 5000])
def test_wrong_beams(beams: Any) -> None:
    with pytest.raises(SpecError, match=r"beams=.* must be an integer in 1\.\.1024"):
        CONFIG("u4", method="gptq", beams=beams)


def test_methods_without_beams() -> None:
    with pytest.raises(SpecError, match="method='rtn' has no beams; use method='gptq' or 'spqr', or beams=1"):
        CONFIG("u4", beams=4)
