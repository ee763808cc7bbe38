"""A whole kernel of the kind that mbarriers are for: one warpgroup copies, another multiplies, two blocks share.

Block r of a cluster of two computes rows 64 r .. 64 r + 63 of A B^T. Each step brings 64 columns: its own rows of A,
and half of B, which it multicasts. Consumers keep the product of one step in flight, and give a buffer back to both
producers once the product after it has begun.
"""

from __future__ import annotations

import numpy as np
import pytest
from emulator_kernel import HEADER
from emulator_pipeline import wait

from lowbit.dialect.errors import EmulatorError
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.runtime.tensor_map import TensorMap

STEPS, STAGES, STAGE = 5, 3, 12288
TENSOR = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
ACCUMULATORS = "{" + ", ".join(f"%f{i}" for i in range(16)) + "}"


def products() -> str:
    """Of a step's 64 columns, 16 at a time: descriptors of rows of 128 swizzled bytes. The first starts from 0."""
    descriptor = 1 << 62 | 64 << 32 | 1 << 16
    found = """shr.u32 %r20, %r13, 4; cvt.u64.u32 %rd5, %r20; add.u64 %rd6, %rd5, 512;"""
    for _ in range(4):
        found += f"""or.b64 %rd7, %rd5, {descriptor}; or.b64 %rd8, %rd6, {descriptor}; setp.ne.u32 %p5, %r21, 0;
        wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {ACCUMULATORS}, %rd7, %rd8, %p5, 1, 1, 0, 0;
        add.u64 %rd5, %rd5, 2; add.u64 %rd6, %rd6, 2; mov.u32 %r21, 1;"""
    return f"{found} wgmma.commit_group.sync.aligned;"


def release(stage: str) -> str:
    """One thread of each warp gives `stage` back to both producers."""
    arrive = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r24];"
    return f"""mad.lo.u32 %r23, {stage}, 8, %r3; mapa.shared::cluster.u32 %r24, %r23, 0; @%p3 {arrive}
    mapa.shared::cluster.u32 %r24, %r23, 1; @%p3 {arrive}"""


def kernel(
    *, pending: int = 1, fence: str = "wgmma.fence.sync.aligned;", empty: str = "", expected: int = STAGE
) -> str:
    init = "".join(f"@%p1 mbarrier.init.shared.b64 [%r2+{8 * i}], {1 if i < STAGES else 8};" for i in range(2 * STAGES))
    place = f"""mad.lo.u32 %r12, %r11, 8, %r2; mad.lo.u32 %r13, %r11, {STAGE}, %r4;"""
    advance = f"""add.u32 %r10, %r10, 1; add.u32 %r11, %r11, 1; setp.eq.u32 %p4, %r11, {STAGES};
    @%p4 mov.u32 %r11, 0; @%p4 xor.b32 %r14, %r14, 1; setp.lt.u32 %p4, %r10, {STEPS};"""
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    return f"""{HEADER}.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .align 64 .b8 a[128], .param .align 64 .b8 b[128], .param .u64 p2)
.explicitcluster
.reqnctapercluster 2, 1, 1
.reqntid 256, 1, 1
.minnctapersm 1
{{
    .reg .pred %p<10>; .reg .b16 %rs<4>; .reg .b32 %r<64>; .reg .b64 %rd<16>; .reg .f32 %f<16>;
    .shared .align 8 .b8 bars[{16 * STAGES}];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, bars; add.u32 %r3, %r2, {8 * STAGES};
    mov.u32 %r4, smem; setp.eq.u32 %p1, %r0, 0; {init}
    fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
    mov.u32 %r10, 0; mov.u32 %r11, 0; mov.u32 %r14, 0; setp.ge.u32 %p2, %r0, 128; @%p2 bra CONSUMER;
    setmaxnreg.dec.sync.aligned.u32 40; setp.ge.u32 %p3, %r0, 32; @%p3 bra END; elect.sync _|%p3, -1; @!%p3 bra LAST;
    mov.b64 %rd1, a; cvta.param.u64 %rd1, %rd1; mov.b64 %rd2, b; cvta.param.u64 %rd2, %rd2; mov.u32 %r14, 1;
    mov.u16 %rs1, 3; shl.b32 %r30, %r1, 6; shl.b32 %r31, %r1, 4; shl.b32 %r32, %r1, 11;
    COPY: {place} add.u32 %r15, %r12, {8 * STAGES}; {empty or wait("%r15", "%r14")}
    mbarrier.arrive.expect_tx.shared.b64 _, [%r12], {expected}; shl.b32 %r16, %r10, 6;
    {TENSOR} [%r13], [%rd1, {{%r16, %r30}}], [%r12]; add.u32 %r17, %r13, %r32; add.u32 %r17, %r17, 8192;
    {TENSOR}.multicast::cluster [%r17], [%rd2, {{%r16, %r31}}], [%r12], %rs1; {advance} @%p4 bra COPY;
    LAST: bar.warp.sync -1; bra END;
    CONSUMER: setmaxnreg.inc.sync.aligned.u32 232; and.b32 %r18, %r0, 31; setp.eq.u32 %p3, %r18, 0;
    mov.u32 %r21, 0; mov.u32 %r22, 0; {fence}
    MULTIPLY: {place} {wait("%r12", "%r14")} {products()} wgmma.wait_group.sync.aligned {pending};
    setp.eq.u32 %p6, %r10, 0; @%p6 bra KEEP; {release("%r22")} KEEP: mov.u32 %r22, %r11; {advance}
    @%p4 bra MULTIPLY; wgmma.wait_group.sync.aligned 0; {release("%r22")}
    ld.param.u64 %rd9, [p2]; shl.b32 %r26, %r1, 7; add.u32 %r26, %r26, %r0; sub.u32 %r26, %r26, 128;
    mad.wide.u32 %rd9, %r26, 64, %rd9; {"".join(f"st.global.f32 [%rd9+{4 * i}], %f{i};" for i in range(16))}
    END: {meet}
    ret;
}}
"""


def run(source: str, order: int = 1, racecheck: bool = True) -> tuple[np.ndarray, np.ndarray, Emulator]:
    """What it computes, and what is right."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-8, 8, (rows, 64 * STEPS)).astype(np.float16) for rows in (128, 32))
    maps = TensorMap(a, "f16", a.shape, (64, 64), swizzle=128), TensorMap(b, "f16", b.shape, (16, 64), swizzle=128)
    out, emulator = np.zeros((2, 128, 16), np.float32), Emulator(source)
    emulator.launch(
        "k",
        grid=2,
        block=256,
        args=[*maps, out],
        shared_bytes=STAGES * STAGE,
        racecheck=racecheck,
        blocks=[(0,), (1,)][::order],
        max_steps=50_000,
    )
    expected, product = np.zeros_like(out), a.astype(np.float32) @ b.astype(np.float32).T
    for thread in range(128):
        warp, g, t = thread // 32, thread % 32 // 4, thread % 4
        for i in range(16):
            row, column = 16 * warp + g + 8 * (i // 2 % 2), i // 4 * 8 + 2 * t + i % 2
            expected[:, thread, i] = product[[row, row + 64], column]
    return out, expected, emulator


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("racecheck", [False, True])
def test_product(order: int, racecheck: bool) -> None:
    out, expected, emulator = run(kernel(), order, racecheck)
    np.testing.assert_array_equal(out, expected)
    assert emulator.stats.total_of("wgmma.mma_async") == 2 * 4 * 4 * STEPS
    assert emulator.stats.total_of("mbarrier.try_wait") < 2 * 40 * STEPS


@pytest.mark.parametrize(
    ("message", "source"),
    [
        # A buffer goes back while the product that reads it is in flight.
        (
            "wgmma in flight reads|race: writes shared byte .* that the wgmma of warp . read",
            kernel().replace("setp.eq.u32 %p6, %r10, 0; @%p6 bra KEEP;", "mov.u32 %r22, %r11;"),
        ),
        ("wgmma in flight reads|race: writes shared byte", kernel(pending=2)),
        # Nobody waits for `empty`.
        ("more than it waits for", kernel(empty=" ")),
        ("deadlock|bulk copy before a wait|more copied", kernel(expected=STAGE // 2)),
        ("deadlock: nobody ends the phase of `bars`.*12288 bytes expected", kernel(expected=2 * STAGE)),
        ("before the first wgmma", kernel(fence="")),
        # All arrivals at block 0.
        (
            "wgmma in flight reads|race|more than it waits for",
            kernel().replace("mapa.shared::cluster.u32 %r24, %r23, 1;", ""),
        ),
        # The last arrivals come when the block may have gone.
        (
            "has not waited for an arrival of another block|which has exited",
            kernel().replace("END: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", "END:"),
        ),
        ("%f0 is used while a wgmma with it is in flight", kernel().replace("KEEP:", "KEEP: mov.f32 %f0, %f0;")),
        (
            "%f0 is used while a wgmma",
            kernel().replace("@%p4 bra MULTIPLY; wgmma.wait_group.sync.aligned 0;", "@%p4 bra MULTIPLY;"),
        ),
    ],
)
def test_mistakes(message: str, source: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(source)


def test_setmaxnreg() -> None:
    source = kernel()
    for count in (20, 44, 264):
        with pytest.raises(EmulatorError, match=f"a multiple of 8 from 24 to 256, not {count}"):
            Emulator(source.replace("u32 232", f"u32 {count}"))
    apart = "setp.lt.u32 %p7, %r0, 160; @%p7 bra SKIP; setmaxnreg.inc.sync.aligned.u32 232; SKIP:"
    with pytest.raises(EmulatorError, match=r"deadlock: the other threads of the warpgroup|exited"):
        run(source.replace("setmaxnreg.inc.sync.aligned.u32 232;", apart))
