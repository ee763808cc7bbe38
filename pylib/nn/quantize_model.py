"""`lowbit.quantize_`: the linear layers of a model become `LowbitLinear`s, in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from lowbit.dialect.errors import QuantizeError
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.pylib.nn.fuse import fuse_
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.observe import as_inputs, calibrations
from lowbit.pylib.nn.plan import Configs, Filter, Planned, Wishes, naming, plan
from lowbit.pylib.nn.report import LayerReport, QuantizationReport
from lowbit.pylib.quantization.api import quantize
from lowbit.pylib.quantization.calibration import Calibration
from lowbit.pylib.quantization.config import CALIBRATED, QuantConfig


@torch.no_grad()
def quantize_(
    model: nn.Module,
    config: Configs | None = None,
    filter_fn: Filter | None = None,
    calibration: Iterable[Any] | None = None,
    device: torch.device | str | None = None,
    *,
    act: Act | None = None,
    lm_head: bool = False,
    per_row_if_indivisible: bool = False,
    fuse: bool = False,
    progress: bool = True,
) -> QuantizationReport:
    """Quantize the linear layers of a model in place; returns what became of each, to print or to look at.

    config                   a QuantConfig for all, or a dictionary from patterns of names ("*.mlp.*") to QuantConfigs,
                             or to None for layers that stay dense; the first pattern that matches counts
    filter_fn                filter_fn(name, module) returns whether to quantize a linear layer; None: all of them
    calibration              inputs of the model, for methods that need them: each a tensor, a tuple of arguments, or a
                             dictionary of arguments by name. The float model is run on them
    device                   where to quantize, "cuda" say; the layers stay where they are. None: there
    act                      type of the layers' inputs, "f16" or "bf16"; None: that of each weight
    lm_head                  quantize the output layer as well, if its name ends in "lm_head" and its weight is not tied
    per_row_if_indivisible   one scale per row where the group size does not divide k, which stay dense otherwise
    fuse                     make one layer of those that share their input (`lowbit.fuse_`): fewer, larger matmuls
    progress                 show a bar, if standard error is a terminal

    Embeddings, tied weights, and all that is no plain nn.Linear stay dense; the report says why. On an error, which
    names the module, the model is as it was: layers are replaced when all are quantized. So at the peak there are the
    model, its quantized layers, and the working memory of one layer.

    Raises SpecError for a configuration that does not fit the model, QuantizeError for weights and calibration data
    that cannot be used.
    """
    wishes = Wishes(QuantConfig() if config is None else config, filter_fn, act, lm_head, per_row_if_indivisible)
    planned = plan(model, wishes)
    inputs = as_inputs(calibration)
    replaced: dict[tuple[str, ...], tuple[LowbitLinear, LayerReport]] = {}
    with _bar(progress) as bar:
        task = bar.add_task("", total=sum(entry.config is not None for entry in planned))
        for entry, data in _with_data(model, planned, inputs):
            bar.update(task, description=entry.names[0])
            replaced[entry.names] = _quantized(entry, data, device)
            bar.advance(task)
    for names, (layer, _) in replaced.items():
        _replace(model, names, layer)
    rows = tuple(_dense_row(e) if e.reason else replaced[e.names][1] for e in planned)
    return QuantizationReport(rows, fuse_(model) if fuse else ())


def _with_data(
    model: nn.Module, planned: Sequence[Planned], inputs: Sequence[Any]
) -> Iterator[tuple[Planned, Calibration | None]]:
    """Yields the layers to quantize, each with its calibration if its method needs one."""
    chosen = [entry for entry in planned if entry.config is not None]
    calibrated = {entry.names[0]: entry for entry in chosen if cast(QuantConfig, entry.config).method in CALIBRATED}
    if calibrated and not inputs:
        name, entry = next(iter(calibrated.items()))
        method = cast(QuantConfig, entry.config).method
        raise QuantizeError(f"{name}: method={method!r} needs calibration=, a list of inputs of the model")
    yield from ((entry, None) for entry in chosen if entry.names[0] not in calibrated)
    layers = {name: cast(nn.Linear, entry.module) for name, entry in calibrated.items()}
    for name, data in calibrations(model, layers, inputs):
        yield calibrated[name], data


def _bar(progress: bool) -> Progress:
    """Returns a bar that shows how many layers are done, and how long the rest will take."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    hidden = not (progress and console.is_terminal)
    name = TextColumn("{task.description}")
    return Progress(*columns, name, console=console, transient=True, disable=hidden)


def _quantized(
    entry: Planned, calibration: Calibration | None, device: torch.device | str | None
) -> tuple[LowbitLinear, LayerReport]:
    """Returns the layer that takes a linear layer's place, and what the report says of it."""
    linear, config, spec = cast(nn.Linear, entry.module), cast(QuantConfig, entry.config), cast(MatmulSpec, entry.spec)
    home = linear.weight.device
    with naming(entry.names[0]):
        weight = linear.weight.to(device or home)
        quantized = quantize(weight, config, calibration)
        bias = None if linear.bias is None else linear.bias.to(weight.device)
        packed = quantized.pack(spec, bias).to(home)
    error = _relative_error(weight, quantized.dequantize())
    layer = LowbitLinear.from_packed(packed).train(linear.training)
    columns = "row" if spec.group_size is None else str(spec.group_size)
    form = f"{spec.weight} per {columns}, {config.method}"
    return layer, LayerReport(_name(entry), (spec.n, spec.k), form, _bytes(linear), packed.nbytes, error)


def _relative_error(weight: Tensor, rounded: Tensor) -> float:
    norm = float(weight.float().norm())
    return float(rounded.sub_(weight).norm()) / norm if norm else 0.0


def _dense_row(entry: Planned) -> LayerReport:
    size = _bytes(entry.module)
    if isinstance(entry.module, LowbitLinear):
        spec = entry.module.spec
        return LayerReport(_name(entry), (spec.n, spec.k), spec.weight, size, size, reason=entry.reason)
    matrix = next(p for p in entry.module.parameters(recurse=False) if p.ndim > 1)
    form = str(matrix.dtype).removeprefix("torch.")
    return LayerReport(_name(entry), tuple(matrix.shape), form, size, size, reason=entry.reason)


def _name(entry: Planned) -> str:
    """Returns the name of a module in the report, with all others by which the model holds it."""
    return " = ".join(entry.names)


def _bytes(module: nn.Module) -> int:
    tensors: list[Tensor] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return sum(tensor.nbytes for tensor in tensors)


def _replace(model: nn.Module, names: Sequence[str], layer: LowbitLinear) -> None:
    """Put a layer where the model holds the module of these names."""
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
