"""Divergence, reconvergence, barriers, deadlocks and races in the emulator."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from emulator_kernel import kernel, run

from lowbit.dialect.errors import EmulatorError
from lowbit.dialect.signature import MOST_BLOCKS
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.emulator.launch import _all_clusters, _clusters

SMEM = ".shared .align 16 .b8 smem[4096];"
#: %r0 = tid, %rd0 = p0 + 4 (ctaid * ntid + tid), %r9 = smem + 4 tid
START = f"""{SMEM} mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x;
    mad.lo.u32 %r3, %r1, %r2, %r0;
    ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd0, %r3, 4, %rd0; mov.u32 %r8, smem;
    mad.lo.u32 %r9, %r0, 4, %r8;"""
STORE = "st.global.b32 [%rd0], %r10;"


def fails(message: str, body: str, *args: object, **options: object) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(body, args, **options)  # type: ignore[arg-type]


def test_loop_with_a_different_count_per_thread() -> None:
    """x = sum of 0 .. tid - 1, with threads that skip the loop."""
    out = np.full(96, 77, np.uint32)
    run(
        f"""{START} mov.u32 %r10, 0; mov.u32 %r11, 0; setp.eq.u32 %p1, %r0, 0; @%p1 bra DONE;
    LOOP: add.u32 %r10, %r10, %r11; add.u32 %r11, %r11, 1; setp.lt.u32 %p2, %r11, %r0; @%p2 bra LOOP;
    DONE: {STORE}""",
        [out],
        block=96,
    )
    np.testing.assert_array_equal(out, [n * (n - 1) // 2 for n in range(96)])


def test_collatz() -> None:
    """A data-dependent loop with a branch inside."""
    out = np.zeros(256, np.uint32)
    run(
        f"""{START} add.u32 %r4, %r3, 1; mov.u32 %r10, 0;
    HEAD: setp.eq.u32 %p1, %r4, 1; @%p1 bra DONE; add.u32 %r10, %r10, 1; and.b32 %r5, %r4, 1;
    setp.eq.u32 %p2, %r5, 1; @%p2 bra ODD; shr.u32 %r4, %r4, 1; bra.uni HEAD;
    ODD: mad.lo.u32 %r4, %r4, 3, 1; bra HEAD;
    DONE: {STORE}""",
        [out],
        block=64,
        grid=4,
    )

    def steps(n: int) -> int:
        count = 0
        while n != 1:
            n, count = (3 * n + 1 if n % 2 else n // 2), count + 1
        return count

    np.testing.assert_array_equal(out, [steps(n) for n in range(1, 257)])


def test_unstructured_jumps() -> None:
    """Two loops that jump into each other's bodies, driven by a per-thread generator; checked by
    simulation."""
    out = np.zeros(128, np.uint32)
    rng = "mad.lo.u32 %r4, %r4, 1664525, 1013904223; shr.u32 %r5, %r4, 30;"
    run(
        f"""{START} mov.u32 %r4, %r0; mov.u32 %r10, 0;
    A: {rng} mad.lo.u32 %r10, %r10, 31, 1; setp.eq.u32 %p1, %r5, 0; @%p1 bra C; setp.eq.u32 %p1, %r5, 1;
    @%p1 bra D;
    B: {rng} mad.lo.u32 %r10, %r10, 31, 2; setp.eq.u32 %p1, %r5, 0; @%p1 bra A; setp.eq.u32 %p1, %r5, 1;
    @%p1 bra E;
    C: {rng} mad.lo.u32 %r10, %r10, 31, 3; setp.eq.u32 %p1, %r5, 0; @%p1 bra B; setp.eq.u32 %p1, %r5, 1;
    @!%p1 bra A;
    D: {rng} mad.lo.u32 %r10, %r10, 31, 4; setp.eq.u32 %p1, %r5, 0; @%p1 bra C;
    E: {STORE}""",
        [out],
        block=128,
    )
    table = {
        "A": (1, {0: "C", 1: "D"}, "B"),
        "B": (2, {0: "A", 1: "E"}, "C"),
        "C": (3, {0: "B", 1: "D"}, "A"),
        "D": (4, {0: "C"}, "E"),
    }

    def walk(state: int) -> int:
        at, value = "A", 0
        while at != "E":
            state = (state * 1664525 + 1013904223) % 2**32
            mark, jumps, following = table[at]
            value, at = (value * 31 + mark) % 2**32, jumps.get(state >> 30, following)
        return value

    np.testing.assert_array_equal(out, [walk(tid) for tid in range(128)])


def test_jump_table() -> None:
    out = np.zeros(32, np.uint32)
    body = f"""{START} and.b32 %r4, %r0, 3; mov.u32 %r10, 0; add.u32 %r4, %r4, {{}};
    TABLE: .branchtargets ZERO, ONE, TWO, ZERO;
    brx.idx %r4, TABLE;
    TWO: add.u32 %r10, %r10, 20;
    ONE: add.u32 %r10, %r10, 1; bra END;
    ZERO: mov.u32 %r10, 100;
    END: {STORE}"""
    run(body.format(0), [out])
    np.testing.assert_array_equal(out, np.tile([100, 1, 21, 100], 8))
    fails("beyond the 4 branch targets", body.format(1), out)


def test_threads_meet_again_after_a_branch() -> None:
    """What follows the branch runs once for the whole warp."""
    out = np.zeros(32, np.uint32)
    emulator = run(
        f"""{START} setp.lt.u32 %p1, %r0, 10; @%p1 bra THEN; mov.u32 %r10, 2; bra JOIN;
    THEN: mov.u32 %r10, 1; JOIN: {STORE}""",
        [out],
    )
    np.testing.assert_array_equal(out, np.where(np.arange(32) < 10, 1, 2))
    assert emulator.stats["st.global.b32"] == 1
    assert emulator.stats["mov.u32"] == 3 + 1 + 2  # START's, the address, one for each side


def test_stats_count_warps() -> None:
    """A warp counts once if any of its threads is there; predicated-off instructions count as issued."""
    emulator = run(
        f"{START} setp.lt.u32 %p1, %r0, 32; mov.u32 %r10, 0; @!%p1 exit; @!%p1 {STORE} {STORE}",
        [np.zeros(128, np.uint32)],
        block=64,
        grid=2,
    )
    assert emulator.stats["setp.lt.u32"] == 4
    assert emulator.stats["st.global.b32"] == 4  # warp 0 of both blocks, twice
    assert emulator.stats.total_of("st.global") == 4
    assert emulator.stats.total_of("st.glob") == 0
    assert emulator.stats.global_bytes_stored == 2 * 32 * 4


def test_early_exit_and_partial_warps() -> None:
    out = np.zeros(50, np.uint32)
    run(f"{START} mov.u32 %r10, 1; setp.ge.u32 %p1, %r0, 40; @%p1 exit; {STORE}", [out], block=50)
    np.testing.assert_array_equal(out, np.arange(50) < 40)


def test_special_registers() -> None:
    out = np.zeros((2, 3, 4, 5, 2, 8), np.uint32)  # ctaid z y x, tid z y x
    names = ["%tid.x", "%tid.y", "%tid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%laneid", "%warpid"]
    out = np.zeros((2, 3, 4, 2, 5, 3, 8), np.uint32)
    moves = "".join(
        f"mov.u32 %r{20 + i}, {name}; st.global.b32 [%rd0+{4 * i}], %r{20 + i};" for i, name in enumerate(names)
    )
    run(
        f"""ld.param.u64 %rd0, [p0]; mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
    mov.u32 %r4, %ntid.x; mov.u32 %r5, %ntid.y; mov.u32 %r6, %ntid.z; mad.lo.u32 %r7, %r3, %r5, %r2;
    mad.lo.u32 %r7, %r7, %r4, %r1;
    mul.lo.u32 %r8, %r4, %r5; mul.lo.u32 %r8, %r8, %r6; mov.u32 %r9, %nctaid.x; mov.u32 %r10, %nctaid.y;
    mov.u32 %r11, %ctaid.x; mov.u32 %r12, %ctaid.y; mov.u32 %r13, %ctaid.z; mad.lo.u32 %r14, %r13, %r10, %r12;
    mad.lo.u32 %r14, %r14, %r9, %r11; mad.lo.u32 %r14, %r14, %r8, %r7; mad.wide.u32 %rd0, %r14, 32, %rd0;
    {moves}""",
        [out],
        block=(3, 5, 2),
        grid=(4, 3, 2),
    )
    cz, cy, cx, z, y, x = np.indices((2, 3, 4, 2, 5, 3))
    linear = (z * 5 + y) * 3 + x
    np.testing.assert_array_equal(out, np.stack([x, y, z, cx, cy, cz, linear % 32, linear // 32], axis=-1))
    masks = np.zeros((32, 5), np.uint32)
    run(
        "mov.u32 %r0, %laneid; ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd0, %r0, 20, %rd0;"
        + "".join(
            f"mov.u32 %r1, %lanemask_{name}; st.global.b32 [%rd0+{4 * i}], %r1;"
            for i, name in enumerate(("eq", "lt", "le", "ge", "gt"))
        ),
        [masks],
    )
    lane, bit = np.arange(32)[:, None], np.arange(32)
    for i, function in enumerate((np.equal, np.less, np.less_equal, np.greater_equal, np.greater)):
        np.testing.assert_array_equal(masks[:, i], (function(bit, lane) * (1 << bit)).sum(axis=1))


def test_chosen_blocks() -> None:
    out = np.zeros(32 * 6, np.uint32)
    emulator = Emulator(kernel(f"{START} mov.u32 %r10, 1; {STORE}", ["u64"]))
    emulator.launch("k", grid=6, block=32, args=[out], blocks=[(4,), (1, 0, 0)])
    np.testing.assert_array_equal(np.flatnonzero(out[::32]), [1, 4])


def test_a_large_grid_takes_no_memory() -> None:
    """Blocks come one at a time: here the first faults, of as many as CUDA allows."""
    emulator = Emulator(kernel(f"{START} mov.u32 %r10, 1; {STORE}", ["u64"]))
    assert next(_all_clusters(MOST_BLOCKS, (1, 1, 1))) == [(0, 0, 0)]
    tracemalloc.start()
    try:
        for grid in ((300_000, 1, 1), (1, 600, 500)):
            with pytest.raises(EmulatorError, match=r"out of bounds|outside"):
                emulator.launch("k", grid=grid, block=32, args=[np.zeros(1, np.uint32)])
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 1, 3)])
def test_all_blocks_come_in_order(shape: tuple[int, int, int]) -> None:
    """As they do where they are listed, x fastest."""
    order = [(x, y, z) for z in range(3) for y in range(4) for x in range(6)]
    assert list(_all_clusters((6, 4, 3), shape)) == list(_clusters(order, shape))


def test_launch_bounds_and_names() -> None:
    text = kernel("", ["u64"]).replace("\n{", "\n.reqntid 128, 1, 1\n.minnctapersm 2\n{", 1)
    emulator = Emulator(text)
    array = np.zeros(1)
    emulator.launch("k", block=(128, 1, 1), args=[array])
    for options, message in (
        ({"block": 64, "args": [array]}, r"block=\(64, 1, 1\) must be \(128, 1, 1\)"),
        ({"block": 128, "args": []}, "takes 1 arguments, not 0"),
        ({"block": 128, "args": [array], "grid": 0}, "grid=0"),
        (
            {"block": 128, "args": [array], "grid": 2**31},
            r"grid=\(2147483648, 1, 1\) has too .*\(2147483647, 65535",
        ),
        ({"block": 128, "args": [array], "grid": (1, 65536)}, r"grid=\(1, 65536, 1\) has too many blocks"),
    ):
        with pytest.raises(EmulatorError, match=message):
            emulator.launch("k", **options)  # type: ignore[arg-type]
    with pytest.raises(EmulatorError, match="no kernel 'other'; the module has k"):
        emulator.launch("other", block=128, args=[array])
    with pytest.raises(EmulatorError, match="maxntid"):
        Emulator(text.replace("reqntid", "maxntid")).launch("k", block=256, args=[array])


# Barriers


def test_barrier_orders_the_block() -> None:
    """Each thread reads what its mirror image wrote."""
    out = np.zeros(128, np.uint32)
    body = f"""{START} st.shared.b32 [%r9], %r0; {{}} sub.u32 %r4, 127, %r0; mad.lo.u32 %r5, %r4, 4, %r8;
    ld.shared.b32 %r10, [%r5]; {STORE}"""
    for barrier in (
        "bar.sync 0;",
        "barrier.cta.sync.aligned 0;",
        "bar.sync 3, 128;",
        "mov.u32 %r6, 1; barrier.sync %r6;",
    ):
        run(body.format(barrier), [out], block=128, racecheck=True)
        np.testing.assert_array_equal(out, np.arange(128)[::-1])


def test_named_barriers_between_producer_and_consumer_warps() -> None:
    out = np.zeros(64, np.uint32)
    run(
        f"""{START} setp.ge.u32 %p1, %r0, 32; @%p1 bra CONSUMER;
    st.shared.b32 [%r9], %r0; bar.arrive 1, 64; bra.uni END;
    CONSUMER: bar.sync 1, 64; ld.shared.b32 %r10, [%r9+-128]; {STORE} END:""",
        [out],
        block=64,
        racecheck=True,
    )
    np.testing.assert_array_equal(out[32:], np.arange(32))


def test_exited_threads_are_not_waited_for() -> None:
    out = np.zeros(64, np.uint32)
    run(f"{START} setp.ge.u32 %p1, %r0, 32; @%p1 exit; bar.sync 0; mov.u32 %r10, 1; {STORE}", [out], block=64)
    assert out.sum() == 32


def test_divergent_barrier() -> None:
    branch = f"{START} setp.lt.u32 %p1, %r0, 16; @%p1 bra A; {{0}} bra B; A: {{0}} B:"
    fails("come to barrier 0 apart", branch.format("bar.sync 0;"), np.zeros(32, np.uint32))
    run(branch.format("barrier.sync 0;"), [np.zeros(32, np.uint32)])  # not .aligned: allowed
    run(branch.format("bar.sync 0;").replace("16;", "32;"), [np.zeros(64, np.uint32)], block=64)  # whole warps: allowed


def test_barriers_with_numbers_of_their_own() -> None:
    """One instruction, several barriers: warps 0 and 1 meet at barrier 1, warps 2 and 3 at barrier 2."""
    out = np.zeros(128, np.uint32)
    body = f"""{START} st.shared.b32 [%r9], %r0; shr.u32 %r4, %r0, {{}}; add.u32 %r4, %r4, 1; bar.sync %r4, {{}};
    xor.b32 %r5, %r0, 32; mad.lo.u32 %r5, %r5, 4, %r8; ld.shared.b32 %r10, [%r5]; {STORE}"""
    run(body.format(6, 64), [out], block=128, racecheck=True)
    np.testing.assert_array_equal(out, np.arange(128) ^ 32)
    fails("race", body.format(5, 32), out, block=128, racecheck=True)
    fails("divergent|deadlock", body.format(4, 32), out, block=128)


def test_deadlocks() -> None:
    out = np.zeros(64, np.uint32)
    fails(
        "not all threads come to barrier 0 .32 threads wait at barrier 0.*; 32 threads wait at barrier 1",
        f"{START} setp.lt.u32 %p1, %r0, 32; @%p1 bra A; bar.sync 1; bra B; A: bar.sync 0; B:",
        out,
        block=64,
    )
    fails(r"deadlock.*barrier 2.*needs 96", f"{START} bar.sync 2, 96;", out, block=64)
    fails("counts 32", f"{START} bar.sync 2, 32;", out, block=64)
    fails("a multiple of 32", f"{START} bar.sync 2, 40;", out, block=64)
    fails("barrier 16", f"{START} bar.sync 16;", out, block=64)


def test_endless_loop() -> None:
    fails("no end after 1000 steps", "L: bra L;", max_steps=1000)


def test_trap() -> None:
    fails(r"thread \(5, 0, 0\): trap", f"{START} setp.eq.u32 %p1, %r0, 5; @%p1 trap;", np.zeros(32, np.uint32))


# Races


WRITE_READ = f"""{START} st.shared.b32 [%r9], %r0; {{}} xor.b32 %r4, %r9, {{}}; ld.shared.b32 %r10, [%r4]; {STORE}"""


@pytest.mark.parametrize(
    ("barrier", "distance", "clean"),
    [
        ("", 4, False),
        ("bar.sync 0;", 4, True),
        ("bar.sync 0;", 128, True),
        ("bar.warp.sync 0xffffffff;", 4, True),
        ("bar.warp.sync 0xffffffff;", 128, False),
        ("membar.cta;", 4, False),
        ("", 0, True),
    ],
)
def test_write_then_read(barrier: str, distance: int, clean: bool) -> None:
    body, out = WRITE_READ.format(barrier, distance), np.zeros(64, np.uint32)
    if clean:
        run(body, [out], block=64, racecheck=True)
        np.testing.assert_array_equal(out, np.arange(64) ^ distance // 4)
    else:
        fails(
            "race: reads shared byte .* that thread .* wrote, without a barrier",
            body,
            out,
            block=64,
            racecheck=True,
        )


@pytest.mark.parametrize("readers", [1, 2])
def test_read_then_write(readers: int) -> None:
    """The buffer is overwritten while another thread may still read it, also when the writer read it
    itself."""
    out = np.zeros(64, np.uint32)
    body = f"""{START} st.shared.b32 [%r9], %r0; bar.sync 0; xor.b32 %r4, %r9, 4; ld.shared.b32 %r10, [%r4];
    {"ld.shared.b32 %r11, [%r9];" if readers == 2 else ""} {{}} st.shared.b32 [%r9], %r10;"""
    fails("race: writes shared byte .* that thread .* read", body.format(""), out, block=64, racecheck=True)
    run(body.format("bar.sync 0;"), [out], block=64, racecheck=True)
    run(body.format("bar.warp.sync -1;"), [out], block=64, racecheck=True)


@pytest.mark.parametrize(("kind", "register"), [("u16", "%r10"), ("v2.b32", "{%r10, %r11}"), ("u8", "%r10")])
@pytest.mark.parametrize("wide_first", [True, False])
def test_parts_of_what_is_accessed_together(kind: str, register: str, wide_first: bool) -> None:
    """One thread writes 16 bytes, another reads some of them: the first of these is named. Bytes beside are free."""
    out = np.zeros(64, np.uint32)
    begin = f"{START} st.shared.b32 [%r9], %r0; bar.sync 0; setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r0, 40;"

    def body(barrier: str, offset: int = 8) -> str:
        write = "@%p0 st.shared.v4.b32 [%r8], {%r0, %r0, %r0, %r0};"
        read = f"@%p1 ld.shared.{kind} {register}, [%r8+{offset}];"
        return begin + barrier.join([write, read] if wide_first else [read, write])

    verb = "reads shared byte 8 that thread 0 wrote" if wide_first else "writes shared byte 8 that thread 40 read"
    fails(f"race: {verb}", body(" "), out, block=64, racecheck=True)
    run(body(" bar.sync 0; "), [out], block=64, racecheck=True)
    run(body(" ", offset=16), [out], block=64, racecheck=True)


def test_write_write() -> None:
    body = f"{START} and.b32 %r4, %r9, -8; st.shared.b32 [%r4], %r0;"
    fails("race: writes shared byte .* that thread .* wrote", body, np.zeros(32, np.uint32), racecheck=True)
    run(body, [np.zeros(32, np.uint32)])


def test_barriers_pass_knowledge_on() -> None:
    """Warp 0 to warp 1 by barrier 1, warp 1 to warp 2 by barrier 2: warp 2 may read what warp 0 wrote."""
    out = np.zeros(96, np.uint32)
    body = f"""{START} shr.u32 %r4, %r0, 5; setp.eq.u32 %p0, %r4, 0; setp.eq.u32 %p1, %r4, 1;
    setp.eq.u32 %p2, %r4, 2;
    @%p0 bra FIRST; @%p1 bra SECOND; bar.sync 2, 64; ld.shared.b32 %r10, [%r9+-256]; {STORE} bra END;
    FIRST: st.shared.b32 [%r9], %r0; bar.sync 1, 64; bra END;
    SECOND: {{}} END:"""
    run(body.format("bar.sync 1, 64; bar.sync 2, 64;"), [out], block=96, racecheck=True)
    np.testing.assert_array_equal(out[64:], np.arange(32))
    swapped = body.replace(
        "FIRST: st.shared.b32 [%r9], %r0; bar.sync 1, 64;", "FIRST: bar.sync 1, 64; st.shared.b32 [%r9], %r0;"
    )
    fails("race|never written", swapped.format("bar.sync 1, 64; bar.sync 2, 64;"), out, block=96, racecheck=True)


def test_what_follows_an_arrival_is_not_ordered_by_it() -> None:
    """bar.arrive does not wait: the consumer knows nothing of what the producer does afterwards."""
    out = np.zeros(64, np.uint32)
    body = f"""{START} setp.ge.u32 %p1, %r0, 32; @%p1 bra CONSUMER;
    {{0}} bar.arrive 1, 64; {{1}} bra.uni END;
    CONSUMER: bar.sync 1, 64; ld.shared.b32 %r10, [%r9+-128]; {STORE} END:"""
    store, wait = "st.shared.b32 [%r9], %r0;", "cp.async.wait_all;"
    copy = "cp.async.ca.shared.global [%r9], [%rd0], 4;"
    run(body.format(store, ""), [out], block=64, racecheck=True)
    fails("race: reads", body.format("", store), out, block=64, racecheck=True)
    fails("race: reads", body.format(store, store), out, block=64, racecheck=True)
    run(body.format(copy + wait, ""), [out], block=64, racecheck=True)
    run(body.format(copy + wait, ""), [out], block=64)
    fails("another thread's cp.async", body.format(copy, wait), out, block=64)


def test_cp_async_races_with_readers() -> None:
    """A pipeline stage is refilled while others may still read it."""
    body = f"""{START} st.shared.b32 [%r9], %r0; bar.sync 0; xor.b32 %r4, %r9, 4;
    ld.shared.b32 %r10, [%r4]; {{}}
    cp.async.ca.shared.global [%r9], [%rd0], 4; cp.async.wait_all;"""
    out = np.zeros(32, np.uint32)
    fails("race: writes", body.format(""), out, racecheck=True)
    run(body.format("bar.sync 0;"), [out], racecheck=True)
