"""Races in programs of one's own, which the emulator reports unless told otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch

import lowbit
from lowbit.dialect.layouts.layout import spatial
from lowbit.passes.builder import Program

LANES = spatial(32)
EMULATOR = "emulator:sm_80"


def program(blocks: int = 1, threads: int = 32) -> Program:
    return Program("race", threads, (blocks, 1, 1), {"x": "pointer", "y": "pointer", "counter": "pointer"})


def without_a_barrier() -> Program:
    p = program(threads=64)
    with p:
        x, y = (p.global_view(p[name], "f32", (64,)) for name in "xy")
        buffer = p.alloc_shared("f32", (64,))
        p.store(p.load(x, (0,), spatial(64)), buffer, (0,))
        p.store(p.load(buffer, (0,), spatial(32).replicated(2)), y, (0,))  # here
    return p


def all_add() -> Program:
    p = program(blocks=4)
    with p:
        y = p.global_view(p["y"], "f32", (32,))
        sums = p.load(y, (0,), LANES) + 1  # here
        p.store(sums, y, (0,))
    return p


def all_store() -> Program:
    p = program(blocks=4)
    with p:
        p.store(p.constant(1.0, "f32", LANES), p.global_view(p["y"], "f32", (32,)), (0,))  # here
    return p


def what_the_block_before_reads() -> Program:
    p = program(blocks=4)
    with p:
        y = p.global_view(p["y"], "f32", (160,))
        right = p.load(y, ((p.block_id(0) + 1) * 32,), LANES)
        p.store(right, y, (p.block_id(0) * 32,))  # here
    return p


def first_read_by_one_of_three() -> Program:
    """Blocks 0 to 2 read what block 3 writes."""
    p = program(blocks=4)
    with p:
        x, y = (p.global_view(p[name], "f32", (128,)) for name in "xy")
        p.store(p.load(y, (96,), LANES), x, (p.block_id(0) * 32,))
        p.store(p.constant(1.0, "f32", LANES), y, (p.block_id(0) * 32,))  # here
    return p


def everybody_reads_all_sums() -> Program:
    """As `last_block_adds`, but no block is asked whether it is the last."""
    p = program(blocks=4)
    with p:
        x = p.global_view(p["x"], "f32", (4, 32))
        p.store(p.constant(1.0, "f32", LANES.unsqueeze(0)), x, (p.block_id(0), 0))  # here
        total = p.load(x, (0, 0), spatial(1, 32).local(4, 1))
        p.store(p.reduce(total, 0), p.global_view(p["y"], "f32", (1, 32)), (0, 0))
    return p


def ordered_by_another_counter() -> Program:
    """Every block counts at a place of its own, which orders nothing."""
    p = program(blocks=2)
    with p:
        y, counter = p.global_view(p["y"], "f32", (32,)), p.global_view(p["counter"], "i32", (2,))
        with p.when(p.last_arrival(counter, p.block_id(0), 1)):
            p.store(p.constant(1.0, "f32", LANES), y, (0,))  # here
    return p


def last_block_adds() -> Program:
    """Split k in short: blocks store sums of their own, and the last to come adds them."""
    p = program(blocks=4)
    with p:
        x, counter = p.global_view(p["x"], "f32", (4, 32)), p.global_view(p["counter"], "i32", (2,))
        p.store(p.constant(1.0, "f32", LANES.unsqueeze(0)), x, (p.block_id(0), 0))
        with p.when(p.last_arrival(counter, 0, 4)):
            total = p.load(x, (0, 0), spatial(1, 32).local(4, 1))
            p.store(p.reduce(total, 0), p.global_view(p["y"], "f32", (1, 32)), (0, 0))
    return p


def with_a_barrier() -> Program:
    p = program(threads=64)
    with p:
        x, y = (p.global_view(p[name], "f32", (64,)) for name in "xy")
        buffer = p.alloc_shared("f32", (64,))
        p.store(p.load(x, (0,), spatial(64)), buffer, (0,))
        p.barrier()
        p.store(p.load(buffer, (0,), spatial(32).replicated(2)), y, (0,))
    return p


def own_places() -> Program:
    """All blocks read x, and each writes neighbouring bytes of its own."""
    p = program(blocks=4)
    with p:
        x, y = p.global_view(p["x"], "f32", (32,)), p.global_view(p["y"], "f16", (128,))
        p.store(p.cast(p.load(x, (0,), LANES), "f16"), y, (p.block_id(0) * 32,))
    return p


def run(build: Callable[[], Program], racecheck: bool = True) -> torch.Tensor:
    kernel = lowbit.compile_program(build, EMULATOR, racecheck=racecheck)
    x, y = torch.zeros(160), torch.zeros(160)
    seen = y.half() if build is own_places else y
    kernel(x=x, y=seen, counter=torch.zeros(2, dtype=torch.int32))
    return seen


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (without_a_barrier, r"race: reads shared byte \d+ that thread \d+ wrote, without a barrier between"),
        (all_add, r"block \(1, 0, 0\), thread \(0, 0, 0\): race: reads byte 0 of `y` that block \(0, 0, 0\) wrote"),
        (all_store, r"race: writes byte 0 of `y` that block \(0, 0, 0\) wrote"),
        (what_the_block_before_reads, r"race: writes byte 128 of `y` that block \(0, 0, 0\) read"),
        (first_read_by_one_of_three, r"block \(3, 0, 0\).*: race: writes byte 384 of `y` that block \(0, 0, 0\) read"),
        (everybody_reads_all_sums, r"race: writes byte 128 of `x` that block \(0, 0, 0\) read"),
        (ordered_by_another_counter, r"race: writes byte 0 of `y` that block \(0, 0, 0\) wrote, with nothing that ord"),
    ],
)
def test_a_race_is_reported_with_its_line(build: Callable[[], Program], message: str) -> None:
    lines, first = inspect.getsourcelines(build)
    line = first + next(i for i, text in enumerate(lines) if "# here" in text)
    with pytest.raises(lowbit.EmulatorError, match=rf"PTX line \d+ \({__file__}:{line}\): .*{message}"):
        run(build)
    run(build, racecheck=False)


@pytest.mark.parametrize("build", [last_block_adds, with_a_barrier, own_places])
def test_what_is_ordered_is_no_race(build: Callable[[], Program]) -> None:
    y = run(build)
    assert y[0] == (4 if build is last_block_adds else 0)


def test_launches_are_ordered() -> None:
    """Each launch begins anew: what one wrote the next may read."""
    p = program()
    with p:
        y = p.global_view(p["y"], "f32", (32,))
        p.store(p.load(y, (0,), LANES) + 1, y, (0,))
    kernel, y = lowbit.compile_program(p, EMULATOR), torch.zeros(32)
    for _ in range(2):
        kernel(x=y, y=y, counter=torch.zeros(2, dtype=torch.int32))
    assert y.eq(2).all()
