"""Methods beside GPTQ, by output error and by time: `python -m benchmarks quality --methods`.

Of the layers that are given every fourth is quantized, by all methods with the same calibration. The table has the
output error on held-out text and on text of another kind relative to GPTQ's, the time on a thread of a CPU relative to
GPTQ's, and the bits of a weight: what `quantize_` takes by default with calibration data should have the least error of
all that take at most three times GPTQ's time and no more bits.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import lowbit
from benchmarks.quality.layers import Layer
from benchmarks.quality.measure import bits_per_weight
from benchmarks.quality.ranges import by_kurtosis, compared
from benchmarks.quality.section import Record, Section
from benchmarks.quality.spread import Ratio, Spread, over_draws
from benchmarks.tables import markdown

SECTION = Section("methods", "methods")
EVERY, WIDTHS = 4, ("u4", "u3")
BASE = "GPTQ"
METHODS: Mapping[str, Mapping[str, Any]] = {
    BASE: {"method": "gptq"},
    "GPTQ, float zeros": {"method": "gptq", "zeros": "float"},
    "GPTQ, 2 beams": {"method": "gptq", "beams": 2},
    "GPTQ, 8 beams": {"method": "gptq", "beams": 8},
    "AWQ": {"method": "awq"},
    "SignRound": {"method": "signround"},
    'calibration="hessian"': {"calibration": "hessian"},
    'calibration="importance"': {"calibration": "importance"},
    "HQQ": {"method": "hqq"},
    "rounding to nearest": {},
}
"""What is measured in groups of 128, by what the table calls it: fields of `QuantConfig`."""


@torch.no_grad()
def measure(given: Iterable[Layer]) -> Iterator[Record]:
    """Yields a record for each layer, draw and width: by method the ratio of errors to GPTQ's (`Ratio`) on each text
    but the first, seconds and bits."""
    found = list(given)
    wanted = list(dict.fromkeys(layer.label for layer in found))[::EVERY]
    for layer in (layer for layer in found if layer.label in wanted):
        for width in WIDTHS:
            made = {name: _quantized(layer, lowbit.QuantConfig(width, 128, **how)) for name, how in METHODS.items()}
            base = made[BASE][0].dequantize()
            measured = {name: _measured(layer, base, *each) for name, each in made.items()}
            yield {**layer.about, "weight": width, "methods": measured}


def _quantized(layer: Layer, config: lowbit.QuantConfig) -> tuple[lowbit.QuantizedWeight, float]:
    """Returns what a method makes of a layer, and the seconds that it takes."""
    calibration, rows = layer.moments["calibration"], layer.weight[:8]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few tokens
        lowbit.quantize(rows, replace(config, steps=1), calibration)  # compiles what later calls have
        start = time.process_time()
        found = lowbit.quantize(layer.weight, config, calibration)
        return found, time.process_time() - start


def _measured(layer: Layer, base: Tensor, found: lowbit.QuantizedWeight, seconds: float) -> Record:
    errors = compared(layer, found.dequantize(), base)
    return {"errors": errors, "seconds": round(seconds, 3), "bits": round(bits_per_weight(found), 3)}


def table(records: list[Record]) -> str:
    """Returns the page's table."""
    parts = by_kurtosis([record for record in records if record["weight"] == WIDTHS[0]])
    head = ["", "bits", *parts, "all, other text", "time"]
    return markdown(head, [_row(name, width, records) for width in WIDTHS for name in METHODS])


def _row(name: str, width: str, records: list[Record]) -> list[str]:
    mine = [record for record in records if record["weight"] == width]
    held = [errors(name, part, 0) for part in by_kurtosis(mine).values()]
    cells = map(str, (*held, errors(name, mine, 1)))
    return [f"{width}, {name}", f"{mine[0]['methods'][name]['bits']:.2f}", *cells, f"{times(name, mine):.2f}"]


def errors(name: str, records: list[Record], text: int) -> Spread:
    """Returns the ratio of a method's error to GPTQ's over draws, on held-out (0) or on other text (1)."""
    return over_draws(records, lambda each: each["methods"][name]["errors"][text])


def times(name: str, records: list[Record]) -> float:
    """Returns the mean of the ratios of a method's time to GPTQ's."""

    def ratio(record: Record) -> Ratio:
        mine, base = (max(record["methods"][each]["seconds"], 1e-3) for each in (name, BASE))
        return mine / base, 0.0

    return over_draws(records, ratio).mean
