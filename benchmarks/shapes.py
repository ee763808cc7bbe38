"""Shapes to measure, by name: the linear layers of models as inference engines run them, and some sets of plain sizes.

A shape is (n, k), outputs times inputs. Engines merge the projections to query, key and value into one layer, and the
two of the gated feed-forward network into another.
"""

from __future__ import annotations

from dataclasses import dataclass

from dialect.errors import SpecError


@dataclass(frozen=True)
class Shape:
    """A weight [n, k]. name: what it is for, such as "Llama-3.1-8B qkv"; the size if it is only that."""

    name: str
    n: int
    k: int


@dataclass(frozen=True)
class Model:
    """A transformer's sizes, as its config.json has them."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    feed_forward: int

    def layers(self) -> dict[str, tuple[int, int]]:
        attention = self.heads * self.head
        return {
            "qkv": (attention + 2 * self.kv_heads * self.head, self.hidden),
            "o": (self.hidden, attention),
            "gate_up": (2 * self.feed_forward, self.hidden),
            "down": (self.hidden, self.feed_forward),
        }


MODELS = {
    "Llama-2-7B": Model(hidden=4096, heads=32, kv_heads=32, head=128, feed_forward=11008),
    "Llama-3.1-8B": Model(hidden=4096, heads=32, kv_heads=8, head=128, feed_forward=14336),
    "Llama-3.1-70B": Model(hidden=8192, heads=64, kv_heads=8, head=128, feed_forward=28672),
    "Qwen2.5-32B": Model(hidden=5120, heads=40, kv_heads=8, head=128, feed_forward=27648),
    "Gemma-2-9B": Model(hidden=3584, heads=16, kv_heads=8, head=256, feed_forward=14336),
}

SETS = {
    "issue": ((4096, 4096), (8192, 8192), (8192, 28672), (57344, 8192)),
    "squares": ((2048, 2048), (4096, 4096), (8192, 8192), (16384, 16384)),
    "small": ((4096, 4096),),
}


def shapes(names: list[str]) -> list[Shape]:
    """The shapes that names stand for: a set, a model, a model's layer ("Llama-2-7B/qkv"), or a size ("4096x11008").

    Each size comes once, under the first name for it. Raises SpecError for an unknown name.
    """
    found = [shape for name in names for shape in _shapes(name)]
    unique: dict[tuple[int, int], Shape] = {}
    for shape in found:
        unique.setdefault((shape.n, shape.k), shape)
    return list(unique.values())


def _shapes(name: str) -> list[Shape]:
    if name in SETS:
        return [Shape(f"{n} x {k}", n, k) for n, k in SETS[name]]
    model, _, layer = name.partition("/")
    known = {key.lower(): key for key in MODELS}
    if model.lower() in known:
        title = known[model.lower()]
        layers = MODELS[title].layers()
        if layer and layer not in layers:
            raise SpecError(f"shape {name!r}: {title} has the layers {', '.join(layers)}")
        return [Shape(f"{title} {each}", n, k) for each, (n, k) in layers.items() if layer in ("", each)]
    n, _, k = name.partition("x")
    if n.isdecimal() and k.isdecimal():
        return [Shape(f"{n} x {k}", int(n), int(k))]
    allowed = ", ".join([*SETS, *MODELS])
    raise SpecError(
        f"shape {name!r} must be one of {allowed}, a layer (Llama-2-7B/qkv) or a size (4096x11008)"
    )
