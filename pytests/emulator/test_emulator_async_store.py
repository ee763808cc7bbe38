"""st.async of the emulator: stores to another block that its mbarrier counts."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_pipeline import CLUSTER, OUT, fails, kernel, run, start, wait

from lowbit.dialect.errors import EmulatorError
from lowbit.pylib.emulator import Emulator

STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{0}.{1} [%r16], {2}, [%r17];"


def body(
    store: str, count: int, *, size: int = 4, target: str = "xor.b32 %r7, %r1, 1;", waits: str | None = None
) -> str:
    """Each thread stores `size` bytes to its place in block %r7, which expects `count` bytes; it reads its own word."""
    return f"""{start(barrier=CLUSTER)} {target} mad.lo.u32 %r15, %r0, {size}, %r5;
    mapa.shared::cluster.u32 %r16, %r15, %r7; mapa.shared::cluster.u32 %r17, %r2, %r7;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {count};
    mad.lo.u32 %r11, %r1, 1000, %r0; {store} {wait("%r2", 0) if waits is None else waits}
    ld.shared.b32 %r10, [%r4]; {OUT}"""


@pytest.mark.parametrize("kind", ["b32", "u32", "s32"])
@pytest.mark.parametrize("order", [1, -1])
def test_words(kind: str, order: int) -> None:
    out, _ = run(body(STORE.format("", kind, "%r11"), 256), cluster=2, blocks=[(0,), (1,)][::order])
    np.testing.assert_array_equal(out, [1000 + np.arange(64), np.arange(64)])


def test_vectors() -> None:
    """16 bytes of each thread; the first words are those of threads 0 to 15."""
    values = "{%r11, %r11, %r20, %r11}"
    text = f"add.u32 %r20, %r11, 500; {STORE.format('.v4', 'b32', values)}"
    out, _ = run(body(text, 1024, size=16), cluster=2)
    expected = np.repeat(np.arange(16), 4) + np.tile([0, 0, 500, 0], 16)
    np.testing.assert_array_equal(out, [1000 + expected, expected])
    wide = "cvt.u64.u32 %rd5, %r11; " + STORE.format(".v2", "b64", "{%rd5, %rd5}")
    out, _ = run(body(wide, 1024, size=16), cluster=2)
    np.testing.assert_array_equal(out[1], np.repeat(np.arange(16), 4) * np.tile([1, 0], 32))


def test_mistakes() -> None:
    store = STORE.format("", "b32", "%r11")
    fails("bulk copy before a wait|never written", body(store, 256, waits=""), cluster=2)
    fails("bulk copy before a wait|never written", body(store, 256, waits=wait("%r2", 1)), cluster=2)
    fails("deadlock: .* 256 bytes expected and not copied", body(store, 512), cluster=2)
    fails("deadlock: .* 192 bytes more copied", body(store, 64), cluster=2)
    # Both to block 0; and the mbarrier of another block than the words.
    fails("still in flight", body(store, 256, target="mov.u32 %r7, 0;"), cluster=2)
    apart = body(store, 256).replace("[%r17];", "[%r2];")
    fails("the mbarrier is in block . of the cluster, what it counts in block .", apart, cluster=2)
    fails("rank beyond the 2 blocks", body(store, 256, target="mov.u32 %r7, 2;"), cluster=2)
    fails("not a multiple of 4", body(store, 256).replace("[%r16]", "[%r16+2]"), cluster=2)
    fails(
        "before any cluster barrier: it may not have started",
        body(store, 256).replace(CLUSTER, "bar.sync 0;"),
        cluster=2,
    )
    for text, message in [
        (STORE.format(".v4", "b64", "{%rd1, %rd1, %rd1, %rd1}"), "st.async of four .b64"),
        (STORE.format("", "b16", "%r11"), "is not a type of `st`"),
        (store.replace(".mbarrier::complete_tx::bytes", ""), "needs one of .mbarrier::complete_tx::bytes"),
    ]:
        with pytest.raises(EmulatorError, match=message):
            Emulator(kernel(text))
