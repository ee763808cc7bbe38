"""The free choices of the prefill kernel for activations of 8 bits with mma.sync: `EightBitPrefillMmaSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.passes.kernels.prefill_mma.schedule import PartsOfTokens, PrefillMmaSchedule


@dataclass(frozen=True)
class EightBitPrefillMmaSchedule(PartsOfTokens):
    """The free choices of the prefill kernel for activations of 8 bits with mma.sync: those of `PrefillMmaSchedule`,
    with panels of 128 or 256 columns.

    A tile's tokens are cut into parts, of which every warp has some: so products that are not added yet take few
    registers.
    """

    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {**PrefillMmaSchedule.allowed, "panel_k": (128, 256)}

    panel_k: int = 128
