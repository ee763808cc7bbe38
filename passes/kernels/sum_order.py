"""`SumOrder`: in which order the products of a row of the weight and a row of x are added up. No MLIR is needed.

Kernels whose orders are equal give equal bits, for however many rows of x they were made; docs/invariant.md has the
definition. The order inside one instruction of a tensor core is the hardware's.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.spec import MatmulSpec

CUT = ("parts", "chains", "step_k")
"""The fields of `SumOrder` that say how k is cut; what else there is of an order follows from the spec."""


@dataclass(frozen=True)
class SumOrder:
    """The order of the sums of one result.

    k is cut into steps of step_k columns. A part of k is as many whole rounds of a step for each chain as the others,
    or fewer at the end. In each part, chain i adds up the steps i, i + chains, i + 2 chains and so on, in this order.
    Then the sums of the chains of each part are added in order, and then those of the parts.

    parts      of k: 1 but where blocks that split k add up through device memory
    chains     of a part
    step_k     columns of a step, whose products are added up group by group: those of a group (or of the step, where
               groups are longer) from zero, and then scaled; without groups, or if weights are scaled, from the sums of
               the chain. Of a single chain in groups no more than those of a group: longer steps change nothing
    products   what else decides on bits: the numbers that are multiplied, and choices that other orders follow from
    """

    parts: int
    chains: int
    step_k: int
    products: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: MatmulSpec, parts: int, chains: int, step_k: int, products: tuple[str, ...]) -> SumOrder:
        """Returns the order of a kernel that cuts k so."""
        group = spec.packing.padded_group
        return cls(parts, chains, min(step_k, group) if parts * chains == 1 and group else step_k, products)

    def __str__(self) -> str:
        fields = f"parts={self.parts}, chains={self.chains}, step_k={self.step_k}"
        return f"{fields} ({', '.join(self.products)})" if self.products else fields
