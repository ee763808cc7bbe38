"""The kernel that brings a weight, which the dequantize kernel has written in the order of memory, into its own order:
rows of gated weights, and columns where they are permuted, of each expert for itself.

    for each row g of the weight:     s = the row of memory that has it (`dialect.epilogue`)
        y[g, permutation[e, j]] = stored[s, j]       or y[g, j], of columns in order

A block takes a row, piece by piece. Columns that are permuted are written one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowbit.dialect.epilogue import HALF
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import local, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.permute.family import permute_spec
from lowbit.passes.kernels.permute.schedule import piece_columns

if TYPE_CHECKING:
    from lowbit.passes.builder import Program, Scalar

_THREADS = 256


def restore_program(spec: MatmulSpec) -> Program:
    """Returns the program for weights of a spec that is gated, permuted, or both.

    Parameters: stored [n, k], y [n, k], both in the act type, and of permuted columns permutation i32 [experts, k].
    """
    from lowbit.passes.builder import Program

    names = ("stored", *(["permutation"] if spec.permuted else []), "y")
    p = Program("restore", _THREADS, (spec.n, 1, 1), dict.fromkeys(names, "pointer"))
    with p:
        width = piece_columns(permute_spec(spec.k, spec.act))
        pieces = spec.k // width
        with p.loop(0, -(-pieces // _THREADS)) as loop:
            _restore(p, spec, width, loop.index * _THREADS)
    return p


def _restore(p: Program, spec: MatmulSpec, width: int, first_piece: Scalar) -> None:
    """Writes pieces of the block's row, one of each thread."""
    row, pieces, of_expert = p.block_id(0), spec.k // width, spec.n // spec.experts
    mine = spatial(1, _THREADS, 1) * local(1, 1, width)
    stored = p.global_view(p["stored"], spec.act, (spec.n, pieces, width))
    numbers = p.load(stored, (_stored_row(spec, row), first_piece, 0), mine, ("none", "zero", "none"))
    if not spec.permuted:
        y = p.global_view(p["y"], spec.act, (spec.n, pieces, width))
        p.store(numbers, y, (row, first_piece, 0), ("none", "skip", "none"))
        return
    orders = p.global_view(p["permutation"], "i32", (spec.experts, pieces, width))
    columns = p.load(orders, (row // of_expert, first_piece, 0), mine, ("none", "zero", "none"))
    there = p.iota(1, mine) < p.splat(pieces - first_piece, "i32", mine)
    y = p.global_view(p["y"], spec.act, (spec.n, spec.k))
    p.scatter(numbers, y, (row,), p.select(there, columns, spec.k))  # what is beyond the row is left out


def _stored_row(spec: MatmulSpec, row: Scalar) -> Scalar:
    """Returns the row of memory that has a row of the weight."""
    if not spec.is_gated:
        return row
    of_expert = spec.n // spec.experts
    of_half, local_row = of_expert // 2, row % of_expert
    in_half = local_row % of_half
    place = in_half // HALF * ROWS + local_row // of_half * HALF + in_half % HALF
    return row // of_expert * of_expert + place
