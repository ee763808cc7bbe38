"""Plans of the small model on text of two kinds, over seeds: `python -m benchmarks.quality.plans_by_text`.

At each size the plan is beside the best choice for all layers alike that is not larger, and at the size of llama.cpp's
mixes Q3_K_M and Q4_K_M beside these: K-quants with an importance matrix (ours, which `references.py` has beside
llama.cpp's), and the types that llama_tensor_get_type in llama-quant.cpp gives each layer. A seed chooses the
windows on which layers are probed and calibrated. Divergences are those of verses and of the project's documentation,
neither of which was seen. Layers are calibrated on the float model's inputs, alike for all. Plans are those of the
default, and those that go by what was measured alone (trust=1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import lowbit
from benchmarks.quality.layers import documentation
from benchmarks.quality.measure import CALIBRATION_WINDOWS, layer_names, probes, windows, windows_of
from benchmarks.quality.model import load
from benchmarks.quality.plans import TRUSTS
from benchmarks.quality.section import Record, Section
from benchmarks.quality.spread import Spread
from benchmarks.tables import markdown
from lowbit.pylib.nn.bit_allocation import TRUST
from lowbit.pylib.nn.observe import calibrations, run
from lowbit.pylib.nn.quantizable import Matrix, replaced
from lowbit.pylib.nn.sensitivity import CANDIDATES, kl_divergence
from lowbit.pylib.quantization.calibration import Calibration

SECTION = Section("plans_by_text", "plans by text")
BITS, SEEDS, TEST_WINDOWS = (3.25, 3.5, 4.0, 4.5), 3, 32
TEXTS = ("verses", "other text")
Configs = Mapping[str, lowbit.QuantConfig]


@dataclass(frozen=True)
class Subject:
    """A model, and the text by which its plans are made and judged.

    kinds        the part of each layer that is quantized, as the mixes know parts, and the number of its block
    calibration  inputs of the model, by which layers are quantized
    probes       inputs on which the model is run for each layer, to see what that layer adds to the divergence
    tests        inputs that were not seen: for each part of the text, for each of TEXTS
    divergence   of an output from the float model's
    candidates   what a layer may become
    trusts       how far plans go by what was measured, as for `lowbit.plan`: a plan for each
    """

    model: nn.Module
    kinds: Mapping[str, tuple[str, int]]
    calibration: Sequence[Any]
    probes: Sequence[Any]
    tests: Sequence[Sequence[Sequence[Any]]]
    divergence: Callable[[Any, Any], float] = kl_divergence
    candidates: Sequence[lowbit.QuantConfig] = CANDIDATES
    trusts: Sequence[float] = (TRUST,)


def measure() -> Iterator[Record]:
    """Yields a record for each seed, size and trust: divergences of the plan and of what it is beside, on each text."""
    model = load()
    context = model.shape.context
    verses, other = windows("held_out.txt", TEST_WINDOWS, context), "\n".join(documentation())
    tests = [[test[:, :-1]] for test in (verses, windows_of(other, TEST_WINDOWS, context))]
    text = windows("calibration.txt", 4 * CALIBRATION_WINDOWS, context)
    parts = {name: name.split(".") for name in layer_names(model)}
    kinds = {name: (kind, int(block)) for name, (_, block, _, kind) in parts.items()}
    for seed in range(SEEDS):
        chosen = torch.randperm(len(text), generator=torch.Generator().manual_seed(seed))[:CALIBRATION_WINDOWS]
        training = text[chosen]
        subject = Subject(model, kinds, [training[:, :-1]], probes(training), [tests], trusts=TRUSTS)
        for record in compared(subject):
            yield {"seed": seed, **record}


@torch.no_grad()
def compared(subject: Subject) -> Iterator[Record]:
    """Yields a record for each size, trust and part of the text: divergences of the plan and of what it is beside."""
    model, kinds, measure, quantizer = subject.model, subject.kinds, subject.divergence, Quantizer()
    expected = [[_outputs(model, text) for text in part] for part in subject.tests]
    with mock.patch("lowbit.pylib.nn.sensitivity.quantize", quantizer.quantize):
        which, candidates, probes = lambda name, _: name in kinds, subject.candidates, subject.probes
        found = lowbit.sensitivity(model, candidates, which, probes, act="f16", divergence=measure)
    matrices = _matrices(subject)
    layers = {name: matrix.module for name, matrix in matrices.items()}
    data = {name: seen.data for name, seen in calibrations(model, layers, subject.calibration)}

    def divergence(outputs: Sequence[Any], text: Sequence[Any]) -> float:
        each = [measure(a, b) for a, b in zip(outputs, _outputs(model, text), strict=True)]
        return float(f"{sum(each) / len(each):.4g}")

    def divergences(configs: Configs) -> list[list[float]]:
        with quantizer.in_place(matrices, configs, data):
            return [list(map(divergence, *both)) for both in zip(expected, subject.tests, strict=True)]

    for name, alike, size in _others(subject):
        bits = round(8 * size / found.weights, 3)
        beside = divergences(alike)
        for trust in subject.trusts:
            both = divergences(found.plan(bytes=size, trust=trust)), beside
            for part, (plan, other) in enumerate(zip(*both, strict=True)):
                yield {"part": part, "name": name, "bits": bits, "trust": trust, "plan": plan, "other": other}


def _outputs(model: nn.Module, inputs: Sequence[Any]) -> list[Any]:
    return [run(model, given, i) for i, given in enumerate(inputs)]


def _others(subject: Subject) -> Iterator[tuple[str, Configs, int]]:
    """Yields what plans are beside: a name, each layer's configuration, and the bytes that a plan may take."""
    shapes = {name: matrix.weight.shape for name, matrix in _matrices(subject).items()}
    weights = sum(shape.numel() for shape in shapes.values())

    def size(configs: Configs) -> int:
        return sum(config.spec(*shapes[name]).bytes for name, config in configs.items())

    for bits in BITS:
        alike = [dict.fromkeys(shapes, config) for config in subject.candidates]
        best = max((configs for configs in alike if size(configs) <= bits * weights / 8), key=size)
        config = next(iter(best.values()))
        yield f"{config.weight} per {config.group_size}, GPTQ", best, int(bits * weights / 8)
    blocks = 1 + max(block for _, block in subject.kinds.values())
    for mix, rule in MIXES.items():
        kinds = {name: fitting(rule(*subject.kinds[name], blocks), shape[1]) for name, shape in shapes.items()}
        presets = {name: lowbit.QuantConfig.preset(kind) for name, kind in kinds.items()}
        mixed = {name: replace(preset, calibration="importance") for name, preset in presets.items()}
        yield mix, mixed, size(mixed)


def _matrices(subject: Subject) -> dict[str, Matrix]:
    return {name: Matrix(subject.model.get_submodule(name), name) for name in subject.kinds}


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
INSTEAD = {"q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""What llama.cpp takes where blocks of 256 do not divide the columns."""


def fitting(kind: str, columns: int) -> str:
    """Returns the type that llama.cpp gives a layer with so many columns in place of one of a mix."""
    return INSTEAD[kind] if columns % 256 else kind


class Quantizer:
    """Quantizes layers of a model. What `lowbit.sensitivity` has made of the same inputs is not made again."""

    def __init__(self) -> None:
        self._known: dict[Any, lowbit.QuantizedWeight] = {}

    def quantize(self, weight: Tensor, config: lowbit.QuantConfig, data: Calibration) -> lowbit.QuantizedWeight:
        """Returns what `lowbit.quantize` does, which runs once for each weight, configuration and calibration."""
        config = config.multiplied_in("f16")
        key = weight.data_ptr(), config, float(data.hessian.trace())
        if key not in self._known:
            self._known[key] = lowbit.quantize(weight, config, data)
        return self._known[key]

    @contextmanager
    def in_place(
        self, matrices: Mapping[str, Matrix], configs: Configs, data: Mapping[str, Calibration]
    ) -> Iterator[None]:
        """Lets the model of some matrices have quantized and dequantized ones for a while.

        configs, data   what to quantize each by, and with which inputs
        """
        found = (self.quantize(matrices[name].weight, configs[name], data[name]) for name in configs)
        with replaced([matrices[name] for name in configs], [each.dequantize() for each in found]):
            yield


def table(records: list[Record]) -> str:
    """Returns the page's table: by trust."""
    head, rows = list[str](), list[list[str]]()
    for trust in dict.fromkeys(record["trust"] for record in records):
        head, found = rows_of([record for record in records if record["trust"] == trust])
        rows += [[f"{trust:g}", *row] for row in found]
    return markdown(["trust", *head], rows)


def rows_of(records: list[Record]) -> tuple[list[str], list[list[str]]]:
    """Returns the head of the table and its rows: means over seeds of divergences in thousandths, and of ratios with
    deviations."""
    head = ["beside the plan", "bits per weight", *(f"{part}, {text}" for text in TEXTS for part in ("plan", "ratio"))]
    names = list(dict.fromkeys((record["name"], record["bits"]) for record in records))
    return head, [_row(name, bits, records) for name, bits in names]


def _row(name: str, bits: float, records: list[Record]) -> list[str]:
    found = [record for record in records if (record["name"], record["bits"]) == (name, bits)]
    cells = [name, f"{bits:.2f}"]
    for text in range(len(TEXTS)):
        plan = sum(record["plan"][text] for record in found) / len(found)
        ratio = Spread.of([record["plan"][text] / record["other"][text] for record in found])
        cells += [f"{1000 * plan:.3g}", str(ratio)]
    return cells


if __name__ == "__main__":
    SECTION.publish(measure, table)
