"""Warp-level instructions: shuffles, votes, reductions, bar.warp.sync (PTX ISA 9.7.9.6, 9.7.13).

They need all lanes that their member mask names, exited ones excepted. Lanes that come early wait
(`Converge`) until the others come to the same instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.pylib.emulator.machine.decoder import Op, instruction
from lowbit.pylib.emulator.machine.faults import Array, Fault, Unsupported, all_of, any_of
from lowbit.pylib.emulator.machine.machine import Block
from lowbit.pylib.emulator.machine.step_results import WARP, Converge, Mask, Outcome, Step

_BITS = np.uint64(1) << np.arange(WARP, dtype=np.uint64)


def ballot(lanes: Array) -> Array:
    """One bool per lane of the block to one uint32 per warp."""
    return (lanes.reshape(-1, WARP) * _BITS).sum(axis=1, dtype=np.uint64).astype(np.uint32)


def spread(words: Array) -> Array:
    """One uint32 per warp to one bool per lane of the block: bit l of the word for lane l."""
    return (words[:, None].astype(np.uint64) & _BITS != 0).reshape(-1)


def together(block: Block, mask: Mask, members: Array | None, width: int = WARP) -> tuple[Mask, Array | None]:
    """The threads whose warp is complete, and those that have to wait; no `members`: whole warps, or groups of
    `width` threads."""
    whole = block.lanes % width == 0
    if mask is None and whole and (members is None or (members.ndim == 0 and int(members) == 2**WARP - 1)):
        return None, None
    active = np.ones(block.lanes, np.bool_) if mask is None else mask
    if members is None:
        rest = -block.lanes % width
        come = np.pad(active, (0, rest)).reshape(-1, width)
        absent = np.pad(block.exited, (0, rest), constant_values=True).reshape(-1, width)
        incomplete = np.repeat(come.any(axis=1) & absent.any(axis=1), width)[: block.lanes]
        if any_of(incomplete):
            lane = int(np.flatnonzero(active & incomplete)[0])
            group = "warp" if width == WARP else "warpgroup"
            raise Fault(f"an .aligned instruction in a {group} of which some threads have exited", lane)
        ready = np.repeat(come.all(axis=1), width)[: block.lanes] & active
    else:
        members = np.broadcast_to(members, (block.lanes,))
        wanted = members.reshape(-1, WARP)
        bits = np.tile(_BITS.astype(np.uint32), block.warps)
        outside = active & (members & bits == 0)
        if any_of(outside):
            raise Fault("a thread that its own member mask does not name", int(np.flatnonzero(outside)[0]))
        first = active.reshape(-1, WARP).argmax(axis=1)
        common = wanted[np.arange(block.warps), first]
        differs = active & (members != np.repeat(common, WARP))
        if any_of(differs):
            raise Fault("member masks that differ within a warp", int(np.flatnonzero(differs)[0]))
        missing = common & ~ballot(active) & ~ballot(block.exited)
        ready = active & np.repeat(missing == 0, WARP)
    if all_of(ready):
        return None, None
    waiting = active & ~ready
    return ready, waiting if any_of(waiting) else None


def collective(op: Op, members: Array | None, step: Callable[[Array], None], width: int = WARP) -> Step:
    """A step that runs `step(active)` for the complete warps, or groups of `width` threads, and makes the other
    threads wait."""
    block = op.block
    everyone = np.ones(block.lanes, np.bool_)

    def run(mask: Mask) -> Outcome | None:
        ready, waiting = together(block, mask, members, width)
        if ready is None:
            step(everyone)
        elif any_of(ready):
            step(ready)
        return None if waiting is None else Converge(waiting)

    return run


def mask_of(active: Array) -> Mask:
    return None if all_of(active) else active


def warp_barrier(op: Op) -> Step:
    op.choice("sync")
    members = op.source("u32")

    def order(active: Array) -> None:
        block = op.block
        for warp in np.flatnonzero(active.reshape(-1, WARP).any(axis=1)).tolist():
            some = np.zeros(block.lanes, np.bool_)
            some[warp * WARP : (warp + 1) * WARP] = active[warp * WARP : (warp + 1) * WARP]
            block.shared.publish(some)
            block.shared.acquire(some, block.shared.release(some, None))

    return collective(op, members, order)


@instruction("shfl")
def _shfl(op: Op) -> Step:
    """Follows the pseudocode of PTX ISA 9.7.9.6; reading a lane that does not take part is an error."""
    op.choice("sync")
    mode = op.choice("up", "down", "bfly", "idx")
    op.type("b32")
    first, second = op.pair()
    dest = op.dest("b32", first)
    predicate = None if second is None else op.dest("pred", second)
    a, b, c, members = op.source("b32"), op.source("b32"), op.source("b32"), op.source("u32")
    block = op.block
    lane = block.everyone % WARP
    base = block.everyone - lane

    def sources() -> tuple[Array, Array]:
        offset, clamp, segment = (x.astype(np.int64) & 31 for x in (b, c, c >> 8))
        top = (lane & segment) | (clamp & ~segment)
        match mode:
            case "up":
                source = lane - offset
            case "down":
                source = lane + offset
            case "bfly":
                source = lane ^ offset
            case _:
                source = (lane & segment) | (offset & ~segment)
        valid = source >= top if mode == "up" else source <= top
        return base + np.where(valid, source, lane), valid

    fixed = sources() if b.ndim == c.ndim == 0 else None

    def shuffle(active: Array) -> None:
        source, valid = fixed or sources()
        absent = active & ~active[source]
        if any_of(absent):
            bad = int(np.flatnonzero(absent)[0])
            raise Fault(f"shfl reads lane {source[bad] % WARP}, which does not take part", bad)
        mask = mask_of(active)
        dest.write(a[source] if a.ndim else a, mask)
        if predicate is not None:
            predicate.write(valid, mask)

    return collective(op, members, shuffle)


@instruction("vote")
def _vote(op: Op) -> Step:
    op.choice("sync")
    mode = op.choice("all", "any", "uni", "ballot")
    kind = op.type("b32" if mode == "ballot" else "pred")
    dest, p, members = op.dest(kind), op.predicate(), op.source("u32")

    def vote(active: Array) -> None:
        yes, no = ballot(p() & active), ballot(~p() & active)
        result = {"ballot": yes, "all": no == 0, "any": yes != 0, "uni": (yes == 0) | (no == 0)}[mode]
        dest.write(np.repeat(result, WARP), mask_of(active))

    return collective(op, members, vote)


@instruction("activemask")
def _activemask(op: Op) -> Step:
    op.type("b32")
    dest, block = op.dest("b32"), op.block

    def step(mask: Mask) -> None:
        active = np.ones(block.lanes, np.bool_) if mask is None else mask
        dest.write(np.repeat(ballot(active), WARP), mask)

    return step


@instruction("match")
def _match(op: Op) -> Step:
    """any: the lanes that hold the same value; all: the members if all hold one value, else 0."""
    mode = op.choice("any", "all")
    op.choice("sync")
    kind = op.type("b32", "b64")
    first, second = op.pair()
    dest = op.dest("b32", first)
    predicate = None if second is None else op.dest("pred", second)
    if predicate and mode == "any":
        raise Unsupported("match.any has no predicate result")
    a, members = op.source(kind), op.source("u32")

    def match(active: Array) -> None:
        value = np.broadcast_to(a, active.shape).reshape(-1, WARP)
        some = active.reshape(-1, WARP)
        equal = (value[:, :, None] == value[:, None, :]) & some[:, None, :]
        words = (equal * _BITS).sum(axis=2, dtype=np.uint64).astype(np.uint32)
        if mode == "all":
            everyone = np.repeat(ballot(active), WARP).reshape(-1, WARP)
            words = np.where(words == everyone, everyone, np.uint32(0))
            if predicate is not None:
                predicate.write((words != 0).ravel(), mask_of(active))
        dest.write(words.ravel(), mask_of(active))

    return collective(op, members, match)


_REDUCE: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction("redux")
def _redux(op: Op) -> Step:
    op.choice("sync")
    name = op.choice(*_REDUCE)
    kind = op.type(*(("u32", "s32") if name in ("add", "min", "max") else ("b32",)))
    dest, a, members = op.dest(kind), op.source(kind), op.source("u32")

    def reduce(active: Array) -> None:
        value = np.broadcast_to(a, active.shape)
        for warp in np.flatnonzero(active.reshape(-1, WARP).any(axis=1)).tolist():
            lanes = slice(warp * WARP, (warp + 1) * WARP)
            some = active[lanes]
            dest.view[lanes][some] = _REDUCE[name].reduce(value[lanes][some], dtype=value.dtype)
        if dest.register is not None:
            dest.register.define(mask_of(active))

    return collective(op, members, reduce)


@instruction("elect")
def _elect(op: Op) -> Step:
    """The lowest lane of the members is elected."""
    op.choice("sync")
    first, second = op.pair()
    if second is None:
        raise Unsupported("elect.sync needs d|p")
    dest, predicate = op.dest("b32", first), op.dest("pred", second)
    members = op.source("u32")

    def elect(active: Array) -> None:
        leader = np.repeat(active.reshape(-1, WARP).argmax(axis=1), WARP)
        lane = np.tile(np.arange(WARP), op.block.warps)
        dest.write(leader.astype(np.uint32), mask_of(active))
        predicate.write(leader == lane, mask_of(active))

    return collective(op, members, elect)
