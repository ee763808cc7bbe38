"""The mbarrier instructions (PTX ISA 9.7.13.15).

try_wait and test_wait of a phase that has not ended give false once, as the hardware may at any time, so that a wait
without a loop is found out. A thread that comes again for the same phase waits until the phase has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from lowbit.pylib.emulator.machine.barrier_object import MAX_COUNT, MBarrier
from lowbit.pylib.emulator.machine.decoder import Op, Pointer, instruction
from lowbit.pylib.emulator.machine.faults import Array, Fault, Unsupported, all_of, any_of, distinct, require
from lowbit.pylib.emulator.machine.machine import Block
from lowbit.pylib.emulator.machine.memory import SHARED_WINDOW
from lowbit.pylib.emulator.machine.shared_memory import SharedMemory
from lowbit.pylib.emulator.machine.step_results import Converge, Mask, Step
from lowbit.pylib.emulator.machine.transfers import Transfer
from lowbit.pylib.emulator.text.ptx import Sink

#: Some of the lanes (as positions), the memory of the mbarrier that they name, and its address there.
Groups = list[tuple[Array, SharedMemory, int]]


@instruction("mbarrier")
def _mbarrier(op: Op) -> Step:
    name = op.choice("init", "inval", "arrive", "expect_tx", "test_wait", "try_wait")
    if name == "arrive":
        return _arrive(op)
    if name == "expect_tx":
        return _expect(op)
    if name in ("init", "inval"):
        return _init(op, name == "init")
    return _wait(op, name == "try_wait")


def barriers_at(op: Op, address: Pointer, local: bool = False) -> Callable[[Array], Groups]:
    """The mbarriers that lanes name; `local`: by one's own addresses only. Takes the space from the modifiers."""
    block, space = op.block, op.flag("shared::cluster", "shared::cta", "shared")
    if local and space == "shared::cluster":
        raise Unsupported(f"`{op.instr.name}` of .shared::cluster memory: only mbarriers of the own block")
    window = 0 if space else SHARED_WINDOW

    def groups(lanes: Array) -> Groups:
        at = address(lanes) - window
        if local or space in ("shared", "shared::cta"):
            parts = [(np.arange(len(lanes)), block.shared, at)]
        else:
            parts = block.cluster_memory.parts(lanes, at, barrier=True)
        return [(some[where == one], memory, one) for some, memory, where in parts for one in distinct(where)]

    return groups


def barrier_address(op: Op) -> Pointer:
    pointer, space = op.address()
    if space not in (None, "shared"):
        raise Unsupported(f"an mbarrier in .{space} memory")
    return pointer


def _init(op: Op, init: bool) -> Step:
    op.type("b64")
    groups = barriers_at(op, barrier_address(op), local=True)
    count, block = op.source("u32") if init else np.array(0), op.block

    def step(mask: Mask) -> None:
        lanes = block.lanes_of(mask)
        counts = block.values_of(count, lanes)
        for some, memory, address in groups(lanes):
            lane = int(lanes[some[0]])
            if len(some) > 1:
                raise Fault(f"{len(some)} threads, which nothing orders, do this to the mbarrier at {address}", lane)
            if init:
                memory.init_barrier(lane, address, int(counts[some[0]]))
            else:
                memory.end_barrier(lane, address)

    return step


def _order(op: Op, order: str) -> bool:
    """Tells whether the instruction orders memory, which it does unless it is relaxed."""
    given, scope = op.flag(order, "relaxed"), op.flag("cta", "cluster")
    if given and scope is None:
        raise Unsupported(f".{given} needs a scope: .cta or .cluster")
    return given != "relaxed"


def _arrive(op: Op) -> Step:
    op.type("b64")
    ordered, expects = _order(op, "release"), bool(op.flag("expect_tx"))
    if "shared::cluster" in op.modifiers and not isinstance(op.operands[0], Sink):
        raise Unsupported("an arrival at a .shared::cluster mbarrier gives no state: write `_`")
    state = op.dest("b64")
    groups, block = barriers_at(op, barrier_address(op)), op.block
    count, expected = np.array(1, np.uint32), np.array(0, np.uint32)
    if expects:
        expected = op.source("u32")
    elif op.operands:
        count = op.source("u32")

    def step(mask: Mask) -> None:
        lanes = block.lanes_of(mask)
        counts, many = (block.values_of(x, lanes).astype(np.int64) for x in (count, expected))
        require((counts >= 1) & (counts <= MAX_COUNT), lanes, f"an arrival counts 1 to {MAX_COUNT}, not {counts.max()}")
        states = np.zeros(len(lanes), np.uint64)
        for some, memory, address in groups(lanes):
            barrier = memory.barriers.find(address, lanes[some], memory is block.shared)
            while len(some):
                # As many as end the phase.
                now = max(1, int(np.searchsorted(np.cumsum(counts[some]), barrier.pending, "right")))
                here, some = some[:now], some[now:]
                states[here] = barrier.serial
                with _at(int(lanes[here[0]])):
                    arrive(block, memory, barrier, lanes[here], ordered)
                    barrier.expect(int(many[here].sum()))
                    barrier.arrive(int(counts[here].sum()))
        state.scatter(states, lanes, mask)

    return step


def arrive(block: Block, memory: SharedMemory, barrier: MBarrier, lanes: Array, ordered: bool) -> None:
    """Tells those who wait what `lanes` of `block` know when they arrive."""
    if memory is not block.shared:
        barrier.remote = barrier.phase + 1
        barrier.stamp = block.cluster.stamp(block.rank, lanes)
    if ordered:
        members = block.members(lanes)
        barrier.tell(block.shared.release(members, None))
        block.shared.publish(members, initialised=False)


@contextmanager
def _at(lane: int) -> Iterator[None]:
    """Faults inside are of this thread."""
    try:
        yield
    except Fault as fault:
        raise Fault(fault.message, lane) from None


def _expect(op: Op) -> Step:
    op.type("b64")
    op.choice("relaxed")
    op.choice("cta", "cluster")
    groups, expected, block = barriers_at(op, barrier_address(op)), op.source("u32"), op.block

    def step(mask: Mask) -> None:
        lanes = block.lanes_of(mask)
        many = block.values_of(expected, lanes).astype(np.int64)
        for some, memory, address in groups(lanes):
            with _at(int(lanes[some[0]])):
                memory.barriers.find(address, lanes[some], memory is block.shared).expect(int(many[some].sum()))

    return step


def _wait(op: Op, hinted: bool) -> Step:
    """Blocks a thread that comes again for a phase: see the module's docstring."""
    op.type("b64")
    parity, ordered = bool(op.flag("parity")), _order(op, "acquire")
    dest = op.dest("pred")
    address = barrier_address(op)
    groups, phase, block = barriers_at(op, address, local=True), op.source("u32" if parity else "b64"), op.block
    if hinted and op.operands:
        op.source("u32")  # how long to wait at most
    failed = np.zeros(block.lanes, np.int64)  # the phase that each lane has found not ended here
    blocked = np.zeros(block.lanes, np.bool_)  # whether it waits for it

    def awaits(lane: int) -> str:
        (_, memory, at), *_ = groups(np.array([lane]))
        barrier = memory.barriers.at[at]
        return f"nobody ends the phase of {_name(block, barrier.address)}: {barrier.state()}"

    def step(mask: Mask) -> Converge | None:
        lanes = block.lanes_of(mask)
        wanted = block.values_of(phase, lanes)
        ended = np.zeros(len(lanes), np.bool_)
        for some, memory, at in groups(lanes):
            barrier, who = memory.barriers.find(at, lanes[some]), lanes[some]
            ended[some] = _ended(barrier, wanted[some], parity, who)
            missed = blocked[who] & ~ended[some] & (failed[who] != barrier.serial)
            require(~missed, who, f"the phase that the thread waits for ended, and the next one too: {barrier.state()}")
            blocked[who] = ~ended[some] & (failed[who] == barrier.serial)
            failed[who] = barrier.serial
            if any_of(ended[some]):
                memory.observe(barrier, who[ended[some]], ordered)
        go = ~blocked[lanes]
        dest.scatter(ended[go], lanes[go], block.members(lanes[go]))
        return None if all_of(go) else Converge(block.members(lanes[~go]), awaits)

    return step


def _ended(barrier: MBarrier, wanted: Array, parity: bool, lanes: Array) -> Array:
    """Tells whether the phases `wanted` have ended. They are named by parity, or by the state that an arrival
    returned."""
    if parity:
        require(wanted <= 1, lanes, f"a phase's parity is 0 or 1, not {wanted.max()}")
        # Of a parity are the current phase and the one before the one before; meant is one of the last two.
        return wanted != barrier.phase & 1
    behind = barrier.serial - wanted.astype(np.int64)
    require((behind == 0) | (behind == 1), lanes, "a state that no arrival in this or the last phase has given")
    return behind == 1


def _name(block: Block, address: int) -> str:
    """`variable` + offset."""
    starts = [(start, name) for name, (space, start) in block.symbols.items() if space == "shared" and start <= address]
    start, name = max(starts)
    return f"`{name}`" + (f"+{address - start}" if address > start else "")


def arrive_after_copies(op: Op) -> Step:
    """cp.async.mbarrier.arrive: an arrival when the thread's cp.async so far have ended; without .noinc it counts as
    one more that the phase waits for."""
    op.choice("arrive")
    noinc = bool(op.flag("noinc"))
    op.type("b64")
    groups, block = barriers_at(op, barrier_address(op), local=True), op.block

    def finish(lanes: Array, before: int, known: Array | None, barrier: MBarrier) -> None:
        block.copies.arrive(lanes, before, barrier)
        barrier.tell(known)
        barrier.arrive(len(lanes))

    def step(mask: Mask) -> None:
        lanes = block.lanes_of(mask)
        for some, memory, address in groups(lanes):
            barrier, who = memory.barriers.find(address, lanes[some]), lanes[some]
            if not noinc:
                barrier.pending += len(who)
            block.copies.track(who)
            known = block.shared.release(block.members(who), None)
            finished = partial(finish, who, block.copies.issued, known)
            transfer = Transfer(memory, address, finished, block.reporter(op.instr, int(who[0])))
            block.cluster.transfers.queue.append(transfer)

    return step
