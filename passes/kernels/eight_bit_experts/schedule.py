"""The free choices of the kernel for experts and activations of 8 bits on Hopper: `EightBitExpertsSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.experts.schedule import ExpertsSchedule, short_sizes
from lowbit.passes.kernels.persistent.schedule import RowsOfSlots


@dataclass(frozen=True)
class EightBitExpertsSchedule(RowsOfSlots, EightBitPrefillSchedule):
    """The free choices of the kernel for experts and activations of 8 bits on Hopper: those of
    `EightBitPrefillSchedule` that concern one block alone, and where rows of x come from.

    tokens        slots of a tile, which are those of one expert: as in `ExpertsSchedule`
    panel_k       columns of x that are copied and multiplied at a time: 128 or 256
    parts, banks  as there
    cluster, split_k, last_split_k  1
    stream_k      "off"
    last_tokens   slots of short tiles, no more than those of a product, or 0: as in `ExpertsSchedule`
    gather        as there, of the bytes of x: its scales are those that the list names
    """

    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ExpertsSchedule.allowed,
        **{name: EightBitPrefillSchedule.allowed[name] for name in ("panel_k", "parts", "banks")},
    }

    tokens: int = 128

    def slice_sizes(self, last_split_k: int) -> tuple[int, ...]:
        return short_sizes(self)
