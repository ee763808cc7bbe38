"""A kernel with an epilogue of its own: y [m, n] = silu(x G^T) * (x U^T), the first half of a gated MLP (SwiGLU).

    python examples/silu_mul.py

G and U [n, k] are 4-bit integers with one scale per row. A block multiplies its tile of x with the same rows of both,
and what it has in registers then, two tiles of sums, is all that the epilogue needs: neither product is ever written to
memory. The epilogue is plain arithmetic on tiles:

    y = gate / (1 + exp(-gate)) * up

`f16_i6_matmul.py` explains the matmul line by line; this one is twice the same, without a pipeline.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import lowbit
from lowbit.dialect.bindings import ir
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.layouts.fragments import MMA_M16N8_D, MMA_M16N8K16_A, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import local
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program, Tile
from lowbit.pylib.weights.packed import pack

R = 2  # a block computes 16 * R rows of both weights ...
T = 1  # ... for 8 * T tokens
PARAMS = {"x": "pointer", "y": "pointer", "m": "i32"}
WEIGHTS = ("gate", "up")


def silu(p: Program, x: Tile) -> Tile:
    """x * sigmoid(x). Where exp(-x) is infinite, it is -0."""
    return x / (1.0 + p.exp(-x))


def program(n: int, k: int) -> ir.Module:
    """The kernel for weights of this size, n a multiple of 16 * R and k of a chunk (64 columns), and for any m."""
    i4 = MatmulSpec(n, k, "i4").packing
    rows, tokens, chunk = 16 * R, 8 * T, i4.chunk
    words = i4.units * 32  # of 16 bytes, per 16 rows and chunk

    w_layout = local(R, chunk // 16) * MMA_M16N8K16_A
    x_layout = local(T, chunk // 16) * MMA_M16N8K16_B_NK
    y_layout = local(R, T) * MMA_M16N8_D
    word_layout = local(R, 1, words // 32).spatial(1, 1, 32)

    codes_and_scales = {f"{weight}_{part}": "pointer" for weight in WEIGHTS for part in ("codes", "scales")}
    p = Program("silu_mul", 32, (n // rows, f"ceil(m / {tokens})", 1), PARAMS | codes_and_scales)
    with p:
        x = p.global_view(p["x"], "f16", (-1, k), sizes=[p["m"]])
        y = p.global_view(p["y"], "f16", (n, -1), strides=(1, n), sizes=[p["m"]])
        codes = [p.global_view(p[f"{w}_codes"], "vector<4xi32>", (i4.row_blocks, i4.chunks, words)) for w in WEIGHTS]
        scales = [p.global_view(p[f"{w}_scales"], "f32", (n, 1)) for w in WEIGHTS]
        row, token = p.block_id(0) * rows, p.block_id(1) * tokens

        with p.loop(0, k // chunk, [p.constant(0.0, "f32", y_layout) for _ in WEIGHTS]) as loop:
            # One tile of x serves both weights.
            activations = p.load(x, (token, loop.index * chunk), x_layout, boundary=("zero", "none"))
            loop.results = []
            for view, total in zip(codes, loop.carried):
                packed = p.load(view, (p.block_id(0) * R, loop.index, 0), word_layout)
                weights = p.decode(p.view(packed, dtype("i4"), w_layout), "f16")
                loop.results.append(p.mma(weights, activations, total))

        # The scales of the rows that a thread has, [rows, 1], meet all tokens: a dim of size 1 is broadcast.
        row_layout = y_layout.reduce((1,))
        gate, up = (total * p.load(view, (row, 0), row_layout) for total, view in zip(loop.carried, scales))
        p.store(p.cast(silu(p, gate) * up, "f16"), y, (row, token), boundary=("none", "skip"))
    return p.module


def exact(x: Any, weights: dict[str, Any], scales: dict[str, Any]) -> tuple[Any, Any]:
    """y in float64, and how far rounding explains that a kernel is off.

    Products are exact in f32, and their running sum is off by at most k roundings of sum |x w|. silu has a slope of at
    most 1.1, and its exp and quotient are off by 2 + 1.173 |gate| + 2 ulps; then y is rounded to f16.
    """
    products, errors = {}, {}
    for name, weight in weights.items():
        products[name] = x @ weight.T * scales[name]
        errors[name] = (x.shape[1] + 1) * 2.0**-23 * (np.abs(x) @ np.abs(weight.T)) * scales[name]
    gate, up = products["gate"], products["up"]
    activated = gate / (1 + np.exp(-gate))
    y = activated * up
    arithmetic = (8 + 1.173 * np.abs(gate)) * 2.0**-23 + 2.0**-11
    return y, 1.1 * errors["gate"] * np.abs(up) + np.abs(activated) * errors["up"] + arithmetic * np.abs(y) + 2.0**-25


def main(n: int, k: int, m: int, target: str | None) -> None:
    kernel = lowbit.compile_program(lambda: program(n, k), target)

    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k)).astype(np.float16)
    weights = {name: rng.integers(-8, 8, (n, k)) for name in WEIGHTS}
    scales = {name: (rng.uniform(0.1, 0.4, n) / np.sqrt(k)).astype(np.float32) for name in WEIGHTS}

    device = "cuda" if kernel.target.kind == "cuda" else "cpu"
    arguments = {f"{name}_scales": torch.from_numpy(scales[name]).to(device) for name in WEIGHTS}
    for name in WEIGHTS:
        arguments[f"{name}_codes"] = pack(MatmulSpec(n, k, "i4"), weights[name], np.ones(n)).codes.to(device)
    output = torch.empty((m, n), dtype=torch.float16, device=device)
    kernel(x=torch.from_numpy(x).to(device), y=output, m=m, **arguments)

    expected, bound = exact(x.astype(np.float64), weights, scales)
    worst = float((np.abs(output.cpu().numpy() - expected) / bound).max())
    print(f"silu_mul[{n}, {k}], {m} tokens, on {kernel.target}: worst element at {worst:.0%} of what rounding explains")
    if not worst <= 1:
        raise SystemExit("the result is wrong")


if __name__ == "__main__":
    if torch.cuda.is_available():
        main(11008, 4096, 13, target=None)  # this machine's GPU
    else:
        main(64, 256, 13, target="emulator:sm_80")
