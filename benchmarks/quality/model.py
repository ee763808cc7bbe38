"""A small causal transformer in plain torch, as Llama is made: RMSNorm, rotary positions, SwiGLU, tied embeddings.

Its 28 linear layers have 256 or 512 columns, so that groups of 32, 64 and 128 divide them. Weights are stored as
safetensors, a format so simple that it is read and written here: a length, a JSON header, the bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

HERE = Path(__file__).resolve().parent
WEIGHTS = HERE / "model.safetensors"


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; these make 2.9 million parameters."""

    vocabulary: int = 1024
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    ffn: int = 512
    context: int = 256


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q, self.k, self.v, self.o = (nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        split = (*x.shape[:-1], self.heads, -1)
        q, k, v = (layer(x).view(split).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(_rotate(q, rotation), _rotate(k, rotation), v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    """The gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.hidden, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden, eps=1e-6), nn.RMSNorm(shape.hidden, eps=1e-6)
        self.attention, self.ffn = Attention(shape), FeedForward(shape)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.ffn(self.norm2(x))


class Transformer(nn.Module):
    """The model: tokens [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        self.shape = shape = shape or Shape()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.register_buffer("rotation", _rotation(shape), persistent=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns what the first block takes."""
        return self.embedding(tokens)

    def head(self, x: Tensor) -> Tensor:
        """Returns the logits of what the last block gave."""
        return functional.linear(self.norm(x), self.embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.rotation[: tokens.shape[1]])
        return self.head(x)


def _rotation(shape: Shape) -> Tensor:
    """Returns the rotations as complex numbers [context, half of a head]."""
    half = shape.hidden // shape.heads // 2
    angles = torch.arange(shape.context)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    return torch.polar(torch.ones_like(angles), angles)


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Returns x [batch, heads, length, head] with neighbouring elements rotated as complex numbers."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def load() -> Transformer:
    """Returns the committed model in f32."""
    model = Transformer()
    model.load_state_dict(read_safetensors(WEIGHTS))
    return model.eval().requires_grad_(False)


def write_safetensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, in f16."""
    header: dict[str, object] = {}
    data = b""
    for name, tensor in tensors.items():
        values = tensor.detach().half().contiguous().numpy().tobytes()
        offsets = [len(data), len(data) + len(values)]
        header[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": offsets}
        data += values
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file that `write_safetensors` wrote, in f32."""
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    data = memoryview(content)[8 + length :]
    tensors: dict[str, Tensor] = {}
    for name, entry in json.loads(content[8 : 8 + length]).items():
        begin, end = entry["data_offsets"]
        values = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float16)
        tensors[name] = values.reshape(entry["shape"]).float()
    return tensors
