"""Codes of two tensors that share their bytes in memory (`dialect.weight.GROUP_CODES`): put together, taken apart."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import TensorSlot


def join(spec: MatmulSpec, separate: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a weight in memory, by name, made of one for each of `spec.given_tensors`."""
    joined: dict[str, Tensor] = {}
    for slot in spec.given_tensors:
        stored = separate[slot.name]
        joined[slot.tensor] = joined[slot.tensor] | stored << slot.bit if slot.bit else stored
    return joined


def codes_of(slot: TensorSlot, stored: Tensor) -> Tensor:
    """Returns the codes of a slot, of the tensor in memory that holds them; all of it where no bytes are shared."""
    return stored >> slot.bit & ((1 << slot.bits) - 1) if slot.shared else stored
