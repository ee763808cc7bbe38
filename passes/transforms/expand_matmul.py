"""expand-matmul: `lowbit.matmul` and the other operations on tensors become tile programs.

A kernel is a function from a spec and a schedule to a program: the `build` of its family (`passes.kernels.registry`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir
from lowbit.dialect.errors import PassError
from lowbit.passes.base import at, each_op
from lowbit.passes.builder.program import verified_later
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.registry import family_of
from lowbit.passes.tensor_programs import read_schedule, spec_of
from lowbit.passes.transforms.plan_packing import WITH_WEIGHT, check_planned


@dataclass(frozen=True)
class ExpandMatmul:
    """Replace functions around lowbit.matmul, or another operation on tensors, by tile programs that compute them."""

    name: ClassVar[str] = "expand-matmul"

    def run(self, module: ir.Module) -> None:
        for op in each_op(module, *WITH_WEIGHT, ops.QuantizeOp, ops.PermuteOp):
            with at(op):
                if isinstance(op, WITH_WEIGHT):
                    check_planned(op)
                _check_alone(op)
                schedule = _schedule_of(op)
                with verified_later():  # with the module, which they become a part of
                    program = family_of(schedule).build(spec_of(op), schedule)
                _replace_function(op, program)


def _schedule_of(op: Any) -> KernelSchedule:
    """The schedule that an operation carries. Raises PassError where it has none, or one for another operation."""
    name = op.operation.name
    if op.schedule is None:
        raise PassError(f"expand-matmul: a {name} has no schedule; run select-schedule first")
    schedule = read_schedule(op.schedule)
    family = family_of(schedule)
    if name != f"lowbit.{family.operation}":
        raise PassError(f"expand-matmul: a schedule of {family.name} is for lowbit.{family.operation}, not for {name}")
    return schedule


def _check_alone(op: Any) -> None:
    """Raises PassError unless the function around `op` does nothing else: all of it becomes one kernel."""
    name, function = op.operation.name, op.operation.parent
    if function.operation.name != "func.func":
        raise PassError(f"expand-matmul: {name} must stand in a func.func, not {function.operation.name}")
    body = [inner.operation.name for inner in op.operation.block.operations]
    if body != [name, "func.return"]:
        raise PassError(f"expand-matmul: a function must be {name} and func.return alone, not {', '.join(body)}")


def _replace_function(op: Any, program: ir.Module) -> None:
    """Put the program where the function of `op` is."""
    function = op.operation.parent
    for inner in program.body.operations:
        inner.operation.clone(ir.InsertionPoint(function))
    function.operation.erase()
