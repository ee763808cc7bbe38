"""A gated MLP (SwiGLU) of 4-bit weights in two launches: y = x + down(silu(gate(x)) * up(x)).

    python examples/gated_mlp.py

The weight of gate and up is one matmul with epilogue="silu_mul", that of down one with epilogue="residual". Compared
with the same in float64.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

import lowbit

CONFIG = lowbit.QuantConfig("u4", group_size=64)


@torch.no_grad()
def main(hidden: int = 256, inner: int = 512, tokens: int = 5, target: str | None = None) -> float:
    """Prints how far the result is from float64's, relative to the largest; returns it."""
    torch.manual_seed(0)
    gate_up = lowbit.quantize(torch.randn(2 * inner, hidden) / hidden**0.5, CONFIG)
    down = lowbit.quantize(torch.randn(hidden, inner) / inner**0.5, CONFIG)
    gated = lowbit.compile(gate_up.spec(epilogue="silu_mul"), target)
    added = lowbit.compile(down.spec(epilogue="residual"), target)
    device = "cuda" if gated.target.kind == "cuda" else "cpu"
    w_gate_up, w_down = gate_up.pack(gated).to(device), down.pack(added).to(device)

    x = torch.randn(tokens, hidden, device=device).half()
    y = added(gated(x, w_gate_up), w_down, residual=x)

    gate, up = (x.double() @ w_gate_up.dequantize(torch.float64).T).chunk(2, dim=-1)
    exact = x + (F.silu(gate) * up) @ w_down.dequantize(torch.float64).T
    error = float((y - exact).abs().max() / exact.abs().max())
    print(f"{tokens} tokens through {hidden} x {inner} on {gated.target}: largest error {error:.1e} of the largest")
    return error


if __name__ == "__main__":
    main()
