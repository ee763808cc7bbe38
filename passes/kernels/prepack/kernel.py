"""The prepack kernel: codes [n, k] into the order in which the kernels read them (`dialect.formats.packing`).

`pylib.weights.packed.pack` does the same with torch, on any device; this is for programs without it. A block takes 16
rows of a few chunks. A lane loads the eight codes that it owns of every 16 x 16 block and shifts them into its words.
Of a gated weight 8 rows are of the gate, and 8 of what it multiplies (`dialect.epilogue`).

Padding is filled with zero bits, which need not decode to 0: the kernels multiply padding by x = 0.
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.epilogue import HALF
from lowbit.dialect.formats.packing import BLOCK_K, ROWS
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A
from lowbit.dialect.layouts.layout import Layout, local, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.dequantize.kernel import BlockColumns, block_columns, units_of


def prepack(spec: MatmulSpec) -> ir.Module:
    """The tile program, in a module of its own: parameters "codes" (i8 [n, k]) and "packed"."""
    packing = spec.packing
    c = block_columns(spec)
    p = Program(
        "prepack", 32 * c.warps, (c.blocks, packing.row_blocks, 1), dict.fromkeys(("codes", "packed"), "pointer")
    )
    with p:
        block, row_block = p.block_id(0), p.block_id(1)
        place = row_block, block // c.parts * c.groups, block % c.parts * c.width
        numbers = p.reshape(_numbers(p, spec, c, *place), (ROWS, c.columns))
        codes = p.encode(numbers, spec.dtype, _there(p, spec, c, *place))
        memory, layout, boundary = units_of(p, "packed", spec, c.warps)
        skip = tuple("skip" if word == "clamp" else word for word in boundary)
        p.store(p.view(codes, memory.type.element, layout), memory, (block * c.warps, row_block, 0), skip)
    return p.module


def _numbers(p: Program, spec: MatmulSpec, c: BlockColumns, row_block: Scalar, group: Scalar, column: Scalar) -> Tile:
    """Returns the codes of a block as they are given, a lane those that it owns: [rows, groups, columns of a group]."""
    groups, tile = (spec.k // c.real_group, c.real_group), (c.groups, c.width)
    if not spec.is_gated:
        view = p.global_view(p["codes"], "i8", (spec.n, *groups), (spec.k, c.real_group, 1))
        place = row_block * ROWS, group, column
        return p.load(view, place, _fragments(spec, c).reshape((ROWS, *tile)), ("zero", "zero", "zero"))
    of_half = spec.n // spec.experts // 2
    view = p.global_view(p["codes"], "i8", (2 * spec.experts, of_half, *groups))
    place = row_block // (of_half // HALF) * 2, row_block % (of_half // HALF) * HALF, group, column
    return p.load(view, place, _fragments(spec, c).reshape((2, HALF, *tile)), ("none", "none", "zero", "zero"))


def _fragments(spec: MatmulSpec, c: BlockColumns) -> Layout:
    """Returns which thread has which code of a block."""
    return spatial(1, c.warps) * local(1, spec.packing.chunk // BLOCK_K) * MMA_M16N8K16_A


def _there(
    p: Program, spec: MatmulSpec, c: BlockColumns, row_block: Scalar, group: Scalar, column: Scalar
) -> Tile | None:
    """Returns where a block has codes, not padding; None where zero bits are what padding becomes by itself."""
    padded = spec.n % ROWS or spec.packing.padded_k != spec.k
    if spec.dtype.kind != "int" or not padded:
        return None
    layout = _fragments(spec, c).reshape((ROWS, c.groups, c.width))
    inside = p.constant(1, "i32", layout)
    for dim, left in enumerate((spec.n - row_block * ROWS, spec.k // c.real_group - group, c.real_group - column)):
        inside = p.select(p.iota(dim, layout) < p.splat(left, "i32", layout), inside, 0)
    return p.reshape(inside, (ROWS, c.columns)) > 0
