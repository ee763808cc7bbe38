"""Results as markdown tables: sizes by numbers of tokens, all formats side by side, the layers of models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.environment import describe
from benchmarks.results import Record, Results
from lowbit.dialect.formats.dtypes import dtype
from lowbit.pylib.tune.model_shapes import MODELS

WEIGHT = ("weight", "group_size", "zeros", "act", "compute")
NOT_METHODS = ("floor", "peak")
MAIN_TOKENS = (1, 8, 16, 32, 64)

Size = tuple[int, int]  # n, k


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """A table; all but the first columns to the right."""
    rule = ["---"] * text_columns + ["---:"] * (len(head) - text_columns)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *rows])


def tables(results: Results) -> str:
    """All tables, with a line that says where they were measured and notes on what is not in them."""
    weights = formats(results)
    parts = [describe(results.environment), "Microseconds per call; in brackets, times as fast as cuBLAS in f16."]
    for weight in weights:
        if len(tokens_of(results, weight)) > 2 or len(weights) == 1:
            parts += [f"### {title(weight)}", token_table(results, weight)]
            if any("sustained_us" in r for r in results.all(**weight)):
                parts += [f"### {title(weight)}, without a rest", token_table(results, weight, "sustained_us")]
    for (n, k), m in pivots(results):
        parts += [f"### All formats, {n} x {k}, m = {m}", formats_table(results, (n, k), m)]
    for time, rested in (("us", ""), ("sustained_us", ", without a rest")):
        if weights and (costs := costs_table(results, weights[0], time)):
            parts += [f"### Next to {title(weights[0])}{rested}", costs]
    if weights and (layers := layers_table(results, weights[0])):
        parts += [f"### Layers of models, {title(weights[0])}", layers]
    if weights and (eager := eager_table(results, weights[0])):
        parts += [f"### Eager calls, m = 1, {title(weights[0])}", eager]
    return "\n\n".join([*parts, *notes(results)])


def summary(results: Results) -> str:
    """The first format on plain sizes: a row for each size, a column for each number of tokens, and the read floor."""
    weight = formats(results)[0]
    rows = []
    for n, k in plain_sizes(results, weight):
        floor = find(results, "floor", weight, n=n, k=k)
        cells = [_beside_others(results, weight, n, k, m) for m in MAIN_TOKENS]
        rows.append([f"{n} x {k}", f"{floor['us']:.1f}" if floor else "", *cells])
    head = ["n x k", "read floor", *(f"m = {m}" for m in MAIN_TOKENS)]
    return f"{markdown(head, rows)}\n\n{title(weight)}. {describe(results.environment)}."


def _beside_others(results: Results, weight: Record, n: int, k: int, m: int) -> str:
    """Our time, in bold; in brackets how many times as fast that is as cuBLAS, and as the best of the others."""
    ours = find(results, "lowbit", weight, n=n, k=k, m=m)
    if ours is None:
        return ""
    others = [find(results, "torch", weight, n=n, k=k, m=m), best_peer(results, weight, n, k, m)]
    ratios = [f"{other['us'] / ours['us']:.1f}" if other else "-" for other in others]
    return f"**{ours['us']:.1f}** ({', '.join(ratios)})"


def best_peer(results: Results, weight: Record, n: int, k: int, m: int) -> Record | None:
    """The fastest but for this compiler and cuBLAS."""
    others = [peer for peer in methods(results, weight) if peer not in ("lowbit", "torch")]
    found = [r for peer in others if (r := find(results, peer, weight, n=n, k=k, m=m))]
    return min(found, key=lambda r: r["us"], default=None)


def formats(results: Results) -> list[Record]:
    """The first weight of every format that was measured, in order."""
    found: dict[str, Record] = {}
    for weight in weights_of(results):
        found.setdefault(weight["weight"], weight)
    return list(found.values())


def variants(results: Results, weight: Record) -> list[Record]:
    """The same format with other groups, zeros or activations."""
    return [w for w in weights_of(results) if w != weight and w["weight"] == weight["weight"]]


def weights_of(results: Results) -> list[Record]:
    """Returns the weights that were measured, apart from sizes, numbers of tokens and methods, in order."""
    found = [weight_of(r) for r in results.measurements if r["weight"] and r["peer"] != "peak"]
    return [weight for i, weight in enumerate(found) if weight not in found[:i]]


def weight_of(record: Record) -> Record:
    """Returns what a record says of its weight, but for its size."""
    return {name: record.get(name) for name in WEIGHT}


def by_bits(weights: Iterable[Record]) -> list[Record]:
    """The widest first."""
    return sorted(weights, key=lambda w: (-dtype(w["weight"]).bits, w["weight"]))


def methods(results: Results, *weights: Record) -> list[str]:
    """Those with a time for one of these weights, in the order of measurement; torch is one for every weight."""
    found = [
        r["peer"]
        for r in results.measurements
        if "us" in r and r["peer"] not in NOT_METHODS and any(_is(r, weight) for weight in weights)
    ]
    return list(dict.fromkeys(found))


def sizes(results: Results, weight: Record) -> list[Size]:
    """The (n, k) that were measured."""
    return list(dict.fromkeys((r["n"], r["k"]) for r in results.all(**weight) if r["peer"] != "peak"))


def plain_sizes(results: Results, weight: Record) -> list[Size]:
    """Those that were asked for as sizes, not as a model's layers."""
    named = {(r["n"], r["k"]) for r in results.all(**weight) if r["shape"] == f"{r['n']} x {r['k']}"}
    return [size for size in sizes(results, weight) if size in named]


def tokens_of(results: Results, weight: Record, size: Size | None = None) -> list[int]:
    """The numbers of tokens with a time."""
    where = {} if size is None else {"n": size[0], "k": size[1]}
    found = {r["m"] for r in results.all(**weight, **where) if r["peer"] not in NOT_METHODS and "us" in r}
    return sorted(found)


def pivots(results: Results) -> list[tuple[Size, int]]:
    """(size, tokens) where several formats were measured."""
    places: dict[tuple[Size, int], int] = {}
    for weight in formats(results):
        for size in plain_sizes(results, weight):
            for m in tokens_of(results, weight, size):
                places[size, m] = places.get((size, m), 0) + 1
    return sorted(place for place, count in places.items() if count > 1)


def find(results: Results, peer: str, weight: Record, **key: int) -> Record | None:
    """A method's measurement that has a time."""
    entries = {"act": weight["act"], "weight": None} if peer == "torch" else weight
    record = results.find(peer=peer, **entries, **key)
    return record if record and "us" in record else None


def token_table(results: Results, weight: Record, time: str = "us") -> str:
    """A row per size and method, a column per number of tokens."""
    tokens = tokens_of(results, weight)
    rows: list[list[str]] = []
    for n, k in plain_sizes(results, weight):
        floor = find(results, "floor", weight, n=n, k=k)
        name = f"{n} x {k}" + (f", floor {floor['us']:.2f}" if floor else "")
        for peer in methods(results, weight):
            cells = [_cell(results, peer, weight, n, k, m, time) for m in tokens]
            if any(cells):
                rows.append([name, peer, *cells])
                name = ""
    return markdown(["n x k", "method", *(f"m = {m}" for m in tokens)], rows, text_columns=2)


def formats_table(results: Results, size: Size, m: int) -> str:
    """A row per format, a column per method."""
    n, k = size
    weights = [w for w in by_bits(formats(results)) if m in tokens_of(results, w, size)]
    peers = methods(results, *weights)
    rows = []
    for weight in weights:
        floor = find(results, "floor", weight, n=n, k=k)
        cells = [_cell(results, peer, weight, n, k, m) for peer in peers]
        rows.append([weight["weight"], f"{floor['us']:.2f}" if floor else "", *cells])
    return markdown(["weight", "read floor", *peers], rows)


def costs_table(results: Results, weight: Record, time: str = "us") -> str | None:
    """This compiler's times for what differs in groups, zeros or activations; in brackets, how many times as long that
    takes, beyond what only reading it takes longer; None if nothing of the kind was measured."""
    others = variants(results, weight)
    rows: list[list[str]] = []
    for n, k in plain_sizes(results, weight):
        name = f"{n} x {k}"
        for m in tokens_of(results, weight, (n, k)):
            cells = [_cost(results, w, weight, time, n=n, k=k, m=m) for w in others]
            ours = find(results, "lowbit", weight, n=n, k=k, m=m)
            if any(cells) and ours and time in ours:
                rows.append([name, str(m), f"{ours[time]:.2f}", *cells])
                name = ""
    head = ["n x k", "m", weight["weight"], *(_differences(w, weight) for w in others)]
    return markdown(head, rows) if rows else None


def _cost(results: Results, weight: Record, base: Record, time: str, **key: int) -> str:
    ours, plain = (find(results, "lowbit", w, **key) for w in (weight, base))
    took, least = (results.over_floor(r, time) if r else None for r in (ours, plain))
    return f"{ours[time]:.2f} ({took / least:.2f})" if ours and took and least else ""


def _differences(weight: Record, base: Record) -> str:
    """Returns a text of what a weight has that another has not."""
    parts = [f"{weight['zeros']} zeros"] if weight["zeros"] != base["zeros"] else []
    if weight["group_size"] != base["group_size"]:
        parts.append(f"g{weight['group_size']}" if weight["group_size"] else "a scale per row")
    parts += [weight["act"]] if weight["act"] != base["act"] else []
    return ", ".join(parts + ([weight["compute"]] if weight["compute"] != base["compute"] else []))


def layers_table(results: Results, weight: Record) -> str | None:
    """A row per layer of a model; None if fewer than two were measured."""
    tokens = (1, 16)
    peers = [p for p in methods(results, weight) if p in ("torch", "humming", "lowbit")]
    rows: list[list[str]] = []
    for model, shape in MODELS.items():
        name = model
        for layer, (n, k) in shape.linears.items():
            floor = find(results, "floor", weight, n=n, k=k)
            cells = [_cell(results, peer, weight, n, k, m) for m in tokens for peer in peers]
            if floor and any(cells):
                rows.append([name, f"{layer}, {n} x {k}", f"{floor['us']:.2f}", *cells])
                name = ""
    head = ["model", "layer", "read floor", *(f"{peer}, m = {m}" for m in tokens for peer in peers)]
    return markdown(head, rows, text_columns=2) if len(rows) > 1 else None


def eager_table(results: Results, weight: Record) -> str | None:
    """Microseconds of eager calls, a row per size and a column per method; None if none were timed."""
    peers = methods(results, weight)
    rows = []
    for n, k in plain_sizes(results, weight):
        found = [find(results, peer, weight, n=n, k=k, m=1) for peer in peers]
        if any(r and "eager_us" in r for r in found):
            rows.append([f"{n} x {k}", *(f"{r['eager_us']:.1f}" if r and "eager_us" in r else "" for r in found)])
    return markdown(["n x k", *peers], rows) if rows else None


def title(weight: Record) -> str:
    group = f"groups of {weight['group_size']}" if weight["group_size"] else "one scale per row"
    zeros = "" if weight["zeros"] == "none" else f", {weight['zeros']} zeros"
    compute = f" in {weight['compute']}" if weight["compute"] else ""
    return f"{weight['weight']}, {group}{zeros}, {weight['act']}{compute}"


def _cell(results: Results, peer: str, weight: Record, n: int, k: int, m: int, time: str = "us") -> str:
    record = find(results, peer, weight, n=n, k=k, m=m)
    if record is None or time not in record:
        return ""
    ratio = results.speedup(record, time)
    return f"{record[time]:.2f}" + ("" if peer == "torch" or ratio is None else f" ({ratio:.2f}x)")


def _is(record: Record, weight: Record) -> bool:
    if record["peer"] == "torch":
        return bool(record["act"] == weight["act"])
    return all(record.get(name) == weight[name] for name in WEIGHT)


def notes(results: Results) -> list[str]:
    """A list of what has no time, and why; nothing if there is none. Formats that a peer lacks for one reason come
    together."""
    lacking: dict[tuple[str, str], list[str]] = {}
    others = []
    for r in results.measurements:
        if "skipped" in r:
            found = lacking.setdefault((r["peer"], r["skipped"]), [])
            found += [r["weight"]] if r["weight"] not in found else []
        elif "us" not in r:
            reason = r.get("failed") or f"wrong result, relative error {r['error']}"
            what = [r["peer"], *([r["weight"]] if r["weight"] else []), f"{r['n']} x {r['k']}, m = {r['m']}"]
            others.append(f"{', '.join(what)}: {reason}")
    skipped = [f"{peer}, {', '.join(weights)}: {reason}" for (peer, reason), weights in lacking.items()]
    found = sorted(skipped) + others
    return ["\n".join(["Not measured:", "", *(f"- {each}" for each in found)])] if found else []
