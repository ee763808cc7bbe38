"""plan-packing: writes on every operation with a packed weight how that sits in memory.

`dialect.formats.packing` decides; the attribute `lowbit.packing` lays the decision open to the reader of the IR and to
the passes after this one: columns and units per chunk, padding, and the shapes of the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir
from lowbit.dialect.errors import PassError
from lowbit.dialect.formats.packing import Packing
from lowbit.dialect.spec import Act, MatmulSpec, Out, Scale, Zeros
from lowbit.dialect.types import Packed, ints
from lowbit.passes.base import each_op

PACKING = "lowbit.packing"


@dataclass(frozen=True)
class PlanPacking:
    """Attach the memory order of its weight to every lowbit.matmul, dequantize and prepack."""

    name: ClassVar[str] = "plan-packing"

    def run(self, module: ir.Module) -> None:
        for kind in (ops.MatmulOp, ops.DequantizeOp, ops.PrepackOp):
            for op in each_op(module, kind):
                op.operation.attributes[PACKING] = packing_attr(packed_of(op).packing)


def packed_of(op: Any) -> Packed:
    """The weight of a tensor operation: an operand, or what a prepack makes."""
    return Packed.of(ir.TypeAttr(op.weight).value if isinstance(op, ops.PrepackOp) else op.w.type)


def spec_of(op: Any) -> MatmulSpec:
    """Returns the spec that the types of a tensor operation spell out."""
    w = packed_of(op)
    act = y = "f16"  # packing depends on neither
    bias = False
    if isinstance(op, ops.MatmulOp):
        act, y = (str(ir.RankedTensorType(t.type).element_type) for t in (op.x, op.y))
        bias = len(op.bias) > 0
    elif isinstance(op, ops.DequantizeOp):
        act = y = str(ir.RankedTensorType(op.y.type).element_type)
    return MatmulSpec(
        w.n,
        w.k,
        w.format.name,
        group_size=w.group,
        zeros=cast(Zeros, w.zeros),
        scale=cast(Scale, w.scale),
        act=cast(Act, act),
        out=None if y == act else cast(Out, y),
        bias=bias,
        table=w.format.table if w.format.name.startswith("lut") else None,
    )


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
