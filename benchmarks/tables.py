"""Results as markdown tables: one per format, with a row per shape and method and a column per number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.environment import describe
from benchmarks.results import Record, Results

WEIGHT = ("weight", "group_size", "zeros", "act")
NOT_METHODS = ("floor", "peak")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """A table; all but the first columns to the right."""
    rule = ["---"] * text_columns + ["---:"] * (len(head) - text_columns)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *rows])


def tables(results: Results) -> str:
    """All tables, with a line that says where they were measured and notes on what is not in them."""
    parts = [describe(results.environment)]
    parts += [f"{_title(weight)}\n\n{format_table(results, weight)}" for weight in formats(results)]
    notes = sorted({_note(r) for r in results.measurements if "us" not in r})
    if notes:
        parts.append("\n".join(["Not measured:", "", *(f"- {note}" for note in notes)]))
    return "\n\n".join(parts)


def formats(results: Results) -> list[Record]:
    """The weights that were measured, in order."""
    found = [
        {name: r[name] for name in WEIGHT}
        for r in results.measurements
        if r["weight"] and r["peer"] != "peak"
    ]
    return [weight for i, weight in enumerate(found) if weight not in found[:i]]


def methods(results: Results, weight: Record) -> list[str]:
    """Those with a time for this weight, in the order of measurement; torch is one for every weight."""
    found = [
        r["peer"]
        for r in results.measurements
        if "us" in r and r["peer"] not in NOT_METHODS and _is(r, weight)
    ]
    return list(dict.fromkeys(found))


def sizes(results: Results, weight: Record) -> list[tuple[int, int]]:
    """The (n, k) that were measured."""
    return list(dict.fromkeys((r["n"], r["k"]) for r in results.all(**weight) if r["peer"] != "peak"))


def find(results: Results, peer: str, weight: Record, **key: int) -> Record | None:
    """A method's measurement that has a time."""
    entries = {"act": weight["act"], "weight": None} if peer == "torch" else weight
    record = results.find(peer=peer, **entries, **key)
    return record if record and "us" in record else None


def format_table(results: Results, weight: Record) -> str:
    """Microseconds; behind them how many times as fast as torch, and as long as the read floor."""
    tokens = sorted({r["m"] for r in results.all(**weight) if r["peer"] not in NOT_METHODS})
    rows: list[list[str]] = []
    for n, k in sizes(results, weight):
        floor = find(results, "floor", weight, n=n, k=k)
        name = f"{n} x {k}" + (f", floor {floor['us']:.2f}" if floor else "")
        for peer in methods(results, weight):
            cells = [_cell(results, peer, weight, n, k, m) for m in tokens]
            if any(cells):
                rows.append([name, peer, *cells])
                name = ""
    return markdown(["n x k", "method", *(f"m = {m}" for m in tokens)], rows, text_columns=2)


def _cell(results: Results, peer: str, weight: Record, n: int, k: int, m: int) -> str:
    record = find(results, peer, weight, n=n, k=k, m=m)
    if record is None:
        return ""
    time = f"{record['us']:.2f}"
    if peer == "torch":
        return time
    ratios = [f"{ratio:.2f}{unit}" for ratio, unit in _ratios(results, record, weight) if ratio is not None]
    return f"{time} ({', '.join(ratios)})" if ratios else time


def _ratios(results: Results, record: Record, weight: Record) -> list[tuple[float | None, str]]:
    return [(results.speedup(record), "x"), (results.over_floor(record), " floors")]


def _is(record: Record, weight: Record) -> bool:
    if record["peer"] == "torch":
        return bool(record["act"] == weight["act"])
    return all(record[name] == weight[name] for name in WEIGHT)


def _title(weight: Record) -> str:
    group = f"groups of {weight['group_size']}" if weight["group_size"] else "one scale per row"
    zeros = "" if weight["zeros"] == "none" else f", {weight['zeros']} zeros"
    return (
        f"### {weight['weight']}, {group}{zeros}, {weight['act']}\n\n"
        "Microseconds per call (times as fast as torch, times as long as reading the weight)"
    )


def _note(record: Record) -> str:
    weight = f", {record['weight']}" if record["weight"] else ""
    if "skipped" in record:
        return f"{record['peer']}{weight}: {record['skipped']}"
    reason = record.get("failed") or f"wrong result, relative error {record['error']}"
    return f"{record['peer']}{weight}, {record['n']} x {record['k']}, m = {record['m']}: {reason}"
