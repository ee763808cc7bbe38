"""`lowbit.quantize_`: the linear layers of a model become `LowbitLinear`s, and experts `LowbitExperts`, in place."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import chain, compress
from pathlib import Path
from typing import Any, cast

import torch
from numpy import isfinite
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from lowbit.dialect.errors import QuantizeError
from lowbit.dialect.spec import Act
from lowbit.pylib.nn.bit_plan import QuantPlan
from lowbit.pylib.nn.column_scales import ColumnScales, column_scales
from lowbit.pylib.nn.embedding import LowbitEmbedding
from lowbit.pylib.nn.experts import MATRICES, LowbitExperts, dense_bias, dense_weight, is_experts
from lowbit.pylib.nn.fuse import fuse_
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.observe import as_inputs, calibrations
from lowbit.pylib.nn.packed_module import PackedModule
from lowbit.pylib.nn.plan import Configs, Filter, Planned, Wishes, matrix_of, naming, plan
from lowbit.pylib.nn.quantize_layer import Change, quantized_layer
from lowbit.pylib.nn.replace import replace_module, replace_planned
from lowbit.pylib.nn.report import LayerReport, QuantizationReport
from lowbit.pylib.quantization.calibration import Calibration
from lowbit.pylib.quantization.config import CALIBRATED, QuantConfig
from lowbit.pylib.torch_types import TORCH

Rows = dict[tuple[str, ...], list[LayerReport]]
DOUBT = 1e-3
"""Weights beyond this part of the largest scale times the largest level are tried before any layer is replaced."""


@torch.no_grad()
def quantize_(
    model: nn.Module,
    config: Configs | str | os.PathLike[str] | None = None,
    filter_fn: Filter | None = None,
    calibration: Iterable[Any] | None = None,
    device: torch.device | str | None = None,
    *,
    act: Act | None = None,
    lm_head: bool = False,
    embeddings: bool = False,
    per_row_if_indivisible: bool = False,
    fuse: bool = False,
    progress: bool = True,
) -> QuantizationReport:
    """Quantize the linear layers of a model in place; returns what became of each, to print or to look at.

    config                   a QuantConfig for all, or a dictionary from patterns of names ("*.mlp.*") to QuantConfigs,
                             or to None for layers that stay dense; the first pattern that matches counts. Or a plan
                             (`lowbit.plan`), or the name of its file
    filter_fn                filter_fn(name, module) returns whether to quantize a linear layer; None: all of them
    calibration              inputs of the model, for methods that need them: each a tensor, a tuple of arguments, or a
                             dictionary of arguments by name. The float model is run on them
    device                   where to quantize, "cuda" say; the layers stay where they are. None: there
    act                      type of the layers' inputs, "f16" or "bf16"; None: that of each weight
    lm_head                  quantize the output layer as well, if its name ends in "lm_head" and its weight is not tied
    embeddings               quantize embeddings as well, which become `LowbitEmbedding`s; a linear layer whose weight
                             is tied to one multiplies by the same packed weight
    per_row_if_indivisible   one scale per row where the group size does not divide k, which stay dense otherwise
    fuse                     make one layer of those that share their input (`lowbit.fuse_`): fewer, larger matmuls
    progress                 show a bar with time and memory, if standard error is a terminal

    The experts of transformers' mixtures of experts become `LowbitExperts`. All else that is no plain nn.Linear stays
    dense, and so do embeddings and what is tied to them unless they are asked for; the report says why. A layer is
    replaced as soon as it is quantized, so memory holds little more than the model at any time; layers that need
    calibration are replaced together, before the others, for it is the float model that they are calibrated on. AWQ's
    column scales are folded into the norm or the quantized layer that makes the layers' input; where there is none, the
    weight is rounded as it is, and the report says why. Weights are looked at before the first is replaced: an error in
    what is given names the module, and leaves the model as it was.

    Raises SpecError for a configuration that does not fit the model, QuantizeError for weights and calibration data
    that cannot be used.
    """
    if isinstance(config, os.PathLike) or (isinstance(config, str) and config.endswith(".json")):
        config = QuantPlan.load(config)
    chosen = QuantConfig() if config is None else cast(Configs, config)
    wishes = Wishes(chosen, filter_fn, act, lm_head, embeddings, per_row_if_indivisible)
    planned = plan(model, wishes)
    inputs = as_inputs(calibration)
    rows: Rows = {entry.names: [_dense_row(entry)] if entry.reason else [] for entry in planned}
    calibrated, others = _by_need(planned)
    del planned  # which holds the dense layers
    _check_calibration(calibrated, inputs)
    scaled = [entry for entry in calibrated if _is_awq(entry)]
    columns = column_scales(model, scaled, inputs, device, [*calibrated, *others])
    for entry in filter(_is_doubtful, others):
        _quantized(entry, None, device)  # to see whether it can be
    with _bar(progress) as bar:
        task = bar.add_task("", total=len(calibrated) + len(others), memory="")

        def quantized(entry: Planned, data: Calibration | None) -> nn.Module:
            bar.update(task, description=entry.names[0], memory=_memory(device))
            layer, rows[entry.names] = _quantized(entry, data, device, columns)
            bar.advance(task)
            return layer

        layers = {entry.names: quantized(entry, data) for entry, data in _with_data(model, calibrated, inputs)}
        calibrated.clear()
        for names, layer in layers.items():
            replace_module(model, names, layer)
        columns.fold_()
        while others:  # one after the other, so that each dense layer can go
            entry = others.popleft()
            replace_planned(model, entry, quantized(entry, None))
            del entry
    _tell_transformers(model)
    return QuantizationReport(tuple(chain.from_iterable(rows.values())), fuse_(model) if fuse else ())


def _by_need(planned: Sequence[Planned]) -> tuple[deque[Planned], deque[Planned]]:
    """Returns the layers to quantize whose methods need calibration, and the others."""
    chosen = [entry for entry in planned if entry.config is not None]
    needs = [cast(QuantConfig, entry.config).method in CALIBRATED for entry in chosen]
    return deque(compress(chosen, needs)), deque(entry for entry, need in zip(chosen, needs) if not need)


def _check_calibration(calibrated: Sequence[Planned], inputs: Sequence[Any]) -> None:
    """Raises QuantizeError if layers need calibration and there is none."""
    if calibrated and not inputs:
        method = cast(QuantConfig, calibrated[0].config).method
        name = calibrated[0].names[0]
        raise QuantizeError(f"{name}: method={method!r} needs calibration=, a list of inputs of the model")


def _is_doubtful(entry: Planned) -> bool:
    """Tells whether it is uncertain that a layer can be quantized: a value is not finite, or a scale could be."""
    config = cast(QuantConfig, entry.config)
    levels = config.dtype.values()
    kind = TORCH[config.bilevel.scale if config.bilevel else config.scale]
    reach = float(abs(levels[isfinite(levels)]).max()) * torch.finfo(kind).max * DOUBT
    return any(p.is_meta or not float(p.abs().max()) < reach for p in entry.module.parameters(recurse=False))


def _with_data(
    model: nn.Module, calibrated: Sequence[Planned], inputs: Sequence[Any]
) -> Iterator[tuple[Planned, Calibration | None]]:
    """Yields layers, each with its calibration; those of AWQ have had theirs, and come last."""
    entries = {entry.names[0]: entry for entry in calibrated if not _is_awq(entry)}
    layers = {name: cast(nn.Linear, entry.module) for name, entry in entries.items()}
    for name, data in calibrations(model, layers, inputs):
        yield entries[name], data
    yield from ((entry, None) for entry in calibrated if _is_awq(entry))


def _is_awq(entry: Planned) -> bool:
    return cast(QuantConfig, entry.config).method == "awq"


def _bar(progress: bool) -> Progress:
    """Returns a bar that shows how many layers are done, how long the rest will take, and the memory in use."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    hidden = not (progress and console.is_terminal)
    names = TextColumn("{task.fields[memory]}"), TextColumn("{task.description}")
    return Progress(*columns, *names, console=console, transient=True, disable=hidden)


def _memory(device: torch.device | str | None) -> str:
    """Returns the memory in use, as text: of the process, and of torch's tensors on the GPU where it quantizes."""
    pages = Path("/proc/self/statm")
    parts = [int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")] if pages.exists() else []
    names = ["in memory"] * len(parts)
    if torch.cuda.is_initialized():
        parts.append(torch.cuda.memory_allocated(device if device and torch.device(device).type == "cuda" else None))
        names.append("on the GPU")
    return ", ".join(f"{size / 1e9:.1f} GB {name}" for size, name in zip(parts, names))


def _quantized(
    entry: Planned,
    calibration: Calibration | None,
    device: torch.device | str | None,
    columns: ColumnScales | None = None,
) -> tuple[nn.Module, list[LayerReport]]:
    """Returns the module that takes another's place, and what the report says of it."""
    config = cast(QuantConfig, entry.config)
    with naming(entry.names[0]):
        if is_experts(entry.module):
            return _quantized_experts(entry, config, device)
        if isinstance(entry.module, nn.Embedding):
            return _quantized_embedding(entry, entry.module, config, device)
        linear = cast(nn.Linear, entry.module)
        rounding = replace(config, method="rtn") if _is_awq(entry) else config  # of a weight that is scaled before
        columns = columns or ColumnScales()
        scales, rows = (each.get(entry.names[0]) for each in (columns.of, columns.rows))
        parts = linear.weight, linear.bias, entry.specs[0], rounding, calibration, device, scales, rows
        layer, change = quantized_layer(*parts)
    note = columns.notes.get(entry.names[0], "")
    row = _row(_name(entry), config, [layer], change, _bytes(linear))
    return layer.train(linear.training), [replace(row, note=note)]


def _quantized_embedding(
    entry: Planned, dense: nn.Embedding, config: QuantConfig, device: torch.device | str | None
) -> tuple[LowbitEmbedding, list[LayerReport]]:
    """Returns a low-bit embedding, and its row of the report."""
    layer, change = quantized_layer(dense.weight, None, entry.specs[0], config, None, device)
    embedding = LowbitEmbedding.from_packed(layer.packed).in_place_of(dense)
    name = " = ".join((*entry.names, *entry.tied))
    return embedding, [_row(name, config, [embedding], change, _bytes(dense))]


def _quantized_experts(
    entry: Planned, config: QuantConfig, device: torch.device | str | None
) -> tuple[nn.Module, list[LayerReport]]:
    """Returns low-bit experts, and a row of the report for each of their two matrices."""
    dense, layers, rows = entry.module, list[list[LowbitLinear]](), list[LayerReport]()
    for name, spec in zip(MATRICES, entry.specs):
        weights, biases = dense_weight(dense, name), dense_bias(dense, name)
        parts = list[LowbitLinear]()
        total = Change()
        for expert, weight in enumerate(weights):
            with naming(f"{name}[{expert}]"):
                bias = None if biases is None else biases[expert]
                layer, change = quantized_layer(weight, bias, spec, config, None, device)
            parts.append(layer)
            total += change
        before = weights.nbytes + (0 if biases is None else biases.nbytes)
        rows.append(_row(f"{_name(entry)}.{name}", config, parts, total, before))
        layers.append(parts)
    return LowbitExperts(dense, *layers), rows


def _row(name: str, config: QuantConfig, layers: Sequence[PackedModule], change: Change, before: int) -> LayerReport:
    spec = layers[0].spec
    columns = "row" if spec.group_size is None else str(spec.group_size)
    form = f"{spec.weight} per {columns}, {config.method}"
    shape = (spec.n, spec.k) if len(layers) == 1 else (len(layers), spec.n, spec.k)
    return LayerReport(name, shape, form, before, sum(map(_bytes, layers)), change.relative)


def _dense_row(entry: Planned) -> LayerReport:
    size = _bytes(entry.module)
    if isinstance(entry.module, PackedModule):
        spec = entry.module.spec
        return LayerReport(_name(entry), (spec.n, spec.k), spec.weight, size, size, reason=entry.reason)
    matrix = matrix_of(entry.module)
    form = str(matrix.dtype).removeprefix("torch.")
    return LayerReport(_name(entry), tuple(matrix.shape), form, size, size, reason=entry.reason)


def _name(entry: Planned) -> str:
    """Returns the name of a module in the report, with all others by which the model holds it."""
    return " = ".join(entry.names)


def _bytes(module: nn.Module) -> int:
    tensors: list[Tensor] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return sum(tensor.nbytes for tensor in tensors)


def _tell_transformers(model: nn.Module) -> None:
    """Let a model of transformers know that it is low-bit, so that save_pretrained says so in config.json."""
    if "transformers.modeling_utils" in sys.modules:
        import_module("lowbit.pylib.integrations.quantizer").adopt(model)
