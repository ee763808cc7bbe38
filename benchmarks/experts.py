"""Blocks of mixtures of experts with random weights: a router, and experts in bf16 (transformers' `grouped_mm`) or in
lowbit. Every call has other tokens, so that experts come from device memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import record_lines
from benchmarks.environment import environment
from benchmarks.floor import floor
from benchmarks.measure import eager_time
from lowbit.dialect.fields import choice
from lowbit.pylib.model_speed.table import aligned
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.quantize_model import quantize_
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.tune.timing import graph_time

Record = dict[str, Any]
FEW = 64
"""Tokens up to which a call is timed with `CALLS` inputs; more tokens hit all experts, and need no others."""
CALLS = 8


@dataclass(frozen=True)
class Block:
    """The sizes of a block.

    hidden   numbers of a token
    width    rows of each half of gate_up, and columns of down
    top_k    experts of a token
    """

    hidden: int
    width: int
    experts: int
    top_k: int

    def dense(self, device: str = "cuda") -> nn.Module:
        """Returns the block in bf16, with random weights, as transformers runs it by `grouped_mm`."""
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        config = Qwen3MoeConfig(
            hidden_size=self.hidden,
            moe_intermediate_size=self.width,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            norm_topk_prob=True,
        )
        config._experts_implementation = "grouped_mm"
        with torch.device(device):
            block = Qwen3MoeSparseMoeBlock(config).bfloat16().eval()
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.02)
        return block


BLOCKS = {
    "qwen3-30b-a3b": Block(2048, 768, 128, 8),
    "mixtral-8x7b": Block(4096, 14336, 8, 2),
}


def low_bit(block: nn.Module, config: QuantConfig) -> nn.Module:
    """Returns a copy of a block with quantized experts; the router stays as it is."""
    model = nn.ModuleDict({"block": copy.deepcopy(block)})
    quantize_(model, config, progress=False)
    return model["block"]


@torch.no_grad()
def measure(name: str, config: QuantConfig, tokens: Sequence[int], log: Callable[[str], None]) -> list[Record]:
    """Returns the measurements of a block, one for each number of tokens. Raises SpecError for an unknown name."""
    sizes = BLOCKS[choice("block", name, tuple(BLOCKS))]
    torch.manual_seed(0)
    dense = sizes.dense()
    packed = low_bit(dense, config)
    found: list[Record] = []
    for m in tokens:
        inputs = [torch.randn(1, m, sizes.hidden, device="cuda").bfloat16() for _ in range(CALLS if m <= FEW else 1)]
        found.append({"block": name, "tokens": m, **measured(dense, packed, inputs)})
        log(json.dumps(found[-1]))
    return found


def measured(dense: nn.Module, packed: nn.Module, inputs: Sequence[Tensor]) -> Record:
    """Returns microseconds of both blocks, and how far they are apart: eager, in a CUDA graph, and of reading the
    experts that are hit."""
    hit = experts_hit(packed, inputs)
    both = {"bf16": dense, "lowbit": packed}
    record: Record = {"hit": hit, "floor_us": floor(int(hit * bytes_of_expert(packed))).time.median}
    for kind, block in both.items():
        record[f"{kind}_us"] = graph_time([partial(block, x) for x in inputs]).median
        record[f"{kind}_eager_us"] = eager_time([lambda x, block=block: block(x)], inputs[0])
    outputs = [block(inputs[0]).double() for block in both.values()]
    record["error"] = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
    return record


def experts_hit(block: nn.Module, inputs: Sequence[Tensor]) -> float:
    """Returns to how many experts the tokens of an input go, in the mean."""
    gate: Any = block.gate
    chosen = [gate(x.view(-1, x.shape[-1]))[2].unique().numel() for x in inputs]
    return sum(chosen) / len(chosen)


def bytes_of_expert(block: nn.Module) -> int:
    """Returns the bytes of one expert's packed weights."""
    experts = block.experts
    assert isinstance(experts, LowbitExperts)
    layers: list[Any] = [experts.gate_up[0], experts.down[0]]
    return sum(layer.packed.nbytes for layer in layers)


def table(records: Sequence[Record]) -> str:
    """Returns measurements as text: microseconds, and how many times as fast as bf16 lowbit is."""
    head = ["block, tokens", "experts hit", "floor", "lowbit", "bf16", "ratio", "lowbit eager", "bf16 eager", "ratio"]
    return aligned([head, *map(_row, records)])


def _row(record: Record) -> list[str]:
    """Returns the cells of one measurement."""
    cells = [f"{record['block']}, {record['tokens']}", f"{record['hit']:.1f}", f"{record['floor_us']:.1f}"]
    for kind in ("us", "eager_us"):
        ours, theirs = record[f"lowbit_{kind}"], record[f"bf16_{kind}"]
        cells += [f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}"]
    return cells


def write(records: Sequence[Record], path: Path, commit: str | None) -> None:
    """Writes a file of measurements, with the environment in which they were made."""
    record_lines.write(path, {"environment": environment(commit), "measurements": list(records)})
