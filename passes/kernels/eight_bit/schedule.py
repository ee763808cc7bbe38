"""The free choices of the kernels for activations of 8 bits: `EightBitSchedule`."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.decode.schedule import Schedule


@dataclass(frozen=True)
class EightBitSchedule(Schedule):
    """The free choices of the kernels for activations of 8 bits: those of `Schedule` without preload_weights and
    raw_codes: codes are multiplied as they are stored or with signs in any case."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("preload_weights", "raw_codes"):
            if getattr(self, name):
                raise SpecError(f"schedule: eight_bit needs {name}=False; got {name}=True")
