"""Tables of lookup formats for tests."""

from __future__ import annotations

import numpy as np


def table(bits: int, magnitude: float = 1.0) -> tuple[float, ...]:
    """A table of 2^bits numbers, the same at every call."""
    return tuple(magnitude * np.random.default_rng(bits).standard_normal(1 << bits))
