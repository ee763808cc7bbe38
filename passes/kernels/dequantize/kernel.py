"""The dequantize kernel: the packed weight back to W [n, k] in the activation's type, for matmuls of many tokens.

A block turns 16 rows times a few steps of k into numbers, s * (decode(code) - z) in f32, rounded once. The fragments
go through shared memory so that rows leave in 16-byte pieces. Columns are addressed as (group, column of the group),
which drops the padding of padded groups on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.bindings import ir
from lowbit.dialect.formats.packing import BLOCK_K, ROWS, round_up
from lowbit.dialect.layouts.layout import MMA_M16N8K16_A, Layout, local, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.types import UNIT
from lowbit.passes.builder import Memory, Program, Tile
from lowbit.passes.kernels.decode.operands import spread
from lowbit.passes.kernels.scales_zeros import ScalesZeros
from lowbit.passes.lowering.recipes import compute_element, exponent

_WARPS = (4, 2, 1)


def dequantize(spec: MatmulSpec) -> ir.Module:
    """The tile program, in a module of its own: W [n, k] row-major in the act type at parameter "y"."""
    packing = spec.packing
    c = block_columns(spec)
    compute = compute_element(spec.dtype, spec.act)

    names = [*(slot.name for slot in spec.tensors if slot.role != "bias"), "y"]
    p = Program("dequantize", 32 * c.warps, (c.blocks, packing.row_blocks, 1), dict.fromkeys(names, "pointer"))
    with p:
        block, row_block = p.block_id(0), p.block_id(1)
        first_group, part = block // c.parts * c.groups, block % c.parts
        memory, layout, boundary = units_of(p, "codes", spec, c.warps)
        words = p.load(memory, (block * c.warps, row_block, 0), layout, boundary)
        fragments = spatial(1, c.warps) * local(1, packing.chunk // BLOCK_K) * MMA_M16N8K16_A
        codes = p.view(words, spec.dtype, fragments)
        numbers = p.cast(p.decode(codes, compute, exponent(spec.dtype, compute)), "f32")
        numbers = p.reshape(numbers, (ROWS, c.groups, c.width))
        tables = ScalesZeros(p, spec)
        rows = numbers.layout.reduce((2,))

        def table(name: str, kind: str) -> Tile:
            element = tables.element(kind)
            view = p.global_view(
                p[name],
                element,
                (ROWS, packing.groups, packing.row_blocks),
                (1, ROWS, packing.groups * ROWS),
            )
            return tables.as_f32(p.load(view, (0, first_group, row_block), rows, ("none", "clamp", "none")), kind)

        scale = table("scales", spec.scale)
        if spec.zero_kind:
            shift = p.mul(scale, tables.minus_zero(table("zeros", spec.zero_kind)))
            numbers = p.fma(numbers, tables.with_exponent(scale), shift)
        else:
            numbers = p.mul(numbers, tables.with_exponent(scale))
        tile = p.reshape(p.cast(numbers, spec.act), (ROWS, c.columns))
        staged = p.alloc_shared(spec.act, (ROWS, c.columns), (c.columns + spec.x.per_vector, 1))
        p.store(tile, staged, (0, 0))
        p.barrier()
        out = p.load(staged, (0, 0), spread((ROWS, c.columns), 32 * c.warps, spec.x.per_vector))
        view = p.global_view(
            p["y"],
            spec.act,
            (spec.n, spec.k // c.real_group, c.real_group),
            (spec.k, c.real_group, 1),
        )
        boundary = ("skip" if spec.n % ROWS else "none", "skip", "skip")
        out = p.reshape(out, (ROWS, c.groups, c.width))
        p.store(out, view, (row_block * ROWS, first_group, part * c.width), boundary)
    return p.module


@dataclass(frozen=True)
class BlockColumns:
    """How blocks cut k: `warps` chunks to a block, a chunk to a warp.

    width       columns of one group in a block, of `groups` groups; `parts` blocks share a group that is longer
    real_group  columns of a group in the weight, which may have fewer than in memory
    """

    warps: int
    columns: int
    width: int
    groups: int
    parts: int
    blocks: int
    real_group: int


def block_columns(spec: MatmulSpec) -> BlockColumns:
    """The widest blocks whose columns and groups divide one another."""
    packing, step = spec.packing, spec.packing.chunk
    group = packing.padded_group
    warps = next(w for w in _WARPS if group is None or group % (w * step) == 0 or (w * step) % group == 0)
    columns = warps * step
    padded_group = round_up(packing.padded_k, columns) if group is None else group
    width = min(padded_group, columns)
    groups, parts = columns // width, padded_group // width
    return BlockColumns(
        warps, columns, width, groups, parts, -(-packing.groups * parts // groups), spec.group_size or spec.k
    )


def units_of(p: Program, name: str, spec: MatmulSpec, warps: int) -> tuple[Memory, Layout, tuple[str, str, str]]:
    """Packed codes as units [chunks, row blocks, units x lanes], and the layout and boundary of `warps` chunks of a
    row block, a chunk to a warp."""
    packing = spec.packing
    units = packing.units * 32
    view = p.global_view(p[name], UNIT, (packing.chunks, packing.row_blocks, units), (units, packing.chunks * units, 1))
    layout = spatial(warps, 1, 1).local(1, 1, packing.units).spatial(1, 1, 32)
    return view, layout, ("clamp" if packing.chunks % warps else "none", "none", "none")
