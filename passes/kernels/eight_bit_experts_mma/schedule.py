"""The free choices of the kernel for experts and activations of 8 bits with mma.sync: `EightBitExpertsMmaSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.passes.kernels.eight_bit_prefill_mma.schedule import EightBitPrefillMmaSchedule
from lowbit.passes.kernels.experts_mma.schedule import ExpertsMmaSchedule


@dataclass(frozen=True)
class EightBitExpertsMmaSchedule(EightBitPrefillMmaSchedule, ExpertsMmaSchedule):
    """The free choices of the kernel for experts and activations of 8 bits with mma.sync: those of
    `ExpertsMmaSchedule`, with panels of 128 or 256 columns.

    A tile's slots are cut into parts as in `EightBitPrefillMmaSchedule`.
    """

    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ExpertsMmaSchedule.allowed,
        "panel_k": EightBitPrefillMmaSchedule.allowed["panel_k"],
    }

    tokens: int = 32
    row_blocks: int = 1
