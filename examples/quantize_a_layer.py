"""Quantize a linear layer by several methods, run it, and compare with the float layer.

    python examples/quantize_a_layer.py

The layer comes after a norm and sees inputs as language models have them: a few columns are much larger than others.
Methods without data look at the weight alone; the others see a thousand calibration inputs.
"""

from __future__ import annotations

import torch
from torch import nn

import lowbit

CONFIGS = {
    "round to nearest": lowbit.QuantConfig("u4", group_size=128),
    "HQQ": lowbit.QuantConfig("u4", group_size=128, method="hqq"),
    "AWQ": lowbit.QuantConfig("u4", group_size=128, method="awq"),
    "GPTQ": lowbit.QuantConfig("u4", group_size=128, method="gptq"),
    "GPTQ, 3 bits": lowbit.QuantConfig("u3", group_size=128, method="gptq"),
    "FP6-LLM": lowbit.QuantConfig.preset("fp6_llm"),
}


def inputs(norm: nn.Module, tokens: int, mixing: torch.Tensor) -> torch.Tensor:
    """Returns what the norm gives for random tokens whose columns depend on each other."""
    return norm(torch.randn(tokens, len(mixing)) @ mixing)


@torch.no_grad()
def main(n: int = 512, k: int = 512, target: str | None = None) -> dict[str, float]:
    """Print each method's error; returns the errors relative to the float layer's output."""
    torch.manual_seed(0)
    norm, linear = nn.RMSNorm(k), nn.Linear(k, n)
    norm.weight[::50] = 15
    mixing = torch.eye(k) + torch.randn(k, k) / k**0.5
    calibration, x = inputs(norm, 1000, mixing), inputs(norm, 16, mixing)
    errors: dict[str, float] = {}
    for name, config in CONFIGS.items():
        quantized = lowbit.quantize(linear.weight, config, calibration)
        mm = lowbit.compile(quantized.spec(bias=True), target)
        device = "cuda" if mm.target.kind == "cuda" else "cpu"
        w = quantized.pack(mm, linear.bias).to(device)
        # AWQ scales columns of the weight; x has to be divided by as much. `fold_into(norm)` would do it once for all.
        y = mm(quantized.prepare_input(x).half().to(device), w).float().cpu()
        errors[name] = float((y - linear(x)).norm() / linear(x).norm())
        print(f"{name:18} {mm.spec.bytes * 8 / (n * k):5.2f} bits per weight, relative error {errors[name]:.4f}")
    return errors


if __name__ == "__main__":
    main()
