"""Quantizers beside the code of other libraries: `python -m benchmarks quality --references`.

What other code makes of a layer comes from `adapters.py`. References whose code is not there are left out, with a
sentence. Layers are those of `layers.py`, an error is the squared error of a layer's output on held-out text and on
text of another kind, and the table has the ratio of our error to theirs at equal bits. GGUF's types are beside
llama.cpp in `references.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

import lowbit
from benchmarks.quality import adapters
from benchmarks.quality.layers import Layer
from benchmarks.quality.ranges import by_kurtosis, compared
from benchmarks.quality.section import Record, Section
from benchmarks.quality.spread import Ratio, over_draws, verdict, worst
from benchmarks.tables import markdown

SECTION = Section("authors", "authors")
CLONES = {
    name: f"clone {project} onto PYTHONPATH"
    for name, project in (("gptq", "IST-DASLab/gptq"), ("spqr_engine", "Vahe1994/SpQR"), ("awq", "mit-han-lab/llm-awq"))
}
"""How to get what is no package of the same name, by what is imported."""


@dataclass(frozen=True)
class Reference:
    """A quantizer of another library, and ours of the same size.

    name      what the table calls it
    library   what is imported
    quantize  what it makes of a weight
    ours      of the same bits per weight; with outliers, of at most as many
    """

    name: str
    library: str
    quantize: adapters.Adapter
    ours: lowbit.QuantConfig

    @property
    def is_there(self) -> bool:
        """Whether the library is installed."""
        return importlib.util.find_spec(self.library) is not None


def _references() -> Iterator[Reference]:
    """Yields what ours are compared with."""
    preset = lowbit.QuantConfig.preset
    yield Reference("bitsandbytes NF4, blocks of 64", "bitsandbytes", adapters.bitsandbytes, preset("nf4"))
    for mode in ("FLOOR", "RCEIL", "EVEN"):
        yield Reference(f"torchao MXFP4, {mode}", "torchao", adapters.mx(mode), preset("mxfp4"))
    yield Reference("torchao NVFP4", "torchao", adapters.nvfp4, preset("nvfp4"))
    for library, adapter in (("torchao", adapters.torchao_hqq), ("hqq", adapters.hqq)):
        for bits in (4, 3, 2):
            ours = lowbit.QuantConfig(f"u{bits}", 64, method="hqq")
            yield Reference(f"{library} HQQ u{bits}, groups of 64", library, adapter(bits), ours)
    for bits, group_size in ((4, 128), (3, 128), (2, 64)):
        ours, name = lowbit.QuantConfig(f"u{bits}", group_size, method="gptq"), f"GPTQ u{bits}, groups of {group_size}"
        order: Any = {"actorder": True, "static_groups": True}
        yield Reference(name, "gptq", adapters.gptq(bits, group_size), ours)
        yield Reference(f"{name}, act-order", "gptq", adapters.gptq(bits, group_size, **order), ours)
        searched = adapters.gptq(bits, group_size, searched=True, **order)
        yield Reference(f"{name}, act-order, searched ranges", "gptq", searched, ours)
    for bits in (4, 3):
        ours = lowbit.QuantConfig(f"u{bits}", 128, method="awq")
        yield Reference(f"llm-awq u{bits}, groups of 128", "awq", adapters.llm_awq(bits, 128), ours)
    spqr, name = preset("spqr"), "SpQR u3, act-order"
    yield Reference(f"{name}, outliers", "spqr_engine", adapters.spqr(3, 0.2), spqr)
    yield Reference(f"{name}, outliers, damping 1", "spqr_engine", adapters.spqr(3, 0.2, damping=1.0), spqr)
    yield Reference(f"{name}", "spqr_engine", adapters.spqr(3, None), replace(spqr, outlier_threshold=None))
    for bits, group_size in ((3, 128), (2, 64)):
        ours = lowbit.QuantConfig(f"u{bits}", group_size, method="signround")
        name = f"AutoRound u{bits}, groups of {group_size}"
        yield Reference(name, "auto_round", adapters.auto_round(bits, group_size), ours)


REFERENCES = tuple(_references())
"""What ours are compared with."""


@torch.no_grad()
def measure(given: Iterable[Layer]) -> Iterator[Record]:
    """Yields a record for each layer and draw: its kurtosis, and by reference the ratio of errors on each text but the
    first; where theirs has outliers, the part of the weights that are outliers, of ours and of theirs. None where no
    library is installed."""
    found = [each for each in REFERENCES if each.is_there]
    for each in sorted({each.library for each in REFERENCES} - {each.library for each in found}):
        print(f"{each} is left out: it is not installed ({CLONES.get(each, f'pip install {each}')})", file=sys.stderr)
    for layer in given if found else ():
        yield {**layer.about, **_compared(layer, found)}


def _compared(layer: Layer, references: Iterable[Reference]) -> Record:
    calibration = layer.moments["calibration"]
    quantized = cache(lambda config: lowbit.quantize(layer.weight, config, calibration))
    ratios, outliers = dict[str, list[list[float]]](), dict[str, list[float]]()
    for each in references:
        ours, theirs = quantized(each.ours), each.quantize(layer.weight.clone(), calibration)
        ratios[each.name] = compared(layer, ours.dequantize(), theirs.weight)
        if theirs.outliers:
            count = 0 if ours.outliers is None else ours.outliers.values().numel()
            outliers[each.name] = [round(part, 5) for part in (count / layer.weight.numel(), theirs.outliers)]
    return {"ratios": ratios, **({"outliers": outliers} if outliers else {})}


def table(records: list[Record]) -> str:
    """Returns the page's table."""
    parts = by_kurtosis(records)
    head = ["reference", *parts, "worst layer", "all, other text", "verdict"]
    return markdown(head, [_row(name, records, parts.values()) for name in records[0]["ratios"]])


def _row(name: str, records: list[Record], parts: Iterable[list[Record]]) -> list[str]:
    def held(record: Record) -> Ratio:
        return record["ratios"][name][0]

    means, other = [over_draws(part, held) for part in parts], over_draws(records, lambda each: each["ratios"][name][1])
    layer = worst(records, held)[1]
    return [name, *map(str, (*means, layer, other)), verdict([*means, other], layer)]
