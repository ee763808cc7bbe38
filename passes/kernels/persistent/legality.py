"""What persistent schedules must obey, whatever multiplies, and how registers that a thread needs are counted. No MLIR
is needed here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.tiles import MOST_BLOCKS
from lowbit.passes.target import Target

_OUTLIERS = 16  # registers for the place in the lines of outliers

P = TypeVar("P")
Extra = tuple[int, str, Callable[[P], bool]]
"""Registers that a thread needs besides those that follow from a plan; what for; and with which plans. The numbers are
fitted: with them, `spills` says of kernels what the assembler does."""


def check_split(plan: PersistentPlan, target: Target) -> None:
    """Raises SpecError where blocks of a plan cannot split k."""
    s = plan.schedule
    unlike = {"split_k": 1, "last_split_k": 1, "stream_k": "off"}
    field = next((name for name, value in unlike.items() if getattr(s, name) != value), None)
    if field is None:
        return
    split, instead = f"schedule: {field}={getattr(s, field)!r}", f"take {field}={unlike[field]!r}"
    if s.split_k > 1 and s.cluster > 1:
        raise SpecError(f"{split} needs cluster=1, got {s.cluster}: blocks of a cluster share x or split k")
    if s.streams and target.most_multiprocessors > MOST_BLOCKS:
        raise SpecError(f"{split} has a workspace for {MOST_BLOCKS} blocks, {target} runs more; {instead}")
    if plan.spec.outliers:
        raise SpecError(f"{split} does not fit outliers, which are found from the first column on; {instead}")


def check_shared(plan: PersistentPlan, target: Target) -> None:
    """Raises SpecError where a block of a target has less shared memory than a plan needs."""
    if plan.shared_bytes > target.max_shared_per_block:
        raise SpecError(
            f"schedule: {plan.schedule} needs {plan.shared_bytes} bytes of shared memory, {target} allows "
            f"{target.max_shared_per_block}; take fewer tokens or num_stages, or a smaller panel_k"
        )


def extra_registers(extras: Iterable[Extra[P]], plan: P) -> int:
    """Registers of all rows of a table that hold for a plan."""
    return sum(registers for registers, _, holds in extras if holds(plan))


def loaded_registers(plan: PersistentPlan) -> int:
    """Registers for what a thread loads of a round, of a row block."""
    codes = plan.round.step * plan.spec.packing.bits // 64
    return codes + plan.tensors.loaded_numbers + _OUTLIERS * plan.spec.outliers
