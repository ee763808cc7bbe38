"""What the default search for ranges does to the output of layers: `python -m benchmarks quality --ranges`.

Layers are those of several models (`layers.py`). The table has the squared output error on held-out text relative to
that with whole ranges: the geometric mean over the layers with few large weights (kurtosis above 10) and over the
others, the worst of all, and the worst on text of another kind, each with its chance (`spread`). A method with data has
seen the calibration text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

import lowbit
from benchmarks.quality.layers import LARGE, TEXTS, Layer
from benchmarks.quality.section import Record, Section
from benchmarks.quality.spread import Spread, over_draws, ratio_of, worst
from benchmarks.tables import markdown
from lowbit.pylib.quantization.calibration import output_errors
from lowbit.pylib.quantization.grid import Grid
from lowbit.pylib.quantization.rtn import Range, search, whole

SECTION = Section("ranges", "ranges")
CONFIGS: Mapping[str, lowbit.QuantConfig] = {
    **{f"{name} per row": lowbit.QuantConfig(name, None) for name in ("u8", "i8", "u6", "i6", "u4")},
    **{f"{name} per 128": lowbit.QuantConfig(name, 128) for name in ("u8", "u4", "u3")},
    "u2 per 64": lowbit.QuantConfig("u2", 64),
    "i4 per 32": lowbit.QuantConfig("i4", 32),
    "mxfp4": lowbit.QuantConfig("f4e2m1", 32, scale="e8m0"),
    "u4 per 128, GPTQ": lowbit.QuantConfig("u4", 128, method="gptq"),
    "u3 per 128, GPTQ": lowbit.QuantConfig("u3", 128, method="gptq"),
}
"""What is measured, by what the table calls it."""
WORST = 1.02  # of the whole range's error, which no layer may exceed on held-out text but by chance (`roundings`)


def compared(layer: Layer, found: Tensor, other: Tensor) -> list[list[float]]:
    """Returns the ratio of squared output errors (`Ratio`), on held-out and on other text, of two weights [n, k] that
    methods have found for a layer."""

    def errors(weight: Tensor, text: str) -> Tensor:
        return output_errors((weight - layer.weight).double(), layer.moments[text].hessian.double())

    return [ratio_of(errors(found, text), errors(other, text)) for text in TEXTS[1:]]


@torch.no_grad()
def measure(found: Iterable[Layer]) -> Iterator[Record]:
    """Yields a record for each layer and draw: its kurtosis, and by configuration the ratio of errors (`Ratio`), on
    held-out and other text."""
    for layer in found:
        by_name = {name: ratios(layer, config) for name, config in CONFIGS.items() if _fits(layer, config)}
        held, other = ({name: both[text] for name, both in by_name.items()} for text in (0, 1))
        yield {**layer.about, "ratios": held, "other": other}


def _fits(layer: Layer, config: lowbit.QuantConfig) -> bool:
    """Tells whether groups divide the columns of a layer."""
    return config.group_size is None or layer.weight.shape[1] % config.group_size == 0


def ratios(layer: Layer, config: lowbit.QuantConfig) -> list[list[float]]:
    """Returns the ratio of errors (`Ratio`) on held-out and on other text."""
    weights = (
        lowbit.quantize(layer.weight, each, layer.moments["calibration"]).dequantize()
        for each in (config, replace(config, clip="max"))
    )
    return compared(layer, *weights)


@torch.no_grad()
def with_wider_ranges(layer: Layer, config: lowbit.QuantConfig, factor: float) -> list[list[float]]:
    """Returns `ratios` where all ranges, searched and whole ones, are wider by a factor near 1: how much of a ratio is
    how weights happen to be rounded.

    config   of rounding to nearest, with one level of scales
    """
    grid = Grid(config.multiplied_in("f16"), layer.weight.shape[1], layer.weight.device)
    low, high = grid.groups(layer.weight).aminmax(dim=-1)

    def wider(span: Range) -> Tensor:
        scales, zeros = grid.fit(low * span.ratio * factor, high * span.ratio * factor)
        return grid.dequantize(grid.quantize(layer.weight, scales, zeros))

    return compared(layer, wider(search(layer.weight, grid)), wider(whole(layer.weight, grid)))


def by_kurtosis(records: list[Record]) -> dict[str, list[Record]]:
    """Returns records of layers with few large weights and of the others, by the head of their column; none without
    layers."""
    parts: dict[str, list[Record]] = {}
    for sign, large in (("above", True), ("below", False)):
        if part := [each for each in records if (each["kurtosis"] > LARGE) == large]:
            parts[f"{len({each['layer'] for each in part})} layers, kurtosis {sign} {LARGE}"] = part
    return parts


def table(records: list[Record]) -> str:
    """Returns the page's table."""
    parts = by_kurtosis(records)
    head = ["", *parts, "worst layer", "which", "worst on other text"]
    return markdown(head, [_row(name, records, parts.values()) for name in CONFIGS])


def _row(name: str, records: list[Record], parts: Iterable[list[Record]]) -> list[str]:
    means = [str(over_draws(part, lambda each: each["ratios"][name])) for part in parts]
    (layer, ratio), (_, other) = worst_of(name, records), worst_of(name, records, "other")
    return [name, *means, f"{ratio:.3f}", layer, f"{other:.3f}"]


def worst_of(name: str, records: list[Record], text: str = "ratios") -> tuple[str, Spread]:
    """Returns the layer in which a configuration costs most, on a text as records call it, and the ratio of errors."""
    return worst(records, lambda each: each[text][name])
