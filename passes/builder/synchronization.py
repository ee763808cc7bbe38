"""Barriers, signals and other waiting between threads and blocks."""

from __future__ import annotations

from lowbit.dialect import ops
from lowbit.dialect.types import Shared
from lowbit.passes.builder.scope import Operations
from lowbit.passes.builder.values import Index, Memory, Scalar, as_i32, i64, text


class Synchronization(Operations):
    """Operations that order threads: they wait for copies, for each other, and for mbarriers (`signals`)."""

    def commit(self) -> None:
        """Makes one group of the copies that were started by `copy_async` since the last `commit`."""
        ops.CommitOp()

    def wait(self, pending: int = 0) -> None:
        """Waits until at most the last `pending` groups of this thread's copies are under way."""
        ops.WaitOp(i64(pending))

    def barrier(self, scope: str = "block", warps: int = 1, async_proxy: bool = False, relaxed: bool = False) -> None:
        """Waits until all threads of the scope have arrived.

        scope        "block", "cluster" (or half of its barrier: "cluster_arrive", "cluster_wait"), or "warps": every
                     `warps` warps side by side
        async_proxy  also makes writes visible to `warpgroup_mma`, which reads shared memory by itself
        relaxed      with "cluster_arrive": orders signals alone
        """
        op = ops.BarrierOp(text(scope), warps=i64(warps))
        op.async_proxy, op.relaxed = async_proxy, relaxed

    def signals(self, number: int, arrivals: int, groups: int = 1) -> Memory:
        """mbarriers whose phases take so many arrivals each; for every group of warps side by side its own."""
        type_ = Shared("i32", (groups, number, 2), (2 * number, 2, 1))
        op = ops.AllocSignalsOp(type_.type)
        op.arrivals = i64(arrivals)
        return Memory(op.result, type_)

    def expect(self, signals: Memory, index: Index, size: int, each_warp: bool = False) -> None:
        """This thread, or one of each warp, arrives, and so many bytes of `copy_box` or `send` have to."""
        op = ops.ArriveOp(signals.value, as_i32(index))
        op.expected, op.each_warp = i64(size), each_warp

    def arrive(self, signals: Memory, index: Index, blocks: int = 1) -> None:
        """Every warp arrives once, at this signal of each of so many blocks of the cluster."""
        op = ops.ArriveOp(signals.value, as_i32(index))
        op.each_warp = True
        op.blocks = i64(blocks) if blocks > 1 else None

    def await_signal(self, signals: Memory, index: Index, parity: Index) -> None:
        """Waits for the end of a phase of this parity; before the first, that of parity 1 counts as over."""
        ops.AwaitOp(signals.value, as_i32(index), as_i32(parity))

    def last_arrival(self, counters: Memory, index: Index, count: Index) -> Scalar:
        """Tells whether this block is the last of `count` that come here with the same counter: it then sees what the
        others wrote to device memory.

        counters: i32 in device memory, zero before the launch, and again after it. All threads must come here.
        """
        return Scalar(ops.LastArrivalOp(counters.value, as_i32(index), as_i32(count)).result)

    def others_arrived(self, counters: Memory, index: Index, count: Index) -> Scalar:
        """Tells whether `count` blocks have come to `last_arrival` with the same counter, so that this one, the last,
        need not: it then sees what they wrote to device memory, and the counter is zero again. True if count is 0, and
        false if it is less. All threads must come here.
        """
        return Scalar(ops.OthersArrivedOp(counters.value, as_i32(index), as_i32(count)).result)
