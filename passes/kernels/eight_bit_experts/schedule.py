"""The free choices of the kernel for experts and activations of 8 bits on Hopper: `EightBitExpertsSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.experts.schedule import ExpertsSchedule


@dataclass(frozen=True)
class EightBitExpertsSchedule(EightBitPrefillSchedule):
    """The free choices of the kernel for experts and activations of 8 bits on Hopper: those of
    `EightBitPrefillSchedule` that concern one block alone.

    tokens        slots of a tile, which are those of one expert: as in `ExpertsSchedule`
    panel_k       columns of x that are copied and multiplied at a time: 128 or 256
    parts, banks  as there
    cluster, split_k, last_split_k  1
    stream_k      "off"
    last_tokens   0
    """

    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ExpertsSchedule.allowed,
        **{name: EightBitPrefillSchedule.allowed[name] for name in ("panel_k", "parts", "banks")},
    }

    tokens: int = 128
