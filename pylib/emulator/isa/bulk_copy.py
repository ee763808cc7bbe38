"""Bulk copies from global to shared memory, and st.async: all end at an mbarrier (PTX ISA 9.7.9.25.4, 9.7.9.12)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lowbit.pylib.emulator.isa.mbarrier import barrier_address
from lowbit.pylib.emulator.machine.barrier_object import MBarrier
from lowbit.pylib.emulator.machine.decoder import Op, Pointer, dtype_of
from lowbit.pylib.emulator.machine.faults import Array, Fault, Unsupported, all_of, any_of
from lowbit.pylib.emulator.machine.machine import Block
from lowbit.pylib.emulator.machine.memory import SHARED_WINDOW
from lowbit.pylib.emulator.machine.shared_memory import SharedMemory
from lowbit.pylib.emulator.machine.step_results import Mask, Step
from lowbit.pylib.emulator.machine.transfers import Transfer
from lowbit.pylib.emulator.text.ptx import Instruction

#: Bulk copies consist of such chunks.
CHUNK = 16


def bulk_copy(op: Op) -> Step:
    """cp.async.bulk."""
    if op.flag("prefetch"):
        return _prefetch(op)
    window = target_window(op)
    op.choice("global")
    op.choice("mbarrier::complete_tx::bytes")
    (target, target_space), (source, source_space) = op.address(), op.address()
    if target_space not in (None, "shared") or source_space not in (None, "global"):
        raise Unsupported("cp.async.bulk copies from global to shared memory here")
    size = op.source("u32")
    destinations = Destinations(op, target, barrier_address(op), window)
    block = op.block

    def step(mask: Mask) -> None:
        sizes = np.broadcast_to(size, (block.lanes,))
        for lane in block.lanes_of(mask).tolist():
            one, count = np.array([lane]), int(sizes[lane])
            if count == 0 or count % CHUNK:
                raise Fault(f"a bulk copy of {count} bytes: it takes a multiple of {CHUNK}", lane)
            offset, _ = block.device.locate(one, source(one), count, align=CHUNK)
            block.device.note_read(one, offset[:, None] + np.arange(count))
            data = block.device.data[int(offset[0]) : int(offset[0]) + count].reshape(-1, CHUNK).copy()
            block.device.bytes_loaded += count
            destinations.send(lane, data, lambda start, n=count: start + np.arange(0, n, CHUNK))

    return step


def _prefetch(op: Op) -> Step:
    op.choice("L2")
    op.choice("global")
    hinted = op.flag("L2::cache_hint")
    op.address()
    op.source("u32")
    if hinted:
        op.source("b64")
    return lambda mask: None


def target_window(op: Op) -> int | None:
    """Takes the target's space; where the addresses of the cluster's shared memories begin, or None for the own."""
    return None if op.choice("shared::cluster", "shared::cta") == "shared::cta" else 0


class Destinations:
    """Where the copies of an instruction go: one block of the cluster, or with .multicast those in a mask, to the same
    place in each, and there to the mbarrier at the same place."""

    def __init__(self, op: Op, target: Pointer, barrier: Pointer, window: int | None) -> None:
        self.block, self.instr = op.block, op.instr
        self.target, self.barrier, self.window = target, barrier, window
        multicast, hinted = op.flag("multicast::cluster"), op.flag("L2::cache_hint")
        if multicast and window is None:
            raise Unsupported(".multicast::cluster copies to .shared::cluster memory")
        self.mask = op.source("u16") if multicast else None
        if hinted:
            op.source("b64")

    def send(self, lane: int, data: Array, place: Callable[[int], Array], align: int = CHUNK) -> None:
        """Copy the rows of `data`, each to its `place`, given where the target starts in the block's memory."""
        one = np.array([lane])
        target, barrier = self.target(one), self.barrier(one)
        block, cluster = self.block, self.block.cluster
        if any_of(target % align):
            raise Fault(f"a bulk copy to {int(target[0])}, which is not a multiple of {align}", lane)
        for memory in self._memories(lane, target, barrier):
            start, at = (cluster.offset(int(address[0])) for address in (target, barrier))
            deliver(block, self.instr, memory, at, np.full(len(data), lane), place(start), data)

    def _memories(self, lane: int, target: Array, barrier: Array) -> list[SharedMemory]:
        block, cluster, one = self.block, self.block.cluster, np.array([lane])
        if self.window is None:
            for address in (target, barrier):
                if not all_of(cluster.is_own(address)):
                    raise Fault("a .shared::cta address of a bulk copy that is not in the block's shared memory", lane)
            return [block.shared]
        if self.mask is None:
            return [same_block(block, one, target, barrier)[0][1]]
        bits = int(np.broadcast_to(self.mask, (block.lanes,))[lane])
        if not 0 < bits < 1 << cluster.size:
            raise Fault(f"multicast to blocks {bits:#x} of a cluster of {cluster.size}", lane)
        ranks = [rank for rank in range(cluster.size) if bits >> rank & 1]
        return [cluster.reach(block.rank, rank, one, barrier=True) for rank in ranks]


def same_block(block: Block, lanes: Array, target: Array, barrier: Array) -> list[tuple[Array, SharedMemory, Array]]:
    """The targets by memory, in which the mbarrier has to be too: see ClusterMemory.parts."""
    parts = block.cluster_memory.parts(lanes, target, barrier=True)
    for some, memory, _ in parts:
        for found, other, _ in block.cluster_memory.parts(lanes[some], barrier[some], barrier=True):
            if other is not memory:
                message = f"the mbarrier is in block {other.rank} of the cluster, what it counts in block {memory.rank}"
                raise Fault(message, int(lanes[some[found[0]]]))
    return parts


def deliver(
    block: Block, instr: Instruction, memory: SharedMemory, at: int, lanes: Array, address: Array, data: Array
) -> None:
    """Start a copy of rows to `address` in `memory`, by `lanes` of `block`, which the mbarrier `at` counts."""
    barrier = memory.barriers.find(at, lanes, memory is block.shared)
    if not barrier.fenced:
        what = "no fence.mbarrier_init or fence.proxy.async since its mbarrier.init"
        raise Fault(f"a copy counts at the mbarrier at {at}, and {what}", int(lanes[0]))
    row, time = memory.begin_transfer(block.rank, lanes, address, data.shape[1])

    def finish(barrier: MBarrier) -> None:
        memory.land_transfer(row, data, barrier, time)

    transfer = Transfer(memory, at, finish, block.reporter(instr, int(lanes[0])))
    block.cluster.transfers.queue.append(transfer)


def async_store(op: Op) -> Step:
    """st.async."""
    op.flag("weak")
    kind = op.type(*(f"{kind}{bits}" for kind in "bus" for bits in (32, 64)), "f32", "f64")
    window = 0 if op.flag("shared::cluster") else SHARED_WINDOW
    op.choice("mbarrier::complete_tx::bytes")
    count = int((op.flag("v2", "v4") or "v1")[1])
    if count == 4 and dtype_of(kind).itemsize == 8:
        raise Unsupported(f"st.async of four .{kind}")
    (target, space), items = op.address(), op.vector(count)
    if space not in (None, "shared"):
        raise Unsupported(f"st.async to .{space} memory")
    sources, barrier, block, dtype = (
        [op.source(kind, item) for item in items],
        barrier_address(op),
        op.block,
        dtype_of(kind),
    )

    def step(mask: Mask) -> None:
        lanes = block.lanes_of(mask)
        columns = np.empty((len(lanes), count), dtype)
        for i, source in enumerate(sources):
            columns[:, i] = source[lanes] if source.ndim else source
        rows, ends = columns.view(np.uint8), barrier(lanes) - window
        for some, memory, address in same_block(block, lanes, target(lanes) - window, ends):
            for end in np.unique(ends[some]).tolist():
                here = ends[some] == end
                at = block.cluster.offset(end)
                deliver(block, op.instr, memory, at, lanes[some[here]], address[here], rows[some[here]])

    return step
