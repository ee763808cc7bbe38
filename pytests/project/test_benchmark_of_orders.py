"""`benchmarks orders` without a GPU: what is timed, what is chosen, and what is written to the tables."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks import orders
from benchmarks.orders import ALL, CUT, Options, Timed, best_orders, choose, options, table, write_tables, written
from lowbit import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.registry import family_of
from lowbit.passes.scheduling import order_tables
from lowbit.passes.scheduling.order_choice import TOKENS
from lowbit.passes.scheduling.tables import Key, Table, read_table
from lowbit.passes.targets import parse_target
from lowbit.pylib.tune.problem import Problem

HOPPER = parse_target("sm_90a")
SPEC = MatmulSpec(512, 1024, "u4", 128, invariant=True)


@cache
def found() -> Options:
    return options(SPEC, HOPPER, 3, 2)


def predicted(problem: Problem, schedule: KernelSchedule, replays: int) -> float:
    del replays
    return family_of(schedule).predict(problem.spec, problem.token_tile, schedule, HOPPER)


def test_all_schedules_have_the_order_for_which_they_are_timed() -> None:
    assert len(found()) == 3
    for order, of_m in found().items():
        assert list(of_m) == list(ALL) and all(of_m[m] for m in TOKENS)
        for schedules in of_m.values():
            assert all(family_of(s).sum_order(SPEC, s) == order for s in schedules)


def test_what_was_measured_decides_and_not_what_was_predicted() -> None:
    slow = choose(best_orders(SPEC, found(), predicted)).order

    def time(problem: Problem, schedule: KernelSchedule, replays: int) -> float:
        much = family_of(schedule).sum_order(SPEC, schedule) == slow
        return predicted(problem, schedule, replays) * (10 if much else 1)

    assert choose(best_orders(SPEC, found(), time)).order != slow


def test_an_order_that_lacks_a_kernel_for_few_tokens_is_left_out() -> None:
    (first, of_m), *_ = found().items()

    def time(problem: Problem, schedule: KernelSchedule, replays: int) -> float:
        fails = problem.token_tile == 16 and schedule in of_m[16]
        return math.inf if fails else predicted(problem, schedule, replays)

    assert all(each.order != first for each in best_orders(SPEC, found(), time))


def test_prompts_without_a_kernel_take_launches_of_64() -> None:
    timed = Timed(next(iter(found())), times=dict.fromkeys(TOKENS, 2.0))
    assert timed.time(512) == 16.0 and timed.time(4) == 2.0
    timed.times[512] = 10.0
    assert timed.time(512) == 10.0


def test_of_orders_that_are_as_fast_for_few_tokens_prompts_decide() -> None:
    first, second, third = found()
    few = Timed(first, times=dict.fromkeys(ALL, 1.0) | {512: 9.0, 4096: 9.0})
    both = Timed(second, times=dict.fromkeys(ALL, 1.04))
    many = Timed(third, times=dict.fromkeys(ALL, 1.2) | {512: 0.1, 4096: 0.1})
    assert choose([few, both, many]) is both


def test_the_best_order_is_written_and_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timed = best_orders(SPEC, found(), predicted)
    best = choose(timed)
    record = json.loads(json.dumps(written(SPEC, timed, best, dict.fromkeys(ALL, 2.0))))
    monkeypatch.setattr(orders, "FOLDER", tmp_path)
    monkeypatch.setattr(order_tables, "FOLDER", tmp_path)
    order_tables.known_orders.cache_clear()
    schedules = tmp_path / "gpu.json"
    schedules.write_text(Table("NVIDIA H200", 90, "by a test", {}).to_text())
    try:
        assert "1 orders" in write_tables([record], HOPPER, schedules)
        order_tables.known_orders.cache_clear()
        assert order_tables.measured_order(SPEC, HOPPER) == best.order
        assert order_tables.measured_order(replace(SPEC, k=2048), HOPPER) is None
    finally:
        order_tables.known_orders.cache_clear()
    entries = read_table(schedules).entries
    assert [entries[Key.of(SPEC, tile)].schedule for tile in (1, 8)] == [best.schedules[m] for m in (1, 4)]
    text = table([record])
    assert " x ".join(str(getattr(best.order, name)) for name in CUT) + " *" in text and "usual" in text
