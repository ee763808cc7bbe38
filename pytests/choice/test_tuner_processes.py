"""The processes of the tuner: a pool that compiles, and one that runs kernels on the GPU."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import crash, serve
from made_up_gpu import HOPPER, WORK

from lowbit.dialect.errors import LowbitError, SpecError, TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.scheduling.choice import default_schedule
from lowbit.pylib.build.kernels import Artifacts
from lowbit.pylib.tune import processes as tune_processes
from lowbit.pylib.tune.problem import Problem
from lowbit.pylib.tune.processes import Compilers, Failed, GpuProcess, kernel_id
from lowbit.pylib.tune.search_space import candidates
from lowbit.pylib.tune.session import LONG, SHORT


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
            assert overlap and m == problem.token_tile and [*x] == [t.data_ptr() for t in kept.x]
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
        schedule = default_schedule(problem.spec, problem.token_tile, HOPPER)
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


def test_the_stand_with_experts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every launch has the slots of another routing, and a result is right where every slot is."""
    from lowbit.pylib.tune import gpu as tune_gpu
    from lowbit.pylib.tune import timing, trial

    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    problem, seen, wrong_slot = Problem(MatmulSpec(4 * 64, 256, "u4", 64, experts=4), 14, 2), set[bytes](), -1

    def memory(address: int, shape: tuple[int, ...]) -> Any:
        size = 4 * math.prod(shape)
        return np.frombuffer(ctypes.string_at(address, size), np.int32).reshape(shape)

    def load(artifact: Any, spec: MatmulSpec, target: object, device: int) -> Any:
        def function(stream: int, overlap: bool, x: int, y: int, m: int, *operands: int) -> None:
            data, (*tensors, rows, tiles) = stand._of(problem).data, operands
            assert overlap and m == 14 and len(tensors) == len(spec.tensors)
            table = memory(tiles, (15, 3))
            seen.add(table.tobytes())
            period, result = data.expected.shape[1], np.zeros((14, 64), np.float16)
            for expert, first, end in table[1 : 1 + table[0, 0]]:
                columns = (expert * 64 + np.arange(64)) % period
                result[first:end] = data.expected[memory(rows, (14,))[first:end, None] % len(data.expected), columns]
            if wrong_slot >= 0:
                result[wrong_slot] += 1
            ctypes.memmove(y, result.tobytes(), result.nbytes)

        return function

    def graph_time(calls: Sequence[Any], *_: float, **others: float) -> timing.Timing:
        for call in calls:
            call()
        return timing.Timing(3.0, 2.0, 4.0)

    for name, value in (("current_device", lambda: 0), ("synchronize", lambda: None), ("empty_cache", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, z=torch.zeros, **kw: z(*a, **kw))
    monkeypatch.setattr(torch, "empty", lambda *a, device=None, e=torch.empty, **kw: e(*a, **kw))
    monkeypatch.setattr(trial, "sample", lambda spec, m, device, *a, s=trial.sample, **kw: s(spec, m, "cpu", *a, **kw))
    monkeypatch.setattr(timing, "graph_time", graph_time)
    monkeypatch.setattr(timing, "copies", lambda w, c=timing.copies: c(w, 3 * w.nbytes))
    monkeypatch.setattr(tune_gpu, "load_matmul", load)
    monkeypatch.setattr(tune_gpu, "current_stream", lambda device: 0)
    stand = tune_gpu.Stand(HOPPER)
    schedule = candidates(problem.spec, 14, HOPPER, 1)[0]
    assert stand.time(problem, schedule, SHORT) == 3.0 and len(seen) > 10
    assert stand.check(problem, schedule)
    wrong_slot = 0
    assert not stand.check(problem, schedule)
    wrong_slot = 13
    assert not stand.check(problem, schedule)
