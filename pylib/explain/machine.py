"""What a kernel takes of the GPU: registers, shared memory, multiprocessors, waves, and which bound its time has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lowbit.passes.codegen.cubin import Resources
from lowbit.passes.kernels.base import KernelRequest
from lowbit.passes.kernels.registry import family_named
from lowbit.passes.launch import Launch
from lowbit.passes.target import Target
from lowbit.pylib.explain.executed import tokens_of
from lowbit.pylib.explain.figures import Bar, Bars, Cell, Figure, Grid, Table, cut
from lowbit.pylib.explain.measured import Measured

_RESERVED = 1024  # bytes of shared memory that the system takes of every block from sm_80 on
_WARP, _UNIT = 32, 256  # registers are handed out to warps in units of so many
_PARTS = 4  # of a multiprocessor, each with registers of its own for whole warps
_SHARED_UNIT = 128  # bytes
_MOST_WAVES = 8


@dataclass(frozen=True)
class Occupancy:
    """Blocks that a multiprocessor holds at a time, by what limits them."""

    limits: Mapping[str, int]

    @staticmethod
    def of(launch: Launch, used: Resources, target: Target) -> Occupancy:
        """By the rules of NVIDIA's occupancy calculator."""
        warps = -(-launch.threads // _WARP)
        registers = -(-max(used.registers, 1) * _WARP // _UNIT) * _UNIT  # of a warp
        shared = -(-(launch.shared_bytes + used.shared + _RESERVED) // _SHARED_UNIT) * _SHARED_UNIT
        return Occupancy(
            {
                "registers": target.registers_per_sm // _PARTS // registers * _PARTS // warps,
                "shared memory": target.shared_per_sm // shared,
                "threads": target.max_threads_per_sm // (warps * _WARP),
                "blocks": target.max_blocks_per_sm,
            }
        )

    @property
    def blocks(self) -> int:
        return min(self.limits.values())

    @property
    def limit(self) -> str:
        return min(self.limits, key=lambda name: self.limits[name])


def machine_figures(launch: Launch, used: Resources, target: Target, arguments: Mapping[str, int]) -> list[Figure]:
    """What a launch takes of the GPU, and how its blocks fill it."""
    occupancy = Occupancy.of(launch, used, target)
    is_known = {extent.param for extent in launch.grid} - {""} <= arguments.keys()
    sizes = launch.blocks(arguments, target.multiprocessors) if is_known else ()
    about = f"What the assembler says, and how many blocks fit on a multiprocessor of {target.arch}."
    threads = occupancy.blocks * launch.threads
    limits = ", ".join(f"{name} {count}" for name, count in occupancy.limits.items())
    values = {
        "registers per thread": str(used.registers),
        "spilled": f"{used.spill_stores} bytes stored, {used.spill_loads} bytes loaded",
        "shared memory per block": f"{launch.shared_bytes + used.shared:,} bytes",
        "threads per block": str(launch.threads),
        "grid": " x ".join(map(str, sizes or [each.written for each in launch.grid])),
        "blocks per multiprocessor": f"{occupancy.blocks}, by {occupancy.limit} ({limits})",
        "occupancy": f"{threads} of {target.max_threads_per_sm} threads, {threads / target.max_threads_per_sm:.0%}",
    }
    figures: list[Figure] = [Table("Registers, shared memory, occupancy", about, ("", "value"), tuple(values.items()))]
    if occupancy.blocks and (blocks := math.prod(sizes or [0])):
        figures.append(waves(blocks, occupancy.blocks, target))
    return figures


def waves(blocks: int, per_processor: int, target: Target) -> Grid:
    """Blocks on multiprocessors, wave by wave, as if all took the same time and went to them in order."""
    processors, room = target.multiprocessors, target.multiprocessors * per_processor
    count = -(-blocks // room)
    rows: list[tuple[str, tuple[Cell, ...]]] = []
    for wave in range(min(count, _MOST_WAVES)):
        first, left = wave * room, min(blocks - wave * room, room)
        held = [len(range(processor, left, processors)) for processor in range(processors)]
        rows.append((f"wave {wave}", tuple(_processor(i, n, first, processors) for i, n in enumerate(held))))
    last = blocks - (count - 1) * room
    about = (
        f"{blocks} block{'s' * (blocks > 1)} on {processors} multiprocessors with room for {per_processor} each: "
        f"{blocks / room:.2f} waves. The last one fills {last / room:.0%}. A cell is a multiprocessor, and how many "
        f"blocks it has.{cut(count, _MOST_WAVES, 'waves')}"
    )
    names = tuple(str(i) if i % 4 == 0 else "" for i in range(processors))
    return Grid("Blocks on multiprocessors", about, "", names, tuple(rows))


def _processor(number: int, held: int, first: int, processors: int) -> Cell:
    names = ", ".join(str(first + number + i * processors) for i in range(held))
    title = f"multiprocessor {number}: {f'block {names}' if held else 'idle'}"
    return Cell(str(held) if held else "", title, held - 1)


@dataclass(frozen=True)
class Roofline:
    """Microseconds that a launch takes at least, by what bounds it, and what the family predicts."""

    bounds: Mapping[str, float]
    predicted: float

    @staticmethod
    def of(request: KernelRequest, m: int) -> Roofline:
        spec, target, family = request.spec, request.target, family_named(request.family)
        tokens = tokens_of(request.schedule, m)
        predicted = family.predict(spec, tokens, request.schedule, target)
        return Roofline(family.bounds(spec, m, request.schedule, target), predicted)

    @property
    def bound(self) -> str:
        return max(self.bounds, key=lambda name: self.bounds[name])

    def figure(self, measured: Measured) -> Bars:
        """The bounds and the times as bars."""
        bars = {name: (time, 0 if name == self.bound else 6) for name, time in self.bounds.items()}
        bars["predicted"] = self.predicted, 3
        if measured.microseconds is not None:
            bars["measured"] = measured.microseconds, 9
        about = f"Bound by {self.bound}: no launch takes less than {self.bounds[self.bound]:.2f} µs. "
        about += f"The kernel family predicts {self.predicted:.2f} µs. {measured.about}"
        rows = [(f"{name} {t:.2f}", (Bar(0, t, f"{name}: {t:.3f} µs", hue),)) for name, (t, hue) in bars.items()]
        return Bars("Roofline", about, "µs", max(time for time, _ in bars.values()), tuple(rows))
