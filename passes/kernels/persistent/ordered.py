"""The order of sums as fields of a schedule: `Ordered`, of persistent kernels that add up as others for few tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.sum_order import CUT, SumOrder

CUTS: Mapping[str, tuple[Any, ...]] = {
    "num_stages": (4, 5, 6, 7, 8),
    "split_k": (1,),
    "stream_k": ("off",),
    "last_split_k": (1,),
    "order_parts": (1,),
    "order_chains": tuple(range(1, 65)),
    "order_step_k": tuple(range(16, 4097, 16)),
}
"""What fields of such a schedule may be."""


@dataclass(frozen=True)
class Ordered(KernelSchedule):
    """The cut of k: fields of `SumOrder`."""

    order_parts: int = 1
    order_chains: int = 1
    order_step_k: int = 128

    @property
    def order(self) -> SumOrder:
        return SumOrder(self.order_parts, self.order_chains, self.order_step_k)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KernelSchedule:
        """The inverse of `dataclasses.asdict`. Fields may have the names of version 0.1.0 of November 2026, as in old
        tables, where the chains of blocks that were a cluster lay in parts of k."""
        read = dict(values)
        parts, chains = read.pop("order_split_k", 1), read.pop("order_warps_k", None)
        if chains is not None or parts != 1:
            apart = read.pop("order_apart", False)
            read |= {"order_parts": parts if apart else 1, "order_chains": (chains or 1) * (1 if apart else parts)}
        return super().from_dict(read)


def cut_of(order: SumOrder) -> dict[str, Any]:
    """Returns an order as these fields."""
    return {f"order_{name}": getattr(order, name) for name in CUT}
