"""One table that says whether the compiler keeps what it promises: `python -m benchmarks show`, two minutes.

Every format in f16 and bf16 against float64; u4 against torch's f16 matmul in the same run; how long a kernel takes
to compile; what a call costs the host.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import lowbit
from benchmarks.environment import describe, environment
from benchmarks.host_cost import microseconds
from benchmarks.measure import relative_error
from benchmarks.peers.lowbit import compile_kernels
from benchmarks.tables import markdown
from lowbit.dialect.formats.dtypes import all_names
from lowbit.passes.targets import parse_target
from lowbit.pylib import MatmulSpec, reference
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.runtime.devices import this_machine
from lowbit.pylib.tune import timing

ROWS = (1, 16, 64)
SHAPES = ((57344, 8192), (8192, 8192), (4096, 4096))
COMPILED = ("u4", "u1", "u2", "u3", "u5", "u6", "u8", "i4", "i6", "f4e2m1", "f6e3m2", "f8e4m3", "nf4")
ERROR = 2e-3  # relative, in the Frobenius norm: f16 output of products summed in f32

Row = tuple[str, str, str, str]


def show(commit: str | None = None, on_step: Callable[[str], None] = lambda step: None) -> str:
    """The table, as markdown. Needs a GPU. on_step hears of each part."""
    target = this_machine()
    rows: list[Row] = []
    with _fresh_cache():
        on_step("compiling")
        rows += compile_rows(target)
        on_step("compiling all formats")
        specs = {act: [_spec(name, act) for name in all_names()] for act in ("f16", "bf16")}
        with suppress(Exception):  # what fails is met again, and reported, below
            compile_kernels(((spec, m) for each in specs.values() for spec in each for m in ROWS), target)
        for act, each in specs.items():
            on_step(f"checking all formats, {act}")
            rows.append(correct_row(act, each, target))
        for n, k in SHAPES:
            for m in (1, 16):
                on_step(f"timing {n} x {k}, m = {m}")
                rows.append(time_row(n, k, m))
        on_step("timing the host")
        rows += host_rows()
    return f"{describe(environment(commit))}\n\n{markdown(('', 'lowbit', 'torch f16', 'ratio'), rows)}"


@contextmanager
def _fresh_cache() -> Iterator[None]:
    """Run with an empty disk cache; worker processes inherit it."""
    before = os.environ.get("LOWBIT_CACHE_DIR")
    with TemporaryDirectory() as folder:
        os.environ["LOWBIT_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["LOWBIT_CACHE_DIR"]
            if before is not None:
                os.environ["LOWBIT_CACHE_DIR"] = before


def _spec(weight: str, act: str) -> MatmulSpec:
    return MatmulSpec(n=272, k=1024, weight=weight, group_size=128, act=act, scale=act)  # type: ignore[arg-type]


def compile_rows(target: str, formats: Sequence[str] = COMPILED) -> list[Row]:
    """How long one kernel takes to compile, and to be read from the disk cache: 4096 x 4096, m = 1 and 16."""
    specs = [MatmulSpec(n=4096, k=4096, weight=name, group_size=128) for name in formats]
    first, *_ = _compile_times(specs[0], target)
    os.environ["LOWBIT_NO_CACHE"] = "1"  # the first format once more, now that the compiler is loaded
    again = _compile_times(specs[0], target)
    del os.environ["LOWBIT_NO_CACHE"]
    cold = again + [t for spec in specs[1:] for t in _compile_times(spec, target)]
    warm = [t for spec in specs for t in _compile_times(spec, target)]
    count = f"of {len(cold)} kernels"
    return [
        ("compile, first kernel of a process (loads MLIR and LLVM)", f"{first:.2f} s", "", ""),
        (f"compile, median {count}", f"{statistics.median(cold):.2f} s", "", ""),
        (f"compile, slowest {count}", f"{max(cold):.2f} s", "", ""),
        (
            f"compile, found in the disk cache, median {count}",
            f"{statistics.median(warm) * 1e3:.1f} ms",
            "",
            "",
        ),
    ]


def _compile_times(spec: MatmulSpec, target: str) -> list[float]:
    """Seconds for the kernel for one token, and for that for 16."""
    start = time.perf_counter()
    mm = Matmul(spec, parse_target(target), None)  # what lowbit.compile makes, which would remember it
    middle = time.perf_counter()
    mm.kernel(16)
    return [middle - start, time.perf_counter() - middle]


def correct_row(act: str, specs: Sequence[MatmulSpec], target: str) -> Row:
    """How many formats are right for every number of rows, and what is wrong with the others."""
    faults = {spec.weight: fault for spec in specs if (fault := find_fault(spec, target))}
    count = f"{len(specs) - len(faults)} of {len(specs)}"
    if faults:
        count += f" ({'; '.join(f'{name}: {fault}' for name, fault in faults.items())})"
    return f"formats right, {act}, m = {', '.join(map(str, ROWS))}", count, "", ""


def find_fault(spec: MatmulSpec, target: str, rows: Sequence[int] = ROWS) -> str | None:
    """Returns in a few words what went wrong; None if every output agrees with float64 as far as rounding allows."""
    device = "cuda" if parse_target(target).kind == "cuda" else "cpu"
    x, codes, scales, zeros, bias = reference.random_problem(spec, max(rows))
    weight = codes, scales, zeros, bias
    expected = reference.matmul(spec, x, *weight)
    allowed = reference.tolerance(spec, x, *weight)
    try:
        mm = lowbit.compile(spec, target)
        w = mm.pack(*weight).to(device)
        outputs = {m: mm(x[:m].to(device), w) for m in rows}
    except Exception as error:  # the other formats are to be checked all the same
        return type(error).__name__
    wrong = [m for m, y in outputs.items() if not reference.agrees(y, expected[:m], allowed[:m]).all()]
    return f"m = {', '.join(map(str, wrong))}" if wrong else None


def time_row(n: int, k: int, m: int) -> Row:
    """u4 with groups of 128 against torch's f16 matmul, checked and then timed."""
    spec = MatmulSpec(n=n, k=k, weight="u4", group_size=128)
    mm = lowbit.compile(spec)
    w = timing.random_weight(spec)
    x = torch.randn(m, k, dtype=torch.float16, device="cuda")
    dense = mm.dequantize(w)
    error = relative_error(mm(x, w), x, dense)
    ours = timing.graph_time([partial(mm, x, each) for each in timing.copies(w)])
    torchs = timing.graph_time(
        [partial(torch.nn.functional.linear, x, each) for each in _dense_copies(dense)]
    )
    what = f"u4, groups of 128, {n} x {k}, m = {m}"
    if not error < ERROR:
        return what, f"wrong: error {error:.1e}", "", ""
    return what, _microseconds(ours), _microseconds(torchs), f"{torchs.median / ours.median:.2f}"


def _dense_copies(weight: Tensor) -> list[Tensor]:
    count = timing.copies_needed(weight.nbytes)
    return [weight, *(weight.clone() for _ in range(count - 1))]


def _microseconds(time: timing.Timing) -> str:
    return f"{time.median:.2f} µs ({time.best:.2f} to {time.worst:.2f})"


def host_rows() -> list[Row]:
    """Time what an eager call costs the host at m = 1, on a weight so small that the GPU is never waited for."""
    spec = MatmulSpec(n=64, k=256, weight="u4", group_size=128)
    mm = lowbit.compile(spec)
    w = timing.random_weight(spec)
    x = torch.randn(1, spec.k, dtype=torch.float16, device="cuda")
    dense = mm.dequantize(w)
    microseconds(lambda: mm(x, w))  # the GPU clocks up
    ours = microseconds(lambda: mm(x, w))
    torchs = microseconds(lambda: torch.nn.functional.linear(x, dense))
    return [("eager call, host, m = 1", f"{ours:.2f} µs", f"{torchs:.2f} µs", f"{torchs / ours:.2f}")]
