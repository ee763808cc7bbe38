"""Scales and zeros of SpQR, chosen by trying them out: what `clip="mse"` means there.

The paper takes the range of a group, and rounds scale and zero to codes. But codes of 3 bits are coarse, and which of
them is best depends on where the weights are. So each row takes the pair of codes with the least loss, and every 16
rows the second level with the least sum of losses.

The loss is that of the method itself. Columns of the group are rounded one after the other, each makes up for the
errors of those before it, and the loss is the sum of their squared errors over U[j, j]^2. Columns after the group can
be made up for in any case, so that this is the part of the output error that the group adds. An outlier has no error,
but costs as much as the threshold says: what is above it would be one. So nothing else has to guess where outliers are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.pylib.quantization.grid import Grid, chunks
from lowbit.pylib.quantization.two_levels import LEAST, TwoLevels, coded
from lowbit.pylib.torch_types import TORCH

RATIOS = tuple(1 - 0.1 * step for step in range(8))
"""How far from the middle of a group the ends of a range may be, in parts of the group's own ends."""
CUTS = ((0.0, 0.0), (0.15, 0.0), (0.0, 0.15), (0.15, 0.15))
"""Parts of the range of 16 scales, or zeros, that the search cuts off below and above, so that codes are finer."""
NEAR = 3  # codes that are tried on both sides of the nearest
LARGEST = 64  # columns of a group in which errors are made up for; in larger ones losses take them as independent
COPIES = 8  # temporaries in f32, for each weight and candidate


@dataclass(frozen=True, eq=False)
class Group:
    """The weights [rows, size] of a group as they are when its first column comes.

    u       the block of U of these columns
    limit   the error, over U[j, j]^2, above which a weight is an outlier
    """

    weight: Tensor
    u: Tensor
    grid: Grid
    limit: float

    def levels(self) -> tuple[TwoLevels, TwoLevels]:
        """Returns the codes of the scale and the zero of each row."""
        config = self.grid.config
        rows, bits, kind = config.scale_rows, config.scale_bits, TORCH[config.scale_type]
        scale, zero = self._fitted()
        scales, zeros = ([coded(values, rows, bits, kind, cut) for cut in CUTS] for values in (scale, zero))
        best = self._codes(scales[0], zeros[0])
        for other in scales[1:]:
            best = best.or_better(self._codes(other, zeros[0]), rows)
        for other in zeros[1:]:
            best = best.or_better(self._codes(best.scale, other), rows)
        return best.scale, best.zero

    def _fitted(self) -> tuple[Tensor, Tensor]:
        """Returns the scale and the zero of each row whose range has the least loss."""
        low, high = self.weight.aminmax(dim=1, keepdim=True)
        middle, ratios = (low + high) / 2, low.new_tensor(RATIOS)
        below, above = torch.cartesian_prod(ratios, ratios).unbind(1)
        low, high = middle + (low - middle) * below, middle + (high - middle) * above
        scales = ((high - low) / (self.grid.most - self.grid.least)).clamp(min=LEAST)
        zeros = self.grid.least - low / scales
        best = self.losses(scales, zeros).argmin(1, keepdim=True)
        return scales.gather(1, best)[:, 0], zeros.gather(1, best)[:, 0]

    def _codes(self, scale: TwoLevels, zero: TwoLevels) -> Choice:
        """Returns the best codes of each row near these, with the second level that they have."""
        most = (1 << self.grid.config.scale_bits) - 1
        near = torch.arange(-NEAR, NEAR + 1, device=scale.codes.device)
        steps = torch.cartesian_prod(near, near).unbind(1)
        pairs = [(level.codes[:, None] + step).clamp(0, most) for level, step in zip((scale, zero), steps)]
        levels = list(zip((scale, zero), pairs))
        scales, zeros = (TwoLevels(codes, level.scales[:, None], level.zeros[:, None]) for level, codes in levels)
        loss, best = self.losses(*multiplied(scales, zeros, self.grid)).min(1, keepdim=True)
        scale, zero = (level._replace(codes=codes.gather(1, best)[:, 0].to(torch.uint8)) for level, codes in levels)
        return Choice(scale, zero, loss[:, 0])

    def losses(self, scales: Tensor, zeros: Tensor) -> Tensor:
        """Returns the loss of each row with each of some scales and zeros [rows, candidates]."""
        result = torch.empty_like(scales)
        for rows in chunks(self.weight, COPIES * scales.shape[1]):
            result[rows] = self._losses(self.weight[rows], scales[rows], zeros[rows])
        return result

    def _losses(self, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        size = weight.shape[1]
        if size > LARGEST:
            errors = self.grid.errors(weight[:, None].expand(-1, scales.shape[1], -1), scales, zeros)
            return errors.div_(self.u.diagonal()).square_().clamp_(max=self.limit).sum(-1)
        losses, made_up_for = torch.zeros_like(scales), weight.new_empty(size, *scales.shape)
        for j in range(size):
            value = weight[:, j, None] - (self.u[:j, j] @ made_up_for[:j].flatten(1)).view_as(scales)
            levels = self.grid.nearest((value / scales).add_(zeros))
            errors = value.sub_(levels.sub_(zeros).mul_(scales)).div_(self.u[j, j])
            squares = errors.square()
            made_up_for[j] = errors.masked_fill_(squares > self.limit, 0.0)
            losses += squares.clamp_(max=self.limit)
        return losses


@dataclass(frozen=True, eq=False)
class Choice:
    """Codes of the scale and the zero of each row of a group, and the loss [rows] that they have."""

    scale: TwoLevels
    zero: TwoLevels
    loss: Tensor

    def or_better(self, other: Choice, rows: int) -> Choice:
        """Returns the better of two choices for each block of so many rows."""
        block = torch.arange(len(self.loss), device=self.loss.device) // rows
        gains = self.loss.new_zeros(len(self.scale.scales)).index_add_(0, block, self.loss - other.loss)
        take = gains > 0
        scale, zero = (
            TwoLevels(
                torch.where(take[block], new.codes, old.codes),
                torch.where(take, new.scales, old.scales),
                torch.where(take, new.zeros, old.zeros),
            )
            for new, old in ((other.scale, self.scale), (other.zero, self.zero))
        )
        return Choice(scale, zero, torch.where(take[block], other.loss, self.loss))


def multiplied(scale: TwoLevels, zero: TwoLevels, grid: Grid) -> tuple[Tensor, Tensor]:
    """Returns the scales and the zeros with which kernels multiply."""
    scales, zeros = scale.values(grid.config.scale_rows), zero.values(grid.config.scale_rows)
    if grid.config.second_level:
        return scales, zeros
    return scales.clamp(min=LEAST).half().float(), zeros.half().float()
