"""SignRound (Cheng et al., 2023; AutoRound): rounding offsets and clip ranges follow the sign of the gradient.

    W~ = s (clip(round(W / s + z + V)) - z),   V in [-1/2, 1/2] for each weight
    s, z from the range b * low .. a * high,   a, b in [0, 1] for each group

Every step changes V, a and b by the learning rate, against the sign of the gradient of the squared output error
(W - W~) H (W - W~)^T; the rate falls linearly to 0. Each row keeps the step at which its error was least. Nothing is
random. It pays at three bits and fewer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.pylib.quantization.calibration import Calibration, output_errors
from lowbit.pylib.quantization.grid import Codes, Grid, by_chunks, straight
from lowbit.pylib.quantization.rtn import better_rows, rtn, search

COPIES = 16


def signround(weight: Tensor, grid: Grid, calibration: Calibration) -> Codes:
    """Returns the codes of a weight [rows, k]. No row has a larger output error than by rounding to nearest."""
    hessian = calibration.hessian.float()
    hessian = hessian / (hessian.diagonal().mean() + torch.finfo(torch.float32).tiny)
    return by_chunks(lambda rows: _learn(rows, grid, hessian), weight, COPIES)


def _learn(weight: Tensor, grid: Grid, hessian: Tensor) -> Codes:
    """Returns the codes of some rows."""
    groups = grid.groups(weight)
    low, high = groups.aminmax(dim=-1)
    best = rounded = rtn(weight, grid)
    ratio = search(weight, grid).ratio.abs().clamp_(max=1)
    offsets, a, b = torch.zeros_like(groups), ratio, ratio.clone()
    least = weight.new_full((len(weight), 1), torch.inf, dtype=torch.float32)
    for step in range(grid.config.steps):
        variables = [v.requires_grad_() for v in (offsets, a, b)]
        with torch.enable_grad():
            scales, zeros = grid.fit(b * low, a * high)
            levels = _levels(groups, grid, scales, zeros, offsets)
            values = (levels - zeros[..., None]) * scales[..., None]
            errors = output_errors(weight - values.flatten(1), hessian)[:, None]
            gradients = torch.autograd.grad(errors.sum(), variables, allow_unused=True)
        now = Codes(levels.detach().flatten(1).to(grid.code_type), scales.detach(), zeros.detach())
        codes, scales, zeros = (torch.where(errors < least, new, old) for new, old in zip(now, best))
        best, least = Codes(codes, scales, zeros), torch.minimum(errors.detach(), least)
        rate = (1 - step / grid.config.steps) / grid.config.steps
        offsets, a, b = (_moved(v, g, rate) for v, g in zip(variables, gradients))
        offsets, a, b = offsets.clamp_(-0.5, 0.5), a.clamp_(0, 1), b.clamp_(0, 1)
    return better_rows(grid, weight, hessian, best, rounded)


def _levels(groups: Tensor, grid: Grid, scales: Tensor, zeros: Tensor, offsets: Tensor) -> Tensor:
    """Returns the levels; gradients pass through rounding, but not where a level is clipped."""
    x = groups / scales[..., None] + zeros[..., None] + offsets
    return straight(x, x.detach().round()).clamp(grid.least, grid.most)


def _moved(variable: Tensor, gradient: Tensor | None, rate: float) -> Tensor:
    """Returns a variable one step further down; without a gradient (scales that are powers of two) it stays."""
    return variable.detach() - (0.0 if gradient is None else rate * gradient.sign())
