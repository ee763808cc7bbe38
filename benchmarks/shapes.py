"""Shapes to measure, by name: the linear layers of models (`pylib.tune.model_shapes`), and sets of plain sizes."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.errors import SpecError
from lowbit.pylib.tune.model_shapes import MODELS, linear_sizes


@dataclass(frozen=True)
class Shape:
    """A weight [n, k]. name: what it is for, such as "Llama-3.1-8B qkv"; the size if it is only that."""

    name: str
    n: int
    k: int


SETS = {
    "issue": ((4096, 4096), (8192, 8192), (8192, 28672), (57344, 8192)),
    "squares": ((2048, 2048), (4096, 4096), (8192, 8192), (16384, 16384)),
}


def shapes(names: list[str]) -> list[Shape]:
    """The shapes that names stand for: a set, a model, a model's layer ("Llama-2-7B/qkv"), or a size ("4096x11008").

    Each size comes once, under the first name for it. Raises SpecError for an unknown name.
    """
    unique: dict[tuple[int, int], Shape] = {}
    for name in names:
        for n, k in _sizes(name):
            unique.setdefault((n, k), Shape(_title(name, n, k), n, k))
    return list(unique.values())


def _sizes(name: str) -> list[tuple[int, int]]:
    if name in SETS:
        return list(SETS[name])
    try:
        return linear_sizes([name])
    except SpecError as error:
        raise SpecError(f"{error}; or a set: {', '.join(SETS)}") from None


def _title(name: str, n: int, k: int) -> str:
    """The layer's name within the model that was asked for."""
    asked = name.partition("/")[0].lower()
    for title, model in MODELS.items():
        for layer, size in model.linears.items():
            if title.lower() == asked and size == (n, k):
                return f"{title} {layer}"
    return f"{n} x {k}"
