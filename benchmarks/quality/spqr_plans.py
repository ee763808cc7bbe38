"""SpQR with a choice for each layer, beside one for all layers: `python -m benchmarks.quality.spqr_plans`.

What each layer adds to the divergence is measured for several thresholds and for 2 to 4 bits, on the first of the
calibration windows. `Sensitivity.plan` then chooses, so that all layers together have the size of SpQR with 3 bits
and one threshold: first among thresholds alone, then among bits, too. Sizes are those of the paper's count (`measure`)
and those in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import lowbit
from benchmarks.quality.measure import SPQR, float_inputs, outliers, predictions, probes, quality, quantized, texts
from benchmarks.quality.model import load
from benchmarks.quality.section import Record, Section
from benchmarks.tables import markdown
from lowbit.pylib.nn.bit_allocation import Sensitivity

SECTION = Section("spqr_plans", "spqr plans")
SIZES = (0.35, 0.25)  # plans have the size of 3 bits with one of these thresholds
BASE = lowbit.QuantConfig("u4", 128, method="gptq")


def spqr(weight: str, threshold: float | None) -> lowbit.QuantConfig:
    """Returns SpQR with codes of scales that are tried out, and act-order."""
    return lowbit.QuantConfig(**{**SPQR, "weight": weight}, outlier_threshold=threshold, act_order=True)


THRESHOLDS = [spqr("u3", threshold) for threshold in (None, 0.5, 0.35, 0.25, 0.15)]
CANDIDATES = [spqr("u2", None), *THRESHOLDS, spqr("u4", None), spqr("u4", 0.25)]


def measure() -> Iterator[Record]:
    """Yields a record for GPTQ with 4 bits, and for each size one for a common threshold and one for each plan."""
    model = load()
    training, test = texts(model)
    expected, inputs = predictions(model, test), float_inputs(model, training)
    found = lowbit.sensitivity(model, candidates=[BASE, *CANDIDATES], calibration=probes(training), act="f16")
    for name, configs in cases(found):
        worse, bits = quantized(model, configs, training, inputs)
        record = {"name": name, "bits": round(bits, 3), "memory": round(8 * _bytes(found, configs) / found.weights, 3)}
        record |= quality(expected, predictions(worse, test), test)
        yield {**record, "layers": {layer: _form(config) for layer, config in configs.items()}}


def cases(found: Sensitivity) -> Iterator[tuple[str, Mapping[str, lowbit.QuantConfig]]]:
    """Yields what is measured: a name, and a configuration for each layer."""
    yield "GPTQ u4, groups of 128", dict.fromkeys(found.choices, BASE)
    for threshold in SIZES:
        alike = dict.fromkeys(found.choices, spqr("u3", threshold))
        yield f"SpQR u3, threshold {threshold}", alike
        for name, candidates in (("thresholds by layer", THRESHOLDS), ("bits and thresholds by layer", CANDIDATES)):
            some = {layer: [c for c in of if c.config in candidates] for layer, of in found.choices.items()}
            yield f"SpQR, {name}", replace(found, choices=some).plan(bytes=_bytes(found, alike), trust=1.0)


def _bytes(found: Sensitivity, configs: Mapping[str, lowbit.QuantConfig]) -> int:
    return sum(c.bytes for layer, of in found.choices.items() for c in of if c.config == configs[layer])


def _form(config: lowbit.QuantConfig) -> str:
    if config.method == "gptq":
        return f"{config.weight} per {config.group_size}"
    return f"{config.weight}, {outliers(config.outlier_threshold)}"


def table(records: list[Record]) -> str:
    """Returns the page's table."""
    rows = [
        [record["name"], f"{record['bits']:.2f}", f"{record['memory']:.2f}", f"{record['perplexity']:.2f}",
         f"{1000 * record['divergence']:.3g}"]
        for record in records
    ]  # fmt: skip
    return markdown(["", "bits per weight", "in memory", "perplexity", "divergence, thousandths"], rows)


if __name__ == "__main__":
    SECTION.publish(measure, table)
