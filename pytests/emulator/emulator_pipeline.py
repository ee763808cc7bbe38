"""The frame of kernels whose threads wait for mbarriers: two of them, full and empty."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator_kernel import HEADER

from lowbit.dialect.errors import EmulatorError
from lowbit.pylib.emulator import Emulator

#: %r0 = tid, %r1 = rank, mbarriers %r2 = full and %r3 = empty, %r4 = smem + 4 tid, %rd0 = p0 + 4 tid + 512 ctaid,
#: %rd1 = p1 + 16 tid; %p1: thread 0, %p2: warp 0
START = """.shared .align 16 .b8 smem[1024]; .shared .align 8 .b8 bars[16];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, bars; add.u32 %r3, %r2, 8;
    mov.u32 %r5, smem; mad.lo.u32 %r4, %r0, 4, %r5; ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd0, %r0, 4, %rd0;
    mov.u32 %r6, %ctaid.x; mad.wide.u32 %rd0, %r6, 512, %rd0; ld.param.u64 %rd1, [p1]; mad.wide.u32 %rd1, %r0, 16, %rd1;
    setp.eq.u32 %p1, %r0, 0; setp.lt.u32 %p2, %r0, 32;"""
INIT = "@%p1 mbarrier.init.shared.b64 [%r2], {full}; @%p1 mbarrier.init.shared::cta.b64 [%r3], {empty};"
ARRIVE = "mbarrier.arrive.shared.b64 _, [{0}];"
REMOTE = "mapa.shared::cluster.u32 %r9, {0}, {1}; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r9];"
CLUSTER = "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;"
OUT = "st.global.b32 [%rd0], %r10;"
labels = iter(range(10**6))


def wait(barrier: str, parity: object, kind: str = "try_wait.parity") -> str:
    n = next(labels)
    loop = f"mbarrier.{kind}.shared::cta.b64 %p9, [{barrier}], {parity}; @%p9 bra DONE{n}; bra WAIT{n};"
    return f"WAIT{n}: {loop} DONE{n}:"


def start(full: int = 1, empty: int = 1, barrier: str = "bar.sync 0;") -> str:
    return f"{START} {INIT.format(full=full, empty=empty)} {barrier}"


def kernel(body: str, cluster: int = 1) -> str:
    size = f".explicitcluster\n.reqnctapercluster {cluster}, 1, 1" if cluster > 1 else ""
    return f"""{HEADER}.visible .entry k(.param .u64 p0, .param .u64 p1) {size}
{{
    .reg .pred %p<10>; .reg .b32 %r<64>; .reg .b64 %rd<16>;
    {body}
    ret;
}}
"""


def run(body: str, *, cluster: int = 1, block: int = 64, **options: Any) -> tuple[Any, Emulator]:
    out = np.zeros((cluster, 128), np.uint32)
    emulator = Emulator(kernel(body, cluster))
    options.setdefault("racecheck", True)
    source = np.arange(512, dtype=np.uint32)
    emulator.launch("k", grid=cluster, block=block, args=[out, source], max_steps=20_000, **options)
    return out[:, :block], emulator


def fails(message: str, body: str, **options: Any) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(body, **options)
