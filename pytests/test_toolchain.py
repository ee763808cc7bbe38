"""The toolchain end: MLIR bindings, targets, LLVM IR text across versions, PTX, cubins, host code."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from lowbit.dialect import bindings, ops
from lowbit.dialect.bindings import ir, new_context, passmanager
from lowbit.dialect.errors import PassError, TargetError
from lowbit.passes.codegen import cubin as cubin_module
from lowbit.passes.codegen.cubin import NvJitLink, Ptxas, assemble, assembler, emit_cubin, resource_usage
from lowbit.passes.codegen.elf import link
from lowbit.passes.codegen.host import emit_host, emit_host_assembly, host_cpu, host_features
from lowbit.passes.codegen.llvm import binding
from lowbit.passes.codegen.llvm_text import downgrade
from lowbit.passes.codegen.ptx import emit_ptx, external_functions, translate
from lowbit.passes.target import GPUS, parse_target, target_of_gpu
from lowbit.pylib.runtime.machine_code import MachineCode


@pytest.fixture
def context() -> Iterator[ir.Context]:
    with new_context() as context, ir.Location.unknown():
        yield context


# The bindings


def test_contexts_have_no_threads(context: ir.Context) -> None:
    assert context.get_num_threads() == 1


def _importer(broken: Callable[[str], bool]) -> Callable[[str], ModuleType]:
    def import_module(name: str) -> ModuleType:
        if broken(name):
            raise ImportError(f"No module named {name!r}")
        return ModuleType(name)

    return import_module


@pytest.mark.parametrize(
    ("broken", "package"),
    [(r"^$", "mlir"), (r"^mlir\.ir", "torch_mlir"), (r"^mlir\.dialects\.ext", "torch_mlir")],
)
def test_the_first_complete_package_serves(
    monkeypatch: pytest.MonkeyPatch, broken: str, package: str
) -> None:
    monkeypatch.setattr(bindings, "import_module", _importer(lambda name: bool(re.search(broken, name))))
    found, modules = bindings._load()
    assert found == package
    assert modules["nvvm"].__name__ == f"{package}.dialects.nvvm"
    assert modules["passmanager"].__name__ == f"{package}.passmanager"


def test_a_dialect_is_loaded_once_a_context(context: ir.Context) -> None:
    """And in any number of contexts, whichever version the bindings have."""
    for each in (context, new_context(), context):
        for _ in range(2):
            ops.register(each)
        with each, ir.Location.unknown():
            module = ir.Module.parse('"lowbit.commit"() : () -> ()')
            assert type(module.body.operations[0]) is ops.CommitOp


def test_bindings_of_llvm_23(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask for `reload` where another context has the dialect, and have no trait for isolation."""
    asked: list[bool] = []

    class Old:
        DIALECT_NAMESPACE = "of_llvm_23"

        @classmethod
        def load(cls, *, reload: bool = False) -> None:
            asked.append(reload)

    with new_context():
        bindings.load_dialect(Old)  # type: ignore[arg-type]
    assert asked == [True]


def test_missing_bindings_name_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "import_module", _importer(lambda _: True))
    with pytest.raises(TargetError, match=r"torch_mlir\.ir.*pip install 'torch-mlir>=\d+'; another wheel .*; LLVM"):
        bindings._load()


# Targets


@pytest.mark.parametrize(
    ("name", "shared_kb"),
    [("sm_80", 163), ("sm_86", 99), ("sm_87", 163), ("sm_89", 99), ("sm_90", 227), ("sm_90a", 227)]
    + [("sm_100", 227), ("sm_103", 227), ("sm_120", 99)],
)
def test_gpu_targets(name: str, shared_kb: int) -> None:
    target, emulated = parse_target(name), parse_target(f"emulator:{name}")
    assert (target.kind, target.arch, str(target)) == ("cuda", name, name)
    assert target.capability == int(name[3:].rstrip("a"))
    assert target.max_shared_per_block == shared_kb * 1024 == target.shared_per_sm - 1024
    assert (target.has_wgmma, target.runs_later) == (name == "sm_90a", name != "sm_90a")
    assert target.has_clusters == (name in ("sm_90", "sm_90a", "sm_100", "sm_103"))
    assert bool(target.hardware) == (name == "sm_90a")
    assert (emulated.kind, emulated.arch, emulated.features) == ("emulator", name, target.features)
    assert emulated.is_gpu
    assert parse_target(emulated.name) == emulated


@pytest.mark.parametrize(
    ("capability", "shared_kb", "target"),
    [(75, 64, None), (80, 163, "sm_80"), (88, 99, "sm_86"), (90, 227, "sm_90a"), (100, 227, "sm_100")]
    + [(103, 227, "sm_103"), (110, 227, "sm_103"), (120, 99, "sm_120"), (121, 99, "sm_120"), (130, 227, "sm_120")],
)
def test_target_of_a_gpu(capability: int, shared_kb: int, target: str | None) -> None:
    """Its own, or its nearest predecessor's whose kernels do not ask for more shared memory than there is."""
    found = target_of_gpu(capability, shared_kb * 1024)
    assert found == (target and parse_target(target))


def test_other_targets() -> None:
    assert parse_target("emulator") == parse_target("emulator:sm_80")
    assert not parse_target("cpu").is_gpu
    assert parse_target("sm_90a").features == "+ptx86"


@pytest.mark.parametrize(
    "name", ["", "cuda", "sm_75", "sm_90A", "sm_100a", "sm_101", "emulator:", "emulator:cpu", ":sm_80"]
)
def test_unknown_targets_list_the_known(name: str) -> None:
    with pytest.raises(TargetError, match=f"unknown target {name!r}; allowed: 'cpu', 'sm_80'.*'emulator'"):
        parse_target(name)


# LLVM IR text

UNSIGNED = {"half": np.uint16, "bfloat": np.uint16, "float": np.uint32, "double": np.uint64}
MLIR_TYPE = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64"}
MANTISSA = {"half": 10, "bfloat": 7, "float": 23, "double": 52}


def bit_patterns(kind: str) -> NDArray[np.unsignedinteger]:
    """16 bits: all that are positive, and some negative; wider types: every class, and random ones."""
    unsigned = UNSIGNED[kind]
    bits = 8 * unsigned().itemsize
    if bits == 16:
        return np.concatenate([np.arange(1 << 15), np.arange(1 << 15, 1 << 16, 31)]).astype(unsigned)
    random = np.random.default_rng(0).integers(0, 1 << bits, 1500, dtype=unsigned, endpoint=False)
    if bits == 32:
        decimals = np.float32([0.1, 1 / 3, 1e10, 1e-45, 1e-38, 3.4028235e38, 16777216.0, 123456.789])
    else:
        decimals = np.float64(
            [0.1, 1 / 3, 1e22, 1e23, 5e-324, 2.2250738585072011e-308, 1.7976931348623157e308]
        )
    one = np.array(1, unsigned)
    infinity = np.array(((1 << (bits - 1 - MANTISSA[kind])) - 1) << MANTISSA[kind], unsigned)
    quiet = one << unsigned(MANTISSA[kind] - 1)
    special = [
        0 * one,
        one,
        infinity,
        infinity | one,
        infinity | quiet,
        infinity | quiet | one,
        infinity - one,
    ]
    positive = np.array([*special, *decimals.view(unsigned)], unsigned)
    return np.concatenate([positive, positive | one << unsigned(bits - 1), random])


@pytest.mark.parametrize("kind", UNSIGNED)
def test_every_float_literal_keeps_its_bits(context: ir.Context, kind: str) -> None:
    """MLIR prints the constants, LLVM 22 reads them, and says which bits it read."""
    expected = bit_patterns(kind)
    size, element = len(expected), MLIR_TYPE[kind]
    module = ir.Module.parse(
        f'llvm.mlir.global constant @c(dense<"0x{expected.tobytes().hex()}"> : tensor<{size}x{element}>) : '
        f"!llvm.array<{size} x {element}>"
    )
    text = downgrade(translate(module))
    literals = re.findall(rf"{kind} ([^,\]]+)", text.split(f"[{size} x {kind}]", 1)[1].splitlines()[0])
    integer = f"i{8 * expected.itemsize}"
    globals_ = [
        f"@c{i} = constant {integer} bitcast ({kind} {x} to {integer})" for i, x in enumerate(literals)
    ]
    parsed = str(binding().parse_assembly("\n".join(globals_)))
    read = [int(x) for x in re.findall(rf"constant {integer} (-?\d+)", parsed)]
    signed = expected.view(expected.dtype.str.replace("u", "i"))
    assert read == signed.tolist()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  %5 = fadd float %0, 1.000000e-01", "  %5 = fadd float %0, 0x3FB99999A0000000"),
        ("  %9 = phi half [ %1, %2 ], [ -inf, %3 ]", "  %9 = phi half [ %1, %2 ], [ 0xHFC00, %3 ]"),
        ("ret <2 x half> splat (half 9.997550e-02)", "ret <2 x half> splat (half 0xH2E66)"),
        ("<half 1.0, bfloat 1.0>", "<half 0xH3C00, bfloat 0xR3F80>"),
        ("call void @f(float 1.5, double -0.0, i32 1)",)
        + ("call void @f(float 0x3FF8000000000000, double 0x8000000000000000, i32 1)",),
        ("float f0xD9C2825F", "float 0xC338504BE0000000"),
        ("float -snan(0x1), float +nan(0x1)", "float 0xFFF0000020000000, float 0x7FF8000020000000"),
        # halfway between two floats and then a little: rounding to double first would lose the little
        ("float 1.00000005960464477540", "float 0x3FF0000020000000"),
        ("float 1.00000005960464477539", "float 0x3FF0000000000000"),
        ("half 65520.0, half 65519.9", "half 0xH7C00, half 0xH7BFF"),
        # not literals
        ('call float asm "add.f32 $0, 0.5 \\22 half 0.1; // float 0.3", "=f"()',) * 2,
        ("  %float = load float, ptr @half.0.5, align 4 ; float 0.5",) * 2,
        ("%x.1.5 = add i32 %float.2.5, 1",) * 2,
        ('!0 = !{!"float 0.5", i32 7}',) * 2,
        # attributes
        ("attributes #0 = { noipa nooutline nounwind flatten }", "attributes #0 = { nounwind }"),
        ("define void @f(ptr dead_on_return(8) noalias %flatten)", "define void @f(ptr noalias %flatten)"),
        ('attributes #1 = { "noipa" }',) * 2,
        (
            "denormal_fpenv(preservesign|ieee, float: positivezero)",
            '"denormal-fp-math"="preserve-sign,ieee" "denormal-fp-math-f32"="positive-zero,positive-zero"',
        ),
    ],
)
def test_downgrade_of_one_line(before: str, after: str) -> None:
    assert downgrade(before) == after
    assert downgrade(after) == after


@pytest.mark.parametrize("line", ["ret fp128 1.500000e+00", "ret half f0x3C00, x86_fp80 2.0"])
def test_unknown_literal_types_are_an_error(line: str) -> None:
    with pytest.raises(PassError, match="fp"):
        downgrade(line)


# LLVM dialect to LLVM IR


def parse(body: str, arguments: str = "%i: i32, %p: !llvm.ptr<3>, %g: !llvm.ptr<1>") -> ir.Module:
    return ir.Module.parse(f"llvm.func @k({arguments}) attributes {{nvvm.kernel}} {{\n{body}\nllvm.return }}")


@pytest.mark.parametrize(
    ("body", "name", "hint"),
    [
        ("%0 = arith.addi %i, %i : i32", "arith.addi", "llvm dialect"),
        ("cf.br ^b\n^b:", "cf.br", "llvm dialect"),
        ("%0 = gpu.thread_id x", "gpu.thread_id", "llvm dialect"),
        (
            "%0 = builtin.unrealized_conversion_cast %i : i32 to index",
            "builtin.unrealized_con",
            "llvm dialect",
        ),
        ('"no.such"() : () -> ()', "no.such", "llvm dialect"),
        ('nvvm.inline_ptx "bar.sync 0;"', "nvvm.inline_ptx", "convert-nvvm-to-llvm"),
        ("nvvm.mbarrier.try_wait.parity %p, %i, %i : !llvm.ptr<3>, i32, i32",)
        + ("nvvm.mbarrier.try_wait.parity", "convert-nvvm-to-llvm"),
    ],
)
def test_what_has_no_translation_is_named(context: ir.Context, body: str, name: str, hint: str) -> None:
    """Each of these would end the process inside the bindings."""
    context.allow_unregistered_dialects = True
    with pytest.raises(PassError, match=f"(?s)^{name}.*{hint}.*at loc"):
        translate(parse(body))


def test_a_module_that_does_not_verify_is_an_error(context: ir.Context) -> None:
    module = parse("%0 = llvm.add %i, %i : i32")
    block = module.body.operations[0].regions[0].blocks[0]
    with ir.InsertionPoint(block.operations[0]):
        ir.Operation.create("llvm.add", results=[ir.Type.parse("i64")], operands=list(block.arguments)[:1])
    with pytest.raises(PassError, match=r"(?s)does not verify.*llvm\.add"):
        translate(module)


def test_translate_takes_the_device_code(context: ir.Context) -> None:
    kernel = "llvm.func @{0}() attributes {{nvvm.kernel}} {{ llvm.return }}"
    one = f"gpu.module @m {{ {kernel.format('inner')} }}"
    assert "define ptx_kernel void @inner()" in translate(ir.Module.parse(one))
    with pytest.raises(PassError, match=r"2 gpu.module"):
        translate(ir.Module.parse(one + one.replace("@m", "@m2")))


# PTX

SCALE = """
define ptx_kernel void @scale(ptr addrspace(1) %x, ptr addrspace(1) %y, i32 %n) {
entry:
  br label %loop
loop:
  %i = phi i32 [ 0, %entry ], [ %next, %loop ]
  %from = getelementptr float, ptr addrspace(1) %x, i32 %i
  %value = load float, ptr addrspace(1) %from
  %scaled = fmul float %value, 1.000000e-01
  %to = getelementptr float, ptr addrspace(1) %y, i32 %i
  store float %scaled, ptr addrspace(1) %to
  %next = add i32 %i, 1
  %more = icmp slt i32 %next, %n
  br i1 %more, label %loop, label %exit UNROLL
exit:
  ret void
}
!0 = distinct !{!0, !1}
!1 = !{!"llvm.loop.unroll.count", i32 4}
"""
PLAIN = SCALE.replace("UNROLL", "")


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
        "import sys; from lowbit.passes.codegen.ptx import emit_ptx; from passes.target import parse_target\n"
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


# Cubins

SHARED = """
.version 8.0
.target sm_80
.address_size 64
.shared .align 16 .b8 whole[2048];
.visible .entry first(.param .u64 p) {
  .reg .b32 %r<3>; .reg .b64 %d<3>;
  .shared .align 4 .b8 own[512];
  ld.param.u64 %d1, [p];
  cvta.to.global.u64 %d2, %d1;
  ld.global.u32 %r1, [%d2];
  st.shared.u32 [own], %r1;
  st.shared.u32 [whole+4], %r1;
  bar.sync 0;
  ld.shared.u32 %r1, [own+8];
  ld.shared.u32 %r2, [whole+16];
  add.u32 %r1, %r1, %r2;
  st.global.u32 [%d2], %r1;
  ret;
}
.visible .entry second() { ret; }
"""


def installed_assemblers() -> list[NvJitLink | Ptxas]:
    ptxas = shutil.which("ptxas") or next(cubin_module._wheel_files("bin/ptxas"), None)
    found = [Ptxas(str(ptxas))] if ptxas else []
    best = assembler()
    return [best, *found] if isinstance(best, NvJitLink) else [*found]


@pytest.mark.parametrize("one", installed_assemblers(), ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_103", "sm_120"])
def test_resources(monkeypatch: pytest.MonkeyPatch, one: NvJitLink | Ptxas, arch: str) -> None:
    monkeypatch.setattr(cubin_module, "assembler", lambda: one)
    target, ptx = parse_target(arch), SHARED.replace("sm_80", arch).replace(".version 8.0", ".version 8.8")
    cubin = assemble(ptx, target)
    assert cubin.image[:4] == b"\x7fELF"
    used = cubin.resources
    assert used.shared == 2048 + 512
    assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0)
    assert 4 <= used.registers <= 32
    assert emit_cubin(ptx, target) == cubin.image
    assert resource_usage(ptx, target) == used
    assert one.version


@pytest.mark.parametrize("one", installed_assemblers(), ids=lambda one: type(one).__name__)
def test_spills_are_reported(monkeypatch: pytest.MonkeyPatch, one: NvJitLink | Ptxas) -> None:
    monkeypatch.setattr(cubin_module, "assembler", lambda: one)
    n = 64
    loads = "\n".join(f"ld.volatile.global.f32 %f{i}, [%d1+{4 * i}];" for i in range(n))
    stores = "\n".join(f"st.volatile.global.f32 [%d1+{4 * i}], %f{n - 1 - i};" for i in range(n))
    ptx = (
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p) .maxnreg 24 {\n"
        f".reg .f32 %f<{n}>; .reg .b64 %d<2>;\nld.param.u64 %d1, [p];\n{loads}\n{stores}\nret;\n}}\n"
    )
    target = parse_target("sm_80")
    tight, free = resource_usage(ptx, target), resource_usage(ptx.replace(".maxnreg 24", ""), target)
    assert tight.registers <= 24
    assert tight.spill_stores >= 4 * 40 <= tight.spill_loads
    assert tight.stack >= 4 * 40
    assert free.registers >= 64
    assert (free.spill_stores, free.spill_loads, free.stack) == (0, 0, 0)


@pytest.mark.parametrize("one", installed_assemblers(), ids=lambda one: type(one).__name__)
def test_assembler_errors_show_the_line(monkeypatch: pytest.MonkeyPatch, one: NvJitLink | Ptxas) -> None:
    monkeypatch.setattr(cubin_module, "assembler", lambda: one)
    wrong = SHARED.replace("add.u32 %r1, %r1, %r2;", "add.u31 %r1, %r1, %r2;")
    number = wrong.splitlines().index("  add.u31 %r1, %r1, %r2;") + 1
    with pytest.raises(
        PassError, match=rf"refuses the PTX:\nline {number}: .*u31.*\n    add\.u31 %r1, %r1, %r2;"
    ):
        emit_cubin(wrong, parse_target("sm_80"))
    with pytest.raises(PassError, match=r"(?s)refuses the PTX.*SM version"):
        emit_cubin(SHARED.replace("sm_80", "sm_90"), parse_target("sm_80"))
    assert emit_cubin(SHARED, parse_target("sm_80")), "an error leaves nothing behind"


def test_ptx_of_llvm_assembles_for_every_gpu() -> None:
    for target in GPUS:
        assert resource_usage(emit_ptx(PLAIN, target), target).registers > 0


def test_nvjitlink_says_what_it_can_not_do() -> None:
    """Its words for an architecture that it does not know, and its log for PTX without a line that is wrong."""
    if not isinstance(link := assembler(), NvJitLink):
        pytest.skip("nvJitLink is not here")
    with pytest.raises(TargetError, match=r"nvJitLink \d+\.\d+ takes no sm_333 \(.*ARCH.*\); install a newer"):
        link.run(SHARED, "sm_333")
    with pytest.raises(PassError, match=r"(?s)refuses the PTX:\n.*SM version"):
        link.run(SHARED.replace("sm_80", "sm_90"), "sm_80")


def _raise(fault: Exception) -> None:
    raise fault


def test_a_missing_assembler_names_the_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin_module, "find_spec", lambda _: None)
    monkeypatch.setattr(cubin_module.shutil, "which", lambda _: None)
    for fault in (ImportError("no cuda.bindings"), RuntimeError("no libnvJitLink")):
        monkeypatch.setattr(cubin_module, "import_module", lambda _, fault=fault: _raise(fault))
        with pytest.raises(TargetError, match="pip install cuda-bindings nvidia-nvjitlink"):
            assembler.__wrapped__()
    with pytest.raises(TargetError, match="no cubin for target cpu"):
        emit_cubin(SHARED, parse_target("cpu"))


def test_a_missing_llvmlite_names_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    with pytest.raises(TargetError, match=r"pip install 'llvmlite>=0\.48'"):
        binding.__wrapped__()


# The host

AXPY = """
define void @axpy(float %a, ptr noalias %x, ptr noalias %y, i64 %n) {
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %px = getelementptr float, ptr %x, i64 %i
  %py = getelementptr float, ptr %y, i64 %i
  %vx = load float, ptr %px
  %vy = load float, ptr %py
  %ax = fmul float %a, %vx
  %sum = fadd float %ax, %vy
  %more = fadd float %sum, 1.000000e-01
  store float %more, ptr %py
  %next = add i64 %i, 1
  %again = icmp ult i64 %next, %n
  br i1 %again, label %loop, label %exit
exit:
  ret void
}
define i32 @answer() {
  ret i32 ANSWER
}
"""


class Loaded:
    """A module compiled and loaded."""

    def __init__(self, llvm_ir: str, functions: list[str], cpu: str = "") -> None:
        image = emit_host(llvm_ir, functions, cpu)
        assert sorted(image.functions) == sorted(functions)
        self._offsets, self._code = image.functions, MachineCode(image.code)

    def address(self, function: str) -> int:
        return self._code.address + self._offsets[function]


def compile_axpy(answer: int = 42, cpu: str = "") -> Loaded:
    return Loaded(AXPY.replace("ANSWER", str(answer)), ["axpy", "answer"], cpu)


@pytest.mark.parametrize("cpu", ["", "x86-64-v3", "x86-64"])
def test_host_code_computes(cpu: str) -> None:
    if cpu == "x86-64-v3" and not {"avx2", "fma", "bmi2", "f16c"} <= host_features():
        pytest.skip("no AVX2 here")
    module = compile_axpy(cpu=cpu)
    function = ctypes.CFUNCTYPE(None, ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    generator = np.random.default_rng(1)
    x, y = generator.standard_normal((2, 1001)).astype(np.float32)
    expected = np.float32(1.5) * x + y + np.float32(0.1)
    function(module.address("axpy"))(1.5, x.ctypes.data, y.ctypes.data, len(x))
    np.testing.assert_array_equal(y, expected)


def test_host_code_is_for_its_processor(context: ir.Context) -> None:
    """Vectors of 16 are cut into what the processor has."""
    vectors = """define void @f(ptr %a) {
      %x = load <16 x float>, ptr %a
      %y = fadd <16 x float> %x, %x
      store <16 x float> %y, ptr %a
      ret void
    }"""
    for cpu, registers in (("x86-64-v3", "ymm"), ("x86-64", "xmm")):
        assert set(re.findall(r"%(.mm)", emit_host_assembly(vectors, cpu))) == {registers}


def test_host_code_calls_nobody() -> None:
    with pytest.raises(PassError, match="refers to exit, which it does not hold"):
        emit_host("declare void @exit(i32)\ndefine void @f() { call void @exit(i32 1) ret void }", ["f"])
    with pytest.raises(PassError, match="relocation 42; allowed: R_X86_64_PC32"):
        emit_host("@a = global ptr @b\n@b = global i32 1\ndefine ptr @f() { ret ptr @a }", ["f"])
    with pytest.raises(PassError, match="no little-endian 64-bit ELF"):
        link(b"MZ" + bytes(100))


def test_host_modules_live_apart() -> None:
    call = ctypes.CFUNCTYPE(ctypes.c_int32)
    first, second = compile_axpy(1), compile_axpy(2)
    assert call(first.address("answer"))() == 1
    del first
    third = compile_axpy(3)
    assert [call(m.address("answer"))() for m in (second, third)] == [2, 3]


def test_host_errors() -> None:
    with pytest.raises(PassError, match="no function missing in the module; it has answer, axpy"):
        emit_host(AXPY.replace("ANSWER", "1"), ["answer", "missing"])
    with pytest.raises(TargetError, match=f"unknown cpu 'z80'; allowed: .*x86-64-v3.*{host_cpu()}"):
        compile_axpy(cpu="z80")
    if not {"avx512f", "avx512vl"} & host_features():
        with pytest.raises(TargetError, match=r"'x86-64-v4' needs avx512bw.* lacks"):
            compile_axpy(cpu="x86-64-v4")


def test_mlir_to_host(context: ir.Context) -> None:
    module = ir.Module.parse(
        """func.func @f(%x: f32) -> f32 {
          %c = arith.constant 0.1 : f32
          %y = arith.mulf %x, %c : f32
          return %y : f32
        }"""
    )
    passmanager.PassManager.parse("builtin.module(convert-arith-to-llvm,convert-func-to-llvm)").run(
        module.operation
    )
    compiled = Loaded(translate(module), ["f"])
    f = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_float)(compiled.address("f"))
    assert f(3.0) == np.float32(3.0) * np.float32(0.1)
