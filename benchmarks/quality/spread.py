"""Ratios of errors over draws of data: their mean, how far they are apart, and the words for them.

A draw is a part of each text that no other draw has (`layers.DRAWS`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.quality.section import Record

FAIR = 1.03  # of the others' error, up to which ours counts as equal


@dataclass(frozen=True)
class Spread:
    """A number over draws.

    mean       over the draws
    deviation  their standard deviation; None of one draw
    """

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Returns that of one number for each draw."""
        return cls(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)

    def __format__(self, form: str) -> str:
        """Returns both numbers, of which the mean alone has a sign: "+0.010 ± 0.014" by the form "+.3f"."""
        form = form or ".2f"
        return f"{self.mean:{form}}" + ("" if self.deviation is None else f" ± {self.deviation:{form.lstrip('+')}}")

    def __str__(self) -> str:
        return format(self)


def mean(numbers: Iterable[float]) -> float:
    """Returns the geometric mean."""
    return math.exp(statistics.fmean(map(math.log, numbers)))


def over_draws(records: Iterable[Record], ratio: Callable[[Record], float]) -> Spread:
    """Returns the geometric mean of a ratio over layers, each with the mean over its draws. The deviation is that of
    the mean over the layers that have the most draws: rather too large, where these are few."""
    by_layer = {layer: list(map(ratio, found)) for layer, found in _by_layer(records).items()}
    draws = max(map(len, by_layer.values()))
    of_all = mean(map(statistics.fmean, by_layer.values()))
    drawn = [mean(each) for each in zip(*(found for found in by_layer.values() if len(found) == draws), strict=True)]
    return Spread(of_all, Spread.of(drawn).deviation)


def worst(records: Iterable[Record], ratio: Callable[[Record], float]) -> tuple[str, Spread]:
    """Returns the layer whose mean ratio over its draws is the largest, and that ratio."""
    found = {layer: Spread.of(list(map(ratio, of))) for layer, of in _by_layer(records).items()}
    return max(found.items(), key=lambda each: each[1].mean)


def _by_layer(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Returns the records of each layer, by draw."""
    found: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda each: each["draw"]):
        found.setdefault(record["layer"], []).append(record)
    return found


def verdict(ratios: Sequence[Spread], layer: Spread) -> str:
    """Returns the words for ratios of our errors to others': by the largest, as no kind of layer or text may lose.

    layer   that of the worst one, which is named where it is worse by more than its spread
    """
    worse = layer.mean > FAIR and not _is_one(layer)
    return _word(max(ratios, key=lambda each: each.mean)) + (f", but one layer is {_percent(layer)} worse" * worse)


def _word(ratio: Spread) -> str:
    if _is_one(ratio):
        return "equal within the spread"
    if ratio.mean < 1 / FAIR:
        return "better"
    return "equal within 3 %" if ratio.mean <= FAIR else "worse"


def _is_one(ratio: Spread) -> bool:
    """Tells whether a ratio is 1 within its spread."""
    return ratio.deviation is not None and abs(ratio.mean - 1) <= ratio.deviation


def _percent(ratio: Spread) -> str:
    deviation = None if ratio.deviation is None else 100 * ratio.deviation
    return f"{Spread(100 * (ratio.mean - 1), deviation):.0f} %"
