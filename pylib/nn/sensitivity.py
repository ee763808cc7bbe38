"""`lowbit.plan` and `lowbit.sensitivity`: the loss of each layer of a model with each candidate configuration.

A kernel takes the time of reading its own bytes at every width, so layers need not be alike. The model is run with one
layer quantized by one candidate (the probe) and all other layers as they are. The divergence of the model's output is
close to quadratic in the change of the layer's output. So the divergence of another candidate is the probe's, times the
ratio of their squared output errors on the calibration inputs. `bit_allocation.py` then chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import QuantizeError, SpecError
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.pylib.nn.bit_allocation import TRUST, Choice, Sensitivity
from lowbit.pylib.nn.linear import AWQ_NEEDS_FOLDING, act_of
from lowbit.pylib.nn.observe import as_inputs, calibrations, evaluating, run
from lowbit.pylib.nn.plan import Filter, Planned, Wishes, naming, specs_of_module
from lowbit.pylib.nn.plan import plan as decide
from lowbit.pylib.nn.quant_plan import QuantPlan
from lowbit.pylib.nn.quantizable import Matrix, matrices_of, replaced
from lowbit.pylib.quantization.api import quantize
from lowbit.pylib.quantization.calibration import Calibration, output_errors
from lowbit.pylib.quantization.config import QuantConfig

CANDIDATES = tuple(
    QuantConfig(cast(Any, f"u{bits}"), group, method="gptq")
    for bits, group in ((2, 64), (2, 32), (3, 128), (3, 64), (3, 32), (4, 128), (4, 64), (5, 128), (6, 128))
)

Divergence = Callable[[Any, Any], float]
"""A measure of how far an output of the model is from the float model's; it takes the float model's first."""


def plan(
    model: nn.Module,
    candidates: Sequence[QuantConfig] | None = None,
    filter_fn: Filter | None = None,
    calibration: Iterable[Any] | None = None,
    *,
    bits: float | None = None,
    bytes: int | None = None,
    act: Act | None = None,
    lm_head: bool = False,
    divergence: Divergence | None = None,
    trust: float = TRUST,
) -> QuantPlan:
    """Returns a configuration for each linear layer of a model, and for the experts of each layer, of at most so many
    bits per weight, or bytes, in all.

    candidates    what a layer may become; those that do not fit a layer are left out for it. None: GPTQ with 2 to 6
                  bits, in groups of 32 to 128
    bits, bytes   one of them: the size of the layers that are quantized, with scales, zeros, outliers and padding
    divergence    what to keep small, as for `lowbit.sensitivity`
    trust         how far to go by what was measured, as for `Sensitivity.plan`: 1 for text just like calibration's

    filter_fn, calibration, act and lm_head are those of `quantize_`; a few inputs are enough. The model is left as it
    is. To compare several sizes, measure once: `lowbit.sensitivity(...).plan(bits=...)`.
    """
    measured = sensitivity(model, candidates, filter_fn, calibration, act=act, lm_head=lm_head, divergence=divergence)
    return measured.plan(bits, bytes, trust=trust)


@torch.no_grad()
def sensitivity(
    model: nn.Module,
    candidates: Sequence[QuantConfig] | None = None,
    filter_fn: Filter | None = None,
    calibration: Iterable[Any] | None = None,
    *,
    act: Act | None = None,
    lm_head: bool = False,
    divergence: Divergence | None = None,
) -> Sensitivity:
    """Measures what each linear layer of a model, and the experts of each layer, add to the divergence of its output
    with each candidate.

    candidates    what a layer may become, as for `lowbit.plan`
    calibration   inputs of the model, as for `quantize_`: it is run on all of them once for each layer
    divergence    divergence(expected, found) -> float of one output of the model; None: the mean Kullback-Leibler
                  divergence of the predictions, for models whose output (or its `logits`) is logits [..., classes]

    filter_fn, act and lm_head are those of `quantize_`. Raises QuantizeError without calibration, and where the
    output is no tensor of logits; SpecError where no candidate fits a layer.
    """
    candidates = CANDIDATES if candidates is None else candidates
    _check_candidates(candidates)
    inputs, measure = as_inputs(calibration), divergence or kl_divergence
    if not inputs:
        raise QuantizeError("plan needs calibration=, a list of inputs of the model")
    layers = _layers(model, Wishes(QuantConfig("u8", None), filter_fn, act, lm_head))  # which fits every layer
    expected = _outputs(model, inputs)
    choices: dict[str, Sequence[Choice]] = {}
    weights = 0
    seen = calibrations(model, layers, inputs)
    for name, layer in layers.items():
        matrices = matrices_of(name, layer)
        data = [each.data for _, each in islice(seen, len(matrices))]
        with naming(name):
            found = _rounded(layer, matrices, data, candidates, act)
            probe = found[0]
            with replaced(matrices, [quantize(m.weight, probe.config, d).dequantize() for m, d in zip(matrices, data)]):
                changed = _outputs(model, inputs)
            added = sum(measure(a, b) for a, b in zip(expected, changed, strict=True)) / len(inputs)
        factor = max(added, 0.0) / probe.error if probe.error else 0.0
        choices[name] = [replace(each, divergence=factor * each.error) for each in found]
        weights += sum(matrix.weight.numel() for matrix in matrices)
    return Sensitivity(choices, weights)


def _layers(model: nn.Module, wishes: Wishes) -> dict[str, nn.Module]:
    """Returns the linear layers and experts that `quantize_` would quantize, by name."""
    planned: list[Planned] = decide(model, wishes)
    chosen = {entry.names[0]: entry.module for entry in planned if not entry.reason or entry.specs}
    layers = {name: module for name, module in chosen.items() if not isinstance(module, nn.Embedding)}
    if not layers:
        raise QuantizeError("the model has no linear layer to quantize")
    return layers


def _check_candidates(candidates: Sequence[QuantConfig]) -> None:
    if not candidates or not all(isinstance(cast(object, each), QuantConfig) for each in candidates):
        raise SpecError("candidates must be QuantConfigs, such as [QuantConfig('u3', 64), QuantConfig('u4', 64)]")
    if any(each.method == "awq" for each in candidates):
        raise SpecError(f"candidates: {AWQ_NEEDS_FOLDING}")


def _rounded(
    layer: nn.Module,
    matrices: Sequence[Matrix],
    data: Sequence[Calibration],
    candidates: Sequence[QuantConfig],
    act: Act | None,
) -> list[Choice]:
    """Returns what the candidates that fit a layer make of it, the smallest first.

    data   the calibration of each of its matrices
    """
    act = act or act_of(matrices[0].weight)
    found: list[Choice] = []
    for config in candidates:
        try:
            specs = specs_of_module(layer, config.multiplied_in(act), act)
        except SpecError:
            continue
        each = len(matrices) // len(specs)  # experts have one spec for gate and up, and one for down
        parts = (_part(matrix, specs[i // each], config, data[i]) for i, matrix in enumerate(matrices))
        sizes, errors = zip(*parts)
        found.append(Choice(config, sum(sizes), sum(errors)))
    if not found:
        shapes = " and ".join(dict.fromkeys(str(list(matrix.weight.shape)) for matrix in matrices))
        raise SpecError(f"no candidate fits a weight {shapes}; pass candidates= with other groups")
    found.sort(key=lambda each: each.bytes)
    return found


def _part(matrix: Matrix, spec: MatmulSpec, config: QuantConfig, data: Calibration) -> tuple[int, float]:
    """Returns the bytes of a matrix with a configuration, and the squared error of its output."""
    quantized = quantize(matrix.weight, config.multiplied_in(spec.act), data)
    change = quantized.dequantize() - matrix.weight.float()
    error = float(output_errors(change, data.hessian.float()).double().sum())
    return quantized.pack(spec, matrix.bias).nbytes, error


def _outputs(model: nn.Module, inputs: Sequence[Any]) -> list[Any]:
    """Returns the model's output for each input."""
    with evaluating(model):
        return [run(model, given, index) for index, given in enumerate(inputs)]


def kl_divergence(expected: Any, found: Any) -> float:
    """Returns the mean Kullback-Leibler divergence, in nats, of predictions from the expected ones."""
    logits = [getattr(output, "logits", output) for output in (expected, found)]
    if not all(isinstance(each, Tensor) and each.is_floating_point() for each in logits):
        given = type(expected).__name__
        raise QuantizeError(f"the model's output must be logits [..., classes], not {given}; pass divergence=")
    p, q = (each.detach().float().flatten(0, -2).log_softmax(-1) for each in logits)
    return float(nn.functional.kl_div(q, p, reduction="batchmean", log_target=True))
