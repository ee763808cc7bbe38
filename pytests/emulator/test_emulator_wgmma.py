"""wgmma of the emulator.

Fragments and shared memory layouts are spelled out here from the figures and formulas of PTX ISA 9.7.15.5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator_kernel import kernel

from lowbit.dialect.errors import EmulatorError
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.emulator.isa.floats import FLOATS

RNG = np.random.default_rng(15)

#: (span of a row in bytes, number in the descriptor) of the swizzling modes
SWIZZLES = {"none": (16, 0), "32B": (32, 3), "64B": (64, 2), "128B": (128, 1)}
FENCE, COMMIT, WAIT = (
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned 0;",
)


class Matrix:
    """An image of a matrix of raw elements [rows, 32 bytes] in shared memory, and its descriptor without the start."""

    def __init__(self, elements: np.ndarray, swizzle: str = "none", pad: int = 0) -> None:
        data = np.ascontiguousarray(elements).view(np.uint8)
        rows, (span, mode) = len(data), SWIZZLES[swizzle]
        stride = 8 * span + (0 if swizzle == "none" else 1024 - 8 * span)
        leading = rows // 8 * stride + pad
        self.image = RNG.integers(0, 256, 1024 * -(-(2 * leading) // 1024)).astype(np.uint8)
        for row in range(rows):
            for chunk in range(2):
                if swizzle == "none":
                    at = row // 8 * stride + row % 8 * 16 + chunk * leading
                else:
                    # 16-byte chunks of each row of a swizzle atom: exclusive-or with the row of 128 bytes.
                    at = row // 8 * stride + row % 8 * span + chunk * 16
                    at ^= (at // 128 % (span // 16)) * 16
                self.image[at : at + 16] = data[row, 16 * chunk : 16 * chunk + 16]
        self.descriptor = (leading >> 4) << 16 if swizzle == "none" else 1 << 16
        self.descriptor |= (stride >> 4) << 32 | mode << 62


def a_registers(matrix: np.ndarray) -> np.ndarray:
    """The four registers of each of 128 threads for A [64, 32 bytes]."""
    words = np.ascontiguousarray(matrix).view(np.uint32)  # columns of 32 bits
    out = np.zeros((128, 4), np.uint32)
    for thread in range(128):
        warp, g, t = thread // 32, thread % 32 // 4, thread % 4
        for r, (row, column) in enumerate([(g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)]):
            out[thread, r] = words[16 * warp + row, column]
    return out


def d_place(thread: int, i: int) -> tuple[int, int]:
    """Row and column of element i of D in a thread."""
    warp, g, t = thread // 32, thread % 32 // 4, thread % 4
    return 16 * warp + g + 8 * (i // 2 % 2), i // 4 * 8 + t * 2 + i % 2


def program(
    registers: int,
    instructions: str,
    bytes_b: int,
    bytes_a: int = 0,
    *,
    copy: str = "",
    proxy: str = "fence.proxy.async; bar.sync 0;",
    fence: str = FENCE,
) -> str:
    """Threads 0 to 127 copy B (p1) and A (p2) to shared memory, load A's registers (p0) into %r4 .. %r7 and the
    accumulators %r100.. from p3, run `instructions` with descriptors %rd10 (B) and %rd11 (A), and store the
    accumulators to p3. `copy` waits for cp.async, which are used then."""
    copies = ""
    for param, target, size in (("p1", "smem", bytes_b), ("p2", f"smem+{bytes_b}", bytes_a)):
        for start in range(0, size, 2048):
            copies += f"ld.param.u64 %rd1, [{param}]; mad.wide.u32 %rd1, %r0, 16, %rd1; mov.u32 %r3, {target};"
            copies += f"mad.lo.u32 %r2, %r0, 16, %r3; setp.lt.u32 %p1, %r0, {min(128, (size - start) // 16)};"
            if copy:
                copies += f"@%p1 cp.async.cg.shared.global [%r2+{start}], [%rd1+{start}], 16;"
            else:
                copies += f"@%p1 ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd1+{start}];"
                copies += f"@%p1 st.shared.v4.b32 [%r2+{start}], {{%r10, %r11, %r12, %r13}};"
    body = f""".shared .align 1024 .b8 smem[{bytes_a + bytes_b}]; mov.u32 %r0, %tid.x;
    {copies} {copy} {proxy}
    ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd0, %r0, 16, %rd0; ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd0];
    ld.param.u64 %rd3, [p3]; mad.wide.u32 %rd3, %r0, {4 * registers}, %rd3;
    {"".join(f"ld.global.b32 %r{100 + i}, [%rd3+{4 * i}];" for i in range(registers))}
    mov.u32 %r3, smem; shr.u32 %r8, %r3, 4; cvt.u64.u32 %rd9, %r8;
    ld.param.u64 %rd10, [p4]; or.b64 %rd10, %rd10, %rd9;
    add.u32 %r3, %r3, {bytes_b}; shr.u32 %r8, %r3, 4; cvt.u64.u32 %rd9, %r8;
    ld.param.u64 %rd11, [p5]; or.b64 %rd11, %rd11, %rd9;
    {fence} {instructions}
    {"".join(f"st.global.b32 [%rd3+{4 * i}], %r{100 + i};" for i in range(registers))}"""
    return kernel(body, ["u64"] * 6)


def accumulators(count: int) -> str:
    return "{" + ", ".join(f"%r{100 + i}" for i in range(count)) + "}"


A4 = "{%r4, %r5, %r6, %r7}"


def wgmma(
    types: str, a: np.ndarray, b: Matrix, d: np.ndarray, tail: str, *, a_matrix: Matrix | None = None, times: int = 1
) -> np.ndarray:
    """D after `times` wgmma of raw matrices; `d` [64, n] float32, int32 or float16."""
    n = d.shape[1]
    per = 4 // d.dtype.itemsize
    threads = np.array([[d[d_place(thread, i)] for i in range(n // 2)] for thread in range(128)], d.dtype)
    registers = n // 2 // per
    k = {"f16": 16, "bf16": 16, "tf32": 8}.get(types.split(".")[1], 32)
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{types}"
    one = f"{name} {accumulators(registers)}, {A4 if a_matrix is None else '%rd11'}, %rd10, {tail};"
    image = np.zeros(0, np.uint8) if a_matrix is None else a_matrix.image
    source = program(registers, f"{one * times} {COMMIT} {WAIT}", len(b.image), len(image))
    Emulator(source).launch(
        "k",
        block=128,
        args=[a_registers(a), b.image, image, threads, b.descriptor, a_matrix.descriptor if a_matrix else 0],
        racecheck=True,
    )
    got = np.zeros_like(d)
    for thread in range(128):
        for i in range(n // 2):
            got[d_place(thread, i)] = threads[thread, i]
    return got


def bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)


@pytest.mark.parametrize("pad", [0, 16, 144])
@pytest.mark.parametrize("n", [8, 16, 24, 64, 136, 256])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_precision(kind: str, n: int, pad: int) -> None:
    raw = bf16 if kind == "bf16" else f16
    a, b = RNG.integers(-64, 64, (64, 16)) / 8, RNG.integers(-64, 64, (n, 16)) / 8
    d = RNG.standard_normal((64, n)).astype(np.float32)
    got = wgmma(f"f32.{kind}.{kind}", raw(a), Matrix(raw(b), pad=pad), d, "1, 1, 1, 0")
    # The product is exact; one rounding, of the sum.
    np.testing.assert_array_equal(got, (a @ b.T + d).astype(np.float32))


def test_scale_d_and_signs() -> None:
    """scale-d false leaves the accumulator out; twice adds twice."""
    a, b = RNG.integers(-64, 64, (64, 16)) / 8, RNG.integers(-64, 64, (32, 16)) / 8
    d = RNG.standard_normal((64, 32)).astype(np.float32)
    matrix, types = Matrix(f16(b)), "f32.f16.f16"
    np.testing.assert_array_equal(wgmma(types, f16(a), matrix, d, "0, 1, 1, 0"), a @ b.T)
    np.testing.assert_array_equal(wgmma(types, f16(a), matrix, d, "0, -1, 1, 0"), -a @ b.T)
    np.testing.assert_array_equal(wgmma(types, f16(a), matrix, d, "0, -1, -1, 0"), a @ b.T)
    np.testing.assert_array_equal(wgmma(types, f16(a), matrix, np.zeros_like(d), "1, 1, 1, 0", times=3), 3 * a @ b.T)


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_swizzles_and_a_in_shared_memory(swizzle: str) -> None:
    a, b = RNG.integers(-64, 64, (64, 16)) / 8, RNG.integers(-64, 64, (40, 16)) / 8
    d = RNG.standard_normal((64, 40)).astype(np.float32)
    got = wgmma(
        "f32.f16.f16", 0 * f16(a), Matrix(f16(b), swizzle), d, "1, 1, 1, 0, 0", a_matrix=Matrix(f16(a), swizzle)
    )
    np.testing.assert_array_equal(got, (a @ b.T + d).astype(np.float32))


def test_half_precision_accumulator() -> None:
    a, b = RNG.integers(-9, 9, (64, 16)) / 4, RNG.integers(-9, 9, (24, 16)) / 4
    d = RNG.standard_normal((64, 24)).astype(np.float16)
    got = wgmma("f16.f16.f16", f16(a), Matrix(f16(b)), d, "1, 1, 1, 0")
    np.testing.assert_array_equal(got, (a @ b.T + d).astype(np.float16))


def test_tf32() -> None:
    """The 13 low bits of an operand do not count."""
    a, b = (RNG.integers(-512, 512, (rows, 8)).astype(np.float32) for rows in (64, 48))
    d = RNG.standard_normal((64, 48)).astype(np.float32)
    dirty = (a.view(np.uint32) | np.uint32(0x1FFF)).view(np.float32)
    got = wgmma("f32.tf32.tf32", dirty, Matrix(b, pad=16), d, "1, 1, 1")
    np.testing.assert_array_equal(got, (a.astype(float) @ b.T + d).astype(np.float32))


@pytest.mark.parametrize(("first", "second"), [("s8", "s8"), ("u8", "s8")])
def test_bytes(first: str, second: str) -> None:
    a, b = (RNG.integers(0, 256, (rows, 32)).astype(np.uint8) for rows in (64, 48))
    d = RNG.integers(-(2**31), 2**31, (64, 48)).astype(np.int32)
    typed = [x.view(np.int8 if kind == "s8" else np.uint8).astype(np.int64) for x, kind in ((a, first), (b, second))]
    total = typed[0] @ typed[1].T + d
    np.testing.assert_array_equal(wgmma(f"s32.{first}.{second}", a, Matrix(b), d, "1"), total.astype(np.int32))


@pytest.mark.parametrize(("first", "second"), [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_fp8(first: str, second: str) -> None:
    a, b = RNG.integers(-8, 8, (64, 32)) / 4, RNG.integers(-8, 8, (16, 32)) / 4
    raw = [FLOATS[kind].encode(x).astype(np.uint8) for kind, x in ((first, a), (second, b))]
    d = RNG.standard_normal((64, 16)).astype(np.float32)
    got = wgmma(f"f32.{first}.{second}", raw[0], Matrix(raw[1], pad=16), d, "1, 1, 1")
    np.testing.assert_array_equal(got, (a @ b.T + d).astype(np.float32))


def launch(instructions: str, **options: Any) -> None:
    """`instructions` on zeros: m64n16k16 with %r100..%r107."""
    b = Matrix(np.zeros((16, 16), np.float16))
    arrays = [np.zeros((128, 4), np.uint32), b.image, np.zeros(0, np.uint8), np.zeros((128, 8), np.uint32)]
    descriptor = options.pop("descriptor", b.descriptor)
    block, racecheck = options.pop("block", 128), options.pop("racecheck", False)
    emulator = Emulator(program(8, instructions, len(b.image), **options))
    emulator.launch("k", block=block, args=[*arrays, descriptor, 0], racecheck=racecheck)


def fails(message: str, instructions: str, **options: Any) -> None:
    with pytest.raises(EmulatorError, match=message):
        launch(instructions, **options)


MMA = f"wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {accumulators(8)}, {A4}, %rd10, 1, 1, 1, 0;"


def test_nested_scope_as_inline_assembly_writes_it() -> None:
    scoped = MMA.replace("1, 1, 1, 0", "p, 1, 1, 0")
    launch(f"mov.u32 %r1, 1; {{ .reg .pred p; setp.ne.b32 p, %r1, 0; {scoped} }} {COMMIT} {WAIT}")


@pytest.mark.parametrize(
    ("descriptor", "message"),
    [
        (1 << 14, "bits that belong to no field"),
        (1 << 52, "bits that belong to no field"),
        (1 << 49, "base offset"),
        (64 << 16 | 4096 << 32, "out of bounds"),
    ],
)
def test_descriptors_that_are_wrong(descriptor: int, message: str) -> None:
    fails(message, f"{MMA} {COMMIT} {WAIT}", descriptor=descriptor)


def test_descriptor_and_scale_are_the_warpgroup_s() -> None:
    fails("descriptors that differ", f"cvt.u64.u32 %rd12, %r0; or.b64 %rd10, %rd10, %rd12; {MMA} {COMMIT} {WAIT}")
    predicated = MMA.replace("1, 1, 1, 0", "%p2, 1, 1, 0")
    fails("scale-d differs", f"setp.lt.u32 %p2, %r0, 32; {predicated} {COMMIT} {WAIT}")


def test_whole_warpgroups_only() -> None:
    fails(
        "deadlock: the other threads of the warpgroup",
        f"setp.lt.u32 %p2, %r0, 32; @!%p2 bar.sync 1; {MMA} {COMMIT} {WAIT}",
    )
    fails("warpgroup of which some threads have exited", f"setp.lt.u32 %p2, %r0, 32; @%p2 exit; {MMA} {COMMIT} {WAIT}")


@pytest.mark.parametrize(
    "text",
    [
        MMA.replace("m64n16k16", "m64n12k16"),
        MMA.replace("m64n16k16", "m64n16k8"),
        MMA.replace("m64n16k16", "m64n264k16"),
        MMA.replace("f32.f16.f16", "f32.f16.bf16"),
        MMA.replace("f32.f16.f16", "f16.bf16.bf16"),
        MMA.replace("1, 1, 1, 0", "1, 2, 1, 0"),
        MMA.replace("1, 1, 1, 0", "1, 1, 1, 1"),
        MMA.replace("1, 1, 1, 0", "1, 1, 1, 0, 0"),
        MMA.replace("1, 1, 1, 0", "1, 1, 1"),
        MMA.replace(", %r107}", "}"),
        MMA.replace(".aligned", ""),
        "wgmma.wait_group.sync.aligned;",
        "wgmma.commit_group.sync.aligned 0;",
    ],
)
def test_wgmma_that_does_not_exist(text: str) -> None:
    with pytest.raises(EmulatorError, match=r"PTX line \d+: `wgmma"):
        Emulator(kernel(text))


# Registers between issue and wait

OTHER = MMA.replace(accumulators(8), "{" + ", ".join(f"%r{120 + i}" for i in range(8)) + "}").replace(
    "1, 1, 1, 0", "0, 1, 1, 0"
)


def test_groups_are_waited_for_in_order() -> None:
    """`wait_group 1` frees the registers of all groups but the last."""
    groups = f"{MMA} {COMMIT} {OTHER} {COMMIT} wgmma.wait_group.sync.aligned 1;"
    launch(f"{groups} mov.b32 %r20, %r100;")
    fails(r"%r120 is used while a wgmma with it is in flight", f"{groups} mov.b32 %r20, %r120;")
    fails(r"%r100 is used while a wgmma with it is in flight", groups.replace("aligned 1", "aligned 2"))


def test_accumulators_stay_in_flight() -> None:
    """Group after group adds to the same registers, one always in flight; scale-d is a predicate, false at first."""
    a, b = RNG.integers(-8, 8, (64, 16)), Matrix(f16(np.eye(16)))
    start = "mov.u32 %r30, 0;"
    step = f"setp.ne.u32 %p3, %r30, 0; {MMA.replace('1, 1, 1, 0', '%p3, 1, 1, 0')} {COMMIT} mov.u32 %r30, 1;"
    steps = f"{start} {step} " + f"{step} wgmma.wait_group.sync.aligned 1;" * 6
    d = np.full((128, 8), np.nan, np.float32)
    source = program(8, f"{steps} {WAIT}", len(b.image))
    Emulator(source).launch(
        "k", block=128, args=[a_registers(f16(a)), b.image, np.zeros(0, np.uint8), d, b.descriptor, 0]
    )
    for thread in range(128):
        for i in range(8):
            assert d[thread, i] == 7 * a[d_place(thread, i)]
    fails("%r100 is used while a wgmma with it is in flight", f"{steps} mov.b32 %r20, %r100; {WAIT}")


@pytest.mark.parametrize(
    ("instructions", "register"),
    [
        (f"{MMA} {COMMIT}", "%r100"),
        (f"{MMA} {WAIT}", "%r100"),  # not committed
        (f"{MMA} {COMMIT} {MMA} {COMMIT} wgmma.wait_group.sync.aligned 1;", "%r100"),
        (f"{MMA} {COMMIT} mov.u32 %r107, 0; {WAIT}", "%r107"),
        (f"{MMA} {COMMIT} mov.u32 %r6, 0; {WAIT}", "%r6"),
        (f"{MMA} {COMMIT} setp.eq.u32 %p2, %r0, 77; @%p2 mov.u32 %r6, 0; {WAIT}", "%r6"),
        (f"{MMA} {COMMIT} mov.b32 %r20, %r6; {WAIT}", "%r6"),
    ],
)
def test_registers_in_flight(instructions: str, register: str) -> None:
    fails(f"{register} is used while a wgmma with it is in flight", instructions)


def test_registers_that_may_be_used() -> None:
    launch(f"{MMA} {COMMIT} setp.eq.u32 %p2, %r0, 200; @%p2 mov.u32 %r6, 0; mov.u32 %r20, %r8; {WAIT} mov.u32 %r6, 0;")
    launch(f"{MMA} {COMMIT} {WAIT} {MMA} {OTHER} {COMMIT} {WAIT} {OTHER} {COMMIT} {WAIT}")
    launch(MMA.replace(A4, "{%r4, %r4, %r4, %r4}") + COMMIT + WAIT)


def test_fence_before_the_first_wgmma() -> None:
    fails("no wgmma.fence before the first wgmma", f"{MMA} {COMMIT} {WAIT}", fence="")
    fails("no wgmma.fence since %r5 was used", f"mov.u32 %r5, 0; {MMA} {COMMIT} {WAIT}")
    fails("no wgmma.fence since %r105 was used", f"{MMA} {COMMIT} {WAIT} mov.b32 %r20, %r105; {MMA} {COMMIT} {WAIT}")
    launch(f"{MMA} {COMMIT} {WAIT} mov.b32 %r20, %r105; {FENCE} {MMA} {COMMIT} {WAIT}")


def test_registers_of_two_wgmma() -> None:
    """Only products of one shape may follow on the same accumulators."""
    smaller = MMA.replace("m64n16", "m64n8").replace(accumulators(8), accumulators(4))
    fails("%r100 is in use as accumulator of m64n16k16.f32 by a wgmma", f"{MMA} {smaller} {COMMIT} {WAIT}")
    launch(f"{MMA} {COMMIT} {WAIT} {smaller} {COMMIT} {WAIT}")
    as_factor = OTHER.replace(A4, accumulators(4))
    fails("%r100 is in use as accumulator", f"{MMA} {as_factor} {COMMIT} {WAIT}")
    fails("%r100 is in use as A", f"{as_factor} {MMA} {COMMIT} {WAIT}")
    with pytest.raises(EmulatorError, match="comes twice"):
        Emulator(kernel(MMA.replace("%r107", "%r100")))
    with pytest.raises(EmulatorError, match="comes twice"):
        Emulator(kernel(MMA + MMA.replace("%r107", "%r100")))


def test_accumulators_are_set_if_they_count() -> None:
    launch(f"{OTHER} {COMMIT} {WAIT}")
    fails("%r120 is read before it is set", f"{OTHER.replace('0, 1, 1, 0', '1, 1, 1, 0')} {COMMIT} {WAIT}")


# Shared memory between write, wgmma and the next write

ARRIVED = "cp.async.commit_group; cp.async.wait_group 0;"
DONE = f"{MMA} {COMMIT} {WAIT}"


@pytest.mark.parametrize("copy", ["", ARRIVED])
def test_proxy_fence(copy: str) -> None:
    """By the writers, or after the barrier by others."""
    launch(DONE, copy=copy, racecheck=True)
    launch(DONE, copy=copy, proxy="fence.proxy.async.shared::cta; bar.sync 0;", racecheck=True)
    launch(DONE, copy=copy, proxy="bar.sync 0; fence.proxy.async;", racecheck=True)
    message = "written without a fence.proxy.async since"
    fails(message, DONE, copy=copy, proxy="bar.sync 0;")
    fails(message, DONE, copy=copy, proxy="fence.proxy.async.global; bar.sync 0;")
    fails(message, DONE, copy=copy, proxy="setp.lt.u32 %p2, %r0, 16; @%p2 fence.proxy.async; bar.sync 0;")
    again = "fence.proxy.async; bar.sync 0; mov.u32 %r3, smem; st.shared.b32 [%r3], 0; bar.sync 0;"
    fails(message, DONE, copy=copy, proxy=again)
    message = "without a barrier"
    fails(message, DONE, copy=copy, proxy="fence.proxy.async;", racecheck=True)


def test_copies_have_to_arrive() -> None:
    fails("has not waited for", DONE, copy="cp.async.commit_group;")
    fails("cp.async without a barrier", DONE, copy=ARRIVED, proxy="fence.proxy.async;")
    early = "cp.async.commit_group; fence.proxy.async; cp.async.wait_group 0; bar.sync 0;"
    fails("written without a fence.proxy.async since", DONE, copy=early, proxy="")


def test_writes_while_a_wgmma_reads() -> None:
    start = "mov.u32 %r3, smem; ld.param.u64 %rd1, [p1]; setp.eq.u32 %p2, %r0, 0; @%p2"
    for write in (f"{start} st.shared.b32 [%r3], 0;", f"{start} cp.async.ca.shared.global [%r3], [%rd1], 4;"):
        fails("write to shared memory that a wgmma in flight reads", f"{MMA} {COMMIT} bar.sync 0; {write} {WAIT}")
        launch(f"{MMA} {COMMIT} {WAIT} bar.sync 0; {write}", racecheck=True)
        # The thread's own warp has read, the others of the warpgroup may not have.
        fails("race: writes shared byte 0 that the wgmma of warp 1 read", f"{DONE} {write}", racecheck=True)


def test_rows_that_nobody_wrote() -> None:
    """Their columns of the result are NaN: here 8 of 16, for threads 0 to 7 and 16 to 23 write a row's halves. Those of
    integers are some odd number each."""
    ones, d = Matrix(f16(np.ones((16, 16)))), np.zeros((128, 8), np.float32)
    half = """.shared .align 1024 .b8 part[1024]; mov.u32 %r1, 0x3C003C00; mad.lo.u32 %r2, %r0, 16, %r3;
    and.b32 %r8, %r0, 8; setp.eq.u32 %p2, %r8, 0; setp.lt.and.u32 %p2, %r0, 32, %p2;
    @%p2 st.shared.v4.b32 [%r2+1024], {%r1, %r1, %r1, %r1}; fence.proxy.async; bar.sync 0;"""
    source = program(8, f"{MMA} {COMMIT} {WAIT}", 1024, proxy=half, fence=f"add.u64 %rd10, %rd10, 64; {FENCE}")
    arguments = [a_registers(f16(np.ones((64, 16)))), ones.image, np.zeros(0, np.uint8), d, ones.descriptor, 0]
    Emulator(source).launch("k", block=128, args=arguments)
    np.testing.assert_array_equal(d, np.tile(np.repeat([16.0, np.nan], 4).astype(np.float32), (128, 1)))
    integers = MMA.replace("k16.f32.f16.f16", "k32.s32.s8.s8").replace("1, 1, 1, 0", "1")
    empty = ".shared .align 1024 .b8 empty[1024]; fence.proxy.async; bar.sync 0;"
    source = program(8, f"{integers} {COMMIT} {WAIT}", 1024, proxy=empty, fence=f"add.u64 %rd10, %rd10, 64; {FENCE}")
    whole = np.full((128, 8), 7, np.int32)
    bytes_ = np.full((128, 4), 0x01010101, np.uint32)
    Emulator(source).launch("k", block=128, args=[bytes_, ones.image, np.zeros(0, np.uint8), whole, ones.descriptor, 0])
    np.testing.assert_array_equal(whole, 7 + 32 * 101)
