"""The inputs that layers of a model see: hooks add them up in a `Calibration` for each layer.

A Hessian of fewer tokens than columns says nothing of many directions, and methods that trust it make errors there that
are larger than those of rounding to nearest (GPTQ up to 2.5 times as large). So an expert that got fewer is calibrated
on the tokens of all experts of its layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Observed:
    """What was seen of the inputs of a matrix.

    data     their calibration, or another where an expert got fewer tokens than it has columns
    tokens   how many the matrix got itself
    instead  what the data is then: "calibrated on those of all" experts of the layer; or, where these are too few as
             well, "rounded to nearest", with data in which all columns count alike. "" where it got enough
    """

    data: Calibration
    tokens: int
    instead: str = ""


def calibrations(
    model: nn.Module, layers: Mapping[str, nn.Module], inputs: Sequence[Any], only_importance: bool = False
) -> Iterator[tuple[str, Observed]]:
    """Yields the calibration of each linear layer, and of each matrix of experts, in the order of `matrices_of`. Each
    is forgotten when the next is asked for.

    The model is run on all inputs for a few layers at a time, so that their sums take little memory; and once more
    where experts got too few tokens. Raises QuantizeError for a linear layer that got none.
    """
    for matrices in _batches(
        chain.from_iterable(matrices_of(name, layer) for name, layer in layers.items()), only_importance
    ):
        found = _observe(model, matrices, inputs, only_importance)
        few = [matrix for matrix in matrices if matrix.parameter and _is_short(found, matrix)]
        of_all = _observe(model, [replace(matrix, of_all=True) for matrix in few], inputs) if few else {}
        for matrix in matrices:
            data = found.pop(matrix.name, None) or Calibration(_columns(matrix), "cpu", only_importance)
            if not matrix.parameter and not data.tokens:
                raise QuantizeError(
                    f"{matrix.name}: no calibration input got here; use another, or leave the layer dense"
                )
            is_few = matrix in few
            yield matrix.name, _instead(data, of_all.pop(matrix.name, None)) if is_few else Observed(data, data.tokens)


def _is_short(found: Mapping[str, Calibration], matrix: Matrix) -> bool:
    return matrix.name not in found or found[matrix.name].is_short


def _instead(own: Calibration, of_all: Calibration | None) -> Observed:
    """Returns the calibration of an expert with too few tokens of its own. It weighs as much as these."""
    if of_all is None or of_all.is_short:
        alike = Calibration.from_hessian(torch.eye(own.k, dtype=torch.float64, device="cpu"))
        return Observed(alike, own.tokens, "rounded to nearest")
    hessian = of_all.hessian * (max(own.tokens, 1) / of_all.tokens)
    return Observed(Calibration.from_hessian(hessian), own.tokens, "calibrated on those of all")


def _batches(matrices: Iterable[Matrix], only_importance: bool) -> Iterator[list[Matrix]]:
    """Yields matrices, in order, whose sums fit MOST_BYTES together."""
    batch: list[Matrix] = []
    total = 0
    for matrix in matrices:
        size = 8 * _columns(matrix) ** (1 if only_importance else 2)
        if batch and total + size > MOST_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(matrix)
        total += size
    if batch:
        yield batch


def _columns(matrix: Matrix) -> int:
    return matrix.weight.shape[1]


def _observe(
    model: nn.Module, matrices: Sequence[Matrix], inputs: Sequence[Any], only_importance: bool = False
) -> dict[str, Calibration]:
    """Returns the sums of some matrices' inputs over all inputs of the model, by the names of the matrices."""
    found: dict[str, Calibration] = {}
    handles = [
        matrix.module.register_forward_pre_hook(_adding(found, matrix, only_importance), with_kwargs=True)
        for matrix in matrices
    ]
    try:
        with evaluating(model):
            for index, given in enumerate(inputs):
                run(model, given, index)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _adding(found: dict[str, Calibration], matrix: Matrix, only_importance: bool) -> Any:
    """Returns a hook that adds the inputs of a matrix to its calibration."""

    def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = matrix.inputs(*args, **kwargs)
        if matrix.name not in found:
            found[matrix.name] = Calibration(_columns(matrix), x.device, only_importance)
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
