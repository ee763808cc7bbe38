"""Rounds columns one after the other with several candidates for each row: a beam search for the least output error.

With U as in `gptq.py`, the squared output error of a row is the sum over its columns j of (error of j / U[j, j])^2, if
each column is changed, before it is rounded, to make up for the errors of the columns before it. GPTQ takes the nearest
level each time. But the second nearest may leave less to the columns that follow. So every candidate of a row goes on
with both levels, and those with the smallest sums so far are kept. With one candidate this is GPTQ.

Candidates live in a block of columns. At its end the best one is taken, so that the columns after the block are changed
once. Then `settle` goes through all columns again, and moves each weight to the level that is best for all others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.pylib.quantization.grid import Grid

BLOCK = 128  # columns whose errors reach the columns after the block in one product
SWEEPS = 4  # how often `settle` goes through the columns


class Path(NamedTuple):
    """The best candidate of each row for a block's columns, each [columns, rows].

    levels   the levels of the codes
    kept     what outliers add to the weight, in f16
    errors   what is left of each weight, over U[j, j]
    """

    levels: Tensor
    kept: Tensor
    errors: Tensor


class Beam:
    """The candidates of each row for the first columns of a block.

    rest    [columns, rows]: the block's columns, which make up for the errors of all blocks before
    u       [columns, columns]: their part of U
    count   how many candidates a row keeps
    limit   the square of error / U[j, j] above which a weight is an outlier; an outlier costs as much
    """

    def __init__(self, rest: Tensor, u: Tensor, grid: Grid, count: int, limit: float = torch.inf) -> None:
        self.rest, self.u, self.grid, self.count, self.limit = rest, u, grid, count, limit
        rows = rest.shape[1]
        self.costs = rest.new_full((rows, count), torch.inf)
        self.costs[:, 0] = 0.0
        self.errors = rest.new_empty(*rest.shape, count)
        self.steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def values(self, columns: slice) -> Tensor:
        """Returns columns that are not rounded yet as the best candidate of each row has them: [columns, rows]."""
        done = len(self.steps)
        return self.rest[columns] - self.u[:done, columns].T @ self.errors[:done, :, 0]

    def round(self, scale: Tensor, zero: Tensor) -> None:
        """Round the next column, whose scales and zeros are [rows]."""
        j, (rows, count) = len(self.steps), self.costs.shape
        made_up = (self.u[:j, j] @ self.errors[:j].flatten(1)).view(rows, count, 1)
        values, scale, zero = self.rest[j, :, None, None] - made_up, scale[:, None, None], zero[:, None, None]
        levels = self.grid.two_nearest((values / scale + zero)[..., 0])[..., : min(count, 2)]
        left = values - (levels - zero) * scale
        added = (left / self.u[j, j]).square()
        is_outlier = added > self.limit
        kept = torch.where(is_outlier, left, 0.0).half()
        added[..., 1:].masked_fill_(is_outlier[..., 1:], torch.inf)  # an outlier has the nearest level
        added[..., 0].clamp_(max=self.limit)
        self._keep_best((self.costs[..., None] + added).flatten(1), (left - kept) / self.u[j, j], levels, kept)

    def _keep_best(self, costs: Tensor, errors: Tensor, levels: Tensor, kept: Tensor) -> None:
        """Go on with those of the candidates [rows, candidates * levels] that cost least, the best one first."""
        j = len(self.steps)
        if self.count == 1:
            self.costs, chosen = costs, torch.zeros_like(costs, dtype=torch.int64)
        else:
            self.costs, chosen = costs.topk(self.count, dim=1, largest=False)
            self.errors[:j] = self.errors[:j].gather(2, (chosen // 2).expand(j, -1, -1))
        self.errors[j] = errors.flatten(1).gather(1, chosen)
        self.steps.append((chosen, levels.flatten(1), kept.flatten(1)))

    def path(self) -> Path:
        """Returns the best candidate of each row, once all columns are rounded."""
        at = torch.zeros_like(self.costs[:, :1], dtype=torch.int64)
        levels, kept = list[Tensor](), list[Tensor]()
        for chosen, all_levels, all_kept in reversed(self.steps):
            at = chosen.gather(1, at)
            levels.append(all_levels.gather(1, at)[:, 0])
            kept.append(all_kept.gather(1, at)[:, 0])
            at = at // (all_levels.shape[1] // self.count)
        return Path(torch.stack(levels[::-1]), torch.stack(kept[::-1]), self.errors[..., 0].contiguous())


def settle(
    target: Tensor, levels: Tensor, kept: Tensor, scales: Tensor, zeros: Tensor, hessian: Tensor, grid: Grid
) -> tuple[Tensor, Tensor]:
    """Returns levels and outliers with an output error that is not larger: coordinate descent, column by column.

    All are [columns, rows], but the Hessian in the order of the columns. Outliers stay where they are, and take the
    values that are best for all other weights.
    """
    levels, kept, of_outlier = levels.clone(), kept.clone(), kept != 0
    gradient = hessian @ (target - (levels - zeros) * scales - kept.float())
    for first in [*range(0, len(target), BLOCK)] * SWEEPS:
        block = slice(first, min(first + BLOCK, len(target)))
        moves = torch.zeros_like(levels[block])
        for i, j in enumerate(range(block.start, block.stop)):
            value = (levels[j] - zeros[j]) * scales[j] + kept[j].float()
            best = value + (gradient[j] - hessian[j, first:j] @ moves[:i]) / hessian[j, j]
            nearest = grid.nearest(best / scales[j] + zeros[j])
            levels[j] = torch.where(of_outlier[j], levels[j], nearest)
            without = (levels[j] - zeros[j]) * scales[j]
            kept[j] = torch.where(of_outlier[j], best - without, 0.0).half()
            moves[i] = without + kept[j].float() - value
        gradient -= hessian[:, block] @ moves
    return levels, kept
