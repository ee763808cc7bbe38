"""Finds what a folder says of its quantization: most libraries say it in config.json, some in a file of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.tensor_files import read_json

CONFIG = "config.json"
ENTRY = "quantization_config"
DEPTH = 3  # of parts of a model within parts
Entries = dict[str, Any]


def model_config(folder: Path) -> Entries:
    """Returns what the config.json of a folder says; {} without one."""
    return _optional(folder / CONFIG)


def quantization_config(folder: Path, config: Mapping[str, Any]) -> tuple[Path, Entries]:
    """Returns the file of a folder that says how its model is quantized, and what it says with a quant_method; {} if
    none does. config: what config.json says.

    Raises CheckpointError for parts of a model that are quantized in different ways.
    """
    found = list(_within(config))
    if any(entries != found[0] for entries in found):
        raise CheckpointError(f"{folder / CONFIG} has several {ENTRY}s that differ; what can be read is one for all")
    if found and found[0].get("quant_method"):
        return folder / CONFIG, found[0]
    if isinstance(mlx := config.get("quantization"), dict):
        return folder / CONFIG, {"quant_method": "mlx", **cast(Entries, mlx)}
    for name, of_library in FILES.items():
        if entries := _optional(folder / name):
            return folder / name, of_library(entries)
    return folder / CONFIG, _with_method(found[0]) if found else {}


def _within(config: Mapping[str, Any], depth: int = DEPTH) -> Iterator[Entries]:
    """Yields the descriptions of a model, or those of its parts: the text model of one that sees, say."""
    given = config.get(ENTRY) or config.get("compression_config")
    if isinstance(given, dict):
        yield cast(Entries, given)
        return
    for part in config.values() if depth else ():
        if isinstance(part, dict):
            yield from _within(cast(Entries, part), depth - 1)


def _with_method(entries: Entries) -> Entries:
    """Returns a description with the method that early ones of bitsandbytes leave out."""
    is_bitsandbytes = entries.get("load_in_4bit") or entries.get("load_in_8bit")
    return {"quant_method": "bitsandbytes", **entries} if is_bitsandbytes else entries


OF_EARLY_AWQ = {"w_bit": "bits", "q_group_size": "group_size"}


def _of_awq(entries: Entries) -> Entries:
    """Returns a description in a file of AWQ, whose early versions had other names, or of GPTQModel."""
    return {"quant_method": "awq", **{OF_EARLY_AWQ.get(name, name): value for name, value in entries.items()}}


def _of_gptq(entries: Entries) -> Entries:
    """Returns a description in a file of AutoGPTQ, whose name early models of AWQ have, too."""
    return {"quant_method": "gptq", **entries} if entries.keys().isdisjoint(OF_EARLY_AWQ) else _of_awq(entries)


def _of_modelopt(entries: Entries) -> Entries:
    inner = entries.get("quantization")
    return {"quant_method": "modelopt", **(cast(Entries, inner) if isinstance(inner, dict) else entries)}


FILES: Mapping[str, Callable[[Entries], Entries]] = {
    "quantize_config.json": _of_gptq,
    "quant_config.json": _of_awq,
    "quantization_config.json": lambda entries: {"quant_method": "auto-round", **entries},
    "hf_quant_config.json": _of_modelopt,
    "quanto_qmap.json": lambda entries: {"quant_method": "quanto", "qmap": entries},
}
"""Files that describe a quantization, each with what makes a quantization_config of it."""


def _optional(file: Path) -> Entries:
    return read_json(file) if file.exists() else {}
