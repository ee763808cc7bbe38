"""lower-tiles: small tile programs, compiled and run in the emulator, against NumPy.

Each program has one point: a boundary, a conversion, a shape of fragments. The emulator checks on the way that nothing
is read or written out of bounds, that accesses are aligned, and (racecheck) that barriers order them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.formats.packing import Packing
from lowbit.dialect.layouts.layout import (
    MMA_M16N8_D,
    MMA_M16N8K16_A,
    MMA_M16N8K16_B_NK,
    Layout,
    column_spatial,
    local,
    replicated,
    spatial,
)
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Memory, Program
from lowbit.passes.pipeline import compile_program
from lowbit.passes.target import parse_target
from lowbit.pylib.emulator import Emulator, EmulatorError
from lowbit.pylib.packed import pack

Array = np.ndarray[Any, Any]
Body = Callable[[Program], None]


def run(
    body: Body,
    *,
    threads: int = 32,
    grid: tuple[int, int, int] = (1, 1, 1),
    target: str = "emulator:sm_80",
    launches: int = 1,
    **arguments: Array | int,
) -> Any:
    """Build a program with these parameters (arrays are pointers), compile it, and launch it. Returns the launch."""
    kinds = {name: "pointer" if isinstance(value, np.ndarray) else "i32" for name, value in arguments.items()}

    def build() -> Any:
        p = Program("test", threads, grid, kinds)
        with p:
            body(p)
        return p.module

    kernel = compile_program(build, parse_target(target))
    emulator = Emulator(kernel.ptx)
    for _ in range(launches):
        emulator.run(kernel.launch, arguments, racecheck=True)
    return kernel


def numbers(*shape: int, kind: Any = np.float16, seed: int = 0) -> Array:
    """Small integers, no two rows or columns alike: exact in every type and in sums."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(kind)


def bf16(x: Array) -> Array:
    """Numbers that bf16 holds exactly, as its bit patterns."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def copy(p: Program, source: Memory, y: Memory, layout: Layout) -> None:
    """source to y, through registers."""
    zero = (0,) * layout.rank
    p.store(p.load(source, zero, layout), y, zero)


# -- access


LAYOUTS = {
    "rows": spatial(8, 4).local(1, 8),  # 16 bytes a thread
    "columns": column_spatial(8, 4).local(1, 8),
    "single": local(2, 4).spatial(4, 8),
    "column major": column_spatial(8, 4).column_local(1, 8),
    "twisted": local(2, 1).spatial(2, 2).local(1, 4).column_spatial(2, 4),
}


@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize("name", LAYOUTS)
def test_load_and_store_with_any_layout(name: str, kind: Any) -> None:
    """A tile in the middle of an array goes to where it belongs, and nothing else is written."""
    layout = LAYOUTS[name]
    rows, columns = layout.shape
    element = {np.float16: "f16", np.float32: "f32"}[kind]
    x, y = numbers(3 * rows, 3 * columns, kind=kind), np.zeros((2 * rows, 2 * columns), kind)

    def body(p: Program) -> None:
        source, target = p.global_view(p["x"], element, x.shape), p.global_view(p["y"], element, y.shape)
        p.store(p.load(source, (rows, 2 * columns), layout), target, (rows, 0))

    run(body, x=x, y=y)
    expected = np.zeros_like(y)
    expected[rows:, :columns] = x[rows : 2 * rows, 2 * columns :]
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("m", [0, 1, 5, 8, 11, 16])
def test_load_boundaries(m: int) -> None:
    """Rows beyond m: zero, or the last one; on the way out they are skipped. 16 rows from row 3 on."""
    x = numbers(max(m, 1), 8) + np.float16(20)  # no zeros
    zero, clamp, skip = (np.full((16, 8), 99, np.float16) for _ in range(3))
    layout = local(2, 1).spatial(8, 4).local(1, 2)

    def body(p: Program) -> None:
        source = p.global_view(p["x"], "f16", (-1, 8), sizes=[p["m"]])
        outputs = {name: p.global_view(p[name], "f16", (16, 8)) for name in ("zero", "clamp")}
        zeros = p.load(source, (3, 0), layout, ("zero", "none"))
        p.store(zeros, outputs["zero"], (0, 0))
        if m:
            p.store(p.load(source, (3, 0), layout, ("clamp", "none")), outputs["clamp"], (0, 0))
        p.store(zeros, p.global_view(p["skip"], "f16", (-1, 8), sizes=[p["m"]]), (3, 0), ("skip", "none"))

    run(body, x=x, zero=zero, clamp=clamp, skip=skip, m=m)
    rows = np.arange(3, 19)
    np.testing.assert_array_equal(zero, np.where((rows < m)[:, None], x[np.minimum(rows, len(x) - 1)], 0))
    if m:
        np.testing.assert_array_equal(clamp, x[np.minimum(rows, m - 1)])
    written = (np.arange(16) >= 3) & (np.arange(16) < m)
    np.testing.assert_array_equal(skip, np.where(written[:, None], np.resize(x, (16, 8)), 99))


def test_boundaries_within_a_vector() -> None:
    """The end cuts a thread's eight elements in two: single elements are read and written."""
    x, y = numbers(4, 61) + np.float16(20), np.zeros((4, 64), np.float16)

    def body(p: Program) -> None:
        tile = p.load(p.global_view(p["x"], "f16", x.shape), (0, 0), spatial(4, 8).local(1, 8), ("none", "zero"))
        p.store(tile, p.global_view(p["y"], "f16", y.shape), (0, 0))
        p.store(tile, p.global_view(p["x"], "f16", x.shape), (0, 3), ("none", "skip"))

    before = x.copy()
    run(body, x=x, y=y)
    np.testing.assert_array_equal(y, np.pad(before, ((0, 0), (0, 3))))
    np.testing.assert_array_equal(x[:, 3:], before[:, :58])


def test_divisors_and_strides() -> None:
    """A view with a divisor has an element many times; with stride 0 a whole dim; with other strides a transpose."""
    x = numbers(4, 8, kind=np.float32)
    halves, same, turned = (np.zeros((8, 8), np.float32) for _ in range(3))

    def body(p: Program) -> None:
        layout = spatial(8, 4).local(1, 2)
        outputs = [p.global_view(p[name], "f32", (8, 8)) for name in ("halves", "same", "turned")]
        views = [
            p.global_view(p["x"], "f32", (8, 8), (8, 1), divisors=(2, 1)),
            p.global_view(p["x"], "f32", (8, 8), (0, 1)),
            p.global_view(p["x"], "f32", (8, 8), (1, 8), divisors=(1, 2)),
        ]
        for view, output in zip(views, outputs):
            copy(p, view, output, layout)

    run(body, x=x, halves=halves, same=same, turned=turned)
    np.testing.assert_array_equal(halves, np.repeat(x, 2, axis=0))
    np.testing.assert_array_equal(same, np.tile(x[0], (8, 1)))
    np.testing.assert_array_equal(turned, np.repeat(x, 2, axis=0).T)


def test_replicas_store_once() -> None:
    """Every thread has the sum of its row's part; of those with the same, the first one stores it (a race if not)."""
    x, y = numbers(8, 4, kind=np.float32), np.zeros((8, 1), np.float32)

    def body(p: Program) -> None:
        tile = p.load(p.global_view(p["x"], "f32", x.shape), (0, 0), spatial(8, 1).local(1, 4).replicated(4))
        total = p.reduce(tile, 1)
        shared = p.alloc_shared("f32", (8, 1))
        p.store(total, shared, (0, 0))
        p.barrier()
        copy(p, shared, p.global_view(p["y"], "f32", y.shape), total.layout)

    run(body, x=x, y=y)
    np.testing.assert_array_equal(y[:, 0], x.sum(1))


# -- copies to shared memory


@pytest.mark.parametrize("vector", [2, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 4])
@pytest.mark.parametrize("boundary", ["zero", "clamp", "skip"])
def test_copy_async(boundary: str, m: int, vector: int) -> None:
    """4, 8 or 16 bytes at a time; rows beyond m read as zero or as the last one, or stay as they were."""
    columns = 8 * vector
    x, y = numbers(m, columns) + np.float16(20), np.zeros((4, columns), np.float16)
    layout = spatial(4, 8).local(1, vector)

    def body(p: Program) -> None:
        source = p.global_view(p["x"], "f16", (-1, columns), sizes=[p["m"]])
        buffer = p.alloc_shared("f16", (4, columns), (columns + 8, 1))
        p.store(p.constant(7.0, "f16", layout), buffer, (0, 0))
        p.barrier()
        p.copy_async(source, buffer, (0, 0), layout, (boundary, "none"))
        p.commit()
        p.wait()
        p.barrier()
        copy(p, buffer, p.global_view(p["y"], "f16", y.shape), layout)

    run(body, x=x, y=y, m=m)
    beyond = {"zero": np.zeros_like(y), "clamp": np.tile(x[-1], (4, 1)), "skip": np.full_like(y, 7)}[boundary]
    np.testing.assert_array_equal(y, np.where((np.arange(4) < m)[:, None], np.resize(x, y.shape), beyond))


@pytest.mark.parametrize("k", [40, 64, 104, 120])
def test_copy_async_with_a_limit(k: int) -> None:
    """A row of k elements seen as two steps of 64: what the limit cuts off reads as zero, not as the next row."""
    x, y = numbers(4, k) + np.float16(20), np.zeros((2, 4, 64), np.float16)
    layout = spatial(1, 4, 8).local(2, 1, 8)

    def body(p: Program) -> None:
        source = p.global_view(p["x"], "f16", (-(-k // 64), 4, 64), (64, k, 1))
        buffer = p.alloc_shared("f16", (2, 4, 64))
        limit = (64, 0, 1, k)
        p.copy_async(source, buffer, (0, 0, 0), layout, ("zero", "none", "none"), limit)
        p.commit()
        p.wait()
        p.barrier()
        copy(p, buffer, p.global_view(p["y"], "f16", y.shape), layout)

    run(body, x=x, y=y)
    expected = np.pad(x, ((0, 0), (0, 128 - k))).reshape(4, 2, 64).transpose(1, 0, 2)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(("group", "padded", "k"), [(17, 32, 51), (48, 64, 96), (100, 128, 100), (1, 1, 130)])
@pytest.mark.parametrize("m", [1, 3])
def test_copy_padded(group: int, padded: int, k: int, m: int) -> None:
    """Groups of columns spread over padded groups, zero between and behind; rows beyond m left alone."""
    x, y = numbers(m, k) + np.float16(20), np.zeros((2, 4, 64), np.float16)
    layout = local(2, 4, 2).spatial(1, 1, 32)

    def body(p: Program) -> None:
        source = p.global_view(p["x"], "f16", (-1, k), sizes=[p["m"]])
        buffer = p.alloc_shared("f16", (2, 4, 64), (4 * 72, 72, 1))
        p.store(p.constant(7.0, "f16", layout), buffer, (0, 0, 0))
        p.barrier()
        p.copy_padded(source, buffer, (0, 0), layout, group, padded)
        p.barrier()
        copy(p, buffer, p.global_view(p["y"], "f16", y.shape), layout)

    run(body, x=x, y=y, m=m)
    column = np.arange(128)
    from_ = column // padded * group + column % padded
    there = (column % padded < group) & (from_ < k)
    rows = np.where(there, x[:, np.minimum(from_, k - 1)], 0)
    expected = np.full((4, 128), 7, np.float16)
    expected[:m] = rows
    np.testing.assert_array_equal(y, expected.reshape(4, 2, 64).transpose(1, 0, 2))


def test_freed_memory_is_used_again() -> None:
    """Three buffers, one after the other: as much shared memory as the largest takes, rounded up to 128 bytes."""
    x, y = numbers(8, 4, kind=np.float32), np.zeros((3, 8, 4), np.float32)
    layout = spatial(8, 4)

    def body(p: Program) -> None:
        source = p.global_view(p["x"], "f32", x.shape)
        for i in range(3):
            buffer = p.alloc_shared("f32", (8, 4), (4 + i, 1))
            p.store(p.load(source, (0, 0), layout), buffer, (0, 0))
            p.barrier()
            target = p.global_view(p["y"], "f32", y.shape)
            p.store(p.reshape(p.load(buffer, (0, 0), layout), (1, 8, 4)), target, (i, 0, 0))
            p.barrier()
            p.free_shared(buffer)

    kernel = run(body, x=x, y=y)
    assert kernel.launch.shared_bytes == 256
    np.testing.assert_array_equal(y, np.stack([x] * 3))


def test_a_missing_barrier_is_noticed() -> None:
    """The check behind all these tests: without the barrier, the emulator reports a race."""
    y = np.zeros((2, 32), np.float32)

    def body(p: Program) -> None:
        buffer = p.alloc_shared("f32", (2, 32))
        p.store(p.constant(1.0, "f32", spatial(2, 32)), buffer, (0, 0))
        copy(p, buffer, p.global_view(p["y"], "f32", y.shape), column_spatial(2, 32))

    with pytest.raises(EmulatorError):
        run(body, threads=64, y=y)


# -- numbers


BYTES = np.arange(256, dtype=np.uint8)


def test_casts_from_bytes() -> None:
    """e4m3 and e8m0 scales and unsigned zeros, every code (e4m3's NaN aside: no scale is NaN)."""
    outputs = {kind: np.zeros(256, np.float32) for kind in ("e4m3", "e8m0", "unsigned")}

    def body(p: Program) -> None:
        codes = p.load(p.global_view(p["x"], "i8", (256,)), (0,), spatial(32).local(8))
        for kind in outputs:
            p.store(p.cast(codes, "f32", kind), p.global_view(p[kind], "f32", (256,)), (0,))

    run(body, x=BYTES, **outputs)
    e4m3 = dtype("f8e4m3").values()
    finite = np.isfinite(e4m3)
    np.testing.assert_array_equal(outputs["e4m3"][finite], e4m3[finite])
    np.testing.assert_array_equal(outputs["e8m0"][:255], 2.0 ** (np.arange(255.0) - 127))
    np.testing.assert_array_equal(outputs["unsigned"], BYTES)


@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_casts_round_to_even(element: str) -> None:
    """f32 to 16 bits and back: to nearest, ties to even, in the range of normal numbers."""
    rng = np.random.default_rng(0)
    ties = np.float32(1) + np.arange(64, dtype=np.float32) * np.float32(2.0**-11 if element == "f16" else 2.0**-8)
    x = np.concatenate([ties, rng.standard_normal(192).astype(np.float32) * 100])
    y = np.zeros(256, np.float32)

    def body(p: Program) -> None:
        tile = p.load(p.global_view(p["x"], "f32", (256,)), (0,), spatial(32).local(8))
        p.store(p.cast(p.cast(tile, element), "f32"), p.global_view(p["y"], "f32", (256,)), (0,))

    run(body, x=x, y=y)
    bits = x.view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(y, x.astype(np.float16).astype(np.float32) if element == "f16" else nearest)


def test_arithmetic_broadcasts() -> None:
    """a * row + column, where a row is in every thread that needs it, and so is a column."""
    a, row, column = (numbers(*shape, kind=np.float32, seed=i) for i, shape in enumerate([(8, 8), (1, 8), (8, 1)]))
    y = np.zeros((8, 8), np.float32)
    layout = spatial(8, 4).local(1, 2)

    def body(p: Program) -> None:
        tile = p.load(p.global_view(p["a"], "f32", a.shape), (0, 0), layout)
        factor = p.load(p.global_view(p["row"], "f32", row.shape), (0, 0), layout.reduce((0,)))
        offset = p.load(p.global_view(p["column"], "f32", column.shape), (0, 0), layout.reduce((1,)))
        total = p.add(p.mul(tile, factor), p.fma(tile, factor, offset))
        p.store(total, p.global_view(p["y"], "f32", y.shape), (0, 0))

    run(body, a=a, row=row, column=column, y=y)
    np.testing.assert_array_equal(y, 2 * a * row + column)


def test_slices_and_shapes() -> None:
    """The right half of a tile, as a matrix of another shape."""
    x, y = numbers(8, 32, kind=np.float32), np.zeros((4, 2, 16), np.float32)

    def body(p: Program) -> None:
        tile = p.load(p.global_view(p["x"], "f32", x.shape), (0, 0), local(1, 4).spatial(8, 4).local(1, 2))
        half = p.reshape(p.slice(tile, 1, 16, 16), (4, 2, 16))
        p.store(half, p.global_view(p["y"], "f32", y.shape), (0, 0, 0))

    run(body, x=x, y=y)
    np.testing.assert_array_equal(y, x[:, 16:].reshape(4, 2, 16))


@pytest.mark.parametrize("combine", ["sum", "max"])
def test_reduce_over_lanes(combine: str) -> None:
    """Lanes that differ along the dim, neighbours or not, exchange what they have; all get the result."""
    x, y = numbers(2, 64).astype(np.float32), np.zeros((2, 64), np.float32)
    layout = spatial(1, 4).spatial(2, 1).spatial(1, 4).local(1, 4)

    def body(p: Program) -> None:
        tile = p.load(p.global_view(p["x"], "f32", x.shape), (0, 0), layout)
        every = p.add(p.mul(tile, 0.0), p.reduce(tile, 1, combine))
        p.store(every, p.global_view(p["y"], "f32", y.shape), (0, 0))

    run(body, x=x, y=y)
    expected = (np.sum if combine == "sum" else np.max)(x, axis=1, keepdims=True)
    np.testing.assert_allclose(y, np.broadcast_to(expected, y.shape), rtol=1e-5)


def test_reduce() -> None:
    """The sum over the slots of every thread, in a dim that is interleaved with others."""
    x, y = numbers(6, 8, 4, kind=np.float32), np.zeros((1, 8, 4), np.float32)

    def body(p: Program) -> None:
        layout = local(3, 1, 1).spatial(1, 8, 1).local(2, 1, 1).spatial(1, 1, 4)
        total = p.reduce(p.load(p.global_view(p["x"], "f32", x.shape), (0, 0, 0), layout), 0)
        p.store(total, p.global_view(p["y"], "f32", y.shape), (0, 0, 0))

    run(body, x=x, y=y)
    np.testing.assert_array_equal(y, x.sum(0, keepdims=True))


# -- the tensor core


def in_element(x: Array, element: str) -> Array:
    return bf16(x) if element == "bf16" else x.astype(np.float16 if element == "f16" else np.float32)


@pytest.mark.parametrize(
    ("a_element", "b_element"), [("f16", "f16"), ("bf16", "bf16"), ("f32", "f16"), ("f32", "bf16")]
)
@pytest.mark.parametrize(("rows", "tokens", "depth"), [(1, 1, 1), (2, 3, 2)])
def test_mma(a_element: str, b_element: str, rows: int, tokens: int, depth: int) -> None:
    """c + a b^T of several fragments; small integers, whose products and sums are exact. a of f32 runs as tf32."""
    m, n, k = 16 * rows, 8 * tokens, 16 * depth
    a, b, c = numbers(m, k, seed=1), numbers(n, k, seed=2), numbers(m, n, kind=np.float32, seed=3)
    y = np.zeros((m, n), np.float32)

    def body(p: Program) -> None:
        a_tile = p.load(p.global_view(p["a"], a_element, (m, k)), (0, 0), local(rows, depth) * MMA_M16N8K16_A)
        b_tile = p.load(p.global_view(p["b"], b_element, (n, k)), (0, 0), local(tokens, depth) * MMA_M16N8K16_B_NK)
        c_tile = p.load(p.global_view(p["c"], "f32", (m, n)), (0, 0), local(rows, tokens) * MMA_M16N8_D)
        p.store(p.mma(a_tile, b_tile, c_tile), p.global_view(p["y"], "f32", (m, n)), (0, 0))

    run(body, a=in_element(a, a_element), b=in_element(b, b_element), c=c, y=y)
    np.testing.assert_array_equal(y, c + a.astype(np.float32) @ b.astype(np.float32).T)


def test_mma_on_several_warps() -> None:
    """Two batches, one per pair of warps; in a pair, 16 rows each, and the same b."""
    a, b = numbers(2, 32, 16, seed=1), numbers(2, 8, 16, seed=2)
    y = np.zeros((2, 32, 8), np.float32)

    def batched(layout: Layout) -> Layout:
        return layout.reshape((1, *layout.shape))

    def body(p: Program) -> None:
        a_tile = p.load(p.global_view(p["a"], "f16", a.shape), (0, 0, 0), spatial(2, 2, 1) * batched(MMA_M16N8K16_A))
        b_layout = spatial(2, 1, 1).replicated(2) * batched(MMA_M16N8K16_B_NK)
        b_tile = p.load(p.global_view(p["b"], "f16", b.shape), (0, 0, 0), b_layout)
        zero = p.constant(0.0, "f32", spatial(2, 2, 1) * batched(MMA_M16N8_D))
        p.store(p.mma(a_tile, b_tile, zero), p.global_view(p["y"], "f32", y.shape), (0, 0, 0))

    run(body, threads=128, a=a, b=b, y=y)
    np.testing.assert_array_equal(y, np.einsum("bmk,bnk->bmn", a.astype(np.float32), b.astype(np.float32)))


@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize(("n_blocks", "k_blocks"), [(1, 1), (1, 2), (1, 3), (2, 1), (3, 2), (4, 3)])
def test_load_matrix(n_blocks: int, k_blocks: int, element: str) -> None:
    """ldmatrix of one, two or four 8 x 8 matrices at a time, as the counts allow; rows from m on are the last one."""
    n, k = 8 * n_blocks, 16 * k_blocks
    m = n - 3
    x, y = in_element(numbers(n, k), element), np.zeros((n, k), np.uint16 if element == "bf16" else np.float16)
    layout = local(n_blocks, k_blocks) * MMA_M16N8K16_B_NK

    def body(p: Program) -> None:
        buffer = p.alloc_shared(element, (n, k), (k + 8, 1))
        p.store(p.load(p.global_view(p["x"], element, (n, k)), (0, 0), layout), buffer, (0, 0))
        p.barrier()
        tile = p.load_matrix(buffer, p["m"], layout)
        p.store(tile, p.global_view(p["y"], element, (n, k)), (0, 0))

    run(body, x=x, y=y, m=m)
    np.testing.assert_array_equal(y, x[np.minimum(np.arange(n), m - 1)])


@pytest.mark.parametrize("m", [3, 20, 32])
def test_load_matrix_on_several_warps(m: int) -> None:
    """Rows from m on are the last one, also where a warp has no row below m."""
    x, y, layout = numbers(32, 32), np.zeros((32, 32), np.float16), spatial(2, 1) * local(2, 2) * MMA_M16N8K16_B_NK

    def body(p: Program) -> None:
        buffer = p.alloc_shared("f16", x.shape, (40, 1))
        p.store(p.load(p.global_view(p["x"], "f16", x.shape), (0, 0), layout), buffer, (0, 0))
        p.barrier()
        p.store(p.load_matrix(buffer, p["m"], layout), p.global_view(p["y"], "f16", y.shape), (0, 0))

    run(body, threads=64, x=x, y=y, m=m)
    np.testing.assert_array_equal(y, x[np.minimum(np.arange(32), m - 1)])


@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize("k_blocks", [1, 3, 16])
def test_load_diagonal(k_blocks: int, element: str) -> None:
    """Row i has the columns of blocks i, i + 8, .. of 16, and zeros: of two warps, each with a buffer of its own."""
    k = 16 * k_blocks
    x = in_element(numbers(2, k), element)
    y, rows = np.ones((2, 8, k), x.dtype), spatial(2, 1, 1) * local(1, 1, k_blocks) * spatial(1, 1, 16).replicated(2)

    def body(p: Program) -> None:
        buffer = p.alloc_shared(element, (2, 1, k), (k + 8, k + 8, 1))
        p.store(p.load(p.global_view(p["x"], element, (2, 1, k)), (0, 0, 0), rows), buffer, (0, 0, 0))
        p.barrier()
        layout = spatial(2, 1, 1) * local(1, 1, k_blocks) * MMA_M16N8K16_B_NK.unsqueeze(0)
        p.store(p.load_diagonal(buffer, layout), p.global_view(p["y"], element, y.shape), (0, 0, 0))

    run(body, threads=64, x=x, y=y)
    kept = np.arange(k) // 16 % 8 == np.arange(8)[:, None]
    np.testing.assert_array_equal(y, np.where(kept, x[:, None], 0))


@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_row_sums(element: str) -> None:
    """Sums of the rows of b, where the accumulator of an mma with b has its columns."""
    x, y = numbers(16, 48), np.zeros((1, 16), np.float32)

    def body(p: Program) -> None:
        b = p.load(p.global_view(p["x"], element, x.shape), (0, 0), local(2, 3) * MMA_M16N8K16_B_NK)
        sums = p.row_sums(b, (local(1, 2) * MMA_M16N8_D).reduce((0,)))
        p.store(sums, p.global_view(p["y"], "f32", y.shape), (0, 0))

    run(body, x=in_element(x, element), y=y)
    np.testing.assert_array_equal(y[0], x.astype(np.float32).sum(1))


@pytest.mark.parametrize(
    ("weight", "element"),
    [("u4", "f16"), ("i6", "bf16"), ("u3", "f16"), ("nf4", "f16"), ("f6e3m2", "f32"), ("i8", "bf16")],
)
@pytest.mark.parametrize("warps", [1, 2])
def test_decode(weight: str, element: str, warps: int) -> None:
    """Packed words to numbers: two row blocks of two chunks, of which every warp has some columns."""
    t = dtype(weight)
    chunk = Packing(t.bits, 16, 16).chunk
    n, k = 32, chunk * 2
    codes = np.random.default_rng(0).integers(0, t.codes, (n, k))
    given = codes - t.codes // 2 if t.kind == "int" else codes
    packed = pack(MatmulSpec(n, k, weight), given, np.ones(n)).codes.numpy()
    y = np.zeros((n, k), np.float32)
    units = Packing(t.bits, n, k).units

    def body(p: Program) -> None:
        own = 2 // warps
        view = p.global_view(p["x"], "vector<4xi32>", (2, 2, units * 32))
        words = p.load(view, (0, 0, 0), spatial(1, warps, 1).local(2, own, units).spatial(1, 1, 32))
        layout = spatial(1, warps) * local(2, own * chunk // 16) * MMA_M16N8K16_A
        decoded = p.decode(p.view(words, t, layout), element)
        p.store(p.cast(decoded, "f32"), p.global_view(p["y"], "f32", (n, k)), (0, 0))

    run(body, threads=32 * warps, x=packed, y=y)
    rounded = t.values()[codes if t.kind != "int" else codes ^ (t.codes // 2)]
    expected = rounded.astype(np.float16) if element == "f16" else rounded
    np.testing.assert_array_equal(y, expected.astype(np.float32))


# -- blocks and loops


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_last_arrival(blocks: int) -> None:
    """Each block writes a part; the last one to come adds them up. The counter is zero again for the next launch."""
    x = numbers(blocks, 64, kind=np.float32)
    parts, y, counters = np.zeros_like(x), np.zeros(64, np.float32), np.zeros(3, np.int32)

    def body(p: Program) -> None:
        block, layout = p.block_id(0), spatial(1, 64)
        view = p.global_view(p["parts"], "f32", parts.shape)
        p.store(p.load(p.global_view(p["x"], "f32", x.shape), (block, 0), layout), view, (block, 0))
        last = p.last_arrival(p.global_view(p["counters"], "i32", (3,)), 1, blocks)
        with p.when(last):
            total = p.reduce(p.load(view, (0, 0), local(blocks, 1) * layout), 0)
            p.store(p.reshape(total, (64,)), p.global_view(p["y"], "f32", (64,)), (0,))

    run(body, threads=64, grid=(blocks, 1, 1), launches=2, x=x, parts=parts, y=y, counters=counters)
    np.testing.assert_array_equal(y, x.sum(0))
    np.testing.assert_array_equal(counters, 0)


def test_loops_carry_tiles_of_any_kind() -> None:
    """A pair-wise and an element-wise tile go round, swapped, n times."""
    x, y = numbers(2, 8, 8), np.zeros((2, 8, 8), np.float16)
    layout = local(1, 1, 2).spatial(1, 8, 4)

    def body(p: Program) -> None:
        source = p.global_view(p["x"], "f16", x.shape)
        one = p.constant(1.0, "f16", layout)
        with p.loop(0, p["n"], [one, p.load(source, (0, 0, 0), layout)]) as loop:
            first, second = loop.carried
            loop.results = [second, p.add(first, one)]
        for i, tile in enumerate(loop.carried):
            p.store(tile, p.global_view(p["y"], "f16", y.shape), (i, 0, 0))

    run(body, x=x, y=y, n=3)
    first, second = np.ones((8, 8), np.float16), x[0]
    for _ in range(3):
        first, second = second, first + np.float16(1)
    np.testing.assert_array_equal(y, np.stack([first, second]))


def test_what_a_branch_uses_is_there_after_it() -> None:
    """Registers of a pair that a branch takes apart are whole for those who come after it."""
    x, y = numbers(8, 8), np.zeros((2, 8, 8), np.float32)

    def body(p: Program) -> None:
        layout = spatial(8, 4).local(1, 2)
        twice = p.add(p.constant(1.0, "f16", layout), p.load(p.global_view(p["x"], "f16", x.shape), (0, 0), layout))
        wide = p.reshape(p.cast(twice, "f32"), (1, 8, 8))
        target = p.global_view(p["y"], "f32", y.shape)
        with p.when(p["m"] < 3):
            p.store(wide, target, (0, 0, 0))
        p.store(wide, target, (1, 0, 0))

    for m, times in ((2, 1), (3, 0)):
        y[:] = 0
        run(body, x=x, y=y, m=m)
        np.testing.assert_array_equal(y, np.stack([(x + 1.0) * times, x + 1.0]))


@pytest.mark.parametrize("scope", ["block", "warps"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_pipeline_copies(stages: int, scope: str) -> None:
    """Horner's sum of w[i] and x[i] for 0 to 5 rounds. Two copies a round, one of which waits for the kernel before:
    every round gets its own data, in order, and nothing is copied from beyond the end (the arrays end there)."""
    layout = spatial(1, 32).local(1, 2)

    def body(p: Program) -> None:
        views = [p.global_view(p[name], "f16", (5, 64)) for name in ("w", "x")]
        buffers = [p.alloc_shared("f16", (1, 64)) for _ in views]
        zero = p.constant(0.0, "f32", layout)
        with p.loop(0, p["rounds"], [zero]) as loop:
            with p.pipeline(num_stages=stages, scope=scope):
                p.copy_async(views[0], buffers[0], (loop.index, 0), layout)
                p.grid_wait()
                p.copy_async(views[1], buffers[1], (loop.index, 0), layout)
            w, x = (p.cast(p.load(buffer, (0, 0), layout), "f32") for buffer in buffers)
            two = p.constant(2.0, "f32", layout)
            loop.results = [p.fma(loop.carried[0], two, p.fma(w, two, x))]
        p.barrier()
        p.free_shared(*buffers)
        p.store(loop.carried[0], p.global_view(p["y"], "f32", (1, 64)), (0, 0))

    for rounds in range(6):
        x, w, y = numbers(rounds, 64, seed=1), numbers(rounds, 64, seed=2), np.zeros((1, 64), np.float32)
        run(body, target="emulator:sm_90a", w=w, x=x, y=y, rounds=rounds)
        expected = np.zeros(64)
        for i in range(rounds):
            expected = 2 * expected + 2.0 * w[i] + x[i]
        np.testing.assert_array_equal(y[0], expected, err_msg=f"{rounds} rounds")


def test_replicated_constant() -> None:
    """A tile that all 64 threads hold is stored once."""
    y = np.zeros((1, 1), np.float32)

    def body(p: Program) -> None:
        p.store(p.constant(3.0, "f32", replicated(64, 2)), p.global_view(p["y"], "f32", (1, 1)), (0, 0))

    run(body, threads=64, y=y)
    assert y == 3
