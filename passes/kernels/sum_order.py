"""`SumOrder`: in which order the products of a row of the weight and a row of x are added up. No MLIR is needed.

Kernels whose orders are equal give equal bits, for however many rows of x they were made; docs/invariant.md has the
definition. The order inside one instruction of a tensor core is the hardware's.
"""

from __future__ import annotations

from dataclasses import dataclass

APART = "parts by themselves"
"""The last of `SumOrder.products` where the chains of each part are added up first, and then the parts."""


@dataclass(frozen=True)
class SumOrder:
    """The order of the sums of one result.

    k is cut into steps of step_k columns. A part of k is as many whole rounds of warps_k steps as the others, or fewer
    at the end. In each part, chain i adds up the steps i, i + warps_k, i + 2 warps_k and so on, in this order; then the
    sums of the chains of all parts are added in order, or those of each part, and then those of parts (`APART`).

    split_k    parts of k
    warps_k    chains of a part
    step_k     columns of a step, whose products are added up group by group: those of a group (or of the step, where
               groups are longer) from zero, and then scaled; without groups, or if weights are scaled, from the sums of
               the chain
    products   what else decides on bits: the numbers that are multiplied, and choices that other orders follow from
    """

    split_k: int
    warps_k: int
    step_k: int
    products: tuple[str, ...] = ()

    def __str__(self) -> str:
        fields = f"split_k={self.split_k}, warps_k={self.warps_k}, step_k={self.step_k}"
        return f"{fields} ({', '.join(self.products)})" if self.products else fields
