"""lower-tiles: fragments, products and decoding, in the emulator, against NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tile_programs import Array, numbers, run

from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.formats.packing import Packing
from lowbit.dialect.formats.raw_codes import deferred_offset
from lowbit.dialect.formats.reals import F16
from lowbit.dialect.layouts.fragments import MMA_M16N8_D, MMA_M16N8K16_A, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import Layout, local, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program
from lowbit.pylib.weights.packed import pack


def bf16(x: Array) -> Array:
    """Numbers that bf16 holds exactly, as its bit patterns."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


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
def test_diagonal(element: str) -> None:
    """Row i has its blocks of 16 columns at i, i + 8, .. and zeros elsewhere: of two warps, each with its own."""
    x, blocks = numbers(2, 8, 32), local(1, 1, 2) * MMA_M16N8K16_B_NK.unsqueeze(0)
    y = np.ones((2, 8, 256), in_element(x, element).dtype)

    def body(p: Program) -> None:
        rows = p.load(p.global_view(p["x"], element, x.shape), (0, 0, 0), spatial(2, 1, 1) * blocks)
        wide = p.diagonal(rows, spatial(2, 1, 1) * local(1, 1, 8) * blocks)
        p.store(wide, p.global_view(p["y"], element, y.shape), (0, 0, 0))

    run(body, threads=64, x=in_element(x, element), y=y)
    there = in_element(x, element).reshape(2, 8, 2, 1, 16)
    expected = np.where(np.eye(8, dtype=bool)[:, None, :, None], there, 0)
    np.testing.assert_array_equal(y, expected.reshape(y.shape))


@pytest.mark.parametrize(("weight", "start"), [("u2", 0), ("i3", 128), ("u4", 0)])
def test_offset_sums_by_block(weight: str, start: int) -> None:
    """Minus what decoding with a deferred offset adds to the numbers of each block, times x and summed."""
    x, y, t = numbers(8, 32), np.zeros((16, 8), np.float32), dtype(weight)

    def body(p: Program) -> None:
        rows = p.load(p.global_view(p["x"], "f16", x.shape), (0, 0), local(1, 2) * MMA_M16N8K16_B_NK)
        sums = p.offset_sums(rows, t, start, MMA_M16N8_D, by_block=True)
        p.store(sums, p.global_view(p["y"], "f32", y.shape), (0, 0))

    run(body, x=in_element(x, "f16"), y=y)
    packing = Packing(t.bits, 16, 1)
    for row, column, half in itertools.product(range(8), range(2), range(2)):
        block = (start // 16 + 8 * column + row) % (packing.chunk // 16)
        for lower in range(2):
            offset = deferred_offset(t, F16, packing.place(block, lower + 2 * half)[1])
            columns = slice(16 * column + 8 * half, 16 * column + 8 * half + 8)
            y[8 * lower : 8 * lower + 8, row] += offset * x[row, columns].astype(np.float32).sum()
    np.testing.assert_array_equal(y, 0)


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
