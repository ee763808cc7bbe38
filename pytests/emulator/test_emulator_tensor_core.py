"""mma.sync, ldmatrix, stmatrix and movmatrix of the emulator.

The fragment layouts are spelled out here from the figures and formulas of PTX ISA 9.7.14.5, shape by shape,
without the rule that the emulator derives them from.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from emulator_kernel import apply, kernel, run

from lowbit.dialect.errors import EmulatorError
from lowbit.pylib.emulator import Emulator

RNG = np.random.default_rng(6)

Place = Callable[[int, int, int], tuple[int, int]]  # (groupID, threadID_in_group, element) -> (row, col)

#: (shape, bits of an element) -> A, B. Formulas as PTX ISA writes them.
LAYOUTS: dict[tuple[str, int], tuple[Place, Place]] = {
    ("m16n8k8", 16): (
        lambda g, t, i: (g if i < 2 else g + 8, t * 2 + (i & 1)),
        lambda g, t, i: (t * 2 + i, g),
    ),
    ("m16n8k16", 16): (
        lambda g, t, i: (g if i < 2 or 4 <= i < 6 else g + 8, t * 2 + (i & 1) + (0 if i < 4 else 8)),
        lambda g, t, i: (t * 2 + (i & 1) + (0 if i < 2 else 8), g),
    ),
    ("m16n8k4", 32): (
        lambda g, t, i: (g if i == 0 else g + 8, t),
        lambda g, t, i: (t, g),
    ),
    ("m16n8k8", 32): (
        lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
        lambda g, t, i: (t if i == 0 else t + 4, g),
    ),
    ("m16n8k16", 8): (
        lambda g, t, i: (g if i < 4 else g + 8, t * 4 + (i & 3)),
        lambda g, t, i: (t * 4 + i, g),
    ),
    ("m16n8k32", 8): (
        lambda g, t, i: (g if i < 4 or 8 <= i < 12 else g + 8, t * 4 + (i & 3) + (0 if i < 8 else 16)),
        lambda g, t, i: (t * 4 + (i & 3) + (0 if i < 4 else 16), g),
    ),
}


def accumulator(g: int, t: int, i: int) -> tuple[int, int]:
    return (g if i < 2 else g + 8, t * 2 + (i & 1))


def to_fragment(matrix: np.ndarray, place: Place) -> np.ndarray:
    """The elements of each lane: [32, elements]."""
    count = matrix.size // 32
    return np.array([[matrix[place(lane // 4, lane % 4, i)] for i in range(count)] for lane in range(32)])


def from_fragment(fragment: np.ndarray, place: Place, shape: tuple[int, int]) -> np.ndarray:
    matrix = np.zeros(shape, fragment.dtype)
    for lane in range(32):
        for i in range(fragment.shape[1]):
            matrix[place(lane // 4, lane % 4, i)] = fragment[lane, i]
    return matrix


def registers(elements: np.ndarray) -> list[np.ndarray]:
    """Elements of a lane to its 32-bit registers, lowest first."""
    words = np.ascontiguousarray(elements).view(np.uint32)
    return [np.ascontiguousarray(words[:, i]) for i in range(words.shape[1])]


def mma(name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, layout: tuple[str, int]) -> np.ndarray:
    """Run one mma on matrices of raw elements [16, k], [k, 8] and c [16, 8]; the matrix it gives."""
    place_a, place_b = LAYOUTS[layout]
    parts = [registers(to_fragment(m, p)) for m, p in ((a, place_a), (b, place_b), (c, accumulator))]
    words = np.concatenate([np.stack(part) for part in parts]).astype(np.uint32)
    counts = [len(part) for part in parts]
    names = [f"%r{20 + i}" for i in range(len(words))]
    groups, start = [], 0
    for count in counts:
        groups.append("{" + ", ".join(names[start : start + count]) + "}")
        start += count
    result = [f"%r{60 + i}" for i in range(counts[2])]
    out = np.zeros((32, counts[2]), np.uint32)
    loads = "".join(f"ld.global.b32 {r}, [%rd0+{128 * i}];" for i, r in enumerate(names))
    stores = "".join(f"st.global.b32 [%rd1+{4 * i}], {r};" for i, r in enumerate(result))
    run(
        f"""mov.u32 %r0, %tid.x; ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd0, %r0, 4, %rd0;
    ld.param.u64 %rd1, [p1];
    mad.wide.u32 %rd1, %r0, {4 * counts[2]}, %rd1; {loads}
    mma.sync.aligned.{name} {{{", ".join(result)}}}, {", ".join(groups)}; {stores}""",
        [words, out],
    )
    return from_fragment(out.view(c.dtype), accumulator, (16, 8))


def bf16(x: np.ndarray) -> np.ndarray:
    """Raw bf16 of values that bf16 holds exactly."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("k", [8, 16])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_precision(kind: str, k: int) -> None:
    a, b = RNG.integers(-64, 64, (16, k)) / 8, RNG.integers(-64, 64, (k, 8)) / 8
    c = RNG.standard_normal((16, 8)).astype(np.float32)
    raw = bf16 if kind == "bf16" else lambda x: x.astype(np.float16).view(np.uint16)
    got = mma(f"m16n8k{k}.row.col.f32.{kind}.{kind}.f32", raw(a), raw(b), c, (f"m16n8k{k}", 16))
    # The product is exact; one rounding, of the sum.
    np.testing.assert_array_equal(got, (a @ b + c).astype(np.float32))


@pytest.mark.parametrize("k", [8, 16])
def test_half_precision_accumulator(k: int) -> None:
    a, b = RNG.integers(-9, 9, (16, k)) / 4, RNG.integers(-9, 9, (k, 8)) / 4
    c = RNG.standard_normal((16, 8)).astype(np.float16)
    got = mma(
        f"m16n8k{k}.row.col.f16.f16.f16.f16",
        a.astype(np.float16),
        b.astype(np.float16),
        c,
        (f"m16n8k{k}", 16),
    )
    np.testing.assert_array_equal(got, (a @ b + c).astype(np.float16))


@pytest.mark.parametrize("k", [4, 8])
def test_tf32(k: int) -> None:
    """The 13 low bits of an operand do not count."""
    a, b = (
        RNG.integers(-512, 512, (16, k)).astype(np.float32),
        RNG.integers(-512, 512, (k, 8)).astype(np.float32),
    )
    c = RNG.standard_normal((16, 8)).astype(np.float32)
    dirty = (a.view(np.uint32) | np.uint32(0x1FFF)).view(np.float32)
    got = mma(f"m16n8k{k}.row.col.f32.tf32.tf32.f32", dirty, b, c, (f"m16n8k{k}", 32))
    np.testing.assert_array_equal(got, (a.astype(float) @ b + c).astype(np.float32))


@pytest.mark.parametrize("k", [16, 32])
@pytest.mark.parametrize(("first", "second"), [("s8", "s8"), ("u8", "u8"), ("s8", "u8"), ("u8", "s8")])
def test_bytes(first: str, second: str, k: int) -> None:
    a, b = RNG.integers(0, 256, (16, k)).astype(np.uint8), RNG.integers(0, 256, (k, 8)).astype(np.uint8)
    c = RNG.integers(-(2**31), 2**31, (16, 8)).astype(np.int32)
    typed = [x.view(np.int8 if kind == "s8" else np.uint8).astype(np.int64) for x, kind in ((a, first), (b, second))]
    total = typed[0] @ typed[1] + c
    layout = (f"m16n8k{k}", 8)
    wraps = mma(f"m16n8k{k}.row.col.s32.{first}.{second}.s32", a, b, c, layout)
    np.testing.assert_array_equal(wraps, total.astype(np.int32))
    clamps = mma(f"m16n8k{k}.row.col.satfinite.s32.{first}.{second}.s32", a, b, c, layout)
    np.testing.assert_array_equal(clamps, np.clip(total, -(2**31), 2**31 - 1))
    assert mma(
        f"m16n8k{k}.row.col.satfinite.s32.{first}.{second}.s32",
        a | 64,
        b | 64,
        np.full_like(c, 2**31 - 1),
        layout,
    ).max()


@pytest.mark.parametrize(("first", "second"), [("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "e5m2"), ("e5m2", "e4m3")])
def test_fp8(first: str, second: str) -> None:
    codes = {
        "e4m3": {1.0: 0x38, 1.5: 0x3C, -2.0: 0xC0, 0.25: 0x28, 448.0: 0x7E, 2.0**-9: 0x01},
        "e5m2": {1.0: 0x3C, 1.5: 0x3E, -2.0: 0xC0, 0.25: 0x34, 57344.0: 0x7B, 2.0**-16: 0x01},
    }
    a, b = RNG.choice(list(codes[first]), (16, 32)), RNG.choice(list(codes[second]), (32, 8))
    raw_a = np.vectorize(codes[first].get)(a).astype(np.uint8)
    raw_b = np.vectorize(codes[second].get)(b).astype(np.uint8)
    c = RNG.standard_normal((16, 8)).astype(np.float32)
    got = mma(f"m16n8k32.row.col.f32.{first}.{second}.f32", raw_a, raw_b, c, ("m16n8k32", 8))
    np.testing.assert_array_equal(got, (a @ b + c).astype(np.float32))


def test_special_values() -> None:
    a, b, c = np.zeros((16, 16), np.float16), np.ones((16, 8), np.float16), np.zeros((16, 8), np.float32)
    a[0, 0], a[1, 1], a[2, 0:2] = np.inf, np.nan, [np.inf, -np.inf]
    got = mma("m16n8k16.row.col.f32.f16.f16.f32", a, b, c, ("m16n8k16", 16))
    assert np.isposinf(got[0]).all()
    assert (got.view(np.uint32)[1:3] == 0x7FFFFFFF).all()
    assert not got[3:].any()


@pytest.mark.parametrize(
    "name",
    [
        "m16n8k16.row.row.f32.f16.f16.f32",
        "m16n8k16.row.col.f32.f16.bf16.f32",
        "m16n8k16.row.col.f16.bf16.bf16.f16",
        "m16n8k4.row.col.f32.f16.f16.f32",
        "m16n8k32.row.col.f32.f16.f16.f32",
        "m8n8k4.row.col.f32.f16.f16.f32",
        "m16n8k16.row.col.satfinite.f32.f16.f16.f32",
        "m16n8k16.row.col.f32.e4m3.e4m3.f32",
        "m16n8k16.row.col.kind::mxf8f6f4.f32.f16.f16.f32",
    ],
)
def test_mma_that_does_not_exist(name: str) -> None:
    four = "{%r1,%r2,%r3,%r4}"
    with pytest.raises(EmulatorError, match=r"PTX line \d+: `mma\.sync"):
        Emulator(kernel(f"mma.sync.aligned.{name} {four}, {four}, {{%r1,%r2}}, {four};"))


def test_whole_warps_only() -> None:
    mma = "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%r1,%r2}, {%r1,%r2}, {%r1}, {%r1,%r2};"
    start = "mov.u32 %r0, %tid.x; mov.u32 %r1, 0; mov.u32 %r2, 0; setp.lt.u32 %p1, %r0, 16;"
    run(f"{start} setp.lt.u32 %p1, %r0, 32; @%p1 {mma}", block=64)
    with pytest.raises(EmulatorError, match="deadlock: the other threads of the warp never come here"):
        run(f"{start} @!%p1 bar.sync 1; {mma}")
    with pytest.raises(EmulatorError, match="some threads have exited"):
        run(f"{start} @%p1 exit; {mma}")
    with pytest.raises(EmulatorError, match="some threads have exited"):
        run(f"{start} {mma}", block=40)


# ldmatrix, stmatrix, movmatrix

SMEM = ".shared .align 16 .b8 smem[2048];"
FILL = f"""{SMEM} mov.u32 %r0, %tid.x; ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; mov.u32 %r1, smem;
    mad.lo.u32 %r2, %r0, 16, %r1; mad.wide.u32 %rd0, %r0, 16, %rd0;
    ld.global.v4.b32 {{%r4,%r5,%r6,%r7}}, [%rd0]; st.shared.v4.b32 [%r2], {{%r4,%r5,%r6,%r7}}; bar.sync 0;"""


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(count: int, transposed: bool) -> None:
    """Register i of lane l is row l / 4, columns 2 (l % 4) and + 1, of matrix i; lane 8 i + r names row r.

    64 threads, whose rows lie in reverse order to tell addresses from lanes.
    """
    rows = RNG.integers(0, 2**16, (64, 8)).astype(np.uint16)
    out = np.zeros((64, count), np.uint32)
    results = [f"%r{20 + i}" for i in range(count)]
    stores = "".join(f"st.global.b32 [%rd1+{4 * i}], {r};" for i, r in enumerate(results))
    # Only the addresses of the first 8 * count lanes are looked at.
    run(
        f"""{FILL} sub.u32 %r3, 63, %r0; mad.lo.u32 %r3, %r3, 16, %r1; and.b32 %r8, %r0, 31;
    setp.ge.u32 %p1, %r8, {8 * count}; selp.b32 %r3, 3, %r3, %p1;
    ldmatrix.sync.aligned.m8n8.x{count}{".trans" if transposed else ""}.shared.b16
    {{{", ".join(results)}}}, [%r3];
    mad.wide.u32 %rd1, %r0, {4 * count}, %rd1; {stores}""",
        [rows, out],
        block=64,
        racecheck=True,
    )
    for thread in range(64):
        warp, lane = divmod(thread, 32)
        for i in range(count):
            matrix = np.array([rows[63 - (32 * warp + 8 * i + row)] for row in range(8)])
            matrix = matrix.T if transposed else matrix
            expected = matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
            np.testing.assert_array_equal(out[thread, i : i + 1].view(np.uint16), expected)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_undoes_ldmatrix(count: int, transposed: bool) -> None:
    rows, out = RNG.integers(0, 2**16, (64, 8)).astype(np.uint16), np.zeros((64, 8), np.uint16)
    registers = "{" + ", ".join(f"%r{20 + i}" for i in range(count)) + "}"
    form = f"sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16"
    run(
        f"""{FILL} mov.u32 %r9, 0; st.shared.v4.b32 [%r2+1024], {{%r9, %r9, %r9, %r9}}; bar.sync 0;
    ldmatrix.{form} {registers}, [%r2]; stmatrix.{form} [%r2+1024], {registers}; bar.sync 0;
    ld.shared.v4.b32 {{%r4,%r5,%r6,%r7}}, [%r2+1024]; mad.wide.u32 %rd1, %r0, 16, %rd1;
    st.global.v4.b32 [%rd1], {{%r4,%r5,%r6,%r7}};""",
        [rows, out],
        block=64,
        racecheck=True,
    )
    written = np.arange(64) % 32 < 8 * count
    np.testing.assert_array_equal(out, np.where(written[:, None], rows, 0))


def test_movmatrix() -> None:
    matrices = RNG.integers(0, 2**16, (2, 8, 8)).astype(np.uint16)
    got = apply("movmatrix.sync.aligned.m8n8.trans.b16 %x, %a;", matrices.view(np.uint32).ravel(), out=np.uint32)
    np.testing.assert_array_equal(got.view(np.uint16).reshape(2, 8, 8), matrices.transpose(0, 2, 1))


def test_ldmatrix_checks_its_rows() -> None:
    array = np.zeros((64, 8), np.uint16)
    with pytest.raises(EmulatorError, match="a matrix row is not a multiple of 16"):
        run(
            f"{FILL} add.u32 %r2, %r2, 8; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r3}}, [%r2];",
            [array, array],
        )
    with pytest.raises(EmulatorError, match="never written"):
        run(f"{FILL} ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r3,%r4,%r5,%r6}}, [%r2+512];", [array, array])
    with pytest.raises(EmulatorError, match="race"):
        run(
            f"{FILL} ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r3}}, [%r2]; st.shared.b32 [%r2], %r3;",
            [array, array],
            racecheck=True,
        )
    copy = FILL.replace("st.shared.v4.b32 [%r2], {%r4,%r5,%r6,%r7};", "cp.async.cg.shared.global [%r2], [%rd0], 16;")
    with pytest.raises(EmulatorError, match="not waited for"):
        run(f"{copy} ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r3}}, [%r2];", [array, array])
