"""lower-tiles: loads, stores and copies with their boundaries, in the emulator, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tile_programs import numbers, run

from lowbit.dialect.layouts.layout import Layout, column_spatial, local, spatial
from lowbit.passes.builder import Memory, Program
from lowbit.pylib.emulator import EmulatorError


def copy(p: Program, source: Memory, y: Memory, layout: Layout) -> None:
    """source to y, through registers."""
    zero = (0,) * layout.rank
    p.store(p.load(source, zero, layout), y, zero)


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


@pytest.mark.parametrize("shared", [False, True], ids=["device", "shared"])
@pytest.mark.parametrize(("element", "kind"), [("f16", np.float16), ("f32", np.float32), ("i32", np.int32)])
def test_scatter_and_gather(element: str, kind: Any, shared: bool) -> None:
    """Each element goes to a place of its own in a row; those below 0 and from 64 on go nowhere."""
    index = np.random.default_rng(0).permutation(np.arange(-32, 96)).astype(np.int32)
    x, y = numbers(128, kind=kind), np.full((3, 64), 77, kind)
    back = np.zeros(128, kind)

    def body(p: Program) -> None:
        layout = local(4).spatial(32)
        views = {name: p.global_view(p[name], at, (128,)) for name, at in (("x", element), ("index", "i32"))}
        target = p.alloc_shared(element, (3, 64)) if shared else p.global_view(p["y"], element, (3, 64))
        places, row = p.load(views["index"], (0,), layout), p.block_id(0) + 1
        p.scatter(p.load(views["x"], (0,), layout), target, (row,), places)
        p.barrier()
        inside = p.select(places < 64, p.max(places, 0), 63)
        p.store(p.gather(target, (row,), inside), p.global_view(p["back"], element, (128,)), (0,))
        if shared:
            copy_row(p, target, row)

    def copy_row(p: Program, source: Memory, row: Any) -> None:
        y = p.global_view(p["y"], element, (3, 64))
        p.store(p.load(source, (row, 0), spatial(1, 32).local(1, 2)), y, (row, 0))

    run(body, x=x, index=index, y=y, back=back)
    expected = np.full((3, 64), 77, kind)
    inside = (index >= 0) & (index < 64)
    expected[1, index[inside]] = x[inside]
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(back, expected[1, np.clip(index, 0, 63)])


def test_scatter_counts() -> None:
    """Many threads add to the same numbers; of replicas the first one does."""
    index, y = np.random.default_rng(0).integers(-1, 9, 64).astype(np.int32), np.zeros(8, np.int32)

    def body(p: Program) -> None:
        counts = p.alloc_shared("i32", (8,))
        p.store(p.constant(0, "i32", spatial(8).replicated(8)), counts, (0,))
        p.barrier()
        layout = local(2).spatial(32).replicated(2)
        places = p.load(p.global_view(p["index"], "i32", (64,)), (0,), layout)
        p.scatter(p.constant(3, "i32", layout), counts, (), places, "add")
        p.barrier()
        copy_counts(p, counts)

    def copy_counts(p: Program, counts: Memory) -> None:
        p.store(p.load(counts, (0,), spatial(8).replicated(8)), p.global_view(p["y"], "i32", (8,)), (0,))

    run(body, threads=64, index=index, y=y)
    np.testing.assert_array_equal(y, 3 * np.bincount(index[(index >= 0) & (index < 8)], minlength=8))


@pytest.mark.parametrize("combine", ["replace", "add"])
def test_the_same_place_twice_is_a_race_unless_it_is_added_to(combine: str) -> None:
    def body(p: Program) -> None:
        counts, layout = p.alloc_shared("i32", (32,)), spatial(32)
        p.store(p.constant(0, "i32", layout), counts, (0,))
        p.barrier()
        p.scatter(p.constant(1, "i32", layout), counts, (), p.iota(0, layout) // 2, combine)
        p.barrier()
        p.store(p.load(counts, (0,), layout), p.global_view(p["y"], "i32", (32,)), (0,))

    y = np.zeros(32, np.int32)
    if combine == "replace":
        with pytest.raises(EmulatorError, match="race: writes shared byte"):
            run(body, y=y)
    else:
        run(body, y=y)
        assert y.tolist() == [2] * 16 + [0] * 16


def test_what_is_scattered_may_be_read_again() -> None:
    """A pointer that a program scatters to is one that it writes: loads of it are not those of constant memory."""

    def body(p: Program) -> None:
        y, layout = p.global_view(p["y"], "f32", (32,)), spatial(32)
        p.scatter(p.load(y, (0,), layout) + 1.0, y, (), p.iota(0, layout))

    y = np.zeros(32, np.float32)
    ptx = run(body, y=y).ptx
    assert (y == 1).all() and "ld.global" in ptx and "ld.global.nc" not in ptx


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


@pytest.mark.parametrize("count", [0, 1, 5, 8, 11])
def test_rows_that_a_list_names(count: int) -> None:
    """From place 2 of the list on; zeros where it has ended, which an index in device memory says."""
    x, y = numbers(20, 64) + np.float16(20), np.full((8, 64), 99, np.float16)  # no zeros
    rows, ends = np.random.default_rng(0).integers(0, 20, 11).astype(np.int32), np.array([7, count], np.int32)

    def body(p: Program) -> None:
        end = p.read_index(p.global_view(p["ends"], "i32", (2,)), (1,))
        listed = p.global_view(p["rows"], "i32", (-1,), sizes=[end])
        source, buffer = p.global_view(p["x"], "f16", x.shape), p.alloc_shared("f16", (8, 64))
        layout = spatial(4, 8).local(2, 1).local(1, 8)
        p.copy_rows(source, listed, buffer, (2, 0), 0, layout, ("zero", "none"))
        p.commit()
        p.wait()
        p.barrier()
        p.store(p.load(buffer, (0, 0), layout), p.global_view(p["y"], "f16", y.shape), (0, 0))

    run(body, x=x, rows=rows, ends=ends, y=y)
    expected = np.zeros_like(y)
    expected[: max(0, count - 2)] = x[rows[2:count]][:8]
    np.testing.assert_array_equal(y, expected)
