"""PTX from LLVM's NVPTX back end, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from llvm_programs import PLAIN, SCALE, parse

from lowbit.dialect.bindings import ir, passmanager
from lowbit.dialect.errors import PassError, TargetError
from lowbit.passes.codegen.ptx import emit_ptx, external_functions, translate
from lowbit.passes.targets import parse_target


@pytest.mark.parametrize(("name", "version"), [("sm_80", "8.0"), ("sm_89", "8.4"), ("sm_90a", "8.6")])
def test_ptx_says_its_target(name: str, version: str) -> None:
    ptx = emit_ptx(PLAIN, parse_target(name))
    assert f".version {version}\n.target {name}\n.address_size 64" in ptx
    assert ".visible .entry scale(" in ptx
    assert "0f3DCCCCCD" in ptx, "0.1 in float"
    assert emit_ptx(PLAIN, parse_target(f"emulator:{name}")) == ptx
    with pytest.raises(TargetError, match="no PTX for target cpu"):
        emit_ptx(PLAIN, parse_target("cpu"))


def test_loops_are_unrolled_where_marked_only() -> None:
    target = parse_target("sm_80")
    assert emit_ptx(PLAIN, target).count("mul.rn.f32") == 1
    assert emit_ptx(SCALE.replace("UNROLL", ", !llvm.loop !0"), target).count("mul.rn.f32") > 3


def test_shared_addresses_have_32_bits(context: ir.Context) -> None:
    module = parse("%0 = llvm.load %p : !llvm.ptr<3> -> i32\nllvm.store %0, %g : i32, !llvm.ptr<1>")
    ptx = emit_ptx(translate(module), parse_target("sm_80"))
    assert re.search(r"ld\.shared\.b32\s+%r\d+, \[%r\d+\]", ptx)


def test_ptx_is_the_same_in_every_process(repo: Path) -> None:
    code = (
        "import sys; from lowbit.passes.codegen.ptx import emit_ptx; from passes.targets import parse_target\n"
        "sys.stdout.write(emit_ptx(sys.stdin.read(), parse_target('sm_80')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo, input=PLAIN, capture_output=True, text=True, check=True
    )
    assert done.stdout == emit_ptx(PLAIN, parse_target("sm_80")) == emit_ptx(PLAIN, parse_target("sm_80"))


@pytest.mark.parametrize("function", ["llvm.nvvm.of.the.future", "__nv_expf"])
def test_calls_to_functions_that_nobody_has_are_refused(function: str) -> None:
    text = f"declare float @{function}(float)\n" + PLAIN.replace(
        "fmul float %value, 1.000000e-01", f"call float @{function}(float %value)"
    )
    with pytest.raises(PassError, match=f"PTX calls {function}"):
        emit_ptx(text, parse_target("sm_80"))
    assert external_functions(".extern .func vprintf\n(\n.param .b32 a\n)\n;") == ["vprintf"]


@pytest.mark.parametrize(
    ("body", "needs"),
    [
        ("nvvm.wgmma.fence.aligned", "sm_90a"),
        ("nvvm.setmaxregister increase 232", "sm_90a"),
        ("nvvm.griddepcontrol wait", "sm_90 or later"),
        ("nvvm.cluster.arrive", "sm_90 or later"),
        ("nvvm.cp.async.bulk.commit.group", "sm_90 or later"),
        ("nvvm.mbarrier.arrive.expect_tx %p, %i : !llvm.ptr<3>, i32", "sm_90 or later"),
        ("nvvm.prefetch level = L2, %g : !llvm.ptr<1>", "sm_90 or later"),
    ],
)
def test_instructions_of_a_newer_gpu_are_an_error(context: ir.Context, body: str, needs: str) -> None:
    """LLVM would end the process with "Cannot select"."""
    module = parse(body)
    passmanager.PassManager.parse("builtin.module(convert-nvvm-to-llvm)").run(module.operation)
    text = translate(module)
    with pytest.raises(PassError, match=f"needs {needs}; the target is sm_80"):
        emit_ptx(text, parse_target("sm_80"))
    if "setmax" not in body:  # that one also wants .reqntid
        emit_ptx(text, parse_target("sm_90a"))


def test_functions_without_an_instruction_are_an_error() -> None:
    def call(flags: str, name: str) -> str:
        head = f"declare float @llvm.{name}.f32(float)\n"
        return head + PLAIN.replace(
            "fmul float %value, 1.000000e-01", f"call {flags}float @llvm.{name}.f32(float %value)"
        )

    target = parse_target("sm_80")
    for name in ("exp", "log", "sin", "tanh"):
        with pytest.raises(PassError, match=f"llvm.{name}.f32 has no GPU instruction"):
            emit_ptx(call("", name), target)
    assert "tanh.approx.f32" in emit_ptx(call("afn ", "tanh"), target)
    assert "sin.approx" in emit_ptx(call("fast ", "sin"), target)
    assert "ex2.approx" in emit_ptx(call("", "exp2"), target)


def test_bad_llvm_ir_is_an_error_with_its_line() -> None:
    with pytest.raises(PassError, match=r"(?s)does not take this LLVM IR.*%value = lode"):
        emit_ptx(PLAIN.replace("load", "lode"), parse_target("sm_80"))
