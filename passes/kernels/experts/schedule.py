"""What the free choices of the kernel for experts on Hopper are: `ExpertsSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.passes.kernels.persistent.schedule import PrefillSchedule, RowsOfSlots

_SHORT = 4  # times as many slots as a short tile has at most are those of a tile
_LEAST = 128  # slots of a tile, from which on there are short ones
_UNIT = 8  # slots of which products have a multiple


def short_slots(tile: int) -> int:
    """Returns how many slots a short tile has at most, where tiles have up to `tile`; 0 where none is short."""
    return tile // (_SHORT * _UNIT) * _UNIT if tile >= _LEAST else 0


def short_sizes(schedule: PrefillSchedule) -> tuple[int, ...]:
    """Returns the values of `last_tokens` besides 0: the slots of short tiles, if a product has so many."""
    short = short_slots(schedule.tokens)
    return (short,) if 0 < short <= schedule.part_tokens else ()


@dataclass(frozen=True)
class ExpertsSchedule(RowsOfSlots, PrefillSchedule):
    """The free choices of the kernel for experts on Hopper: those of `PrefillSchedule` that concern one block alone,
    and where rows of x come from.

    tokens        slots of a tile, which are those of one expert: 32, or a multiple of 16 from 64 to 256. Who makes the
                  table of tiles must know it
    last_tokens   slots of short tiles (`short_slots`), which narrower products multiply; 0: those of others do
    gather        whether the rows of x are those that a list names; if not, the list is not read: a slot has the row of
                  its own number, which the copy engine brings, and a launch before may have put it there
    panel_k       columns of x that are copied and multiplied at a time: 64 or 128
    num_stages    panels of x in shared memory: 4, 6 or 8
    cluster, split_k, last_split_k  1
    stream_k      "off"
    """

    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tokens": (32, *range(64, 257, 16)),
        "panel_k": (64, 128),
        "num_stages": (4, 6, 8),
        "cluster": (1,),
        "split_k": (1,),
        "stream_k": ("off",),
        "last_tokens": (0, *range(32, 65, 8)),
        "last_split_k": (1,),
        "gather": (False, True),
    }

    tokens: int = 128

    def slice_sizes(self, last_split_k: int) -> tuple[int, ...]:
        return short_sizes(self)
