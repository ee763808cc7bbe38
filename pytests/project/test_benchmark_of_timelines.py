"""`benchmarks timeline` without a GPU: instrumented kernels compute the same, and what is made of their times."""

from __future__ import annotations

import re

import numpy as np
import pytest

from benchmarks.timeline import MARKS, TIMES, Launch, gaps, instrumented
from lowbit.dialect.signature import Param
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.codegen.cubin import emit_cubin
from lowbit.passes.kernels.attention import AttentionPlan, attention_program
from lowbit.passes.kernels.registry import request
from lowbit.passes.kernels.rope import Heads
from lowbit.passes.pipeline import CompiledKernel, compile_kernel, lower_program
from lowbit.passes.scheduling.choice import schedule_for
from lowbit.passes.targets import parse_target
from lowbit.pylib.emulator import Emulator

HOPPER = parse_target("sm_90a")


def matmul() -> CompiledKernel:
    spec = MatmulSpec(n=64, k=256, weight="u4", group_size=64)
    return compile_kernel(request(spec, HOPPER, schedule_for(spec, 1, HOPPER)))


def test_blocks_write_down_times_and_compute_the_same() -> None:
    """Numbers of blocks in place of the clock, which the emulator has not."""
    made, chance = matmul(), np.random.default_rng(0)
    arrays = {p.name: chance.integers(0, 60, 1 << 15).astype(np.uint8) for p in made.launch.arguments if p.name != "m"}
    plain, timed = ({name: array.copy() for name, array in arrays.items()} for _ in range(2))
    Emulator(made.ptx).run(made.launch, plain | {"m": 1})
    ptx = instrumented(made.ptx).replace("%globaltimer", "%w_time").replace("%smid", "%ctaid.x")
    params = (*made.launch.params, Param(TIMES, "pointer"))
    times = np.full((8, len(MARKS) + 1), -1, np.int64)
    launch = type(made.launch)(**{**vars(made.launch), "params": params})
    Emulator(ptx).run(launch, timed | {"m": 1, TIMES: times})
    assert all(np.array_equal(plain[name], timed[name]) for name in arrays)
    blocks = made.launch.blocks({"m": 1}, 132)[0]
    assert blocks > 1 and np.array_equal(times[:blocks], np.arange(blocks)[:, None].repeat(4, 1))
    assert (times[blocks:] == -1).all()


def test_instrumented_kernels_are_assembled() -> None:
    made = matmul()
    attention = lower_program(lambda: attention_program(AttentionPlan(Heads(8, 2, 64), "bf16", 2)), HOPPER)
    for ptx in (made.ptx, attention.ptx):
        found = instrumented(ptx)
        assert emit_cubin(found, HOPPER)
        stores = [int(each) for each in re.findall(r"st\.global\.u64 \[%w_at\+(\d+)\]", found)]
        assert set(stores) == {0, 8, 16, 24} and stores.index(0) < stores.index(8) < stores.index(16)


def test_times_count_from_the_end_of_the_launch_before() -> None:
    layer = [Launch("a", [0.0, 1.0], [2.0], [5.0, 6.0], 2), Launch("b", [4.0], [], [9.0], 1)]
    second = [Launch("a", [8.0, 9.5], [10.0, 11.0], [14.0], 2), Launch("b", [13.0], [], [16.0], 1)]
    a, b = gaps([*layer, *second], 2)
    assert list(a.values()) == pytest.approx([-1.0, 0.5, 1.0, 2.0, 5.0])
    assert list(b.values()) == pytest.approx([-1.0, -1.0, -1.0, -1.0, 2.0])
