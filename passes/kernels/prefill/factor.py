"""`Factor`: how scales, zeros or offsets of one tensor lie in a round of the prefill kernel. No MLIR is needed here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.weight import TensorSlot
from lowbit.passes.kernels.prefill.plan import PrefillPlan

_MOST_LOADED = 16  # numbers of a row and round that registers have room for,
_MOST_BESIDE_OUTLIERS = 8  # which outliers take from them


@dataclass(frozen=True)
class Factor:
    """Numbers of a tensor in a round.

    count   numbers of a row that a round has: one for every `columns` columns
    repeat  parts of rounds, or rounds, that share a number
    """

    slot: TensorSlot
    count: int
    columns: int
    repeat: int

    @staticmethod
    def of(plan: PrefillPlan, slot: TensorSlot) -> Factor:
        """Returns the factor of a tensor."""
        packing, bilevel = plan.spec.packing, plan.spec.bilevel
        if packing.padded_group is None or slot.index == "padded_row":
            return Factor(slot, 1, plan.step, plan.rounds)
        columns = bilevel.columns(packing) if slot.index == "block" and bilevel else packing.padded_group
        each = math.gcd(columns, plan.step)
        return Factor(slot, plan.step // each, each, columns // each)

    @property
    def lanes(self) -> int:
        """Numbers in memory for the 16 rows of a row block."""
        return self.slot.shape[-1] if len(self.slot.shape) == 3 else 1

    @property
    def row_block_bytes(self) -> int:
        """Bytes of a row block in a round."""
        return self.count * self.lanes * ELEMENTS[self.slot.storage].bytes

    def ended(self, plan: PrefillPlan, panel: int) -> list[int]:
        """Returns the numbers that a panel of a round is the last one to need."""
        width = plan.schedule.panel_k
        ends = ((i, (i + 1) * self.columns) for i in range(self.count))
        return [i for i, end in ends if panel * width < end <= (panel + 1) * width]


def factors_of(plan: PrefillPlan) -> dict[str, Factor]:
    """The factors that rounds need: what is not for the sums of all of k."""
    return {slot.name: Factor.of(plan, slot) for slot in plan.spec.tensors if _is_in_rounds(plan, slot)}


def _is_in_rounds(plan: PrefillPlan, slot: TensorSlot) -> bool:
    if slot.index == "padded_row":
        return plan.scales_rows_early
    if slot.role == "zero" and plan.spec.zeros == "int":
        return True
    return slot.index in ("group", "block") and plan.scales_in_rounds


def staged_factors(plan: PrefillPlan) -> set[str]:
    """The names of factors that come by way of shared memory: those with many numbers in a round, more than there are
    registers for. Beside activations of 8 bits they come part by part (`EightBitWeight`)."""
    if plan.spec.compute:
        return set()
    factors = factors_of(plan)
    most = _MOST_BESIDE_OUTLIERS if plan.spec.outliers else _MOST_LOADED
    if sum(factor.count for factor in factors.values()) <= most:
        return set()
    return {name for name, factor in factors.items() if factor.count > 1 and factor.repeat == 1}
