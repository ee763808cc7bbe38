"""The quantize kernel: activations as numbers of 8 bits, in one pass.

A block has one row, all of which is in its registers: x is read once. A thread takes units of 16 columns side by side,
which are those that a 16-byte word of values has; sums of 32 are those of two neighbours.

    peak   = the largest |x| of the row, but at least 2^-100    a row of zeros gives zeros
    scale  = peak * (1 / largest)                               largest: 448 in f8e4m3, 127 in i8
    value  = x * (1 / scale), rounded to nearest even           scale and its reciprocal are rounded to f32
    sum    = the sum of 32 values, exact in f32

`pylib.runtime.activation.quantize_rows` is the same in torch, to the last bit. A row with a NaN or an infinity has a
scale that makes NaN of all that it multiplies: the row of y is NaN.

The largest of the threads meet in shared memory, in two steps: [threads / 16, 16], then [threads / 16]. So do the sums
of units: [rounds, threads].
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
    units = k // BLOCK_K
    rounds = -(-units // threads)
    names = ("x", "values", "scales", "sums")
    p = Program("quantize", threads, ("ceil(m / 1)", 1, 1), dict.fromkeys(names, "pointer") | {"m": "i32"})
    with p:
        row, m = p.block_id(0), p["m"]
        p.grid_launch_dependents()
        p.grid_wait()
        mine = local(1, rounds, 1) * spatial(1, threads, 1)
        whole = rounds * threads == units
        x = p.global_view(p["x"], spec.act, (-1, units, BLOCK_K), (k, BLOCK_K, 1), sizes=[m])
        boundary = ("none", "none" if whole else "zero", "none")
        numbers = p.cast(p.load(x, (row, 0, 0), mine * local(1, 1, BLOCK_K), boundary), "f32")
        peak = p.max(_largest_of_row(p, abs(numbers), threads), LEAST_PEAK)
        scale = p.mul(peak, reciprocal_of_largest(compute))
        scaled = p.mul(numbers, p.reciprocal(scale))

        scales = p.global_view(p["scales"], "f32", (-1, 1, 1), (1, 1, 1), sizes=[m])
        p.store(scale, scales, (row, 0, 0))
        skip = ("none", "none" if whole else "skip", "none")
        values = p.global_view(p["values"], UNIT, (-1, units, 1), (units, 1, 1), sizes=[m])
        p.store(p.encode_bytes(scaled, compute, mine), values, (row, 0, 0), skip)
        pieces = k // SUM_COLUMNS
        sums = p.global_view(p["sums"], "f32", (-1, pieces, 1), (pieces, 1, 1), sizes=[m])
        p.store(_sums_of_two(p, p.reduce(p.round_to(scaled, compute), 2), threads), sums, (row, 0, 0), skip)
    return p.module


def _sums_of_two(p: Program, of_units: Tile, threads: int) -> Tile:
    """The sums of every two neighbours of [1, units], which are in two lanes of a warp: [1, units / 2, 1]."""
    rounds, pairs = of_units.shape[1] // threads, threads // 2
    buffer = p.alloc_shared("f32", (1, rounds * pairs, 2))
    p.store(p.reshape(of_units, (1, rounds * pairs, 2)), buffer, (0, 0, 0))
    p.barrier("warps", 1)
    both = local(1, rounds, 1) * spatial(1, pairs, 1) * replicated(2, 3) * local(1, 1, 2)
    return p.reshape(p.reduce(p.load(buffer, (0, 0, 0), both), 2), (1, rounds * pairs, 1))


def _largest_of_row(p: Program, numbers: Tile, threads: int) -> Tile:
    """The largest number of a tile [1, units, 16], in all threads: [1, 1, 1]."""
    rounds = numbers.shape[1] // threads
    of_units = p.reshape(p.reduce(numbers, 2, "max"), (rounds, threads))
    of_threads = p.reduce(of_units, 0, "max")
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
