"""What the free choices of the kernel for few slots of each expert and activations of 8 bits are:
`EightBitExpertsDecodeSchedule`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.experts_decode.schedule import ExpertsDecodeSchedule


@dataclass(frozen=True)
class EightBitExpertsDecodeSchedule(ExpertsDecodeSchedule):
    """The free choices of the kernel for few slots of each expert and activations of 8 bits: those of
    `ExpertsDecodeSchedule` without raw_codes: codes are multiplied as they are stored or with signs in any case."""

    most_overlapping: ClassVar[int] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.raw_codes:
            raise SpecError("schedule: eight_bit_experts_decode needs raw_codes=False; got raw_codes=True")
