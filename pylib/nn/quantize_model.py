"""`lowbit.quantize_`: the linear layers of a model become `LowbitLinear`s, and experts `LowbitExperts`, in place."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import chain, compress, islice
from typing import Any, cast

import torch
from numpy import isfinite
from torch import nn

from lowbit.dialect.errors import QuantizeError
from lowbit.dialect.spec import Act
from lowbit.pylib.nn.column_scales import column_scales
from lowbit.pylib.nn.fuse import fuse_
from lowbit.pylib.nn.observe import Observed, as_inputs, calibrations
from lowbit.pylib.nn.plan import Configs, Filter, Planned, Wishes, plan
from lowbit.pylib.nn.progress import LayerBar
from lowbit.pylib.nn.quant_plan import QuantPlan
from lowbit.pylib.nn.quantizable import matrices_of
from lowbit.pylib.nn.quantize_planned import dense_row, quantized_module
from lowbit.pylib.nn.replace import replace_module, replace_planned
from lowbit.pylib.nn.report import LayerReport, QuantizationReport
from lowbit.pylib.nn.texts import tokenized
from lowbit.pylib.quantization.config import QuantConfig, usual_config
from lowbit.pylib.runtime.devices import check_torch_device
from lowbit.pylib.torch_types import TORCH

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
    tokenizer: Any = None,
) -> QuantizationReport:
    """Quantize the linear layers of a model in place; returns what became of each, to print or to look at.

    config                   a QuantConfig for all, or a dictionary from patterns of names ("*.mlp.*") to QuantConfigs,
                             or to None for layers that stay dense; the first pattern that matches counts. Or a plan
                             (`lowbit.plan`), or the name of its file. None: u4 in groups of 128, rounded to nearest,
                             or by GPTQ with calibration
    filter_fn                filter_fn(name, module) returns whether to quantize a linear layer; None: all of them
    calibration              inputs of the model, for methods that need them: each a tensor, a tuple of arguments, a
                             dictionary of arguments by name, or a text, of which the first 2048 tokens are taken. The
                             float model is run on them
    device                   where to quantize, "cuda" say; the layers stay where they are. None: there
    act                      type of the layers' inputs, "f16" or "bf16"; None: that of each weight
    lm_head                  quantize the output layer as well, if its name ends in "lm_head" and its weight is not tied
    embeddings               quantize embeddings as well, which become `LowbitEmbedding`s; a linear layer whose weight
                             is tied to one multiplies by the same packed weight
    per_row_if_indivisible   one scale per row where the group size does not divide k, which stay dense otherwise; of
                             K-quants, fewer groups share a second level where that suffices
    fuse                     make one layer of those that share their input (`lowbit.fuse_`): fewer, larger matmuls
    progress                 show a bar with time and memory, if standard error is a terminal
    tokenizer                of transformers, for texts; None: that of the folder or name the model was loaded from

    The experts of transformers' mixtures of experts become `LowbitExperts`. Each is calibrated on the tokens that it
    gets; one that gets fewer than its matrix has columns on those of all, or is rounded to nearest where these are too
    few as well, and the report says how many there are. GPT-2's `Conv1D` are
    linear layers, too. All else that is no plain nn.Linear stays dense, and so do embeddings and what is tied to them
    unless they are asked for; the report says why. A layer is replaced as soon as it is quantized, so memory holds
    little more than the model at any time; layers that need calibration are replaced together, before the others, for
    it is the float model that they are calibrated on. AWQ's column scales are folded into the norm or the quantized
    layer that makes the layers' input; where there is none, as for experts, the weight is rounded as it is, and the
    report says why. Weights are looked at before the first is replaced: an error in what is given names the module, and
    leaves the model as it was.

    Raises SpecError for a configuration that does not fit the model, QuantizeError for weights and calibration data
    that cannot be used, TargetError for a device that is not here.
    """
    check_torch_device(device)
    inputs = tokenized(as_inputs(calibration), model, tokenizer)
    configs = _configs(config, bool(inputs))
    wishes = Wishes(configs, filter_fn, act, lm_head, embeddings, per_row_if_indivisible)
    work = _Work(model, plan(model, wishes), inputs, device)
    rows = work.run(progress)
    if "transformers.modeling_utils" in sys.modules:  # so that save_pretrained says in config.json that it is low-bit
        import_module("lowbit.pylib.integrations.quantizer").adopt(model)
    return QuantizationReport(rows, fuse_(model) if fuse else ())


def _configs(given: Configs | str | os.PathLike[str] | None, has_data: bool) -> Configs:
    """Returns the configurations that a caller gives, or that a file of his has, or what is usual without either."""
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".json")):
        return QuantPlan.load(given)
    return usual_config(has_data) if given is None else cast(Configs, given)


class _Work:
    """The work on a model: modules that need calibration, and others. Raises for what can't be done."""

    def __init__(
        self, model: nn.Module, planned: Sequence[Planned], inputs: Sequence[Any], device: torch.device | str | None
    ) -> None:
        self._model, self._inputs, self._device = model, inputs, device
        self._rows = {entry.names: [dense_row(entry)] if entry.reason else list[LayerReport]() for entry in planned}
        self._calibrated, self._others = _by_need(planned)
        _check_calibration(self._calibrated, inputs)
        scaled = [entry for entry in self._calibrated if _is_awq(entry)]
        self._columns = column_scales(model, scaled, inputs, device, [*self._calibrated, *self._others])
        for entry in filter(_is_doubtful, self._others):
            quantized_module(entry, (), device)  # to see whether it can be

    def run(self, progress: bool) -> tuple[LayerReport, ...]:
        """Replaces the modules; returns the rows of the report."""
        with LayerBar(progress, len(self._calibrated) + len(self._others), self._device) as self._bar:
            self._replace_calibrated()
            self._replace_others()
        return tuple(chain.from_iterable(self._rows.values()))

    def _replace_calibrated(self) -> None:
        """Replaces the modules that need calibration together: it is the float model that they are calibrated on."""
        layers = {entry.names: self._quantized(entry, data) for entry, data in self._with_data()}
        self._calibrated.clear()
        for names, layer in layers.items():
            replace_module(self._model, names, layer)
        self._columns.fold_()

    def _replace_others(self) -> None:
        """Replaces the others one after the other, so that each dense layer can go."""
        while self._others:
            entry = self._others.popleft()
            replace_planned(self._model, entry, self._quantized(entry))
            del entry

    def _quantized(self, entry: Planned, data: Iterable[Observed] = ()) -> nn.Module:
        self._bar.begin(entry.names[0])
        layer, self._rows[entry.names] = quantized_module(entry, data, self._device, self._columns)
        self._bar.end()
        return layer

    def _with_data(self) -> Iterator[tuple[Planned, Iterable[Observed]]]:
        """Yields modules, each with its calibration, or with those of its experts, to be used before the next is asked
        for. Those that need importances alone come last."""
        for cheap in (False, True):
            entries = [entry for entry in self._calibrated if _needs_only_importance(entry) is cheap]
            layers = {entry.names[0]: entry.module for entry in entries}
            found = calibrations(self._model, layers, self._inputs, cheap)
            for entry in entries:
                yield entry, (seen for _, seen in islice(found, len(matrices_of(entry.names[0], entry.module))))


def _by_need(planned: Sequence[Planned]) -> tuple[deque[Planned], deque[Planned]]:
    """Returns the layers to quantize whose methods need calibration, and the others."""
    chosen = [entry for entry in planned if entry.config is not None]
    needs = [cast(QuantConfig, entry.config).needs_data for entry in chosen]
    return deque(compress(chosen, needs)), deque(entry for entry, need in zip(chosen, needs) if not need)


def _check_calibration(calibrated: Sequence[Planned], inputs: Sequence[Any]) -> None:
    """Raises QuantizeError if layers need calibration and there is none."""
    if calibrated and not inputs:
        config, name = cast(QuantConfig, calibrated[0].config), calibrated[0].names[0]
        what = f"calibration={config.calibration!r}" if config.calibration else f"method={config.method!r}"
        raise QuantizeError(f"{name}: {what} needs calibration=, a list of inputs of the model")


def _is_doubtful(entry: Planned) -> bool:
    """Tells whether it is uncertain that a layer can be quantized: a value is not finite, or a scale could be."""
    config = cast(QuantConfig, entry.config)
    levels = config.dtype.values()
    kind = TORCH[config.bilevel.scale if config.bilevel else config.scale_type]
    reach = float(abs(levels[isfinite(levels)]).max()) * torch.finfo(kind).max * DOUBT
    return any(p.is_meta or not float(p.abs().max()) < reach for p in entry.module.parameters(recurse=False))


def _needs_only_importance(entry: Planned) -> bool:
    return cast(QuantConfig, entry.config).calibration == "importance"


def _is_awq(entry: Planned) -> bool:
    return cast(QuantConfig, entry.config).method == "awq"
