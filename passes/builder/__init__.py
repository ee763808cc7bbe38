"""A small builder for tile programs: what one thread block does, in terms of tiles.

    p = Program("copy", threads=128, grid=("ceil(m / 16)", 1, 1), params={"x": "pointer", "y": "pointer", "m": "i32"})
    with p:
        x = p.global_view(p["x"], "f16", (-1, 64), sizes=[p["m"]])
        tile = p.load(x, [p.block_id(0) * 16, 0], layout, boundary=("zero", "none"))
        ...
    module = p.module

Tiles are `Tile`s that know + - * / and < <= > >=, scalars are `Scalar`s that know + - * // % and min; Python numbers
may stand for either where the meaning is clear. Loops are `with p.loop(start, rounds, [carried tiles]) as loop`. The
kernels of this compiler are written with it (`passes.kernels.streaming`, `passes.kernels.dequantize`), and so can
anybody's be (examples/).

`Program` (program.py) opens and verifies a module. Its methods, each of which writes an operation or two, are inherited
from a class per subject, in a file of the subject's name: control, memory, synchronization, tiles, codes, ...
"""

from lowbit.passes.builder.control import Loop
from lowbit.passes.builder.outliers import OutlierShare
from lowbit.passes.builder.program import Program
from lowbit.passes.builder.tile import Tile
from lowbit.passes.builder.values import Index, Memory, Scalar, as_i32

__all__ = ["Index", "Loop", "Memory", "OutlierShare", "Program", "Scalar", "Tile", "as_i32"]
