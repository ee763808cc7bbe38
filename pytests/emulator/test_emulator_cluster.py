"""Thread block clusters in the emulator: special registers, distributed shared memory, barrier.cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator_kernel import HEADER

from lowbit.dialect.errors import EmulatorError
from lowbit.pylib.emulator import Emulator

ALL = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
#: %r0 = tid, %r1 = ctaid.x, %r2 = rank, %r4 = smem + 4 tid, %r5 = 1000 ctaid.x + tid, %rd0 = p0 + 4 (ctaid.x 32 + tid)
START = """.shared .align 16 .b8 smem[1024]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %cluster_ctarank;
    mov.u32 %r3, smem; mad.lo.u32 %r4, %r0, 4, %r3; mad.lo.u32 %r5, %r1, 1000, %r0;
    ld.param.u64 %rd0, [p0]; mad.lo.u32 %r6, %r1, 32, %r0; mad.wide.u32 %rd0, %r6, 4, %rd0;"""
WRITE = "st.shared.b32 [%r4], %r5;"
NEXT = "add.u32 %r7, %r2, 1; and.b32 %r7, %r7, 3; mapa.shared::cluster.u32 %r8, %r4, %r7;"
READ = "ld.shared::cluster.b32 %r10, [%r8]; st.global.b32 [%rd0], %r10;"


def kernel(body: str, cluster: str = "4, 1, 1", registers: str = "") -> str:
    size = f".explicitcluster\n.reqnctapercluster {cluster}" if cluster else ""
    return f"""{HEADER}.visible .entry k(.param .u64 p0) {size}
{{
    .reg .pred %p<9>; .reg .b32 %r<64>; .reg .b64 %rd<16>; {registers}
    {body}
    ret;
}}
"""


def run(body: str, out: Any = None, *, cluster: str = "4, 1, 1", grid: Any = 8, block: int = 32, **options: Any) -> Any:
    out = np.zeros((8, 32), np.uint32) if out is None else out
    Emulator(kernel(body, cluster)).launch("k", grid=grid, block=block, args=[out], **options)
    return out


def fails(message: str, body: str, **options: Any) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(body, **options)


def neighbours() -> np.ndarray:
    """What `NEXT` finds: 1000 (the next block of the cluster) + tid."""
    block = np.arange(8)
    return (block // 4 * 4 + (block + 1) % 4)[:, None] * 1000 + np.arange(32)


def test_special_registers() -> None:
    names = [
        f"%{stem}.{axis}" for stem in ("cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid") for axis in "xyz"
    ]
    names += ["%cluster_ctarank", "%cluster_nctarank"]
    out = np.zeros((2, 6, 4, len(names)), np.uint32)  # ctaid z y x
    moves = "".join(f"mov.u32 %r5, {name}; st.global.b32 [%rd0+{4 * i}], %r5;" for i, name in enumerate(names))
    run(
        f"""mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ctaid.y; mov.u32 %r2, %ctaid.z; mad.lo.u32 %r1, %r2, 6, %r1;
    mad.lo.u32 %r0, %r1, 4, %r0; ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd0, %r0, {4 * len(names)}, %rd0; {moves}""",
        out,
        cluster="2, 3, 1",
        grid=(4, 6, 2),
        block=1,
    )
    z, y, x = np.indices((2, 6, 4))
    ones = np.ones_like(x)
    expected = [x % 2, y % 3, 0 * z, 2 * ones, 3 * ones, ones, x // 2, y // 3, z, 2 * ones, 2 * ones, 2 * ones]
    np.testing.assert_array_equal(out, np.stack([*expected, x % 2 + 2 * (y % 3), 6 * ones], axis=-1))


def test_without_a_cluster() -> None:
    """A block alone is a cluster of one."""
    out = run(f"{START} {WRITE} mov.u32 %r7, 0; mapa.shared::cluster.u32 %r8, %r4, %r7; {ALL} {READ}", cluster="")
    np.testing.assert_array_equal(out, np.arange(8)[:, None] * 1000 + np.arange(32))


def test_read_of_another_block() -> None:
    out = run(f"{START} {WRITE} {ALL} {NEXT} {READ} {ALL}", racecheck=True)
    np.testing.assert_array_equal(out, neighbours())


@pytest.mark.parametrize("order", [range(8), range(7, -1, -1), [6, 1, 4, 0, 3, 5, 7, 2]])
def test_write_to_another_block_in_any_order(order: Any) -> None:
    out = run(
        f"""{START} {ALL} {NEXT} st.shared::cluster.b32 [%r8], %r5; {ALL}
    ld.shared.b32 %r10, [%r4]; st.global.b32 [%rd0], %r10;""",
        blocks=[(i,) for i in order],
        racecheck=True,
    )
    expected = np.empty_like(out)
    expected[np.ravel(neighbours()[:, 0] // 1000)] = np.arange(8)[:, None] * 1000 + np.arange(32)
    np.testing.assert_array_equal(out, expected)


def test_vectors_and_own_addresses() -> None:
    """16 bytes of rank 1, and a .shared::cta address, which is one's own in the .shared::cluster window too."""
    out = run(
        f"""{START} {WRITE} {ALL} and.b32 %r9, %r0, 7; mad.lo.u32 %r9, %r9, 16, %r3; mov.u32 %r7, 1;
    mapa.shared::cluster.u32 %r8, %r9, %r7; ld.shared::cluster.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r8];
    ld.shared::cluster.b32 %r24, [%r4]; sub.u32 %r25, %r24, %r0; add.u32 %r25, %r25, %r23; {ALL}
    st.global.b32 [%rd0], %r25;""",
        cluster="2, 1, 1",
        grid=2,
    )
    tid = np.arange(32)
    np.testing.assert_array_equal(out[:2], [1000 * block + 1000 + 4 * (tid % 8) + 3 for block in range(2)])


def test_generic_addresses() -> None:
    out = run(
        f"""{START} {WRITE} {ALL} add.u32 %r7, %r2, 1; and.b32 %r7, %r7, 3; cvt.u64.u32 %rd1, %r4;
    cvta.shared.u64 %rd2, %rd1; mapa.u64 %rd3, %rd2, %r7; ld.b32 %r10, [%rd3]; st.global.b32 [%rd0], %r10; {ALL}"""
    )
    np.testing.assert_array_equal(out, neighbours())


def test_arrive_and_wait_apart() -> None:
    """What comes between arrive and wait is not waited for; exited threads count as arrived."""
    out = run(
        f"""{START} {WRITE} setp.ge.u32 %p1, %r0, 16; @%p1 exit; barrier.cluster.arrive.release; mov.u32 %r20, 5;
    barrier.cluster.wait.acquire; {NEXT} {READ} barrier.cluster.arrive.relaxed; barrier.cluster.wait;"""
    )
    np.testing.assert_array_equal(out, np.where(np.arange(32) < 16, neighbours(), 0))


def test_divergent_arrivals() -> None:
    out = run(
        f"""{START} {WRITE} and.b32 %r20, %r0, 1; setp.eq.u32 %p1, %r20, 0; @%p1 bra EVEN;
    barrier.cluster.arrive; bra JOIN; EVEN: barrier.cluster.arrive; JOIN: barrier.cluster.wait; {NEXT} {READ} {ALL}"""
    )
    np.testing.assert_array_equal(out, neighbours())


def test_sum_over_a_cluster() -> None:
    """Partial sums in turns: block 0 of each cluster adds what all have."""
    adds = "".join(
        f"""mov.u32 %r7, {i}; mapa.shared::cluster.u32 %r8, %r4, %r7; ld.shared::cluster.b32 %r10, [%r8];
    add.u32 %r11, %r11, %r10;"""
        for i in range(4)
    )
    emulator, out = (
        Emulator(
            kernel(
                f"""{START} {WRITE} {ALL} setp.ne.u32 %p1, %r2, 0; @%p1 bra END; mov.u32 %r11, 0; {adds}
    st.global.b32 [%rd0], %r11; END: {ALL}"""
            )
        ),
        np.zeros((8, 32), np.uint32),
    )
    emulator.launch("k", grid=8, block=32, args=[out], racecheck=True)
    np.testing.assert_array_equal(out[::4], [4 * np.arange(32) + 6000 + 16000 * i for i in range(2)])
    assert emulator.stats["barrier.cluster.wait.aligned"] >= 16
    assert emulator.stats["ld.shared::cluster.b32"] == 8


def test_launches_that_do_not_fit() -> None:
    fails(r"grid=\(6, 1, 1\) must be a multiple of the cluster \(4, 1, 1\)", "", grid=6)
    fails("at most 16 blocks", "", grid=32, cluster="32, 1, 1")
    fails(r"name each of the 4 blocks of cluster \(0, 0, 0\) once", "", blocks=[(0,), (1,), (2,)])
    with pytest.raises(EmulatorError, match=r"add \.reqnctapercluster"):
        Emulator(kernel("", "").replace("p0)", "p0) .explicitcluster")).launch("k", block=32, args=[None])


def test_mapa_faults() -> None:
    fails("rank beyond the 4 blocks", f"{START} mov.u32 %r7, 4; mapa.shared::cluster.u32 %r8, %r4, %r7;")
    fails("not in the block's shared memory", f"{START} {NEXT} mapa.shared::cluster.u32 %r8, %r8, %r7;")
    fails("not in the block's shared memory", f"{START} mapa.u64 %rd1, %rd0, 1;")
    fails("out of bounds", f"{START} {WRITE} {ALL} {NEXT} ld.shared.b32 %r10, [%r8];")
    fails("out of bounds", f"{START} {ALL} {NEXT} ld.shared::cluster.b32 %r10, [%r8+4096];")
    fails("no .shared::cluster address", f"{START} {ALL} {NEXT} ld.shared::cluster.b32 %r10, [%r8+0x10000000];")


def test_barrier_faults() -> None:
    fails("again before it has waited", "barrier.cluster.arrive; barrier.cluster.arrive;")
    fails("has not arrived", "barrier.cluster.wait;")
    # Who has exited is not waited for.
    run(f"mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p1, %r2, 1; @%p1 exit; {ALL}")
    lanes = "mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 16;"
    fails("deadlock", f"{lanes} @%p1 barrier.cluster.arrive.aligned; @!%p1 bar.sync 1, 64;")
    fails("deadlock: the other blocks", f"{lanes} @!%p1 bar.sync 1; barrier.cluster.arrive; barrier.cluster.wait;")


def test_memory_of_a_block_that_has_exited() -> None:
    """The reader comes before or after the exit, by the order in which the blocks run."""
    body = f"{START} {WRITE} {ALL} {NEXT} {READ}"
    fails("block exits while another may still use|which has exited", body, blocks=[(i,) for i in range(8)])
    fails("block exits while another may still use|which has exited", body, blocks=[(i,) for i in reversed(range(8))])
    only = f"{START} {WRITE} {ALL} setp.ne.u32 %p1, %r2, {{}}; @%p1 exit; {NEXT} {READ}"
    fails("block exits while another may still use", only.format(0))
    fails("block 3 of the cluster, which has exited", only.format(2))
    fails(
        "block exits while another",
        f"{START} {WRITE} {ALL} {NEXT} barrier.cluster.arrive; {READ} barrier.cluster.wait;",
    )


def test_use_before_any_cluster_barrier() -> None:
    fails("before any cluster barrier: it may not have started", f"{START} {WRITE} {NEXT} {READ} {ALL}")


def test_never_written() -> None:
    fails("never written", f"{START} {ALL} {NEXT} {READ} {ALL}")


@pytest.mark.parametrize(
    "body",
    [
        f"{ALL} {WRITE} {NEXT} {READ} {ALL}",
        f"{WRITE} {ALL} {NEXT} {READ} {WRITE} {ALL}",
        f"{WRITE} {ALL} {NEXT} barrier.cluster.arrive; {READ} barrier.cluster.wait; {WRITE} {ALL}",
        f"{WRITE} {ALL} barrier.cluster.arrive; {WRITE} barrier.cluster.wait; {NEXT} {READ} {ALL}",
        f"{WRITE} barrier.cluster.arrive.relaxed; barrier.cluster.wait; {NEXT} {READ} {ALL}",
        f"{WRITE} {ALL} {NEXT} st.shared::cluster.b32 [%r8], %r5; bar.sync 0; ld.shared.b32 %r10, [%r4]; {ALL}",
        f"{ALL} mov.u32 %r7, 0; mapa.shared::cluster.u32 %r8, %r4, %r7; st.shared::cluster.b32 [%r8], %r5; {ALL}",
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_races_between_blocks(body: str, order: int) -> None:
    """In whatever order the blocks run."""
    blocks = [(i,) for i in range(8)][::order]
    message = r"race: (reads|writes) byte \d+ of the shared memory of block \d .* without a cluster barrier between"
    fails(f"{message}|never written", f"{START} {body}", blocks=blocks, racecheck=True)


def test_no_races_between_blocks() -> None:
    """A barrier's ends apart, a relaxed arrival where nothing is told, and turns of writing and reading."""
    apart = f"{WRITE} barrier.cluster.arrive; mov.u32 %r20, 1; barrier.cluster.wait; {NEXT} {READ}"
    turns = f"{ALL} {WRITE} {ALL} {READ} barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    np.testing.assert_array_equal(run(f"{START} {apart} {turns}", racecheck=True), neighbours())
    # A relaxed arrival of a thread that has exited counts for its own phase only.
    meet = "barrier.cluster.arrive; barrier.cluster.wait;"
    leave = "setp.ge.u32 %p1, %r0, 16; @%p1 barrier.cluster.arrive.relaxed; @%p1 exit;"
    out = run(f"{START} {leave} {meet} {WRITE} {meet} {NEXT} {READ} {meet}", racecheck=True)
    np.testing.assert_array_equal(out, np.where(np.arange(32) < 16, neighbours(), 0))
