"""Keep the weights that stick out of a layer apart, as SpQR does, and compare with 4 bits for all.

    python examples/outliers.py

One weight in two hundred is ten times as large as the others. In groups of 128 columns it takes the scale of all with
it. SpQR quantizes the rest to 3 bits in groups of 16, and adds what is left of the large ones as a sparse matrix, in
the same kernel.
"""

from __future__ import annotations

import torch
from torch import nn

import lowbit

CONFIGS = {
    "GPTQ, 4 bits": lowbit.QuantConfig("u4", group_size=128, method="gptq"),
    "SpQR, 3 bits": lowbit.QuantConfig.preset("spqr"),
    "SpQR without outliers": lowbit.QuantConfig("u3", group_size=16, method="spqr", outlier_threshold=None),
}


@torch.no_grad()
def main(n: int = 256, k: int = 512, target: str | None = None) -> dict[str, float]:
    """Print what each method makes of the layer; returns the errors relative to the float layer's output."""
    torch.manual_seed(0)
    linear = nn.Linear(k, n, bias=False)
    linear.weight[torch.rand(n, k) < 0.005] *= 10
    mixing = torch.eye(k) + torch.randn(k, k) / k**0.5
    calibration, x = torch.randn(2000, k) @ mixing, torch.randn(16, k) @ mixing
    errors: dict[str, float] = {}
    for name, config in CONFIGS.items():
        quantized = lowbit.quantize(linear.weight, config, calibration)
        mm = lowbit.compile(quantized.spec(), target)
        device = "cuda" if mm.target.kind == "cuda" else "cpu"
        w = quantized.pack(mm).to(device)
        y = mm(x.half().to(device), w).float().cpu()
        errors[name] = float((y - linear(x)).norm() / linear(x).norm())
        sparse = w.unpack_outliers()
        share = 0.0 if sparse is None else sparse.values().numel() / (n * k)
        print(f"{name:22} {share:6.2%} outliers, relative error {errors[name]:.4f}")
    return errors


if __name__ == "__main__":
    main()
