"""The command line: help, errors in one line, stages, and a small matmul from start to end."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.stages import stages
from lowbit.passes.target import parse_target
from lowbit.pylib.cli.machine import TARGETS
from lowbit.pylib.cli.main import app

SMALL = ("--n", "32", "--k", "256", "--weight", "u4", "--group-size", "64", "--zeros", "int")


def lowbit(*arguments: str):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.mark.parametrize("command", ["compile", "explain", "run", "info", "irdl"])
def test_help_has_examples(command):
    result = lowbit(command, "--help")
    assert result.exit_code == 0 and f"lowbit {command}" in result.output.split("Example")[1]


def test_explain():
    arguments = ("explain", *SMALL, "--target", "sm_80", "--schedule", "tokens=16,warps_k=2")
    table = lowbit(*arguments).output
    assert "9 to 16      m16" in table and "tokens=16, row_blocks=2, warps_n=1, warps_k=2" in table
    read = json.loads(lowbit(*arguments, "--json").output)
    assert read["kernels"]["m16"]["schedule"]["warps_k"] == 2 and read["rows"][0]["launches"] == ["m1"]
    assert "name a GPU such as sm_90a" in lowbit("explain", "--target", "cpu").output


def test_integer_schedule_by_name():
    schedule = "family=decode_integer,tokens=1,warps_k=4,step_k=256"
    arguments = ("explain", "--weight", "u2", "--target", "sm_90a", "--schedule", schedule)
    assert json.loads(lowbit(*arguments, "--json").output)["kernels"]["m1"]["schedule"]["family"] == "decode_integer"


@pytest.mark.parametrize("command", ["compile", "run"])
def test_every_field_of_a_spec_is_an_option(command):
    text = lowbit(command, "--help").output
    assert all(f"--{field.name.replace('_', '-')} " in text for field in fields(MatmulSpec))


def test_targets_in_help_exist():
    names = [name for name in TARGETS.replace(" or ", " ").split(", ") if "<" not in name]
    assert len(names) == 10 and all(parse_target(name).name == name for name in names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--weight", "u9"), "did you mean 'u8'?"),
        (("--k", "4096", "--group-size", "96"), "group_size=96 must divide k=4096"),
        (("--weight", "lut2", "--table", "1,x"), "--table=1,x must be numbers separated by commas"),
        (("--schedule", "tokens=3"), "tokens=3 must be one of 1, 8, 16, 32, 64, 128"),
        (("--schedule", "stage=3"), "--schedule: unknown option 'stage'; allowed: family, tokens"),
        (("--target", "sm_75"), "unknown target 'sm_75'"),
        ((*SMALL, "--target", "sm_80", "--stop-after", "vector"), "must be one of lowbit, tile, gpu, llvm"),
        ((*SMALL, "--target", "sm_80", "--stop-after", "cubin"), "name a file with -o"),
        ((*SMALL, "--target", "sm_80", "-o", "/nonexistent/kernel.ptx"), "No such file or directory"),
    ],
)
def test_errors_are_one_line(arguments, message):
    result = lowbit("compile", *arguments)
    assert result.exit_code == 1 and message in result.stderr and "Traceback" not in result.stderr


def test_compile_to_a_stage():
    assert "!lowbit." in lowbit("compile", *SMALL, "--target", "sm_90a", "--stop-after", "tile").stdout
    ptx = lowbit("compile", *SMALL, "--target", "sm_90a").stdout
    assert ".target sm_90a" in ptx and "mma.sync" in ptx


def test_dump_has_every_stage(tmp_path: Path):
    for target in ("sm_80", "cpu"):
        folder = tmp_path / target
        assert lowbit("compile", *SMALL, "--target", target, "--dump", folder).exit_code == 0
        wanted = stages(gpu=target != "cpu").values()
        assert {f.name for f in folder.iterdir()} == {f"matmul.{stage.suffix}" for stage in wanted}
        assert all(f.stat().st_size for f in folder.iterdir())


@pytest.mark.parametrize("target", ["cpu", "emulator:sm_80"])
def test_run(target):
    result = lowbit("run", *SMALL, "-m", "3", "--target", target)
    assert result.exit_code == 0, result.output
    assert "right" in result.stdout and ("time" in result.stdout) == (target == "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_run_without_a_gpu():
    result = lowbit("run", *SMALL, "--target", "sm_80")
    assert result.exit_code == 1 and "torch finds no CUDA device here; use target='cpu'" in result.stderr


def test_run_reports_a_wrong_result(monkeypatch: pytest.MonkeyPatch):
    from lowbit.pylib import reference

    definition = reference.matmul
    monkeypatch.setattr(reference, "matmul", lambda *given, **named: definition(*given, **named) + 1.0)
    result = lowbit("run", *SMALL, "--target", "cpu")
    assert result.exit_code == 1 and "wrong" in result.output


def test_info():
    text = lowbit("info").stdout
    assert "llvmlite" in text and "sm_90a" in text and "cache" in text


def test_opt_as_a_process(repo: Path):
    body = "%x = arith.constant 1 : i32\n%y = arith.addi %x, %x : i32\nreturn %y : i32"
    command = [sys.executable, "-m", "lowbit.pylib.cli.main", "opt", "-canonicalize", "-"]
    ir = f"func.func @f() -> i32 {{{body}}}"
    done = subprocess.run(command, input=ir, capture_output=True, text=True, cwd=repo, check=True)
    assert "arith.constant 2" in done.stdout and "addi" not in done.stdout
