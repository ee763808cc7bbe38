"""Atomics and reductions of the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_kernel import Array, kernel, run
from emulator_shared_memory import RNG, SMEM, TID16

from lowbit.dialect.errors import EmulatorError
from lowbit.pylib.emulator import Emulator


def atomic(
    instruction: str, memory: Array, value: Array, old: Array | None = None, compare: Array | None = None
) -> None:
    """Thread i applies `instruction` with value[i] to memory[i % len(memory)]."""
    size, bits = memory.dtype.itemsize, 8 * memory.dtype.itemsize
    reg = {16: "rs", 32: "r", 64: "rd"}[bits]
    args = [memory, value] + ([] if old is None else [old]) + ([] if compare is None else [compare])
    body = f"""mov.u32 %r0, %tid.x; rem.u32 %r1, %r0, {len(memory)}; ld.param.u64 %rd0, [p0];
    mad.wide.u32 %rd0, %r1, {size}, %rd0; ld.param.u64 %rd1, [p1]; mad.wide.u32 %rd1, %r0, {size}, %rd1;
    ld.global.b{bits} %{reg}20, [%rd1];"""
    if compare is not None:
        body += f"ld.param.u64 %rd3, [p3]; mad.wide.u32 %rd3, %r0, {size}, %rd3;"
        body += f"ld.global.b{bits} %{reg}22, [%rd3];"
    body += instruction.replace("$d", f"%{reg}21").replace("$b", f"%{reg}20").replace("$c", f"%{reg}22") + ";"
    if old is not None:
        body += f"ld.param.u64 %rd2, [p2]; mad.wide.u32 %rd2, %r0, {size}, %rd2;"
        body += f"st.global.b{bits} [%rd2], %{reg}21;"
    run(body, args, block=len(value))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64"])
def test_integer_atomics(kind: str) -> None:
    dtype = f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}"
    value = RNG.integers(0, 1000, 64).astype(dtype) - (500 if kind[0] == "s" else 0)
    for name, function in (("add", np.add), ("min", np.minimum), ("max", np.maximum)):
        memory = RNG.integers(0, 1000, 5).astype(dtype)
        expected = [function.reduce(np.append(value[i::5], memory[i])) for i in range(5)]
        atomic(f"red.relaxed.gpu.global.{name}.{kind} [%rd0], $b", memory, value)
        np.testing.assert_array_equal(memory, expected)


def test_atomic_results_are_a_history() -> None:
    """The old values of additions to one counter are all different, and add up."""
    memory, old = np.array([10], np.uint32), np.zeros(64, np.uint32)
    atomic("atom.global.add.u32 $d, [%rd0], $b", memory, np.ones(64, np.uint32), old)
    assert memory[0] == 74
    np.testing.assert_array_equal(np.sort(old), np.arange(10, 74))


def test_exch_cas_inc_dec_and_or() -> None:
    memory, old = np.array([1, 2], np.uint32), np.zeros(2, np.uint32)
    atomic("atom.global.exch.b32 $d, [%rd0], $b", memory, np.array([7, 8], np.uint32), old)
    np.testing.assert_array_equal(memory, [7, 8])
    np.testing.assert_array_equal(old, [1, 2])
    atomic(
        "atom.acq_rel.gpu.global.cas.b32 $d, [%rd0], $c, $b",
        memory,
        np.array([9, 9], np.uint32),
        old,
        np.array([7, 0], np.uint32),
    )
    np.testing.assert_array_equal(memory, [9, 8])
    np.testing.assert_array_equal(old, [7, 8])
    counter = np.array([0], np.uint32)
    atomic("red.global.inc.u32 [%rd0], $b", counter, np.full(7, 4, np.uint32))  # 0 1 2 3 4 0 1 2
    assert counter[0] == 2
    atomic("red.global.dec.u32 [%rd0], $b", counter, np.full(4, 4, np.uint32))  # 2 1 0 4 3
    assert counter[0] == 3
    bits = np.array([0b1100], np.uint32)
    atomic("red.global.or.b32 [%rd0], $b", bits, np.array([1, 2], np.uint32))
    assert bits[0] == 0b1111
    atomic("red.global.and.b32 [%rd0], $b", bits, np.array([7, 13], np.uint32))
    assert bits[0] == 0b0101


def test_float_atomics() -> None:
    value = RNG.standard_normal(64).astype(np.float32)
    memory = np.zeros(3, np.float32)
    atomic("red.global.add.f32 [%rd0], $b", memory, value)
    expected = np.zeros(3, np.float32)
    for i, v in enumerate(value):
        expected[i % 3] += v
    np.testing.assert_array_equal(memory, expected)
    halves, pair = RNG.standard_normal(32).astype(np.float16), np.zeros(2, np.float16)
    atomic("red.global.add.noftz.f16x2 [%rd0], $b", pair.view(np.uint32), halves.view(np.uint32))
    expected_pair = np.zeros(2, np.float16)
    for row in halves.reshape(-1, 2):
        expected_pair = expected_pair + row
    np.testing.assert_array_equal(pair, expected_pair)
    tiny = np.array([2.0**-140], np.float32)
    atomic("red.global.add.f32 [%rd0], $b", tiny, np.zeros(1, np.float32))
    assert tiny[0] == 0  # additions to f32 in global memory flush subnormals


def test_vector_reduction() -> None:
    value, memory = RNG.standard_normal(128).astype(np.float32), np.ones(128, np.float32)
    expected = memory + value
    run(
        f"""{TID16} ld.param.u64 %rd1, [p1]; mad.wide.u32 %rd1, %r0, 16, %rd1;
    ld.global.v4.f32 {{%f1,%f2,%f3,%f4}}, [%rd0]; red.global.add.v4.f32 [%rd1], {{%f1,%f2,%f3,%f4}};""",
        [value, memory],
    )
    np.testing.assert_array_equal(memory, expected)
    packed = np.zeros(128, np.uint32)
    run(
        f"""{TID16} mov.u32 %r1, 0x3C004000; red.global.v4.f16x2.add.noftz [%rd0], {{%r1, %r1, %r1, %r1}};""",
        [packed],
    )
    np.testing.assert_array_equal(packed, 0x3C004000)


def test_shared_atomics() -> None:
    out = np.zeros(1, np.uint32)
    run(
        f"""{SMEM} mov.u32 %r0, %tid.x; mov.u32 %r1, smem; setp.eq.u32 %p1, %r0, 0;
    @%p1 st.shared.b32 [%r1], 0;
    bar.sync 0; atom.shared.add.u32 %r2, [%r1], %r0; bar.sync 0; ld.shared.b32 %r3, [%r1];
    ld.param.u64 %rd0, [p0];
    @%p1 st.global.b32 [%rd0], %r3;""",
        [out],
        block=64,
        racecheck=True,
    )
    assert out[0] == 64 * 63 // 2


@pytest.mark.parametrize(
    "text",
    [
        "red.global.add.f16x2 [%rd0], %r1",
        "atom.global.max.f32 %f1, [%rd0], %f2",
        "red.global.add.b32 [%rd0], %r1",
        "atom.global.xor.u32 %r2, [%rd0], %r1",
        "red.global.add.v4.u32 [%rd0], {%r1,%r1,%r1,%r1}",
    ],
)
def test_atomics_that_do_not_exist(text: str) -> None:
    with pytest.raises(EmulatorError, match=r"PTX line"):
        Emulator(kernel(f"ld.param.u64 %rd0, [p0]; mov.u32 %r1, 1; {text};", ["u64"]))
