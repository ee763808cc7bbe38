"""One thread block at work: its registers and the scheduler of its threads.

All threads that stand at the same instruction take it together, as NumPy vectors over the lanes of the block.
Threads that part at a branch form groups; always the group at the lowest instruction runs, so that groups
meet again where the code joins. A group that reaches another's instruction merges with it. Threads wait in
two places: at a barrier, and at a warp-level instruction whose other lanes have not come yet. When nobody can
run and somebody waits, that is a deadlock, and an error; unless they wait for the other blocks of the cluster, which
run then, or for an mbarrier, to which copies come then (`run_cluster`).

The block is padded to whole warps; the padding lanes have exited before the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from lowbit.pylib.emulator.machine.cluster import Cluster, ClusterMemory
from lowbit.pylib.emulator.machine.copy_queue import CopyQueue
from lowbit.pylib.emulator.machine.faults import Array, Fault, all_of, any_of, distinct
from lowbit.pylib.emulator.machine.memory import DeviceMemory, LocalMemory
from lowbit.pylib.emulator.machine.shared_memory import SharedMemory
from lowbit.pylib.emulator.machine.step_results import WARP, Arrive, Converge, Exit, Jump, Mask, Outcome, Scatter, Step
from lowbit.pylib.emulator.machine.wgmma_queue import Flight, WgmmaQueue, wgmma_registers
from lowbit.pylib.emulator.text.ptx import BITS, Instruction, Kernel, Reg


class Register:
    """A register of every lane: raw bits, and which lanes have set it."""

    __slots__ = ("complete", "defined", "flight", "name", "type", "value")

    def __init__(self, reg: Reg, defined: Array) -> None:
        self.name, self.type = reg.name, reg.type
        dtype = np.bool_ if reg.type == "pred" else np.dtype(f"u{BITS[reg.type] // 8}")
        self.value = np.zeros(len(defined), dtype)
        self.defined = defined
        self.complete = False
        self.flight: Flight | None = None  # for registers of a wgmma

    def define(self, mask: Mask) -> None:
        if mask is None:
            self.complete = True
        elif not self.complete:
            self.defined |= mask
            self.complete = all_of(self.defined)

    def check(self, mask: Mask) -> None:
        """Raise a Fault if one of the threads in `mask` reads the register before it has set it."""
        unset = ~self.defined if mask is None else mask & ~self.defined
        if any_of(unset):
            raise Fault(f"{self.name} is read before it is set", int(np.flatnonzero(unset)[0]))


@dataclass
class Barrier:
    count: int | None
    arrived: Array
    waiting: Array
    resume: Array  # the instruction each waiting thread goes on with
    aligned: bool = False
    known: Array | None = None  # see RaceDetector


@dataclass
class Block:
    """A block of `shape` threads of `kernel`, to be run once for each block of the grid."""

    kernel: Kernel
    shape: tuple[int, int, int]
    grid: tuple[int, int, int]
    device: DeviceMemory
    constant: DeviceMemory
    shared: SharedMemory
    local: LocalMemory
    cluster: Cluster
    rank: int  # in the cluster
    symbols: dict[str, tuple[str, int]]  # name -> (space, address)
    params: Array
    dynamic_shared_bytes: int
    max_steps: int
    registers: list[Register] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.threads = self.shape[0] * self.shape[1] * self.shape[2]
        self.warps = -(-self.threads // WARP)
        self.lanes = self.warps * WARP
        self.everyone = np.arange(self.lanes)
        self.defined = np.zeros((len(self.kernel.registers), self.lanes), np.bool_)  # by register
        self.registers = list(map(Register, self.kernel.registers, self.defined))
        self.copies = CopyQueue(self.lanes, self.shared)
        asynchronous = wgmma_registers(self.kernel)
        self.wgmmas = WgmmaQueue(self.lanes, self.shared, asynchronous)
        for number, reg in enumerate(asynchronous):
            self.registers[reg.index].flight = Flight(self.wgmmas, number)
        self.cluster_memory = ClusterMemory(self.cluster, self.rank)
        self.index = np.zeros((3, self.lanes), np.uint32)  # %ctaid
        self.cluster_index = np.zeros((3, self.lanes), np.uint32)  # %clusterid
        self.counts = np.zeros(len(self.kernel.instructions) + 1, np.int64)
        self.exited = np.zeros(self.lanes, np.bool_)
        self.awaits: dict[int, Callable[[int], str]] = {}  # where threads may wait for other blocks: see Converge

    def release(self) -> None:
        """Let go of all that refers back to what holds it: the garbage collector finds such circles late, and hundreds
        of megabytes of shadow memory are in them."""
        self.steps.clear()
        self.awaits.clear()
        self.device.races = None

    def lanes_of(self, mask: Mask) -> Array:
        return self.everyone if mask is None else mask.nonzero()[0]

    def values_of(self, value: Array, lanes: Array) -> Array:
        """A value for each lane of the block, or one for all, as one for each of `lanes`."""
        return value[lanes] if value.ndim else np.full(len(lanes), value)

    def members(self, lanes: Array) -> Array:
        """These lanes as a mask."""
        mask = np.zeros(self.lanes, np.bool_)
        mask[lanes] = True
        return mask

    def thread_index(self, lane: int) -> tuple[int, int, int]:
        x, y, _ = self.shape
        return lane % x, lane // x % y, lane // (x * y)

    # Running

    def start(self, index: tuple[int, int, int]) -> None:
        """Put all threads at the start of the kernel, as block `index` of the grid."""
        self.index[:] = np.array(index)[:, None]
        self.cluster_index[:] = (np.array(index) // self.cluster.shape)[:, None]
        self.shared.reset()
        self.local.reset()
        self.copies.reset()
        self.wgmmas.reset()
        self.defined[:] = False
        for register in self.registers:
            register.complete = False
        self.exited = self.everyone >= self.threads
        self.groups: dict[int, Array] = {0: ~self.exited}
        self.parked: dict[int, Array] = {}
        self.barriers: dict[int, Barrier] = {}
        self.awaits.clear()
        self.budget = self.max_steps
        self.cluster.exit(self.rank, self.exited)

    def advance(self) -> bool:
        """Run all threads until they have exited or can only wait for another block; whether all have exited.

        Raises EmulatorError at the first mistake.
        """
        while self.groups or self._resume():
            at = min(self.groups)
            mask = self.groups.pop(at)
            self.budget -= self._run_group(at, mask, min(self.groups, default=len(self.steps)))
            if self.budget < 0:
                raise self._error(at, f"no end after {self.max_steps} steps", None)
        return not self.parked

    def _run_group(self, at: int, group: Array, limit: int, again: bool = False) -> int:
        """Run until the group splits, waits, jumps or comes to `limit`; the number of steps. `again`: an instruction
        that is counted already."""
        mask = None if all_of(group) else group
        warps = 0 if again else self.warps if mask is None else int(group.reshape(-1, WARP).any(axis=1).sum())
        steps, counts, start = self.steps, self.counts, at
        outcome = None
        try:
            while at < limit:
                counts[at] += warps
                outcome = steps[at](mask)
                if outcome is not None:
                    break
                at += 1
        except Fault as fault:
            raise self._error(at, fault.message, fault.lane) from None
        if outcome is None:
            if at < len(steps):
                self._join(at, group)
            else:
                self._exit(group, at - 1)
        else:
            self._apply(outcome, at, group)
        return at - start + 1

    def _join(self, at: int, group: Array) -> None:
        if any_of(group):
            self.groups[at] = self.groups[at] | group if at in self.groups else group

    def _apply(self, outcome: Outcome, at: int, group: Array) -> None:
        some = group if outcome.threads is None else outcome.threads
        match outcome:
            case Jump(target=target):
                self._join(at + 1, group & ~some)
                self._join(target, some)
            case Scatter(targets=targets):
                self._join(at + 1, group & ~some)
                for target in distinct(targets[some]):
                    self._join(target, some & (targets == target))
            case Exit():
                self._join(at + 1, group & ~some)
                self._exit(some, at)
            case Converge():
                if outcome.awaits:
                    self.awaits[at] = outcome.awaits
                self._join(at + 1, group & ~some)
                together = some | self.parked.pop(at) if at in self.parked else some
                if together is some:
                    self.parked[at] = some
                else:
                    self.groups[at] = together  # again, with those who came before
            case Arrive():
                self._join(at + 1, group & ~some if outcome.wait else group)
                numbers = np.broadcast_to(outcome.number, some.shape)
                for number in distinct(numbers[some]):
                    self._arrive(outcome, number, at, some & (numbers == number))

    def _exit(self, some: Array, at: int) -> None:
        self.exited = self.exited | some
        try:
            self.cluster.exit(self.rank, some)
        except Fault as fault:
            raise self._error(at, fault.message, fault.lane) from None
        for number in list(self.barriers):
            self._open(number)

    def _resume(self) -> bool:
        """Nobody can run: let threads that wait for lanes look again, since some may have exited."""
        if not self.parked and not self.barriers:
            return False
        waiting = dict(self.parked)
        self.parked.clear()
        for at, group in sorted(waiting.items()):
            self._run_group(at, group, at + 1, again=True)
        if self.groups:
            return True
        if not self.parked.keys().isdisjoint(self.awaits):
            return False
        self.deadlock()
        return False

    def deadlock(self) -> None:
        if self.parked:
            at = min(self.parked)
            lane = int(np.flatnonzero(self.parked[at])[0])
            group = "warpgroup" if self.kernel.instructions[at].opcode == "wgmma" else "warp"
            what = self.awaits[at](lane) if at in self.awaits else f"the other threads of the {group} never come here"
            raise self._error(at, f"deadlock: {what}{self._waiting()}", lane)
        if self.barriers:
            number = min(self.barriers)
            barrier = self.barriers[number]
            lanes = np.flatnonzero(barrier.waiting if any_of(barrier.waiting) else barrier.arrived)
            at = int(barrier.resume[lanes[0]]) - 1
            raise self._error(at, f"deadlock: not all threads come to barrier {number}{self._waiting()}", int(lanes[0]))

    def _waiting(self) -> str:
        places = [(f"{self._place(at)}{self._awaited(at)}", group) for at, group in sorted(self.parked.items())]
        places += [
            (f"barrier {number} (needs {barrier.count or 'all'})", barrier.arrived)
            for number, barrier in sorted(self.barriers.items())
        ]
        text = "; ".join(f"{int(group.sum())} threads wait at {name}" for name, group in places)
        return f" ({text}; {int(self.exited[: self.threads].sum())} have exited)"

    def _awaited(self, at: int) -> str:
        lane = int(np.flatnonzero(self.parked[at])[0])
        return f": {self.awaits[at](lane)}" if at in self.awaits else ""

    # Barriers

    def _arrive(self, arrival: Arrive, number: int, at: int, some: Array) -> None:
        barrier = self.barriers.get(number)
        if barrier is None:
            nobody = np.zeros(self.lanes, np.bool_)
            barrier = Barrier(arrival.count, nobody, nobody, np.zeros(self.lanes, np.int64))
            self.barriers[number] = barrier
        lane = int(np.flatnonzero(some)[0])
        if barrier.count != arrival.count:
            raise self._error(at, f"barrier {number} is used with two thread counts at a time", lane)
        if any_of(barrier.arrived & some):
            raise self._error(at, f"a thread comes to barrier {number} twice before it opens", lane)
        barrier.arrived = barrier.arrived | some
        barrier.known = self.shared.release(some, barrier.known)
        if arrival.wait:
            barrier.waiting = barrier.waiting | some
        else:
            self.shared.publish(some)
        barrier.aligned |= arrival.aligned
        barrier.resume[some] = at + 1
        self._open(number)

    def _open(self, number: int) -> None:
        """Open the barrier if all have come."""
        barrier = self.barriers[number]
        present = int(barrier.arrived.sum())
        live = ~self.exited
        if barrier.count is None and not all_of(barrier.arrived | ~live):
            return
        if barrier.count is not None and present < barrier.count:
            return
        lane = int(np.flatnonzero(barrier.arrived)[0])
        at = int(barrier.resume[lane]) - 1
        if barrier.count is not None and present > barrier.count:
            raise self._error(at, f"{present} threads at barrier {number}, which counts {barrier.count}", lane)
        everyone = all_of(barrier.waiting | ~live)
        targets = np.unique(barrier.resume[barrier.arrived])
        if barrier.aligned and not (everyone and len(targets) == 1):
            self._check_aligned(barrier, number)
        del self.barriers[number]
        if everyone:
            self.shared.synchronize()
        else:
            self.shared.publish(barrier.waiting)
            self.shared.acquire(barrier.waiting, barrier.known)
        for target in targets.tolist():
            self._join(target, barrier.waiting & (barrier.resume == target))

    def _check_aligned(self, barrier: Barrier, number: int) -> None:
        """All live threads of a warp execute the same `.aligned` barrier (PTX ISA 9.7.13.1)."""
        arrived, resume = barrier.arrived.reshape(-1, WARP), barrier.resume.reshape(-1, WARP)
        absent = ~barrier.arrived & ~self.exited
        for warp in np.flatnonzero(arrived.any(axis=1)).tolist():
            lanes = slice(warp * WARP, (warp + 1) * WARP)
            places = np.unique(resume[warp][arrived[warp]])
            if len(places) > 1 or any_of(absent[lanes]):
                lane = warp * WARP + int(np.flatnonzero(arrived[warp])[0])
                message = f"the threads of warp {warp} come to barrier {number} apart (divergent aligned barrier)"
                raise self._error(int(places[0]) - 1, message, lane)

    # Reporting

    def _place(self, at: int) -> str:
        return self.kernel.instructions[min(at, len(self.kernel.instructions) - 1)].place

    def _error(self, at: int, message: str, lane: int | None) -> Exception:
        return self.reporter(self.kernel.instructions[min(at, len(self.kernel.instructions) - 1)], lane)(message)

    def reporter(self, instruction: Instruction, lane: int | None) -> Callable[[str], Exception]:
        """Returns a function that makes errors of messages about an instruction."""
        where = f" in block {tuple(self.index[:, 0].tolist())}"
        if lane is not None:
            where += f", thread {self.thread_index(lane)}"
        return lambda message: instruction.error(message, where)

    def opcode_counts(self) -> Counter[str]:
        counter: Counter[str] = Counter()
        for instruction, count in zip(self.kernel.instructions, self.counts.tolist()):
            if count:
                counter[instruction.name] += count
        return counter


def run_cluster(blocks: list[Block], indices: list[tuple[int, int, int]]) -> None:
    """Run the blocks of a cluster, as blocks `indices` of the grid, in turns: the first until it waits for the others
    or ends, then the next. When all wait, the oldest copy in flight arrives."""
    cluster = blocks[0].cluster
    cluster.reset()
    if blocks[0].device.races:
        blocks[0].device.races.begin(indices)
    for block, index in zip(blocks, indices):
        block.start(index)
    running = blocks
    while running:
        progress = cluster.progress()
        left = [block for block in running if not block.advance()]
        if len(left) == len(running) and cluster.progress() == progress and not cluster.transfers.land():
            left[0].deadlock()
        running = left
