"""Machine code for this processor."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lowbit.dialect.bindings import ir, passmanager
from lowbit.dialect.errors import PassError, TargetError
from lowbit.passes.codegen.host import emit_host, emit_host_assembly, host_cpu, host_features
from lowbit.passes.codegen.ptx import translate
from lowbit.pylib.runtime.machine_code import load

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
        code = emit_host(llvm_ir, functions, cpu)
        self._functions = {name: load(code, name) for name in functions}

    def address(self, function: str) -> int:
        address = ctypes.cast(self._functions[function], ctypes.c_void_p).value  # type: ignore[arg-type]
        assert address is not None
        return address


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
    with pytest.raises(PassError, match="calls exit, which it does not define; it has f"):
        emit_host("declare void @exit(i32)\ndefine void @f() { call void @exit(i32 1) ret void }", ["f"])


def test_host_code_that_cannot_be_loaded() -> None:
    with pytest.raises(TargetError, match=r"machine code for this CPU can't be loaded \(.*\); the CPU target needs"):
        load(b"MZ" + bytes(100), "f")
    with pytest.raises(TargetError, match=r"can't be loaded .*missing"):
        load(emit_host(AXPY.replace("ANSWER", "1"), ["answer"]), "missing")


def test_host_code_has_constants_and_addresses() -> None:
    llvm_ir = "@a = global ptr @b\n@b = global i32 7\ndefine ptr @f() { %b = load ptr, ptr @a ret ptr %b }"
    module = Loaded(llvm_ir, ["f"])
    assert ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_int32))(module.address("f"))()[0] == 7


def test_the_memory_of_host_code_is_given_back() -> None:
    """A thousand programs of a page or more would be several megabytes."""
    code = emit_host(AXPY.replace("ANSWER", "1"), ["answer"])

    def pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    for _ in range(100):
        load(code, "answer")
    before = pages()
    for _ in range(1000):
        load(code, "answer")
    assert pages() - before < 500


HOLES = """
import ctypes, mmap
import lowbit

libc = ctypes.CDLL(None)
libc.mmap.restype, libc.munmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
PAGE, SIZE, NO_RESERVE = mmap.PAGESIZE, 3 << 30, 0x4000


def take(size):
    return libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE, -1, 0)


lowbit.compile(lowbit.MatmulSpec(64, 64, "u4", group_size=64), "cpu")
block = take(SIZE)
for size in (512 * PAGE, 64 * PAGE, 8 * PAGE, 2 * PAGE):
    while take(size) > block:
        pass
for page in range(1, 64, 2):
    libc.munmap(block + SIZE - page * PAGE, PAGE)
mm = lowbit.compile(lowbit.MatmulSpec(256, 256, "u3", group_size=64), "cpu")
"""


def test_constants_are_within_reach() -> None:
    """Instructions reach 2 GiB. Where the highest free memory is single pages, and all else is 3 GiB below, a linker
    that places each section by itself puts constants of a page there, and instructions of two pages elsewhere."""
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
    passmanager.PassManager.parse("builtin.module(convert-arith-to-llvm,convert-func-to-llvm)").run(module.operation)
    compiled = Loaded(translate(module), ["f"])
    f = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_float)(compiled.address("f"))
    assert f(3.0) == np.float32(3.0) * np.float32(0.1)
