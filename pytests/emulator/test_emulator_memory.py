"""Loads, stores, addresses and shared memory of the emulator, and what it refuses about them."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from emulator_kernel import HEADER, kernel, run
from emulator_shared_memory import RNG, SMEM, TID16, fails

from lowbit.dialect.errors import EmulatorError
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.emulator.machine.faults import Fault
from lowbit.pylib.emulator.machine.memory import DeviceMemory


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (kind, n)
        for kind in ("u8", "s8", "u16", "s16", "b32", "f32", "b64")
        for n in (1, 2, 4)
        if (kind, n) != ("b64", 4)
    ],
)
def test_vector_loads_and_stores(kind: str, count: int) -> None:
    """Elements in memory order; 8-bit loads extend by their sign."""
    bits = max(int(kind[1:]), 16)
    size = int(kind[1:]) // 8 * count
    vec, names = (
        f".v{count}",
        [f"%{'rs' if bits == 16 else 'r' if bits == 32 else 'rd'}{20 + i}" for i in range(count)],
    )
    src, dst = RNG.integers(0, 256, (2, 32 * size), dtype=np.uint8)
    wide = np.zeros(32 * count, f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")
    items = "{" + ", ".join(names) + "}" if count > 1 else names[0]
    vec = vec if count > 1 else ""
    body = f"""mov.u32 %r0, %tid.x; ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; ld.param.u64 %rd3, [p2];
    mad.wide.u32 %rd0, %r0, {size}, %rd0; mad.wide.u32 %rd1, %r0, {size}, %rd1;
    mad.wide.u32 %rd3, %r0, {bits // 8 * count}, %rd3;
    ld.global{vec}.{kind} {items}, [%rd0]; st.global{vec}.{kind} [%rd1], {items};
    """ + "".join(f"st.global.b{bits} [%rd3+{i * bits // 8}], {name};" for i, name in enumerate(names))
    run(body, [src, dst, wide])
    np.testing.assert_array_equal(dst, src)
    narrow = f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}"
    np.testing.assert_array_equal(wide, src.view(narrow).astype(wide.dtype))


@pytest.mark.parametrize(
    "load",
    [
        "ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%r1,%r2,%r3,%r4}, [%rd0]",
        "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%r1,%r2,%r3,%r4}, [%rd0], %rd8",
        "ld.global.L1::evict_first.v4.b32 {%r1,%r2,%r3,%r4}, [%rd0]",
        "ld.weak.global.cs.v4.f32 {%r1,%r2,%r3,%r4}, [%rd0]",
        "ld.volatile.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd0]",
        "ld.relaxed.gpu.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd0+0]",
        "ld.v4.b32 {%r1,%r2,%r3,%r4}, [%rd0]",
    ],
)
def test_load_qualifiers(load: str) -> None:
    src, dst = RNG.integers(0, 2**32, 128, dtype=np.uint32), np.zeros(128, np.uint32)
    policy = "createpolicy.fractional.L2::evict_first.b64 %rd8, 1.0;"
    emulator = run(
        f"{TID16} ld.param.u64 %rd2, [p1]; mad.wide.u32 %rd2, %r0, 16, %rd2; {policy} {load};"
        "st.release.gpu.global.b32 [%rd2], %r1; st.volatile.global.b32 [%rd2+4], %r2;"
        "st.global.wt.b32 [%rd2+8], %r3; st.b32 [%rd2+12], %r4;",
        [src, dst],
    )
    np.testing.assert_array_equal(dst, src)
    assert emulator.stats.global_bytes_loaded == src.nbytes
    assert emulator.stats.global_bytes_stored == dst.nbytes


@pytest.mark.parametrize(
    ("offset", "size"),
    [("528", "of `p0`, which has 512 bytes"), ("512", "byte 512 of"), ("-16", "byte -16 of")],
)
def test_out_of_bounds(offset: str, size: str) -> None:
    body = f"ld.param.u64 %rd0, [p0]; ld.global.b32 %r1, [%rd0+{offset}];"
    fails(
        rf"PTX line \d+: `ld\.global\.b32.*block \(0, 0, 0\), thread \(0, 0, 0\): out of bounds.*{size}",
        body,
        np.zeros(128, np.uint32),
    )


def test_out_of_bounds_names_the_thread() -> None:
    fails(
        r"thread \(31, 0, 0\): out of bounds: 16 bytes .* byte 496",
        f"{TID16} st.global.b32 [%rd0], 1;st.global.v4.b32 [%rd0], {{0, 0, 0, 0}};",
        np.zeros(125, np.uint32),
    )


def test_arrays_are_far_apart() -> None:
    """Reading past one array does not reach the next; a truncated pointer reaches nothing."""
    a, b = np.zeros(4, np.uint32), np.zeros(4, np.uint32)
    fails("out of bounds", "ld.param.u64 %rd0, [p0]; ld.global.b32 %r1, [%rd0+256];", a, b)
    fails(
        "out of bounds",
        "ld.param.u64 %rd0, [p0]; cvt.u32.u64 %r1, %rd0; cvt.u64.u32 %rd1, %r1;ld.global.b32 %r1, [%rd1];",
        a,
    )
    fails("out of bounds", "ld.param.u64 %rd0, [p0]; ld.global.b32 %r1, [%rd0];", None)


def test_misaligned() -> None:
    fails(
        "not a multiple of 16",
        "ld.param.u64 %rd0, [p0]; ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd0+8];",
        np.zeros(16, np.uint32),
    )
    fails("not a multiple of 4", f"{SMEM} mov.u32 %r0, smem; st.shared.b32 [%r0+2], 0;")


def test_non_coherent_load_of_what_was_stored() -> None:
    """Stores elsewhere in the array are fine."""
    body = "ld.param.u64 %rd0, [p0]; st.global.b32 [%rd0+4], 1; ld.global.nc.b32 %r1, [%rd0{}];"
    run(body.format("+8"), [np.zeros(4, np.uint32)])
    fails("nc of memory that this launch has written", body.format("+4"), np.zeros(4, np.uint32))


def test_arrays_as_arguments() -> None:
    body = (
        "ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; st.global.b32 [%rd0], 7;"
        "ld.global.b32 %r1, [%rd1];"
        "st.global.b32 [%rd0+4], %r1;"
    )
    both = np.zeros(4, np.uint32)
    run(body, [both, both])  # one array under two names
    assert both[1] == 7
    whole = np.zeros(8, np.uint32)
    fails("overlaps", body, whole[:4], whole[2:6])
    fails("C-contiguous", body, whole[::2], whole.copy())
    frozen = np.zeros(4, np.uint32)
    frozen.flags.writeable = False
    fails("read-only", body, frozen, whole)


def test_parameters() -> None:
    """Scalars in the parameter's type, structures by value at their alignment."""
    params = ["u32", "f32", "s8", "f16", "u64", "f64"]
    out = np.zeros(40, np.uint8)
    text = kernel(
        """ld.param.u64 %rd0, [out]; ld.param.b32 %r1, [p0]; st.global.b32 [%rd0], %r1;
    ld.param.f32 %f1, [p1]; st.global.f32 [%rd0+4], %f1; ld.param.s8 %r2, [p2]; st.global.b32 [%rd0+8], %r2;
    ld.param.b16 %rs1, [p3]; st.global.b16 [%rd0+12], %rs1; ld.param.f64 %fd1, [p5];
    st.global.f64 [%rd0+16], %fd1;
    ld.param.v2.b32 {%r3, %r4}, [s+8]; st.global.v2.b32 [%rd0+24], {%r4, %r3};
    ld.param.v2.b32 {%r3, %r4}, [p4]; st.global.v2.b32 [%rd0+32], {%r3, %r4};""",
        params,
    ).replace("k(", "k(.param .u64 .ptr .global .align 16 out, .param .align 8 .b8 s[16], ")
    struct = np.arange(4, dtype=np.uint32)
    Emulator(text).launch("k", block=1, args=[out, struct, 2**32 - 1, 0.5, -3, 1.5, 2**40, 0.1])
    assert out[:4].view(np.uint32) == 2**32 - 1
    assert out[4:8].view(np.float32) == 0.5
    assert out[8:12].view(np.int32) == -3
    assert out[12:14].view(np.float16) == 1.5
    assert out[16:24].view(np.float64) == 0.1
    np.testing.assert_array_equal(out[24:32].view(np.uint32), [3, 2])
    assert out[32:].view(np.uint64) == 2**40
    for bad, message in (
        (dict(zip([2], [-(2**31) - 1])), "does not fit"),
        ({3: "x"}, "cannot pass"),
        ({1: b"123"}, "16 bytes"),
        ({2: 0.5}, "cannot pass"),
        ({2: out}, "64 bits"),
    ):
        args: list[object] = [out, struct, 1, 0.5, -3, 1.5, 2**40, 0.1]
        for number, value in bad.items():
            args[number] = value
        with pytest.raises(EmulatorError, match=message):
            Emulator(text).launch("k", block=1, args=args)


def test_module_variables() -> None:
    """.const tables are read-only, .global variables live as long as the module."""
    module = ".const .align 4 .b32 table[4] = {1, 2, 0xffffffff, -4};\n.global .align 4 .b8 state[8] = {5};\n"
    out = np.zeros(32, np.uint32)
    body = """mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 3; mul.lo.u32 %r1, %r1, 4; mov.u32 %r2, table;
    add.u32 %r1, %r1, %r2;
    ld.const.b32 %r3, [%r1]; ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd0, %r0, 4, %rd0;
    st.global.b32 [%rd0], %r3;
    mov.u64 %rd1, state; ld.global.b32 %r4, [%rd1]; setp.eq.u32 %p1, %r0, 0; @%p1 st.global.b32 [%rd0], %r4;
    add.u32 %r4, %r4, 1; @%p1 st.global.b32 [state], %r4;"""
    emulator = Emulator(kernel(body, ["u64"], module=module))
    for launch in range(2):
        emulator.launch("k", block=32, args=[out])
        np.testing.assert_array_equal(out, [5 + launch, *np.tile([1, 2, 2**32 - 1, 2**32 - 4], 8)[1:]])
    with pytest.raises(EmulatorError, match=r"a store to \.const"):
        run("st.const.b32 [table], 1;", module=module)


def test_launches_from_many_threads_are_one_after_another() -> None:
    """Or some would read a counter in global memory before others have written it back."""
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        body = "mov.u64 %rd1, count; ld.global.b32 %r0, [%rd1]; add.u32 %r0, %r0, 1; st.global.b32 [%rd1], %r0;"
        body += "ld.param.u64 %rd0, [p0]; st.global.b32 [%rd0], %r0;"
        emulator = Emulator(kernel(body, ["u64"], module=".global .align 4 .b32 count;\n"))
        outs = [np.zeros(1, np.uint32) for _ in range(64)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda out: emulator.launch("k", block=1, args=[out]), outs))
    finally:
        sys.setswitchinterval(old)
    assert sorted(int(out[0]) for out in outs) == list(range(1, 65))


def test_generic_addresses() -> None:
    out = np.zeros(32, np.uint32)
    run(
        f"""{SMEM} .local .align 4 .b8 stack[8]; mov.u32 %r0, %tid.x; mul.lo.u32 %r1, %r0, 4;
    cvt.u64.u32 %rd1, %r1;
    mov.u64 %rd2, smem; cvta.shared.u64 %rd3, %rd2; add.u64 %rd3, %rd3, %rd1; st.b32 [%rd3], %r0;
    ld.b32 %r2, [%rd3];
    mov.u64 %rd4, stack; cvta.local.u64 %rd5, %rd4; st.b32 [%rd5+4], %r2; ld.local.b32 %r3, [%rd4+4];
    cvta.to.shared.u64 %rd6, %rd3; ld.shared.b32 %r4, [%rd6]; add.u32 %r3, %r3, %r4;
    ld.param.u64 %rd0, [p0]; cvta.to.global.u64 %rd0, %rd0; add.u64 %rd0, %rd0, %rd1; st.b32 [%rd0], %r3;""",
        [out],
    )
    np.testing.assert_array_equal(out, 2 * np.arange(32))
    fails("not in shared memory", "ld.param.u64 %rd0, [p0]; cvta.to.shared.u64 %rd1, %rd0;", out)


def test_pack_and_unpack() -> None:
    """The first item is the low part."""
    src, out = np.array([0x11223344, 0x55667788], np.uint32), np.zeros(8, np.uint32)
    run(
        """ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; ld.global.b64 %rd2, [%rd0];
    mov.b64 {%r1, %r2}, %rd2;
    mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r3, {%rs2, %rs1}; mov.b64 %rd3, {%r2, %r1}; mov.b64 {_, %r4}, %rd3;
    mov.b64 {%rs3, %rs4, %rs5, %rs6}, %rd2; mov.b32 %r5, {%rs3, %rs6};
    st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4}; st.global.b32 [%rd1+16], %r5;""",
        [src, out],
        block=1,
    )
    assert [hex(v) for v in out[:5]] == ["0x11223344", "0x55667788", "0x33441122", "0x11223344", "0x55663344"]


def test_shared_memory_is_empty_at_first() -> None:
    body = f"""{SMEM} mov.u32 %r0, %tid.x; mov.u32 %r1, smem; mad.lo.u32 %r1, %r0, 4, %r1;
    st.shared.b8 [%r1], 1;
    ld.shared.b8 %rs1, [%r1]; ld.shared.b{{}} %{{}}, [%r1];"""
    run(body.format(8, "rs2"))
    fails(r"thread \(0, 0, 0\): read of shared memory that was never written", body.format(16, "rs2"))


def test_shared_memory_is_forgotten_between_blocks() -> None:
    body = f"""{SMEM} mov.u32 %r0, %ctaid.x; setp.eq.u32 %p1, %r0, 0; mov.u32 %r1, smem;
    @%p1 st.shared.b32 [%r1], 1; ld.shared.b32 %r2, [%r1];"""
    run(body, block=1)
    fails(r"block \(1, 0, 0\).*never written", body, block=1, grid=2)


def test_shared_bounds() -> None:
    extern = ".extern .shared .align 1024 .b8 dynamic[];"
    body = "mov.u32 %r0, dynamic; st.shared.b32 [%r0+{}], 1;"
    run(body.format(252), module=extern, shared_bytes=256, block=1)
    fails("out of bounds|outside every", body.format(256), module=extern, shared_bytes=256, block=1)
    fails("out of bounds|outside every", body.format(-4), module=extern, shared_bytes=256, block=1)
    fails("out of bounds|outside every", "st.shared.b32 [16], 1;", module=extern, shared_bytes=256, block=1)
    fails("shared_bytes=300000", body.format(0), module=extern, shared_bytes=300000, block=1)


def test_static_and_dynamic_shared_memory_share_nothing() -> None:
    out = np.zeros(3, np.uint32)
    run(
        f"""{SMEM} mov.u32 %r0, smem; mov.u32 %r1, dynamic; and.b32 %r2, %r1, 1023; sub.u32 %r3, %r1, %r0;
    mov.u32 %r4, %dynamic_smem_size;
    ld.param.u64 %rd0, [p0]; st.global.b32 [%rd0], %r2; st.global.b32 [%rd0+4], %r3;
    st.global.b32 [%rd0+8], %r4;""",
        [out],
        module=".extern .shared .align 1024 .b8 dynamic[];",
        shared_bytes=64,
        block=1,
    )
    assert out[0] == 0
    assert out[1] >= 1024
    assert out[2] == 64


def test_dynamic_arrays_are_one() -> None:
    module = ".extern .shared .align 4 .b8 first[];\n.extern .shared .align 16 .b8 second[];"
    run("mov.u32 %r0, first; st.shared.b32 [%r0+12], 1; mov.u32 %r1, second; ld.shared.b32 %r2, [%r1+12];",
        module=module, shared_bytes=16, block=1)  # fmt: skip


def test_local_memory_is_private() -> None:
    out = np.zeros(64, np.uint32)
    run(
        """.local .align 8 .b8 stack[16]; mov.u32 %r0, %tid.x; mov.u64 %rd1, stack;
    st.local.b32 [%rd1+8], %r0;
    ld.local.b32 %r1, [%rd1+8]; ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd0, %r0, 4, %rd0;
    st.global.b32 [%rd0], %r1;""",
        [out],
        block=64,
    )
    np.testing.assert_array_equal(out, np.arange(64))
    fails(
        "local memory that was never written",
        ".local .align 8 .b8 stack[16]; mov.u64 %rd1, stack; ld.local.b32 %r1, [%rd1];",
    )


def test_registers_have_to_be_set() -> None:
    fails("%r1 is read before it is set", "add.u32 %r2, %r1, 1;")
    body = "mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 8; @%p1 mov.u32 %r1, 5; {} add.u32 %r2, %r1, 1;"
    run(body.format("@%p1"))
    fails(r"thread \(8, 0, 0\): %r1 is read before it is set", body.format(""))
    fails("%p1 is read", "@%p1 bra L; L:")


def test_a_half_that_nothing_writes_is_nan() -> None:
    out = np.zeros(1, np.float16), np.zeros(1, np.float16)
    body = """mov.b16 %rs0, 0x3C00; mov.b32 %r1, {%rs0, %rs1}; add.rn.f16x2 %r2, %r1, %r1; mov.b32 {%rs2, %rs3}, %r2;
    ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; st.global.b16 [%rd0], %rs2; st.global.b16 [%rd1], %rs3;"""
    run(body, out, block=1)
    assert out[0][0] == 2.0 and np.isnan(out[1][0])
    unset_at_times = "setp.eq.u32 %p1, %r0, 1; @%p1 mov.b16 %rs1, 0; mov.b32 %r1, {%rs1, %rs1};"
    fails("%rs1 is read before it is set", f"mov.u32 %r0, 0; {unset_at_times}")


def test_header_is_not_needed_twice() -> None:
    with pytest.raises(EmulatorError, match="unknown directive"):
        Emulator(HEADER + ".tex .u64 t;")


def test_a_load_that_ends_beyond_its_array() -> None:
    """Its numbers there are NaN; one that begins there, and a store, are out of bounds."""
    memory, lane = DeviceMemory(), np.zeros(1, np.int64)
    at = np.array([memory.add("three", 12, np.arange(3, dtype=np.float32))])
    memory.allocate()
    row = memory.read(lane, at, 16)[0].view(np.float32)
    assert row[:3].tolist() == [0, 1, 2] and np.isnan(row[3])
    with pytest.raises(Fault, match=r"out of bounds: 4 bytes at .* = byte 12 of `three`, which has 12 bytes"):
        memory.read(lane, at + 12, 4)
    with pytest.raises(Fault, match="out of bounds: 16 bytes"):
        memory.write(lane, at, np.zeros((1, 16), np.uint8))
    with pytest.raises(Fault, match="out of bounds: 16 bytes"):
        memory.read(lane, at, 16, atomic=True)
