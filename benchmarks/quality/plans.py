"""Plans of the small model at several sizes, beside uniform choices: `python -m benchmarks.quality.plans`.

Writes docs/results/plans.json, the table of docs/quality.md and the figure docs/img/plans.svg (with matplotlib). What
layers add to the divergence is measured once, on the first of the calibration windows. Then each candidate for all
layers alike, a plan of its size, and plans of some sizes between are quantized as in `measure`, and their perplexity
and divergence are those of the held-out text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lowbit
from benchmarks.quality.measure import (
    CALIBRATION_WINDOWS,
    TEST_WINDOWS,
    float_inputs,
    predictions,
    quality,
    quantized,
    windows,
)
from benchmarks.quality.model import HERE, load
from lowbit.pylib.nn.sensitivity import CANDIDATES

RESULTS = HERE.parent.parent / "docs" / "results" / "plans.json"
PAGE, FIGURE = RESULTS.parent.parent / "quality.md", RESULTS.parent.parent / "img" / "plans.svg"
BEGIN, END = "<!-- plans: begin -->", "<!-- plans: end -->"
PROBES = 8  # windows on which the model is run for each layer
BITS = (2.5, 3.0, 3.5, 4.0)
PER_ROW = tuple(lowbit.QuantConfig(weight, None, method="gptq") for weight in ("u3", "u4"))
"""No candidates, but also what all layers alike could be."""

Record = dict[str, Any]


def measure() -> Iterator[Record]:
    """Yields a record for each candidate, and for each plan: one of the size of each candidate, and some between."""
    model = load()
    context = model.shape.context
    training = windows("calibration.txt", CALIBRATION_WINDOWS, context)
    test = windows("held_out.txt", TEST_WINDOWS, context)
    expected, inputs = predictions(model, test), float_inputs(model, training)
    tokens = [window[None, :-1] for window in training[:PROBES]]
    found = lowbit.sensitivity(model, calibration=tokens, act="f16")
    size = {name: {choice.config: choice.bytes for choice in choices} for name, choices in found.choices.items()}
    for name in size:
        layer = model.get_submodule(name)
        size[name] |= {config: config.spec(*layer.weight.shape).bytes for config in PER_ROW}
    uniform = [dict.fromkeys(size, config) for config in (*CANDIDATES, *PER_ROW)]
    budgets = {_bytes(size, configs) for configs in uniform} | {int(bits * found.weights / 8) for bits in BITS}
    for configs in (*uniform, *(found.plan(bytes=budget) for budget in sorted(budgets))):
        worse, _ = quantized(model, configs, training, inputs)
        bits = 8 * _bytes(size, configs) / found.weights
        record = {"name": _name(configs, bits), "bits": round(bits, 3)}
        record |= quality(expected, predictions(worse, test), test)
        print(record, file=sys.stderr, flush=True)
        layers = {layer: config.to_dict() for layer, config in configs.items()}
        yield {**record, **({"layers": layers} if isinstance(configs, lowbit.QuantPlan) else {})}


def _bytes(size: Mapping[str, Mapping[lowbit.QuantConfig, int]], configs: Mapping[str, lowbit.QuantConfig]) -> int:
    return sum(size[layer][config] for layer, config in configs.items())


def _name(configs: Mapping[str, lowbit.QuantConfig], bits: float) -> str:
    if isinstance(configs, lowbit.QuantPlan):
        return f"plan of {bits:.2f} bits"
    config = next(iter(configs.values()))
    return f"{config.weight} per {config.group_size or 'row'}"


def table(records: list[Record]) -> str:
    """Returns the page's table, by size."""
    rows = ["| | bits per weight | perplexity | divergence, thousandths |", "| --- | ---: | ---: | ---: |"]
    for record in sorted(records, key=lambda each: each["bits"]):
        name = f"**{record['name']}**" if "layers" in record else f"{record['name']}, GPTQ"
        numbers = f"{record['bits']:.2f} | {record['perplexity']:.2f} | {1000 * record['divergence']:.3g}"
        rows.append(f"| {name} | {numbers} |")
    return "\n".join(rows)


def draw(records: list[Record], file: Path) -> None:
    """Write the figure: divergence against size, of plans and of uniform choices."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from benchmarks.plots import STYLE

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.subplots()
        plans = sorted((r["bits"], r["divergence"]) for r in records if "layers" in r)
        axes.plot(*zip(*plans), "o-", color="#0072B2", markersize=4, linewidth=1.2, label="lowbit.plan")
        uniform = [(r["bits"], r["divergence"]) for r in records if "layers" not in r]
        axes.plot(*zip(*uniform), "s", color="#E69F00", markersize=5, label="all layers alike")
        for record in (record for record in records if "layers" not in record):
            axes.annotate(record["name"], (record["bits"], record["divergence"]), (4, 4), textcoords="offset points")
        axes.set(xlabel="bits per weight", ylabel="divergence, nats", yscale="log", xlim=(2.2, 4.8))
        axes.legend()
        figure.savefig(file, metadata={"Date": None})


def page(text: str, records: list[Record]) -> str:
    """Returns the text of the page with its table replaced."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table(records)}\n{END}", text, flags=re.DOTALL)


def main() -> None:
    """Measure, unless the results are there already, and write page and figure."""
    if not RESULTS.exists():
        lines = ",\n".join(f"  {json.dumps(record)}" for record in measure())
        RESULTS.write_text(f'{{"records": [\n{lines}\n]}}\n')
    records = json.loads(RESULTS.read_text())["records"]
    PAGE.write_text(page(PAGE.read_text(), records))
    draw(records, FIGURE)


if __name__ == "__main__":
    main()
