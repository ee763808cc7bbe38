"""The prepack kernel: codes [n, k] into the order in which the kernels read them (`dialect.formats.packing`).

`pylib.weights.packed.pack` does the same with torch, on any device; this is for programs without it. A block takes 16
rows of a few chunks. A lane loads the eight codes that it owns of every 16 x 16 block and shifts them into its words.

Padding is filled with zero bits, which need not decode to 0: the kernels multiply padding by x = 0.
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.formats.packing import BLOCK_K, ROWS
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A
from lowbit.dialect.layouts.layout import local, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program
from lowbit.passes.kernels.dequantize.kernel import block_columns, units_of


def prepack(spec: MatmulSpec) -> ir.Module:
    """The tile program, in a module of its own: parameters "codes" (i8 [n, k]) and "packed"."""
    packing = spec.packing
    c = block_columns(spec)
    p = Program(
        "prepack", 32 * c.warps, (c.blocks, packing.row_blocks, 1), dict.fromkeys(("codes", "packed"), "pointer")
    )
    with p:
        block, row_block = p.block_id(0), p.block_id(1)
        view = p.global_view(
            p["codes"], "i8", (spec.n, spec.k // c.real_group, c.real_group), (spec.k, c.real_group, 1)
        )
        fragments = spatial(1, c.warps) * local(1, packing.chunk // BLOCK_K) * MMA_M16N8K16_A
        first_group, column = block // c.parts * c.groups, block % c.parts * c.width
        numbers = p.load(
            view,
            (row_block * ROWS, first_group, column),
            fragments.reshape((ROWS, c.groups, c.width)),
            ("zero", "zero", "zero"),
        )
        codes = p.encode(p.reshape(numbers, (ROWS, c.columns)), spec.dtype)
        memory, layout, boundary = units_of(p, "packed", spec, c.warps)
        skip = tuple("skip" if word == "clamp" else word for word in boundary)
        p.store(p.view(codes, memory.type.element, layout), memory, (block * c.warps, row_block, 0), skip)
    return p.module
