"""The dequantize kernel: the packed weight back to W [n, k] in the activation's type, for matmuls of many tokens.

A block turns 16 rows times a few steps of k into numbers, s * (decode(code) - z) in f32, rounded once. The fragments
go through shared memory so that rows leave in 16-byte pieces. Columns are addressed as (group, column of the group),
which drops the padding of padded groups on the way.
"""

from __future__ import annotations

from typing import Any

from dialect.bindings import ir
from dialect.layout import MMA_M16N8K16_A, local, spatial
from dialect.packing import BLOCK_K, ROWS, round_up
from dialect.spec import MatmulSpec
from passes.builder import Program, Tile
from passes.recipes import compute_element, exponent
from passes.skinny import UNIT, Factors, spread

_WARPS = (4, 2, 1)


def dequantize(spec: MatmulSpec) -> ir.Module:
    """The tile program, in a module of its own: W [n, k] row-major in the act type at parameter "y"."""
    packing = spec.packing
    step = packing.chunk
    group = packing.padded_group
    warps = next(w for w in _WARPS if group is None or group % (w * step) == 0 or (w * step) % group == 0)
    columns = warps * step
    padded_group, real_group = (
        (round_up(packing.padded_k, columns), spec.k) if group is None else (group, packing.group)
    )
    width = min(padded_group, columns)  # columns of one group in a block
    groups = columns // width
    parts = padded_group // width  # blocks that share a group
    blocks = packing.groups * parts // groups + (packing.groups * parts % groups > 0)
    compute = compute_element(spec.dtype, spec.act)

    names = ["codes", "scales", *(["zeros"] if spec.zero_kind else []), "y"]
    p = Program("dequantize", 32 * warps, (blocks, packing.row_blocks, 1), dict.fromkeys(names, "pointer"))
    with p:
        block, row_block = p.block_id(0), p.block_id(1)
        first_group, part = block // parts * groups, block % parts
        codes = _codes(p, spec, warps, block * warps, row_block)
        numbers = p.cast(p.decode(codes, compute, exponent(spec.dtype, compute)), "f32")
        numbers = p.reshape(numbers, (ROWS, groups, width))
        factors = Factors(p, spec)
        rows = numbers.layout.reduce((2,))

        def factor(name: str, kind: str) -> Tile:
            element = factors.element(kind)
            view = p.global_view(
                p[name],
                element,
                (ROWS, packing.groups, packing.row_blocks),
                (1, ROWS, packing.groups * ROWS),
            )
            return factors.as_f32(p.load(view, (0, first_group, row_block), rows, ("none", "clamp", "none")), kind)

        scale = factor("scales", spec.scale)
        if spec.zero_kind:
            shift = p.mul(scale, factors.minus_zero(factor("zeros", spec.zero_kind)))
            numbers = p.fma(numbers, factors.unfold(scale), shift)
        else:
            numbers = p.mul(numbers, factors.unfold(scale))
        tile = p.reshape(p.cast(numbers, spec.act), (ROWS, columns))
        staged = p.alloc_shared(spec.act, (ROWS, columns), (columns + 8, 1))
        p.store(tile, staged, (0, 0))
        p.barrier()
        out = p.load(staged, (0, 0), spread((ROWS, columns), 32 * warps, 8))
        view = p.global_view(
            p["y"],
            spec.act,
            (spec.n, spec.k // (real_group or 1), real_group or 1),
            (spec.k, real_group or 1, 1),
        )
        boundary = ("skip" if spec.n % ROWS else "none", "skip", "skip")
        out = p.reshape(out, (ROWS, groups, width))
        p.store(out, view, (row_block * ROWS, first_group, part * width), boundary)
    return p.module


def _codes(p: Program, spec: MatmulSpec, warps: int, step: Any, row_block: Any) -> Tile:
    """The codes of one row block and `warps` chunks, a chunk to a warp: [16, warps * chunk]."""
    packing = spec.packing
    units = packing.units * 32
    view = p.global_view(
        p["codes"], UNIT, (packing.chunks, packing.row_blocks, units), (units, packing.chunks * units, 1)
    )
    layout = spatial(warps, 1, 1).local(1, 1, packing.units).spatial(1, 1, 32)
    boundary = ("clamp" if packing.chunks % warps else "none", "none", "none")
    words = p.load(view, (step, row_block, 0), layout, boundary)
    fragments = spatial(1, warps) * local(1, packing.chunk // BLOCK_K) * MMA_M16N8K16_A
    return p.view(words, spec.dtype, fragments)
