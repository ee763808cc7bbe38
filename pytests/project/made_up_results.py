"""Made-up results of benchmarks, for tests of what is made of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.results import Record, Results

ENVIRONMENT: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "driver": "580.159.04",
    "versions": {"torch": "2.11.0"},
    "commit": "0123456789ab",
    "sources": "abc",
    "date": "2026-11-21T00:00:00+00:00",
}
SPEEDS = {"lowbit": 1.1, "humming": 1.35, "gemlite": 2.2}  # times as long as the floor
BITS = {"u8": 8, "f6e3m2": 6, "u5": 5, "u4": 4, "i3": 3, "u2": 2, "i1": 1}
TOKENS = (1, 2, 4, 8, 16, 32, 64)


def made_up(formats: Sequence[str] = tuple(BITS), tokens: Sequence[int] = TOKENS) -> Results:
    """Returns plausible numbers: memory at 4.3 TB/s, cuBLAS at twice the floor of 16 bits."""
    results = Results(None, ENVIRONMENT)
    results.add(record_of("peak", "u4", 8192, 8192, 8192, 1428.0) | {"tflops": 770.0})
    for n, k in ((4096, 4096), (8192, 8192), (8192, 28672), (57344, 8192)):
        for weight in formats:
            size = n * k * (BITS[weight] + 0.125) / 8
            floor = size / 4.3e6 + 0.5
            results.add(record_of("floor", weight, n, k, 0, floor) | {"bytes": size})
            for m in tokens:
                if weight == formats[0]:
                    results.add(record_of("torch", None, n, k, m, n * k / 2.1e6 + 3) | {"bytes": 2 * n * k})
                for peer, factor in SPEEDS.items():
                    if peer == "gemlite" and weight not in ("u8", "u4", "u2", "i1"):
                        results.add(
                            record_of(peer, weight, n, k, m) | {"skipped": "integers of 1, 2, 4 and 8 bits only"}
                        )
                        continue
                    slower = {"lowbit": 0.02, "humming": 0.03, "gemlite": 0.25}[peer]
                    time = (floor + 0.5) * factor * (1 + slower * m**0.75)
                    results.add(record_of(peer, weight, n, k, m, time) | {"bytes": size})
    return results


def record_of(peer: str, weight: str | None, n: int, k: int, m: int, us: float | None = None) -> Record:
    """Returns the record of a measurement in groups of 128, or of dense weights without `weight`; us: its time."""
    about = {"group_size": 128, "zeros": "none"} if weight else {"group_size": None, "zeros": None}
    key = {"peer": peer, "weight": weight, "act": "f16", "n": n, "k": k, "m": m} | about
    times = {} if us is None else {"us": us, "best_us": us, "worst_us": us, "right": True, "error": 1e-4}
    return key | {"shape": f"{n} x {k}"} | times
