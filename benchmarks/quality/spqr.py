"""What SpQR loses in each kind of layer of the small model, beside GPTQ: `python -m benchmarks.quality.spqr`.

Layers are quantized one by one, from the inputs that they have in the float model on calibration text. A layer's loss
is the squared error of its output on held-out text, relative to that of GPTQ with 4 bits in groups of 128. The table of
docs/quality.md has the geometric mean over the four blocks. Beside it are the kurtosis of the weights (3 for a normal
distribution, more where some stick out), and how much of GPTQ's divergence comes from each kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

import lowbit
from benchmarks.quality.measure import PAPER, SPQR, STAGES, bits_per_weight, float_inputs, probes, texts
from benchmarks.quality.model import Transformer, load
from benchmarks.quality.section import Record, Section
from benchmarks.tables import markdown
from lowbit.pylib.quantization.calibration import output_errors

SECTION = Section("spqr", "spqr")
KINDS = [name for stage in STAGES for name in stage]
BASE = lowbit.QuantConfig("u4", 128, method="gptq")
CONFIGS: Mapping[str, lowbit.QuantConfig] = {
    "SpQR of the paper, threshold 0.35": lowbit.QuantConfig(**PAPER, outlier_threshold=0.35),
    "SpQR, threshold 0.3": lowbit.QuantConfig(**SPQR, outlier_threshold=0.3),
    "SpQR, act-order, threshold 0.25": lowbit.QuantConfig(**SPQR, outlier_threshold=0.25, act_order=True),
    "GPTQ u3, groups of 32": lowbit.QuantConfig("u3", 32, method="gptq"),
    "GPTQ u4, groups of 128": BASE,
    "RTN u4, groups of 128": lowbit.QuantConfig("u4", 128),
}


@torch.no_grad()
def measure() -> Iterator[Record]:
    """Yields a record for each line of the table: its name, bits per weight or None, and a number for each kind."""
    model = load()
    training, test = texts(model)
    inputs = float_inputs(model, training), float_inputs(model, test)
    yield {"name": "kurtosis of the weights", "bits": None, "kinds": _by_kind(_kurtoses(model))}
    yield {"name": "share of GPTQ's divergence", "bits": None, "kinds": _shares(model, training)}
    base = _losses(model, BASE, *inputs)[1]
    for name, config in CONFIGS.items():
        bits, losses = _losses(model, config, *inputs)
        relative = {layer: losses[layer] / base[layer] for layer in base}
        yield {"name": name, "bits": round(bits, 3), "kinds": _by_kind(relative)}


def _losses(
    model: Transformer, config: lowbit.QuantConfig, known: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> tuple[float, dict[str, float]]:
    """Returns the mean bits of a weight, and the squared output error of each layer on inputs that it did not see."""
    losses: dict[str, float] = {}
    bits = weights = 0.0
    for i, block in enumerate(model.blocks):
        for stage in STAGES:
            data, test = (inputs[f"{i}.{stage[0]}"].flatten(0, -2) for inputs in (known, others))
            calibration, hessian = lowbit.Calibration.of(data, data.shape[1], data.device), test.T @ test
            for name in stage:
                weight = block.get_submodule(name).weight.detach()
                found = lowbit.quantize(weight, config, calibration)
                losses[f"{i}.{name}"] = float(output_errors(found.dequantize() - weight, hessian).sum())
                bits, weights = bits + bits_per_weight(found) * weight.numel(), weights + weight.numel()
    return bits / weights, losses


def _kurtoses(model: Transformer) -> dict[str, float]:
    layers = {f"{i}.{kind}": block.get_submodule(kind).weight for i, block in enumerate(model.blocks) for kind in KINDS}
    return {name: float((w**4).mean() / (w**2).mean() ** 2) for name, w in layers.items()}


def _shares(model: Transformer, training: Tensor) -> dict[str, float]:
    """Returns which part of the divergence comes from each kind of layer, if all of them have GPTQ with 4 bits."""
    found = lowbit.sensitivity(model, [BASE], calibration=probes(training), act="f16").choices
    total = sum(choices[0].divergence for choices in found.values())
    return {
        kind: sum(choices[0].divergence for name, choices in found.items() if name.endswith(kind)) / total
        for kind in KINDS
    }


def _by_kind(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the geometric mean over the layers of each kind."""
    found = {kind: [math.log(value) for name, value in values.items() if name.endswith(kind)] for kind in KINDS}
    return {kind: math.exp(sum(logs) / len(logs)) for kind, logs in found.items()}


def table(records: list[Record]) -> str:
    """Returns the page's table."""
    lines = []
    for record in records:
        bits = "" if record["bits"] is None else f"{record['bits']:.2f}"
        lines.append([record["name"], bits, *(f"{value:.2f}" for value in record["kinds"].values())])
    return markdown(["", "bits per weight", *(kind.rpartition(".")[2] for kind in KINDS)], lines)


if __name__ == "__main__":
    SECTION.publish(measure, table)
