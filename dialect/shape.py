"""How large a weight is: `Shape`, one of the parts of a `MatmulSpec`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import integer

MIN_K = 16  # the K of the mma: shorter groups and shorter rows would share a fragment


@dataclass(frozen=True)
class Shape:
    """The shape of a weight W [n, k].

    n   rows, the outputs of a matmul; at least 1
    k   columns, its inputs; at least 16

    Raises SpecError that names the field, what was given and what is allowed.
    """

    n: int
    k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", integer("n", self.n, 1))
        object.__setattr__(self, "k", integer("k", self.k, MIN_K))

    def __str__(self) -> str:
        return f"[{self.n}, {self.k}]"

    def group_size(self, given: object) -> int:
        """Returns a number of columns that share a scale. Raises SpecError, with the nearest that are allowed, unless
        it is at least 16 and divides k."""
        g = integer("group_size", given, 1)
        if g >= MIN_K and self.k % g == 0:
            return g
        divisors = self._group_sizes()
        below, above = [d for d in divisors if d < g][-1:], [d for d in divisors if d > g][:1]
        rule = f"must divide k={self.k}" if g >= MIN_K else f"must be at least {MIN_K} and divide k={self.k}"
        fix = " or ".join(str(d) for d in below + above)
        raise SpecError(f"group_size={g} {rule}; try {fix}, or None for one scale per row")

    def _group_sizes(self) -> list[int]:
        """Returns the sizes of groups that rows can be cut into."""
        small = [d for d in range(1, math.isqrt(self.k) + 1) if self.k % d == 0]
        return sorted(d for d in {*small, *(self.k // d for d in small)} if d >= MIN_K)
