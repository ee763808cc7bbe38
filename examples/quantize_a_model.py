"""Quantize a small transformer in place, print what became of its layers, and compare its outputs.

    python examples/quantize_a_model.py

The attention's layers get six bits, the others four by GPTQ, for which the model is run on a few batches of tokens.
Saving and loading go through a state dictionary, as with any model of torch.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowbit

CONFIG = {
    "*.attention.*": lowbit.QuantConfig("f6e3m2", group_size=None),
    "*": lowbit.QuantConfig("u4", group_size=64, method="gptq"),
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width, heads)
        self.mlp_norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 128, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


@torch.no_grad()
def main(device: str | None = None) -> float:
    """Returns the error of the quantized model's logits relative to those of the float model."""
    torch.manual_seed(0)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = Transformer().bfloat16().to(device).eval()
    tokens = torch.randint(256, (2, 32), device=device)
    expected = model(tokens).float()
    skeleton = copy.deepcopy(model).to("meta")

    report = lowbit.quantize_(model, CONFIG, calibration=torch.randint(256, (4, 2, 64), device=device).unbind())
    print(report)
    error = float((model(tokens).float() - expected).norm() / expected.norm())
    print(f"relative error of the logits: {error:.4f}")

    for name, layer in model.named_modules():
        if isinstance(layer, lowbit.LowbitLinear):
            skeleton.set_submodule(name, lowbit.LowbitLinear.empty(layer.spec, "meta"))
    skeleton.load_state_dict(model.state_dict(), assign=True)
    print(f"the same after loading: {torch.equal(skeleton(tokens), model(tokens))}")
    return error


if __name__ == "__main__":
    main()
