"""Results as figures, each as PNG and SVG: speed-ups per format, batch sweeps, a roofline.

Every method has its colour in all of them. Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.environment import describe
from benchmarks.results import Record, Results
from benchmarks.tables import find, formats, methods, sizes
from dialect.dtypes import dtype

COLOURS = {  # told apart by the colour-blind, too (Okabe and Ito)
    "lowbit": "#0072B2",
    "torch": "#3C3C3C",
    "torch-fp8": "#56B4E9",
    "humming": "#E69F00",
    "gemlite": "#009E73",
    "tinygemm": "#CC79A7",
    "bitsandbytes": "#D55E00",
}
NAMES = {"torch": "cuBLAS", "torch-fp8": "cuBLAS fp8", "humming": "Humming", "gemlite": "GemLite"}
GREY = "#8A8A8A"
PALE = "#E4E7EB"
FLOOR = "only reading the weight"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#B5B5B5",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "xtick.color": "#3C3C3C",
    "ytick.color": "#3C3C3C",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "lowbit",  # the same file for the same numbers
    "savefig.dpi": 200,
    "savefig.bbox": "tight",
}


def plot(results: Results, folder: Path) -> list[Path]:
    """Draw everything the results allow; the files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    weights = formats(results)
    tokens = sorted({r["m"] for r in results.measurements if r["peer"] == "torch" and "us" in r})
    for act in dict.fromkeys(w["act"] for w in weights):
        same = [w for w in weights if w["act"] == act]
        for m in tokens:
            written += _save(
                folder / f"speedup_{act}_m{m}", lambda s=same, m=m: speedups(results, s, m), results
            )
        if len(tokens) > 1:
            for weight in same:
                name = f"sweep_{act}_{weight['weight']}_{_group(weight)}"
                written += _save(folder / name, lambda w=weight: sweep(results, w, tokens), results)
        if results.find(peer="peak", act=act):
            written += _save(folder / f"roofline_{act}", lambda s=same: roofline(results, s, tokens), results)
    return written


def speedups(results: Results, weights: Sequence[Record], m: int) -> Any:
    """Bars: how many times as fast as cuBLAS without quantization, per shape, format and method. A pale bar behind
    them shows what only reading the weight would give."""
    weights = sorted(weights, key=lambda w: (-dtype(w["weight"]).bits, w["weight"]))
    shapes = [size for size in sizes_of(results, weights) if any(_bars(results, weights, size, m).values())]
    figure, axes = _grid(len(shapes), 1, width=max(5.0, 1.5 + 0.95 * len(weights)), height=2.0)
    for (n, k), axis in zip(shapes, axes):
        bars = _bars(results, weights, (n, k), m)
        width = 0.8 / max(1, len(bars))
        for i, (method, values) in enumerate(bars.items()):
            at = [j + (i - (len(bars) - 1) / 2) * width for j in values]
            drawn = axis.bar(at, values.values(), 0.9 * width, color=COLOURS[method], label=_name(method))
            axis.bar_label(drawn, fmt="%.1f", fontsize=6.5, padding=1.5, color="#3C3C3C")
        axis.axhline(1, color=COLOURS["torch"], linewidth=1, linestyle=(0, (4, 2)), label=_name("torch"))
        limits = {j: _limit(results, w, n, k, m) for j, w in enumerate(weights)}
        limits = {j: limit for j, limit in limits.items() if limit}
        axis.bar(list(limits), list(limits.values()), 0.88, color=PALE, label=FLOOR, zorder=0)
        axis.set_title(f"{n} × {k}, m = {m}")
        axis.set_ylabel(f"times as fast as {weights[0]['act']}")
        axis.set_xticks(range(len(weights)), [_label(w, weights) for w in weights])
        axis.set_xlim(-0.55, len(weights) - 0.45)
        axis.margins(y=0.12)
        axis.grid(False, axis="x")
    _legend(figure)
    return figure


def sizes_of(results: Results, weights: Sequence[Record]) -> list[tuple[int, int]]:
    return list(dict.fromkeys(size for w in weights for size in sizes(results, w)))


def _bars(
    results: Results, weights: Sequence[Record], size: tuple[int, int], m: int
) -> dict[str, dict[int, float]]:
    """Speed-up of a method by the place of the format."""
    n, k = size
    found: dict[str, dict[int, float]] = {}
    for method in COLOURS:
        if method == "torch":
            continue
        for j, weight in enumerate(weights):
            record = find(results, method, weight, n=n, k=k, m=m)
            ratio = results.speedup(record) if record else None
            if ratio is not None:
                found.setdefault(method, {})[j] = ratio
    return found


def _limit(results: Results, weight: Record, n: int, k: int, m: int) -> float | None:
    """Speed-up of a kernel that only reads the weight."""
    floor, torch = find(results, "floor", weight, n=n, k=k), find(results, "torch", weight, n=n, k=k, m=m)
    return torch["us"] / floor["us"] if floor and torch else None


def sweep(results: Results, weight: Record, tokens: Sequence[int]) -> Any:
    """Microseconds over the number of tokens, a panel per shape; the floor as a line below."""
    shapes = sizes(results, weight)
    columns = min(2, len(shapes))
    figure, axes = _grid(-(-len(shapes) // columns), columns, width=4.1 * columns, height=2.7)
    for (n, k), axis in zip(shapes, axes):
        for method in methods(results, weight):
            found = {m: find(results, method, weight, n=n, k=k, m=m) for m in tokens}
            line = {m: r["us"] for m, r in found.items() if r}
            front = method == "lowbit"
            axis.plot(
                list(line), list(line.values()), marker="o", markersize=3.5, linewidth=2.2 if front else 1.4,
                color=COLOURS[method], label=_name(method), zorder=4 if front else 3,
            )  # fmt: skip
        floor = find(results, "floor", weight, n=n, k=k)
        if floor:
            axis.axhline(floor["us"], color=GREY, linewidth=1.2, linestyle=(0, (4, 2)), label=FLOOR)
        axis.set_title(f"{n} × {k}, {weight['weight']}, {_words(weight)}")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(tokens, [str(m) for m in tokens])
        _log_ticks(axis.yaxis)
        axis.set_xlabel("tokens (m)")
        axis.set_ylabel("µs per call")
    for axis in axes[len(shapes) :]:
        axis.set_visible(False)
    _legend(figure)
    return figure


def roofline(results: Results, weights: Sequence[Record], tokens: Sequence[int]) -> Any:
    """TFLOP/s over flops per byte for the largest shape: a line per format, under the measured bandwidth and peak."""
    import matplotlib

    weights = sorted(weights, key=lambda w: (-dtype(w["weight"]).bits, w["weight"]))
    n, k = max(sizes_of(results, weights), key=lambda size: size[0] * size[1])
    peak = results.find(peer="peak", act=weights[0]["act"])
    floors = [r["bytes"] / r["us"] for r in results.all(peer="floor")]
    figure, (axis,) = _grid(1, 1, width=6.2, height=3.8)
    shades = matplotlib.colormaps["viridis"]
    lines = [("torch", weights[0], COLOURS["torch"], NAMES["torch"])]
    for i, weight in enumerate(weights):
        lines.append(("lowbit", weight, shades(0.9 * i / max(1, len(weights) - 1)), _label(weight, weights)))
    intensities: list[float] = []
    for method, weight, colour, label in lines:
        records = [find(results, method, weight, n=n, k=k, m=m) for m in tokens]
        points = [_point(record) for record in records if record]
        if points:
            axis.plot(*zip(*points), marker="o", markersize=3.5, linewidth=1.4, color=colour, label=label)
            intensities += [x for x, _ in points]
    if intensities and peak and floors:
        bandwidth, top = max(floors) * 1e-6, peak["tflops"]  # TB/s, TFLOP/s
        left, right = min(intensities) / 1.5, max(max(intensities), top / bandwidth) * 2
        bend = top / bandwidth
        axis.plot([left, bend, right], [left * bandwidth, top, top], color=GREY, linewidth=1.2, zorder=1)
        text = {"color": GREY, "fontsize": 8, "xytext": (0, 5), "textcoords": "offset points"}
        axis.annotate(f"{bandwidth:.2f} TB/s ", (bend / 8, top / 8), ha="right", **text)
        axis.annotate(f"{top:.0f} TFLOP/s", (right, top), ha="right", **text)
    axis.set_xscale("log")
    axis.set_yscale("log")
    _log_ticks(axis.xaxis, (1.0,))
    _log_ticks(axis.yaxis, (1.0,))
    axis.legend(loc="lower right", fontsize=8)
    axis.set_title(f"{n} × {k}, m = {tokens[0]} to {tokens[-1]}")
    axis.set_xlabel("operations per byte (weight, x and y)")
    axis.set_ylabel("TFLOP/s")
    return figure


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
    """One for all panels, above them."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=5, fontsize=8.5)


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def _save(path: Path, draw: Callable[[], Any], results: Results) -> list[Path]:
    with _style():
        figure = draw()
        figure.supxlabel(describe(results.environment), fontsize=6.5, color=GREY, x=0.99, ha="right")
        files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
        for file in files:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _name(method: str) -> str:
    return NAMES.get(method, method)


def _label(weight: Record, among: Sequence[Record]) -> str:
    """The format, and what else tells it apart."""
    text = weight["weight"]
    if len({w["group_size"] for w in among}) > 1:
        text += f" {_group(weight)}"
    if len({w["zeros"] for w in among}) > 1 and weight["zeros"] != "none":
        text += f"\n{weight['zeros']} zeros"
    return text


def _group(weight: Record) -> str:
    size = f"g{weight['group_size']}" if weight["group_size"] else "row"
    return size + ("" if weight["zeros"] == "none" else f"_{weight['zeros']}_zeros")


def _words(weight: Record) -> str:
    group = f"groups of {weight['group_size']}" if weight["group_size"] else "one scale per row"
    return group + ("" if weight["zeros"] == "none" else f", {weight['zeros']} zeros")
