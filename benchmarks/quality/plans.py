"""Plans of the small model at several sizes, beside uniform choices: `python -m benchmarks.quality.plans`.

Writes docs/results/plans.json, the table of docs/quality.md and the figure docs/img/plans.svg (with matplotlib). What
layers add to the divergence is measured once, on the first of the calibration windows. Then each candidate for all
layers alike, plans of its size, and plans of some sizes between are quantized as in `measure`, and their perplexity
and divergence are those of the held-out text. Plans are those of the default, and those that go by what was measured
alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import lowbit
from benchmarks.quality.measure import float_inputs, predictions, probes, quality, quantized, texts
from benchmarks.quality.model import load
from benchmarks.quality.section import DOCS, Record, Section
from lowbit.pylib.nn.bit_allocation import TRUST
from lowbit.pylib.nn.sensitivity import CANDIDATES

SECTION, FIGURE = Section("plans", "plans"), DOCS / "img" / "plans.svg"
BITS = (2.5, 3.0, 3.5, 4.0)
TRUSTS = (TRUST, 1.0)
"""How far plans go by what was measured: as by default, and by that alone."""
PER_ROW = tuple(lowbit.QuantConfig(weight, None, method="gptq") for weight in ("u3", "u4"))
"""No candidates, but also what all layers alike could be."""


def measure() -> Iterator[Record]:
    """Yields a record for each candidate, and for each trust and plan: of each candidate's size, and some between."""
    model = load()
    training, test = texts(model)
    expected, inputs = predictions(model, test), float_inputs(model, training)
    found = lowbit.sensitivity(model, calibration=probes(training), act="f16")
    size = {name: {choice.config: choice.bytes for choice in choices} for name, choices in found.choices.items()}
    for name in size:
        layer = model.get_submodule(name)
        size[name] |= {config: config.spec(*layer.weight.shape).bytes for config in PER_ROW}
    uniform = [dict.fromkeys(size, config) for config in (*CANDIDATES, *PER_ROW)]
    budgets = {_bytes(size, configs) for configs in uniform} | {int(bits * found.weights / 8) for bits in BITS}
    plans = [(trust, found.plan(bytes=budget, trust=trust)) for trust in TRUSTS for budget in sorted(budgets)]
    for trust, configs in (*((None, configs) for configs in uniform), *plans):
        worse, _ = quantized(model, configs, training, inputs)
        bits = 8 * _bytes(size, configs) / found.weights
        record = {"name": _name(configs, bits), "bits": round(bits, 3)}
        record |= quality(expected, predictions(worse, test), test)
        layers = {layer: config.to_dict() for layer, config in configs.items()}
        yield {**record, **({"trust": trust, "layers": layers} if trust else {})}


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
        numbers = f"{record['bits']:.2f} | {record['perplexity']:.2f} | {1000 * record['divergence']:.3g}"
        rows.append(f"| {_label(record)} | {numbers} |")
    return "\n".join(rows)


def _label(record: Record) -> str:
    if "layers" not in record:
        return f"{record['name']}, GPTQ"
    return f"**{record['name']}**" if record["trust"] == TRUST else f"{record['name']}, trust {record['trust']:g}"


def draw(records: list[Record], file: Path) -> None:
    """Write the figure: divergence against size, of plans and of uniform choices."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from benchmarks.plots import STYLE

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.subplots()
        for trust, label, color in zip(TRUSTS, ("lowbit.plan", "lowbit.plan, trust=1"), ("#0072B2", "#56B4E9")):
            plans = sorted((r["bits"], r["divergence"]) for r in records if r.get("trust") == trust)
            axes.plot(*zip(*plans), "o-", color=color, markersize=4, linewidth=1.2, label=label)
        uniform = [(r["bits"], r["divergence"]) for r in records if "layers" not in r]
        axes.plot(*zip(*uniform), "s", color="#E69F00", markersize=5, label="all layers alike")
        for record in (record for record in records if "layers" not in record):
            axes.annotate(record["name"], (record["bits"], record["divergence"]), (4, 4), textcoords="offset points")
        axes.set(xlabel="bits per weight", ylabel="divergence, nats", yscale="log", xlim=(2.2, 4.8))
        axes.legend()
        figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    draw(SECTION.publish(measure, table), FIGURE)
