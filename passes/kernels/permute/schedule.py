"""The free choices of the permute kernel, `PermuteSchedule`, and the pieces that it moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule


@dataclass(frozen=True)
class PermuteSchedule(KernelSchedule):
    """The free choices of the permute kernel.

    threads  of a block
    rows     of x that a block permutes: the permutation is loaded once for all of them
    pieces   of up to 16 bytes that a thread writes of each row; where they are less than the row, other blocks write
             the rest
    staged   whether whole rows are copied to shared memory first, where columns are gathered; else they are gathered
             from device memory
    """

    threads: int = 256
    rows: int = 1
    pieces: int = 1
    staged: bool = True


def piece_columns(spec: MatmulSpec) -> int:
    """Returns the columns of the widest pieces that every row is made of: 16 bytes where k is a multiple of 8."""
    return math.gcd(spec.k, spec.x.per_vector)
