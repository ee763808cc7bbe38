"""lower-tiles: blocks, loops, branches and pipelines, in the emulator, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from tile_programs import numbers, run

from lowbit.dialect.layouts.layout import local, replicated, spatial
from lowbit.passes.builder import Program


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


@pytest.mark.parametrize("count", [2, 1, 0, -1])
def test_others_arrived(count: int) -> None:
    """The last block to run asks whether `count` others have come. If so many have, neither more nor less, it puts the
    counter back to zero; where it asks for none, it does not look."""
    y, counters = np.zeros((3, 64), np.int32), np.zeros(3, np.int32)

    def body(p: Program) -> None:
        block, layout = p.block_id(0), spatial(1, 64)
        view, found = p.global_view(p["counters"], "i32", (3,)), p.global_view(p["y"], "i32", y.shape)
        with p.when(block < 2):
            p.last_arrival(view, 1, 9)
        with p.when(~(block < 2)), p.when(p.others_arrived(view, 1, p["count"])):
            p.store(p.constant(1, "i32", layout), found, (block, 0))

    run(body, threads=64, grid=(3, 1, 1), y=y, counters=counters, count=count)
    assert (y[2] == (count in (2, 0))).all()
    assert counters.tolist() == [0, 0 if count == 2 else 2, 0]


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
