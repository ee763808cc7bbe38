"""Transformer layers that decode, as a model runs them: microseconds a layer, and the share of the time in which their
bytes can be read.

Layers with random weights follow each other in a CUDA graph, so many that no cache holds them. Three ways to run them
are compared: bf16 and lowbit in the operations of transformers, compiled by torch, and lowbit fused
(`pylib.layer.decode`). Each kernel of the fused layer is also timed alone, and the layer without it: what kernels take
together is less than their sum, since they overlap.

    python -m benchmarks layer llama-3.1-8b -m 1,4,16 --context 512,4096
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from benchmarks import record_lines
from benchmarks.environment import environment
from benchmarks.floor import floor
from lowbit.dialect.fields import choice
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.layer.decode import Attention, Norm, Places, attend, feed_forward, normed_after
from lowbit.pylib.model_speed.table import aligned
from lowbit.pylib.nn.gated_linear import Gate, change_order
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.tune.timing import copies_needed, graph_time, random_weight

Record = dict[str, Any]
_EPS = 1e-5
_LEFT = 64  # places of the cache behind the context
_RUNS = ("fused", "lowbit", "bf16")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layer.

    width    columns of the down projection; 0: a layer of attention alone
    normed   whether queries and keys have norms
    """

    hidden: int
    width: int
    queries: int
    keys: int
    columns: int
    normed: bool = False

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Returns n and k of the layer's matmuls."""
        attention = {
            "qkv": ((self.queries + 2 * self.keys) * self.columns, self.hidden),
            "out": (self.hidden, self.queries * self.columns),
        }
        mlp = {"gate_up": (2 * self.width, self.hidden), "down": (self.hidden, self.width)}
        return attention | (mlp if self.width else {})


LAYERS = {
    "llama-3.1-8b": Sizes(4096, 14336, 32, 8, 128),
    "qwen3-30b-a3b": Sizes(2048, 0, 32, 4, 128, normed=True),
}
"""Of the mixture of experts, the attention."""


class Layer(nn.Module):
    """A layer with random weights, and its cache; `forward` runs it as transformers does.

    spec   of its low-bit weights, whatever n and k; None: bf16
    """

    def __init__(self, sizes: Sizes, spec: MatmulSpec | None, batch: int, context: int, device: str) -> None:
        super().__init__()
        self.sizes = sizes
        for name, (n, k) in sizes.linears.items():
            self.add_module(name, _linear(n, k, spec, device))
        names = ["norm", "after", *(["query_norm", "key_norm"] if sizes.normed else [])]
        for name in names:
            size = sizes.columns if "_" in name else sizes.hidden
            self.register_buffer(name, torch.rand(size, device=device).bfloat16() + 0.5)
        shape = batch, sizes.keys, context + _LEFT, sizes.columns
        self.keys_cache, self.values_cache = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
        self.held = torch.tensor([context - 1], device=device)

    @property
    def nbytes(self) -> int:
        """Returns what a step reads: weights, and the keys and values up to the context."""
        weights = sum(each.nbytes for name in self.sizes.linears for each in _tensors(self.get_submodule(name)))
        return weights + 2 * self.keys_cache[:, :, : self.keys_cache.shape[2] - _LEFT].nbytes

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Returns the layer's output [b, 1, hidden]."""
        h = rms_norm(x, (self.sizes.hidden,), self.norm, _EPS)
        x = x + self.out(self._attention(self.qkv(h), cos, sin, mask))
        if not self.sizes.width:
            return x
        gate, up = self.gate_up(rms_norm(x, (self.sizes.hidden,), self.after, _EPS)).chunk(2, -1)
        return x + self.down(silu(gate) * up)

    def _attention(self, qkv: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        sizes = self.sizes
        heads = qkv.unflatten(-1, (-1, sizes.columns)).transpose(1, 2)
        q, k, v = heads.split((sizes.queries, sizes.keys, sizes.keys), 1)
        if sizes.normed:
            q = rms_norm(q, (sizes.columns,), self.query_norm, _EPS)
            k = rms_norm(k, (sizes.columns,), self.key_norm, _EPS)
        q, k = (each * cos[:, None] + _turned(each) * sin[:, None] for each in (q, k))
        self.keys_cache.index_copy_(2, self.held, k)
        self.values_cache.index_copy_(2, self.held, v)
        group = sizes.queries // sizes.keys
        k, v = (each.repeat_interleave(group, 1) for each in (self.keys_cache, self.values_cache))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class FusedLayer(nn.Module):
    """The same layer as lowbit runs it, which takes over the weights of another. Its parts are named as `PARTS`."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer, sizes = layer, layer.sizes
        norms = (Norm(layer.query_norm, _EPS), Norm(layer.key_norm, _EPS)) if sizes.normed else None
        self.attention = Attention(layer.qkv, layer.out, sizes.columns**-0.5, norms)
        self.norm, self.after = Norm(layer.norm, _EPS), Norm(layer.after, _EPS)
        if sizes.width:
            change_order(layer.gate_up, Gate("silu_mul", pairs=False))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the layer's output [b, 1, hidden]."""
        layer = self.layer
        at = Places(cos, sin, layer.keys_cache, layer.values_cache, layer.held, mask)
        x = attend(x, self.norm, self.attention, at)
        if not layer.sizes.width:
            return x
        return feed_forward(x, normed_after(x, self.after, layer.held, 0), layer.gate_up, layer.down)

    def parts(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> dict[str, Callable[[], Tensor]]:
        """Returns the launches of the layer one by one, each with inputs of its own."""
        ops, layer, sizes = torch.ops.lowbit, self.layer, self.layer.sizes
        cache = layer.keys_cache, layer.values_cache, layer.held
        h = x.new_ones(*x.shape[:2], layer.qkv.out_features)
        q = x.new_ones(*x.shape[:2], layer.out.in_features)
        gains = (layer.query_norm, layer.key_norm) if sizes.normed else (None, None)
        each = {
            "norm": lambda: ops.rms_norm(x, layer.norm, _EPS, 0.0, ""),
            "qkv": lambda: layer.qkv(x),
            "rope": lambda: ops.rope(h, cos, sin, *gains, *cache, _EPS, 0.0, ""),
            "attention": lambda: ops.decode_attention(q, *cache, mask, self.attention.scale, ""),
            "out": lambda: layer.out.plus(q, x),
        }
        if sizes.width:
            wide = x.new_ones(*x.shape[:2], sizes.width)
            each |= {
                "after": lambda: normed_after(x, self.after, layer.held, 0),
                "gate_up": lambda: layer.gate_up.gated(x),
                "down": lambda: layer.down.plus(wide, x),
            }
        return each


def _linear(n: int, k: int, spec: MatmulSpec | None, device: str) -> nn.Linear:
    if spec is not None:
        return LowbitLinear.from_packed(random_weight(replace(spec, n=n, k=k), device))
    linear = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
    return linear.requires_grad_(False)


def _tensors(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(), *layer.buffers()]


def _turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


@dataclass(frozen=True)
class Inputs:
    """What layers take: x [b, 1, hidden], rotations [b, 1, columns], and the places to look at [b, 1, 1, length]."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor

    @classmethod
    def of(cls, sizes: Sizes, batch: int, context: int, device: str) -> Inputs:
        """Returns random inputs at the end of a context."""
        x = torch.randn(batch, 1, sizes.hidden, device=device).bfloat16()
        angle = torch.rand(batch, 1, sizes.columns // 2, device=device).repeat(1, 1, 2) * 6
        mask = (torch.arange(context + _LEFT, device=device) < context).expand(batch, 1, 1, -1).contiguous()
        return cls(x, angle.cos().bfloat16(), angle.sin().bfloat16(), mask)


def in_order(layers: Sequence[Callable[..., Tensor]], given: Inputs) -> Tensor:
    """Returns the output of layers, one after the other."""
    x = given.x
    for layer in layers:
        x = layer(x, given.cos, given.sin, given.mask)
    return x


def error(sizes: Sizes, spec: MatmulSpec, batch: int, context: int, device: str = "cuda") -> float:
    """Returns how far a fused layer is from the one that it was made of, next to what the layer adds to x."""
    layer, given = Layer(sizes, spec, batch, context, device), Inputs.of(sizes, batch, context, device)
    plain = layer(given.x, given.cos, given.sin, given.mask)
    fused = FusedLayer(layer)(given.x, given.cos, given.sin, given.mask)
    return float((fused.double() - plain.double()).norm() / (plain.double() - given.x.double()).norm())


@torch.no_grad()
def measure(
    name: str,
    spec: MatmulSpec,
    batches: Sequence[int],
    contexts: Sequence[int],
    runs: Sequence[str],
    log: Callable[[str], None],
) -> list[Record]:
    """Returns the measurements of a layer. Raises SpecError for an unknown name."""
    sizes = LAYERS[choice("layer", name, tuple(LAYERS))]
    for run in runs:
        choice("run", run, _RUNS)
    torch.manual_seed(0)
    found: list[Record] = []
    for context in contexts:
        for batch in batches:
            about: Record = {"layer": name, "batch": batch, "context": context}
            about["error"] = error(sizes, spec, batch, context)
            found.append(about | _measured(sizes, spec, batch, context, runs))
            log(json.dumps(found[-1]))
    return found


def _measured(sizes: Sizes, spec: MatmulSpec, batch: int, context: int, runs: Sequence[str]) -> Record:
    """Returns microseconds of a layer in all ways, and of each launch of the fused one."""
    given, record = Inputs.of(sizes, batch, context, "cuda"), Record()
    for run in runs:
        layers = _layers(sizes, None if run == "bf16" else spec, batch, context)
        if run != "bf16":
            record["bytes"] = layers[0].nbytes
        if run == "fused":
            fused = [FusedLayer(layer) for layer in layers]
            record |= {"fused_us": _time(partial(in_order, fused, given), layers), **_times_of_parts(fused, given)}
        else:
            torch._dynamo.reset()
            compiled = torch.compile(in_order, fullgraph=True, dynamic=False)
            record[f"{run}_us"] = _time(partial(compiled, layers, given), layers)
    if "bytes" in record:
        record["floor_us"] = floor(record["bytes"]).time.median
    return record


def _layers(sizes: Sizes, spec: MatmulSpec | None, batch: int, context: int) -> list[Layer]:
    """Returns layers that no cache holds."""
    first = Layer(sizes, spec, batch, context, "cuda")
    return [first, *(Layer(sizes, spec, batch, context, "cuda") for _ in range(copies_needed(first.nbytes) - 1))]


def _time(step: Callable[[], Tensor], layers: Sequence[Layer]) -> float:
    """Returns microseconds of one of the layers that a step goes through."""
    return graph_time([step]).median / len(layers)


def _times_of_parts(layers: Sequence[FusedLayer], given: Inputs) -> Record:
    """Returns microseconds of each launch, one after the other of the same kind, and of all but it."""
    parts = [layer.parts(given.x, given.cos, given.sin, given.mask) for layer in layers]
    alone = {name: graph_time([part[name] for part in parts]).median for name in parts[0]}
    rest = {}
    for name in parts[0]:
        others = [call for part in parts for other, call in part.items() if other != name]
        rest[name] = graph_time(others).median * len(others) / len(layers)
    every = [call for part in parts for call in part.values()]
    return {"alone_us": alone, "without_us": rest, "parts_us": graph_time(every).median * len(parts[0])}


def table(records: Sequence[Record]) -> str:
    """Returns measurements as text: microseconds a layer, and the share of the time that reading its bytes takes."""
    head = ["layer, batch, context", "MB", "floor", "fused", "share", "lowbit", "share", "bf16", "error"]
    return aligned([head, *map(_row, records)])


def _row(record: Record) -> list[str]:
    cells = [f"{record['layer']}, {record['batch']}, {record['context']}"]
    cells += [f"{record['bytes'] / 1e6:.1f}", f"{record['floor_us']:.1f}"]
    for run in _RUNS:
        time = record.get(f"{run}_us")
        cells.append(f"{time:.1f}" if time else "")
        if run != "bf16":
            cells.append(f"{record['floor_us'] / time:.2f}" if time else "")
    return [*cells, f"{record['error']:.1e}"]


def table_of_parts(record: Record) -> str:
    """Returns what each launch of the fused layer takes alone, and how much faster the layer is without it."""
    rows = [
        [name, f"{alone:.2f}", f"{record['parts_us'] - record['without_us'][name]:.2f}"]
        for name, alone in record["alone_us"].items()
    ]
    total = sum(record["alone_us"].values())
    return aligned([["launch", "alone", "in the layer"], *rows, ["all", f"{total:.2f}", f"{record['parts_us']:.2f}"]])


def write(records: Sequence[Record], path: Path, commit: str | None) -> None:
    """Writes a file of measurements, with the environment in which they were made."""
    record_lines.write(path, {"environment": environment(commit), "measurements": list(records)})
