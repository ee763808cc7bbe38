"""The inputs that layers of a model see: hooks add them up in a `Calibration` for each layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import LowbitError, QuantizeError
from lowbit.pylib.nn.linear_like import as_linear
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.quantization.calibration import Calibration

MOST_BYTES = 1 << 30
"""Sums for as many layers as this holds are collected in one run of the model: each takes k^2 numbers in f64."""


def calibrations(
    model: nn.Module, layers: Mapping[str, nn.Module], inputs: Sequence[Any]
) -> Iterator[tuple[str, Calibration]]:
    """Yields the calibration of each layer, and forgets it when the next is asked for.

    The model is run on all inputs for some layers after the other, so that their sums take little memory.
    """
    for names in _batches(layers):
        found = _observe(model, {name: layers[name] for name in names}, inputs)
        for name in names:
            if name not in found or not found[name].tokens:
                raise QuantizeError(f"{name}: no calibration input got here; use another, or leave the layer dense")
            yield name, found.pop(name)


def _batches(layers: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    """Yields names of layers, in order, whose sums fit MOST_BYTES together."""
    batch: list[str] = []
    total = 0
    for name, layer in layers.items():
        size = 8 * as_linear(layer).in_features ** 2
        if batch and total + size > MOST_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += size
    if batch:
        yield batch


def _observe(model: nn.Module, layers: Mapping[str, nn.Module], inputs: Sequence[Any]) -> dict[str, Calibration]:
    """Returns the sums of some layers' inputs over all inputs of the model."""
    found: dict[str, Calibration] = {}
    handles = [
        layer.register_forward_pre_hook(_adding(found, name), with_kwargs=True) for name, layer in layers.items()
    ]
    try:
        with evaluating(model):
            for index, given in enumerate(inputs):
                run(model, given, index)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _adding(found: dict[str, Calibration], name: str) -> Any:
    """Returns a hook that adds a layer's input to its calibration."""

    def hook(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = args[0] if args else kwargs["input"]
        if name not in found:
            found[name] = Calibration(as_linear(layer).in_features, x.device)
        with naming(name):
            found[name].add(x)

    return hook


def run(model: nn.Module, given: Any, index: int) -> Any:
    """Returns the output of the model for one input: a tensor, a tuple of arguments, or a dictionary of them."""
    args, kwargs = (given,), {}
    if isinstance(given, Mapping):
        args, kwargs = (), dict(given)
    elif isinstance(given, tuple | list):
        args = tuple(given)
    entered = [""]
    hooks = [module.register_forward_pre_hook(_noting(entered, name)) for name, module in model.named_modules()]
    try:
        return model(*args, **kwargs)
    except LowbitError:
        raise
    except Exception as error:
        where = entered[0] or type(model).__name__
        raise QuantizeError(f"{where}: the model can't be run on input {index} of calibration=: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()


def _noting(entered: list[str], name: str) -> Any:
    """Returns a hook that notes which module was entered last: there an error came up."""

    def hook(*_: object) -> None:
        entered[0] = name

    return hook


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation without gradients, and each module back into its own mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def as_inputs(calibration: Iterable[Any] | None) -> Sequence[Any]:
    """Returns inputs of a model as a list that can be gone through more than once."""
    if calibration is None:
        return []
    if isinstance(calibration, Tensor | Mapping):
        raise QuantizeError(f"calibration= must be a list of model inputs, not {type(calibration).__name__}; use [x]")
    return list(calibration)
