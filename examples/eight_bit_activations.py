"""Multiply 4-bit weights by activations of 8 bits, and see what that costs in accuracy.

    python examples/eight_bit_activations.py

x is quantized once, with a scale per token, for two matmuls that share it. It has a few columns that are larger than
others, as in language models: they set the scale of a token. f8e4m3 keeps the digits of small numbers beside them, i8
does not. Then a model that was quantized for x in 16 bits multiplies long inputs in 8 bits.
"""

from __future__ import annotations

import torch

import lowbit


def main(n: int = 256, k: int = 1024, m: int = 8, target: str | None = None) -> dict[str, float]:
    """Print the error of each type; returns the errors relative to the result with x as it is."""
    torch.manual_seed(0)
    weights = [lowbit.quantize(torch.randn(n, k), lowbit.QuantConfig("u4", group_size=128)) for _ in range(2)]
    x = torch.randn(m, k).half()
    x[:, ::100] *= 20
    errors: dict[str, float] = {}
    for compute in ("f8e4m3", "i8"):
        spec = lowbit.MatmulSpec(n, k, "u4", group_size=128, zeros=weights[0].spec().zeros, compute=compute)
        mm = lowbit.compile(spec, target)
        device = "cuda" if mm.target.kind == "cuda" else "cpu"
        q = lowbit.quantize_activation(x.to(device), compute, target=target)
        gate, up = (mm(q, weight.pack(mm).to(device)).float().cpu() for weight in weights)
        exact = [x.float() @ weight.dequantize().float().T for weight in weights]
        worst = max(float((y - e).norm() / e.norm()) for y, e in zip((gate, up), exact, strict=True))
        errors[compute] = worst
        print(f"{compute:7} {q.values.element_size()} byte per number of x, relative error {worst:.4f}")
    return errors | switch(k, k // 4)


def switch(k: int, n: int) -> dict[str, float]:
    """Make a quantized model multiply in i8 from 65 tokens on; returns how far that moves short and long inputs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(k, n), torch.nn.Linear(n, k)).half().to(device)
    lowbit.quantize_(model, lowbit.QuantConfig("u4", group_size=128))
    x = {"64 tokens": torch.randn(64, k), "65 tokens": torch.randn(65, k)}
    before = {name: model(given.half().to(device)) for name, given in x.items()}
    lowbit.set_compute_(model, "i8", compute_from=65)
    after = {name: model(given.half().to(device)) for name, given in x.items()}
    moved = {name: float((after[name] - y).norm() / y.norm()) for name, y in before.items()}
    for name, error in moved.items():
        print(f"{name} in a model, relative change {error:.4f}")
    return moved


if __name__ == "__main__":
    main()
