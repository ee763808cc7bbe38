"""GPTQ (Frantar et al., 2022): columns are rounded one after the other, and the columns after each make up for its
error.

With H the sum of x^T x over calibration inputs, the squared output error of a row is (w - q) H (w - q)^T. If column j
is rounded, the best change of the columns after it is - e * U[j, j+1:], with U the upper Cholesky factor of H^-1 and
e = (w_j - q_j) / U[j, j]. Columns with the largest diagonal of H come first. Scales and zeros are fixed before, from
the groups in the order of the weight ("static groups"): the result needs no permutation of the input. For K-quants
(`k_quants.py`) both of their levels are fixed.

With `beams`, several ways to round a row are followed at a time (`beams.py`), and columns come in the order of
`ordered_factor`.

If earlier layers are quantized, the inputs x' of the quantized model are not the x of the float model. Then the target
is not W, but the weight W* that minimizes |x W^T - x' W*^T|^2. Once the first column is rounded, the steps are those of
Qronos (Zhang et al., 2025).
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lowbit.dialect.errors import QuantizeError
from lowbit.pylib.quantization.beams import BLOCK, Beam, settle
from lowbit.pylib.quantization.calibration import Calibration
from lowbit.pylib.quantization.grid import Codes, Grid
from lowbit.pylib.quantization.k_quants import KQuant, Pair, better_k_rows, k_candidates, k_quant
from lowbit.pylib.quantization.rtn import better_rows, candidates, rtn

TINY = 1e-20  # the scale of groups that have the same weight everywhere, their offset


def gptq(weight: Tensor, grid: Grid, calibration: Calibration) -> Codes:
    """Returns the codes of a weight [rows, k]. No row has a larger output error than by rounding to nearest."""
    target, hessian = _problem(weight, grid, calibration)
    best = rtn(weight, grid)
    order = _order(grid, hessian)
    for _, scales, zeros in candidates(target, grid, hessian):
        found = Codes(_round_columns(target, grid, scales, zeros, hessian, order), scales, zeros)
        best = better_rows(grid, target, hessian.float(), found, best)
    return best


def k_gptq(weight: Tensor, grid: Grid, calibration: Calibration) -> KQuant:
    """Returns a weight [rows, k] with the scales and offsets of K-quants, which are chosen before codes. No row has a
    larger output error than by rounding to nearest."""
    target, hessian = _problem(weight, grid, calibration)
    best, order = k_quant(weight, grid), _order(grid, hessian)
    for pair in k_candidates(target, grid, hessian):
        found = KQuant(_round_columns(target, grid, *_with_zeros(pair), hessian, order), pair)
        best = better_k_rows(grid, target, hessian.float(), found, best)
    return best


def _with_zeros(pair: Pair) -> tuple[Tensor, Tensor]:
    """Returns scales and zeros with s (q - z) = s q + o. A scale of 0 becomes a tiny one, so that the offset alone
    remains."""
    scales = pair.scales.values
    scales = torch.where(scales == 0, TINY, scales)
    return scales, torch.zeros_like(scales) if pair.offsets is None else -pair.offsets.values / scales


def _problem(weight: Tensor, grid: Grid, calibration: Calibration) -> tuple[Tensor, Tensor]:
    """Returns the weight that is wanted, and the damped Hessian."""
    warn_if_short(calibration)
    hessian, damping = damped(calibration.hessian, grid.config.damping)
    target = weight.float().contiguous()
    if calibration.cross is not None:
        target = corrected(target, hessian, calibration.cross, damping)
    return target, hessian


def warn_if_short(calibration: Calibration) -> None:
    """Warns where inputs can't tell how the errors of all columns go together."""
    if calibration.is_short:
        warnings.warn(
            f"a calibration has fewer tokens than the layer has columns (k={calibration.k}): its Hessian's rank "
            "is no larger than their number, so errors are made up for on these alone; use several times k tokens "
            "(GPTQ's authors take 128 texts of 2048), or a method without calibration",
            stacklevel=2,
        )


def damped(hessian: Tensor, part: float) -> tuple[Tensor, float]:
    """Returns a Hessian that can be inverted, and the part of its mean diagonal that was added to the diagonal.

    Columns that no input reaches have a zero row; they are rounded to nearest.
    """
    added = part * (float(hessian.diagonal().mean()) or 1.0)
    return hessian + added * torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device), added


def corrected(weight: Tensor, hessian: Tensor, cross: Tensor, damping: float) -> Tensor:
    """Returns the weight with which the quantized model's inputs come closest to the float model's outputs.

    Damping draws it to the weight itself, where inputs say nothing.
    """
    wanted = cross @ weight.T.double() + damping * weight.T.double()
    return torch.cholesky_solve(wanted, _cholesky(hessian)).T.float().contiguous()


def _order(grid: Grid, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the order in which columns are rounded, and the U of that order in f32."""
    order, u = ordered_factor(hessian) if grid.config.beams > 1 else _factor_of_largest_first(hessian)
    return order, u.float()


def _round_columns(
    weight: Tensor, grid: Grid, scales: Tensor, zeros: Tensor, hessian: Tensor, order_and_u: tuple[Tensor, Tensor]
) -> Tensor:
    """Returns the codes [rows, k]."""
    beams, (order, u) = grid.config.beams, order_and_u
    rest = weight.T[order].contiguous()  # a column of the weight is a row here, next to which nothing else lies
    s, z, groups = scales.T.contiguous(), zeros.T.contiguous(), order // grid.group_size
    levels = torch.empty_like(rest)
    for first in range(0, len(rest), BLOCK):
        block = slice(first, min(first + BLOCK, len(rest)))
        tables = s[groups[block]], z[groups[block]]
        levels[block], errors = _round_block(rest[block], u[block, block], *tables, grid)
        rest[block.stop :] -= u[block, block.stop :].T @ errors
    if beams > 1:
        none = torch.zeros_like(rest, dtype=torch.float16)
        levels, _ = settle(weight.T[order], levels, none, s[groups], z[groups], hessian[order][:, order].float(), grid)
    codes = grid.encode(levels)
    return torch.empty_like(codes).index_copy_(0, order, codes).T.contiguous()


def _round_block(rest: Tensor, u: Tensor, scales: Tensor, zeros: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Returns the levels of a block's columns, and the errors that the columns after it have to make up for."""
    if grid.config.beams > 1:
        beam = Beam(rest, u, grid, grid.config.beams)
        for scale, zero in zip(scales, zeros):
            beam.round(scale, zero)
        levels, _, errors = beam.path()
        return levels, errors
    levels, errors = torch.empty_like(rest), torch.empty_like(rest)
    for j in range(len(rest)):
        value = rest[j] - u[:j, j] @ errors[:j]
        levels[j] = grid.nearest(value / scales[j] + zeros[j])
        errors[j] = (value - (levels[j] - zeros[j]) * scales[j]) / u[j, j]
    return levels, errors


def _factor_of_largest_first(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the order of GPTQ's paper, in which the largest inputs come first, and the U of that order."""
    order = hessian.diagonal().argsort(descending=True, stable=True)
    return order, factor(hessian[order][:, order])


def factor(hessian: Tensor) -> Tensor:
    """Returns the upper triangular U with U^T U = H^-1."""
    return _cholesky(torch.cholesky_inverse(_cholesky(hessian))).mT


def ordered_factor(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an order of the columns, and the U of the Hessian in that order: each U[j, j] is the least that a column
    which is left could have.

    This is a Cholesky factorization of H^-1 that pivots on the least element. Errors of column j count 1 / U[j, j]^2.
    The product of these factors is the same in every order, and their sum is small where they differ little.
    """
    rest = torch.cholesky_inverse(_cholesky(hessian))
    columns = torch.arange(len(rest), device=rest.device)  # those that are left, in the order of `rest`
    u, order = torch.zeros_like(rest), list[Tensor]()
    for first in range(0, len(u), BLOCK):
        rows, chosen = _least_pivots(rest, min(BLOCK, len(rest)))
        u[first : first + BLOCK, columns] = rows
        order.append(columns[chosen])
        left = torch.ones_like(columns, dtype=torch.bool).index_fill_(0, chosen, False).nonzero()[:, 0]
        columns, rows = columns[left], rows[:, left]
        rest = rest[left][:, left].addmm_(rows.T, rows, alpha=-1)
    permutation = torch.cat(order)
    return permutation, u[:, permutation].triu_()


def _least_pivots(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the first rows of the Cholesky factor of a matrix that pivots on the least element, and the pivots."""
    rows, diagonal, pivots = matrix.new_empty(count, len(matrix)), matrix.diagonal().clone(), list[Tensor]()
    for i in range(count):
        j = diagonal.argmin()
        row = (matrix[j] - rows[:i, j] @ rows[:i]) / diagonal[j].sqrt()
        rows[i] = row
        diagonal -= row.square()
        diagonal[j] = torch.inf
        pivots.append(j)
    return rows, torch.stack(pivots)


def _cholesky(matrix: Tensor) -> Tensor:
    """Returns the lower Cholesky factor."""
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        raise QuantizeError("the Hessian is not positive definite, damping included; raise damping=, or pass inputs")
    return lower
