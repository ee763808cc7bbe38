"""Loads, stores, addresses, atomics and cp.async of the emulator, and what it refuses about them."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_kernel import HEADER, Array, kernel, run

from lowbit.dialect.errors import EmulatorError
from lowbit.pylib.emulator import Emulator

RNG = np.random.default_rng(4)
#: %r0 = tid, %rd0 = p0 + 16 tid
TID16 = "mov.u32 %r0, %tid.x; ld.param.u64 %rd9, [p0]; mad.wide.u32 %rd0, %r0, 16, %rd9;"
SMEM = ".shared .align 16 .b8 smem[1024];"


def fails(message: str, body: str, *args: object, **options: object) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(body, args, **options)  # type: ignore[arg-type]


# Global memory


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


# Shared and local memory


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


# Atomics


def atomic(
    instruction: str, memory: Array, value: Array, old: Array | None = None, compare: Array | None = None
) -> None:
    """Thread i applies `instruction` with value[i] to memory[i % len(memory)]."""
    size, bits = memory.dtype.itemsize, 8 * memory.dtype.itemsize
    reg = {16: "rs", 32: "r", 64: "rd"}[bits]
    args = [memory, value] + ([] if old is None else [old]) + ([] if compare is None else [compare])
    body = f"""mov.u32 %r0, %tid.x; rem.u32 %r1, %r0, {len(memory)}; ld.param.u64 %rd0, [p0];
    mad.wide.u32 %rd0, %r1, {size}, %rd0; ld.param.u64 %rd1, [p1]; mad.wide.u32 %rd1, %r0, {size}, %rd1;
    ld.global.b{bits} %{reg}20, [%rd1];"""
    if compare is not None:
        body += f"ld.param.u64 %rd3, [p3]; mad.wide.u32 %rd3, %r0, {size}, %rd3;"
        body += f"ld.global.b{bits} %{reg}22, [%rd3];"
    body += instruction.replace("$d", f"%{reg}21").replace("$b", f"%{reg}20").replace("$c", f"%{reg}22") + ";"
    if old is not None:
        body += f"ld.param.u64 %rd2, [p2]; mad.wide.u32 %rd2, %r0, {size}, %rd2;"
        body += f"st.global.b{bits} [%rd2], %{reg}21;"
    run(body, args, block=len(value))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64"])
def test_integer_atomics(kind: str) -> None:
    dtype = f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}"
    value = RNG.integers(0, 1000, 64).astype(dtype) - (500 if kind[0] == "s" else 0)
    for name, function in (("add", np.add), ("min", np.minimum), ("max", np.maximum)):
        memory = RNG.integers(0, 1000, 5).astype(dtype)
        expected = [function.reduce(np.append(value[i::5], memory[i])) for i in range(5)]
        atomic(f"red.relaxed.gpu.global.{name}.{kind} [%rd0], $b", memory, value)
        np.testing.assert_array_equal(memory, expected)


def test_atomic_results_are_a_history() -> None:
    """The old values of additions to one counter are all different, and add up."""
    memory, old = np.array([10], np.uint32), np.zeros(64, np.uint32)
    atomic("atom.global.add.u32 $d, [%rd0], $b", memory, np.ones(64, np.uint32), old)
    assert memory[0] == 74
    np.testing.assert_array_equal(np.sort(old), np.arange(10, 74))


def test_exch_cas_inc_dec_and_or() -> None:
    memory, old = np.array([1, 2], np.uint32), np.zeros(2, np.uint32)
    atomic("atom.global.exch.b32 $d, [%rd0], $b", memory, np.array([7, 8], np.uint32), old)
    np.testing.assert_array_equal(memory, [7, 8])
    np.testing.assert_array_equal(old, [1, 2])
    atomic(
        "atom.acq_rel.gpu.global.cas.b32 $d, [%rd0], $c, $b",
        memory,
        np.array([9, 9], np.uint32),
        old,
        np.array([7, 0], np.uint32),
    )
    np.testing.assert_array_equal(memory, [9, 8])
    np.testing.assert_array_equal(old, [7, 8])
    counter = np.array([0], np.uint32)
    atomic("red.global.inc.u32 [%rd0], $b", counter, np.full(7, 4, np.uint32))  # 0 1 2 3 4 0 1 2
    assert counter[0] == 2
    atomic("red.global.dec.u32 [%rd0], $b", counter, np.full(4, 4, np.uint32))  # 2 1 0 4 3
    assert counter[0] == 3
    bits = np.array([0b1100], np.uint32)
    atomic("red.global.or.b32 [%rd0], $b", bits, np.array([1, 2], np.uint32))
    assert bits[0] == 0b1111
    atomic("red.global.and.b32 [%rd0], $b", bits, np.array([7, 13], np.uint32))
    assert bits[0] == 0b0101


def test_float_atomics() -> None:
    value = RNG.standard_normal(64).astype(np.float32)
    memory = np.zeros(3, np.float32)
    atomic("red.global.add.f32 [%rd0], $b", memory, value)
    expected = np.zeros(3, np.float32)
    for i, v in enumerate(value):
        expected[i % 3] += v
    np.testing.assert_array_equal(memory, expected)
    halves, pair = RNG.standard_normal(32).astype(np.float16), np.zeros(2, np.float16)
    atomic("red.global.add.noftz.f16x2 [%rd0], $b", pair.view(np.uint32), halves.view(np.uint32))
    expected_pair = np.zeros(2, np.float16)
    for row in halves.reshape(-1, 2):
        expected_pair = expected_pair + row
    np.testing.assert_array_equal(pair, expected_pair)
    tiny = np.array([2.0**-140], np.float32)
    atomic("red.global.add.f32 [%rd0], $b", tiny, np.zeros(1, np.float32))
    assert tiny[0] == 0  # additions to f32 in global memory flush subnormals


def test_vector_reduction() -> None:
    value, memory = RNG.standard_normal(128).astype(np.float32), np.ones(128, np.float32)
    expected = memory + value
    run(
        f"""{TID16} ld.param.u64 %rd1, [p1]; mad.wide.u32 %rd1, %r0, 16, %rd1;
    ld.global.v4.f32 {{%f1,%f2,%f3,%f4}}, [%rd0]; red.global.add.v4.f32 [%rd1], {{%f1,%f2,%f3,%f4}};""",
        [value, memory],
    )
    np.testing.assert_array_equal(memory, expected)
    packed = np.zeros(128, np.uint32)
    run(
        f"""{TID16} mov.u32 %r1, 0x3C004000; red.global.v4.f16x2.add.noftz [%rd0], {{%r1, %r1, %r1, %r1}};""",
        [packed],
    )
    np.testing.assert_array_equal(packed, 0x3C004000)


def test_shared_atomics() -> None:
    out = np.zeros(1, np.uint32)
    run(
        f"""{SMEM} mov.u32 %r0, %tid.x; mov.u32 %r1, smem; setp.eq.u32 %p1, %r0, 0;
    @%p1 st.shared.b32 [%r1], 0;
    bar.sync 0; atom.shared.add.u32 %r2, [%r1], %r0; bar.sync 0; ld.shared.b32 %r3, [%r1];
    ld.param.u64 %rd0, [p0];
    @%p1 st.global.b32 [%rd0], %r3;""",
        [out],
        block=64,
        racecheck=True,
    )
    assert out[0] == 64 * 63 // 2


@pytest.mark.parametrize(
    "text",
    [
        "red.global.add.f16x2 [%rd0], %r1",
        "atom.global.max.f32 %f1, [%rd0], %f2",
        "red.global.add.b32 [%rd0], %r1",
        "atom.global.xor.u32 %r2, [%rd0], %r1",
        "red.global.add.v4.u32 [%rd0], {%r1,%r1,%r1,%r1}",
    ],
)
def test_atomics_that_do_not_exist(text: str) -> None:
    with pytest.raises(EmulatorError, match=r"PTX line"):
        Emulator(kernel(f"ld.param.u64 %rd0, [p0]; mov.u32 %r1, 1; {text};", ["u64"]))


# cp.async

COPY = f"""{SMEM} {TID16} mov.u32 %r1, smem; mad.lo.u32 %r1, %r0, 16, %r1;
    ld.param.u64 %rd1, [p1]; mad.wide.u32 %rd1, %r0, 16, %rd1;"""
BACK = "ld.shared.v4.b32 {%r4,%r5,%r6,%r7}, [%r1]; st.global.v4.b32 [%rd1], {%r4,%r5,%r6,%r7};"


@pytest.mark.parametrize(
    ("copies", "sizes"),
    [
        ("cp.async.cg.shared.global [%r1], [%rd0], 16;", 16),
        (
            """cp.async.ca.shared.global.L2::128B [%r1], [%rd0], 8;
            cp.async.ca.shared::cta.global [%r1+8], [%rd0+8], 8;""",
            16,
        ),
        ("".join(f"cp.async.ca.shared.global [%r1+{i}], [%rd0+{i}], 4;" for i in (0, 4, 8, 12)), 16),
        ("cp.async.cg.shared.global.L2::cache_hint [%r1], [%rd0], 16, %rd8;", 16),
        ("cp.async.cg.shared.global.L2::256B [%r1], [%rd0], 16, 6;", 6),
        ("cp.async.cg.shared.global.L2::cache_hint [%r1], [%rd0], 16, %r20, %rd8;", 3),
        ("cp.async.cg.shared.global [%r1], [%rd0], 16, %p1;", 0),
        ("cp.async.cg.shared.global [%r1], [%rd0], 16, !%p1;", 16),
    ],
)
def test_cp_async(copies: str, sizes: int) -> None:
    """What the source size leaves over is zero."""
    src, dst = RNG.integers(1, 256, 512, dtype=np.uint8), np.full(512, 255, np.uint8)
    setup = "mov.u64 %rd8, 0; mov.u32 %r20, 3; setp.eq.u32 %p1, %r20, 3;"
    emulator = run(f"{COPY} {setup} {copies} cp.async.wait_all; {BACK}", [src, dst])
    expected = np.where(np.arange(512) % 16 < sizes, src, 0)
    np.testing.assert_array_equal(dst, expected)
    assert emulator.stats.global_bytes_loaded == 32 * sizes


def test_source_size_zero_reads_nothing() -> None:
    """The address may lie anywhere, as at the end of a matrix."""
    src, dst = np.ones(16, np.uint8), np.ones(512, np.uint8)
    run(
        f"{COPY} setp.ne.u32 %p1, %r0, 0; selp.u32 %r2, 0, 16, %p1;"
        "cp.async.cg.shared.global [%r1], [%rd0], 16, %r2;"
        f"cp.async.commit_group; cp.async.wait_group 0; {BACK}",
        [src, dst],
    )
    assert dst.sum() == 16
    fails("out of bounds", f"{COPY} cp.async.cg.shared.global [%r1], [%rd0], 16;", src, dst)
    fails("above its copy size", f"{COPY} cp.async.cg.shared.global [%r1], [%rd0], 16, 17;", src, dst)


GROUPS = f"""{COPY} cp.async.ca.shared.global [%r1], [%rd0], 4; cp.async.commit_group;
    cp.async.ca.shared.global [%r1+4], [%rd0+4], 4; cp.async.ca.shared.global [%r1+8], [%rd0+8], 4;
    cp.async.commit_group; cp.async.ca.shared.global [%r1+12], [%rd0+12], 4; {{}}
    ld.shared.b32 %r4, [%r1+{{}}]; st.global.b32 [%rd1], %r4;"""


@pytest.mark.parametrize(
    ("wait", "arrived"),
    [
        ("", 0),
        ("cp.async.wait_group 2;", 0),
        ("cp.async.wait_group 1;", 1),
        ("cp.async.wait_group 0;", 3),
        ("cp.async.commit_group; cp.async.wait_group 2;", 1),
        ("cp.async.commit_group; cp.async.wait_group 1;", 3),
        ("cp.async.wait_all;", 4),
    ],
)
def test_wait_group_counts_groups(wait: str, arrived: int) -> None:
    src, dst = RNG.integers(0, 2**32, 128, dtype=np.uint32), np.zeros(128, np.uint32)
    for word in range(4):
        if word < arrived:
            run(GROUPS.format(wait, 4 * word), [src, dst])
            np.testing.assert_array_equal(dst[::4], src[word::4])
        else:
            fails("cp.async that its thread has not waited for", GROUPS.format(wait, 4 * word), src, dst)


NEIGHBOUR = f"""{COPY} cp.async.cg.shared.global [%r1], [%rd0], 16; cp.async.wait_all; {{}}
    xor.b32 %r9, %r1, 16; ld.shared.b32 %r4, [%r9];"""


def test_other_threads_need_a_barrier() -> None:
    src = np.zeros(512, np.uint8)
    fails("another thread's cp.async without a barrier", NEIGHBOUR.format(""), src, src)
    run(NEIGHBOUR.format("bar.sync 0;"), [src, src])
    run(NEIGHBOUR.format("bar.warp.sync -1;"), [src, src])
    late = NEIGHBOUR.format("").replace("cp.async.wait_all;", "bar.sync 0; cp.async.wait_all;")
    fails("another thread's cp.async without a barrier", late, src, src)


def test_copies_in_flight_are_left_alone() -> None:
    src = np.zeros(512, np.uint8)
    copy = "cp.async.cg.shared.global [%r1], [%rd0], 16;"
    fails("still in flight", f"{COPY} {copy} st.shared.b32 [%r1], 0;", src, src)
    fails("still in flight", f"{COPY} {copy} {copy}", src, src)
    fails("same bytes as another thread", f"{COPY} mov.u32 %r1, smem; {copy}", src, src)
    run(f"{COPY} {copy}", [src, src])  # never waited for: never seen


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.cg.shared.global [%r1], [%rd0], 8",
        "cp.async.ca.shared.global [%r1], [%rd0], 2",
        "cp.async.cg.shared.global.L3 [%r1], [%rd0], 16",
        "cp.async.cg.shared.global [%r1], [%rd0]",
        "cp.async.bulk.commit_group",
        "cp.async.wait_group %r1",
    ],
)
def test_copies_that_do_not_exist(text: str) -> None:
    with pytest.raises(EmulatorError, match="PTX line"):
        Emulator(kernel(f"{SMEM} mov.u32 %r1, smem; ld.param.u64 %rd0, [p0]; {text};", ["u64"]))


def test_header_is_not_needed_twice() -> None:
    with pytest.raises(EmulatorError, match="unknown directive"):
        Emulator(HEADER + ".tex .u64 t;")
