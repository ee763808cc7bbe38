"""Spends bits where they help most: which configuration each layer gets, so that all together have a given size.

The loss of each layer with each candidate has been measured. Only candidates on the lower convex hull of size and
divergence are of use. Every layer starts from its smallest candidate. Then the step with the largest gain per byte is
taken, again and again, while it fits.

What a layer adds to the divergence was measured on a few inputs, and on text of another kind it may add a hundred times
as much: a layer that hardly counted gets 2 bits then, and loses more than all others together. So the part `trust` of
a layer's divergence is the measured one, and the rest is what it would be if all layers added alike for their size.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lowbit.dialect.errors import QuantizeError, SpecError
from lowbit.pylib.nn.quant_plan import QuantPlan
from lowbit.pylib.quantization.config import QuantConfig

TRUST = 0.5
"""How far plans go by what was measured, if nothing is said."""


@dataclass(frozen=True)
class Choice:
    """One candidate format for one layer: its bytes, the squared error of the layer's output, and the KL divergence
    that this adds to the model."""

    config: QuantConfig
    bytes: int
    error: float
    divergence: float = 0.0


@dataclass(frozen=True)
class Sensitivity:
    """The choices for each layer of a model: `lowbit.sensitivity` measures them, and any number of plans follow.

    choices   by the name of the layer, the smallest first
    weights   how many weights all layers have
    """

    choices: Mapping[str, Sequence[Choice]]
    weights: int

    def plan(self, bits: float | None = None, bytes: int | None = None, *, trust: float = TRUST) -> QuantPlan:
        """Returns the plan with the least divergence of at most so many bits per weight, or bytes.

        trust   above 0, at most 1: the part of a layer's divergence that is the measured one. 1 takes them as they are,
                which is best for text just like that of the calibration. The rest is what all layers add on average
                for their size, with which plans hold on other text, too

        Raises QuantizeError where even the smallest candidates take more, and SpecError for arguments that are none.
        """
        if isinstance(trust, bool) or not isinstance(trust, int | float) or not 0 < trust <= 1:
            raise SpecError(f"trust={trust!r} must be a number above 0 and at most 1; 1 takes divergences as measured")
        trusted = drawn_together(self.choices, trust)
        chosen = _cheapest(trusted, self._budget(bits, bytes))
        taken = {name: self.choices[name][trusted[name].index(choice)] for name, choice in chosen.items()}
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


def drawn_together(choices: Mapping[str, Sequence[Choice]], trust: float) -> dict[str, list[Choice]]:
    """Returns the choices of each layer with the part `trust` of their divergences. The rest is that of all layers on
    average: for the smallest choice of a layer by its bytes, and for the others by their errors."""
    smallest = {name: min(of_layer, key=lambda each: each.bytes) for name, of_layer in choices.items()}
    per_byte = sum(each.divergence for each in smallest.values()) / sum(each.bytes for each in smallest.values())

    def drawn(choice: Choice, least: Choice) -> Choice:
        average = per_byte * least.bytes * choice.error / least.error if least.error else 0.0
        return replace(choice, divergence=trust * choice.divergence + (1 - trust) * average)

    return {name: [drawn(choice, smallest[name]) for choice in of_layer] for name, of_layer in choices.items()}


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
