"""Warp-level instructions of the emulator against the definitions in the PTX ISA."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_kernel import apply, run

from lowbit.dialect.errors import EmulatorError

RNG = np.random.default_rng(5)


def shuffle(mode: str, value: np.ndarray, b: int, c: int) -> tuple[np.ndarray, np.ndarray]:
    """The pseudocode of PTX ISA 9.7.9.6, one lane after the other."""
    result, valid = np.zeros_like(value), np.zeros(len(value), bool)
    for thread in range(len(value)):
        lane, warp = thread % 32, thread // 32 * 32
        bval, cval, segmask = b & 31, c & 31, c >> 8 & 31
        max_lane = (lane & segmask) | (cval & ~segmask)
        min_lane = lane & segmask
        match mode:
            case "up":
                j, p = lane - bval, lane - bval >= max_lane
            case "down":
                j, p = lane + bval, lane + bval <= max_lane
            case "bfly":
                j, p = lane ^ bval, lane ^ bval <= max_lane
            case _:
                j = min_lane | (bval & ~segmask)
                p = j <= max_lane
        result[thread], valid[thread] = value[warp + (j if p else lane)], p
    return result, valid


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("b", [0, 1, 2, 7, 16, 31, 33])
@pytest.mark.parametrize("clamp", [0, 31])
@pytest.mark.parametrize("width", [32, 8])
def test_shfl(mode: str, b: int, clamp: int, width: int) -> None:
    value = RNG.integers(0, 2**32, 64, dtype=np.uint32)
    c = (32 - width) << 8 | (clamp if mode != "up" else 0)
    got = apply(f"shfl.sync.{mode}.b32 %x|%y, %a, {b}, {c}, 0xffffffff;", value, out=(np.uint32, bool))
    expected = shuffle(mode, value, b, c)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])


def test_shfl_per_lane_index_and_subset() -> None:
    value, index = RNG.integers(0, 2**32, 32, dtype=np.uint32), RNG.permutation(32).astype(np.uint32)
    np.testing.assert_array_equal(
        apply("shfl.sync.idx.b32 %x, %a, %b, 31, -1;", value, index, out=np.uint32), value[index]
    )
    subset = """mov.u32 %r9, %laneid; mov.u32 %x, 0; setp.lt.u32 %p1, %r9, 16;
    @%p1 shfl.sync.bfly.b32 %x, %a, {}, 31, 0xffff;"""
    got = apply(subset.format(8), value, out=np.uint32)
    np.testing.assert_array_equal(got[:16], value[np.arange(16) ^ 8])
    assert not got[16:].any()
    with pytest.raises(EmulatorError, match="shfl reads lane 16, which does not take part"):
        apply(subset.format(16), value, out=np.uint32)


def test_early_lanes_wait_for_the_others() -> None:
    """Lanes that reach the shuffle on different ways, at the same instruction, exchange all the same."""
    value = np.arange(32, dtype=np.uint32)
    got = apply(
        """mov.u32 %r9, %laneid; and.b32 %r8, %r9, 1; setp.eq.u32 %p1, %r8, 0; mov.u32 %r7, %a; @%p1 bra BACK;
        SHUFFLE: shfl.sync.bfly.b32 %x, %r7, 1, 31, -1; bra END;
        BACK: add.u32 %r7, %r7, 100; bra SHUFFLE;
        END:""",
        value,
        out=np.uint32,
    )
    mine = value + np.where(value % 2 == 0, 100, 0)
    np.testing.assert_array_equal(got, mine[value ^ 1])


def test_missing_lanes_are_a_deadlock() -> None:
    body = """mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 16; @%p1 bra A; bar.sync 0; bra B;
    A: shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1; bar.sync 0; B:"""
    with pytest.raises(
        EmulatorError,
        match=r"shfl.*deadlock: the other threads of the warp never come here \(16 threads wait",
    ):
        run(body)
    with pytest.raises(EmulatorError, match="its own member mask does not name"):
        run("mov.u32 %r0, %tid.x; shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xffff;")
    with pytest.raises(EmulatorError, match="masks that differ"):
        run(
            "mov.u32 %r0, %tid.x; mov.u32 %r2, 0xfffffffe; mov.u32 %r3, -1; setp.gt.u32 %p1, %r0, 3;"
            "selp.b32 %r2, %r2, %r3, %p1; shfl.sync.bfly.b32 %r1, %r0, 1, 31, %r2;"
        )


def test_exited_lanes_are_not_waited_for() -> None:
    out = np.zeros(32, np.uint32)
    run(
        """mov.u32 %r0, %tid.x; setp.ge.u32 %p1, %r0, 16; @%p1 exit; shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;
    ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd0, %r0, 4, %rd0; st.global.b32 [%rd0], %r1;""",
        [out],
    )
    np.testing.assert_array_equal(out[:16], np.arange(16) ^ 1)


def bits(flags: np.ndarray) -> np.ndarray:
    """One word per warp, repeated for its lanes."""
    words = (flags.reshape(-1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1)
    return np.repeat(words, 32)


def test_vote_and_activemask() -> None:
    p = np.concatenate([np.ones(32), np.zeros(32), RNG.integers(0, 2, 32)]).astype(bool)
    ballot, negated = apply("vote.sync.ballot.b32 %x, %a, -1; vote.sync.ballot.b32 %y, !%a, -1;", p, out=("u4", "u4"))
    np.testing.assert_array_equal(ballot, bits(p))
    np.testing.assert_array_equal(negated, bits(~p))
    every, some, same = apply(
        "vote.sync.all.pred %x, %a, -1; vote.sync.any.pred %y, %a, -1; vote.sync.uni.pred %z, %a, -1;",
        p,
        out=(bool,) * 3,
    )
    warps = p.reshape(-1, 32)
    np.testing.assert_array_equal(every, np.repeat(warps.all(axis=1), 32))
    np.testing.assert_array_equal(some, np.repeat(warps.any(axis=1), 32))
    np.testing.assert_array_equal(same, np.repeat(warps.all(axis=1) | ~warps.any(axis=1), 32))
    active = apply("mov.u32 %x, 0; @%a activemask.b32 %x;", p, out=np.uint32)
    np.testing.assert_array_equal(active, np.where(p, bits(p), 0))


def test_match() -> None:
    value = np.concatenate([RNG.integers(0, 4, 32), np.full(32, 9)]).astype(np.uint32)
    some, every, flag = apply(
        "match.any.sync.b32 %x, %a, -1; match.all.sync.b32 %y|%z, %a, -1;", value, out=("u4", "u4", bool)
    )
    warps = value.reshape(-1, 32)
    equal = warps[:, :, None] == warps[:, None, :]
    np.testing.assert_array_equal(some, (equal << np.arange(32)).sum(axis=2).ravel())
    np.testing.assert_array_equal(every, np.repeat([0, 2**32 - 1], 32))
    np.testing.assert_array_equal(flag, np.repeat([False, True], 32))


@pytest.mark.parametrize(
    ("name", "kind", "function"),
    [
        ("add", "u32", np.add),
        ("add", "s32", np.add),
        ("min", "u32", np.minimum),
        ("min", "s32", np.minimum),
        ("max", "u32", np.maximum),
        ("max", "s32", np.maximum),
        ("and", "b32", np.bitwise_and),
        ("or", "b32", np.bitwise_or),
        ("xor", "b32", np.bitwise_xor),
    ],
)
def test_redux(name: str, kind: str, function: np.ufunc) -> None:
    value = RNG.integers(0, 2**32, 64, dtype=np.uint32)
    typed = value.view(np.int32) if kind == "s32" else value
    got = apply(f"redux.sync.{name}.{kind} %x, %a, -1;", value, out=typed.dtype)
    np.testing.assert_array_equal(got, np.repeat(function.reduce(typed.reshape(-1, 32), axis=1, dtype=typed.dtype), 32))


def test_elect() -> None:
    lane, leader = apply("elect.sync %x|%y, -1;", np.zeros(64, np.uint32), out=("u4", bool))
    np.testing.assert_array_equal(np.flatnonzero(leader), [0, 32])
    assert not lane.any()
