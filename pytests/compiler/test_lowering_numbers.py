"""lower-tiles: arithmetic, conversions and shapes of tiles, in the emulator, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from tile_programs import numbers, run

from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.layouts.layout import local, spatial
from lowbit.passes.builder import Program

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
