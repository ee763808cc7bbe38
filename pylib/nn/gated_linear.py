"""`GatedLinear`: a low-bit layer before a gated activation, which its kernel can apply to sums (`dialect.epilogue`).

The rows of its weight are stored so that a thread has the sums of a gate and of what it multiplies. Whoever calls the
layer gets what it would without that; `gated(x)` is the activation of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from lowbit.dialect.epilogue import ACTIVATIONS, Epilogue
from lowbit.dialect.errors import PackError, SpecError
from lowbit.dialect.spec import interned
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.packed_module import autocast
from lowbit.pylib.operator.constants import constant
from lowbit.pylib.operator.schema import of_sums
from lowbit.pylib.runtime.interface import gated
from lowbit.pylib.weights import gated_rows
from lowbit.pylib.weights.packed import PackedWeight, pack
from lowbit.pylib.weights.saved import read_spec

_PROBES = (-1e4, -30.0, -7.5, -1.0, -0.1, 0.0, 0.3, 2.0, 6.5, 9.0, 40.0, 1e4)
"""Numbers at which activations are told apart: within and beyond the limits that models have."""

_COLUMNS = 8  # of each half of what is probed


@dataclass(frozen=True)
class Gate:
    """What becomes of h [..., n] behind a layer: `epilogue` of its halves.

    pairs  whether columns of the gate and those that it multiplies alternate in h, in place of halves
    """

    epilogue: Epilogue
    pairs: bool


class GatedLinear(LowbitLinear):
    """A linear layer whose weight is stored for a gated matmul, which its spec says.

    `layer(x)` is h [..., n], in the order that the layer before it had. `gated(x)` is activation(g) * u [..., n / 2] of
    it. `packed` has the rows of the gate above the others.

    pairs  whether rows of the gate and those that it multiplies alternate in h and in `weight`
    """

    pairs = False

    @classmethod
    def of(cls, layer: LowbitLinear, pairs: bool) -> None:
        """Makes a layer one of this class, whose weight is stored for a gated matmul already."""
        layer.__class__ = cls
        gated = cast(GatedLinear, layer)
        gated.pairs, gated.out_features = pairs, layer.spec.n

    def gated(self, x: Tensor) -> Tensor:
        """Returns activation(g) * u [..., n / 2] for x [..., k]."""
        return super().multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """Returns h [..., n] for x [..., k]."""
        tensors, kernel = self.operands()
        sums = torch.ops.lowbit.matmul.packed(autocast(x, self._act), tensors, _of_sums(kernel))
        return self._in_order(sums.movedim(-1, 0)).movedim(0, -1)

    def dequantize(self) -> Tensor:
        """Returns the weight [n, k] in the act type."""
        weight = super().dequantize()
        return alternating(weight) if self.pairs else weight

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        linear = super().to_linear(dtype)
        if self.spec.bias:
            linear.bias = nn.Parameter(self._in_order(linear.bias.detach()))
        return linear

    def _in_order(self, rows: Tensor) -> Tensor:
        """Returns stored rows [n, ...] in the order of h."""
        rows = gated_rows.given(self.spec, rows)
        return alternating(rows) if self.pairs else rows


@constant
def _of_sums(kernel: str) -> str:
    return of_sums(kernel)


def alternating(rows: Tensor, experts: int = 1) -> Tensor:
    """Returns rows [n, ...] of which the halves alternate, of halves of every expert."""
    return rows.unflatten(0, (experts, 2, -1)).transpose(1, 2).flatten(0, 2)


def in_halves(rows: Tensor, experts: int = 1) -> Tensor:
    """Returns rows [n, ...] in halves of every expert, of those that alternate."""
    return rows.unflatten(0, (experts, -1, 2)).transpose(1, 2).flatten(0, 2)


def with_gate(packed: PackedWeight, gate: Gate) -> PackedWeight:
    """Returns a weight with its rows stored for a gated matmul; of several experts, those of each."""
    spec = replace(packed.spec, epilogue=gate.epilogue)
    values = {slot.name: packed.unpack_tensor(slot.name) for slot in spec.given_tensors}
    if gate.pairs:
        values = {name: in_halves(rows, spec.experts) for name, rows in values.items()}
    return pack(spec, **values)


def without_gate(packed: PackedWeight, gate: Gate) -> PackedWeight:
    """Returns the weight that `with_gate` was given."""
    spec = replace(packed.spec, epilogue=None)
    values = {slot.name: packed.unpack_tensor(slot.name) for slot in spec.given_tensors}
    if gate.pairs:
        values = {name: alternating(rows, spec.experts) for name, rows in values.items()}
    return pack(spec, **values)


def store_like(layer: LowbitLinear, about: Tensor, gate: Gate) -> None:
    """Makes a layer a `GatedLinear`, or one no longer, as what a file says of its weight (`PackedModule`) is gated.

    Does nothing for a file that says something else: loading it will raise.
    """
    with suppress(PackError, SpecError):
        if read_spec(about).is_gated != layer.spec.is_gated:
            change_order(layer, gate)


def change_order(layer: LowbitLinear, gate: Gate) -> None:
    """Makes a layer a `GatedLinear`, and one a layer as it was; what calls of it return stays."""
    to_gated = not layer.spec.is_gated
    if layer.codes.is_meta:
        spec = replace(layer.spec, epilogue=gate.epilogue if to_gated else None)
        layer.hold(PackedWeight(interned(spec), {slot.name: getattr(layer, slot.name) for slot in spec.tensors}))
    else:
        layer.hold((with_gate if to_gated else without_gate)(layer.packed, gate))
    layer.check_unwritten()  # which notes the codes as they are now
    if to_gated:
        GatedLinear.of(layer, gate.pairs)
    else:
        layer.__class__ = LowbitLinear


def gate_of(apply_gate: Callable[[Tensor], Tensor]) -> Gate | None:
    """Returns the gate that a function applies to h [..., n], found by its results; None for one of another kind.

    apply_gate  takes h in f32, and returns [..., n / 2]
    """
    gate, up = torch.cartesian_prod(*[torch.tensor(_PROBES, dtype=torch.float32, device="cpu")] * 2).T
    h = torch.cat([gate.expand(_COLUMNS, -1), up.expand(_COLUMNS, -1)])
    for pairs, columns in ((False, h), (True, alternating(h))):
        try:
            found = apply_gate(columns.T)
        except RuntimeError:  # it has parameters on another device, or takes other types
            return None
        for epilogue in ACTIVATIONS:
            expected = gated(epilogue, gate, up)[:, None].expand(-1, _COLUMNS)
            if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
                return Gate(cast(Epilogue, epilogue), pairs)
    return None
