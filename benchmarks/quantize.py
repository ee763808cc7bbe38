"""What quantizing a language model takes, by recipe, in seconds and in memory: `python -m benchmarks quantize`.

The model has random weights, made anew for each recipe, and lies where it is quantized. Of a model with some of its
layers, the seconds are those of all layers: times as many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import lowbit
from benchmarks.tables import markdown
from lowbit.dialect.fields import choice
from lowbit.pylib.model_speed.config import model_config
from lowbit.pylib.model_speed.random_model import random_model

BEGIN, END = "<!-- quantizing: begin -->", "<!-- quantizing: end -->"
RECIPES: Mapping[str, lowbit.QuantConfig] = MappingProxyType(
    {
        "u4 per 128, whole range": lowbit.QuantConfig("u4", 128, clip="max"),
        "u4 per 128": lowbit.QuantConfig("u4", 128),
        "f6e3m2 per row": lowbit.QuantConfig("f6e3m2", None),
        "u4 per 128, HQQ": lowbit.QuantConfig("u4", 128, method="hqq"),
        "u4 per 128, GPTQ": lowbit.QuantConfig("u4", 128, method="gptq"),
    }
)
SEQUENCES, LENGTH = 4, 2048
"""Of random tokens, for recipes that need calibration."""


@dataclass(frozen=True)
class Cost:
    """What a recipe takes. gigabytes: at most at a time, above the dense model; None on a CPU."""

    recipe: str
    seconds: float
    gigabytes: float | None


def costs(
    model: str, recipes: Sequence[str], layers: int | None, device: str, on_step: Callable[[str], None]
) -> list[Cost]:
    """Returns what each recipe takes for all layers of a model, of which only the first `layers` are quantized.

    Raises SpecError for a recipe or model that is unknown.
    """
    for name in recipes:
        choice("recipe", name, tuple(RECIPES))
    total = model_config(model).num_hidden_layers
    found = []
    for name in recipes:
        config = model_config(model, layers)
        _quantize(random_model(model_config("tiny"), None, device), RECIPES[name])  # what a first call costs once
        seconds, gigabytes = _quantize(random_model(config, None, device), RECIPES[name])
        found.append(Cost(name, seconds * total / config.num_hidden_layers, gigabytes))
        on_step(f"{name}: {found[-1].seconds:.1f} s")
    return found


def _quantize(model: nn.Module, config: lowbit.QuantConfig) -> tuple[float, float | None]:
    """Quantizes a model in place; returns the seconds, and by how many GB memory grew meanwhile, None on a CPU."""
    calibration = _tokens(model) if config.needs_data else None
    before = _begin(model)
    start = time.perf_counter()
    lowbit.quantize_(model, config, calibration=calibration, progress=False)
    if before is not None:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, None if before is None else (torch.cuda.max_memory_allocated() - before) / 1e9


def _begin(model: nn.Module) -> int | None:
    """Returns the bytes in use on the GPU, from where their maximum counts; None for a model on a CPU."""
    if next(model.parameters()).device.type == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _tokens(model: Any) -> list[torch.Tensor]:
    config = model.config
    length = min(LENGTH, config.max_position_embeddings)
    return list(torch.randint(config.vocab_size, (SEQUENCES, 1, length), device=model.device))


def table(found: Sequence[Cost]) -> str:
    """Returns the page's table."""
    rows = [(cost.recipe, f"{cost.seconds:.1f}", _gigabytes(cost.gigabytes)) for cost in found]
    return markdown(("", "seconds", "GB above the model"), rows)


def _gigabytes(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"
