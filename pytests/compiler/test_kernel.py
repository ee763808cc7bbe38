"""`lowbit.compile_program` and `lowbit.load`: programs of one's own, called with arguments by name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from lowbit.dialect import ops
from lowbit.dialect.bindings import ir, new_context
from lowbit.dialect.layouts.layout import local, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program
from lowbit.passes.codegen.lower_to_llvm import LowerToLLVM
from lowbit.passes.codegen.ptx import emit_ptx, translate
from lowbit.passes.pipeline import CompiledKernel, lower_program, read_launches
from lowbit.passes.targets import parse_target
from lowbit.pylib.build.kernels import Artifacts
from lowbit.pylib.emulator.text.parser import parse
from lowbit.pylib.emulator.text.ptx import Instruction
from lowbit.pylib.runtime.devices import this_machine
from lowbit.pylib.runtime.tensor_map import TensorMap

EMULATOR = "emulator:sm_90a"
ROWS, COLUMNS = 16, 32


def scaling_program() -> ir.Module:
    """y = alpha x, of f32 [m, 32]."""
    kinds = {"x": "pointer", "alpha": "f32", "y": "pointer", "m": "i32"}
    p = Program("scale", 32, (f"ceil(m / {ROWS})", 1, 1), kinds)
    layout = local(ROWS, 1) * spatial(1, COLUMNS)
    with p:
        x, y = (p.global_view(p[name], "f32", (-1, COLUMNS), sizes=[p["m"]]) for name in ("x", "y"))
        row = p.block_id(0) * ROWS
        tile = p.load(x, (row, 0), layout, ("zero", "none"))
        p.store(p.mul(tile, p.splat(p["alpha"], "f32", layout)), y, (row, 0), ("skip", "none"))
    return p.module


def row_beyond_the_end() -> ir.Module:
    """Adds rows of x to rows of y: the same number, whatever m is."""
    p = Program("add", 32, (1, 1, 1), {"x": "pointer", "y": "pointer", "m": "i32"})
    layout = local(ROWS, 1) * spatial(1, COLUMNS)
    with p:
        x, y = (p.global_view(p[name], "f32", (-1, COLUMNS), sizes=[p["m"]]) for name in ("x", "y"))
        here = p.load(x, (0, 0), layout, ("none", "none"))
        there = p.load(y, (0, 0), layout, ("none", "none"))
        p.store(here + there, y, (0, 0), ("none", "none"))
    return p.module


def counting_program() -> ir.Module:
    """Every block writes ones to a row of its own, two blocks for each multiprocessor."""
    p = Program("count", 32, ("sm_count * 2", 1, 1), {"y": "pointer", "n": "i32"})
    layout = spatial(1, 32)
    with p:
        y = p.global_view(p["y"], "f32", (-1, 32), sizes=[p["n"]])
        p.store(p.constant(1.0, "f32", layout), y, (p.block_id(0), 0), ("skip", "none"))
    return p.module


def meeting_program() -> ir.Module:
    """The last of three blocks to come adds one to y: what the workspace counts, and is left as it was found."""
    p = Program("meet", 32, (3, 1, 1), {"y": "pointer", "workspace": "pointer"}, workspace=4)
    with p:
        y, layout = p.global_view(p["y"], "f32", (32,)), spatial(32)
        with p.when(p.last_arrival(p.global_view(p["workspace"], "i32", (1,)), 0, 3)):
            p.store(p.add(p.load(y, (0,), layout), p.constant(1.0, "f32", layout)), y, (0,))
    return p.module


# The box of 16 rows that belongs to a block, brought by a tensor copy and multiplied by alpha.
BOXES = """
gpu.module @boxes_module {
  llvm.mlir.global external @shared_memory() {addr_space = 3 : i32, alignment = 1024 : i64} : !llvm.array<0 x i8>
  gpu.func @boxes(%map: !llvm.ptr {llvm.align = 64 : i64, llvm.byval = !llvm.array<128 x i8>}, %alpha: f32,
                  %y: !llvm.ptr<1>, %m: i32) kernel attributes {
      lowbit.grid = ["ceil(m / 16)", 1, 1], lowbit.params = ["map", "alpha", "y", "m"], lowbit.threads = 32 : i64,
      lowbit.shared_bytes = 2056 : i64, lowbit.workspace = 0 : i64, nvvm.reqntid = array<i32: 32, 1, 1>} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c16 = arith.constant 16 : i32
    %c32 = arith.constant 32 : i32
    %bytes = arith.constant 2048 : i32
    %ticks = arith.constant 10000000 : i32
    %box = llvm.mlir.addressof @shared_memory : !llvm.ptr<3>
    %signal = llvm.getelementptr %box[2048] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i8
    %t = gpu.thread_id x
    %thread = arith.index_cast %t : index to i32
    %b = gpu.block_id x
    %block = arith.index_cast %b : index to i32
    %first = arith.muli %block, %c16 : i32
    %elected = arith.cmpi eq, %thread, %c0 : i32
    scf.if %elected {
      nvvm.mbarrier.init %signal, %c1 : !llvm.ptr<3>, i32
      nvvm.fence.mbarrier.init
      nvvm.mbarrier.arrive.expect_tx %signal, %bytes : !llvm.ptr<3>, i32
      %far = llvm.addrspacecast %box : !llvm.ptr<3> to !llvm.ptr<7>
      nvvm.cp.async.bulk.tensor.shared.cluster.global %far, %map, %signal, box[%c0, %first] : !llvm.ptr<7>, !llvm.ptr
    }
    nvvm.barrier
    nvvm.mbarrier.try_wait.parity %signal, %c0, %ticks : !llvm.ptr<3>, i32, i32
    scf.for %i = %c0 to %c16 step %c1 : i32 {
      %row = arith.addi %first, %i : i32
      %inside = arith.cmpi slt, %row, %m : i32
      scf.if %inside {
        %from = arith.muli %i, %c32 : i32
        %source = arith.addi %from, %thread : i32
        %a = llvm.getelementptr %box[%source] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, f32
        %v = llvm.load %a : !llvm.ptr<3> -> f32
        %scaled = arith.mulf %v, %alpha : f32
        %to = arith.muli %row, %c32 : i32
        %target = arith.addi %to, %thread : i32
        %c = llvm.getelementptr %y[%target] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, f32
        llvm.store %scaled, %c : f32, !llvm.ptr<1>
      }
    }
    gpu.return
  }
}
"""


def compiled_boxes(target: str) -> CompiledKernel:
    context = new_context()
    ops.register(context)
    with context, ir.Location.unknown():
        module = ir.Module.parse(BOXES)
        (launch,) = read_launches(module)
        LowerToLLVM().run(module)
        ptx = emit_ptx(translate(module), parse_target(target))
    return CompiledKernel(launch, parse_target(target), None, {"ptx": ptx})


def scaling(target: str = EMULATOR) -> lowbit.Kernel:
    return lowbit.compile_program(scaling_program, target)


def numbers(m: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x, and a y with one row more than is written."""
    x = torch.randn(m, COLUMNS, generator=torch.Generator().manual_seed(m))
    return x.to(device), torch.full((m + 1, COLUMNS), torch.nan, device=device)


def check_scaling(target: str, device: str) -> None:
    kernel = scaling(target)
    for m in (1, 16, 33, 0):
        x, y = numbers(m, device)
        kernel(m=m, y=y, alpha=-0.75, x=x)
        assert torch.equal(y[:m], -0.75 * x) and y[m:].isnan().all()


def check_boxes(target: str, device: str) -> None:
    kernel = lowbit.load(compiled_boxes(target))
    for m in (1, 16, 33):
        x, y = numbers(m, device)
        kernel(map=TensorMap(x, "f32", (m, COLUMNS), (ROWS, COLUMNS)), alpha=3, y=y, m=m)
        assert torch.equal(y[:m], 3 * x) and y[m:].isnan().all()


def check_counting(target: str, device: str) -> int:
    kernel = lowbit.compile_program(counting_program, target)
    y = torch.zeros(1000, 32, device=device)
    kernel(y=y, n=1000)
    blocks = int(y[:, 0].sum())
    assert y[:blocks].all() and not y[blocks:].any()
    return blocks


def check_meeting(target: str, device: str) -> None:
    kernel, y = lowbit.compile_program(meeting_program, target), torch.zeros(32, device=device)
    for launches in (1, 2):
        kernel(y=y)
        assert y.eq(launches).all()


def test_a_number_and_a_grid_that_depends_on_m() -> None:
    check_scaling(EMULATOR, "cpu")


def test_a_tensor_map_by_value() -> None:
    check_boxes(EMULATOR, "cpu")


def test_a_grid_that_depends_on_the_gpu() -> None:
    assert check_counting(EMULATOR, "cpu") == 2 * 4


def test_a_workspace() -> None:
    check_meeting(EMULATOR, "cpu")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    target = this_machine()
    check_scaling(target, "cuda")
    check_meeting(target, "cuda")
    assert check_counting(target, "cuda") == 2 * torch.cuda.get_device_properties(0).multi_processor_count
    if target == "sm_90a":
        check_boxes(target, "cuda")


@pytest.mark.gpu
def test_in_a_graph() -> None:
    kernel, (x, y) = scaling(this_machine()), numbers(33, "cuda")
    kernel(x=x, y=y, alpha=1.0, m=33)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x=x, y=y, alpha=2.0, m=33)
    x.fill_(4.0)
    graph.replay()
    assert y[:33].eq(8).all()


def test_its_signature_can_be_read() -> None:
    assert repr(scaling()) == "Kernel(scale(x: pointer, alpha: f32, y: pointer, m: i32); on emulator:sm_90a)"


def wrong_arguments() -> list[tuple[dict[str, Any], str]]:
    x, y = numbers(16, "cpu")
    shrunk = x.clone()
    shrunk.untyped_storage().resize_(8)
    return [
        ({"x": shrunk}, "scale: x has a storage of 8 bytes, but its shape and strides need"),
        ({"x": [1.0]}, "scale: x must be a torch tensor, not list"),
        ({"x": x.numpy()}, "scale: x must be a torch tensor, not ndarray"),
        ({"x": x.t()}, r"scale: x must be contiguous; use x.contiguous\(\)"),
        ({"y": y.flatten()[1:]}, r"scale: y must begin at a multiple of 16 bytes; use y.clone\(\)"),
        ({"m": 16.0}, "scale: m must be an int of 32 bits, not float 16.0"),
        ({"m": True}, "scale: m must be an int of 32 bits, not bool True"),
        ({"m": 1 << 31}, "scale: m must be an int of 32 bits, not int 2147483648"),
        ({"alpha": "1"}, "scale: alpha must be a number, not str"),
        ({"alpha": 1e300}, r"scale: alpha must be a number of f32, at most 3.4e38 .*, not float 1e\+300"),
        ({"alpha": -(10**400)}, "scale: alpha must be a number of f32"),
        ({"x": torch._neg_view(x)}, r"scale: x is a view that negates, .*; use x.resolve_neg\(\)"),
        ({"m": -16}, "kernel scale is called with a negative size"),
        ({"codes": x}, "kernel scale is called with codes; it takes x, alpha, y, m"),
        ({"x": x.to("meta")}, r"scale: x is on meta, but target emulator:sm_90a takes cpu tensors; use x.to\('cpu'\)"),
    ]


@pytest.mark.parametrize(("change", "message"), wrong_arguments())
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    x, y = numbers(16, "cpu")
    with pytest.raises(lowbit.LowbitError, match=message):
        scaling()(**{"x": x, "y": y, "alpha": 1.0, "m": 16, **change})


def test_a_tensor_map_of_what_is_no_tensor() -> None:
    x, y = numbers(16, "cpu")
    kernel = lowbit.load(compiled_boxes(EMULATOR))
    for wrong in (x, TensorMap(x.numpy(), "f32", (16, 32), (16, 32)), TensorMap(4096, "f32", (16, 32), (16, 32))):
        with pytest.raises(lowbit.SpecError, match="boxes: map must be a TensorMap of a torch tensor, not"):
            kernel(map=wrong, alpha=1.0, y=y, m=16)


@pytest.mark.gpu
def test_wrong_device() -> None:
    x, y = numbers(16, "cuda")
    with pytest.raises(lowbit.TargetError, match=r"scale: x is on cpu, but target sm_.* takes cuda tensors"):
        scaling(this_machine())(x=x.cpu(), y=y, alpha=1.0, m=16)


@pytest.mark.parametrize(("target", "given"), [("cpu", "target='cpu'"), (None, "target=None without a GPU")])
def test_no_program_for_a_cpu(target: str | None, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(lowbit.TargetError, match=f"{given}: tile programs are for GPUs; .* 'emulator:sm_90a'"):
        lowbit.compile_program(scaling_program, target)


@pytest.mark.parametrize(("short", "text"), [("x", "here = "), ("y", "there = ")])
def test_the_emulator_names_the_line_of_the_program(short: str, text: str) -> None:
    """Loads are written down where they are needed, and keep their line."""
    kernel = lowbit.compile_program(row_beyond_the_end, EMULATOR)
    rows = {name: torch.zeros(ROWS - (name == short), COLUMNS) for name in ("x", "y")}
    lines, first = inspect.getsourcelines(row_beyond_the_end)
    line = first + next(i for i, source in enumerate(lines) if text in source)
    with pytest.raises(lowbit.EmulatorError, match=rf"PTX line \d+ \({__file__}:{line}\): `ld.*out of bounds"):
        kernel(**rows, m=ROWS)


def test_lines_change_no_instruction() -> None:
    emulated, real = (lower_program(scaling_program, parse_target(t)) for t in (EMULATOR, "sm_90a"))
    assert ".loc" in emulated.ptx and ".loc" not in real.ptx
    assert [(i.text, i.guard) for i in _instructions(emulated.ptx)] == [
        (i.text, i.guard) for i in _instructions(real.ptx)
    ]


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_line_information_of_a_kernel(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of any target, from the program's own files: none of Python's or the builder's. Instructions are the same."""
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    artifacts = Artifacts(MatmulSpec(128, 512, "u4", 128), parse_target(target), None)
    plain = artifacts.kernel(256)
    monkeypatch.setenv("LOWBIT_LINEINFO", "1")  # and another entry of the cache
    marked = Artifacts(MatmulSpec(128, 512, "u4", 128), parse_target(target), None).kernel(256)
    files = re.findall(r'^\s*\.file\s+\d+ "([^"]+)"', marked.ptx, re.MULTILINE)
    assert files and all("/passes/kernels/" in file for file in files)
    assert ".loc" not in plain.ptx and plain.cubin and b"debug_line" not in plain.cubin
    assert marked.cubin and b"debug_line" in marked.cubin and Path(files[0]).name.encode() in marked.cubin
    texts = [[i.text for k in parse(a.ptx).kernels.values() for i in k.instructions] for a in (plain, marked)]
    assert texts[0] == texts[1]


def _instructions(ptx: str) -> list[Instruction]:
    return parse(ptx).kernels["scale"].instructions


# -- types of tensors


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("x", torch.float16), ("x", torch.float64), ("x", torch.int32), ("y", torch.int64), ("y", torch.bfloat16)],
)
def test_a_tensor_of_another_type(name: str, dtype: torch.dtype) -> None:
    x, y = numbers(16, "cpu")
    tensors = {"x": x, "y": y}
    tensors[name] = tensors[name].to(dtype)
    given = str(dtype).removeprefix("torch.")
    fix = rf"use {name}.to\(torch.float32\), or .view\(torch.float32\) of the same bytes"
    message = rf"scale: {name} must be float32, as the program sees it, not {given}; {fix}"
    with pytest.raises(lowbit.SpecError, match=message):
        scaling()(**tensors, alpha=1.0, m=16)


@pytest.mark.parametrize(
    ("element", "allowed"),
    [
        ("f16", {torch.float16}),
        ("bf16", {torch.bfloat16}),
        ("i32", {torch.int32, torch.uint32}),
        ("i8", {torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu}),
        ("f8E4M3FN", {torch.float8_e4m3fn, torch.uint8, torch.int8}),
        ("vector<4xi32>", {torch.int32, torch.uint32, torch.uint8, torch.int8}),
    ],
)
def test_types_by_element(element: str, allowed: set[torch.dtype]) -> None:
    p = Program("see", 32, (1, 1, 1), {"x": "pointer"})
    with p:
        p.global_view(p["x"], element, (4,))
    kernel = lowbit.compile_program(p, EMULATOR)
    for dtype in (*allowed, torch.float64, torch.int64, torch.float16, torch.float32):
        x = torch.zeros(64, dtype=torch.uint8).view(dtype)
        if dtype in allowed:
            kernel(x=x)
        else:
            with pytest.raises(lowbit.SpecError, match="see: x must be"):
                kernel(x=x)


def test_memory_that_is_seen_in_two_ways() -> None:
    p = Program("both", 32, (1, 1, 1), {"x": "pointer", "unused": "pointer"})
    with p:
        p.global_view(p["x"], "f16", (4,))
        p.global_view(p["x"], "i32", (2,))
    kernel, any_ = lowbit.compile_program(p, EMULATOR), torch.zeros(4, dtype=torch.int64)
    kernel(x=torch.zeros(4).half(), unused=any_)
    kernel(x=torch.zeros(4, dtype=torch.int32), unused=any_)
    with pytest.raises(lowbit.SpecError, match="both: x must be float16 or int32 or uint32, as the program sees it"):
        kernel(x=torch.zeros(4), unused=any_)


# -- inspection


def test_every_stage_can_be_read() -> None:
    kernel = scaling()
    assert list(kernel.stages) == ["lowbit", "tile", "gpu", "llvm", "ll", "ptx"]
    assert kernel.ptx == kernel.ir("ptx") == kernel.stages["ptx"] and ".entry scale(" in kernel.ptx
    assert "lowbit.load" in kernel.ir("tile") and "gpu.func" in kernel.ir("gpu")
    with pytest.raises(lowbit.SpecError, match=r"stage='cubin' must be one of 'lowbit', .*; machine code is in .cubin"):
        kernel.ir("cubin")
    with pytest.raises(lowbit.TargetError, match="target emulator:sm_90a has no cubin; compile for a GPU such as"):
        _ = kernel.cubin


def test_machine_code_without_a_gpu() -> None:
    assert scaling("sm_90a").cubin.startswith(b"\x7fELF")
