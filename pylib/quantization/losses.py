"""What an error of a weight costs the output: the losses that searches for ranges, scales and offsets make least.

Inputs of a layer depend on each other, so errors add up where they have the same sign, and a smaller range moves all
large weights towards 0. Weights of a layer that stick out (kurtosis above 10) carry most of its output, and there the
range of least squared error has up to three times the output error of the whole one. So with `clip="output"` a squared
error counts

    (mean w^2 of the row + w^2)^p * importance of the column

with p = 1/2 as in llama.cpp's searches with an importance matrix (ggml-quants.c). Importances are mean squares of
inputs. Without data all columns are alike; then p is 3/4 for ranges, with which no layer that was measured lost more to
the whole range than 2 %, but by chance ("What of a ratio is chance" in docs/quality.md). Where the
Hessian of the inputs is known, the loss of a group is its part of the output error, with all other groups exact: what
llm-awq clips by.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowbit.pylib.quantization.grid import Grid

Loss = Callable[[Tensor], Tensor]
"""Returns the loss of each group [rows, groups] for errors [rows, groups, group_size], which it may overwrite."""

POWER, SAFE_POWER = 0.5, 0.75


def counts(weight: Tensor, grid: Grid, importance: Tensor | None = None, power: float = POWER) -> Tensor:
    """Returns how much the squared error of each weight counts, in a shape that errors [rows, groups, group_size] can
    be multiplied by.

    weight       [rows, k] in f32
    importance   [k]: how much a squared error of each column counts; None: all alike
    power        p above
    """
    columns = weight.new_ones(()) if importance is None else grid.groups(importance[None].to(weight))
    if grid.config.clip != "output":
        return columns
    relative = weight / weight.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    squares = relative.square_()
    return grid.groups(squares.add_(squares.mean(1, keepdim=True)).pow_(power)) * columns


def counted(each: Tensor) -> Loss:
    """Returns the loss of squared errors that count so much each (`counts`)."""

    def loss(errors: Tensor) -> Tensor:
        squares = errors.square_()
        return (squares if each.ndim == 0 else squares.mul_(each)).sum(-1)

    return loss


def of_output(hessian: Tensor, grid: Grid) -> Loss:
    """Returns the squared output error of each group, for inputs with this Hessian [k, k]."""
    size = grid.group_size
    blocks = hessian.float().unflatten(0, (-1, size)).unflatten(2, (-1, size)).diagonal(dim1=0, dim2=2)
    blocks = blocks.permute(2, 0, 1).contiguous()  # [groups, size, size]

    def loss(errors: Tensor) -> Tensor:
        by_group = errors.transpose(0, 1)
        return torch.bmm(by_group, blocks).mul_(by_group).sum(-1).T

    return loss


def importance_of(hessian: Tensor) -> Tensor | None:
    """Returns the importances [k] of columns in f32; None where all are alike, as without data."""
    diagonal = hessian.diagonal()
    return None if bool((diagonal == diagonal[0]).all()) else diagonal.float()


def has_correlations(hessian: Tensor) -> bool:
    """Tells whether a Hessian says how errors of columns go together. Without, it can't tell which ranges are best."""
    return int(torch.count_nonzero(hessian)) > int(torch.count_nonzero(hessian.diagonal()))
