"""The dequantize kernel: the packed weight back to W [n, k] in the activation's type, for matmuls of many tokens.

A block turns 16 rows times a few steps of k into numbers, s * (decode(code) - z) in f32, rounded once. The fragments
go through shared memory so that rows leave in 16-byte pieces. Outliers are added there, in f32, before the sum is
rounded. Columns are addressed as (group, column of the group), which drops the padding of padded groups on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.bindings import ir
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.packing import BLOCK_K, ROWS, round_up
from lowbit.dialect.formats.recipes import compute_element, exponent
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A
from lowbit.dialect.layouts.layout import Layout, local, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.types import UNIT
from lowbit.passes.builder import Memory, Program, Scalar, Tile
from lowbit.passes.kernels.copy_layout import copy_layout
from lowbit.passes.kernels.scales.conversion import ScaleConversion

_WARPS = (4, 2, 1)


def dequantize(spec: MatmulSpec) -> ir.Module:
    """The tile program, in a module of its own: W [n, k] row-major in the act type at parameter "y"."""
    packing = spec.packing
    c = block_columns(spec)
    names = [*(slot.name for slot in spec.tensors if slot.role != "bias"), "y"]
    p = Program("dequantize", 32 * c.warps, (c.blocks, packing.row_blocks, 1), dict.fromkeys(names, "pointer"))
    with p:
        block, row_block = p.block_id(0), p.block_id(1)
        first_group, part = block // c.parts * c.groups, block % c.parts
        numbers = _decoded(p, spec, c, block, row_block)
        numbers = _scaled(p, spec, c, numbers, first_group, row_block)
        if spec.outliers:
            rows = _with_outliers(p, spec, c, numbers, block, row_block)
        else:
            rows = _as_rows(p, spec, c, p.cast(numbers, spec.act))
        y = p.global_view(
            p["y"],
            spec.act,
            (spec.n, spec.k // c.real_group, c.real_group),
            (spec.k, c.real_group, 1),
        )
        boundary = ("skip" if spec.n % ROWS else "none", "skip", "skip")
        rows = p.reshape(rows, (ROWS, c.groups, c.width))
        p.store(rows, y, (row_block * ROWS, first_group, part * c.width), boundary)
    return p.module


def _decoded(p: Program, spec: MatmulSpec, c: BlockColumns, block: Scalar, row_block: Scalar) -> Tile:
    """Returns decode(code) of a block [16, groups, columns of a group] in f32."""
    compute = compute_element(spec.dtype, spec.act)
    memory, layout, boundary = units_of(p, "codes", spec, c.warps)
    words = p.load(memory, (block * c.warps, row_block, 0), layout, boundary)
    fragments = spatial(1, c.warps) * local(1, spec.packing.chunk // BLOCK_K) * MMA_M16N8K16_A
    codes = p.view(words, spec.dtype, fragments)
    numbers = p.cast(p.decode(codes, compute, exponent(spec.dtype, compute)), "f32")
    return p.reshape(numbers, (ROWS, c.groups, c.width))


def _scaled(
    p: Program, spec: MatmulSpec, c: BlockColumns, numbers: Tile, first_group: Scalar, row_block: Scalar
) -> Tile:
    """Returns s * (number - z) or s * number + o in f32. With an offset the product is rounded before the sum, not
    fused: what `PackedWeight.dequantize` gives."""
    packing, convert = spec.packing, ScaleConversion(p, spec)
    rows = numbers.layout.reduce((2,))

    def table(name: str) -> Tile:
        shape, strides = (ROWS, packing.groups, packing.row_blocks), (1, ROWS, packing.groups * ROWS)
        slot = spec.slot(name)
        view = p.global_view(p[slot.tensor], convert.element(slot.storage), shape, strides)
        loaded = p.load(view, (0, first_group, row_block), rows, ("none", "clamp", "none"))
        return convert.two_level(slot, loaded, second_level)

    def second_level(name: str, bilevel: Bilevel) -> Tile:
        slot = spec.slot(name)
        _, blocks, lanes = slot.shape
        shape, strides = (ROWS, packing.groups, packing.row_blocks), (int(lanes == ROWS), lanes, blocks * lanes)
        view = p.global_view(p[name], convert.element(slot.storage), shape, strides, (1, bilevel.groups, 1))
        loaded = p.load(view, (0, first_group, row_block), rows, ("none", "clamp", "none"))
        return convert.as_f32(loaded, slot.storage)

    def scaled_by_row(tile: Tile) -> Tile:
        if not spec.row_scales:
            return tile
        view = p.global_view(p["row_scales"], "f32", (ROWS, c.groups, packing.row_blocks), (1, 0, ROWS))
        return p.mul(tile, p.load(view, (0, 0, row_block), rows))

    scale = scaled_by_row(table("scales"))
    if spec.offset_kind:
        product = p.mul(numbers, convert.with_exponent(scale))
        return p.add(product, scaled_by_row(table("offsets")))
    if not spec.zero_kind:
        return p.mul(numbers, convert.with_exponent(scale))
    shift = p.mul(scale, convert.minus_zero(table("zeros")))
    return p.fma(numbers, convert.with_exponent(scale), shift)


def _as_rows(p: Program, spec: MatmulSpec, c: BlockColumns, numbers: Tile) -> Tile:
    """Returns a block [16, columns] with neighbours along the rows in each thread, by way of shared memory."""
    vector = ELEMENTS[spec.act].per_vector
    staged = p.alloc_shared(spec.act, (ROWS, c.columns), (c.columns + vector, 1))
    p.store(p.reshape(numbers, (ROWS, c.columns)), staged, (0, 0))
    p.barrier()
    return p.load(staged, (0, 0), copy_layout((ROWS, c.columns), 32 * c.warps, vector))


def _with_outliers(
    p: Program, spec: MatmulSpec, c: BlockColumns, numbers: Tile, block: Scalar, row_block: Scalar
) -> Tile:
    """Returns the same with outliers added in f32, and then rounded."""
    group = c.real_group
    table = p.global_view(p["outliers"], "i32", (spec.packing.row_blocks + 1,))
    staged = p.alloc_shared("f32", (ROWS, c.columns), (c.columns + spec.x.per_vector, 1))
    p.store(p.reshape(numbers, (ROWS, c.columns)), staged, (0, 0))
    p.barrier()
    p.add_outliers(table, staged, row_block, block * c.columns, group, spec.packing.padded_group or group)
    p.barrier()
    return p.cast(p.load(staged, (0, 0), copy_layout((ROWS, c.columns), 32 * c.warps, spec.x.per_vector)), spec.act)


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
