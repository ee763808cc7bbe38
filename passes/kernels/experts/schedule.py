"""What the free choices of the kernel for experts on Hopper are: `ExpertsSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.passes.kernels.persistent.schedule import PrefillSchedule


@dataclass(frozen=True)
class ExpertsSchedule(PrefillSchedule):
    """The free choices of the kernel for experts on Hopper: those of `PrefillSchedule` that concern one block alone.

    tokens        slots of a tile, which are those of one expert: 32, 64, 96, 128, 192 or 256. Who makes the table of
                  tiles must know it
    panel_k       columns of x that are copied and multiplied at a time: 64 or 128
    num_stages    panels of x in shared memory: 4, 6 or 8
    cluster, split_k, last_split_k  1
    stream_k      "off"
    last_tokens   0
    """

    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tokens": (32, 64, 96, 128, 192, 256),
        "panel_k": (64, 128),
        "num_stages": (4, 6, 8),
        "cluster": (1,),
        "split_k": (1,),
        "stream_k": ("off",),
        "last_tokens": (0,),
        "last_split_k": (1,),
    }

    tokens: int = 128
