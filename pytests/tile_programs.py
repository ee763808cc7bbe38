"""Small tile programs, compiled and run in the emulator.

Each has one point: a boundary, a conversion, a shape of fragments. The emulator checks on the way that nothing is read
or written out of bounds, that accesses are aligned, and (racecheck) that barriers order them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.passes.builder import Program
from lowbit.passes.pipeline import lower_program
from lowbit.passes.targets import parse_target
from lowbit.pylib.emulator import Emulator

Array = np.ndarray[Any, Any]
Body = Callable[[Program], None]


def run(
    body: Body,
    *,
    threads: int = 32,
    grid: tuple[int, int, int] = (1, 1, 1),
    target: str = "emulator:sm_80",
    launches: int = 1,
    **arguments: Array | int,
) -> Any:
    """Build a program with these parameters (arrays are pointers), compile it, and launch it. Returns the launch."""
    kinds = {name: "pointer" if isinstance(value, np.ndarray) else "i32" for name, value in arguments.items()}

    def build() -> Any:
        p = Program("test", threads, grid, kinds)
        with p:
            body(p)
        return p.module

    kernel = lower_program(build, parse_target(target))
    emulator = Emulator(kernel.ptx)
    for _ in range(launches):
        emulator.run(kernel.launch, arguments, racecheck=True)
    return kernel


def numbers(*shape: int, kind: Any = np.float16, seed: int = 0) -> Array:
    """Small integers, no two rows or columns alike: exact in every type and in sums."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(kind)
