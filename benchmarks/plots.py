"""Results as SVG figures: speed-ups per format and per layer of models, batch sweeps, a roofline.

Every method has its colour in all of them, and the same numbers make the same files. Needs matplotlib (the extra
`bench`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import describe
from benchmarks.results import Record, Results
from benchmarks.tables import by_bits, find, formats, methods, pivots, plain_sizes, title, tokens_of
from lowbit.pylib.tune.model_shapes import MODELS

COLOURS = {  # told apart by the colour-blind, too (Okabe and Ito)
    "lowbit": "#0072B2",
    "lowbit+quantize": "#6A51A3",
    "torch": "#3C3C3C",
    "torch-fp8": "#56B4E9",
    "humming": "#E69F00",
    "fbgemm": "#8C510A",
    "gemlite": "#009E73",
    "tinygemm": "#CC79A7",
    "bitsandbytes": "#D55E00",
}
NAMES = {
    "torch": "cuBLAS, 16 bits",
    "torch-fp8": "cuBLAS fp8",
    "lowbit+quantize": "lowbit, with quantizing x",
    "fbgemm": "FBGEMM GenAI",
    "humming": "Humming",
    "gemlite": "GemLite",
    "tinygemm": "tinygemm (bf16)",
}
GREY = "#8A8A8A"
PALE = "#E3E8EE"
MANY_LAYERS = 10  # fewer are layers only because plain sizes happen to be
FLOOR = "only reading the weight"
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#B5B5B5",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E9E9E9",
    "grid.linewidth": 0.7,
    "xtick.color": "#3C3C3C",
    "ytick.color": "#3C3C3C",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.handlelength": 1.3,
    "legend.columnspacing": 1.4,
    "svg.fonttype": "none",  # text stays text: small files, sharp and searchable
    "svg.hashsalt": "lowbit",
    "savefig.bbox": "tight",
}


@dataclass(frozen=True)
class Quantity:
    """The second axis of a sweep: a label, the value of a measurement, and whether to draw its logarithm."""

    label: str
    value: Callable[[Record], float | None]
    log: bool


MICROSECONDS = Quantity("µs per call", lambda r: r["us"], log=True)
TERAFLOPS = Quantity("TFLOP/s", lambda r: _point(r)[1], log=False)
TOKENS_PER_JOULE = Quantity(
    "tokens per joule", lambda r: 1e3 * r["m"] / r["millijoules"] if "millijoules" in r else None, log=False
)
Bars = Mapping[str, Mapping[int, float]]  # method -> place -> height


def plot(results: Results, folder: Path) -> list[Path]:
    """Draw everything the results allow; the files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = formats(results)
    figures: dict[str, Callable[[], Any]] = {}
    for m in sorted({m for _, m in pivots(results)}):
        figures[f"formats_m{m}"] = lambda m=m: format_speedups(results, m)
    for weight in weights:
        tokens = tokens_of(results, weight)
        if len(tokens) > 2:
            figures[f"sweep_{weight['weight']}"] = lambda w=weight: sweep(results, w)
            figures[f"roofline_{weight['weight']}"] = lambda w=weight: roofline(results, w)
        for m in tokens:
            if len(_layers(results, weight, m)) >= MANY_LAYERS:
                name = f"layers_{weight['weight']}_m{m}"
                figures[name] = lambda w=weight, m=m: layer_speedups(results, w, m)
    return [save(folder / f"{name}.svg", draw, results) for name, draw in figures.items()]


def format_speedups(results: Results, m: int) -> Any:
    """Bars: how many times as fast as cuBLAS without quantization, per size, format and method. A pale bar behind
    them shows what only reading the weight would give."""
    shapes = [size for size, tokens in pivots(results) if tokens == m]
    weights = by_bits(w for w in formats(results) if any(m in tokens_of(results, w, s) for s in shapes))
    figure, axes = _grid(len(shapes), 1, width=max(5.0, 1.2 + 0.88 * len(weights)), height=2.3)
    for (n, k), axis in zip(shapes, axes):
        places = [(w, n, k) for w in weights]
        _bars(axis, results, places, m, [_label(w, weights) for w in weights])
        axis.set_title(f"{n} × {k}, m = {m}")
    _legend(figure)
    return figure


def layer_speedups(results: Results, weight: Record, m: int) -> Any:
    """Bars, as for formats, per layer of models."""
    layers = _layers(results, weight, m)
    figure, axes = _grid(1, 1, width=1.2 + 0.5 * len(layers), height=2.7)
    places = [(weight, n, k) for _, _, n, k in layers]
    names = [layer for _, layer, _, _ in layers]
    _bars(axes[0], results, places, m, names, everywhere=True)
    axes[0].set_title(f"{title(weight)}, m = {m}", pad=18)
    for model in dict.fromkeys(model for model, *_ in layers):
        at = [i for i, layer in enumerate(layers) if layer[0] == model]
        text = {"fontsize": 8, "color": "#3C3C3C", "ha": "center", "va": "bottom"}
        axes[0].text((at[0] + at[-1]) / 2, 1.01, model, transform=axes[0].get_xaxis_transform(), **text)
        if at[0]:
            axes[0].axvline(at[0] - 0.5, color="#C9C9C9", linewidth=0.8)
    axes[0].tick_params(axis="x", labelsize=7, rotation=40)
    _legend(figure)
    return figure


def _layers(results: Results, weight: Record, m: int) -> list[tuple[str, str, int, int]]:
    """Model, layer, n and k of what this compiler was timed on."""
    return [
        (model, layer, n, k)
        for model, sizes in MODELS.items()
        for layer, (n, k) in sizes.linears.items()
        if find(results, "lowbit", weight, n=n, k=k, m=m)
    ]


def _bars(
    axis: Any,
    results: Results,
    places: Sequence[tuple[Record, int, int]],
    m: int,
    names: Sequence[str],
    everywhere: bool = False,
) -> None:
    """Speed-ups of the methods side by side at each place; a place with fewer methods has its bars in the middle.

    everywhere   only methods that most places have, and no numbers
    """
    heights: dict[str, dict[int, float]] = {method: {} for method in COLOURS}
    for at, (weight, n, k) in enumerate(places):
        for method in COLOURS:
            record = None if method == "torch" else find(results, method, weight, n=n, k=k, m=m)
            ratio = results.speedup(record) if record else None
            if ratio is not None:
                heights[method][at] = ratio
    least = len(places) // 2 + 1 if everywhere else 1
    heights = {method: bars for method, bars in heights.items() if len(bars) >= least}
    for method, bars in heights.items():
        slots = [_slot(heights, method, at) for at in bars]
        drawn = axis.bar(
            [centre for centre, _ in slots], list(bars.values()), [0.92 * width for _, width in slots],
            color=COLOURS[method], label=_name(method), zorder=2,
        )  # fmt: skip
        if not everywhere:
            bold = "bold" if method == "lowbit" else "normal"
            axis.bar_label(drawn, fmt="%.1f", fontsize=6, padding=1.2, color="#3C3C3C", fontweight=bold)
    axis.axhline(1, color=COLOURS["torch"], linewidth=1, linestyle=(0, (4, 2)), label=_name("torch"))
    limits = {at: limit for at, place in enumerate(places) if (limit := _limit(results, *place, m))}
    axis.bar(list(limits), list(limits.values()), 0.92, color=PALE, label=FLOOR, zorder=1)
    axis.set_ylabel("times as fast as f16")
    axis.set_xticks(range(len(places)), names)
    axis.set_xlim(-0.55, len(places) - 0.45)
    axis.margins(y=0.1)
    axis.yaxis.get_major_locator().set_params(integer=True, nbins=6)
    axis.grid(False, axis="x")


def _slot(heights: Bars, method: str, at: int) -> tuple[float, float]:
    """The middle and the width of a method's bar among those of its place."""
    present = [name for name, bars in heights.items() if at in bars]
    width = min(0.26, 0.88 / len(present))
    return at + (present.index(method) - (len(present) - 1) / 2) * width, width


def _limit(results: Results, weight: Record, n: int, k: int, m: int) -> float | None:
    """Speed-up of a kernel that only reads the weight."""
    floor, torch = find(results, "floor", weight, n=n, k=k), find(results, "torch", weight, n=n, k=k, m=m)
    return torch["us"] / floor["us"] if floor and torch else None


def sweep(results: Results, weight: Record, what: Quantity = MICROSECONDS) -> Any:
    """A quantity over the number of tokens, a panel per size; below microseconds the floor as a line."""
    shapes = plain_sizes(results, weight)
    columns = min(2, len(shapes))
    figure, axes = _grid(-(-len(shapes) // columns), columns, width=4.3 * columns, height=2.8)
    for (n, k), axis in zip(shapes, axes):
        tokens = tokens_of(results, weight, (n, k))
        for method in sorted(methods(results, weight), key=list(COLOURS).index):
            found = {m: find(results, method, weight, n=n, k=k, m=m) for m in tokens}
            line = {m: value for m, r in found.items() if r and (value := what.value(r)) is not None}
            if line:
                _line(axis, method, list(line), list(line.values()))
        floor = find(results, "floor", weight, n=n, k=k)
        if floor and what is MICROSECONDS:
            axis.axhline(floor["us"], color=GREY, linewidth=1.2, linestyle=(0, (4, 2)), label=FLOOR)
        axis.set_title(f"{n} × {k}")
        axis.set_xscale("log", base=2)
        axis.set_xticks(tokens, [str(m) for m in tokens])
        if what.log:
            axis.set_yscale("log")
            _log_ticks(axis.yaxis)
        else:
            axis.set_ylim(bottom=0)
        axis.set_xlabel("tokens (m)")
        axis.set_ylabel(what.label)
    for axis in axes[len(shapes) :]:
        axis.set_visible(False)
    _legend(figure)
    return figure


def roofline(results: Results, weight: Record) -> Any:
    """TFLOP/s over operations per byte on the largest size: a line per method, under the bandwidth of the best read
    floor and the peak of cuBLAS."""
    n, k = max(plain_sizes(results, weight), key=lambda size: size[0] * size[1])
    tokens = tokens_of(results, weight, (n, k))
    peak = results.find(peer="peak", act=weight["act"])
    floors = [r["bytes"] / r["us"] for r in results.all(peer="floor") if "us" in r]
    figure, (axis,) = _grid(1, 1, width=6.4, height=4.0)
    intensities: list[float] = []
    for method in sorted(methods(results, weight), key=list(COLOURS).index):
        records = [find(results, method, weight, n=n, k=k, m=m) for m in tokens]
        points = [_point(record) for record in records if record]
        if points:
            _line(axis, method, *zip(*points))
            intensities += [x for x, _ in points]
    if intensities and peak and floors:
        bandwidth, top = max(floors) * 1e-6, peak["tflops"]  # TB/s, TFLOP/s
        bend = top / bandwidth
        left, right = min(intensities) / 1.5, max(*intensities, bend) * 2
        axis.plot([left, bend, right], [left * bandwidth, top, top], color=GREY, linewidth=1.2, zorder=1)
        text = {"color": GREY, "fontsize": 8, "textcoords": "offset points", "ha": "right"}
        axis.annotate(f"{bandwidth:.2f} TB/s", (bend / 8, top / 8), xytext=(-5, 6), **text)
        axis.annotate(f"{top:.0f} TFLOP/s", (right, top), xytext=(0, 5), **text)
    axis.set_xscale("log")
    axis.set_yscale("log")
    _log_ticks(axis.xaxis, (1.0,))
    _log_ticks(axis.yaxis, (1.0,))
    axis.legend(loc="lower right", fontsize=8)
    axis.set_title(f"{weight['weight']}, {n} × {k}, m = {tokens[0]} to {tokens[-1]}")
    axis.set_xlabel("operations per byte (weight, x and y)")
    axis.set_ylabel("TFLOP/s")
    return figure


def _line(axis: Any, method: str, x: Sequence[float], y: Sequence[float]) -> None:
    front = method == "lowbit"
    axis.plot(
        x, y, marker="o", markersize=4 if front else 3, linewidth=2.2 if front else 1.3,
        color=COLOURS[method], label=_name(method), zorder=4 if front else 3,
    )  # fmt: skip


def _point(record: Record) -> tuple[float, float]:
    """(operations per byte, TFLOP/s)"""
    n, k, m = record["n"], record["k"], record["m"]
    flops = 2 * n * k * m
    return flops / (record["bytes"] + 2 * m * (n + k)), flops / record["us"] * 1e-6


def _grid(rows: int, columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _log_ticks(axis: Any, steps: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """Ticks at these multiples of the powers of ten, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _legend(figure: Any) -> None:
    """One for all panels, above them, in the order of COLOURS."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    order = [*map(_name, COLOURS), FLOOR]
    labels = sorted(handles, key=order.index)
    columns = -(-len(labels) // -(-len(labels) // 5))  # rows of at most five, of equal length
    figure.legend(
        [handles[label] for label in labels], labels, loc="outside upper center", ncols=columns, fontsize=8.5
    )


@contextmanager
def style() -> Iterator[None]:
    """Draws figures within in the project's style."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def save(path: Path, draw: Callable[[], Any], results: Results) -> Path:
    """Draws a figure into a file, with a line that says where its numbers were measured."""
    with style():
        figure = draw()
        figure.supxlabel(describe(results.environment), fontsize=6.5, color=GREY, x=0.99, ha="right")
        figure.savefig(path, metadata={"Date": None})
    path.write_text(compact(path.read_text()))
    return path


def compact(svg: str) -> str:
    """Coordinates to a hundredth of a point, and no indentation."""
    svg = re.sub(r'"[^"]*"', lambda quoted: re.sub(r"(\d+\.\d\d)\d+", r"\1", quoted[0]), svg)
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


def _name(method: str) -> str:
    return NAMES.get(method, method)


def _label(weight: Record, among: Sequence[Record]) -> str:
    """The format, and what else tells it apart."""
    text = weight["weight"]
    if len({w["group_size"] for w in among}) > 1:
        text += f" g{weight['group_size']}" if weight["group_size"] else " row"
    if len({w["zeros"] for w in among}) > 1 and weight["zeros"] != "none":
        text += f"\n{weight['zeros']} zeros"
    return text
