"""PTX that LLVM writes: random programs against the same IR run on the CPU, and whole kernels."""

from __future__ import annotations

import ctypes
import random
import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from lowbit.pylib.emulator import Emulator

binding = pytest.importorskip("llvmlite.binding")

RNG = np.random.default_rng(7)


@cache
def nvptx(level: int) -> Any:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("nvptx64-nvidia-cuda")
    return target.create_target_machine(cpu="sm_90a", features="+ptx86", opt=level)


def optimized(ir: str, target: Any, level: int) -> Any:
    module = binding.parse_assembly(ir)
    module.triple, module.data_layout = target.triple, str(target.target_data)
    module.verify()
    passes = binding.create_pass_builder(target, binding.create_pipeline_tuning_options(speed_level=level))
    passes.getModulePassManager().run(module, passes)
    return module


def to_ptx(ir: str, level: int = 3) -> str:
    return nvptx(level).emit_assembly(optimized(ir, nvptx(level), level))


def on_this_machine(ir: str, rows: list[tuple[int, ...]]) -> list[int]:
    """Results of `i64 f(i32, i32, i64, i64)`."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine(opt=0)
    module = optimized(ir, target, 0)
    with binding.create_mcjit_compiler(module, target) as engine:  # owns the target machine from now on
        engine.finalize_object()
        words = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
        function = ctypes.CFUNCTYPE(ctypes.c_uint64, *words)(engine.get_function_address("f"))
        return [function(*row) for row in rows]


def launch(ir: str, args: list[Any], *, level: int = 3, **options: Any) -> Emulator:
    emulator = Emulator(to_ptx(ir, level))
    emulator.launch("k", args=args, **options)
    return emulator


class Program:
    """A random function i64 f(i32, i32, i64, i64), which LLVM turns into bfe, prmt, shf, mad, ..."""

    def __init__(self, seed: int, size: int = 30) -> None:
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self.values: dict[int, list[str]] = {32: ["%a", "%b"], 64: ["%c", "%d"], 1: []}
        for _ in range(size):
            self.step()
        total = "%d"
        for value in self.values[64][2:] + [self.define(f"zext i32 {v} to i64", 64) for v in self.values[32][2:]]:
            total = self.define(f"add i64 {total}, {value}", 64)
            total = self.define(f"mul i64 {total}, 6364136223846793005", 64)  # every value counts
        body = "\n".join(self.lines)
        functions = sorted(set(re.findall(r"call (\w+) (@[\w.]+)\(([^)]*)\)", body)))
        declared = {name: f"declare {kind} {name}({types(args)})" for kind, name, args in functions}
        self.ir = "\n".join(declared.values()) + "\n{define} {{\n" + body + "\n{end}\n}}"
        self.result = total

    def define(self, text: str, bits: int) -> str:
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.values[bits].append(name)
        return name

    def pick(self, bits: int) -> str:
        if self.rng.random() < 0.25:
            return str(self.rng.choice([1, 3, 15, 255, 0xF0F0F0F, -1, self.rng.getrandbits(bits - 1)]))
        return self.rng.choice(self.values[bits])

    def step(self) -> None:
        bits = self.rng.choice([32, 32, 64])
        kind = f"i{bits}"
        x, y, z = (self.pick(bits) for _ in range(3))
        amount = self.rng.randrange(bits)
        other = 96 - bits
        choice = self.rng.randrange(12)
        if choice < 4:
            self.define(f"{self.rng.choice(['add', 'sub', 'mul', 'and', 'or', 'xor'])} {kind} {x}, {y}", bits)
        elif choice == 4:
            self.define(f"{self.rng.choice(['shl', 'lshr', 'ashr'])} {kind} {x}, {amount}", bits)
        elif choice == 5:
            safe = self.define(f"or {kind} {y}, 1", bits)
            positive = self.define(f"lshr {kind} {safe}, 1", bits)
            odd = self.define(f"or {kind} {positive}, 1", bits)
            self.define(f"{self.rng.choice(['udiv', 'urem', 'sdiv', 'srem'])} {kind} {x}, {odd}", bits)
        elif choice == 6:
            name = self.rng.choice(["fshl", "fshr"])
            self.define(f"call {kind} @llvm.{name}.{kind}({kind} {x}, {kind} {y}, {kind} {z})", bits)
        elif choice == 7:
            name = self.rng.choice(["ctpop", "bswap", "bitreverse"])
            self.define(f"call {kind} @llvm.{name}.{kind}({kind} {x})", bits)
        elif choice == 8:
            name = self.rng.choice(["smin", "smax", "umin", "umax"])
            self.define(f"call {kind} @llvm.{name}.{kind}({kind} {x}, {kind} {y})", bits)
        elif choice == 9:
            test = self.rng.choice(["eq", "ne", "slt", "ule", "sgt", "uge"])
            condition = self.define(f"icmp {test} {kind} {x}, {y}", 1)
            self.define(f"select i1 {condition}, {kind} {y}, {kind} {z}", bits)
        elif choice == 10:
            cast = "trunc" if bits == 64 else self.rng.choice(["zext", "sext"])
            self.define(f"{cast} {kind} {self.rng.choice(self.values[bits])} to i{other}", other)
        else:
            narrow = self.rng.choice([8, 16])
            small = f"%n{len(self.lines)}"
            self.lines.append(f"{small} = trunc {kind} {self.rng.choice(self.values[bits])} to i{narrow}")
            self.define(f"{self.rng.choice(['zext', 'sext'])} i{narrow} {small} to {kind}", bits)


def types(args: str) -> str:
    return ", ".join(part.split()[0] for part in args.split(","))


KERNEL_HEAD = """declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
define ptx_kernel void @k(ptr addrspace(1) %pa, ptr addrspace(1) %pb, ptr addrspace(1) %pc,
                          ptr addrspace(1) %pd, ptr addrspace(1) %out)"""
KERNEL_LOADS = "%tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()\n" + "\n".join(
    f"%g{n} = getelementptr {kind}, ptr addrspace(1) %p{n}, i32 %tid\n%{n} = load {kind}, ptr addrspace(1) %g{n}"
    for n, kind in (("a", "i32"), ("b", "i32"), ("c", "i64"), ("d", "i64"))
)


@pytest.mark.parametrize("seed", range(24))
def test_random_integer_program(seed: int) -> None:
    """The same IR through NVPTX and the emulator, and through this machine's own back end."""
    program = Program(seed)
    edges = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
    a, b = (np.array(edges + RNG.integers(0, 2**32, 59).tolist(), np.uint32)[RNG.permutation(64)] for _ in range(2))
    c, d = (RNG.integers(0, 2**64, 64, dtype=np.uint64) for _ in range(2))
    out = np.zeros(64, np.uint64)
    store = "%go = getelementptr i64, ptr addrspace(1) %out, i32 %tid\n"
    store += f"store i64 {program.result}, ptr addrspace(1) %go"
    head = KERNEL_HEAD.replace("{", "{{")
    kernel = program.ir.format(define=head, end=store + "\nret void").replace("{\n", "{\n" + KERNEL_LOADS + "\n", 1)
    launch(kernel, [a, b, c, d, out], block=64, level=seed % 2 * 3)

    function = program.ir.format(
        define="define i64 @f(i32 %a, i32 %b, i64 %c, i64 %d)", end=f"ret i64 {program.result}"
    )
    expected = on_this_machine(function, list(zip(a.tolist(), b.tolist(), c.tolist(), d.tolist())))
    np.testing.assert_array_equal(out, np.array(expected, np.uint64))


REDUCTION = """
@partial = internal addrspace(3) global [32 x float] undef, align 4
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
declare void @llvm.nvvm.barrier.cta.sync.aligned.all(i32)
declare float @llvm.nvvm.shfl.sync.bfly.f32(i32, float, i32, i32)
define ptx_kernel void @k(ptr addrspace(1) noalias readonly %x, ptr addrspace(1) %y, i32 %n) {
entry:
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %row = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %threads = call i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
  %start = mul i32 %row, %n
  %any = icmp slt i32 %tid, %n
  br i1 %any, label %loop, label %joined
loop:
  %i = phi i32 [ %tid, %entry ], [ %next, %loop ]
  %sum = phi float [ 0.0, %entry ], [ %more, %loop ]
  %at = add i32 %start, %i
  %p = getelementptr float, ptr addrspace(1) %x, i32 %at
  %v = load float, ptr addrspace(1) %p
  %more = fadd float %sum, %v
  %next = add i32 %i, %threads
  %again = icmp slt i32 %next, %n
  br i1 %again, label %loop, label %joined
joined:
  %mine = phi float [ 0.0, %entry ], [ %more, %loop ]
  %s16 = call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float %mine, i32 16, i32 31)
  %t16 = fadd float %mine, %s16
  %s8 = call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float %t16, i32 8, i32 31)
  %t8 = fadd float %t16, %s8
  %s4 = call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float %t8, i32 4, i32 31)
  %t4 = fadd float %t8, %s4
  %s2 = call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float %t4, i32 2, i32 31)
  %t2 = fadd float %t4, %s2
  %s1 = call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float %t2, i32 1, i32 31)
  %t1 = fadd float %t2, %s1
  %warp = lshr i32 %tid, 5
  %lane = and i32 %tid, 31
  %first = icmp eq i32 %lane, 0
  br i1 %first, label %put, label %wait
put:
  %slot = getelementptr [32 x float], ptr addrspace(3) @partial, i32 0, i32 %warp
  store float %t1, ptr addrspace(3) %slot
  br label %wait
wait:
  call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)
  %zero = icmp eq i32 %tid, 0
  br i1 %zero, label %final, label %done
final:
  %warps = lshr i32 %threads, 5
  br label %fold
fold:
  %w = phi i32 [ 0, %final ], [ %w1, %fold ]
  %acc = phi float [ 0.0, %final ], [ %acc1, %fold ]
  %from = getelementptr [32 x float], ptr addrspace(3) @partial, i32 0, i32 %w
  %part = load float, ptr addrspace(3) %from
  %acc1 = fadd float %acc, %part
  %w1 = add i32 %w, 1
  %rest = icmp ult i32 %w1, %warps
  br i1 %rest, label %fold, label %write
write:
  %py = getelementptr float, ptr addrspace(1) %y, i32 %row
  store float %acc1, ptr addrspace(1) %py
  br label %done
done:
  ret void
}
"""


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("columns", [5, 300])
def test_row_sums(level: int, columns: int) -> None:
    """Loops of different length per thread, shuffles, shared memory and a barrier; without it, a race."""
    x, y = RNG.integers(-99, 99, (3, columns)).astype(np.float32), np.zeros(3, np.float32)
    launch(REDUCTION, [x, y, columns], grid=3, block=96, level=level, racecheck=True)
    np.testing.assert_array_equal(y, x.sum(axis=1))
    with pytest.raises(ValueError, match=r"never written|race"):
        text = re.sub(r"\s+call void @llvm.nvvm.barrier[^\n]*", "", REDUCTION)
        launch(text, [x, y, columns], grid=3, block=96, level=level, racecheck=True)


VECTOR_HALVES = """
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare <8 x half> @llvm.fma.v8f16(<8 x half>, <8 x half>, <8 x half>)
define ptx_kernel void @k(ptr addrspace(1) noalias readonly align 16 %x, ptr addrspace(1) noalias align 16 %y,
                          half %s, ptr addrspace(1) noalias align 32 %z) {
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %px = getelementptr <8 x half>, ptr addrspace(1) %x, i32 %tid
  %py = getelementptr <8 x half>, ptr addrspace(1) %y, i32 %tid
  %pz = getelementptr <8 x float>, ptr addrspace(1) %z, i32 %tid
  %a = load <8 x half>, ptr addrspace(1) %px, align 16
  %b = load <8 x half>, ptr addrspace(1) %py, align 16
  %one = insertelement <8 x half> undef, half %s, i32 0
  %all = shufflevector <8 x half> %one, <8 x half> undef, <8 x i32> zeroinitializer
  %r = call <8 x half> @llvm.fma.v8f16(<8 x half> %a, <8 x half> %all, <8 x half> %b)
  %back = shufflevector <8 x half> %r, <8 x half> undef,
                        <8 x i32> <i32 7, i32 6, i32 5, i32 4, i32 3, i32 2, i32 1, i32 0>
  store <8 x half> %back, ptr addrspace(1) %py, align 16
  %wide = fpext <8 x half> %r to <8 x float>
  %third = fdiv <8 x float> %wide, splat (float 3.0)
  store <8 x float> %third, ptr addrspace(1) %pz, align 32
  ret void
}
"""


@pytest.mark.parametrize("level", [0, 3])
def test_vectors_of_halves(level: int) -> None:
    x, y = RNG.standard_normal((2, 32, 8)).astype(np.float16)
    z, s = np.zeros((32, 8), np.float32), np.float16(1.25)
    exact = (x.astype(float) * float(s) + y).astype(np.float16)
    emulator = launch(VECTOR_HALVES, [x, y, s, z], block=32, level=level)
    np.testing.assert_array_equal(y, exact[:, ::-1])
    np.testing.assert_array_equal(z, exact.astype(np.float32) / np.float32(3))
    assert emulator.stats.total_of("fma.rn.f16x2") == 4
    assert emulator.stats.global_bytes_loaded == 2 * x.nbytes


TABLE = """
@codebook = internal addrspace(4) constant [8 x i16]
  [i16 3, i16 1, i16 4, i16 -1, i16 5, i16 -9, i16 2, i16 6]
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
define ptx_kernel void @k(ptr addrspace(1) %codes, ptr addrspace(1) %out, ptr addrspace(1) %count) {
entry:
  %stack = alloca [8 x i32], align 4
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %p = getelementptr i8, ptr addrspace(1) %codes, i32 %tid
  %c8 = load i8, ptr addrspace(1) %p
  %c = zext i8 %c8 to i32
  br label %fill
fill:
  %i = phi i32 [ 0, %entry ], [ %i1, %fill ]
  %entryp = getelementptr [8 x i16], ptr addrspace(4) @codebook, i32 0, i32 %i
  %e = load i16, ptr addrspace(4) %entryp
  %w = sext i16 %e to i32
  %m = mul i32 %w, %tid
  %slot = getelementptr [8 x i32], ptr %stack, i32 0, i32 %i
  store i32 %m, ptr %slot
  %i1 = add i32 %i, 1
  %more = icmp ult i32 %i1, 8
  br i1 %more, label %fill, label %look
look:
  %which = getelementptr [8 x i32], ptr %stack, i32 0, i32 %c
  %v = load i32, ptr %which
  %po = getelementptr i32, ptr addrspace(1) %out, i32 %tid
  store i32 %v, ptr addrspace(1) %po
  %pn = getelementptr i32, ptr addrspace(1) %count, i32 %c
  %old = atomicrmw add ptr addrspace(1) %pn, i32 1 syncscope("device") monotonic
  switch i32 %c, label %end [ i32 2, label %two
                              i32 3, label %three
                              i32 4, label %end
                              i32 5, label %five
                              i32 6, label %three ]
two:
  store volatile i32 22, ptr addrspace(1) %po
  br label %end
three:
  store volatile i32 33, ptr addrspace(1) %po
  br label %end
five:
  store volatile i32 55, ptr addrspace(1) %po
  br label %end
end:
  ret void
}
"""


@pytest.mark.parametrize("level", [0, 3])
def test_tables_and_stacks(level: int) -> None:
    """Constant and local memory with run-time indices, atomics, a switch by jump table."""
    codes, out, count = (
        RNG.integers(0, 8, 64).astype(np.uint8),
        np.zeros(64, np.int32),
        np.zeros(8, np.uint32),
    )
    emulator = launch(TABLE, [codes, out, count], block=64, level=level)
    assert level or emulator.stats["brx.idx"]
    table = np.array([3, 1, 4, -1, 5, -9, 2, 6])
    expected = np.select(
        [codes == 2, (codes == 3) | (codes == 6), codes == 5], [22, 33, 55], table[codes] * np.arange(64)
    )
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(count, np.bincount(codes, minlength=8))


def warpgroup_kernel() -> str:
    """y [64, 16] = A [64, k] B [16, k]^T with k split over the two blocks of a cluster, A from registers."""
    many, eight = ", ".join(["float"] * 8), range(8)
    asm = (
        "{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
        + ", ".join(f"${i}" for i in eight)
        + "}, {$16, $17, $18, $19}, $20, p, 1, 1, 0; }"
    )
    constraints = ",".join(["=f"] * 8 + [str(i) for i in eight] + ["r"] * 4 + ["l"])
    partial = "getelementptr float, ptr addrspace(3) getelementptr (i8, ptr addrspace(3) @smem, i32 512), i32 %at{}"
    lines = [
        "@smem = external addrspace(3) global [0 x i8], align 128",
        "declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()",
        "declare i32 @llvm.nvvm.read.ptx.sreg.cluster.ctarank()",
        "declare ptr addrspace(7) @llvm.nvvm.mapa.shared.cluster(ptr addrspace(3), i32)",
        "declare void @llvm.nvvm.barrier0()",
        *(f"declare void @llvm.nvvm.wgmma.{name}.sync.aligned()" for name in ("fence", "commit_group")),
        "declare void @llvm.nvvm.wgmma.wait_group.sync.aligned(i64)",
        *(f"declare void @llvm.nvvm.barrier.cluster.{name}.aligned()" for name in ("arrive", "wait")),
        "define ptx_kernel void @k(ptr addrspace(1) %a, ptr addrspace(1) %b, ptr addrspace(1) %y, i32 %steps)",
        '    "nvvm.cluster_dim"="2,1,1" "nvvm.reqntid"="128" {',
        "entry:",
        "%tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()",
        "%rank = call i32 @llvm.nvvm.read.ptx.sreg.cluster.ctarank()",
        "%first = mul i32 %rank, %steps",
        "%copies = icmp ult i32 %tid, 32",
        "%start = ptrtoint ptr addrspace(3) @smem to i64",
        "%start4 = lshr i64 %start, 4",
        f"%descriptor = or i64 %start4, {256 >> 4 << 16 | 128 >> 4 << 32}",
        "br label %loop",
        "loop:",
        "%i = phi i32 [ 0, %entry ], [ %i1, %multiply ]",
        *(f"%c{i} = phi float [ 0.0, %entry ], [ %d{i}, %multiply ]" for i in eight),
        "%step = add i32 %first, %i",
        "br i1 %copies, label %copy, label %multiply",
        "copy:",
        "%b32 = mul i32 %step, 32",
        "%bat = add i32 %b32, %tid",
        "%bp = getelementptr <4 x i32>, ptr addrspace(1) %b, i32 %bat",
        "%bv = load <4 x i32>, ptr addrspace(1) %bp",
        "%sp = getelementptr <4 x i32>, ptr addrspace(3) @smem, i32 %tid",
        "store <4 x i32> %bv, ptr addrspace(3) %sp",
        "br label %multiply",
        "multiply:",
        'call void asm sideeffect "fence.proxy.async.shared::cta;", "~{memory}"()',
        "call void @llvm.nvvm.barrier0()",
        "%a128 = mul i32 %step, 128",
        "%aat = add i32 %a128, %tid",
        "%ap = getelementptr <4 x i32>, ptr addrspace(1) %a, i32 %aat",
        "%av = load <4 x i32>, ptr addrspace(1) %ap",
        *(f"%a{i} = extractelement <4 x i32> %av, i32 {i}" for i in range(4)),
        "call void @llvm.nvvm.wgmma.fence.sync.aligned()",
        f'%d = call {{ {many} }} asm sideeffect "{asm}", "{constraints}"('
        + ", ".join([*(f"float %c{i}" for i in eight), *(f"i32 %a{i}" for i in range(4)), "i64 %descriptor)"]),
        *(f"%d{i} = extractvalue {{ {many} }} %d, {i}" for i in eight),
        "call void @llvm.nvvm.wgmma.commit_group.sync.aligned()",
        "call void @llvm.nvvm.wgmma.wait_group.sync.aligned(i64 0)",
        "call void @llvm.nvvm.barrier0()",
        "%i1 = add i32 %i, 1",
        "%more = icmp ult i32 %i1, %steps",
        "br i1 %more, label %loop, label %tell",
        "tell:",
        *(f"%at{i} = add i32 {'%tid' if i == 0 else f'%at{i - 1}'}, {0 if i == 0 else 128}" for i in eight),
        *(f"%own{i} = {partial.format(i)}" for i in eight),
        *(f"store float %d{i}, ptr addrspace(3) %own{i}" for i in eight),
        "call void @llvm.nvvm.barrier.cluster.arrive.aligned()",
        "call void @llvm.nvvm.barrier.cluster.wait.aligned()",
        "%leads = icmp eq i32 %rank, 0",
        "br i1 %leads, label %sum, label %end",
        "sum:",
    ]
    for i in eight:
        lines += [
            f"%other{i} = call ptr addrspace(7) @llvm.nvvm.mapa.shared.cluster(ptr addrspace(3) %own{i}, i32 1)",
            f"%o{i} = load float, ptr addrspace(7) %other{i}",
            f"%s{i} = fadd float %d{i}, %o{i}",
            f"%yp{i} = getelementptr float, ptr addrspace(1) %y, i32 %at{i}",
            f"store float %s{i}, ptr addrspace(1) %yp{i}",
        ]
    lines += [
        "br label %end",
        "end:",
        "call void @llvm.nvvm.barrier.cluster.arrive.aligned()",
        "call void @llvm.nvvm.barrier.cluster.wait.aligned()",
        "ret void",
        "}",
    ]
    return "\n".join(lines)


def test_wgmma_in_a_cluster() -> None:
    """k is split over two blocks; the sums of one come to the other through distributed shared memory.

    Optimized only: without, LLVM copies the accumulators between the wgmma.fence and the wgmma.
    """
    steps = 3
    a, b = (RNG.integers(-8, 8, (2 * steps, rows, 16)) / 4 for rows in (64, 16))
    # A fragments (PTX ISA 9.7.14.5.8): axes step, warp, row half, g, k half, t, j. Core matrices of B: k half, row.
    fragments = a.reshape(-1, 4, 2, 8, 2, 4, 2).transpose(0, 1, 3, 5, 4, 2, 6).astype(np.float16)
    cores = b.reshape(-1, 16, 2, 8).transpose(0, 2, 1, 3).astype(np.float16)
    y = np.zeros((8, 4, 8, 4), np.float32)  # element, warp, g, t
    options: dict[str, Any] = {"grid": 2, "block": 128, "shared_bytes": 512 + 4096, "racecheck": True}
    args = [np.ascontiguousarray(fragments), np.ascontiguousarray(cores), y, steps]
    launch(warpgroup_kernel(), args, **options)
    got = y.reshape(2, 2, 2, 4, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(64, 16)
    np.testing.assert_array_equal(got, np.einsum("smk,snk->mn", a, b))
    barrier = "call void @llvm.nvvm.barrier0()"
    meet = "".join(f"call void @llvm.nvvm.barrier.cluster.{name}.aligned()\n" for name in ("arrive", "wait"))
    for text, message in {
        'call void asm sideeffect "fence.proxy.async.shared::cta;", "~{memory}"()': "without a fence.proxy.async",
        f"{barrier}\n%a128": "race",
        f"{barrier}\n%i1": "race",
        "call void @llvm.nvvm.wgmma.fence.sync.aligned()": "no wgmma.fence",
        "call void @llvm.nvvm.wgmma.wait_group.sync.aligned(i64 0)": "in flight",
        f"{meet}%leads": "before any cluster barrier",
        f"{meet}ret": "which has exited",
    }.items():
        assert text in warpgroup_kernel()
        broken = warpgroup_kernel().replace(text, text.rpartition("\n")[2] if "\n" in text else "")
        with pytest.raises(ValueError, match=message):
            launch(broken, args, **options)
