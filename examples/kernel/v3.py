"""v3: a copy pipeline.

In v2 a warp asks for its words, waits, computes, and only then asks again. Asynchronous copies to shared memory need no
registers while they are under way, so four rounds of them may be: `p.pipeline(4)` makes the pass `pipeline-copies` turn
the loop below into one that starts the copies of round i + 3 while round i computes, with four buffers for each one.

The weight needs no more than that: a lane reads back the very words it has copied. Activations are shared by
all lanes of a warp, so they are copied once in rows and come out as fragments with ldmatrix.

    for round:                               copies run 3 rounds ahead
        copy codes, scales, x of the round
        wait
        product = decode(codes) x^T
        sums    = sums + scale * product
    reduce sums over the warps, store [16, 8]
"""

from __future__ import annotations

from examples.kernel.problem import GROUP, PARAMS, TOKENS, WEIGHT
from examples.kernel.v2 import SCALE_LAYOUT, W_LAYOUT, WARPS, WORD_LAYOUT, X_LAYOUT, Y_LAYOUT, sum_of_warps
from lowbit.dialect.bindings import ir
from lowbit.dialect.layouts.layout import spatial
from lowbit.dialect.types import UNIT
from lowbit.passes.builder import Program

NUM_STAGES = 4
# A thread copies 16 bytes at a time: 8 f16. A warp copies its two rows of 128 at once, and its 16 scales by two lanes.
X_COPY = spatial(WARPS, 1, 1).local(1, TOKENS // 2, 1).spatial(1, 2, 16).local(1, 1, 8)
SCALE_COPY = spatial(WARPS, 1, 1).replicated(16).spatial(1, 1, 2).local(1, 1, 8)
X_ROW = GROUP + 8  # the 8 spread the rows that ldmatrix reads over all banks


def program(n: int, k: int) -> ir.Module:
    """The kernel for n rows, a multiple of 16, and k columns, a multiple of 8 * 128."""
    blocks, groups = n // 16, k // GROUP
    p = Program("matmul_v3", 32 * WARPS, (blocks, 1, 1), PARAMS)
    with p:
        codes = p.global_view(p["codes"], UNIT, (groups, blocks, 64), strides=(64, groups * 64, 1))
        scales = p.global_view(p["scales"], "f16", (groups, blocks, 16), strides=(16, groups * 16, 1))
        x = p.global_view(p["x"], "f16", (groups, -1, GROUP), strides=(GROUP, k, 1), sizes=[p["m"]])
        codes_buffer = p.alloc_shared(UNIT, (WARPS, 1, 64))
        scales_buffer = p.alloc_shared("f16", (WARPS, 1, 16))
        x_buffer = p.alloc_shared("f16", (WARPS, TOKENS, GROUP), strides=(TOKENS * X_ROW, X_ROW, 1))
        block = p.block_id(0)

        zero = p.constant(0.0, "f32", Y_LAYOUT)
        with p.loop(0, groups // WARPS, [zero]) as loop:
            # A warp reads what its own lanes have copied: no need to wait for other warps.
            with p.pipeline(NUM_STAGES, scope="warps"):
                group = loop.index * WARPS
                p.copy_async(codes, codes_buffer, (group, block, 0), WORD_LAYOUT)
                p.copy_async(scales, scales_buffer, (group, block, 0), SCALE_COPY)
                p.copy_async(x, x_buffer, (group, 0, 0), X_COPY, boundary=("none", "skip", "none"))
            words = p.load(codes_buffer, (0, 0, 0), WORD_LAYOUT)
            numbers = p.decode(p.view(words, WEIGHT, W_LAYOUT), "f16")
            product = p.mma(numbers, p.load_matrix(x_buffer, p["m"], X_LAYOUT), zero)
            scale = p.load(scales_buffer, (0, 0, 0), SCALE_LAYOUT.reshape((WARPS, 1, 16)))
            scale = p.cast(p.reshape(scale, (WARPS, 16, 1)), "f32")
            loop.results = [p.fma(product, scale, loop.carried[0])]

        p.barrier()
        p.free_shared(codes_buffer, scales_buffer, x_buffer)  # their place is free for the sums
        y = p.global_view(p["y"], "f16", (n, -1), strides=(1, n), sizes=[p["m"]])
        total = sum_of_warps(p, loop.carried[0])
        p.store(p.cast(total, "f16"), y, (block * 16, 0), boundary=("none", "skip"))
    return p.module
