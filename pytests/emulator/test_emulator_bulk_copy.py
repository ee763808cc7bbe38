"""Bulk copies of the emulator: what they bring, to whom, and what goes wrong with them."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_pipeline import ARRIVE, CLUSTER, OUT, REMOTE, fails, kernel, run, start, wait

from lowbit.dialect.errors import EmulatorError
from lowbit.pylib.emulator import Emulator

FENCED = "fence.mbarrier_init.release.cluster; bar.sync 0;"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {0};"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
COPY = f"@%p1 {BULK} [%r5], [%rd1], 256, [%r2];"
READ = f"ld.shared.b32 %r10, [%r4]; {OUT}"


def copied(
    copy: str = COPY,
    *,
    expect: str = EXPECT.format(256),
    waits: str | None = None,
    barrier: str = FENCED,
    read: str = READ,
) -> str:
    """Thread 0 copies 64 words, and all read one."""
    return f"{start(barrier=barrier)} {expect} {copy} {wait('%r2', 0) if waits is None else waits} {read}"


@pytest.mark.parametrize("space", ["shared::cluster", "shared::cta"])
def test_copy(space: str) -> None:
    out, _ = run(copied(COPY.replace("shared::cluster", space)))
    np.testing.assert_array_equal(out[0], np.arange(64))
    hinted = COPY.replace("bytes", "bytes.L2::cache_hint").replace("[%r2]", "[%r2], %rd9")
    out, emulator = run(copied("createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;" + hinted))
    np.testing.assert_array_equal(out[0], np.arange(64))
    assert emulator.stats.global_bytes_loaded == 256
    run(copied("@%p1 cp.async.bulk.prefetch.L2.global [%rd1], 256;" + COPY))
    # The order of the copy and the announcement does not matter, as long as the phase lasts.
    out, _ = run(copied(COPY + EXPECT.format(256), expect=""))
    np.testing.assert_array_equal(out[0], np.arange(64))


def test_waits_that_are_missing_or_wrong() -> None:
    early = "read of the target of a bulk copy before a wait for the mbarrier's phase"
    fails(early, copied(waits=""))
    fails(early, copied(waits=wait("%r2", 1)))
    fails(early, copied(waits="mbarrier.try_wait.parity.shared.b64 %p9, [%r2], 0;"))
    fails(early, copied(expect="@%p1 mbarrier.arrive.shared.b64 _, [%r2];"))
    fails(
        "has not waited for|still in flight|while a copy into its shared memory is in flight", copied(waits="", read="")
    )
    half = f"{wait('%r2', 0)} CONSUME:".replace("WAIT", "@!%p2 bra CONSUME; WAIT", 1)
    fails(early, copied(waits=half))
    out, _ = run(copied(waits=f"{half} bar.sync 0;"))
    np.testing.assert_array_equal(out[0], np.arange(64))
    # A barrier before the wait shows nothing.
    fails(early, copied(waits=f"bar.sync 0; {half}"))


def test_counts_of_bytes() -> None:
    fails(
        "deadlock: nobody ends the phase of `bars`: .*, 256 bytes expected and not copied",
        copied(expect=EXPECT.format(512)),
    )
    fails("deadlock: .*, 128 bytes more copied than expected", copied(expect=EXPECT.format(128)))
    two = COPY.replace("256", "128") + COPY.replace("256", "128").replace("[%r5]", "[%r5+128]").replace(
        "[%rd1]", "[%rd1+128]"
    )
    out, _ = run(copied(two))
    np.testing.assert_array_equal(out[0], np.arange(64))
    # The second counts in the next phase: what it brings is not there.
    fails("bulk copy before a wait", copied(two, expect=EXPECT.format(128)))


@pytest.mark.parametrize(
    ("message", "copy"),
    [
        ("a bulk copy of 24 bytes: it takes a multiple of 16", COPY.replace("256", "24")),
        ("a bulk copy of 0 bytes", COPY.replace("256", "0")),
        (r"a bulk copy to \d+, which is not a multiple of 16", COPY.replace("[%r5]", "[%r5+8]")),
        ("an address that is not a multiple of 16", COPY.replace("[%rd1]", "[%rd1+8]")),
        (r"byte 1920 of `p1`, which has 2048 bytes", COPY.replace("[%rd1]", "[%rd1+1920]")),
        ("out of bounds|overwrites an mbarrier|outside every shared", COPY.replace("[%r5]", "[%r5+832]")),
        ("out of bounds: 16 bytes", COPY.replace("[%r5]", "[%r5+4096]")),
        ("no mbarrier is initialised at", COPY.replace("[%r2]", "[%r2+64]")),
        ("still in flight", COPY + COPY),
        ("write to the target of a copy that is still in flight", COPY + "st.shared.b32 [%r4], 0;"),
        (
            "invalidated before the copy counted",
            COPY + "@%p1 mbarrier.inval.shared.b64 [%r2]; bar.sync 1; bra END; END:",
        ),
    ],
)
def test_faults(message: str, copy: str) -> None:
    # The mbarriers lie after the kilobyte.
    fails(message, copied(copy, waits=wait("%r3", 0) if "inval" in copy else None, expect=EXPECT.format(256)))


def test_fences() -> None:
    fails("no fence.mbarrier_init or fence.proxy.async since its mbarrier.init", copied(barrier="bar.sync 0;"))
    run(copied(barrier="@%p1 fence.proxy.async.shared::cta; bar.sync 0;"))
    write = "st.shared.b32 [%r4], 0; {} bar.sync 0;"
    fails("overwrites what was written without a fence.proxy.async since", copied(write.format("") + COPY))
    run(copied(write.format("fence.proxy.async;") + COPY))


def again(release: str) -> str:
    """Thread 0 copies twice to the same place; between them comes `release`."""
    twice = f"{EXPECT.format(256)} {COPY}"
    read = "ld.shared.b32 %r11, [%r4];"
    return f"""{start(1, 64, FENCED)} {twice} {wait("%r2", 0)} {read} {release} {twice.replace("[%rd1]", "[%rd1+256]")}
    {wait("%r2", 1)} ld.shared.b32 %r12, [%r4]; add.u32 %r10, %r11, %r12; {OUT}"""


def test_overwriting_what_others_read() -> None:
    """With a barrier or an mbarrier between it is right, and without it is a race."""
    released = f"{ARRIVE.format('%r3')} @!%p1 bra SKIP; {wait('%r3', 0)} SKIP:"
    for release in ("bar.sync 0;", released):
        out, _ = run(again(release))
        np.testing.assert_array_equal(out[0], 2 * np.arange(64) + 64)
    fails(r"race: writes shared byte \d+ that thread \d+ read, without a barrier between", again(""))
    fails("race: writes shared byte", again(ARRIVE.format("%r3")))
    fails("deadlock", again(released.replace("[%r3], 0", "[%r3], 1")))
    # Without the check for races the words of the second copy are read after its wait.
    run(again(""), racecheck=False)


def pipeline(stages: int, rounds: int, release: str = ARRIVE.format("%r31")) -> str:
    """Warp 0 copies, warps 1 and 2 add up what comes: 32 words in each round, through `stages` buffers."""
    init = "".join(
        f"@%p1 mbarrier.init.shared.b64 [%r30+{8 * i}], {1 if i < stages else 64};" for i in range(2 * stages)
    )
    advance = f"""add.u32 %r20, %r20, 1; add.u32 %r21, %r21, 1; setp.eq.u32 %p5, %r21, {stages};
    @%p5 xor.b32 %r22, %r22, 1; @%p5 mov.u32 %r21, 0; setp.lt.u32 %p6, %r20, {rounds};"""
    place = f"""mad.lo.u32 %r32, %r21, 8, %r30; add.u32 %r31, %r32, {8 * stages}; shl.b32 %r33, %r21, 7;
    add.u32 %r34, %r5, %r33;"""
    return f"""{start()} .shared .align 8 .b8 stage[{16 * stages}]; mov.u32 %r30, stage; {init} {FENCED}
    mov.u32 %r20, 0; mov.u32 %r21, 0; mov.u32 %r22, 0; mov.u32 %r11, 0; @!%p2 bra CONSUMER;
    xor.b32 %r22, %r22, 1; elect.sync _|%p4, -1; @!%p4 bra END; ld.param.u64 %rd1, [p1];
    PRODUCE: {place} {wait("%r31", "%r22")} mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r32], 128;
    {BULK} [%r34], [%rd1], 128, [%r32]; add.u64 %rd1, %rd1, 128; {advance} @%p6 bra PRODUCE; bra END;
    CONSUMER: and.b32 %r35, %r0, 31; CONSUME: {place} {wait("%r32", "%r22")} mad.lo.u32 %r36, %r35, 4, %r34;
    ld.shared.b32 %r10, [%r36]; add.u32 %r11, %r11, %r10; {release} {advance} @%p6 bra CONSUME;
    st.global.b32 [%rd0], %r11; END:"""


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_pipeline(stages: int) -> None:
    out, emulator = run(pipeline(stages, 13), block=96)
    expected = np.arange(13 * 32).reshape(13, 32).sum(axis=0)
    np.testing.assert_array_equal(out[0, 32:], np.tile(expected, 2))
    # Threads that wait yield: two tries each, besides those that look again when a copy has come.
    assert emulator.stats.total_of("mbarrier.try_wait") < 40 * 13


def test_pipeline_that_is_wrong() -> None:
    fails("deadlock: nobody ends the phase of `stage`", pipeline(2, 13, release=""), block=96)
    only = "setp.lt.u32 %p7, %r0, 64; @%p7 mbarrier.arrive.shared.b64 _, [%r31], 2;"
    fails("race: writes shared byte|the next one too", pipeline(2, 13, release=only), block=96)
    late = pipeline(2, 13).replace("PRODUCE: mad", "PRODUCE: mbarrier.arrive.shared.b64 _, [%r30+16], 64; mad")
    fails("deadlock|more than it waits for|race|still in flight", late, block=96)


# Other blocks

MULTICAST = BULK.replace("bytes", "bytes.multicast::cluster")


def multicast(mask: int, *, expect: str = EXPECT.format(256), more: str = "") -> str:
    """Thread 0 of block 0 copies to the blocks in `mask`; all of these wait."""
    copy = f"setp.eq.and.u32 %p3, %r1, 0, %p1; mov.u16 %rs1, {mask}; @%p3 {MULTICAST} [%r5], [%rd1], 256, [%r2], %rs1;"
    return f".reg .b16 %rs<2>; {copied(expect + copy, expect='', barrier=CLUSTER, read=READ + more)}"


@pytest.mark.parametrize("order", [1, -1])
def test_multicast(order: int) -> None:
    """To the same place in each block, and to the mbarrier there."""
    out, _ = run(multicast(0b1111), cluster=4, blocks=[(i,) for i in range(4)][::order])
    np.testing.assert_array_equal(out, np.tile(np.arange(64), (4, 1)))
    two = multicast(0b1010).replace("%r1, 0, %p1", "%r1, 3, %p1")
    skip = "and.b32 %r20, %r1, 1; setp.eq.u32 %p4, %r20, 0; @%p4 bra END; mbarrier.arrive.expect"
    out, _ = run(
        two.replace("@%p1 mbarrier.arrive.expect", skip.replace("mbarrier", "@%p1 mbarrier")) + "END:", cluster=4
    )
    np.testing.assert_array_equal(out, np.arange(4)[:, None] % 2 * np.arange(64))


def test_multicast_faults() -> None:
    fails("multicast to blocks 0x4 of a cluster of 2", multicast(4), cluster=2)
    fails("multicast to blocks 0x0 of a cluster of 2", multicast(0), cluster=2)
    fails("deadlock: nobody ends the phase", multicast(1), cluster=2)
    fails("deadlock: .*256 bytes more copied|bulk copy before a wait", multicast(3, expect=""), cluster=2)
    alone = multicast(3).replace(CLUSTER, FENCED)
    fails("before any cluster barrier: it may not have started", alone, cluster=2)
    with pytest.raises(EmulatorError, match=r"multicast::cluster copies to \.shared::cluster"):
        Emulator(kernel(f"{MULTICAST.replace('shared::cluster.g', 'shared::cta.g')} [%r5], [%rd1], 256, [%r2], %r1;"))
    leave = "setp.eq.u32 %p4, %r1, 1; @%p4 exit; setp.eq.and.u32 %p3"
    fails(
        "block 1 of the cluster, which has exited|exits while a copy|exits and has not waited",
        multicast(3).replace("setp.eq.and.u32 %p3", leave),
        cluster=2,
    )


@pytest.mark.parametrize("order", [1, -1])
def test_multicast_into_what_another_block_reads(order: int) -> None:
    """Block 0 copies twice; in between the threads of both blocks have to tell it that they have read."""
    copy = f"@%p3 {MULTICAST} [%r5], [%rd1], 256, [%r2], %rs1;"
    tell = REMOTE.format("%r3", "%r7")
    turn = f"""mov.u32 %r7, 0; {{}} @!%p3 bra SKIP; {wait("%r3", 0)} SKIP:"""

    def body(told: str) -> str:
        second = f"{EXPECT.format(256)} {turn.format(told)} {copy.replace('[%rd1]', '[%rd1+256]')}"
        return f""".reg .b16 %rs<2>; {start(1, 128, CLUSTER)} setp.eq.and.u32 %p3, %r1, 0, %p1; mov.u16 %rs1, 3;
    {EXPECT.format(256)} {copy} {wait("%r2", 0)} ld.shared.b32 %r11, [%r4]; {second} {wait("%r2", 1)}
    ld.shared.b32 %r12, [%r4]; add.u32 %r10, %r11, %r12; {OUT}"""

    blocks = [(0,), (1,)][::order]
    out, _ = run(body(tell), cluster=2, blocks=blocks)
    np.testing.assert_array_equal(out, np.tile(2 * np.arange(64) + 64, (2, 1)))
    # Thread 0 speaks for all: it does not know that they have read.
    alone = f"@!%p1 bra QUIET; {tell.replace('_, [%r9]', '_, [%r9], 64')} QUIET:"
    fails("race: writes shared byte", body(alone), cluster=2, blocks=blocks)
    run(body(f"bar.sync 0; {alone}"), cluster=2, blocks=blocks)


def test_copy_to_one_other_block() -> None:
    """And its mbarrier has to be there too."""
    at = "mapa.shared::cluster.u32 %r16, %r5, 1; mapa.shared::cluster.u32 %r17, %r2, 1;"
    body = f"""{start(barrier=CLUSTER)} {at} setp.eq.and.u32 %p3, %r1, 0, %p1; setp.eq.and.u32 %p4, %r1, 1, %p1;
    @%p4 {EXPECT.format(256).split(" ", 1)[1]}
    @%p3 {BULK} [%r16], [%rd1], 256, [%r17]; setp.eq.u32 %p5, %r1, 0; @%p5 bra END; {wait("%r2", 0)} {READ} END:"""
    out, _ = run(body, cluster=2)
    np.testing.assert_array_equal(out, np.arange(2)[:, None] * np.arange(64))
    fails(
        "the mbarrier is in block 0 of the cluster, what it counts in block 1",
        body.replace("256, [%r17]", "256, [%r2]"),
        cluster=2,
    )


# Who knows that a copy has come

#: Lets a copy come and makes warp 1 go on after it, which orders nothing.
RELAXED = f"""@!%p2 bra LATER; {wait("%r2", 0)} @%p1 mbarrier.arrive.relaxed.cta.shared.b64 _, [%r3]; bra KNOWN;
    LATER: {wait("%r3", 0, "try_wait.parity.relaxed.cta")} {{}} KNOWN:"""


@pytest.mark.parametrize("racecheck", [False, True])
def test_waits_of_others(racecheck: bool) -> None:
    early = "before a wait for the mbarrier's phase"
    fails(early, copied(waits=RELAXED.format("")), racecheck=racecheck)
    fails(early, copied(waits=RELAXED.format("bar.warp.sync -1;")), racecheck=racecheck)
    # An arrival that is not relaxed tells those who wait for it.
    told = (
        RELAXED.format("")
        .replace("relaxed.cta.shared", "shared")
        .replace("try_wait.parity.relaxed.cta", "try_wait.parity")
    )
    out, _ = run(copied(waits=told), racecheck=racecheck)
    np.testing.assert_array_equal(out[0], np.arange(64))


def test_a_barrier_of_some_after_one_of_all() -> None:
    """Warps 0 and 1 have waited, or met one who has; warp 2 has not since."""
    waits = f"""bar.sync 0; setp.ge.u32 %p4, %r0, 64; @%p4 bra THIRD; @!%p2 bra MET; {wait("%r2", 0)} MET:
    bar.sync 1, 64; @%p1 mbarrier.arrive.relaxed.cta.shared.b64 _, [%r3]; bra KNOWN;
    THIRD: {wait("%r3", 0, "try_wait.parity.relaxed.cta")} and.b32 %r20, %r0, 31;
    mad.lo.u32 %r4, %r20, 4, %r5; KNOWN:"""
    fails("race: reads shared byte 0 that a bulk copy wrote", copied(waits=waits), block=96)


def test_a_thread_knows_what_it_did_itself() -> None:
    twice = f"{EXPECT.format(256)} {COPY}"
    alone = f"""{start(barrier=FENCED)} @!%p1 bra END; {twice} {wait("%r2", 0)} ld.shared.b32 %r10, [%r4]; {twice}
    {wait("%r2", 1)} ld.shared.b32 %r10, [%r4+8]; {OUT} END:"""
    assert run(alone)[0][0, 0] == 2


#: Another copy, which counts at `empty`.
SECOND = EXPECT.replace("%r2", "%r3").format(64) + f"@%p1 {BULK} [%r5+512], [%rd1], 64, [%r3];"


def test_copies_that_came_and_nobody_waited_for() -> None:
    fails("has not waited for a copy that counts at", copied(COPY + SECOND, waits=wait("%r3", 0), read=""))
    # The barrier shows what the first copy has brought, but not what the next one has to the same place.
    again = f"{EXPECT.format(256)} {COPY} {SECOND}".replace("expect_tx", "expect_tx.relaxed.cta")
    again += f"{wait('%r3', 0)} bar.sync 0;"
    fails("before a wait for the mbarrier's phase", copied(waits=wait("%r2", 0) + again))
