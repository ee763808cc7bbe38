"""mbarriers of the emulator: phases, arrivals from other blocks, cp.async, and what goes wrong with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator_pipeline import ARRIVE, CLUSTER, OUT, REMOTE, START, fails, kernel, run, start, wait

from lowbit.dialect.errors import EmulatorError
from lowbit.pylib.emulator import Emulator


def passed(waits: str, write: str = "st.shared.b32 [%r4+-128], %r0;", arrive: str = ARRIVE.format("%r2")) -> str:
    """Warp 0 reads after `waits` what warp 1, later in the program, writes before it arrives."""
    return f"""@!%p2 bra PRODUCER; {waits} ld.shared.b32 %r10, [%r4]; {OUT} bra END; PRODUCER: {write} {arrive} END:"""


def test_arrivals_tell_who_waits() -> None:
    """The waiting warp stands before the writing one in the program; nothing but the mbarrier orders them."""
    out, emulator = run(f"{start(32)} {passed(wait('%r2', 0))}")
    np.testing.assert_array_equal(out[0, :32], 32 + np.arange(32))
    assert emulator.stats.total_of("mbarrier.try_wait") <= 4


@pytest.mark.parametrize(
    "kind", ["test_wait.parity", "try_wait.parity.acquire.cluster", "test_wait.parity.acquire.cta"]
)
def test_kinds_of_waits(kind: str) -> None:
    out, _ = run(f"{start(32)} {passed(wait('%r2', 0, kind))}")
    np.testing.assert_array_equal(out[0, :32], 32 + np.arange(32))


def test_wait_with_a_time_limit() -> None:
    out, _ = run(f"{start(32)} {passed(wait('%r2', '0, 1000'))}")
    np.testing.assert_array_equal(out[0, :32], 32 + np.arange(32))


def test_waiting_by_state() -> None:
    """All arrive, and wait for the phase that their arrival was in; twice."""
    once = "mbarrier.arrive.shared.b64 %rd5, [%r2]; {} xor.b32 %r12, %r4, 128;"
    body = "".join(
        f"""st.shared.b32 [%r4+{at}], %r0; {once.format(wait("%r2", "%rd5", "try_wait"))}
    ld.shared.b32 %r10, [%r12+{at}];"""
        for at in (0, 256)
    )
    out, _ = run(f"{start(64)} {body} {OUT}")
    np.testing.assert_array_equal(out[0], np.arange(64) ^ 32)
    fails(
        "a state that no arrival in this or the last phase has given",
        f"{start(64)} mov.b64 %rd5, 7; {wait('%r2', '%rd5', 'test_wait')}",
    )


def test_phases_take_turns() -> None:
    """A buffer goes to and fro eight times: parities flip, and the first wait for `empty` passes at once."""

    def body(full: str, empty: str, consume: str) -> str:
        count = "xor.b32 %r21, %r21, 1; add.u32 %r20, %r20, 1; setp.lt.u32 %p3, %r20, 8;"
        return f"""{start(32, 32)} mov.u32 %r20, 0; mov.u32 %r21, 0; mov.u32 %r23, 0; @!%p2 bra PRODUCER;
    CONSUME: {full} {consume} add.u32 %r23, %r23, %r10; {count} @%p3 bra CONSUME; st.global.b32 [%rd0], %r23; bra END;
    PRODUCER: mov.u32 %r21, 1; PRODUCE: {empty} add.u32 %r22, %r20, %r0; st.shared.b32 [%r4+-128], %r22;
    {ARRIVE.format("%r2")} {count} @%p3 bra PRODUCE; END:"""

    full, empty, read, release = (
        wait("%r2", "%r21"),
        wait("%r3", "%r21"),
        "ld.shared.b32 %r10, [%r4];",
        ARRIVE.format("%r3"),
    )
    out, _ = run(body(full, empty, read + release))
    np.testing.assert_array_equal(out[0, :32], 8 * (np.arange(32) + 32) + 28)
    fails("the next one too", body(full, "", read))
    fails("race: writes shared byte .* that thread .* read, without a barrier", body(full, empty, release + read))


def test_counts() -> None:
    """An arrival that counts several, of a thread or of all of a warp together in two phases."""
    one = f"{start(64)} @%p1 mbarrier.arrive.shared.b64 _, [%r2], 64; {wait('%r2', 0)} mov.u32 %r10, 5; {OUT}"
    assert (run(one)[0] == 5).all()
    fails("deadlock.*63 of 64 arrivals missing", one.replace("[%r2], 64; WAIT", "[%r2]; WAIT"))
    many = f"{start(32)} {ARRIVE.format('%r2')} {wait('%r2', 1)} mov.u32 %r10, 7; {OUT}"
    assert (run(many)[0] == 7).all()
    fails("an arrival counts 1 to 1048575, not 0", f"{start()} mbarrier.arrive.shared.b64 _, [%r2], 0;")
    fails("waits for 1 to 1048575 arrivals, not 0", start(0))
    fails(r"2 arrivals at the mbarrier at \d+ \(phase 0: 1 of 1", f"{start()} mbarrier.arrive.shared.b64 _, [%r2], 2;")


def test_expected_bytes_hold_the_phase() -> None:
    body = f"{start()} @%p1 mbarrier.{{}}; {wait('%r2', 0)}"
    run(body.format("arrive.expect_tx.shared.b64 _, [%r2], 0"))
    message = (
        r"deadlock: nobody ends the phase of `bars`: the mbarrier at \d+ \(phase 0: 0 of 1 arrivals missing, 512 bytes"
    )
    fails(message, body.format("arrive.expect_tx.shared::cta.b64 %rd5, [%r2], 512"))
    apart = "expect_tx.relaxed.cta.shared.b64 [%r2], 512; @%p1 mbarrier.arrive.shared.b64 %rd5, [%r2]"
    fails(message, body.format(apart))
    fails("leaves its range of 1048575 bytes", body.format("arrive.expect_tx.shared.b64 _, [%r2], 1048576"))


def test_deadlocks() -> None:
    fails(r"deadlock: nobody ends the phase of `bars`\+8: .*1 of 1 arrivals missing", f"{start()} {wait('%r3', 0)}")
    wrong = f"{start(32)} {passed(wait('%r2', 0) + wait('%r2', 1))}"
    fails("phase 1: 32 of 32 arrivals missing.*32 threads wait at line", wrong)
    fails(
        "deadlock.*1 of 32 arrivals missing",
        f"{start(32)} {passed(wait('%r2', 0))}".replace(
            ARRIVE.format("%r2"), "setp.eq.u32 %p3, %r0, 40; @!%p3 " + ARRIVE.format("%r2")
        ),
    )


def test_wrong_phase() -> None:
    """The parity of the phase before passes at once: the data are not there."""
    fails("never written", f"{start(32)} {passed(wait('%r2', 1))}")
    fails("a phase's parity is 0 or 1, not 2", f"{start(32)} {wait('%r2', 2)}")


def test_a_wait_needs_a_loop() -> None:
    once = "mbarrier.try_wait.parity.shared.b64 %p9, [%r2], 0;"
    fails("never written", f"{start(32)} {passed(once)}")


def test_a_missed_phase() -> None:
    """Two phases end before warp 0 looks again: it would wait for ever, or take the third for the first."""
    quick = passed(wait("%r2", 0), arrive=ARRIVE.format("%r2") * 2)
    fails("the phase that the thread waits for ended, and the next one too", f"{start(32)} {quick}")


def test_initialisation() -> None:
    use = f"{wait('%r2', 1)} {wait('%r3', 1)}"
    run(f"{start()} {use}")
    fails("which thread 0 has initialised, without a barrier since", f"{start(barrier='')} {use}")
    fails(
        "which thread 0 has initialised, without a barrier since",
        f"{start(barrier='bar.warp.sync -1;')} {use}".replace(
            "bar.warp.sync -1;", "fence.mbarrier_init.release.cluster;"
        ),
    )
    run(f"{start(barrier='bar.warp.sync -1;')} @%p2 bra A; bra END; A: {use} END:")
    fails("no mbarrier is initialised at", f"{start()} {ARRIVE.format('%r4')}")
    fails("write to an mbarrier", f"{start()} @%p1 mbarrier.init.shared.b64 [%r2], 1;")
    fails("2 threads|64 threads, which nothing orders", f"{START} mbarrier.init.shared.b64 [%r2], 1;")
    fails("read of an mbarrier", f"{start()} ld.shared.b32 %r10, [%r2];")
    fails("write to an mbarrier", f"{start()} @%p1 st.shared.b32 [%r2], 0;")
    fails("not a multiple of 8", f"{START} @%p1 mbarrier.init.shared.b64 [%r2+4], 1;")
    again = "@%p1 mbarrier.inval.shared.b64 [%r2]; bar.sync 0; @%p1 mbarrier.init.shared.b64 [%r2], 1; bar.sync 0;"
    run(f"{start(2)} {again} @%p1 {ARRIVE.format('%r2')} {wait('%r2', 0)}")
    fails("no mbarrier is initialised", f"{start()} @%p1 mbarrier.inval.shared.b64 [%r2]; bar.sync 0; {wait('%r2', 1)}")


# Other blocks


def remote(target: str, after: str = "", waits: int = 0) -> str:
    """Each block's thread 0 arrives at `full` of block `target` (of %r1), whose threads wait for it."""
    return f"""{start(barrier=CLUSTER)} {target} @%p1 mapa.shared::cluster.u32 %r9, %r2, %r7;
    @%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r9]; {wait("%r2", waits)} mov.u32 %r10, %r1; {OUT}
    {after}"""


def test_arrivals_at_another_block() -> None:
    out, _ = run(remote("xor.b32 %r7, %r1, 1;"), cluster=2)
    np.testing.assert_array_equal(out[:, 0], [0, 1])
    out, _ = run(remote("add.u32 %r7, %r1, 1; and.b32 %r7, %r7, 3;"), cluster=4, blocks=[(2,), (3,), (0,), (1,)])
    np.testing.assert_array_equal(out[:, 0], np.arange(4))
    llvm = remote("xor.b32 %r7, %r1, 1;").replace(
        "release.cluster.shared::cluster.b64 _, [%r9]", "shared::cluster.b64 _, [%r9], 1"
    )
    run(llvm, cluster=2)


def test_arrivals_at_a_wrong_block() -> None:
    fails("2 arrivals|1 arrivals at the mbarrier|1 of 1 arrivals missing", remote("mov.u32 %r7, 0;"), cluster=2)
    fails(
        "use of the shared memory of block 1 of the cluster before any cluster barrier",
        remote("mov.u32 %r7, 1;").replace(CLUSTER, "bar.sync 0;"),
        cluster=2,
    )
    fails("rank beyond", remote("mov.u32 %r7, 2;"), cluster=2)
    fails("out of bounds|no mbarrier", remote("xor.b32 %r7, %r1, 1;").replace("[%r9]", "[%r9+512]"), cluster=2)
    with pytest.raises(EmulatorError, match="gives no state"):
        Emulator(kernel("mbarrier.arrive.shared::cluster.b64 %rd5, [%r9];"))
    with pytest.raises(EmulatorError, match="only mbarriers of the own block"):
        Emulator(kernel("mbarrier.try_wait.parity.shared::cluster.b64 %p9, [%r9], 0;"))


@pytest.mark.parametrize("order", [[(0,), (1,)], [(1,), (0,)]])
def test_exit_before_arrivals_of_others(order: Any) -> None:
    """Block 0 does not wait for what block 1 does to its mbarrier, in whatever order they run."""
    body = f"""{start(barrier=CLUSTER)} setp.eq.u32 %p3, %r1, 1; and.pred %p1, %p1, %p3;
    mov.u32 %r7, 0; @%p1 {REMOTE.format("%r2", "%r7").replace("; mb", "; @%p1 mb")}"""
    fails("has not waited for an arrival of another block|which has exited", body, cluster=2, blocks=order)
    run(f"{body} barrier.cluster.arrive; barrier.cluster.wait;", cluster=2, blocks=order)
    run(f"{body} @%p3 bra END; {wait('%r2', 0)} END:", cluster=2, blocks=order)


def test_memory_of_others_ordered_by_an_mbarrier() -> None:
    """Block 1 writes to block 0 and arrives there."""
    body = f"""{start(64, barrier=CLUSTER)} setp.eq.u32 %p3, %r1, 0; @%p3 bra READ; mov.u32 %r7, 0;
    mapa.shared::cluster.u32 %r8, %r4, %r7; st.shared::cluster.b32 [%r8], %r0; {REMOTE.format("%r2", "%r7")} bra END;
    READ: {wait("%r2", 0)} ld.shared.b32 %r10, [%r4]; {OUT} END: barrier.cluster.arrive; barrier.cluster.wait;"""
    out, _ = run(body, cluster=2)
    np.testing.assert_array_equal(out[0], np.arange(64))
    early = body.replace("st.shared::cluster.b32 [%r8], %r0;", "").replace(
        "bra END;", "st.shared::cluster.b32 [%r8], %r0; bra END;"
    )
    fails("race: .* of the shared memory of block 0|never written", early, cluster=2)


# cp.async

COPY = "cp.async.cg.shared.global [%r12], [%rd1], 16; cp.async.mbarrier.arrive{0}.shared.b64 [%r2];"


@pytest.mark.parametrize(("suffix", "count"), [(".noinc", 32), ("", 1)])
def test_arrival_when_copies_have_landed(suffix: str, count: int) -> None:
    """Warp 1 copies; warp 0 reads what it has brought."""
    write = "sub.u32 %r13, %r0, 32; mad.lo.u32 %r12, %r13, 16, %r5; sub.u64 %rd1, %rd1, 512;"
    # Without .noinc the phase waits for one more arrival.
    own = "" if suffix else f"setp.eq.u32 %p3, %r0, 32; @%p3 {ARRIVE.format('%r2')}"
    body = f"{start(count)} {passed(wait('%r2', 0), write, COPY.format(suffix) + own)}"
    out, _ = run(body)
    np.testing.assert_array_equal(out[0, :32], np.arange(32))
    early = (
        f"{start(count)} {passed(wait('%r2', 1) + 'bar.sync 1, 64;', write, COPY.format(suffix) + 'bar.sync 1, 64;')}"
    )
    fails("of a cp.async that its thread has not waited for", early)
    other = (
        body.replace(".noinc", "")
        if suffix
        else body.replace("arrive.shared.b64 [%r2]", "arrive.noinc.shared.b64 [%r2]")
    )
    fails("missing|has not waited for", other)


def test_arrivals_after_copies_are_of_their_thread() -> None:
    """And of the copies before: what another warp copies, or the same one afterwards, is not there."""
    copy = "cp.async.cg.shared.global [{0}], [%rd1], 16;"
    arrival = "cp.async.mbarrier.arrive.noinc.shared.b64 [{0}];"
    place = f"{start(32, 32)} mad.lo.u32 %r12, %r0, 16, %r5; setp.ge.u32 %p4, %r0, 32;"
    read = f"{wait('%r2', 0)} ld.shared.b32 %r10, [{{0}}]; {OUT}"
    own = f"{place} {copy.format('%r12')} @!%p4 {arrival.format('%r2')} @%p4 {arrival.format('%r3')}"
    wait_too = wait("%r3", 0)
    out, _ = run(f"{own} {wait_too} {read.format('%r12+4')}")
    np.testing.assert_array_equal(out[0], 4 * np.arange(64) + 1)
    fails("of a cp.async that its thread has not waited for", f"{own} {read.format('%r4+512')}")
    later = f"{place} @%p4 bra END; {arrival.format('%r2')} {copy.format('%r12')} {read.format('%r12')} END:"
    fails("of a cp.async that its thread has not waited for", later)
