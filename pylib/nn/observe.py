"""The inputs that layers of a model see: hooks add them up in a `Calibration` for each layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import LowbitError, QuantizeError
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.nn.sources import Source, sources_of
from lowbit.pylib.quantization.calibration import Calibration

MOST_BYTES = 1 << 30
"""Sums for as many layers as this holds are collected in one run of the model: each takes k^2 numbers in f64."""


def calibrations(
    model: nn.Module, layers: Mapping[str, nn.Module], inputs: Sequence[Any]
) -> Iterator[tuple[str, Calibration]]:
    """Yields the calibration of each linear layer, and of each matrix of experts, in the order of `sources_of`. Each is
    forgotten when the next is asked for.

    The model is run on all inputs for some layers after the other, so that their sums take little memory. Only of an
    expert the calibration may have no tokens.
    """
    for sources in _batches(chain.from_iterable(sources_of(name, layer) for name, layer in layers.items())):
        found = _observe(model, sources, inputs)
        for source in sources:
            data = found.pop(source.name, None) or Calibration(source.k)
            if source.required and not data.tokens:
                raise QuantizeError(
                    f"{source.name}: no calibration input got here; use another, or leave the layer dense"
                )
            yield source.name, data


def usable(data: Calibration) -> Calibration:
    """Returns a calibration; without tokens one in which all columns count alike, and none with another."""
    return data if data.tokens else Calibration.from_hessian(torch.eye(data.k))


def _batches(sources: Iterable[Source]) -> Iterator[list[Source]]:
    """Yields sources, in order, whose sums fit MOST_BYTES together."""
    batch: list[Source] = []
    total = 0
    for source in sources:
        size = 8 * source.k**2
        if batch and total + size > MOST_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(source)
        total += size
    if batch:
        yield batch


def _observe(model: nn.Module, sources: Sequence[Source], inputs: Sequence[Any]) -> dict[str, Calibration]:
    """Returns the sums of some layers' inputs over all inputs of the model, by the names of their sources."""
    found: dict[str, Calibration] = {}
    handles = [source.module.register_forward_pre_hook(_adding(found, source), with_kwargs=True) for source in sources]
    try:
        with evaluating(model):
            for index, given in enumerate(inputs):
                run(model, given, index)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _adding(found: dict[str, Calibration], source: Source) -> Any:
    """Returns a hook that adds a layer's input to its calibration."""

    def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = source.inputs(*args, **kwargs)
        if source.name not in found:
            found[source.name] = Calibration(source.k, x.device)
        with naming(source.name):
            found[source.name].add(x)

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
