"""What equal bits in every batch cost, into docs/invariant.md: lowbit's times, and others' beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean

from benchmarks.environment import describe
from benchmarks.publish import write_between_marks
from benchmarks.results import Record, Results
from benchmarks.tables import Size, find, formats, markdown, methods, notes, sizes, title, tokens_of, weights_of
from lowbit.dialect.errors import SpecError

BEGIN, END = "<!-- invariant: begin -->", "<!-- invariant: end -->"
OURS, USUAL = "lowbit-invariant", "lowbit"
FEW = 64  # tokens that one launch takes
DESCRIPTIONS = {
    "lowbit": "lowbit without `invariant`",
    "humming-invariant": "Humming, batch-invariant",
    "vllm-invariant": "vLLM's batch-invariant matmul, unquantized weight",
    "vllm-invariant+dequantize": "the same, behind a kernel that dequantizes",
    "torch": "cuBLAS, unquantized weight",
    "torch+dequantize": "the same, behind a kernel that dequantizes",
    "torch-no-split-k": "cuBLASLt without split k, unquantized weight",
    "torch-no-split-k+dequantize": "the same, behind a kernel that dequantizes",
}


def publish(results: Results, root: Path) -> list[Path]:
    """Write docs/invariant.md; returns it. Raises SpecError for results without invariant matmuls."""
    path = root / "docs" / "invariant.md"
    write_between_marks(path, page(results), BEGIN, END)
    return [path]


def page(results: Results) -> str:
    """A table of lowbit's times, and one of others'. Raises SpecError for results without invariant matmuls."""
    if not results.all(peer=OURS):
        raise SpecError(f"the results have no {OURS}; make them with: python -m benchmarks run invariant")
    weight = formats(results)[0]
    head = f"{describe(results.environment)}: {title(weight)}, weights from device memory, in CUDA graphs."
    ours = "Microseconds per call with `invariant=True`, and times as long as without:"
    beside = (
        "Others, in times as long as lowbit with `invariant=True`: geometric means over these sizes. Rows have equal "
        "bits where a row of x, the first and the last of all these numbers of tokens, gave one result in f16:"
    )
    parts = [head, ours, times_table(results, weight), means(results, weight), beside, others_table(results, weight)]
    if other := [each for each in weights_of(results) if each != weight]:
        parts += ["Other weights, in the same way:", weights_table(results, other)]
    return "\n\n".join([*parts, *notes(results)])


def times_table(results: Results, weight: Record) -> str:
    """A row for each size, a column for each number of tokens."""
    tokens = tokens_of(results, weight)
    rows = [[f"{n} x {k}", *(_cell(results, weight, (n, k), m) for m in tokens)] for n, k in sizes(results, weight)]
    return markdown(["n x k", *(f"m = {m}" for m in tokens)], rows)


def _cell(results: Results, weight: Record, size: Size, m: int) -> str:
    found, ratio = _find(results, OURS, weight, size, m), _ratio(results, OURS, USUAL, weight, size, m)
    return "" if found is None else f"{found['us']:.1f}" + ("" if ratio is None else f" ({ratio:.2f})")


def means(results: Results, weight: Record) -> str:
    """A sentence of geometric means."""
    tokens = tokens_of(results, weight)
    few = [m for m in tokens if m <= FEW]
    said = [f"{_mean(results, OURS, USUAL, weight, few)} from {min(few)} to {max(few)} tokens"] if few else []
    said += [f"{_mean(results, OURS, USUAL, weight, [m])} at {m}" for m in tokens if m > FEW]
    bits = _equal_bits(results, OURS, weight)
    return f"Geometric means of the ratios: {', '.join(said)}. Rows had equal bits at {bits} sizes."


def others_table(results: Results, weight: Record) -> str:
    """A row for each method, a column for each number of tokens."""
    tokens = tokens_of(results, weight)
    known = [peer for peer in DESCRIPTIONS if peer in methods(results, weight)]
    rows: list[list[str]] = []
    for peer in known:
        times = [_mean(results, peer, OURS, weight, [m]) for m in tokens]
        rows.append([DESCRIPTIONS[peer], _equal_bits(results, peer, weight), *times])
    return markdown(["method", "equal bits, sizes", *(f"m = {m}" for m in tokens)], rows)


def weights_table(results: Results, weights: Sequence[Record]) -> str:
    """A row for each weight, on the first of its sizes."""
    tokens = sorted({m for weight in weights for m in tokens_of(results, weight)})
    rows: list[list[str]] = []
    for weight in weights:
        size = sizes(results, weight)[0]
        cells = (_cell(results, weight, size, m) for m in tokens)
        rows.append([f"{title(weight)}, {size[0]} x {size[1]}", _equal_bits(results, OURS, weight), *cells])
    return markdown(["weight", "equal bits, sizes", *(f"m = {m}" for m in tokens)], rows)


def _equal_bits(results: Results, peer: str, weight: Record) -> str:
    """Returns at how many sizes rows had the same bits for all numbers of tokens, of how many."""
    found = [_bits(results, peer, weight, size) for size in sizes(results, weight)]
    return f"{sum(len(bits) == 1 for bits in found)} of {sum(map(bool, found))}"


def _bits(results: Results, peer: str, weight: Record, size: Size) -> set[str]:
    records = [_find(results, peer, weight, size, m) for m in tokens_of(results, weight)]
    return {bits for record in records if record for bits in record["row_bits"]}


def _mean(results: Results, peer: str, base: str, weight: Record, tokens: Iterable[int]) -> str:
    """Returns times as long as another method takes, in the geometric mean; nothing without a size that both have."""
    pairs = [(size, m) for size in sizes(results, weight) for m in tokens]
    found = [ratio for size, m in pairs if (ratio := _ratio(results, peer, base, weight, size, m))]
    return f"{geometric_mean(found):.2f}" if found else ""


def _ratio(results: Results, peer: str, base: str, weight: Record, size: Size, m: int) -> float | None:
    taken, least = (_find(results, each, weight, size, m) for each in (peer, base))
    return taken["us"] / least["us"] if taken and least else None


def _find(results: Results, peer: str, weight: Record, size: Size, m: int) -> Record | None:
    return find(results, peer, weight, n=size[0], k=size[1], m=m)
