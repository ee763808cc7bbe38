"""Tables in shared memory that turn codes into numbers: their shape, and where a code finds its entry.

A table has an entry of 32 bits per index, and every entry 32 times, once per lane of a warp: entry i of lane l is word
32 i + l, in bank l. So lanes that look up different entries never meet in a bank, and a lookup is one pass through
shared memory (without copies, 32 random lanes would take about three and a half).

Up to four bits an entry is a pair of 16-bit numbers, and its index the codes of both, the second above the first. With
more bits, or in f32, an entry is one number, in both halves of the word if it has 16 bits, and its index is the code.

A table for scales, of which there are few, has every entry once: 1 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.layouts.shared_memory import BANK_BYTES, BANKS

PAIRED_BITS = 4  # the table of pairs takes 32 KiB then; with another bit it would take 128


@dataclass(frozen=True)
class DecodeTable:
    """The table that decodes `format` to `element` ("f16", "bf16" or "f32"), with every entry `copies` times: once per
    lane, or once."""

    format: DType
    element: str
    copies: int = BANKS

    @property
    def paired(self) -> bool:
        """Whether an entry holds the numbers of two codes."""
        return self.element != "f32" and self.format.bits <= PAIRED_BITS

    @property
    def shape(self) -> tuple[int, int]:
        """Entries and copies, of 32-bit words."""
        return 1 << self.format.bits * (2 if self.paired else 1), self.copies

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.copies * BANK_BYTES

    def codes(self) -> NDArray[np.int64]:
        """The codes that an entry stands for: [entries, 2] if paired, else [entries, 1]."""
        index = np.arange(self.shape[0])
        if not self.paired:
            return index[:, None]
        return np.stack([index % self.format.codes, index // self.format.codes], axis=1)
