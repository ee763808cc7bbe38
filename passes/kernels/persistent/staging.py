"""How y is turned around in shared memory on its way out, in numbers: `Staging`. No MLIR is needed here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.schedule import WARPS, PrefillSchedule

_TOKENS = (64, 48, 32, 16)  # that are turned around at a time: the first of these that divides a tile's;
_MOST_UNEVEN = 40  # where none does: all of a tile at once if it has no more than these, else 32 at a time


@dataclass(frozen=True)
class Staging:
    """What a warp turns around at a time: sums of `rows` rows of y and up to `tokens` tokens, at most `most`."""

    spec: MatmulSpec
    schedule: PrefillSchedule
    most: int = _TOKENS[0]

    @property
    def tokens(self) -> int:
        """Tokens at a time, at most."""
        tokens = min(self.schedule.part_tokens, self.schedule.tokens // self.schedule.split_k)
        uneven = tokens if tokens <= _MOST_UNEVEN else 32
        return min(self.most, next((n for n in _TOKENS if n <= self.most and tokens % n == 0), uneven))

    def pieces(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Yields what is turned around at a time of so many tokens' sums: the first token, and how many."""
        most = self.tokens
        size = next((n for n in _TOKENS if n <= most and tokens % n == 0), min(most, tokens))
        for first in range(0, tokens, size):
            yield first, min(size, tokens - first)

    @property
    def pitch(self) -> int:
        """Numbers from a token to the next there: the rows of a warp, and 16 bytes against bank conflicts."""
        return self.rows + self.spec.y.per_vector

    @property
    def rows(self) -> int:
        """Rows of y of a warp."""
        return ROWS // 2 if self.spec.is_gated else ROWS

    @property
    def shared_bytes(self) -> int:
        """Shared memory of all warps."""
        return WARPS * self.tokens * self.pitch * self.spec.y.bytes
