"""The free choice of the quantize kernel: `QuantizeSchedule`."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.passes.kernels.base import KernelSchedule


@dataclass(frozen=True)
class QuantizeSchedule(KernelSchedule):
    """The free choice of the quantize kernel.

    threads  of a block, which has one row; each takes whole units of 16 columns
    """

    threads: int = 256
