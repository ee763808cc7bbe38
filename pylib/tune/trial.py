"""A matmul on random data: is it right, and how fast is it? What `lowbit run` and the demo report.

Every output is checked. The weight repeats itself every `PERIOD` rows and x every `X_PERIOD`, so that float64 has
little to do.

On a GPU the time is what `pylib.tune.timing` says; on a CPU it is from call to return.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import TensorSlot
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.registry import family_of
from lowbit.passes.target import Target
from lowbit.pylib import reference
from lowbit.pylib.build import knobs
from lowbit.pylib.matmul import Matmul, compile
from lowbit.pylib.reference.definition import F64
from lowbit.pylib.runtime.cpu import CpuMatmul
from lowbit.pylib.runtime.devices import available_memory, target_named
from lowbit.pylib.runtime.gpu import check_device
from lowbit.pylib.tune import timing
from lowbit.pylib.weights import packed
from lowbit.pylib.weights.packed import PackedWeight

PERIOD, X_PERIOD = 1009, 257  # rows; primes, so that no tile of a kernel repeats
CPU_REPEATS = 15
CPU_SECONDS = 2.0  # at most, about


@dataclass(frozen=True)
class Trial:
    """Results of a trial. Times in seconds.

    slots        products of an expert and a row of x: m of a matmul without experts
    experts_hit  experts that have any
    """

    spec: MatmulSpec
    target: Target
    m: int
    slots: int
    experts_hit: int
    schedule: KernelSchedule | None  # of the kernel for m tokens, where it has one
    error: float  # relative, in the Frobenius norm
    worst: float  # largest error as a share of what is allowed there; inf if NaN or inf was not met
    compile_time: float
    time: float | None  # of one call; None in the emulator, whose time says nothing
    bytes: int  # read and written by one call

    @property
    def right(self) -> bool:
        return self.worst <= 1

    @property
    def flops(self) -> int:
        return 2 * self.slots * self.spec.n // self.spec.experts * self.spec.k


@dataclass(frozen=True)
class Sample:
    """A matmul on random data, and what must come out.

    x         [m, k], whose rows repeat themselves
    weight    [n, k], whose rows repeat themselves; of a gated MLP those of each half, of experts those of all
    others    what a call takes besides, by name: a residual [m, n], which repeats itself in both
    expected  [rows of x, rows of the weight] of one period of each, by the definition in float64
    allowed   the same shape: how far a right result may be off
    """

    x: Tensor
    weight: PackedWeight
    others: dict[str, Tensor]
    expected: F64
    allowed: F64

    def errors(self, y: Tensor) -> tuple[float, float]:
        """Returns two errors of y [up to m, n]: relative, in the Frobenius norm; and the worst element, as a share of
        what is allowed there (inf where NaN or inf was not met)."""
        rows, columns = self.expected.shape
        at = torch.arange(y.shape[1]) % columns
        expected, allowed = (torch.from_numpy(t)[:, at].to(y.device) for t in (self.expected, self.allowed))
        return _errors((part, expected[: len(part)], allowed[: len(part)]) for part in y.split(rows))

    def errors_of_slots(self, y: Tensor, tokens: Tensor, experts: Tensor) -> tuple[float, float]:
        """Returns what `errors` returns, of y [slots, outputs of an expert].

        tokens, experts  [slots]: the row of x that a slot has, and the expert that multiplies it
        """
        return _errors(self._parts_of_slots(y, tokens, experts))

    def _parts_of_slots(self, y: Tensor, tokens: Tensor, experts: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields some slots of y at a time, with what must be there, and how far it may be off."""
        (rows, columns), outputs = self.expected.shape, y.shape[1]
        known = [torch.from_numpy(t).to(y.device) for t in (self.expected, self.allowed)]
        within = torch.arange(outputs, device=y.device)
        for part, token, expert in zip(*(t.split(rows) for t in (y, tokens.long(), experts.long()))):
            at = token[:, None] % rows, (expert[:, None] * outputs + within) % columns
            yield part, known[0][at], known[1][at]


def _errors(parts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float]:
    """Returns the errors of parts of y, each with what must be there, and how far it may be off."""
    off = size = worst = 0.0
    for part, right, most in parts:
        error = (part.double() - right).abs()
        off, size = off + error.square().sum().item(), size + right.square().sum().item()
        worst = max(worst, (error / most).nan_to_num(nan=math.inf).max().item())
    return math.sqrt(off / size) if size else math.inf if off else 0.0, worst


def sample(spec: MatmulSpec, m: int, device: str, period: int = PERIOD, **rounding: bool) -> Sample:
    """Random data on a device, where the weight is packed. The period of its rows should be a prime; where rows share
    numbers, it is cut to whole blocks of them.

    rounding: what the kernel rounds besides its sums, by the names that `reference.tolerance` has for it
    """
    block = ROWS if spec.is_gated else spec.bilevel.rows if spec.bilevel else 1
    part = replace(spec, n=min(spec.n, period // block * block), experts=1)
    x, tensors = reference.random_inputs(part, min(m, X_PERIOD))
    others = reference.random_residual(part, len(x))
    arguments: dict[str, Any] = {**tensors, **others, **rounding}
    expected = reference.matmul(part, x, **tensors, **others)
    allowed = reference.tolerance(part, x, **arguments)
    rows = torch.arange(spec.experts * spec.outputs, device=device).view(spec.experts, -1) % part.outputs
    tokens = torch.arange(m, device=device) % len(x)
    others = {name: t.to(device)[tokens][:, rows.flatten()] for name, t in others.items()}
    if spec.is_gated:
        rows = torch.cat([rows, part.outputs + rows], 1)
    rows = rows.flatten()
    given = {slot.name: _repeated(spec, slot, tensors[slot.name].to(device), rows) for slot in spec.given_tensors}
    weight = packed.pack(spec, **given)
    return Sample(x.to(device)[tokens], weight, others, expected, allowed)


def run_trial(
    spec: MatmulSpec,
    m: int,
    target: str | None = None,
    schedule: KernelSchedule | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Trial:
    """Compile, pack random data, multiply, check, time; `on_step` hears of each.

    Raises as `compile` does, and SpecError for data beyond this machine's memory.
    """
    check_memory(spec, m, target)
    on_step("compiling")
    start = time.perf_counter()
    mm = compile(spec, target, schedule)
    chosen = mm.kernel(m).schedule if mm.target.is_gpu else None  # compiles the kernel for m tokens
    compile_time = time.perf_counter() - start

    if mm.target.kind == "cuda" and not torch.cuda.is_available():
        check_device(mm.target, -1)
    on_step("packing random data")
    device = "cuda" if mm.target.kind == "cuda" else "cpu"
    data = sample(spec, m, device, **rounding(mm, m))

    on_step("multiplying")
    y = mm(data.x, data.weight, **data.others)

    on_step("checking")
    error, worst = data.errors(y)

    on_step("timing")
    return Trial(
        spec=spec,
        target=mm.target,
        m=m,
        slots=m,
        experts_hit=1,
        schedule=chosen,
        error=error,
        worst=worst,
        compile_time=compile_time,
        time=None if mm.target.kind == "emulator" else time_call(mm, data.x, data.weight, **data.others),
        bytes=sum(t.nbytes for t in (data.weight, data.x, y, *data.others.values())),
    )


def check_memory(spec: MatmulSpec, m: int, target: str | None) -> None:
    """Raises SpecError where random data do not fit the host's memory, and the system would end the process: what
    repeats in f64, in several forms, and codes, x and y, which lie on the GPU for one."""
    needed, free = 40 * min(spec.n, PERIOD) * spec.k, available_memory()
    if target_named(target).kind != "cuda":
        needed += spec.n * spec.k + 2 * m * (spec.n + spec.k)
    if needed > free:
        sizes = f"n={spec.n}, k={spec.k} and m={m} take at least {needed / 1e9:.1f} GB"
        raise SpecError(f"{sizes}, and {free / 1e9:.1f} GB of memory are free; try less")


def rounding(mm: Matmul, m: int) -> dict[str, bool]:
    """Returns what the kernel for m rows rounds besides its sums, as `reference.tolerance` takes it; for no rows, that
    for one."""
    spec = mm.spec.for_rows(m)
    if not mm.target.is_gpu:
        return rounding_on_cpu(spec, m)
    schedule = mm.kernel(max(m, 1)).schedule
    return family_of(schedule).rounding(spec, schedule)


def rounding_on_cpu(spec: MatmulSpec, m: int) -> dict[str, bool]:
    """Returns the same of a CPU's program for m rows."""
    in_bf16 = spec.compute is None and CpuMatmul(spec, knobs.cpu()).rounds_weights(m)
    return {"folded": spec.rounds_weights(m), "dequantized": in_bf16}


def _repeated(spec: MatmulSpec, slot: TensorSlot, t: Tensor, rows: Tensor) -> Tensor:
    """Returns the tensor, given for a few rows, of a weight with these rows of them."""
    if slot.index == "column":
        return t.repeat(spec.experts)
    if slot.index == "sparse":
        return t.to_dense()[rows].to_sparse_csr()
    if slot.index == "block" and spec.bilevel:
        height = spec.bilevel.rows
        return t[rows[::height] // height]
    return _take(t, rows)


def _take(t: Tensor, rows: Tensor) -> Tensor:
    """t[rows], for types that torch cannot index (float8), too."""
    return t.view(torch.uint8)[rows].view(t.dtype) if t.element_size() == 1 else t[rows]


def time_call(mm: Matmul, x: Tensor, w: PackedWeight, **others: Tensor) -> float:
    """Median seconds of mm(x, w, **others): on a GPU in a graph, with a cold cache; on a CPU from call to return."""
    return _cuda_time(mm, x, w, others) if x.is_cuda else cpu_time(partial(mm, x, w, **others))


def _cuda_time(mm: Matmul, x: Tensor, w: PackedWeight, others: Mapping[str, Tensor]) -> float:
    return timing.cold_time([partial(mm, x, each, **others) for each in timing.copies(w)])


def cpu_time(call: Callable[[], Tensor]) -> float:
    """Median seconds of a call on a CPU."""
    times: list[float] = []
    while len(times) < CPU_REPEATS and sum(times) < CPU_SECONDS:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)
