"""The tuner, with a clock of its own: what it times, what it takes, how it goes on, and what it writes."""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import crash, serve
from typer.testing import CliRunner

from lowbit.dialect.errors import LowbitError, SpecError, TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.decode import cost_model
from lowbit.passes.kernels.decode import search_space as decode_space
from lowbit.passes.kernels.decode.candidates import streaming_schedules
from lowbit.passes.kernels.decode.cost_model import predict
from lowbit.passes.kernels.decode.legality import check_schedule, enough_blocks, has_wgmma, shared_room
from lowbit.passes.kernels.decode.plan import KernelPlan
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.prefill.schedule import PrefillSchedule
from lowbit.passes.kernels.registry import FAMILIES
from lowbit.passes.scheduling.choice import default_schedule, schedule_for
from lowbit.passes.scheduling.tables import Entry, Key, Table, parse_table, read_table, shipped_tables
from lowbit.passes.target import Target, parse_target
from lowbit.pylib.build import user_tables as schedules
from lowbit.pylib.build.kernels import Artifacts
from lowbit.pylib.cli.main import app
from lowbit.pylib.tune import check as tune_check
from lowbit.pylib.tune import models, search_space
from lowbit.pylib.tune import processes as tune_processes
from lowbit.pylib.tune import session as tuner
from lowbit.pylib.tune.problem import Problem
from lowbit.pylib.tune.processes import Compilers, Failed, GpuProcess, kernel_id
from lowbit.pylib.tune.session import FINALISTS, LONG, SHORT, Log, Tuner

HOPPER = parse_target("sm_90a")
SPEC = MatmulSpec(n=4096, k=4096, weight="u4", group_size=128)
WORK = [Problem(SPEC, 1), Problem(SPEC, 16), Problem(replace(SPEC, n=8192), 1)]
COUNT = 30  # candidates
FIRST = 20


@dataclass
class Bench:
    """Everything a tuner needs, made up: the time of a schedule is a number that no order of the candidates has, and
    measuring takes a second."""

    path: Path
    unbuildable: tuple[Schedule, ...] = ()
    unrunnable: tuple[Schedule, ...] = ()
    wrong: tuple[Schedule, ...] = ()
    dies_after: float = math.inf
    clock: float = 0.0
    timed: list[tuple[Problem, Schedule, int]] = field(default_factory=list)
    submitted: list[tuple[Problem, Schedule]] = field(default_factory=list)
    finished: list[tuple[Problem, Entry | None, float, int]] = field(default_factory=list)

    @staticmethod
    def truth(problem: Problem, s: Schedule) -> float:
        return 1 + sum(map(ord, f"{s}{problem.tile}")) * 7919 % 1000

    def time(self, problem: Problem, schedule: Schedule, replays: int) -> float:
        if len(self.timed) >= self.dies_after:
            raise KeyboardInterrupt
        self.clock += 1
        self.timed.append((problem, schedule, replays))
        if schedule in self.unrunnable:
            raise Failed("too many registers")
        return self.truth(problem, schedule)

    def check(self, problem: Problem, schedule: Schedule) -> bool:
        return schedule not in self.wrong

    def submit(self, problem: Problem, schedule: Schedule) -> Future[str]:
        self.submitted.append((problem, schedule))
        future: Future[str] = Future()
        if schedule in self.unbuildable:
            future.set_exception(Failed("too much shared memory"))
        else:
            future.set_result(kernel_id(f"{problem} {schedule}"))
        return future

    def run(self, work: Sequence[Problem] = WORK, seconds: float = math.inf) -> list[Entry]:
        for each in (self.timed, self.submitted, self.finished):
            each.clear()
        log = Log(self.path, "NVIDIA H200")
        now = {"now": lambda: self.clock}
        search = Tuner(HOPPER, "0.1.0+1", log, self, self.submit, _Progress(self), COUNT, seconds, **now)
        return list(search.run(work))

    def measured(self, problem: Problem, replays: int) -> list[Schedule]:
        return [s for p, s, count in self.timed if p == problem and count == replays]


class _Progress:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def start(self, problems: int) -> None:
        assert problems > 0

    def timed(self, problem: Problem, count: int) -> None:
        assert count <= COUNT

    def finished(self, *what: Any) -> None:
        self._bench.finished.append(what)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "log.jsonl")


def first_pass(problem: Problem) -> list[Schedule]:
    return search_space.candidates(problem.spec, problem.tile, HOPPER, FIRST)


def fastest(problem: Problem, schedules: Sequence[Schedule]) -> list[Schedule]:
    return sorted(schedules, key=lambda s: Bench.truth(problem, s))


def test_two_passes_then_the_best_at_length(bench: Bench) -> None:
    found = bench.run()
    assert [e.key for e in found] == [p.key for p in WORK]
    for p, entry in zip(WORK, found):
        short, long = bench.measured(p, SHORT), bench.measured(p, LONG)
        assert short[:FIRST] == first_pass(p) and len(short) == len(set(short)) == COUNT
        parents = fastest(p, short[:FIRST])[:3]
        near = [s for parent in parents for s in search_space.neighbours(p.spec, p.tile, HOPPER, parent)]
        assert short[FIRST:] == [s for s in dict.fromkeys(near) if s not in short[:FIRST]][: COUNT - FIRST]
        assert long == fastest(p, short)[:FINALISTS] and entry.schedule == long[0]
        assert entry.microseconds == Bench.truth(p, long[0]) and entry.kernel == kernel_id(f"{p} {long[0]}")
    rule = [Bench.truth(p, default_schedule(p.spec, p.tile, HOPPER)) for p in WORK]
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


@pytest.mark.parametrize("tile", [1, 8, 64])
@pytest.mark.parametrize("weight", ["u4", "u3", "f8e4m3"])
@pytest.mark.parametrize("n", [256, 8192])
def test_candidates(weight: str, tile: int, n: int) -> None:
    spec = replace(SPEC, weight=weight, n=n, k=8192)
    found = search_space.candidates(spec, tile, HOPPER, 30)
    assert found[0] == default_schedule(spec, tile, HOPPER) and schedule_for(spec, tile, HOPPER) in found
    every = search_space.candidates(spec, tile, HOPPER, 10**6)
    assert len(every) == len(set(every)) and found == every[:30]
    assert len(every) > (20 if tile < 64 else 10)
    same_size_entries = search_space.same_size_entries(spec, tile, HOPPER)
    given = {default_schedule(spec, tile, HOPPER), schedule_for(spec, tile, HOPPER), *same_size_entries}
    for s in every:
        check_schedule(spec, s, HOPPER)
        if s not in given:
            assert s.tokens in (tile, max(8, tile)) and (KernelPlan(spec, s).rounds >= 2 or s.preload_weights)
    chosen = len(given)
    shapes = {_shape(s) for s in every}
    assert {_shape(s) for s in every[: chosen + len(shapes)]} == shapes  # each, before any comes twice
    times = [predict(spec, tile, s, HOPPER) for s in every]
    assert 0.1 < min(times[: chosen + 1]) == min(times) and max(times) < math.inf
    again = [i for i in range(chosen + 1, len(every)) if times[i] < times[i - 1]] or [len(every)]
    assert len(again) == 1  # in order, the best of each shape first, then the others
    once = [_shape(s) for s in every[chosen : again[0]]]
    assert len(once) == len(set(once))


def test_candidates_that_are_the_best_with_other_zeros() -> None:
    """They are timed however late their prediction would bring them."""
    plain = MatmulSpec(8192, 8192, "u4", group_size=128)
    zeros = replace(plain, zeros="int", group_size=64)
    best = schedule_for(plain, 1, HOPPER)
    assert best in search_space.same_size_entries(zeros, 1, HOPPER)
    assert best in search_space.candidates(zeros, 1, HOPPER, 1)
    same_size = search_space.same_size_entries(zeros, 1, HOPPER)
    known = {default_schedule(zeros, 1, HOPPER), schedule_for(zeros, 1, HOPPER), *same_size}
    assert set(search_space.candidates(zeros, 1, HOPPER, 1)) == known  # each once, and nothing beyond
    assert not search_space.same_size_entries(replace(zeros, n=8000), 1, HOPPER)


def test_candidates_of_a_small_matmul() -> None:
    """Even where no schedule has two rounds, or the target has little shared memory."""
    for spec in (MatmulSpec(16, 16, "u1"), MatmulSpec(1, 64, "u8", group_size=16), replace(SPEC, weight="u7")):
        assert search_space.candidates(spec, 64, parse_target("sm_86"), 30)


def test_the_prediction_knows_what_was_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of matmuls for one token in the shipped table: the times about, and the winner's shape among the first few."""
    monkeypatch.setattr(search_space, "schedule_for", default_schedule)  # as the latter has seen the table
    ranks: list[int] = []
    errors: list[float] = []
    known = [(key, entry) for key, entry in shipped_tables()[0].entries.items() if key.tokens == 1]
    for key, entry in known[:: -(-len(known) // 10)]:
        each = search_space.candidates(key.spec, key.tokens, HOPPER, 40)
        shapes = [_shape(s) for s in each]
        ranks.append(shapes.index(_shape(entry.schedule)) if _shape(entry.schedule) in shapes else len(shapes))
        predicted = predict(key.spec, key.tokens, entry.schedule, HOPPER)
        errors.append(abs(math.log(predicted / entry.microseconds)))
    assert len(ranks) >= 5 and sorted(errors)[len(errors) // 2] < 0.25
    for first, part in ((10, 0.5), (40, 0.8)):
        assert sum(rank < first for rank in ranks) >= part * len(ranks)


def _shape(s: Schedule) -> tuple[object, ...]:
    return type(s), *(getattr(s, name) for name in decode_space.SHAPE)


@pytest.mark.parametrize("tile", [1, 16])
def test_neighbours(tile: int) -> None:
    streaming = streaming_schedules(SPEC, tile, HOPPER, FAMILIES["decode"])
    around = min(streaming, key=lambda s: predict(SPEC, tile, s, HOPPER))
    found = search_space.neighbours(SPEC, tile, HOPPER, around)
    assert len(found) == len(set(found)) >= 5 and around not in found
    fields = decode_space.space(SPEC, tile, HOPPER)
    changed: set[str] = set()
    for s in found:
        check_schedule(SPEC, s, HOPPER)
        names = {name for name in fields if getattr(s, name) != getattr(around, name)}
        changed |= names
        if len(names) == 1 and names <= set(decode_space.SECOND):
            continue
        assert len(names - set(decode_space.SECOND)) == 1
        assert s.cluster == s.split_k and s.max_blocks_per_sm == (_enough(s) if s.wgmma else 0)
    assert changed >= {"row_blocks", "warps_k", "step_k", "num_stages"}
    assert "max_blocks_per_sm" in changed or shared_room(SPEC, around, HOPPER) == 1
    assert ("tokens" in changed) == (tile == 1)
    assert {"split_k", "cluster"} <= changed or tile == 1  # which has no work for more splits


def _enough(s: Schedule) -> int:
    return enough_blocks(KernelPlan(SPEC, s).tiles * s.split_k, HOPPER)


def test_the_second_pass_tries_splits_without_a_cluster() -> None:
    s = Schedule(16, 1, 4, 2, 64, 3, 2, 2)
    apart = replace(s, cluster=1)
    found = search_space.neighbours(SPEC, 16, HOPPER, s)
    assert [n for n in found if n.cluster != n.split_k] == [apart]
    found = search_space.neighbours(SPEC, 16, HOPPER, apart)
    assert [n for n in found if n.cluster > 1] == [s] and {n.split_k for n in found} == {1, 2, 4}


WARPGROUP = Schedule(16, 1, 4, 2, 64, 3, 2, 2, wgmma=True, max_blocks_per_sm=1)  # 128 blocks


@pytest.mark.parametrize("s", [WARPGROUP, replace(WARPGROUP, wgmma=False), replace(WARPGROUP, max_blocks_per_sm=0)])
def test_the_second_pass_varies_how_many_blocks_a_multiprocessor_takes(s: Schedule) -> None:
    assert shared_room(SPEC, s, HOPPER) > 2
    found = search_space.neighbours(SPEC, 16, HOPPER, s)
    assert {replace(s, max_blocks_per_sm=blocks) for blocks in {0, 1, 2} - {s.max_blocks_per_sm}} <= set(found)
    halved = [n for n in found if n.split_k == 1]  # in blocks
    split = [n for n in found if n.split_k == 4]
    follows = s == WARPGROUP  # the others are as somebody wanted them to be
    assert halved and {n.max_blocks_per_sm for n in halved} == {s.max_blocks_per_sm}
    assert split and {n.max_blocks_per_sm for n in split} == {2 if follows else s.max_blocks_per_sm}
    large = replace(s, num_stages=8, warps_k=4)  # leaves room for one, whatever its max_blocks
    assert shared_room(SPEC, large, HOPPER) == 1
    found = search_space.neighbours(SPEC, 16, HOPPER, large)
    assert found and not [n for n in found if replace(n, max_blocks_per_sm=large.max_blocks_per_sm) == large]


def test_the_first_pass_has_as_many_blocks_of_warpgroups_as_are_needed() -> None:
    spec = replace(SPEC, n=8192)
    found = decode_space.all_schedules(spec, 8, HOPPER, FAMILIES["decode"])
    assert not any(s.max_blocks_per_sm for s in found if not s.wgmma)
    assert {s.max_blocks_per_sm for s in found if s.wgmma} == {0, 1, 2}
    for s in found:
        if s.max_blocks_per_sm:
            blocks = KernelPlan(spec, s).tiles * s.split_k
            assert 132 * (s.max_blocks_per_sm - 1) < blocks <= 132 * s.max_blocks_per_sm


def test_clusters_and_wgmma_where_there_are() -> None:
    for tile, wgmma in ((1, {0}), (8, {0, 1}), (16, {1}), (64, {1})):
        found = decode_space.all_schedules(SPEC, tile, HOPPER, FAMILIES["decode"])
        assert {s.wgmma for s in found} == wgmma and {s.split_k for s in found} >= {2, 4, 8}
        assert all(s.cluster == s.split_k for s in found)
    for other in (replace(SPEC, group_size=None, k=4090), replace(SPEC, weight="f8e4m3", act="bf16", scale="bf16")):
        has = {s.wgmma for s in decode_space.all_schedules(other, 16, HOPPER, FAMILIES["decode"])}
        assert has == {int(has_wgmma(other, HOPPER))}
    before = decode_space.all_schedules(SPEC, 16, parse_target("sm_90"), FAMILIES["decode"])
    assert {s.wgmma for s in before} == {0} and any(s.cluster > 1 for s in before)
    older = decode_space.all_schedules(SPEC, 16, parse_target("sm_80"), FAMILIES["decode"])
    assert {(s.cluster, s.wgmma) for s in older} == {(1, 0)} and any(s.split_k > 1 for s in older)


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
    both = tuner.problems([(64, 256)], ["u4", "u8"], [128], [8], computes=["none", "f8e4m3"])
    assert [(p.spec.weight, p.spec.compute) for p in both] == [("u4", None), ("u4", "f8e4m3"), ("u8", None)]
    with pytest.raises(SpecError, match="group_size=96 must divide k=256"):
        tuner.problems([(64, 256)], ["u4"], [96], [1])
    with pytest.raises(SpecError, match="tokens=2 must be one of 1, 8"):
        tuner.problems([(64, 256)], ["u4"], [128], [2])


def test_a_session_leaves_out_tiles_that_have_no_kernels() -> None:
    plain, eight_bit = MatmulSpec(256, 1024, "u4", 128), MatmulSpec(256, 1024, "u4", 128, compute="i8")
    work = [Problem(spec, tile) for spec in (plain, eight_bit) for tile in (1, 8, 512)]
    assert tuner.with_kernels(work, parse_target("sm_80")) == [*work[:3], work[4]]
    assert work[2] in tuner.with_kernels(work, HOPPER)
    with pytest.raises(SpecError, match="tokens=1 must be one of 8, 16"):
        tuner.with_kernels([Problem(eight_bit, 1)], HOPPER)


@pytest.mark.parametrize("tile", [512, 8192])
def test_prefill_is_tuned(tile: int) -> None:
    """Its schedules are candidates, and those that differ in one choice are its neighbours."""
    found = search_space.candidates(SPEC, tile, HOPPER, 40)
    assert found[0] == default_schedule(SPEC, tile, HOPPER) and all(isinstance(s, PrefillSchedule) for s in found)
    assert len({(s.tokens, s.cluster) for s in found}) > 10
    near = search_space.neighbours(SPEC, tile, HOPPER, found[0])
    assert len(near) > 5 and found[0] not in near
    for s in near:
        assert FAMILIES["prefill"].allows(SPEC, s, HOPPER)
        assert sum(value != asdict(found[0])[name] for name, value in asdict(s).items()) == 1
    times = [FAMILIES["prefill"].predict(SPEC, tile, s, HOPPER) for s in near]
    assert times == sorted(times)


def test_8_bits_are_tuned() -> None:
    spec = replace(SPEC, compute="f8e4m3")
    found = search_space.candidates(spec, 64, HOPPER, 40)
    assert len(found) == 40 and all(FAMILIES["eight_bit"].allows(spec, s, HOPPER) for s in found)
    assert not search_space.same_size_entries(spec, 64, HOPPER)  # those of the table are of activations in f16
    assert search_space.same_size_entries(SPEC, 64, HOPPER)


def test_shapes() -> None:
    assert models.shapes(["llama-3.1-8B"]) == [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    assert models.shapes(["Gemma-2-9B/o", "64x256", "64x256"]) == [(3584, 4096), (64, 256)]
    for name in ("gpt", "64x", "Gemma-2-9B/x"):
        with pytest.raises(SpecError, match=f"shape '{name}'"):
            models.shapes([name])


def test_presets() -> None:
    work = tuner.preset_problems("decode")
    assert {p.key for p in work} <= set(shipped_tables()[0].entries)
    assert work[0].key == Key("u4", 57344, 8192, 128, "none", "f16", "f16", 1)
    for name in models.MODELS:
        for n, k in models.shapes([name]):
            assert {p.tile for p in work if p.spec == MatmulSpec(n, k, "u4", 128)} >= {1, 8, 16, 32, 64}
    prefill, eight_bit = tuner.preset_problems("prefill"), tuner.preset_problems("eight_bit")
    assert max(p.tile for p in prefill) == 8192 and {p.spec.act for p in prefill} == {"f16", "bf16"}
    assert tuner.with_kernels(prefill, HOPPER) == prefill
    assert {p.spec.compute for p in eight_bit} == {"f8e4m3", "i8"} and tuner.with_kernels(eight_bit, HOPPER)
    with pytest.raises(SpecError, match="--preset 'encode' must be one of decode, prefill, unknown, eight_bit"):
        models.preset("encode")


def test_no_pool_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_NO_CACHE", "1")
    with pytest.raises(SpecError, match="unset LOWBIT_NO_CACHE"):
        Compilers(HOPPER)


def test_no_pool_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, "lowbit.dialect.bindings", raising=False)
    monkeypatch.setattr("importlib.import_module", _none)
    with pytest.raises(TargetError, match=r"no usable MLIR Python bindings .* pip install"):
        Compilers(HOPPER)


def _none(name: str) -> None:
    raise ImportError(name)


def test_a_new_pool_for_one_that_broke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    problem = Problem(MatmulSpec(64, 256, "u4"), 1)
    schedule = default_schedule(problem.spec, 1, HOPPER)
    with Compilers(HOPPER, 1) as compilers:
        with monkeypatch.context() as m:
            m.setattr(tune_processes, "_compile", crash)
            with pytest.raises(BrokenProcessPool):
                compilers.submit(problem, schedule).result()
        again, unfit = compilers.submit(problem, schedule), replace(schedule, row_blocks=16, warps_k=32, step_k=256)
        assert again.result() == kernel_id(Artifacts(problem.spec, HOPPER, schedule).kernel(1).ptx)
        with pytest.raises(Failed, match="shared memory"):
            compilers.submit(problem, unfit).result()
        monkeypatch.setattr(tune_processes, "MOST_DEATHS", 1)
        compilers._pool.submit(crash).exception()
        with pytest.raises(LowbitError, match="fewer --jobs"):
            compilers.submit(problem, schedule)


def test_the_gpu_process_is_replaced_when_it_dies_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are those of a busy machine, except where there is nothing to wait for."""
    monkeypatch.setattr(tune_processes, "START_SECONDS", 600.0)
    monkeypatch.setattr(tune_processes, "LIMIT_SECONDS", 600.0)
    monkeypatch.setattr(tune_processes, "MOST_DEATHS", 3)
    problem, schedule = WORK[0], Schedule()
    with GpuProcess(HOPPER, serve) as gpu:
        first = gpu.time(problem, schedule, 1)
        assert gpu.check(problem, schedule) is True
        with pytest.raises(Failed, match="too many registers"):
            gpu.time(problem, schedule, 2)
        assert gpu.time(problem, schedule, 1) == first
        with pytest.raises(Failed, match="died"):
            gpu.time(problem, schedule, 3)
        second = gpu.time(problem, schedule, 1)
        with monkeypatch.context() as hasty, pytest.raises(Failed, match="no answer"):
            hasty.setattr(tune_processes, "LIMIT_SECONDS", 0.0)
            gpu.time(problem, schedule, 4)
        assert len({first, second, gpu.time(problem, schedule, 1)}) == 3
        for _ in range(2):
            with pytest.raises(Failed):
                gpu.time(problem, schedule, 3)
        with pytest.raises(TargetError, match="3 times in a row; see nvidia-smi"):
            gpu.time(problem, schedule, 3)
    with pytest.raises(TargetError, match="no process could be started"), GpuProcess(HOPPER, crash) as gpu:
        gpu.time(problem, schedule, 1)


def test_the_stand_on_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights once per spec, launches with everything in its place, right and wrong results told apart."""
    from lowbit.pylib.tune import gpu as tune_gpu
    from lowbit.pylib.tune import timing, trial

    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    made: list[MatmulSpec] = []
    sample, wrong = trial.sample, 0.0

    def cpu_sample(spec: MatmulSpec, m: int, device: str, period: int, **rounding: bool) -> trial.Sample:
        made.append(spec)
        return sample(spec, m, "cpu", period, **rounding)

    def load(artifact: Any, spec: MatmulSpec, target: object, device: int) -> Any:
        assert [slot.name for slot in spec.tensors] == ["codes", "scales", "bias"]

        def function(stream: int, overlap: bool, *addresses: int) -> None:
            kept = stand._of(problem)
            x, (y, m, *tensors) = addresses[: len(kept.x)], addresses[len(kept.x) :]
            assert overlap and m == problem.tile and [*x] == [t.data_ptr() for t in kept.x]
            assert len(kept.x) == (3 if problem.spec.compute else 1) and len(kept.x[0]) >= m
            assert any([*tensors] == [t.data_ptr() for t in w.tensors] for w in weights())
            right = torch.from_numpy(np.resize(kept.data.expected, (m, 64)))
            given = (right + wrong).to(torch.float16)
            ctypes.memmove(y, given.contiguous().data_ptr(), given.nbytes)

        return function

    def weights() -> list[Any]:
        return stand._of(problem).copies

    rests: list[float] = []

    def graph_time(calls: Sequence[Any], *_: float, rest_seconds: float = 1.0, **others: float) -> timing.Timing:
        assert len(calls) == len(weights())
        rests.append(rest_seconds)
        for call in calls:
            call()
        return timing.Timing(3.0, 2.0, 4.0)

    for name, value in (("current_device", lambda: 0), ("synchronize", lambda: None), ("empty_cache", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, z=torch.zeros, **kw: z(*a, **kw))
    monkeypatch.setattr(torch, "empty", lambda *a, device, e=torch.empty, **kw: e(*a, **kw))
    monkeypatch.setattr(trial, "sample", cpu_sample)
    monkeypatch.setattr(timing, "graph_time", graph_time)
    monkeypatch.setattr(timing, "copies", lambda w, c=timing.copies: c(w, 3 * w.nbytes))
    monkeypatch.setattr(tune_gpu, "load_matmul", load)
    monkeypatch.setattr(tune_gpu, "current_stream", lambda device: 0)
    stand = tune_gpu.Stand(HOPPER)
    for tile in (8, 16):
        problem = Problem(MatmulSpec(64, 1024, "u4", bias=True), tile)
        schedule = default_schedule(problem.spec, tile, HOPPER)
        assert stand.time(problem, schedule, SHORT) == 3.0 and stand.check(problem, schedule)
    assert len(made) == 1
    spec = problem.spec
    for problem in (Problem(spec, 512), Problem(replace(spec, compute="i8"), 16)):
        schedule = default_schedule(problem.spec, problem.tile, HOPPER)
        assert stand.time(problem, schedule, SHORT) == 3.0 and stand.check(problem, schedule)
    problem = Problem(spec, 32)
    schedule = default_schedule(problem.spec, 32, HOPPER)
    rests.clear()
    for replays in (SHORT, LONG):
        stand.time(problem, schedule, replays)
    assert rests == [0, 1, 0]  # finals after a rest and at the pace that the power cap leaves
    wrong = 1.0
    assert not stand.check(problem, schedule)
    wrong = math.nan
    assert not stand.check(problem, schedule)


def lowbit(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = lowbit("tune", "64x256")
    assert result.exit_code == 1 and "needs an NVIDIA GPU" in result.stderr and "--merge" in result.stderr


class Stand:
    """A GPU process of `Bench`'s."""

    def __init__(self, bench: Bench) -> None:
        self.time, self.check = bench.time, bench.check

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    clock = Bench(tmp_path / "none")
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuner, "this_gpu", lambda: ("NVIDIA H200", HOPPER))
    monkeypatch.setattr(tune_processes, "GpuProcess", lambda target: Stand(clock))
    return clock


def test_the_command_from_start_to_end(clock: Bench, tmp_path: Path) -> None:
    """With real compilations in a process of their own; the matmul that was tuned then gets the schedule."""
    options = ("64x1024", "-w", "u4", "-m", "1", "--group-sizes", "row", "--candidates", 4, "--jobs", 1)
    result = lowbit("tune", *options)
    assert result.exit_code == 0, result.output
    assert "u4[64, 1024] f16 scale per row: f16 -> f16, m = 1: " in result.stderr
    assert "1 of 1 matmuls" in result.stderr and "1 schedules" in result.stderr
    assert len(list(tmp_path.glob("??/*.kernel"))) == 4

    found = read_table(schedules.user_file("NVIDIA H200"))
    spec = MatmulSpec(64, 1024, "u4")
    best = min((s for _, s, _ in clock.timed), key=lambda s: Bench.truth(Problem(spec, 1), s))
    ((key, entry),) = found.entries.items()
    artifact = Artifacts(spec, HOPPER, None).kernel(1)
    assert (key, entry.schedule) == (Key.of(spec, 1), best) and artifact.schedule == best
    assert entry.kernel == kernel_id(artifact.ptx) and entry.version.startswith("0.1.0+")
    assert len(list(tmp_path.glob("??/*.kernel"))) == 4  # it was there already

    before = len(clock.timed)
    assert lowbit("tune", *options).exit_code == 0 and len(clock.timed) == before

    assert "0 of 1 entries are out of date" in lowbit("tune", "--stale", "--jobs", 1).stderr
    old = tmp_path / "old.json"
    old.write_text(found.replaced(replace(entry, kernel="")).to_text())
    assert "1 of 1 entries are out of date" in lowbit("tune", "--stale", old, "--jobs", 1).stderr


def test_first_calls_on_the_command_line(clock: Bench, tmp_path: Path) -> None:
    """An entry is measured against what its matmul would get without it: of its neighbour, or by the rule."""
    specs = [MatmulSpec(64, 1024, "u4"), MatmulSpec(64, 1280, "u4"), MatmulSpec(64, 1024, "nf4")]
    odd = [replace(default_schedule(s, 1, HOPPER), num_stages=2, warps_k=w) for s, w in zip(specs, (1, 2, 2))]
    entries = [Entry(Key.of(s, 1), o, 0.01, "2026-11-21", "0.1.0") for s, o in zip(specs, odd)]
    table = Table("NVIDIA H200", 90, "by hand", {}).with_entries(entries)
    file = tmp_path / "table.json"
    file.write_text(table.to_text())
    result = lowbit("tune", "--check", file, "--jobs", 1)
    assert result.exit_code == 0, result.output
    got = {(p.spec, s) for p, s, replays in clock.timed if replays == LONG}
    assert got >= {(specs[0], odd[1]), (specs[1], odd[0]), (specs[2], default_schedule(specs[2], 1, HOPPER))}
    assert got >= set(zip(specs, odd))
    worst = max(
        Bench.truth(Problem(s, 1), first) / min(Bench.truth(Problem(s, 1), first), Bench.truth(Problem(s, 1), own))
        for s, first, own in zip(specs, (odd[1], odd[0], default_schedule(specs[2], 1, HOPPER)), odd)
    )
    assert f"worst {worst:.3f}" in result.stderr and "of 3 within 10%" in result.stderr
    assert tune_check.GOOD == 1.1


def test_first_calls_of_sizes_that_no_table_has(clock: Bench, tmp_path: Path) -> None:
    """What is chosen is timed beside the winner of a search, and nothing is written into the user's table."""
    file = tmp_path / "first_calls.json"
    options = ("-g", "row", "-m", "1", "--candidates", 4, "--jobs", 1, "-o", file)
    result = lowbit("tune", "--check", "64x1024", "64x1152", *options)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert found["gpu"] == "NVIDIA H200" and [call["k"] for call in found["calls"]] == [1024, 1152]
    ratios = []
    for call in found["calls"]:
        spec = MatmulSpec(call["n"], call["k"], "u4")
        chosen = schedule_for(spec, 1, HOPPER)
        assert call["microseconds"] == Bench.truth(Problem(spec, 1), chosen) >= call["best_microseconds"]
        ratios.append(call["microseconds"] / call["best_microseconds"])
    assert "of 2 within 10%" in result.stderr and f"worst {max(ratios):.3f}" in result.stderr
    assert not schedules.user_file("NVIDIA H200").exists()


def test_the_unknown_sizes_are_in_no_table() -> None:
    known = {(key.n, key.k) for table in shipped_tables() for key in table.entries}
    work = tuner.preset_problems("unknown")
    assert not {(p.spec.n, p.spec.k) for p in work} & known and len({(p.spec.n, p.spec.k) for p in work}) == 10
    kinds = {(p.spec.weight, p.spec.group_size) for p in work}
    assert kinds == {("u4", 128), ("u4", 32), ("f6e3m2", None)} and tuner.with_kernels(work, HOPPER) == work


def test_wrong_use_of_the_command(clock: Bench, tmp_path: Path) -> None:
    assert "needs shapes" in lowbit("tune").stderr
    assert "--preset 'x' must be one of decode, prefill" in lowbit("tune", "--preset", "x").stderr
    assert "needs tables" in lowbit("tune", "--merge").stderr
    assert "give one of them" in lowbit("tune", "--merge", "--stale", "a").stderr
    assert "one table at a time" in lowbit("tune", "--stale", "a", "b").stderr


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
