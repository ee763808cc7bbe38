"""What quantizing a language model takes, by recipe, in seconds and in memory: `python -m benchmarks quantize`.

The model has random weights, made anew for each recipe, and lies where it is quantized. Of a model with some of its
layers, the seconds are those of all layers: times as many. Methods with data run the whole model on calibration text
again for every few layers, so that a part of the layers says too little of these runs, whose time grows with the square
of the layers. A first call, which takes longer than others, comes before on the smallest layer alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import lowbit
from benchmarks import record_lines
from benchmarks.environment import describe, environment
from benchmarks.tables import markdown
from lowbit.dialect.fields import choice
from lowbit.pylib.model_speed.config import model_config
from lowbit.pylib.model_speed.random_model import random_model
from lowbit.pylib.nn.plan import Filter

BEGIN, END = "<!-- quantizing: begin -->", "<!-- quantizing: end -->"
U4 = lowbit.QuantConfig("u4", 128)
GPTQ = replace(U4, method="gptq")
RECIPES: Mapping[str, lowbit.QuantConfig] = MappingProxyType(
    {
        "u4 per 128, whole range": replace(U4, clip="max"),
        "u4 per 128": U4,
        "u4 per 128, importances": replace(U4, calibration="importance"),
        "u4 per 128, ranges by output error": replace(U4, calibration="hessian"),
        "f6e3m2 per row": lowbit.QuantConfig("f6e3m2", None),
        **{
            name: lowbit.QuantConfig.preset(name)
            for name in ("nf4", "mxfp4", "nvfp4", "q4_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")
        },
        "q4_k, importances": replace(lowbit.QuantConfig.preset("q4_k"), calibration="importance"),
        "u4 per 128, HQQ": lowbit.QuantConfig("u4", 128, method="hqq"),
        "u4 per 128, AWQ": replace(U4, method="awq"),
        "u4 per 128, GPTQ": GPTQ,
        "q4_k, GPTQ": replace(lowbit.QuantConfig.preset("q4_k"), method="gptq"),
        "spqr": lowbit.QuantConfig.preset("spqr"),
        "u2 per 64, SignRound": lowbit.QuantConfig.preset("signround2"),
        "u4 per 128, GPTQ, 8 beams": replace(GPTQ, beams=8),
    }
)
"""What is measured, by name; what takes longest comes last."""
SEQUENCES, LENGTH = 4, 2048
"""Of random tokens, for recipes that need calibration."""


@dataclass(frozen=True)
class Cost:
    """What a recipe takes.

    layers      of the model that were quantized
    seconds     of all layers of the model
    gigabytes   at most at a time, above the dense model; None on a CPU
    """

    model: str
    recipe: str
    layers: int
    seconds: float
    gigabytes: float | None


def costs(
    model: str,
    recipes: Sequence[str],
    layers: int | None,
    device: str,
    on_step: Callable[[str], None],
    budget: float = math.inf,
) -> Iterator[Cost]:
    """Yields what each recipe takes for all layers of a model, of which only the first `layers` are quantized. None is
    begun more than `budget` seconds after the first.

    Raises SpecError for a recipe or model that is unknown.
    """
    for name in recipes:
        choice("recipe", name, tuple(RECIPES))
    total, config, start = model_config(model).num_hidden_layers, model_config(model, layers), time.perf_counter()
    for name in recipes:
        if time.perf_counter() - start > budget:
            on_step(f"{name} is left out: {budget:g} s are over")
            continue
        first = random_model(config, None, device)
        _quantize(first, RECIPES[name], _of_smallest(first))
        del first
        seconds, gigabytes = _quantize(random_model(config, None, device), RECIPES[name])
        seconds *= total / config.num_hidden_layers
        on_step(f"{name}: {seconds:.1f} s")
        yield Cost(model, name, config.num_hidden_layers, seconds, gigabytes)


def _of_smallest(model: nn.Module) -> Filter:
    """Returns a filter for the layer of a model that has the fewest weights, the first of those as small."""
    sizes = {
        name: module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    smallest = min(sizes, key=lambda name: sizes[name])
    return lambda name, module: name == smallest


def _quantize(
    model: nn.Module, config: lowbit.QuantConfig, filter_fn: Filter | None = None
) -> tuple[float, float | None]:
    """Quantizes a model in place; returns the seconds, and by how many GB memory grew meanwhile, None on a CPU."""
    calibration = _tokens(model) if config.needs_data else None
    before = _begin(model)
    start = time.perf_counter()
    lowbit.quantize_(model, config, filter_fn, calibration, progress=False)
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


def write(found: Iterable[Cost], out: Path, commit: str | None) -> dict[str, Any]:
    """Writes results into a file as they come, in place of those of the same model and recipe; returns what the file
    has. Raises OSError for a file that can't be read or written."""
    records: list[dict[str, Any]] = json.loads(out.read_text())["records"] if out.exists() else []
    written = {"environment": environment(commit), "records": records}
    for cost in found:
        new = asdict(cost)
        records[:] = [each for each in records if (each["model"], each["recipe"]) != (cost.model, cost.recipe)] + [new]
        record_lines.write(out, written)
    return written


def text_of(written: Mapping[str, Any], model: str) -> str:
    """Returns the page's text on a model: where it was measured, and a table in the order of the recipes."""
    found = {each["recipe"]: Cost(**each) for each in written["records"] if each["model"] == model}
    costs = [found[name] for name in RECIPES if name in found]
    total = model_config(model).num_hidden_layers
    parts = {cost.layers for cost in costs} - {total}
    scaled = f" Where it says so, some of the {total} layers were quantized, and their seconds scaled." if parts else ""
    rows = [
        (cost.recipe, f"{cost.seconds:.1f}", *_compared(cost, found.get("u4 per 128, GPTQ")), str(cost.layers))
        for cost in costs
    ]
    head = ("", "seconds", "of GPTQ's", "GB above the model", "layers")
    return f"{model}. {describe(written['environment'])}.{scaled}\n\n{markdown(head, rows)}"


def _compared(cost: Cost, gptq: Cost | None) -> tuple[str, str]:
    """Returns the cells on the time relative to GPTQ's, and on memory."""
    ratio = "" if gptq is None else f"{cost.seconds / gptq.seconds:.2f}"
    return ratio, "" if cost.gigabytes is None else f"{cost.gigabytes:.2f}"
