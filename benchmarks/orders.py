"""Which order of sums an invariant matmul should have (docs/invariant.md): orders that are predicted to be fast, timed.

Of every order the schedules that are predicted to be the fastest are timed coarsely, for few tokens and for prompts;
of the best orders those, too, that are one choice away from the best for few tokens. Then the best schedule of
each of these orders is timed finely, beside what is chosen without `invariant`. At last rows of all kernels of the best
one are compared, bit by bit, in f32.

    python -m benchmarks orders 4096x4096,8192x8192 -w u4 -g 128     # on a GPU: orders.json
    python -m benchmarks orders --write orders.json                  # to the tables that lowbit comes with
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import lowbit
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule, operations_of
from lowbit.passes.kernels.registry import FAMILIES, family_of, schedule_from_dict, schedule_to_dict
from lowbit.passes.kernels.sum_order import CUT, SumOrder
from lowbit.passes.scheduling.order_choice import MANY, SLACK, TOKENS, ranked_orders
from lowbit.passes.scheduling.order_tables import FOLDER, known_orders, to_text
from lowbit.passes.scheduling.tables import Entry, Key, read_table
from lowbit.passes.target import Target
from lowbit.pylib.model_speed.table import aligned
from lowbit.pylib.tune.problem import Problem
from lowbit.pylib.tune.processes import Compilers, Failed, kernel_id

if TYPE_CHECKING:
    from lowbit.pylib.tune.gpu import Stand

ALL = (*TOKENS, *MANY)
WIDE = 1.35  # times as long as with the best order few tokens may be predicted to take, for an order to be timed
FINE = 3  # orders that are timed finely
COARSE_REPLAYS, FINE_REPLAYS = 3, 7

Schedules = Mapping[int, Sequence[KernelSchedule]]  # by number of tokens
Options = dict[SumOrder, dict[int, list[KernelSchedule]]]  # by order and number of tokens, the most promising first
Time = Callable[[Problem, KernelSchedule, int], float]  # microseconds; inf where a kernel could not be compiled


@dataclass
class Timed:
    """What was measured of an order: for numbers of tokens, the fastest schedule, and microseconds."""

    order: SumOrder
    schedules: dict[int, KernelSchedule] = field(default_factory=dict[int, KernelSchedule])
    times: dict[int, float] = field(default_factory=dict[int, float])

    def time(self, m: int) -> float:
        """Microseconds for m tokens: in a launch, or in one for every 64."""
        return min(self.times.get(m, math.inf), m / TOKENS[-1] * self.times[TOKENS[-1]] if m > TOKENS[-1] else math.inf)

    def few(self) -> float:
        return geometric_mean(map(self.time, TOKENS))

    def all(self) -> float:
        return geometric_mean(map(self.time, ALL))


def options(spec: MatmulSpec, target: Target, orders: int, each: int) -> Options:
    """Returns so many orders, and of each so many schedules for every number of tokens."""
    ranked = ranked_orders(spec, target, WIDE)
    by = [sorted(ranked, key=key) for key in (lambda r: r.few, lambda r: r.all)]
    kept = list(dict.fromkeys(found.order for pair in zip(*by) for found in pair))[:orders]
    return {order: {m: _fastest(spec, target, order, m, each) for m in ALL} for order in kept}


def _fastest(spec: MatmulSpec, target: Target, order: SumOrder, m: int, each: int) -> list[KernelSchedule]:
    """Returns the schedules that are predicted to be the fastest for m tokens."""
    predicted: dict[KernelSchedule, float] = {}
    for family in (f for f in FAMILIES.values() if f.operation in operations_of(spec)):
        tiles = [m] if family.takes_any_tokens else [t for t in family.token_tiles(spec, target) if m <= t <= 2 * m + 6]
        for tile in (t for t in tiles if t in family.token_tiles(spec, target)):
            for group in family.in_order(spec, tile, target, order):
                for schedule in group.schedules:
                    time = family.predict(spec, tile, schedule, target)
                    predicted[schedule] = min(time, predicted.get(schedule, math.inf))
    return sorted((s for s in predicted if math.isfinite(predicted[s])), key=predicted.__getitem__)[:each]


def best_orders(spec: MatmulSpec, found: Options, time: Time) -> list[Timed]:
    """Returns the orders that are worth being timed finely, by coarse times, with the fastest schedules of each."""
    coarse = [_timed(spec, order, of_m, time, COARSE_REPLAYS) for order, of_m in found.items()]
    whole = [each for each in coarse if all(m in each.times for m in TOKENS)]
    by = [sorted(whole, key=key) for key in (Timed.few, Timed.all)]
    kept = {id(each): each for pair in zip(*by) for each in pair}
    return list(kept.values())[:FINE]


def _timed(
    spec: MatmulSpec,
    order: SumOrder,
    schedules: Schedules,
    time: Time,
    replays: int,
) -> Timed:
    """Returns an order with its fastest schedules, of those that are given."""
    found = Timed(order)
    for m, some in schedules.items():
        times = {schedule: time(Problem(spec, m), schedule, replays) for schedule in some}
        schedule = min(times, key=times.__getitem__, default=None)
        if schedule is not None and math.isfinite(times[schedule]):
            found.schedules[m], found.times[m] = schedule, times[schedule]
    return found


def with_neighbours(spec: MatmulSpec, target: Target, timed: Timed) -> Schedules:
    """Returns the schedules of an order, for few tokens with those of it that are one choice away."""
    found: dict[int, list[KernelSchedule]] = {}
    for m, s in timed.schedules.items():
        family = family_of(s)
        near = [] if family.takes_any_tokens else family.neighbours(spec, _tile(spec, s, m, target), target, s)
        found[m] = [s, *(other for other in near if family.sum_order(spec, other) == timed.order)]
    return found


def choose(timed: Sequence[Timed]) -> Timed:
    """Returns the order to take: of those with which few tokens take hardly longer than with the best, the one that
    takes the least for few and many."""
    least = min(each.few() for each in timed)
    return min((each for each in timed if each.few() <= SLACK * least), key=Timed.all)


class _Kernels:
    """The kernels of a matmul: compiled many at a time, and timed on this machine's GPU."""

    def __init__(self, spec: MatmulSpec, compilers: Compilers, stand: Stand, log: Callable[[str], None]) -> None:
        self._spec, self._compilers, self._stand, self._log = spec, compilers, stand, log
        self._jobs: dict[tuple[int, KernelSchedule], Future[str]] = {}

    def begin(self, every: Iterable[Schedules]) -> None:
        """Starts to compile."""
        for m, schedule in {(m, s): None for of_m in every for m, some in of_m.items() for s in some}:
            if (m, schedule) not in self._jobs:
                self._jobs[m, schedule] = self._compilers.submit(Problem(self._spec, m), schedule)

    def time(self, problem: Problem, schedule: KernelSchedule, replays: int) -> float:
        """Microseconds; inf where a kernel could not be compiled."""
        try:
            self._jobs[problem.token_tile, schedule].result()
        except Failed as error:
            self._log(f"not compiled: {error}")
            return math.inf
        return self._stand.time(problem, schedule, replays)


def measure(
    specs: Iterable[MatmulSpec], target: Target, orders: int, each: int, log: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Times the orders of some matmuls on this machine's GPU; a record of each."""
    from lowbit.pylib.tune.gpu import Stand

    records: list[dict[str, Any]] = []
    with Compilers(target) as compilers:
        stand = Stand(target)
        for spec in specs:
            kernels, found = _Kernels(spec, compilers, stand, log), options(spec, target, orders, each)
            kernels.begin(found.values())
            near = {each.order: with_neighbours(spec, target, each) for each in best_orders(spec, found, kernels.time)}
            kernels.begin(near.values())
            refined = [_timed(spec, order, of_m, kernels.time, COARSE_REPLAYS) for order, of_m in near.items()]
            final = [
                _timed(spec, coarse.order, {m: [s] for m, s in coarse.schedules.items()}, kernels.time, FINE_REPLAYS)
                for coarse in refined
            ]
            best = choose(final)
            record = written(spec, final, best, usual_times(spec))
            differences = differing_bits(spec, best, target)
            record["equal"] = not differences
            for difference in differences:
                log(f"{spec}: {difference}")
            records.append(record)
            log(table([record]))
    return records


def usual_times(spec: MatmulSpec) -> dict[int, float]:
    """Returns microseconds for each number of tokens of what is chosen without `invariant`."""
    from lowbit.pylib.tune import timing, trial
    from lowbit.pylib.tune.gpu import time_of

    plain = replace(spec, invariant=False)
    mm, data = lowbit.compile(plain), trial.sample(plain, ALL[-1], "cuda", 127, dequantized=True)
    copies = timing.copies(data.weight)
    calls = {m: [partial(mm, data.x[:m].contiguous(), w) for w in copies] for m in ALL}
    for of_m in calls.values():
        for call in of_m:
            call()
    return {m: time_of(of_m, m, FINE_REPLAYS) for m, of_m in calls.items()}


def differing_bits(spec: MatmulSpec, timed: Timed, target: Target) -> list[str]:
    """Returns where the kernels of an order give rows other bits, in f32, than that for the most tokens; all of them
    are launched twice."""
    import torch

    from lowbit.pylib.runtime.driver import current_stream
    from lowbit.pylib.runtime.gpu import load_matmul
    from lowbit.pylib.tune import timing

    spec = replace(spec, out="f32")
    weight, x = timing.random_weight(spec), torch.randn(ALL[-1], spec.k, device="cuda").half()
    torch.cuda.synchronize()  # kernels read weights ahead of their turn in the stream
    pointers, found, most = list(map(torch.Tensor.data_ptr, weight.tensors)), list[str](), list[torch.Tensor]()
    for m, schedule in sorted(timed.schedules.items(), reverse=True):
        function = load_matmul(Problem(spec, m).kernel(schedule, target), spec, target, torch.cuda.current_device())
        for _ in range(2):
            y = torch.full((m, spec.outputs), torch.nan, device="cuda")
            function(current_stream(0), True, x.data_ptr(), y.data_ptr(), m, *pointers)
            torch.cuda.synchronize()
            most = most or [y]
            other = y != most[0][:m]
            if count := int(other.sum()):
                rows, columns = (other.any(dim).nonzero().flatten()[:8].tolist() for dim in (1, 0))
                found.append(f"m={m}, {schedule}: {count} of {y.numel()}, rows {rows}, columns {columns}")
    return found


# -- what was measured


def written(spec: MatmulSpec, timed: Sequence[Timed], best: Timed, usual: Mapping[int, float]) -> dict[str, Any]:
    """Returns a record of a matmul, in terms of JSON."""
    orders = [
        {name: getattr(each.order, name) for name in CUT}
        | {"us": {str(m): each.time(m) for m in ALL}, "best": each is best}
        | {"schedules": {str(m): schedule_to_dict(s) for m, s in each.schedules.items()}}
        for each in timed
    ]
    return {"spec": spec.to_dict(), "usual_us": {str(m): usual[m] for m in ALL}, "orders": orders}


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns microseconds, and times as long as the usual choice."""
    rows = [["n x k", " x ".join(CUT), *map(str, ALL), "1 to 64"]]
    for record in records:
        usual = {m: record["usual_us"][str(m)] for m in ALL}
        size = f"{record['spec']['n']} x {record['spec']['k']}"
        rows.append([size, "usual", *(f"{usual[m]:.1f}" for m in ALL), ""])
        for order in record["orders"]:
            times = {m: order["us"][str(m)] for m in ALL}
            cells = [f"{times[m]:.1f} ({times[m] / usual[m]:.2f})" for m in ALL]
            name = " x ".join(str(order[part]) for part in CUT) + (" *" if order["best"] else "")
            rows.append([size, name, *cells, f"{geometric_mean(times[m] / usual[m] for m in TOKENS):.3f}"])
    return aligned(rows)


def write_tables(records: Sequence[Mapping[str, Any]], target: Target, schedules: Path) -> str:
    """Adds the best orders to the table of an architecture, and their schedules to the table of a GPU at `schedules`;
    returns what was written."""
    orders, kept = dict(known_orders(target.arch)), read_table(schedules)
    for record in records:
        spec = replace(MatmulSpec.from_dict(record["spec"]), invariant=True)
        best = next(order for order in record["orders"] if order["best"])
        orders[Key.of(spec, 1).spec] = SumOrder(*(best[name] for name in CUT))
        for m, given in best["schedules"].items():
            schedule = schedule_from_dict(given)
            problem = Problem(spec, _tile(spec, schedule, int(m), target))
            kernel = kernel_id(problem.kernel(schedule, target).ptx)
            entry = Entry(problem.key, schedule, best["us"][m], str(date.today()), lowbit.__version__, kernel)
            kept = kept.replaced(entry)
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{target.arch}.json"
    path.write_text(to_text(orders), encoding="utf-8")
    schedules.write_text(kept.to_text(), encoding="utf-8")
    return f"{len(records)} orders in {path}, their schedules in {schedules}"


def _tile(spec: MatmulSpec, schedule: KernelSchedule, m: int, target: Target) -> int:
    """Returns the token tile by which a table knows a schedule for m tokens."""
    family = family_of(schedule)
    return m if family.takes_any_tokens else next(t for t in family.token_tiles(spec, target) if t >= m)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file."""
    return json.loads(path.read_text(encoding="utf-8"))
