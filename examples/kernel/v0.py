"""v0: the definition, by one warp.

A block is one warp and computes 16 rows of the weight for up to 8 tokens. Everything comes straight from device memory,
and every weight is scaled before it is multiplied:

    for group of 128 columns:
        w    = scale * decode(codes)     f16, [16, 128]
        sums = sums + w x^T              f32, [16, 8]
    store sums
"""

from __future__ import annotations

from examples.kernel.problem import GROUP, PARAMS, WEIGHT
from lowbit.dialect.bindings import ir
from lowbit.dialect.layouts.fragments import MMA_M16N8_D, MMA_M16N8K16_A, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import local
from lowbit.dialect.types import UNIT
from lowbit.passes.builder import Program

# What mma.m16n8k16 wants: W as its operand A, x as its operand B; and what it leaves. Eight of them make a group.
W_LAYOUT = local(1, GROUP // 16) * MMA_M16N8K16_A
X_LAYOUT = local(1, GROUP // 16) * MMA_M16N8K16_B_NK
Y_LAYOUT = MMA_M16N8_D
SCALE_LAYOUT = W_LAYOUT.reduce((1,))  # the scale of every row that a thread has weights of
# 64 words of 16 bytes hold 16 rows x 128 columns of 4-bit codes; each of 32 lanes loads two of them.
WORD_LAYOUT = local(1, 1, 2).spatial(1, 1, 32)


def program(n: int, k: int) -> ir.Module:
    """The kernel for n rows, a multiple of 16, and k columns, a multiple of 128."""
    blocks, groups = n // 16, k // GROUP
    p = Program("matmul_v0", 32, (blocks, 1, 1), PARAMS)
    with p:
        codes = p.global_view(p["codes"], UNIT, (blocks, groups, 64))
        scales = p.global_view(p["scales"], "f16", (blocks, groups, 16))
        x = p.global_view(p["x"], "f16", (-1, k), sizes=[p["m"]])
        y = p.global_view(p["y"], "f16", (n, -1), strides=(1, n), sizes=[p["m"]])  # in memory [m, n]
        block = p.block_id(0)

        with p.loop(0, groups, [p.constant(0.0, "f32", Y_LAYOUT)]) as loop:
            words = p.load(codes, (block, loop.index, 0), WORD_LAYOUT)
            numbers = p.decode(p.view(words, WEIGHT, W_LAYOUT), "f16")
            scale = p.load(scales, (block, loop.index, 0), SCALE_LAYOUT.reshape((1, 1, 16)))
            weights = p.mul(numbers, p.reshape(scale, (16, 1)))
            # Tokens from m to 7 read as zero.
            activations = p.load(x, (0, loop.index * GROUP), X_LAYOUT, boundary=("zero", "none"))
            loop.results = [p.mma(weights, activations, loop.carried[0])]

        p.store(p.cast(loop.carried[0], "f16"), y, (block * 16, 0), boundary=("none", "skip"))
    return p.module
