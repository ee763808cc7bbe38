"""The tuner, with a clock of its own: what it times, what it takes, how it goes on, and what it writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dialect.errors import LowbitError, SpecError
from dialect.spec import MatmulSpec
from passes.plan import Plan
from passes.schedule import Schedule
from passes.schedule_choice import check_schedule, default_schedule, schedule_for
from passes.schedule_tables import Entry, Key, Table, parse_table, read_table, shipped_tables
from passes.target import parse_target
from pylib import models, schedules, search_space, tuner
from pylib.artifact import Artifacts
from pylib.cli import app
from pylib.tuner import LONG, SHORT, Log, Problem, Tuner

HOPPER = parse_target("sm_90a")
SPEC = MatmulSpec(n=4096, k=4096, weight="u4", group_size=128)
WORK = [Problem(SPEC, 1), Problem(SPEC, 16)]
KEEP = 12


@dataclass
class Bench:
    """Everything a tuner needs, made up: the time of a schedule is a number that no order of the candidates has."""

    path: Path
    unbuildable: tuple[Schedule, ...] = ()
    wrong: tuple[Schedule, ...] = ()
    dies_after: float = math.inf
    timed: list[tuple[Problem, Schedule, int]] = field(default_factory=list)
    submitted: list[Schedule] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    totals: tuple[int, int] = (0, 0)

    @staticmethod
    def truth(problem: Problem, s: Schedule) -> float:
        return 1 + sum(map(ord, f"{s}{problem.tile}")) * 7919 % 1000

    def time(self, problem: Problem, schedule: Schedule, replays: int) -> float:
        if len(self.timed) >= self.dies_after:
            raise KeyboardInterrupt
        self.timed.append((problem, schedule, replays))
        return self.truth(problem, schedule)

    def check(self, problem: Problem, schedule: Schedule) -> bool:
        return schedule not in self.wrong

    def submit(self, spec: MatmulSpec, schedule: Schedule) -> Future[str]:
        self.submitted.append(schedule)
        future: Future[str] = Future()
        future.set_result("too many registers" if schedule in self.unbuildable else "")
        return future

    def start(self, compilations: int, timings: int) -> None:
        self.totals = compilations, timings

    def compiled(self) -> None:
        self.events.append("compiled")

    def timed_one(self) -> None:
        self.events.append("timed")

    def finished(self, problem: Problem, entry: Entry | None) -> None:
        self.events.append("finished" if entry else "failed")

    def run(self, work: Sequence[Problem] = WORK) -> list[Entry]:
        self.timed.clear()
        self.submitted.clear()
        self.events.clear()
        log = Log(self.path, "NVIDIA H200")
        search = Tuner(HOPPER, "0.1.0", log, self.time, self.check, self.submit, _Progress(self), KEEP)
        return list(search.run(work))


class _Progress:
    def __init__(self, bench: Bench) -> None:
        self.start, self.compiled, self.finished = bench.start, bench.compiled, bench.finished
        self.timed = bench.timed_one


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "log.jsonl")


def by_time(problem: Problem) -> list[Schedule]:
    each = search_space.candidates(problem.spec, problem.tile, HOPPER, KEEP)
    return sorted(each, key=lambda s: Bench.truth(problem, s))


def test_the_fastest_wins_and_only_the_best_third_is_timed_at_length(bench: Bench) -> None:
    found = bench.run()
    assert [(e.key, e.schedule) for e in found] == [(p.key, by_time(p)[0]) for p in WORK]
    assert [e.microseconds for e in found] == [Bench.truth(p, by_time(p)[0]) for p in WORK]
    for p in WORK:
        short = [s for q, s, replays in bench.timed if q == p and replays == SHORT]
        long = [s for q, s, replays in bench.timed if q == p and replays == LONG]
        assert sorted(short, key=str) == sorted(by_time(p), key=str) and long == by_time(p)[: KEEP // 3]
    assert bench.totals == (2 * KEEP, 2 * (KEEP + KEEP // 3))
    assert [bench.events.count(e) for e in ("compiled", "timed", "finished")] == [*bench.totals, 2]


def test_a_session_goes_on_where_it_stopped(bench: Bench) -> None:
    expected = Bench(bench.path.with_name("other.jsonl")).run()
    bench.dies_after = KEEP + 7
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    with bench.path.open("a") as file:
        file.write('{"gpu": "NVIDIA H2')  # killed while it wrote
    bench.dies_after = math.inf
    assert bench.run() == expected
    assert len(bench.timed) == 2 * (KEEP + KEEP // 3) - KEEP - 7
    assert bench.events.count("timed") == bench.totals[1] and len(bench.submitted) == bench.totals[0] < 2 * KEEP
    assert bench.run() == expected and not bench.timed and not bench.submitted


def test_measurements_of_other_sources_or_gpus_do_not_count(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.run()
    key, schedule = WORK[0].key, by_time(WORK[0])[0]
    assert Log(bench.path, "NVIDIA H200").get(key, schedule, "long") == Bench.truth(WORK[0], schedule)
    assert Log(bench.path, "NVIDIA H100").get(key, schedule, "long") is None
    monkeypatch.setattr("pylib.cache.source_fingerprint", lambda: "0" * 64)
    assert Log(bench.path, "NVIDIA H200").get(key, schedule, "long") is None


def test_what_does_not_compile_or_gives_a_wrong_result_does_not_win(bench: Bench) -> None:
    first, second, third, *_ = by_time(WORK[0])
    bench.unbuildable, bench.wrong = (first,), (second,)
    for _ in range(2):  # from measurements, then from the log
        (found,) = bench.run(WORK[:1])
        assert found.schedule == third
        assert first not in [s for _, s, _ in bench.timed]


def test_no_right_schedule_no_entry(bench: Bench) -> None:
    bench.wrong = tuple(by_time(WORK[0]))
    assert [e.key for e in bench.run()] == [WORK[1].key]
    assert bench.events[-2:].count("failed") <= 1 and "failed" in bench.events
    bench.path.unlink()
    bench.unbuildable = tuple(by_time(WORK[0]))
    assert bench.run(WORK[:1]) == [] and not bench.timed


def test_a_process_that_dies_is_an_error_with_a_fix(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(spec: MatmulSpec, schedule: Schedule) -> Future[str]:
        future: Future[str] = Future()
        future.set_exception(BrokenProcessPool())
        return future

    monkeypatch.setattr(bench, "submit", submit)
    with pytest.raises(LowbitError, match="fewer --jobs"):
        bench.run()


@pytest.mark.parametrize("tile", [1, 8, 64])
@pytest.mark.parametrize("weight", ["u4", "u3", "f8e4m3"])
@pytest.mark.parametrize("n", [256, 8192])
def test_candidates(weight: str, tile: int, n: int) -> None:
    spec = replace(SPEC, weight=weight, n=n, k=8192)
    found = search_space.candidates(spec, tile, HOPPER, 30)
    assert found[0] == default_schedule(spec, tile, HOPPER) and schedule_for(spec, tile, HOPPER) in found
    every = search_space.candidates(spec, tile, HOPPER, 10**6)
    assert len(every) == len(set(every)) and found == every[:30]
    assert len(every) > (30 if tile < 64 else 10)
    for s in every:
        check_schedule(spec, s, HOPPER)
        assert s.tokens in (tile, max(8, tile)) and Plan(spec, s).rounds >= 2
    times = [search_space.predict(spec, tile, s, HOPPER) for s in every[2:]]
    assert times == sorted(times) and 0.1 < times[0] < times[-1]


def test_candidates_of_a_small_matmul() -> None:
    """Even where no schedule has two rounds, or the target has little shared memory."""
    for spec in (MatmulSpec(16, 16, "u1"), MatmulSpec(1, 64, "u8", group_size=16), replace(SPEC, weight="u7")):
        assert search_space.candidates(spec, 64, parse_target("sm_86"))


def test_the_prediction_knows_what_was_the_fastest() -> None:
    """Of the matmuls in the shipped table: it is mostly in the better half."""
    better: list[bool] = []
    for key, entry in shipped_tables()[0].entries.items():
        spec = MatmulSpec(key.n, key.k, key.weight, key.group_size)
        space = search_space.all_schedules(spec, key.tokens, HOPPER)
        times = [search_space.predict(spec, key.tokens, s, HOPPER) for s in space]
        better.append(search_space.predict(spec, key.tokens, entry.schedule, HOPPER) < sorted(times)[len(times) // 2])
    assert sum(better) >= 0.8 * len(better)


def test_problems() -> None:
    found = tuner.problems([(64, 192), (64, 256)], ["u4", "f4e2m1"], [128, None], [1, 8], ["bf16"], ["none", "int"])
    specs = list(dict.fromkeys(p.spec for p in found))
    assert {(s.k, s.weight, s.group_size, s.zeros) for s in specs} == {
        (192, "u4", None, "none"), (192, "u4", None, "int"), (192, "f4e2m1", None, "none"),
        (256, "u4", None, "none"), (256, "u4", None, "int"), (256, "f4e2m1", None, "none"),
        (256, "u4", 128, "none"), (256, "u4", 128, "int"), (256, "f4e2m1", 128, "none"),
    }  # fmt: skip
    assert [p.tile for p in found] == [1, 8] * len(specs) and {s.scale for s in specs} == {"bf16"}
    assert found[0].spec is found[1].spec  # the weights stay on the GPU
    with pytest.raises(SpecError, match="group_size=96 must divide k=256"):
        tuner.problems([(64, 256)], ["u4"], [96], [1])
    with pytest.raises(SpecError, match="tokens=2 must be one of 1, 8"):
        tuner.problems([(64, 256)], ["u4"], [128], [2])


def test_shapes() -> None:
    assert models.shapes(["llama-3.1-8B"]) == [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    assert models.shapes(["Gemma-2-9B/o", "64x256", "64x256"]) == [(3584, 4096), (64, 256)]
    for name in ("gpt", "64x", "Gemma-2-9B/x"):
        with pytest.raises(SpecError, match=f"shape '{name}'"):
            models.shapes([name])


def test_no_pool_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_NO_CACHE", "1")
    with pytest.raises(SpecError, match="unset LOWBIT_NO_CACHE"), tuner.compile_pool(HOPPER):
        pass


def lowbit(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = lowbit("tune", "64x256")
    assert result.exit_code == 1 and "needs an NVIDIA GPU" in result.stderr and "--merge" in result.stderr


def test_the_command_from_start_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With real compilations in a process of their own; the matmul that was tuned then gets the schedule."""
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuner, "this_gpu", lambda: ("NVIDIA H200", HOPPER))
    clock = Bench(tmp_path / "none")
    monkeypatch.setattr(tuner, "GraphTimer", lambda target: clock.time)
    monkeypatch.setattr(tuner, "check_on_gpu", clock.check)
    options = ("64x1024", "-w", "u4", "-m", "1", "--group-sizes", "row", "--keep", 3, "--jobs", 1)
    result = lowbit("tune", *options)
    assert result.exit_code == 0, result.output
    assert "u4[64, 1024] f16 scale per row: f16 -> f16, m = 1: " in result.stderr and "1 schedules" in result.stderr
    assert len(list(tmp_path.glob("??/*.kernel"))) == 3

    found = read_table(schedules.user_file("NVIDIA H200"))
    spec = MatmulSpec(64, 1024, "u4")
    best = min((s for _, s, _ in clock.timed), key=lambda s: Bench.truth(Problem(spec, 1), s))
    assert [(e.key, e.schedule) for e in found.entries.values()] == [(Key.of(spec, 1), best)]
    assert Artifacts(spec, HOPPER, None).kernel(1).schedule == best
    assert len(list(tmp_path.glob("??/*.kernel"))) == 3  # it was there already

    before = len(clock.timed)
    assert lowbit("tune", *options).exit_code == 0 and len(clock.timed) == before


def test_merge_on_the_command_line(tmp_path: Path) -> None:
    def known(n: int, microseconds: float) -> Table:
        entry = Entry(Key.of(replace(SPEC, n=n), 1), Schedule(tokens=1), microseconds, "2026-11-21", "0.1.0")
        return Table("NVIDIA L40S", 89, "by hand", {}).with_entries([entry])

    a, b, c = (tmp_path / f"{name}.json" for name in "abc")
    a.write_text(known(64, 2.0).to_text())
    b.write_text(known(32, 3.0).to_text())
    result = lowbit("tune", "--merge", a, b, "-o", c)
    assert result.exit_code == 0 and "2 schedules for NVIDIA L40S" in result.stderr
    assert (
        parse_table(c.read_text(), "c").entries.keys() == known(64, 2.0).entries.keys() | known(32, 3.0).entries.keys()
    )
    b.write_text("nothing")
    assert "b.json is no table of schedules" in lowbit("tune", "--merge", a, b, "-o", c).stderr
