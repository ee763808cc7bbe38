"""A kernel written by hand: y [m, n] = x [m, k] W^T, with x in f16 and W [n, k] of 6-bit signed integers.

    python examples/f16_i6_matmul.py

`lowbit.compile` makes such kernels from a `MatmulSpec`. This one is written with the tile program builder, in the
manner of Tilus (Ding et al., 2025), whose example it is: a program says what one block does with whole tiles, and
every tile says in its layout which thread has which element. Nowhere is there a thread index or a bit operation.

It is the plainest kernel that runs on the tensor cores: no shared memory, no pipeline, no scales.
`passes/kernels/streaming/kernel.py` has all of these, in the same language.
"""

from __future__ import annotations

import numpy as np
import torch

import lowbit
from lowbit.dialect.bindings import ir
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.layouts.fragments import MMA_M16N8_D, MMA_M16N8K16_A, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import local
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program
from lowbit.pylib.weights.packed import pack

R = 2  # a block computes 16 * R rows of the weight ...
T = 2  # ... for 8 * T tokens


def program(n: int, k: int) -> ir.Module:
    """The kernel for a weight of this size, n a multiple of 16 * R and k of a chunk (128 columns), and for any m."""
    # How 6-bit codes sit in memory. A chunk is the least number of columns whose codes are whole 16-byte words for
    # every lane of a warp: for 6 bits 128 columns, with which a lane has 64 codes of 16 rows, or three words.
    i6 = MatmulSpec(n, k, "i6").packing
    rows, tokens, chunk = 16 * R, 8 * T, i6.chunk
    words = i6.units * 32  # of 16 bytes, per 16 rows and chunk

    # Layouts are products of atoms: local(a, b) is a * b elements in one thread, spatial(a, b) one element in each
    # of a * b threads. These are what mma.m16n8k16 wants: W as its operand A, 16 rows by 16 columns to an
    # instruction; x as its B, 8 tokens by 16 columns; and what it leaves: 16 rows by 8 tokens of sums.
    w_layout = local(R, chunk // 16) * MMA_M16N8K16_A
    x_layout = local(T, chunk // 16) * MMA_M16N8K16_B_NK
    y_layout = local(R, T) * MMA_M16N8_D
    # The packed words: each lane loads three of every 16 rows, next to its neighbours' (coalesced).
    word_layout = local(R, 1, words // 32).spatial(1, 1, 32)

    # One warp to a block; blocks side by side along n and along m, as many as m needs when the kernel is called.
    # Parameters by name: how to start the kernel is part of what the compiler returns.
    grid = (n // rows, f"ceil(m / {tokens})", 1)
    p = Program("f16_i6_matmul", 32, grid, {"x": "pointer", "codes": "pointer", "y": "pointer", "m": "i32"})
    with p:
        # Device memory as arrays. A size of -1 is known when the kernel runs. y is [m, n] in memory; seen with
        # strides (1, n) it is [n, m], as the tensor core leaves it.
        codes = p.global_view(p["codes"], "vector<4xi32>", (i6.row_blocks, i6.chunks, words))
        x = p.global_view(p["x"], "f16", (-1, k), sizes=[p["m"]])
        y = p.global_view(p["y"], "f16", (n, -1), strides=(1, n), sizes=[p["m"]])

        # Where this block's tile of y begins.
        row, token = p.block_id(0) * rows, p.block_id(1) * tokens

        # for step in 0 .. k/chunk-1, with the sums handed from round to round.
        zero = p.constant(0.0, "f32", y_layout)
        with p.loop(0, k // chunk, [zero]) as loop:
            (total,) = loop.carried

            # A tile of packed words, R row blocks by one chunk, into registers ...
            packed = p.load(codes, (p.block_id(0) * R, loop.index, 0), word_layout)
            # ... is a tile of 6-bit integers: the same registers, looked at otherwise. No data moves, since packing
            # has put into every lane's words just the codes that its fragments want. Were layouts or numbers of
            # bits not to fit, the program would be refused here.
            weights = p.view(packed, dtype("i6"), w_layout)
            # 6-bit integers become f16: exactly, two at a time, by a recipe made for the format.
            decoded = p.decode(weights, "f16")

            # The tile of x, straight from device memory. Tokens beyond m, in the last block, read as zero.
            activations = p.load(x, (token, loop.index * chunk), x_layout, boundary=("zero", "none"))

            # [rows, chunk] times [tokens, chunk] transposed: R * T * chunk / 16 instructions.
            loop.results = [p.mma(decoded, activations, total)]

        # Rounded to f16 and stored; tokens beyond m are skipped.
        p.store(p.cast(loop.carried[0], "f16"), y, (row, token), boundary=("none", "skip"))
    return p.module


def main(n: int, k: int, m: int, target: str | None) -> None:
    kernel = lowbit.compile_program(lambda: program(n, k), target)

    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k)).astype(np.float16)
    weight = rng.integers(-32, 32, (n, k))

    # The order in memory is made once, ahead of time. (A packed weight has scales, too, which are not used here.)
    codes = pack(MatmulSpec(n, k, "i6"), weight, np.ones(n)).codes
    device = "cuda" if kernel.target.kind == "cuda" else "cpu"
    output = torch.empty((m, n), dtype=torch.float16, device=device)
    kernel(x=torch.from_numpy(x).to(device), codes=codes.to(device), y=output, m=m)
    y = output.cpu().numpy()

    # Products of f16 and 6-bit integers are exact in f32. Wrong by no more than k f32 roundings of the running sum,
    # which is at most sum |x w|, and one rounding to f16.
    expected = x.astype(np.float64) @ weight.T
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(weight.T)
    bound = k * 2.0**-23 * magnitude + 2.0**-11 * np.abs(expected) + 2.0**-25
    worst = float((np.abs(y - expected) / bound).max())
    print(f"i6[{n}, {k}], {m} tokens, on {kernel.target}: worst element at {worst:.0%} of what rounding explains")
    if not worst <= 1:
        raise SystemExit("the result is wrong")


if __name__ == "__main__":
    if torch.cuda.is_available():
        main(4096, 4096, 13, target=None)  # this machine's GPU
    else:
        main(64, 256, 13, target="emulator:sm_80")
