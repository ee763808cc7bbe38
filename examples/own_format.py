"""A format of your own: the values of a table that is fitted to the weight, in 3 bits.

    python examples/own_format.py

Integers of 3 bits are eight values at equal distances. Weights are denser around zero, and a table may be, too. It is
found by Lloyd's algorithm (k-means in one dimension) on the weights divided by the largest of their group. The compiler
takes any table, so kernels for it need no work.
"""

from __future__ import annotations

import torch

import lowbit

GROUP = 64


def normalized(weight: torch.Tensor) -> torch.Tensor:
    """Returns all weights divided by the largest magnitude of their group, sorted."""
    groups = weight.float().reshape(-1, GROUP)
    return (groups / groups.abs().amax(1, keepdim=True)).flatten().sort().values


def lloyd(values: torch.Tensor, count: int, steps: int = 50) -> list[float]:
    """Returns the table with the least squared error that Lloyd's algorithm finds for sorted values."""
    table = values[torch.linspace(0, len(values) - 1, 2 * count + 1).long()[1::2]]  # the middles of equal shares
    for _ in range(steps):
        nearest = torch.bucketize(values, (table[1:] + table[:-1]) / 2)
        sums = torch.zeros(count).index_add_(0, nearest, values)
        table = sums / torch.bincount(nearest, minlength=count).clamp(min=1)
    return table.half().tolist()


@torch.no_grad()
def main(n: int = 512, k: int = 512, target: str | None = None) -> dict[str, float]:
    """Print the errors of a table and of integers; returns them, relative to the float layer's output."""
    torch.manual_seed(0)
    weight, x = torch.randn(n, k), torch.randn(16, k)
    configs = {
        "integers": lowbit.QuantConfig("i3", GROUP),
        "table": lowbit.QuantConfig("lut3", GROUP, table=tuple(lloyd(normalized(weight), 8))),
    }
    errors: dict[str, float] = {}
    for name, config in configs.items():
        quantized = lowbit.quantize(weight, config)
        mm = lowbit.compile(quantized.spec(), target)
        device = "cuda" if mm.target.kind == "cuda" else "cpu"
        y = mm(x.half().to(device), quantized.pack(mm).to(device)).float().cpu()
        errors[name] = float((y - x @ weight.T).norm() / (x @ weight.T).norm())
        print(f"3 bits, {name:8}  relative error {errors[name]:.4f}")
    print("the table:", ", ".join(f"{value:.3f}" for value in configs["table"].table or ()))
    return errors


if __name__ == "__main__":
    main()
