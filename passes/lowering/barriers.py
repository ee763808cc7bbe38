"""Rules of `lower-tiles` for what orders threads and blocks: barriers, signals, and the last block to arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, gpu, ir, llvm, nvvm
from lowbit.dialect.errors import PassError
from lowbit.dialect.types import Shared
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.context import CLUSTERS, LoweringContext, int_attr, text_attr, when
from lowbit.passes.lowering.memory import allocated
from lowbit.passes.lowering.registry import lowers

_NAMED_BARRIERS = 15  # beside the one of the whole block (PTX ISA 9.7.13.1)


@lowers(ops.BarrierOp)
def barrier(op: Any, c: LoweringContext) -> None:
    c.pending.finish_reads()
    if op.async_proxy:
        c.require(CLUSTERS, "a barrier for the async proxy")
        _fence_async_proxy()
    scope = text_attr(op, "scope")
    threads = 32 * int_attr(op, "warps")
    if scope == "warps" and threads == 32:
        nvvm.bar_warp_sync(emit.constant(-1))
    elif scope == "warps" and threads < c.threads_per_block:
        _meet_in_groups(threads, c)
    elif scope.startswith("cluster"):
        c.require(CLUSTERS, "a barrier of a cluster")
        if op.relaxed:
            nvvm.cluster_arrive_relaxed(aligned=True)
        elif scope != "cluster_wait":
            nvvm.cluster_arrive(aligned=True)
        if scope != "cluster_arrive":
            nvvm.cluster_wait(aligned=True)
    else:
        gpu.barrier()


def _meet_in_groups(threads: int, c: LoweringContext) -> None:
    """Each group of neighbouring threads has a named barrier."""
    count = c.threads_per_block // threads
    if count > _NAMED_BARRIERS:
        raise PassError(f"lower-tiles: {count} barriers of {threads} threads, a block has {_NAMED_BARRIERS}")
    named = arith.addi(c.thread_digit(count, threads), emit.constant(1))  # barrier 0 is the block's
    nvvm.barrier(barrier_id=named, number_of_threads=emit.constant(threads))


def _fence_async_proxy() -> None:
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=ir.Attribute.parse("#nvvm.shared_space<cta>"))


@lowers(ops.AllocSignalsOp, needs=CLUSTERS)
def alloc_signals(op: Any, c: LoweringContext) -> None:
    place = c.places[op.result] = allocated(op.result, c)
    groups, number, _ = Shared.of(op.result.type).shape
    given = op.arrivals is not None
    arrivals = emit.constant(int_attr(op, "arrivals") if given else c.threads_per_block // groups)

    def initialise() -> None:
        for i in range(groups * number):
            nvvm.mbarrier_init(emit.offset_bytes(place.base, static=8 * i), arrivals)
        if given:  # for the copy engine, and for other blocks of the cluster
            nvvm.fence_mbarrier_init()

    _in_one_thread(initialise, c)
    gpu.barrier()


def _in_one_thread(action: Callable[[], Any], c: LoweringContext) -> None:
    thread = c.thread_digit(c.threads_per_block)
    when(arith.cmpi(arith.CmpIPredicate.eq, thread, emit.constant(0)), action)


def signal_of(op: Any, c: LoweringContext) -> Any:
    """Returns the address of the signal of this thread's group."""
    place = c.places[op.signals]
    groups, number, _ = place.type.shape
    group = c.thread_digit(groups, c.threads_per_block // groups)
    index = arith.addi(arith.muli(group, emit.constant(number)), c.scalars[op.index])
    return emit.offset_bytes(place.base, dynamic=arith.muli(index, emit.constant(8)))


@lowers(ops.ArriveOp)
def arrive(op: Any, c: LoweringContext) -> None:
    if op.copies:
        nvvm.cp_async_mbarrier_arrive(signal_of(op, c), noinc=True)
    elif op.expected is not None:
        _expect_bytes(op, c)
    elif op.each_warp:
        c.pending.finish_reads()
        signal, blocks = signal_of(op, c), 1 if op.blocks is None else int_attr(op, "blocks")
        lane = c.thread_digit(32)
        mine = emit.below(lane, emit.constant(blocks))  # a lane for each block
        when(mine, lambda: _arrive_at(signal, lane if blocks > 1 else None))
    else:
        c.pending.finish_reads()
        nvvm.mbarrier_arrive(signal_of(op, c), results=[emit.integer(64)])


def _expect_bytes(op: Any, c: LoweringContext) -> None:
    """Arrives, and lets so many bytes be waited for."""
    signal, size = signal_of(op, c), int_attr(op, "expected")
    text = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};"

    def expect() -> None:
        llvm.inline_asm(None, [signal], text, "r,~{memory}", has_side_effects=True, asm_dialect=0)

    if op.each_warp:
        when(arith.cmpi(arith.CmpIPredicate.eq, c.thread_digit(32), emit.constant(0)), expect)
    else:
        expect()


def _arrive_at(signal: Any, rank: Any | None) -> None:
    """Arrives at a signal of this block, or at that of another block of the cluster: this orders nothing there, as a
    fence of the GPU's memory, which waits for all loads under way, would (1 us on an H200)."""
    if rank is None:
        text, operands, constraints = "mbarrier.arrive.shared::cta.b64 _, [$0];", [signal], "r,~{memory}"
    else:
        lines = ["{", ".reg .b32 there;", "mapa.shared::cluster.u32 there, $0, $1;"]
        lines += ["mbarrier.arrive.shared::cluster.b64 _, [there];", "}"]
        text, operands, constraints = "\n".join(lines), [signal, rank], "r,r,~{memory}"
    llvm.inline_asm(None, operands, text, constraints, has_side_effects=True, asm_dialect=0)


@lowers(ops.AwaitOp)
def await_signal(op: Any, c: LoweringContext) -> None:
    if op.async_proxy:
        c.pending.finish_reads()
    lines = ["{", ".reg .pred over;", "again:"]
    lines += ["mbarrier.try_wait.parity.shared::cta.b64 over, [$0], $1;", "@!over bra again;", "}"]
    operands = [signal_of(op, c), c.scalars[op.parity]]
    llvm.inline_asm(None, operands, "\n".join(lines), "r,r,~{memory}", has_side_effects=True, asm_dialect=0)
    if op.async_proxy:
        _fence_async_proxy()


@lowers(ops.LastArrivalOp)
def last_arrival(op: Any, c: LoweringContext) -> None:
    """One thread counts this block in after everybody's writes; the last one to come puts the counter back."""
    one = emit.constant(1)
    others = arith.subi(c.scalars[op.count], one)

    def is_last(counter: Any) -> Any:
        last = arith.cmpi(arith.CmpIPredicate.eq, _add(counter, one), others)
        when(last, lambda: llvm.store(emit.constant(0), counter, alignment=4))
        return last

    c.scalars[op.result] = _in_all_threads(op, c, is_last)


@lowers(ops.OthersArrivedOp)
def others_arrived(op: Any, c: LoweringContext) -> None:
    """One thread looks at the counter, if there is anything to see; where all have come, it puts the counter back."""
    count, zero = c.scalars[op.count], emit.constant(0)

    def have_come(counter: Any) -> Any:
        all_ = arith.cmpi(arith.CmpIPredicate.eq, _read(counter, count), count)
        some = arith.cmpi(arith.CmpIPredicate.ne, count, zero)
        when(arith.andi(all_, some), lambda: llvm.store(zero, counter, alignment=4))
        return all_

    c.scalars[op.result] = _in_all_threads(op, c, have_come)


def _in_all_threads(op: Any, c: LoweringContext, ask: Callable[[Any], Any]) -> Any:
    """What one thread finds out from a counter behind all writes of the block. The barriers pass on to all threads what
    that one has seen (PTX ISA 8.10, causality order)."""
    c.pending.finish_reads()
    flag = emit.offset_bytes(c.shared_base, static=c.shared.allocate(op.result, 4))
    index = arith.muli(arith.extui(emit.integer(64), c.scalars[op.index]), emit.constant(4, 64))
    counter = emit.offset_bytes(c.places[op.counters].base, dynamic=index)
    gpu.barrier()
    _in_one_thread(lambda: llvm.store(arith.extui(emit.integer(), ask(counter)), flag, alignment=4), c)
    gpu.barrier()
    return arith.cmpi(arith.CmpIPredicate.ne, llvm.load(emit.integer(), flag, alignment=4), emit.constant(0))


def _add(counter: Any, number: Any) -> Any:
    """Counts in device memory; returns the number before."""
    text = "atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;"
    operands = [counter, number]
    return llvm.inline_asm(emit.integer(), operands, text, "=r,l,r,~{memory}", has_side_effects=True, asm_dialect=0)


def _read(counter: Any, count: Any) -> Any:
    """Returns the number there is in device memory if a positive one is awaited, and else zero."""
    lines = ["{", ".reg .pred some;", "setp.gt.s32 some, $2, 0;", "mov.u32 $0, 0;"]
    lines += ["@some atom.acquire.gpu.global.add.u32 $0, [$1], 0;", "}"]
    operands, text = [counter, count], "\n".join(lines)
    return llvm.inline_asm(emit.integer(), operands, text, "=&r,l,r,~{memory}", has_side_effects=True, asm_dialect=0)
