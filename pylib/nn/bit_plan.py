"""`lowbit.plan`: a configuration for each layer of a model, chosen so that all of them together have a given size.

A kernel takes the time of reading its own bytes at every width, so layers need not be alike. What a layer loses is
measured: it is quantized by every candidate, and by one of them (the probe) while all other layers stay as they are,
and the model is run. The divergence of its output is close to quadratic in the change of the layer's output. So that
of another candidate is the probe's, times the ratio of their squared output errors on the calibration inputs. Then the
candidates are taken that make the sum of divergences least: along the lower convex hull of each layer, the step with
the most gain per byte comes first.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import QuantizeError, SpecError
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.pylib.nn.linear import AWQ_NEEDS_FOLDING, act_of
from lowbit.pylib.nn.matrices import Matrix, matrices_of, replaced
from lowbit.pylib.nn.observe import as_inputs, calibrations, evaluating, run, usable
from lowbit.pylib.nn.plan import Filter, Planned, Wishes, naming, specs_of_module
from lowbit.pylib.nn.plan import plan as decide
from lowbit.pylib.quantization.api import quantize
from lowbit.pylib.quantization.calibration import Calibration, output_errors
from lowbit.pylib.quantization.config import QuantConfig

VERSION = 1  # of `QuantPlan.to_dict`
CANDIDATES = tuple(
    QuantConfig(cast(Any, f"u{bits}"), group, method="gptq")
    for bits, group in ((2, 64), (2, 32), (3, 128), (3, 64), (3, 32), (4, 128), (4, 64), (5, 128), (6, 128))
)

Divergence = Callable[[Any, Any], float]
"""A measure of how far an output of the model is from the float model's; it takes the float model's first."""


class QuantPlan(Mapping[str, QuantConfig]):
    """A configuration for each linear layer, and for the experts of each layer, by its name: `lowbit.quantize_` takes
    it, and its file, as `config`.

    bits         per weight of these layers, with scales, zeros, outliers and padding
    bytes        of these layers
    divergence   the sum of what the layers are expected to add to the divergence of the model's output
    """

    def __init__(self, configs: Mapping[str, QuantConfig], bits: float, bytes: int, divergence: float) -> None:
        self.bits, self.bytes, self.divergence = bits, bytes, divergence
        self._configs = dict(configs)

    def __getitem__(self, name: str) -> QuantConfig:
        return self._configs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._configs)

    def __len__(self) -> int:
        return len(self._configs)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan in terms of JSON."""
        layers = {name: config.to_dict() for name, config in self.items()}
        sums = {"bits": self.bits, "bytes": self.bytes, "divergence": self.divergence}
        return {"version": VERSION, **sums, "layers": layers}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> QuantPlan:
        """Returns the plan that `to_dict` wrote. Raises SpecError for anything else."""
        known = isinstance(cast(object, written), Mapping) and written.get("version") == VERSION
        if not known or not isinstance(written.get("layers"), Mapping):
            raise SpecError(f"a plan must be what QuantPlan.to_dict() gave, in version {VERSION}")
        layers = {name: QuantConfig.from_dict(config) for name, config in written["layers"].items()}
        sums = [written.get(name, 0) for name in ("bits", "bytes", "divergence")]
        if not all(isinstance(number, int | float) for number in sums):
            raise SpecError("bits, bytes and divergence of a plan must be numbers")
        return cls(layers, *sums)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        Path(file).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> QuantPlan:
        """Returns the plan in a file. Raises SpecError where there is none."""
        try:
            return cls.from_dict(json.loads(Path(file).read_text()))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SpecError(f"{os.fspath(file)} is no file with a plan: {reason}") from None

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        rows = [f"{name:{width}}  {_form(config)}" for name, config in self.items()]
        return "\n".join([*rows, f"{self.bits:.3f} bits per weight, {self.bytes / 1e6:.2f} MB"])


def _form(config: QuantConfig) -> str:
    group = "row" if config.group_size is None else str(config.group_size)
    return f"{config.weight} per {group}, {config.method}"


@dataclass(frozen=True)
class Choice:
    """What a layer would be with a candidate: its size, the squared error of its output, and what that adds to the
    divergence of the model's."""

    config: QuantConfig
    bytes: int
    error: float
    divergence: float = 0.0


@dataclass(frozen=True)
class Sensitivity:
    """What each layer of a model may become: `lowbit.sensitivity` measures it, and any number of plans follow.

    choices   by the name of the layer, the smallest first
    weights   how many weights all layers have
    """

    choices: Mapping[str, Sequence[Choice]]
    weights: int

    def plan(self, bits: float | None = None, bytes: int | None = None) -> QuantPlan:
        """Returns the plan with the least divergence of at most so many bits per weight, or bytes.

        Raises QuantizeError where even the smallest candidates take more.
        """
        taken = _cheapest(self.choices, self._budget(bits, bytes))
        total = sum(choice.bytes for choice in taken.values())
        configs = {name: choice.config for name, choice in taken.items()}
        return QuantPlan(configs, 8 * total / self.weights, total, sum(choice.divergence for choice in taken.values()))

    def _budget(self, bits: float | None, bytes: int | None) -> int:
        """Returns the bytes to spend."""
        if (bits is None) == (bytes is None):
            raise SpecError("plan takes one of bits=, per weight, and bytes=")
        given = bits if bytes is None else bytes
        if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
            name = "bits" if bytes is None else "bytes"
            raise SpecError(f"{name}={given!r} must be a number above 0")
        budget = int(given if bytes is not None else given * self.weights / 8)
        least = sum(min(choice.bytes for choice in choices) for choices in self.choices.values())
        if budget < least:
            size = f"{8 * least / self.weights:.3f} bits per weight, {least} bytes"
            raise QuantizeError(f"the smallest candidates take {size}; ask for more, or pass smaller candidates=")
        return budget


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
) -> QuantPlan:
    """Returns a configuration for each linear layer of a model, and for the experts of each layer, of at most so many
    bits per weight, or bytes, in all.

    candidates    what a layer may become; those that do not fit a layer are left out for it. None: GPTQ with 2 to 6
                  bits, in groups of 32 to 128
    bits, bytes   one of them: the size of the layers that are quantized, with scales, zeros, outliers and padding
    divergence    what to keep small, as for `lowbit.sensitivity`

    filter_fn, calibration, act and lm_head are those of `quantize_`; a few inputs are enough. The model is left as it
    is. To compare several sizes, measure once: `lowbit.sensitivity(...).plan(bits=...)`.
    """
    measured = sensitivity(model, candidates, filter_fn, calibration, act=act, lm_head=lm_head, divergence=divergence)
    return measured.plan(bits, bytes)


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
        matrices = matrices_of(layer)
        data = [usable(each) for _, each in islice(seen, len(matrices))]
        with naming(name):
            found = _rounded(layer, data, candidates, act)
            probe = found[0]
            probed = [quantize(m.weight, probe.config, each).dequantize() for m, each in zip(matrices, data)]
            with replaced(matrices, probed):
                worse = _outputs(model, inputs)
            added = sum(measure(a, b) for a, b in zip(expected, worse, strict=True)) / len(inputs)
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
    layer: nn.Module, data: Sequence[Calibration], candidates: Sequence[QuantConfig], act: Act | None
) -> list[Choice]:
    """Returns what the candidates that fit a layer make of it, the smallest first.

    data   the calibration of each of its matrices
    """
    matrices = matrices_of(layer)
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


def _cheapest(choices: Mapping[str, Sequence[Choice]], budget: int) -> dict[str, Choice]:
    """Returns the choice of each layer: steps along the hulls, the one with the most gain per byte first, while they
    fit."""
    hulls = {name: hull(of_layer) for name, of_layer in choices.items()}
    taken = dict.fromkeys(hulls, 0)
    spent = sum(of_layer[0].bytes for of_layer in hulls.values())
    steps = [_step(hulls[name], 0, name) for name in hulls if len(hulls[name]) > 1]
    heapq.heapify(steps)
    while steps:
        _, name = heapq.heappop(steps)
        here, there = hulls[name][taken[name] : taken[name] + 2]
        if spent + there.bytes - here.bytes > budget:
            continue  # a layer that is smaller may still fit
        spent += there.bytes - here.bytes
        taken[name] += 1
        if taken[name] + 1 < len(hulls[name]):
            heapq.heappush(steps, _step(hulls[name], taken[name], name))
    return {name: hulls[name][index] for name, index in taken.items()}


def _step(of_layer: Sequence[Choice], index: int, name: str) -> tuple[float, str]:
    """Returns minus the gain per byte of the step after a choice, and the layer."""
    here, there = of_layer[index : index + 2]
    return -(here.divergence - there.divergence) / (there.bytes - here.bytes), name


def hull(choices: Sequence[Choice]) -> list[Choice]:
    """Returns the lower convex hull of choices in size and divergence: each step gains less per byte than the last."""
    result: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (each.bytes, each.divergence)):
        if result and choice.divergence >= result[-1].divergence:
            continue
        while len(result) > 1 and _gain(result[-2], choice) >= _gain(result[-2], result[-1]):
            result.pop()
        result.append(choice)
    return result


def _gain(here: Choice, there: Choice) -> float:
    """Returns how much less divergence a byte more brings."""
    return (here.divergence - there.divergence) / (there.bytes - here.bytes)
