"""Branches, exits, block barriers, fences and the hints that change no result (PTX ISA 9.7.12, 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lowbit.pylib.emulator.isa.distributed import cluster_barrier
from lowbit.pylib.emulator.isa.warp import collective, warp_barrier
from lowbit.pylib.emulator.machine.decoder import Op, instruction
from lowbit.pylib.emulator.machine.faults import Fault, Unsupported, require
from lowbit.pylib.emulator.machine.shared_memory import WARPGROUP
from lowbit.pylib.emulator.machine.step_results import WARP, Arrive, Exit, Jump, Mask, Scatter, Step
from lowbit.pylib.emulator.text.ptx import Label, Table

_SCOPES = ("cta", "cluster", "gpu", "sys")


@instruction("bra")
def _bra(op: Op) -> Step:
    op.flag("uni")
    label = op.next()
    if not isinstance(label, Label):
        raise Unsupported("bra needs a label")
    target = label.target
    return lambda mask: Jump(mask, target)


@instruction("brx")
def _brx(op: Op) -> Step:
    """A jump table; an index beyond its end is an error."""
    op.choice("idx")
    op.flag("uni")
    index, table = op.source("u32"), op.next()
    if not isinstance(table, Table):
        raise Unsupported("brx.idx needs a .branchtargets list")
    targets = np.array([label.target for label in table.labels])

    def step(mask: Mask) -> Scatter:
        number = np.broadcast_to(index, (op.block.lanes,))
        lanes = op.block.lanes_of(mask)
        require(number[lanes] < len(targets), lanes, f"an index beyond the {len(targets)} branch targets")
        return Scatter(mask, targets[np.minimum(number, len(targets) - 1)])

    return step


@instruction("ret", "exit")
def _ret(op: Op) -> Step:
    op.flag("uni")
    return lambda mask: Exit(mask)


@instruction("trap", "brkpt")
def _trap(op: Op) -> Step:
    def step(mask: Mask) -> None:
        raise Fault(f"{op.instr.opcode} was executed", int(op.block.lanes_of(mask)[0]))

    return step


@instruction("bar", "barrier")
def _barrier(op: Op) -> Step:
    """`bar.` is `barrier.aligned.`; `bar.warp.sync` orders the lanes of a warp, `barrier.cluster` blocks."""
    if op.flag("warp"):
        return warp_barrier(op)
    if op.flag("cluster"):
        return cluster_barrier(op)
    op.flag("cta")
    kind = op.choice("sync", "arrive")
    aligned = bool(op.flag("aligned")) or op.instr.opcode == "bar"
    number = op.source("u32")
    count = _uniform(op) if op.operands else None
    if kind == "arrive" and count is None:
        raise Unsupported("bar.arrive needs a thread count")

    def step(mask: Mask) -> Arrive:
        threads = count(mask) if count else None
        if threads is not None and (threads % WARP or threads <= 0):
            raise Fault(f"a barrier's thread count is a multiple of {WARP}, not {threads}")
        lanes = op.block.lanes_of(mask)
        numbers = op.block.values_of(number, lanes)
        require(numbers < 16, lanes, f"barrier {numbers.max()}: there are 16")
        return Arrive(mask, number.copy(), threads, kind == "sync", aligned)

    return step


def _uniform(op: Op) -> Callable[[Mask], int]:
    """The next operand as an int, the same for all threads that come together."""
    values = op.source("u32")
    if values.ndim == 0:
        constant = int(values)
        return lambda mask: constant

    def read(mask: Mask) -> int:
        some = np.unique(values[op.block.lanes_of(mask)])
        if len(some) > 1:
            raise Fault(f"threads that come to a barrier together name different thread counts: {some.tolist()}")
        return int(some[0])

    return read


@instruction("membar")
def _membar(op: Op) -> Step:
    op.choice("cta", "gl", "sys")
    return _nothing


@instruction("fence")
def _fence(op: Op) -> Step:
    """Stores are seen at once: only fences for the async proxy and for mbarriers have something to do."""
    barriers = op.block.shared.barriers
    if op.flag("mbarrier_init"):
        op.choice("release")
        op.choice("cluster")
        return lambda mask: barriers.fence()
    if op.flag("proxy"):
        kind = op.choice("alias", "async")
        if kind == "alias" or op.flag("global", "shared::cta", "shared::cluster") == "global":
            return _nothing
        block = op.block

        def fence(mask: Mask) -> None:
            block.shared.fence_proxy(block.lanes_of(mask))
            barriers.fence()

        return fence
    op.flag("sc", "acq_rel", "acquire", "release")
    op.choice(*_SCOPES)
    return _nothing


@instruction("griddepcontrol")
def _griddepcontrol(op: Op) -> Step:
    op.choice("wait", "launch_dependents")
    return _nothing


@instruction("nanosleep")
def _nanosleep(op: Op) -> Step:
    op.type("u32")
    op.source("u32")
    return _nothing


@instruction("setmaxnreg")
def _setmaxnreg(op: Op) -> Step:
    """Sets the limit of a warpgroup's threads; whether registers are left is not checked (PTX ISA 9.7.19.5)."""
    op.choice("inc", "dec")
    op.choice("sync")
    op.choice("aligned")
    op.type("u32")
    count = op.immediate()
    if count % 8 or not 24 <= count <= 256:
        raise Unsupported(f"setmaxnreg takes a multiple of 8 from 24 to 256, not {count}")
    return collective(op, None, lambda active: None, WARPGROUP)


@instruction("createpolicy")
def _createpolicy(op: Op) -> Step:
    """An opaque cache policy; caches are not modelled."""
    op.choice("fractional")
    op.choice(*(f"L2::evict_{kind}" for kind in ("last", "normal", "first", "unchanged")))
    op.flag("L2::evict_first", "L2::evict_unchanged")
    op.type("b64")
    dest = op.dest("b64")
    if op.operands:
        op.next()
    policy = np.uint64(0x12F0000000000000)
    return lambda mask: dest.write(policy, mask)


@instruction("prefetch")
def _prefetch(op: Op) -> Step:
    if op.flag("tensormap"):
        op.flag("param", "const")
        op.address()
        return _nothing
    op.flag("global", "local")
    op.choice("L1", "L2", "L2::evict_last", "L2::evict_normal")
    op.address()
    return _nothing


def _nothing(mask: Mask) -> None:
    return None
