"""Plans of the small model on text of two kinds, over seeds: `python -m benchmarks.quality.plans_by_text`.

At each size the plan is beside the best choice for all layers alike that is not larger, and at the size of llama.cpp's
mixes Q3_K_M and Q4_K_M beside these: K-quants with an importance matrix (ours, which are no worse than llama.cpp's by
`references.py`), and the types that llama_tensor_get_type in llama-quant.cpp gives each layer. A seed chooses the
windows on which layers are probed and calibrated. Divergences are those of verses and of the project's documentation,
neither of which was seen. Layers are calibrated on the float model's inputs, alike for all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

import lowbit
from benchmarks.quality.layers import documentation
from benchmarks.quality.measure import CALIBRATION_WINDOWS, layer_names, predictions, probes, windows, windows_of
from benchmarks.quality.model import Transformer, load
from benchmarks.quality.section import Record, Section
from benchmarks.tables import markdown
from lowbit.pylib.nn.observe import calibrations
from lowbit.pylib.nn.sensitivity import CANDIDATES, kl_divergence

SECTION = Section("plans_by_text", "plans by text")
BITS, SEEDS, TEST_WINDOWS = (3.25, 3.5, 4.0, 4.5), 3, 32
TEXTS = ("verses", "other text")
Configs = Mapping[str, lowbit.QuantConfig]


def measure() -> Iterator[Record]:
    """Yields a record for each seed and size: the divergences of the plan and of what it is beside, on each text."""
    model = load()
    context = model.shape.context
    verses, other = windows("held_out.txt", TEST_WINDOWS, context), "\n".join(documentation())
    tests = verses, windows_of(other, TEST_WINDOWS, context)
    expected = [predictions(model, test) for test in tests]
    text = windows("calibration.txt", 4 * CALIBRATION_WINDOWS, context)
    for seed in range(SEEDS):
        chosen = torch.randperm(len(text), generator=torch.Generator().manual_seed(seed))[:CALIBRATION_WINDOWS]
        training = text[chosen]
        found = lowbit.sensitivity(model, calibration=probes(training), act="f16")
        quantizer = Quantizer(model, training)
        for name, alike, size in _others(model):
            plan = found.plan(bytes=size)
            both = [_divergences(quantizer.model(configs), tests, expected) for configs in (plan, alike)]
            bits = 8 * size / found.weights
            yield {"seed": seed, "name": name, "bits": round(bits, 3), "plan": both[0], "other": both[1]}


def _others(model: Transformer) -> Iterator[tuple[str, Configs, int]]:
    """Yields what plans are beside: a name, each layer's configuration, and the bytes that a plan may take."""
    names = layer_names(model)
    shapes = {name: model.get_submodule(name).get_parameter("weight").shape for name in names}
    weights = sum(shape.numel() for shape in shapes.values())

    def size(configs: Configs) -> int:
        return sum(config.spec(*shapes[name]).bytes for name, config in configs.items())

    for bits in BITS:
        alike = [dict.fromkeys(names, config) for config in CANDIDATES]
        best = max((configs for configs in alike if size(configs) <= bits * weights / 8), key=size)
        config = best[names[0]]
        yield f"{config.weight} per {config.group_size}, GPTQ", best, int(bits * weights / 8)
    for mix, rule in MIXES.items():
        parts = {name: name.split(".") for name in names}
        kinds = {name: rule(kind, int(block), len(model.blocks)) for name, (_, block, _, kind) in parts.items()}
        presets = {name: lowbit.QuantConfig.preset(kind) for name, kind in kinds.items()}
        mixed = {name: replace(preset, calibration="importance") for name, preset in presets.items()}
        yield mix, mixed, size(mixed)


def q3_k_m(kind: str, block: int, blocks: int) -> str:
    """Returns the type of a layer in llama.cpp's mix Q3_K_M: q, k, v, o, gate, up or down of a block. What is
    q, k and v together counts as v."""
    if kind == "v":
        return "q5_k" if block < 2 else "q4_k"
    if kind == "down":
        return "q5_k" if block < blocks // 16 else "q4_k"
    return "q4_k" if kind == "o" else "q3_k"


def q4_k_m(kind: str, block: int, blocks: int) -> str:
    """Returns the same of its mix Q4_K_M."""
    eighth = blocks // 8
    more = block < eighth or block >= 7 * blocks // 8 or (block - eighth) % 3 == 2
    return "q6_k" if kind in ("v", "down") and more else "q4_k"


MIXES = {"Q3_K_M": q3_k_m, "Q4_K_M": q4_k_m}


class Quantizer:
    """Quantizes layers of a model, calibrated on a text; each layer by each configuration once."""

    def __init__(self, model: Transformer, training: Tensor) -> None:
        self._model = model
        names = layer_names(model)
        seen = calibrations(model, {name: model.get_submodule(name) for name in names}, [training[:, :-1]])
        data = {name: observed.data for name, observed in seen}
        weight = {name: model.get_submodule(name).get_parameter("weight") for name in names}
        self._dequantized = cache(lambda name, config: lowbit.quantize(weight[name], config, data[name]).dequantize())

    def model(self, configs: Configs) -> Transformer:
        """Returns a model whose layers are quantized and dequantized."""
        result = copy.deepcopy(self._model)
        for name, config in configs.items():
            result.get_submodule(name).get_parameter("weight").copy_(self._dequantized(name, config))
        return result


def _divergences(model: Transformer, tests: tuple[Tensor, ...], expected: list[Tensor]) -> list[float]:
    """Returns the mean divergence of each text's predictions."""
    found = (predictions(model, test) for test in tests)
    return [float(f"{kl_divergence(before, after):.4g}") for before, after in zip(expected, found)]


def table(records: list[Record]) -> str:
    """Returns the page's table: means over seeds of divergences in thousandths, and of ratios with deviations."""
    head = ["beside the plan", "bits per weight", *(f"{part}, {text}" for text in TEXTS for part in ("plan", "ratio"))]
    names = list(dict.fromkeys((record["name"], record["bits"]) for record in records))
    return markdown(head, [_row(name, bits, records) for name, bits in names])


def _row(name: str, bits: float, records: list[Record]) -> list[str]:
    found = [record for record in records if (record["name"], record["bits"]) == (name, bits)]
    cells = [name, f"{bits:.2f}"]
    for text in range(len(TEXTS)):
        plan = sum(record["plan"][text] for record in found) / len(found)
        ratios = [record["plan"][text] / record["other"][text] for record in found]
        mean = sum(ratios) / len(ratios)
        spread = math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / max(len(ratios) - 1, 1))
        cells += [f"{1000 * plan:.3g}", f"{mean:.2f} ± {spread:.2f}"]
    return cells


if __name__ == "__main__":
    SECTION.publish(measure, table)
