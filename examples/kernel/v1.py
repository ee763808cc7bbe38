"""v1: scale late.

Within a group all weights of a row have the same scale, so the products of codes are added up as they are, and the sum
is scaled: 4 multiplications per thread and group in place of 32, in f32 in place of f16, so that no weight is rounded.

    for group of 128 columns:
        product = decode(codes) x^T          f32, [16, 8], from zero
        sums    = sums + scale * product
    store sums
"""

from __future__ import annotations

from examples.kernel.problem import GROUP, PARAMS, WEIGHT
from examples.kernel.v0 import W_LAYOUT, WORD_LAYOUT, X_LAYOUT, Y_LAYOUT
from lowbit.dialect.bindings import ir
from lowbit.dialect.types import UNIT
from lowbit.passes.builder import Program

SCALE_LAYOUT = Y_LAYOUT.reduce((1,))  # the scale of every row that a thread has sums of


def program(n: int, k: int) -> ir.Module:
    """The kernel for n rows, a multiple of 16, and k columns, a multiple of 128."""
    blocks, groups = n // 16, k // GROUP
    p = Program("matmul_v1", 32, (blocks, 1, 1), PARAMS)
    with p:
        codes = p.global_view(p["codes"], UNIT, (blocks, groups, 64))
        scales = p.global_view(p["scales"], "f16", (blocks, groups, 16))
        x = p.global_view(p["x"], "f16", (-1, k), sizes=[p["m"]])
        y = p.global_view(p["y"], "f16", (n, -1), strides=(1, n), sizes=[p["m"]])
        block = p.block_id(0)

        zero = p.constant(0.0, "f32", Y_LAYOUT)
        with p.loop(0, groups, [zero]) as loop:
            words = p.load(codes, (block, loop.index, 0), WORD_LAYOUT)
            numbers = p.decode(p.view(words, WEIGHT, W_LAYOUT), "f16")
            activations = p.load(x, (0, loop.index * GROUP), X_LAYOUT, boundary=("zero", "none"))
            product = p.mma(numbers, activations, zero)
            scale = p.load(scales, (block, loop.index, 0), SCALE_LAYOUT.reshape((1, 1, 16)))
            scale = p.cast(p.reshape(scale, (16, 1)), "f32")
            loop.results = [p.fma(product, scale, loop.carried[0])]

        p.store(p.cast(loop.carried[0], "f16"), y, (block * 16, 0), boundary=("none", "skip"))
    return p.module
