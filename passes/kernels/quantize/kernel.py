"""The quantize kernel: activations as numbers of 8 bits, in one pass.

A block has one row, all of which is in its registers: x is read once. A thread takes pieces of 32 columns side by side.

    peak   = the largest |x| of the row, but at least 2^-100    a row of zeros gives zeros
    scale  = peak * (1 / largest)                               largest: 448 in f8e4m3, 127 in i8
    value  = x * (1 / scale), rounded to nearest even           scale and its reciprocal are rounded to f32
    sum    = the sum of 32 values, exact in f32

`pylib.activation.quantize_rows` is the same in torch, to the last bit. A row with a NaN or an infinity has a scale that
makes NaN of all that it multiplies: the row of y is NaN.

The largest of the threads meet in shared memory, in two steps: [threads / 16, 16], then [threads / 16].
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.formats.byte_codes import LEAST_PEAK, SUM_COLUMNS, reciprocal_of_largest
from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.layouts.layout import local, replicated, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.types import UNIT
from lowbit.passes.builder import Program, Tile
from lowbit.passes.kernels.quantize.schedule import QuantizeSchedule

_TOGETHER = 16  # threads whose largest one thread compares


def quantize(spec: MatmulSpec, schedule: QuantizeSchedule) -> ir.Module:
    """The tile program, in a module of its own: parameters "x", "values", "scales", "sums" and "m"."""
    threads, k, compute = schedule.threads, spec.k, spec.byte_type
    pieces = k // SUM_COLUMNS
    rounds = -(-pieces // threads)
    names = ("x", "values", "scales", "sums")
    p = Program("quantize", threads, ("ceil(m / 1)", 1, 1), dict.fromkeys(names, "pointer") | {"m": "i32"})
    with p:
        row, m = p.block_id(0), p["m"]
        p.grid_launch_dependents()
        p.grid_wait()
        mine = local(1, rounds, 1) * spatial(1, threads, 1)
        beyond = "none" if rounds * threads == pieces else "zero"
        x = p.global_view(p["x"], spec.act, (-1, pieces, SUM_COLUMNS), (k, SUM_COLUMNS, 1), sizes=[m])
        loaded = p.load(x, (row, 0, 0), mine * local(1, 1, SUM_COLUMNS), ("none", beyond, "none"))
        numbers = p.cast(loaded, "f32")
        peak = p.max(_largest_of_row(p, abs(numbers), threads), LEAST_PEAK)
        scale = p.mul(peak, reciprocal_of_largest(compute))
        scaled = p.mul(numbers, p.reciprocal(scale))

        scales = p.global_view(p["scales"], "f32", (-1, 1, 1), (1, 1, 1), sizes=[m])
        p.store(scale, scales, (row, 0, 0))
        skip = ("none", "none" if beyond == "none" else "skip", "none")
        units = SUM_COLUMNS // BLOCK_K
        values = p.global_view(p["values"], UNIT, (-1, pieces, units), (pieces * units, units, 1), sizes=[m])
        p.store(p.encode_bytes(scaled, compute, mine * local(1, 1, units)), values, (row, 0, 0), skip)
        sums = p.global_view(p["sums"], "f32", (-1, pieces, 1), (pieces, 1, 1), sizes=[m])
        p.store(p.reduce(p.round_to(scaled, compute), 2), sums, (row, 0, 0), skip)
    return p.module


def _largest_of_row(p: Program, numbers: Tile, threads: int) -> Tile:
    """The largest number of a tile [1, pieces, 32], in all threads: [1, 1, 1]."""
    rounds = numbers.shape[1] // threads
    of_pieces = p.reshape(p.reduce(numbers, 2, "max"), (rounds, threads))
    of_threads = p.reduce(of_pieces, 0, "max")
    first = p.alloc_shared("f32", (1, threads))
    p.store(of_threads, first, (0, 0))
    p.barrier()
    parts = threads // _TOGETHER
    compared = replicated(_TOGETHER, 2) * spatial(1, parts) * local(1, _TOGETHER)
    second = p.alloc_shared("f32", (1, parts))
    of_parts = p.reduce(p.reshape(p.load(first, (0, 0), compared), (1, parts, _TOGETHER)), 2, "max")
    p.store(p.reshape(of_parts, (1, parts)), second, (0, 0))
    p.barrier()
    everywhere = p.load(second, (0, 0), replicated(threads, 2) * local(1, parts))
    return p.reshape(p.reduce(everywhere, 1, "max"), (1, 1, 1))
