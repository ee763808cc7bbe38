"""The tuner, with a clock of its own: what it times, what it takes, how it goes on, and what it writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from made_up_gpu import COUNT, HOPPER, WORK, Bench, known_candidates

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.streaming import cost_model
from lowbit.passes.scheduling.choice import default_schedule
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.pylib.tune import search_space, session
from lowbit.pylib.tune.log import Log
from lowbit.pylib.tune.problem import Problem
from lowbit.pylib.tune.processes import kernel_id
from lowbit.pylib.tune.session import FINALISTS, LONG, SHORT
from lowbit.pylib.tune.work import with_kernels

FIRST = 20


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(session, "candidates", known_candidates)
    return Bench(tmp_path / "log.jsonl")


def first_pass(problem: Problem) -> list[Schedule]:
    return known_candidates(problem.spec, problem.token_tile, HOPPER, FIRST)


def fastest(problem: Problem, schedules: Sequence[Schedule]) -> list[Schedule]:
    return sorted(schedules, key=lambda s: Bench.truth(problem, s))


def test_two_passes_then_the_best_at_length(bench: Bench) -> None:
    found = bench.run()
    assert [e.key for e in found] == [p.key for p in WORK]
    for p, entry in zip(WORK, found):
        short, long = bench.measured(p, SHORT), bench.measured(p, LONG)
        assert short[:FIRST] == first_pass(p) and len(short) == len(set(short)) == COUNT
        parents = fastest(p, short[:FIRST])[:3]
        near = [s for parent in parents for s in search_space.neighbours(p.spec, p.token_tile, HOPPER, parent)]
        assert short[FIRST:] == [s for s in dict.fromkeys(near) if s not in short[:FIRST]][: COUNT - FIRST]
        assert long == fastest(p, short)[:FINALISTS] and entry.schedule == long[0]
        assert entry.microseconds == Bench.truth(p, long[0]) and entry.kernel == kernel_id(f"{p} {long[0]}")
    rule = [Bench.truth(p, default_schedule(p.spec, p.token_tile, HOPPER)) for p in WORK]
    assert bench.finished == [(p, e, first, COUNT) for p, e, first in zip(WORK, found, rule)]


def test_neighbours_are_compiled_while_the_next_matmul_is_timed(bench: Bench) -> None:
    bench.run()
    order = [(p, replays) for p, _, replays in bench.timed]
    assert order.index((WORK[1], SHORT)) < order.index((WORK[0], LONG)) < order.index((WORK[2], SHORT))
    first = [p for p, _ in bench.submitted]
    assert first[:FIRST] == [WORK[0]] * FIRST and first[FIRST : 2 * FIRST] == [WORK[1]] * FIRST
    assert first[2 * FIRST : COUNT + FIRST] == [WORK[0]] * (COUNT - FIRST)


def test_a_session_goes_on_where_it_stopped(bench: Bench) -> None:
    expected = Bench(bench.path.with_name("other.jsonl")).run()
    bench.dies_after = FIRST + 7
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    with bench.path.open("a") as file:
        file.write('{"gpu": "NVIDIA H2')  # killed while it wrote
    bench.dies_after = math.inf
    assert bench.run() == expected
    assert len(bench.timed) == len(WORK) * (COUNT + FINALISTS) - FIRST - 7
    assert bench.run() == expected and not bench.timed
    assert len(bench.submitted) == len(WORK)  # for the winners' kernels


def test_little_time_means_fewer_candidates_each(bench: Bench) -> None:
    long = COUNT + FINALISTS  # seconds that a matmul takes
    found = bench.run(seconds=len(WORK) * long / 2)
    assert [e.key for e in found] == [p.key for p in WORK]
    for p in WORK:
        assert 3 <= len(bench.measured(p, SHORT)) < COUNT and bench.measured(p, SHORT)[0] == first_pass(p)[0]
    assert bench.clock < len(WORK) * long


def test_no_time_left(bench: Bench) -> None:
    """What was begun is finished, the most important first; compilations for the rest are given up."""
    found = bench.run(seconds=FIRST / 3)
    assert [e.key for e in found] == [p.key for p in WORK[: len(found)]] and 1 <= len(found) < len(WORK)


def test_measurements_of_other_sources_or_gpus_do_not_count(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry, *_) = bench.run()
    key, schedule = entry.key, entry.schedule
    assert Log(bench.path, "NVIDIA H200").get(key, schedule, "long") == entry.microseconds
    assert Log(bench.path, "NVIDIA H100").get(key, schedule, "long") is None
    monkeypatch.setattr("lowbit.pylib.build.cache.source_fingerprint", lambda: "0" * 64)
    assert Log(bench.path, "NVIDIA H200").get(key, schedule, "long") is None


@pytest.mark.parametrize(
    "damage",
    [b"{", b"\xff", b"[]", b"3", b"[" * 100000, b'"what"->"that"', b'"num_stages"->"depth"', b'"n": 4->"m": 4'],
    ids=lambda damage: repr(damage)[:20],
)
def test_a_damaged_line_of_the_log_is_named(bench: Bench, damage: bytes) -> None:
    bench.run(WORK[:1])
    first, second, *others = bench.path.read_bytes().splitlines(keepends=True)
    old, arrow, new = damage.partition(b"->")
    damaged = second.replace(old, new) if arrow else damage + b"\n"
    assert damaged != second
    bench.path.write_bytes(b"".join([first, damaged, *others]))
    with pytest.raises(SpecError, match=r"log\.jsonl, line 2, is no measurement \(.*\); delete the line, .* --log"):
        Log(bench.path, "NVIDIA H200")
    bench.path.write_bytes(b"".join([first, *others]))
    assert Log(bench.path, "NVIDIA H200")


def test_a_value_of_the_log_is_a_number(bench: Bench) -> None:
    (entry, *_) = bench.run(WORK[:1])
    Log(bench.path, "NVIDIA H200").add(entry.key, entry.schedule, "long", 1.5)
    bench.path.write_text(bench.path.read_text().replace('"value": 1.5', '"value": "1.5"'))
    with pytest.raises(SpecError, match=r"value='1\.5' must be a number or null"):
        Log(bench.path, "NVIDIA H200")


def test_what_does_not_compile_or_run_or_gives_a_wrong_result_does_not_win(bench: Bench) -> None:
    work = WORK[:1]
    bench.run(work)
    first, second, third, fourth, *_ = fastest(WORK[0], bench.measured(WORK[0], SHORT)[:FIRST])
    bench.path.unlink()
    bench.unbuildable, bench.unrunnable, bench.wrong = (first,), (second,), (third,)
    for _ in range(2):  # from measurements, then from the log
        (found,) = bench.run(work)
        assert found.schedule not in (first, second, third)
        assert found.microseconds <= Bench.truth(WORK[0], fourth)
        assert first not in [s for _, s, _ in bench.timed]
    lines = bench.path.read_text()
    assert lines.count("too much shared memory") == lines.count("too many registers") == 1


def test_no_right_schedule_no_entry(bench: Bench) -> None:
    bench.run(WORK[:1])
    bench.wrong = tuple(bench.measured(WORK[0], SHORT))
    bench.path.unlink()
    assert [e.key for e in bench.run(WORK[:2])] == [WORK[1].key]
    bench.path.unlink()
    bench.unbuildable = tuple(first_pass(WORK[0]))
    assert bench.run(WORK[:1]) == [] and not bench.timed
    assert bench.finished == [(WORK[0], None, math.inf, FIRST)]


def test_a_compiler_thatcrashes_costs_one_candidate(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    guilty, *_ = first_pass(WORK[0])[2:]
    submit, crashes = bench.submit, 0

    def crashing(problem: Problem, schedule: Schedule) -> Future[str]:
        nonlocal crashes
        future = submit(problem, schedule)
        if (schedule != guilty and crashes < 1) or schedule == guilty:
            crashes += schedule == guilty
            future = Future()
            future.set_exception(BrokenProcessPool())
        return future

    monkeypatch.setattr(bench, "submit", crashing)
    bench.run(WORK[:1])
    short = bench.measured(WORK[0], SHORT)
    assert guilty not in short and short[: FIRST - 1] == [s for s in first_pass(WORK[0]) if s != guilty]
    assert bench.path.read_text().count("the compiler crashed") == 1


@pytest.mark.parametrize("tile", [1, 8])
def test_candidates_are_planned_while_the_gpu_works(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the matmul with the most schedules, fewer are predicted than a core manages while sixty are measured."""
    predicted: list[KernelSchedule] = []
    predict = cost_model.predict

    def counted(spec: MatmulSpec, tokens: int, schedule: Any, target: Target) -> float:
        predicted.append(schedule)
        return predict(spec, tokens, schedule, target)

    monkeypatch.setattr(cost_model, "predict", counted)
    assert len(search_space.candidates(MatmulSpec(57344, 8192, "u4", 128), tile, HOPPER, 60)) == 60
    assert 60 < len(predicted) < 12_000


def test_a_session_leaves_out_tiles_that_have_no_kernels() -> None:
    plain, eight_bit = MatmulSpec(256, 1024, "u4", 128), MatmulSpec(256, 1024, "u4", 128, compute="i8")
    work = [Problem(spec, tile) for spec in (plain, eight_bit) for tile in (1, 8, 512)]
    for target in (parse_target("sm_80"), HOPPER):
        assert with_kernels(work, target) == [*work[:3], *work[4:]]
    with pytest.raises(SpecError, match="tokens=1 must be one of 8, 16"):
        with_kernels([Problem(eight_bit, 1)], HOPPER)
