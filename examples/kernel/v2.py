"""v2: eight warps share k.

One warp per block leaves a multiprocessor idle: there are few blocks, and a warp waits for each of its loads. Eight
warps have eight times the loads under way. In a round each takes a group of its own; a tile gets a leading dim, the
warp, and `spatial(8, 1, 1)` in its layout. At the end their sums are added up through shared memory:

    for round:                               warp w has group 8 * round + w
        product = decode(codes) x^T          f32, [8, 16, 8]
        sums    = sums + scale * product
    reduce sums over the warps, store [16, 8]
"""

from __future__ import annotations

from examples.kernel.problem import GROUP, PARAMS, TOKENS, WEIGHT
from lowbit.dialect.bindings import ir
from lowbit.dialect.layouts.fragments import MMA_M16N8_D, MMA_M16N8K16_A, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import replicated, spatial
from lowbit.dialect.types import UNIT
from lowbit.passes.builder import Program, Tile

WARPS = 8
_WARP = spatial(WARPS, 1, 1)
W_LAYOUT = _WARP.local(1, 1, GROUP // 16) * MMA_M16N8K16_A.unsqueeze(0)
X_LAYOUT = _WARP.local(1, 1, GROUP // 16) * MMA_M16N8K16_B_NK.unsqueeze(0)
Y_LAYOUT = _WARP * MMA_M16N8_D.unsqueeze(0)
SCALE_LAYOUT = Y_LAYOUT.reduce((2,))
WORD_LAYOUT = _WARP.local(1, 1, 2).spatial(1, 1, 32)
# To add up: 128 threads have all 8 sums of an element each; the other 128 do the same.
REDUCE_LAYOUT = replicated(2, 3).spatial(1, 16, TOKENS).local(WARPS, 1, 1)


def program(n: int, k: int) -> ir.Module:
    """The kernel for n rows, a multiple of 16, and k columns, a multiple of 8 * 128."""
    blocks, groups = n // 16, k // GROUP
    p = Program("matmul_v2", 32 * WARPS, (blocks, 1, 1), PARAMS)
    with p:
        # The views have the group first, as the tiles have the warp first.
        codes = p.global_view(p["codes"], UNIT, (groups, blocks, 64), strides=(64, groups * 64, 1))
        scales = p.global_view(p["scales"], "f16", (groups, blocks, 16), strides=(16, groups * 16, 1))
        x = p.global_view(p["x"], "f16", (groups, -1, GROUP), strides=(GROUP, k, 1), sizes=[p["m"]])
        block = p.block_id(0)

        zero = p.constant(0.0, "f32", Y_LAYOUT)
        with p.loop(0, groups // WARPS, [zero]) as loop:
            group = loop.index * WARPS
            words = p.load(codes, (group, block, 0), WORD_LAYOUT)
            numbers = p.decode(p.view(words, WEIGHT, W_LAYOUT), "f16")
            activations = p.load(x, (group, 0, 0), X_LAYOUT, boundary=("none", "zero", "none"))
            product = p.mma(numbers, activations, zero)
            scale = p.load(scales, (group, block, 0), SCALE_LAYOUT.reshape((WARPS, 1, 16)))
            scale = p.cast(p.reshape(scale, (WARPS, 16, 1)), "f32")
            loop.results = [p.fma(product, scale, loop.carried[0])]

        y = p.global_view(p["y"], "f16", (n, -1), strides=(1, n), sizes=[p["m"]])
        total = sum_of_warps(p, loop.carried[0])
        p.store(p.cast(total, "f16"), y, (block * 16, 0), boundary=("none", "skip"))
    return p.module


def sum_of_warps(p: Program, sums: Tile) -> Tile:
    """[16, 8] from [8, 16, 8], through shared memory."""
    row = 16 + 4  # the 4 keep the lanes of a fragment in different banks
    buffer = p.alloc_shared("f32", (WARPS, 16, TOKENS), strides=(row * TOKENS, 1, row))
    p.store(sums, buffer, (0, 0, 0))
    p.barrier()
    return p.reshape(p.reduce(p.load(buffer, (0, 0, 0), REDUCE_LAYOUT), 0), (16, TOKENS))
