"""v4: every shape, and no gap between kernels.

*Edges.* A boundary word per dim says what an access does at the end of its view. The store of y skips rows beyond n,
and groups beyond k read as zero, codes as well as activations, so that they add nothing. Only dims that do not divide
get such a word: a shape that fits pays nothing.

*Overlap.* A model launches one kernel after the other, and at 10 microseconds each their starts and ends count. On
Hopper a kernel may start while the one before is still running (programmatic dependent launch), if it touches nothing
that one writes or reads. Weights and scales don't depend on the kernel before, so their copies come first, x after
`grid_wait`. `grid_launch_dependents` lets the next kernel do the same with ours. On older GPUs both are nothing.

    for round:                               copies run 3 rounds ahead
        copy codes, scales of the round
        wait for the kernel before           once
        copy x of the round
        wait
        product = decode(codes) x^T
        sums    = sums + scale * product
    reduce sums over the warps, store [16, 8]
"""

from __future__ import annotations

from examples.kernel.problem import GROUP, PARAMS, TOKENS, WEIGHT
from examples.kernel.v2 import SCALE_LAYOUT, W_LAYOUT, WARPS, WORD_LAYOUT, X_LAYOUT, Y_LAYOUT, sum_of_warps
from examples.kernel.v3 import NUM_STAGES, SCALE_COPY, X_COPY, X_ROW
from lowbit.dialect.bindings import ir
from lowbit.dialect.types import UNIT
from lowbit.passes.builder import Program


def program(n: int, k: int) -> ir.Module:
    """The kernel for any n rows and k columns, a multiple of 128."""
    blocks, groups = -(-n // 16), k // GROUP
    rounds = -(-groups // WARPS)
    beyond_k = "zero" if groups % WARPS else "none"
    beyond_n = "skip" if n % 16 else "none"
    p = Program("matmul_v4", 32 * WARPS, (blocks, 1, 1), PARAMS)
    with p:
        codes = p.global_view(p["codes"], UNIT, (groups, blocks, 64), strides=(64, groups * 64, 1))
        scales = p.global_view(p["scales"], "f16", (groups, blocks, 16), strides=(16, groups * 16, 1))
        x = p.global_view(p["x"], "f16", (groups, -1, GROUP), strides=(GROUP, k, 1), sizes=[p["m"]])
        codes_buffer = p.alloc_shared(UNIT, (WARPS, 1, 64))
        scales_buffer = p.alloc_shared("f16", (WARPS, 1, 16))
        x_buffer = p.alloc_shared("f16", (WARPS, TOKENS, GROUP), strides=(TOKENS * X_ROW, X_ROW, 1))
        block = p.block_id(0)

        p.grid_launch_dependents()
        zero = p.constant(0.0, "f32", Y_LAYOUT)
        with p.loop(0, rounds, [zero]) as loop:
            with p.pipeline(NUM_STAGES, scope="warps"):
                group = loop.index * WARPS
                p.copy_async(codes, codes_buffer, (group, block, 0), WORD_LAYOUT, (beyond_k, "none", "none"))
                p.copy_async(scales, scales_buffer, (group, block, 0), SCALE_COPY, (beyond_k, "none", "none"))
                p.grid_wait()
                p.copy_async(x, x_buffer, (group, 0, 0), X_COPY, (beyond_k, "skip", "none"))
            words = p.load(codes_buffer, (0, 0, 0), WORD_LAYOUT)
            numbers = p.decode(p.view(words, WEIGHT, W_LAYOUT), "f16")
            product = p.mma(numbers, p.load_matrix(x_buffer, p["m"], X_LAYOUT), zero)
            scale = p.load(scales_buffer, (0, 0, 0), SCALE_LAYOUT.reshape((WARPS, 1, 16)))
            scale = p.cast(p.reshape(scale, (WARPS, 16, 1)), "f32")
            loop.results = [p.fma(product, scale, loop.carried[0])]

        p.barrier()
        p.free_shared(codes_buffer, scales_buffer, x_buffer)
        y = p.global_view(p["y"], "f16", (n, -1), strides=(1, n), sizes=[p["m"]])
        total = sum_of_warps(p, loop.carried[0])
        p.store(p.cast(total, "f16"), y, (block * 16, 0), boundary=(beyond_n, "skip"))
    return p.module
