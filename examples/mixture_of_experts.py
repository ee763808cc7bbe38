"""A block of experts of 4 bits: quantized in place, called, and on a GPU captured once for any routing.

    python examples/mixture_of_experts.py

The router sends every token to two of eight experts. On a GPU one launch multiplies by the gate_up of all experts, and
one by their down, whichever are hit; so a CUDA graph that was captured with some tokens is right for others. Compared
with the block in bf16.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import lowbit


def block(hidden: int, inner: int, experts: int) -> nn.Module:
    """Returns a block of transformers' Qwen3-MoE with random weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=2
    )
    made = Qwen3MoeSparseMoeBlock(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=hidden**-0.5)
    return made.bfloat16()


def captured(model: nn.Module, x: Tensor) -> torch.cuda.CUDAGraph:
    """Returns a graph of one call; `x` is where its tokens are read from, and is left with the result."""
    model(x)  # stacks the weights of the experts, and compiles their kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(model(x))
    return graph


@torch.no_grad()
def main(hidden: int = 256, inner: int = 128, experts: int = 8, tokens: int = 6) -> float:
    """Prints how far the block is from the one in bf16, relative to the largest number; returns it."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dense = block(hidden, inner, experts).to(device)
    model = nn.ModuleList([copy.deepcopy(dense)])
    lowbit.quantize_(model, lowbit.QuantConfig("u4", group_size=64), progress=False)

    x = torch.randn(1, tokens, hidden, device=device).bfloat16()
    y = model[0](x)
    error = float((y - dense(x)).abs().max() / dense(x).abs().max())
    sizes = f"{experts} experts of {inner} x {hidden}, {tokens} tokens"
    print(f"{sizes} on {device}: largest error {error:.2f} of the largest")

    if device == "cuda":
        held = x.clone()
        graph = captured(model[0], held)
        held.copy_(x.flip(1))  # other tokens, which go to other experts
        graph.replay()
        print(f"a graph, replayed with other tokens: equal to a call: {torch.equal(held, model[0](x.flip(1)))}")
    return error


if __name__ == "__main__":
    main()
