"""cp.async in the emulator: groups, barriers, and copies that are left alone."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_kernel import kernel, run
from emulator_shared_memory import RNG, SMEM, TID16, fails

from lowbit.dialect.errors import EmulatorError
from lowbit.pylib.emulator import Emulator

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
