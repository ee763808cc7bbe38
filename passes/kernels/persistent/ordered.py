"""The order of sums as fields of a schedule: `Ordered`, of persistent kernels that add up as others for few tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.passes.kernels.sum_order import APART, SumOrder

CUTS: Mapping[str, tuple[Any, ...]] = {
    "num_stages": (4, 5, 6, 7, 8),
    "split_k": (1,),
    "stream_k": ("off",),
    "last_split_k": (1,),
    "order_split_k": tuple(range(1, 9)),
    "order_warps_k": tuple(range(1, 33)),
    "order_step_k": tuple(range(16, 4097, 16)),
    "order_apart": (False,),
}
"""What fields of such a schedule may be."""


@dataclass(frozen=True)
class Ordered:
    """The cut of k: fields of `SumOrder`, and whether the sums of its parts are added by themselves (`APART`)."""

    order_split_k: int = 1
    order_warps_k: int = 1
    order_step_k: int = 128
    order_apart: bool = False

    @property
    def order(self) -> SumOrder:
        products = (APART,) if self.order_apart else ()
        return SumOrder(self.order_split_k, self.order_warps_k, self.order_step_k, products)


def cut_of(order: SumOrder) -> dict[str, Any]:
    """Returns an order as these fields."""
    cut = {f"order_{name}": getattr(order, name) for name in ("split_k", "warps_k", "step_k")}
    return {**cut, "order_apart": APART in order.products}
