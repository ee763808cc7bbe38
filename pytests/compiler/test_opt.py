"""`lowbit opt`: order of passes, options, chunks, and the checks of expected diagnostics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from lowbit.dialect.bindings import ir
from lowbit.dialect.errors import PassError
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.opt import main as opt
from lowbit.passes.opt.diagnostics import Diagnostic, expectations, mismatches
from lowbit.passes.opt.options import from_text, options
from lowbit.passes.pipeline import PASSES
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target

ADD_ZERO = """\
func.func @f(%x: i32) -> i32 {
  %zero = arith.constant 0 : i32
  %sum = arith.addi %x, %zero : i32
  return %sum : i32
}
"""
WRONG = "func.func @g(%x: i32) -> i32 {\n  return %x : i64\n}\n"


@dataclass(frozen=True)
class Mark:
    """Write the options on every function.

    More words."""

    name: ClassVar[str] = "test-mark"
    target: Target
    schedule: Schedule | None = None
    mode: Literal["a", "b"] = "a"
    fast: bool = False
    limit: int | None = None

    def run(self, module: ir.Module) -> None:
        for op in module.body.operations:
            op.attributes["mark"] = ir.StringAttr.get(f"{self.target} {self.mode} {self.fast} {self.limit}")


@dataclass(frozen=True)
class Refuse:
    """Refuse the first function."""

    name: ClassVar[str] = "test-refuse"
    located: bool = True

    def run(self, module: ir.Module) -> None:
        error = PassError("this function is refused")
        if self.located:
            error.location = module.body.operations[0].location  # type: ignore[attr-defined]
        raise error


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """run(text, *arguments) -> (exit code, stdout, stderr)."""
    monkeypatch.setitem(PASSES, "test-mark", Mark)
    monkeypatch.setitem(PASSES, "test-refuse", Refuse)

    def run(text: str, *arguments: str) -> tuple[int, str, str]:
        file = tmp_path / "in.mlir"
        file.write_text(text)
        code = opt.main([str(file), *arguments])
        return code, *capsys.readouterr()

    return run


def test_passes_run_in_order(run):
    code, out, err = run(ADD_ZERO, "-test-mark=target=sm_80,limit=3", "--canonicalize", "--dump-after-each")
    assert code == 0 and 'mark = "sm_80 a False 3"' in out and "addi" not in out
    first, second = err.split("IR Dump After")[1:]
    assert first.startswith(" test-mark") and "addi" in first
    assert second.startswith(" canonicalize") and "addi" not in second


def test_stop_after(run):
    assert "addi" in run(ADD_ZERO, "--cse", "--canonicalize", "--stop-after=cse")[1]
    assert "addi" not in run(ADD_ZERO, "--cse", "--canonicalize", "--stop-after=canonicalize")[1]


def test_upstream_options_and_pipelines(run, tmp_path):
    out = tmp_path / "out.mlir"
    pipeline = "--pass-pipeline=builtin.module(func.func(canonicalize))"
    assert run(ADD_ZERO, pipeline, "-o", str(out))[:2] == (0, "")
    assert "addi" not in out.read_text()
    assert run(ADD_ZERO, "--canonicalize=max-iterations=2 top-down=false")[0] == 0


def test_errors_show_the_place(run, tmp_path):
    code, out, err = run(ADD_ZERO + "// -----\n" + WRONG, "--split-input-file")
    assert code == 1 and out == ""
    assert f"{tmp_path}/in.mlir:8:10: error: use of value '%x' expects different type" in err
    assert "  return %x : i64\n         ^" in err and "in.mlir:7:14: note: prior use here" in err


@pytest.mark.parametrize(("prefix", "column"), [("  ", 3), ("  %0 = ", 8), ("%a:2 = ", 8)])
def test_an_unknown_operation_is_shown(run, tmp_path, prefix, column):
    """MLIR's parser fails there without a word."""
    text = f"// lowbit.barier is not meant\nfunc.func @f() {{\n{prefix}lowbit.barier {{warps = 1}}\n  return\n}}\n"
    code, _, err = run(text)
    assert code == 1 and f"in.mlir:3:{column}: error: there is no operation lowbit.barier; did you mean lowb" in err
    assert f"\n{' ' * (column - 1)}^" in err


def test_both_forms_are_read_and_printed(run):
    for text in ('"lowbit.wait"() {pending = 2} : () -> ()', "lowbit.wait {pending = 2}"):
        function = f"func.func @f() {{\n  {text}\n  return\n}}\n"
        assert "\n    lowbit.wait {pending = 2}\n" in run(function)[1]
        assert '"lowbit.wait"() {pending = 2 : i64} : () -> ()' in run(function, "--mlir-print-op-generic")[1]
        assert "lowbit.wait {pending = 2} loc(#loc" in run(function, "--mlir-print-debuginfo")[1]


def test_files_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "binary.mlir").write_bytes(b"\xff\xfe")
    assert opt.main([str(tmp_path / "nofile")]) == opt.main([str(tmp_path / "binary.mlir")]) == 1
    err = capsys.readouterr().err
    assert f"error: {tmp_path}/nofile: No such file or directory\n" in err and "Errno" not in err
    assert "error: the input is not UTF-8 text" in err


def test_pass_errors_with_and_without_a_place(run, tmp_path):
    assert f"{tmp_path}/in.mlir:1:1: error: this function is refused" in run(ADD_ZERO, "--test-refuse")[2]
    assert run(ADD_ZERO, "--test-refuse=located=false")[2] == "error: this function is refused\n"
    expected = "// expected-error @below {{refused}}\n" + ADD_ZERO
    assert run(expected, "--test-refuse", "--verify-diagnostics")[0] == 0
    unknown = "// expected-error @unknown {{refused}}\n" + ADD_ZERO
    assert run(unknown, "--test-refuse=located=false", "--verify-diagnostics")[0] == 0
    assert run(unknown, "--test-refuse", "--verify-diagnostics")[0] == 1


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--tset-mark", "unknown pass --tset-mark; did you mean --test-mark?"),
        ("--test-mark", "--test-mark needs target; write --test-mark=target=..."),
        ("--test-mark=target=sm_80,foo=1", "unknown option 'foo'; allowed: target, tokens"),
        ("--test-mark=target=sm_80,tokens=8,tokens=16", "'tokens' is given twice; give it once"),
        ("--test-mark=target=sm_80,mode=c", "mode=c must be a|b"),
        ("--test-mark=target=sm_1", "unknown target 'sm_1'"),
        ("--test-mark=target=cpu,tokens=7", "tokens=7 must be one of 1, 8, 16, 32, 64, 128"),
        ("--affine-super-vectorize", "--pass-pipeline='builtin.module(func.func(affine-super-vectorize))'"),
        ("--canonicalize=nonsense=1", "no such option nonsense"),
        ("--stop-after=cse", "--stop-after=cse is not among the passes to run: none"),
    ],
)
def test_wrong_arguments(run, argument, message):
    code, out, err = run(ADD_ZERO, argument)
    assert (code, out) == (1, "") and message in err and "Traceback" not in err


def test_list_passes(run):
    out = run("", "--list-passes")[1]
    assert "--test-mark\n    Write the options on every function.\n      target: target\n" in out
    assert "num_stages: int = 3" in out and "fast: true|false = false" in out
    assert all(f"--{name}\n" in out for name in PASSES)


def test_options():
    mark = from_text(Mark, "target=emulator:sm_90a num_stages=4,step-k=64 mode=b,fast,limit=none", "--test-mark")
    assert mark == Mark(parse_target("emulator:sm_90a"), Schedule(num_stages=4, step_k=64), "b", True, None)
    assert from_text(Mark, "target=cpu", "--test-mark").schedule is None
    # A name of both the pass and its schedule sets both, but alone it makes no schedule.
    both = from_text(PASSES["select-schedule"], "tokens=16,num_stages=4", "--select-schedule")
    assert (both.tokens, both.schedule) == (16, Schedule(tokens=16, num_stages=4))
    alone = from_text(PASSES["select-schedule"], "tokens=16", "--select-schedule")
    assert (alone.tokens, alone.schedule) == (16, None)
    assert list(options(Refuse)) == ["located"]


def test_expectations():
    text = """\
op  // expected-error {{one}}
// expected-note @-1 {{two}}
// expected-warning @below {{three}}
// expected-error @below {{four}}
op
// expected-error @above {{five {{six}} }}
"""
    found = [(e.severity, e.text, e.line, e.written) for e in expectations(text)]
    assert found == [
        ("error", "one", 1, 1),
        ("note", "two", 1, 2),
        ("warning", "three", 5, 3),
        ("error", "four", 5, 4),
        ("error", "five {{six}} ", 5, 6),
    ]


def test_every_mismatch_counts():
    error = Diagnostic("error", "one two", 1, 1, (Diagnostic("note", "here", 2, 1),))
    reported = [error, Diagnostic("warning", "x")]
    right = "// expected-error {{two}}\n// expected-note {{here}}\n// expected-warning @unknown {{x}}"
    assert not mismatches(reported, expectations(right))
    wrong = {d.message for d in mismatches(reported, expectations("// expected-warning {{two}}"))}
    assert wrong == {
        'unexpected error: "one two"',
        'unexpected note: "here"',
        'unexpected warning: "x"',
        'expected warning "two" on line 1 was not produced',
    }
    # An expectation is met once; 'error' and 'note' of the second report are left, and so is the warning.
    assert len(mismatches([error, error], expectations(right))) == 3


@pytest.mark.parametrize("comment", ["expected-error @+1 {{other}}", "expected-error {{use of value}}", ""])
def test_verify_diagnostics_fails(run, comment):
    code, _, err = run(WRONG.replace("  return", f"// {comment}\n  return"), "--verify-diagnostics")
    assert code == 1 and "unexpected error" in err
