"""mapa and barrier.cluster: shared memory of other blocks and the barrier of a cluster (PTX ISA 9.7.9.23, 9.7.13.4)."""

from __future__ import annotations

import numpy as np

from lowbit.pylib.emulator.isa.warp import collective, together
from lowbit.pylib.emulator.machine.decoder import Op, instruction
from lowbit.pylib.emulator.machine.faults import Array, any_of, require
from lowbit.pylib.emulator.machine.memory import SHARED_WINDOW
from lowbit.pylib.emulator.machine.step_results import WARP, Converge, Mask, Step

_WHOLE_WARP = np.array(2**WARP - 1, np.uint32)


@instruction("mapa")
def _mapa(op: Op) -> Step:
    """The address that block `b` of the cluster has for what lies at `a` in one's own shared memory."""
    kind = op.choice("u32", "u64")
    # Without a space, both addresses are generic.
    window = np.int64(0 if op.flag("shared::cluster") else SHARED_WINDOW)
    dest, a, b = op.dest(kind), op.source(kind), op.source("u32")
    block, cluster = op.block, op.block.cluster

    def step(mask: Mask) -> None:
        lanes = block.lanes_of(mask)
        address, rank = (block.values_of(x, lanes).astype(np.int64) for x in (a, b))
        require(rank < cluster.size, lanes, f"mapa of a rank beyond the {cluster.size} blocks of the cluster")
        require(cluster.is_own(address - window), lanes, "mapa of an address that is not in the block's shared memory")
        dest.scatter(cluster.map(address - window, rank) + window, lanes, mask)

    return step


def cluster_barrier(op: Op) -> Step:
    """Returns the step of barrier.cluster. A relaxed arrival does not make earlier writes visible to the other
    blocks."""
    arrive = op.choice("arrive", "wait") == "arrive"
    order = op.flag(*(("release", "relaxed") if arrive else ("acquire",)))
    aligned = op.flag("aligned")
    block, cluster = op.block, op.block.cluster
    everyone = np.ones(block.lanes, np.bool_)

    def arrives(threads: Array) -> None:
        cluster.arrive(block.rank, threads, relaxed=order == "relaxed")

    def waits(mask: Mask) -> Converge | None:
        threads = everyone if mask is None else mask
        complete = together(block, mask, _WHOLE_WARP)[0] if aligned else None
        left = threads & ~cluster.wait(block.rank, threads if complete is None else complete)
        return Converge(left, lambda lane: "the other blocks of the cluster never come here") if any_of(left) else None

    if not arrive:
        return waits
    if aligned:
        return collective(op, _WHOLE_WARP, arrives)
    return lambda mask: arrives(everyone if mask is None else mask)
