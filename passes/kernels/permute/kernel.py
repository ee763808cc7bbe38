"""The permute kernel: columns of x in the order of a weight whose columns are permuted.

    columns = permutation[part of the block]      before x is there: it is part of the weight
    wait for the kernel in front
    row     = x[row, :]                           to shared memory, for each row of the block
    y[row, part] = row[columns]

x and y move in pieces of 16 bytes, side by side, where k is a multiple of 8; else in the widest that divide a row. What
is read in no order, two bytes at a time, is shared memory: a warp takes 3 to 4 turns for 32 random columns.

Shared memory: [rows, k] of x, if the schedule stages rows; else columns are gathered from device memory.
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.layouts.layout import local, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Memory, Program, Scalar
from lowbit.passes.kernels.permute.schedule import PermuteSchedule, piece_columns


def permute(spec: MatmulSpec, schedule: PermuteSchedule) -> ir.Module:
    """The tile program, in a module of its own: parameters "x", "permutation" (i32 [k]), "y" and "m"."""
    k, width, threads, rows = spec.k, piece_columns(spec), schedule.threads, schedule.rows
    pieces, part = k // width, threads * schedule.pieces
    grid = (f"ceil(m / {rows})", -(-pieces // part), 1)
    p = Program("permute", threads, grid, dict.fromkeys(("x", "permutation", "y"), "pointer") | {"m": "i32"})
    with p:
        first_row, first_piece, m = p.block_id(0) * rows, p.block_id(1) * part, p["m"]
        p.grid_launch_dependents()
        permutation = p.global_view(p["permutation"], "i32", (1, pieces, width))
        mine = local(1, schedule.pieces, 1) * spatial(1, threads, 1) * local(1, 1, width)
        whole = pieces % part == 0
        columns = p.load(permutation, (0, first_piece, 0), mine, ("none", "none" if whole else "zero", "none"))
        p.grid_wait()
        if schedule.staged:
            source, first = _staged(p, spec, schedule, first_row), 0
        else:
            source, first = p.global_view(p["x"], spec.act, (-1, k), sizes=[m]), first_row
        y = p.global_view(p["y"], spec.act, (-1, pieces, width), sizes=[m])
        skip = ("skip" if rows > 1 else "none", "none" if whole else "skip", "none")
        for row in range(rows):
            p.store(p.gather(source, (first + row,), columns), y, (first_row + row, first_piece, 0), skip)
    return p.module


def _staged(p: Program, spec: MatmulSpec, schedule: PermuteSchedule, first_row: Scalar) -> Memory:
    """Returns rows of x in shared memory, [rows, k]; those beyond the end are the last one."""
    width, rows = piece_columns(spec), schedule.rows
    pieces = spec.k // width
    rounds = -(-pieces // schedule.threads)
    mine = local(rows, rounds, 1) * spatial(1, schedule.threads, 1) * local(1, 1, width)
    whole = rounds * schedule.threads == pieces
    x = p.global_view(p["x"], spec.act, (-1, pieces, width), sizes=[p["m"]])
    boundary = ("clamp" if rows > 1 else "none", "none" if whole else "zero", "none")
    numbers = p.reshape(p.load(x, (first_row, 0, 0), mine, boundary), (rows, rounds * schedule.threads * width))
    buffer = p.alloc_shared(spec.act, (rows, spec.k))
    p.store(numbers, buffer, (0, 0), ("none", "none" if whole else "skip"))
    p.barrier()
    return buffer
