"""What was measured in vLLM, into docs/howto/vllm.md: tables between marks, and a figure for each model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import describe
from benchmarks.plots import GREY, compact, style
from benchmarks.publish import write_between_marks
from benchmarks.serving.checkpoints import GPTQ
from benchmarks.serving.requests import Record
from benchmarks.serving.run import PEERS, read
from benchmarks.tables import markdown

BEGIN, END = "<!-- vllm: begin -->", "<!-- vllm: end -->"
NAMES = {
    "fp8": "fp8 (dynamic)",
    "gptq": "GPTQ, 4 bits",
    "gptq+humming": "GPTQ, 4 bits, humming",
    "gptq+lowbit": "GPTQ, 4 bits, lowbit",
}
COLOURS = {"bf16": "#3C3C3C", "fp8": "#56B4E9", "gptq": "#D55E00", "gptq+humming": "#E69F00"}
OURS = ("#0072B2", "#6A51A3", "#009E73", "#CC79A7", "#004B76")


def publish(path: Path, root: Path) -> list[Path]:
    """Write docs/howto/vllm.md and its figures from a file of `benchmarks vllm`; return these."""
    known, page = read(path), root / "docs/howto/vllm.md"
    where = describe(known["environment"]).replace("lowbit", f"vLLM {known['environment']['versions']['vllm']}, lowbit")
    parts, figures = [f"{where} ([results](../results/{path.name}))."], list[Path]()
    for model in dict.fromkeys(record["model"] for record in known["measurements"]):
        records = [r for r in known["measurements"] if r["model"] == model and "step_ms" in r]
        figure = root / "docs/img" / f"vllm_{re.sub(r'[ ,]+', '_', model)}.svg"
        draw(model, records, where, figure)
        figures.append(figure)
        parts += [f"### {model}", f"![Steps and users](../img/{figure.name})", steps(records), users(records)]
    write_between_marks(page, "\n\n".join(parts), BEGIN, END)
    return [page, *figures]


def steps(records: Sequence[Record]) -> str:
    """Returns a table: steps by batch, prompts, requests of different lengths, and how soon the engine is up."""
    batches = list(records[0]["step_ms"])
    head = ["", *(f"batch {batch}" for batch in batches), "prompts", "different lengths", "up after", "again after"]
    return markdown(head, [[title(record), *_cells(records, record, batches)] for record in records])


def _cells(records: Sequence[Record], record: Record, batches: Sequence[str]) -> Iterator[str]:
    for batch in batches:
        milliseconds = record["step_ms"][batch]
        yield _ratio(records, record, lambda r, b=batch: 1 / r["step_ms"][b], f"{milliseconds:.2f} ms")
    for name, speed in (("prefill_tokens_per_s", _prompts), ("throughput", _mixed)):
        yield _ratio(records, record, speed, f"{speed(record):,.0f}") if name in record else ""
    yield f"{record['start_s']:.0f} s" if record["together"] == 1 else ""  # else others compiled at the same time
    yield f"{record['warm_start_s']:.0f} s" if "warm_start_s" in record else ""


def users(records: Sequence[Record]) -> str:
    """Returns a table: TTFT, TPOT and tokens a second by the number of users."""
    numbers = list(records[0]["online"])
    head = ["TTFT, TPOT in ms; tokens/s", *(f"{number} at once" for number in numbers)]
    rows = [record for record in records if "online" in record]
    return markdown(head, [[title(record), *(_user(record["online"].get(n)) for n in numbers)] for record in rows])


def title(record: Record) -> str:
    """Returns what a row of a table is called."""
    name = record["name"]
    if name in PEERS:
        kernels = [each.removesuffix("LinearKernel") for each in record["kernels"] if each.endswith("LinearKernel")]
        chosen = f" ({', '.join(kernels)})" if name == GPTQ and kernels else ""
        return NAMES.get(name, name) + chosen
    weight, _, products = name.partition(":")
    return f"lowbit, {weight}" + (f", x in {products}" if products else "")


def _ratio(records: Sequence[Record], record: Record, speed: Callable[[Record], float], text: str) -> str:
    """Returns a cell, with how many times as fast as bf16 that is."""
    base = next((each for each in records if each["name"] == "bf16"), None)
    return text if base is None or base is record else f"{text} ({speed(record) / speed(base):.2f})"


def _prompts(record: Record) -> float:
    return record["prefill_tokens_per_s"]


def _mixed(record: Record) -> float:
    return record["throughput"]["tokens_per_s"]


def _user(found: Record | None) -> str:
    return f"{found['ttft_ms']:.0f}, {found['tpot_ms']:.2f}; {found['output_tokens_per_s']:,.0f}" if found else ""


def draw(model: str, records: Sequence[Record], where: str, path: Path) -> None:
    """Draw how many times as fast as bf16 steps are, and tokens a second beside the time per token."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ours = iter(OURS)
    colours = {record["name"]: COLOURS.get(record["name"]) or next(ours) for record in records}
    with style():
        figure = Figure(figsize=(8.6, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _bars(left, records, colours)
        _lines(right, records, colours)
        left.set_title(model)
        handles = [Patch(color=colours[record["name"]], label=title(record)) for record in records]
        figure.legend(handles=handles, loc="outside right center", fontsize=7.5)
        figure.supxlabel(where, fontsize=6.5, color=GREY, x=0.99, ha="right")
        figure.savefig(path, metadata={"Date": None})
    path.write_text(compact(path.read_text()))


def _bars(axis: Any, records: Sequence[Record], colours: dict[str, str]) -> None:
    base = next(record for record in records if record["name"] == "bf16")["step_ms"]
    others = [record for record in records if record["name"] != "bf16"]
    width = 0.86 / max(1, len(others))
    for at, record in enumerate(others):
        places = [place + (at - (len(others) - 1) / 2) * width for place in range(len(base))]
        heights = [base[batch] / record["step_ms"][batch] for batch in base]
        bars = axis.bar(places, heights, 0.92 * width, color=colours[record["name"]])
        axis.bar_label(bars, fmt="%.2f", fontsize=5.5, padding=1.2)
    axis.axhline(1, color=GREY, linewidth=1, linestyle=(0, (4, 2)))
    axis.set_xticks(range(len(base)), [f"batch {batch}" for batch in base])
    axis.set_ylabel("steps, times as fast as bf16")


def _lines(axis: Any, records: Sequence[Record], colours: dict[str, str]) -> None:
    for record in (each for each in records if "online" in each):
        found = list(record["online"].values())
        times, tokens = [each["tpot_ms"] for each in found], [each["output_tokens_per_s"] for each in found]
        axis.plot(times, tokens, marker="o", markersize=3, color=colours[record["name"]])
    axis.set_yscale("log")
    axis.set_xlabel("ms per token (TPOT)")
    axis.set_ylabel("output tokens a second")
    axis.set_title(f"{', '.join(records[0]['online'])} users")
