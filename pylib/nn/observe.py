"""The inputs that layers of a model see: hooks add them up in a `Calibration` for each layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import LowbitError, QuantizeError
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.nn.quantizable import Matrix, matrices_of
from lowbit.pylib.quantization.calibration import Calibration

MOST_BYTES = 1 << 30
"""Sums for as many layers as this holds are collected in one run of the model: each takes k^2 numbers in f64."""


def calibrations(
    model: nn.Module, layers: Mapping[str, nn.Module], inputs: Sequence[Any]
) -> Iterator[tuple[str, Calibration]]:
    """Yields the calibration of each linear layer, and of each matrix of experts, in the order of `matrices_of`. Each
    is forgotten when the next is asked for.

    The model is run on all inputs for a few layers at a time, so that their sums take little memory. The calibration
    of an expert may have no tokens; that of a linear layer has some.
    """
    for matrices in _batches(chain.from_iterable(matrices_of(name, layer) for name, layer in layers.items())):
        found = _observe(model, matrices, inputs)
        for matrix in matrices:
            data = found.pop(matrix.name, None) or Calibration(_columns(matrix))
            if not matrix.parameter and not data.tokens:
                raise QuantizeError(
                    f"{matrix.name}: no calibration input got here; use another, or leave the layer dense"
                )
            yield matrix.name, data


def usable(data: Calibration) -> Calibration:
    """Returns a calibration; without tokens one in which all columns count alike, and none with another."""
    return data if data.tokens else Calibration.from_hessian(torch.eye(data.k, dtype=torch.float64, device="cpu"))


def _batches(matrices: Iterable[Matrix]) -> Iterator[list[Matrix]]:
    """Yields matrices, in order, whose sums fit MOST_BYTES together."""
    batch: list[Matrix] = []
    total = 0
    for matrix in matrices:
        size = 8 * _columns(matrix) ** 2
        if batch and total + size > MOST_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(matrix)
        total += size
    if batch:
        yield batch


def _columns(matrix: Matrix) -> int:
    return matrix.weight.shape[1]


def _observe(model: nn.Module, matrices: Sequence[Matrix], inputs: Sequence[Any]) -> dict[str, Calibration]:
    """Returns the sums of some matrices' inputs over all inputs of the model, by the names of the matrices."""
    found: dict[str, Calibration] = {}
    handles = [matrix.module.register_forward_pre_hook(_adding(found, matrix), with_kwargs=True) for matrix in matrices]
    try:
        with evaluating(model):
            for index, given in enumerate(inputs):
                run(model, given, index)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _adding(found: dict[str, Calibration], matrix: Matrix) -> Any:
    """Returns a hook that adds the inputs of a matrix to its calibration."""

    def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = matrix.inputs(*args, **kwargs)
        if matrix.name not in found:
            found[matrix.name] = Calibration(_columns(matrix), x.device)
        with naming(matrix.name):
            found[matrix.name].add(x)

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
    if isinstance(calibration, Tensor | Mapping | str) or not isinstance(cast(object, calibration), Iterable):
        raise QuantizeError(f"calibration= must be a list of model inputs, not {type(calibration).__name__}; use [x]")
    return list(calibration)
