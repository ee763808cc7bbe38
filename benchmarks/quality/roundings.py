"""Where the default search for ranges seems to cost a layer more than it may: how much of that is chance.

The table has the deviation over rows of a ratio (`spread`): where most of what the inputs are is one direction, or few
rows have large weights, it is large. And the ratio is taken again for other roundings of the same layer: with its
columns in other orders, so that others share a scale; with ranges that are a little wider, where a row has one scale;
and of the weight times a factor, where scales are powers of two.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

import lowbit
from benchmarks.quality import ranges
from benchmarks.quality.layers import Layer
from benchmarks.quality.section import Record, Section
from benchmarks.quality.spread import Spread
from benchmarks.tables import markdown

SECTION = Section("roundings", "roundings")
OTHERS = 7  # other roundings of a layer


@torch.no_grad()
def measure(found: Iterable[Layer]) -> Iterator[Record]:
    """Yields a record for each configuration and draw of a layer whose ratio in the table of ranges is too large."""
    above = list(too_large(ranges.SECTION.records()))
    for layer in found:
        for name in (name for name, label in above if label == layer.label):
            config = ranges.CONFIGS[name]
            others = [held for (held, _), _ in of_other_roundings(layer, config)]
            yield {**layer.about, "config": name, "ratio": ranges.ratios(layer, config)[0], "others": others}


def too_large(records: list[Record]) -> Iterator[tuple[str, str]]:
    """Yields each configuration and layer in whose records of `ranges` the mean ratio on held-out text is above what no
    layer may exceed."""
    for name in ranges.CONFIGS:
        by_layer: dict[str, list[float]] = {}
        for each in records:
            if name in each["ratios"]:
                by_layer.setdefault(each["layer"], []).append(each["ratios"][name][0])
        yield from ((name, layer) for layer, found in by_layer.items() if statistics.fmean(found) > ranges.WORST)


def of_other_roundings(layer: Layer, config: lowbit.QuantConfig) -> list[list[list[float]]]:
    """Returns `ranges.ratios` for OTHERS other roundings."""
    if config.scale == "e8m0":
        factors = [2 ** (i / (OTHERS + 1)) for i in range(1, OTHERS + 1)]
        return [ranges.ratios(replace(layer, weight=layer.weight * factor), config) for factor in factors]
    if config.group_size is None:
        return [ranges.with_wider_ranges(layer, config, 1 + 0.005 * i) for i in range(1, OTHERS + 1)]
    return [ranges.ratios(_in_other_order(layer, seed), config) for seed in range(OTHERS)]


def _in_other_order(layer: Layer, seed: int) -> Layer:
    """Returns a layer with its columns in a random order."""
    order = torch.randperm(layer.weight.shape[1], generator=torch.Generator().manual_seed(seed))
    hessians = {text: each.hessian[order][:, order] for text, each in layer.moments.items()}
    moments = {text: lowbit.Calibration.from_hessian(each) for text, each in hessians.items()}
    return replace(layer, weight=layer.weight[:, order].contiguous(), moments=moments)


def others(records: Iterable[Record]) -> Spread:
    """Returns the ratio for other roundings, over these and over draws."""
    return Spread.of([ratio for each in records for ratio in each["others"]])


def table(records: list[Record]) -> str:
    """Returns the page's table."""
    pairs: dict[tuple[str, str], list[Record]] = {}
    for each in records:
        pairs.setdefault((each["layer"], each["config"]), []).append(each)
    head = ["layer", "format", "ratio", "± over rows", "for other roundings"]
    return markdown(head, [_row(*pair, found) for pair, found in pairs.items()])


def _row(layer: str, config: str, found: list[Record]) -> list[str]:
    ratio, deviation = map(statistics.fmean, zip(*(each["ratio"] for each in found)))
    return [layer, config, f"{ratio:.3f}", f"{deviation:.3f}", f"{others(found):.3f}"]
