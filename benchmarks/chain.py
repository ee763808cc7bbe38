"""The floor of a chain: what kernels take that depend on each other as matmuls do, and compute nothing.

A block fetches its part of the weight into registers while the kernel before still runs (programmatic dependent
launch), copies x to shared memory when that has ended, adds both up, hands the sums around, and stores its part of
y; there is one block for every multiprocessor. A matmul small enough for that can hardly be faster. Leaving parts out
shows what each of them takes.

    python -m benchmarks chain 4096x4096 -m 1,8,16
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch

import lowbit
from benchmarks.floor import UNIT
from benchmarks.tables import markdown
from lowbit.dialect.errors import SpecError, TargetError
from lowbit.dialect.layouts.layout import Layout, local, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program, Tile
from lowbit.passes.pipeline import CompiledKernel, lower_program
from lowbit.passes.targets import parse_target
from lowbit.pylib.runtime.devices import this_machine
from lowbit.pylib.tune.timing import copies_needed, graph_time

THREADS = 256  # few enough for blocks of two kernels side by side
MOST_UNITS = 16  # of the weight that a thread holds: 64 registers
MOST_X = 192 << 10  # bytes, in shared memory


@dataclass(frozen=True)
class Link:
    """A kernel of the chain.

    units      of 16 bytes that a thread reads of the weight; 0: none
    x_units    the same of x, all of which every block reads; 0: none
    rows       of four f16 values that a block stores, at most one for every thread
    """

    blocks: int
    units: int
    x_units: int
    rows: int
    threads: int = THREADS

    def without(self, *parts: str) -> Link:
        """The same but for some of "weight" and "x"."""
        fields = {"weight": "units", "x": "x_units"}
        return replace(self, **{fields[part]: 0 for part in parts})


def link(spec: MatmulSpec, m: int, blocks: int, threads: int = THREADS) -> Link:
    """A kernel that reads and writes as much as a matmul. Raises SpecError for one that does not fit into a block."""
    units, x_units = -(-spec.bytes // (UNIT * blocks * threads)), -(-m * spec.k * 2 // (UNIT * threads))
    found = Link(blocks, units, x_units, rows=-(-spec.n * m // (4 * blocks)), threads=threads)
    if found.units > MOST_UNITS or found.x_units * UNIT * threads > MOST_X or found.rows > threads:
        raise SpecError(
            f"{spec.n} x {spec.k}, m = {m}: a block of a chain has at most {MOST_UNITS * UNIT * threads} bytes of the "
            f"weight, {MOST_X} of x and {4 * threads} outputs; take a smaller size or fewer tokens"
        )
    return found


def chain_program(link: Link) -> Any:
    """The tile program, as a module: sums of four 32-bit columns of "weight" and "x", rounded to f16, to "y"."""
    p = Program("chain", link.threads, (link.blocks, 1, 1), dict.fromkeys(("x", "weight", "y"), "pointer"))

    def parts(tile: Tile) -> list[Tile]:
        return [p.slice(tile, 0, first, link.threads) for first in range(0, tile.shape[0], link.threads)]

    def layout(units: int) -> Layout:
        return local(units, 1) * spatial(link.threads, 1) * local(1, 4)

    with p:
        block, chunk, size = p.block_id(0), link.units * link.threads, link.x_units * link.threads
        p.grid_launch_dependents()
        weight: list[Tile] = []
        if link.units:
            memory = p.global_view(p["weight"], "f32", (link.blocks * chunk, 4))
            weight = parts(p.load(memory, (block * chunk, 0), layout(link.units)))  # on its way while the kernel waits
        p.grid_wait()
        total = p.constant(0.0, "f32", layout(1))
        if link.x_units:
            x, buffer = p.global_view(p["x"], "f32", (size, 4)), p.alloc_shared("f32", (size, 4))
            p.copy_async(x, buffer, (0, 0), layout(link.x_units))
            p.commit()
            p.wait()
            p.barrier()
            total = reduce(p.add, parts(p.load(buffer, (0, 0), layout(link.x_units))), total)
            p.free_shared(buffer)
        total = reduce(p.add, weight, total)
        sums = p.alloc_shared("f32", (link.threads, 4))  # of a matmul's warps; and nobody reads less than all
        p.store(total, sums, (0, 0))
        p.barrier()
        total = p.load(sums, (0, 0), layout(1))
        p.free_shared(sums)
        y = p.global_view(p["y"], "f16", (link.blocks, link.rows, 4))
        stored = p.reshape(p.cast(total, "f16"), (1, link.threads, 4))
        p.store(stored, y, (block, 0, 0), ("none", "skip", "none"))
    return p.module


def compile_link(link: Link, target: str) -> CompiledKernel:
    """The kernel for a GPU or for the emulator."""
    return lower_program(lambda: chain_program(link), parse_target(target))


def chain(n: int, k: int, tokens: list[int]) -> str:
    """Microseconds per kernel, u4 in groups of 128, as a markdown table; on this machine's GPU."""
    if not torch.cuda.is_available():
        raise TargetError("a chain is timed on an NVIDIA GPU, and none is here")
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    spec, parts = MatmulSpec(n, k, "u4", group_size=128), (("weight", "x"), ("weight",), ("x",), ())
    rows = []
    for m in tokens:
        whole = link(spec, m, blocks)
        size, x_size = whole.blocks * whole.units * whole.threads * UNIT, whole.x_units * whole.threads * UNIT
        weights = torch.ones(copies_needed(size), size // 4, device="cuda")
        x = torch.zeros(x_size // 4, device="cuda")
        y = torch.zeros(whole.blocks * whole.rows * 4, dtype=torch.half, device="cuda")
        times = [_time(whole.without(*left_out), x, weights, y) for left_out in parts]
        rows.append([str(m), *(f"{time:.2f}" for time in times)])
    return markdown(["m", "start and store", "and x", "and the weight, no x", "all"], rows)


def _time(link: Link, x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> float:
    kernel = lowbit.load(compile_link(link, this_machine()), overlap=True)
    return graph_time([partial(kernel, x=x, weight=weight, y=y) for weight in weights]).median
