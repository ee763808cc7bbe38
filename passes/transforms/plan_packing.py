"""plan-packing: writes on every operation with a packed weight how that sits in memory.

`dialect.formats.packing` decides; the attribute `lowbit.packing` lays the decision open to the reader of the IR and to
the passes after this one: columns and units per chunk, padding, and the shapes of the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir
from lowbit.dialect.errors import PassError
from lowbit.dialect.formats.packing import Packing
from lowbit.dialect.types import ints
from lowbit.passes.base import each_op
from lowbit.passes.tensor_programs import packed_of

PACKING = "lowbit.packing"


@dataclass(frozen=True)
class PlanPacking:
    """Attach the memory order of its weight to every lowbit.matmul, dequantize and prepack."""

    name: ClassVar[str] = "plan-packing"

    def run(self, module: ir.Module) -> None:
        for kind in (ops.MatmulOp, ops.DequantizeOp, ops.PrepackOp):
            for op in each_op(module, kind):
                op.operation.attributes[PACKING] = packing_attr(packed_of(op).packing)


def packing_attr(packing: Packing) -> Any:
    """The plan as a dictionary attribute."""
    i64 = ir.IntegerType.get_signless(64)
    numbers = {
        "chunk": packing.chunk,
        "units": packing.units,
        "padded_k": packing.padded_k,
        "padded_group": packing.padded_group or packing.padded_k,
    }
    plan: dict[str, Any] = {name: ir.IntegerAttr.get(i64, value) for name, value in numbers.items()}
    plan["codes"] = ints(packing.codes_shape)
    plan["scales"] = ints(packing.scales_shape)
    return ir.DictAttr.get(plan)


def check_planned(op: Any) -> None:
    """Raises PassError unless the plan on `op` is that of its weight: kernels read memory in this order alone."""
    wanted = packing_attr(packed_of(op).packing)
    name = op.operation.name
    if PACKING not in op.operation.attributes:
        raise PassError(f"a {name} has no {PACKING}; run plan-packing first")
    if op.operation.attributes[PACKING] != wanted:
        raise PassError(f"{name}: {PACKING} = {op.operation.attributes[PACKING]} is not the weight's order {wanted}")
