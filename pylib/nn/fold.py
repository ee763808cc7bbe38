"""AWQ in a model: the module that produces the input of layers divides it by the scales of their columns.

The module is a norm, for all layers that read its output. Or it is a linear layer, whose rows are divided, if a factor
per column passes unchanged from its output to the layer: from up to down in a gated feed-forward network, from value to
output in attention. Linear layers of the same module are tried until one fits.

A norm is found by watching the model: the input of a linear layer is the very tensor that the norm returned. A call of
a copy with another weight shows whether the norm multiplies by its weight or by 1 + weight. Then a trial run of
the model shows whether anything but these layers reads the norm's output: hooks scale the output by powers of two and
undo that before the layers, which changes no bit of the model's output if nothing else does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import QuantizeError
from lowbit.pylib.nn.linear_like import as_linear, is_linear
from lowbit.pylib.nn.observe import evaluating, run

NOTHING = "AWQ scales nothing here: "
NO_SOURCE = f"{NOTHING}its input comes from no norm, and from no quantized layer column by column"
NOT_REACHED = f"{NOTHING}the first calibration input does not get here"
TOLERANCE = 1e-3
"""Outputs are the same if the norm of their difference is at most this part of theirs: sums may be in another order."""


@dataclass(frozen=True)
class Fold:
    """A norm, and all linear layers that read its output; or a linear layer, and the one that gets its output.

    name     of the norm or the linear layer
    source   that module
    layers   names of the layers whose columns are scaled
    offset   what a norm adds to its weight before it multiplies by it: 0, or 1 as in Gemma
    """

    name: str
    source: nn.Module
    layers: tuple[str, ...]
    offset: float = 0.0

    def parameters(self, scales: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Returns a norm's parameters after its output is divided by scales [k], and the scales after rounding.

        A column whose new factor is rounded to zero is not scaled.
        """
        weight = cast(Tensor, self.source.weight)
        factor, scales = weight.float() + self.offset, scales.to(weight.device)
        folded = (factor / scales - self.offset).to(weight.dtype)
        rounded = folded.float() + self.offset
        lost = (rounded == 0) & (factor != 0)
        exact = torch.where(lost, 1.0, torch.where(factor == 0, scales, factor / rounded))
        parameters = {"weight": torch.where(lost, weight, folded)}
        bias = getattr(self.source, "bias", None)
        if isinstance(bias, Tensor):
            parameters["bias"] = (bias.float() / exact).to(bias.dtype)
        return parameters, exact

    @contextmanager
    def tried(self, layers: Mapping[str, nn.Linear]) -> Iterator[None]:
        """Scales the output of the source by powers of two while the context is open, and the layers' inputs back."""
        scales = _powers_of_two(cast(Tensor, self.source.weight))

        def scaled(source: nn.Module, args: object, output: Tensor) -> Tensor:
            return output * scales.to(output.dtype)

        def unscaled(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
            x = _input(args, kwargs)
            return (x / scales.to(x.device, x.dtype),), {}

        hooks = [self.source.register_forward_hook(scaled)]
        hooks += [layers[name].register_forward_pre_hook(unscaled, with_kwargs=True) for name in self.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def find_folds(
    model: nn.Module, layers: Mapping[str, nn.Linear], inputs: Sequence[Any], sources: Mapping[str, nn.Linear]
) -> tuple[list[Fold], dict[str, str]]:
    """Returns what scales can be folded into, and for each of the other layers why there is nothing.

    layers    the layers that AWQ quantizes, by name
    inputs    of the model, of which the first is used
    sources   linear layers whose rows may be divided, by name
    """
    if not layers:
        return [], {}
    watch = _Watch(model)
    expected = _tensors(watch.run(inputs[0]))
    if not expected or any(bool(output.isnan().any()) for output in expected):
        nan = "has NaN; drop it, or run the model in bf16 or f32"
        what = nan if expected else "holds no tensor of floats; use method='gptq'"
        rule = "method='awq' compares outputs of the model, and that for input 0 of calibration="
        raise QuantizeError(f"{next(iter(layers))}: {rule} {what}")
    reasons = {name: NO_SOURCE if name in watch.sources else NOT_REACHED for name in layers}
    folds = list[Fold]()
    for name in watch.inputs:
        readers = tuple(reader for reader in watch.readers(name) if reader in layers)
        fold = _fold(watch, name, readers, layers) if readers else ""
        if isinstance(fold, Fold):
            folds.append(fold)
        else:
            reasons.update(dict.fromkeys(readers, NOTHING + fold))
    good = _harmless(model, layers, folds, inputs[0], expected)
    for fold in folds:
        others = "" if fold in good else f"{NOTHING}more than linear layers reads the output of {fold.name}"
        reasons.update(dict.fromkeys(fold.layers, others))
    left = {name: layer for name, layer in layers.items() if reasons[name] == NO_SOURCE}
    called = {name: sources[name] for name in watch.sources if name in sources}
    between = find_linear_folds(model, left, inputs[0], called)
    reasons.update(dict.fromkeys((fold.layers[0] for fold in between), ""))
    return good + between, {name: reason for name, reason in reasons.items() if reason}


def find_linear_folds(
    model: nn.Module, layers: Mapping[str, nn.Linear], given: Any, sources: Mapping[str, nn.Linear]
) -> list[Fold]:
    """Returns linear layers that scales of others can be folded into.

    sources   in the order in which they are called

    Pairs with the same names in their modules are alike: one of them is tried alone, then all of them.
    """
    alike: dict[tuple[str, str], list[Fold]] = {}
    for name, layer in layers.items():
        parent, _, leaf = name.rpartition(".")
        before = sources if name not in sources else list(sources)[: list(sources).index(name)]
        for other in reversed(list(before)):
            at, _, source = other.rpartition(".")
            if at == parent and sources[other].out_features == layer.in_features:
                alike.setdefault((source, leaf), []).append(Fold(other, sources[other], (name,)))
    found: dict[str, Fold] = {}
    for folds in alike.values():
        left = [fold for fold in folds if fold.layers[0] not in found and fold.name not in _names(found)]
        if left and _keeps_output(model, layers, left[0], given):
            expected = _tensors(_evaluated(model, given))
            found |= {fold.layers[0]: fold for fold in _harmless(model, layers, left, given, expected)}
    return list(found.values())


def _names(folds: Mapping[str, Fold]) -> set[str]:
    return {fold.name for fold in folds.values()}


def _keeps_output(model: nn.Module, layers: Mapping[str, nn.Linear], fold: Fold, given: Any) -> bool:
    """Tells whether a layer gives what it gave before, while its source and its input are scaled."""
    outputs = list[Tensor]()

    def noted(layer: nn.Module, args: object, output: Tensor) -> None:
        outputs.append(output)

    handle = layers[fold.layers[0]].register_forward_hook(noted)
    try:
        _evaluated(model, given)
        plain, outputs = outputs, list[Tensor]()
        with fold.tried(layers):
            _evaluated(model, given)
    finally:
        handle.remove()
    return len(plain) == len(outputs) and _same(outputs, plain)


def _evaluated(model: nn.Module, given: Any) -> Any:
    """Returns the output of a model for an input."""
    with evaluating(model):
        return run(model, given, 0)


def _fold(watch: _Watch, norm: str, readers: tuple[str, ...], layers: Mapping[str, nn.Linear]) -> Fold | str:
    """Returns the fold of some layers' scales into a norm, or why there can't be one."""
    if reason := watch.reason(norm, layers):
        return reason
    offset = _offset(watch.norms[norm], watch.inputs[norm])
    if offset is None:
        return f"{norm} multiplies by something else than its weight"
    return Fold(norm, watch.norms[norm], readers, offset)


@dataclass
class _Watch:
    """The norms of a model, and which linear layers read them in one run.

    norms     modules that may be norms, by name
    inputs    of the norms that were called
    sources   the norms whose outputs a linear layer has read; "" stands for inputs from elsewhere
    """

    model: nn.Module
    norms: dict[str, nn.Module] = field(default_factory=dict)
    inputs: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.norms = {name: module for name, module in self.model.named_modules() if _may_be_norm(module)}

    def run(self, given: Any) -> Any:
        """Returns the output of the model for an input, and notes what its norms and linear layers do."""
        made: dict[int, tuple[Tensor, str]] = {}  # holds the outputs, so that their ids stay theirs

        def returned(name: str) -> Any:
            def hook(norm: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                made[id(output)] = output, name
                self.inputs.setdefault(name, args)

            return hook

        def entered(name: str) -> Any:
            def hook(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
                source = made.get(id(_input(args, kwargs)))
                self.sources.setdefault(name, set()).add(source[1] if source else "")

            return hook

        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if name in self.norms:
                    stack.callback(module.register_forward_hook(returned(name)).remove)
                elif isinstance(module, nn.Linear) or is_linear(module):
                    hook = module.register_forward_pre_hook(entered(name), with_kwargs=True)
                    stack.callback(hook.remove)
            stack.enter_context(evaluating(self.model))
            return run(self.model, given, 0)

    def readers(self, norm: str) -> list[str]:
        """Returns the linear layers that have read the output of a norm."""
        return [name for name, sources in self.sources.items() if norm in sources]

    def reason(self, norm: str, layers: Mapping[str, nn.Linear]) -> str:
        """Returns why scales of these layers can't be folded into a norm that they read, or ""."""
        weight = self.norms[norm].weight
        names = [name for name, p in self.model.named_parameters(remove_duplicate=False) if p is weight]
        if len(names) > 1:
            return f"the weight of {norm} is also {next(name for name in names if name != f'{norm}.weight')}"
        for reader in self.readers(norm):
            if reader not in layers:
                return f"{reader} reads the output of {norm}, too, and is not quantized by AWQ"
            if len(self.sources[reader]) > 1:
                return f"the input of {reader} comes from {norm} at times only"
            if as_linear(layers[reader]).in_features != cast(Tensor, weight).numel():
                return f"the weight of {norm} is not of the columns of {reader}"
        return ""


def _may_be_norm(module: nn.Module) -> bool:
    """Tells whether all that a module holds is a weight [k], and maybe a bias [k]."""
    own = {name: p for name, p in module.named_parameters() if p is not None}
    weight = own.get("weight")
    if weight is None or not own.keys() <= {"weight", "bias"} or weight.is_meta:
        return False
    return all(p.ndim == 1 and p.shape == weight.shape for p in own.values())


def _input(args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> Tensor:
    """Returns x of a call of a linear layer."""
    return args[0] if args else kwargs["input"]


def _powers_of_two(like: Tensor) -> Tensor:
    """Returns 1, 2 and 4 in disorder, one for each row of a weight [n] or [n, k]: all floats take them exactly."""
    generator = torch.Generator().manual_seed(0)
    return 2.0 ** torch.randint(0, 3, like.shape[:1], generator=generator).to(like.device)


def _offset(norm: nn.Module, args: tuple[Any, ...]) -> float | None:
    """Returns what a norm adds to its weight before it multiplies by it, 0 or 1; None if it does anything else."""
    if len(args) != 1 or not isinstance(args[0], Tensor):
        return None
    trial, x = copy.deepcopy(norm).float().eval(), args[0].float()
    expected, scales = trial(x), _powers_of_two(cast(Tensor, trial.weight))
    folds = [Fold("", trial, (), offset) for offset in (0.0, 1.0)]
    for fold, (parameters, _) in [(fold, fold.parameters(scales)) for fold in folds]:
        trial.load_state_dict(parameters, strict=False)
        if _same([trial(x)], [expected / scales]):
            return fold.offset
    return None


def _harmless(
    model: nn.Module, layers: Mapping[str, nn.Linear], folds: Sequence[Fold], given: Any, expected: Sequence[Tensor]
) -> list[Fold]:
    """Returns the folds that leave the output of the model as it is: halves are tried until no half fails."""
    if not folds:
        return []
    with ExitStack() as stack:
        for fold in folds:
            stack.enter_context(fold.tried(layers))
        if _same(_tensors(_evaluated(model, given)), expected):
            return list(folds)
    middle = len(folds) // 2
    halves = (folds[:middle], folds[middle:]) if middle else ()
    return [fold for half in halves for fold in _harmless(model, layers, half, given, expected)]


def _tensors(output: Any) -> list[Tensor]:
    """Returns the tensors of floats in what a model returned."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(cast(Mapping[Any, Any], output).values())
    return [each for part in output for each in _tensors(part)] if isinstance(output, tuple | list) else []


def _same(given: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Tells whether there are outputs, and each is as expected."""
    pairs = list(zip(given, expected, strict=True))
    return bool(pairs) and all(
        torch.equal(a, b) or float((a.float() - b.float()).norm()) <= TOLERANCE * float(b.float().norm())
        for a, b in pairs
    )
