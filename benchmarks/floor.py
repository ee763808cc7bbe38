"""The read floor: how long a kernel takes that only reads as many bytes as a packed weight has.

No matmul can be faster that reads its weight from device memory. The kernel is a tile program like any other: every
thread loads 16-byte units and adds them up, so that no load can be left out, and stores the sums under a condition
that never holds. It reads before it waits for its predecessor (programmatic dependent launch), as a matmul may: the
weight does not depend on what ran before. What is best for a size, many small blocks or few that loop, is tried out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from lowbit.dialect.layouts.layout import local, spatial
from lowbit.dialect.signature import parse_grid
from lowbit.passes.builder import Program, Scalar, as_i32
from lowbit.passes.launch import Launch
from lowbit.passes.pipeline import CompiledKernel, lower_program
from lowbit.passes.targets import parse_target
from lowbit.pylib.runtime.devices import this_machine
from lowbit.pylib.runtime.driver import Function
from lowbit.pylib.tune.timing import REST_SECONDS, Timing, copies_needed, graph_time

UNIT = 16  # bytes
NEVER = 1 << 30  # units: more than a weight has
ANY_BLOCKS = 1 << 16


@dataclass(frozen=True)
class Reader:
    """One way to read: blocks of `threads` threads that load `unroll` units each, at once, per round.

    most_blocks   the grid has at most so many blocks; they go as many rounds as it takes
    """

    threads: int
    unroll: int
    most_blocks: int = ANY_BLOCKS

    @property
    def chunk(self) -> int:
        """Units a block reads per round."""
        return self.threads * self.unroll

    def rounds(self, units: int) -> int:
        return -(-units // (self.most_blocks * self.chunk))

    def blocks(self, units: int) -> int:
        return -(-units // (self.rounds(units) * self.chunk))


def readers(processors: int) -> list[Reader]:
    """Returns the readers to try on a GPU with so many multiprocessors."""
    once = [
        Reader(threads, unroll) for threads, unroll in ((256, 2), (256, 4), (256, 8), (512, 4), (1024, 2))
    ]
    resident = ((128, 8, 8), (256, 4, 8), (256, 8, 4), (512, 4, 4), (512, 8, 2), (1024, 4, 2))
    return once + [Reader(threads, unroll, processors * per) for threads, unroll, per in resident]


def read_program(reader: Reader, never: int = NEVER) -> Any:
    """The tile program, as a module: reads so many "units" of 16 bytes of "memory"; `launch_for` sets the grid.

    With more units than `never`, block b stores its chunk of sums, f32 [chunk, 4], at "sums" [b].
    """
    chunk, span = reader.chunk, reader.chunk * reader.most_blocks
    p = Program("read", reader.threads, (1, 1, 1), {"memory": "pointer", "sums": "pointer", "units": "i32"})
    with p:
        units, block = p["units"], p.block_id(0)
        rounds = (units + (span - 1)) // span
        layout = local(reader.unroll, 1) * spatial(reader.threads, 1) * local(1, 4)
        memory = p.global_view(p["memory"], "f32", (-1, 4), sizes=[units])
        p.grid_launch_dependents()
        with p.loop(block * rounds, rounds, [p.constant(0.0, "f32", layout)]) as loop:
            tile = p.load(memory, (loop.index * chunk, 0), layout, ("clamp", "none"))
            loop.results = [p.add(loop.carried[0], tile)]
        p.grid_wait()
        with p.when(Scalar(as_i32(never)) < units):
            sums = p.global_view(p["sums"], "f32", (ANY_BLOCKS * chunk, 4))
            p.store(loop.carried[0], sums, (block * chunk, 0))
    return p.module


def compile_reader(reader: Reader, target: str, never: int = NEVER) -> CompiledKernel:
    """The kernel of a reader for a GPU or for the emulator."""
    return lower_program(lambda: read_program(reader, never), parse_target(target))


def launch_for(reader: Reader, launch: Launch, units: int) -> Launch:
    """The launch that reads so many units."""
    return replace(launch, grid=parse_grid((reader.blocks(units), 1, 1)))


@dataclass(frozen=True)
class Floor:
    """The least time to read `bytes`, and the reader that needed it."""

    bytes: int
    time: Timing
    reader: Reader


@cache
def floor(size: int) -> Floor:
    """Measure the floor for a packed weight of `size` bytes: the fastest reader, by the median. The two that are
    fastest without rests in between are timed once more with them, like everything else."""
    units = -(-size // UNIT)
    memory = torch.ones(copies_needed(units * UNIT), units * UNIT // 4, device="cuda")
    sums = torch.empty(1, device="cuda")

    def time(reader: Reader, rest_seconds: float) -> Timing:
        function = _load(reader, units)
        calls = [partial(_read, function, part.data_ptr(), sums.data_ptr(), units) for part in memory]
        return graph_time(calls, rest_seconds=rest_seconds)

    every = readers(torch.cuda.get_device_properties(0).multi_processor_count)
    finalists = sorted(every, key=lambda reader: time(reader, 0.0).median)[:2]
    timings = {reader: time(reader, REST_SECONDS) for reader in finalists}
    best = min(timings, key=lambda reader: timings[reader].median)
    return Floor(size, timings[best], best)


def _read(function: Function, memory: int, sums: int, units: int) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    function(stream, True, memory, sums, units)


def _load(reader: Reader, units: int) -> Function:
    launch, cubin = _compile(reader, this_machine())
    overlapping = replace(launch_for(reader, launch, units), may_overlap=True)
    return Function(cubin, overlapping, torch.cuda.current_device())


@cache
def _compile(reader: Reader, target: str) -> tuple[Launch, bytes]:
    kernel = compile_reader(reader, target)
    return kernel.launch, kernel.cubin()
