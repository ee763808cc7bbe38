"""`python -m benchmarks sanitize` without a GPU: which kernels it checks, and what it makes of the tools' reports."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_pipeline import FakePipeline, pipeline
from typer.testing import CliRunner

from benchmarks import checked_kernels
from benchmarks.__main__ import app
from benchmarks.sanitize import sanitize
from lowbit import SpecError, TargetError
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.targets import parse_target
from lowbit.pylib.reference import matmul, random_inputs

__all__ = ["pipeline"]

HOPPER = parse_target("sm_90a")


def test_the_sample_has_every_way_to_share_work() -> None:
    requests = [case.request(HOPPER) for case in checked_kernels.CASES.values()]
    assert {each.family for each in requests} == {"decode", "prefill", "eight_bit", "eight_bit_prefill"}
    for kind in (Schedule, PrefillSchedule, EightBitPrefillSchedule):
        schedules: list[Any] = [each.schedule for each in requests if type(each.schedule) is kind]
        assert {1, 2} <= {schedule.cluster for schedule in schedules}
        assert len({schedule.split_k for schedule in schedules}) > 1
    assert any(each.spec.outliers and each.family == "prefill" for each in requests)
    bytes_ = [each for each in requests if each.family == "eight_bit_prefill"]
    plans = [bytes_plan(each.spec, each.schedule, WGMMA) for each in bytes_]  # type: ignore
    folds = {bool(each.spec.fold_scales) for each in bytes_}
    assert {bool(plan.held.code_stages) for plan in plans} == folds == {True, False}


@pytest.mark.parametrize(
    "case", [checked_kernels.CASES["u4, 1 token"], checked_kernels.CASES["i8, 16 tokens"]], ids=["f16", "i8"]
)
def test_numbers_are_compared(
    case: checked_kernels.Case, monkeypatch: pytest.MonkeyPatch, pipeline: FakePipeline
) -> None:
    """A kernel that does nothing is wrong; one that gives the definition's numbers is right."""
    case = replace(case, spec=replace(case.spec, n=16, k=256))
    x, weight = random_inputs(case.spec, case.tokens)
    y = torch.from_numpy(matmul(case.spec, x, **weight)).half()
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        checked_kernels, "load_matmul", lambda *_: lambda stream, overlap, *values: calls.append(values)
    )
    monkeypatch.setattr(checked_kernels, "current_stream", lambda device: 0)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert not case.is_right(HOPPER)
    place = 3 if case.spec.compute else 1
    assert len(calls) == 3 and all(values[place + 1] == case.tokens for values in calls)

    def write(stream: int, overlap: bool, *values: int) -> None:
        ctypes.memmove(values[place], y.data_ptr(), y.nbytes)

    monkeypatch.setattr(checked_kernels, "load_matmul", lambda *_: write)
    assert case.is_right(HOPPER)


REPORTS = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)",
    "synccheck": "========= Device not supported",
}


def test_reports_become_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel runs once alone and once under each tool; alone it is wrong here, fails, or hangs."""
    tool = tmp_path / "compute-sanitizer"
    cases = " ".join(f"{name}) echo '{text}';;" for name, text in REPORTS.items())
    tool.write_text(f'#!/bin/sh\n[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 ] || exit 1\ncase "$2" in {cases} esac\n')
    tool.chmod(0o755)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$3" in *prefill*) exit 3;; *SpQR*) exit 124;; *) echo broken; exit 4;; esac\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(python))
    done = CliRunner().invoke(app, ["sanitize", "--kernels", "prefill; u4, 1 token; SpQR, 1 token"])
    rows = [line for line in done.output.splitlines() if line.startswith("| ") and "---" not in line]
    assert done.exit_code == 0 and rows == [
        "| kernel | numbers | memcheck | racecheck | synccheck |",
        "| prefill | wrong | 0 | 1 error, 1 warning | no report (0) |",
        "| u4, 1 token | failed (4) | 0 | 1 error, 1 warning | no report (0) |",
        "| SpQR, 1 token | too long | 0 | 1 error, 1 warning | no report (0) |",
    ]


def test_without_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(TargetError, match="compute-sanitizer is not here"):
        sanitize(["prefill"], ["memcheck"], 1, 1.0, print)


def test_unknown_kernels_and_tools_are_refused_before_any_runs() -> None:
    with pytest.raises(SpecError, match=r"--kernels='prefil, nf4' must be one of .* did you mean 'prefill, nf4'"):
        sanitize(["prefill", "prefil, nf4"], ["memcheck"], 1, 1.0, print)
    with pytest.raises(SpecError, match=r"--tools='memchek' must be one of 'memcheck', .* did you mean 'memcheck'"):
        sanitize(["prefill"], ["memchek"], 1, 1.0, print)
