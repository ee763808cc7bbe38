"""Scales that belong to blocks of a weight, as scales of groups of its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError


@dataclass(frozen=True)
class Block:
    """So many rows and columns of a weight share a scale. Those at the end of the weight may be smaller."""

    rows: int
    columns: int

    @staticmethod
    def of(given: object) -> Block | None:
        """Returns the block that a configuration writes as [rows, columns] or as "rows x columns"; None for none."""
        if isinstance(given, str):
            given = [int(part) if part.isdecimal() else None for part in given.replace(" ", "").split("x")]
        match given:
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return Block(rows, columns)
            case None:
                return None
            case _:
                raise CheckpointError(f"a block of {given!r} must be [rows, columns]")

    def counts(self, n: int, k: int) -> list[int]:
        """Returns how many blocks there are along each dimension of a weight."""
        return [-(-n // self.rows), -(-k // self.columns)]


def of_blocks(given: Tensor, shape: Sequence[int], blocks: Sequence[Block | None]) -> Tensor:
    """Returns numbers [n, groups] of a weight of shape [n, k], from those of its blocks, its rows, or all of it.

    blocks: the sizes that blocks may have
    """
    n, k = shape
    if given.numel() == 1:
        return given.reshape(1, 1).expand(n, 1)
    if list(given.shape) in ([n], [n, 1]):
        return given.reshape(n, 1)
    for block in blocks:
        if block and list(given.shape) == block.counts(n, k):
            rows = given if block.rows == 1 else given[torch.arange(n, device=given.device) // block.rows]
            return spread(rows, block.columns, k)
    sizes = " or ".join(f"{block.rows} x {block.columns}" for block in blocks if block) or "whole rows"
    raise CheckpointError(f"scales {list(given.shape)} don't fit a weight of {n} x {k} in blocks of {sizes}")


def order_of(groups: Tensor, size: int) -> Tensor | None:
    """Returns the columns of a weight by their groups, for the group of each column; None if they are in this order.

    Raises CheckpointError unless each group has `size` columns; the last may have fewer.
    """
    k = len(groups)
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], torch.arange(k, dtype=groups.dtype, device=groups.device) // size):
        raise CheckpointError(f"g_idx must have each group from 0 to {(k - 1) // size} for {size} columns")
    return None if torch.equal(order, torch.arange(k, device=order.device)) else order


def spread(numbers: Tensor, size: int, k: int) -> Tensor:
    """Returns numbers [n, groups] of groups that divide k, from those of blocks of `size` columns. The last block may
    reach beyond k.

    Groups are the blocks where these divide k. Else they are smaller, and the number of a block is repeated.
    """
    if numbers.shape[1] != -(-k // size):
        raise CheckpointError(f"{numbers.shape[1]} blocks of {size} columns don't cover k={k}")
    group = math.gcd(size, k)
    if group == size or numbers.shape[1] == 1:
        return numbers
    return numbers[:, torch.arange(0, k, group, device=numbers.device) // size]
