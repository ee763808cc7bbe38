"""Ratios of errors of layers: their mean, how much of them is chance, and the words for them.

Two kinds of chance are added in quadrature: which text was drawn (a draw is a part of each text that no other draw has,
`layers.DRAWS`), and which rows a layer has. An output error is a sum over rows, each of which is rounded by itself; so
rows are drawn anew, with replacement (the bootstrap).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.quality.section import Record

FAIR = 1.03  # of the others' error, up to which ours counts as equal
RESAMPLES = 1000  # of the rows of a layer
Ratio = Sequence[float]
"""A ratio of two errors, and its standard deviation over choices of rows."""


def ratio_of(errors: Tensor, others: Tensor) -> list[float]:
    """Returns the ratio of a layer's error to another, as `Ratio`; both for each row [n]."""
    drawn = torch.randint(len(errors), (RESAMPLES, len(errors)), generator=torch.Generator().manual_seed(0))
    deviation = (errors[drawn].sum(1) / others[drawn].sum(1)).std()
    return [round(float(each), 4) for each in (errors.sum() / others.sum(), deviation)]


@dataclass(frozen=True)
class Spread:
    """A number, and how much of it is chance.

    mean       over draws
    deviation  its standard deviation; None where it is not known
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


def over_draws(records: Iterable[Record], ratio: Callable[[Record], Ratio]) -> Spread:
    """Returns the geometric mean of a ratio over layers, each with the mean over its draws. The deviation over texts is
    that of the mean over the layers that have the most draws: rather too large, where these are few. Over rows it is by
    how much logarithms grow with the deviation of each layer."""
    by_layer = list(_by_layer(records, ratio).values())
    draws = max(map(len, by_layer))
    means = [Spread.of([mean for mean, _ in found]).mean for found in by_layer]
    of_all = mean(means)
    drawn = [mean(each for each, _ in found) for found in zip(*(found for found in by_layer if len(found) == draws))]
    parts = [math.log1p(_of_rows(found) / each) for found, each in zip(by_layer, means)]
    return Spread(of_all, _both(Spread.of(drawn).deviation, of_all * math.hypot(*parts) / len(parts)))


def worst(records: Iterable[Record], ratio: Callable[[Record], Ratio]) -> tuple[str, Spread]:
    """Returns the layer whose mean ratio over its draws is the largest, and that ratio."""
    found = {layer: _of_layer(measured) for layer, measured in _by_layer(records, ratio).items()}
    return max(found.items(), key=lambda each: each[1].mean)


def _of_layer(found: Sequence[Ratio]) -> Spread:
    """Returns the ratio of a layer, of which there is one for each draw."""
    over_texts = Spread.of([mean for mean, _ in found])
    return Spread(over_texts.mean, _both(over_texts.deviation, _of_rows(found)))


def _of_rows(found: Sequence[Ratio]) -> float:
    """Returns the deviation over rows of a layer, which are the same in all draws."""
    return statistics.fmean(deviation for _, deviation in found)


def _both(of_texts: float | None, of_rows: float) -> float:
    return math.hypot(of_texts or 0.0, of_rows)


def _by_layer(records: Iterable[Record], ratio: Callable[[Record], Ratio]) -> dict[str, list[Ratio]]:
    """Returns the ratios of each layer, by draw."""
    found: dict[str, list[Ratio]] = {}
    for record in sorted(records, key=lambda each: each["draw"]):
        found.setdefault(record["layer"], []).append(ratio(record))
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
