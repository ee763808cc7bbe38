"""plan-packing: writes on every operation with a packed weight how that sits in memory.

`dialect.formats.packing` decides; the attribute `packing` lays the decision open to the reader of the IR and to
the passes after this one: columns and units per chunk, padding, and the shapes of the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir
from lowbit.dialect.errors import PassError
from lowbit.dialect.ops.tensors import packing_attr
from lowbit.passes.base import each_op
from lowbit.passes.tensor_programs import packed_of

WITH_WEIGHT = (
    *(ops.MatmulOp, ops.QuantizedMatmulOp, ops.ExpertMatmulOp, ops.QuantizedExpertMatmulOp),
    *(ops.TopKExpertMatmulOp, ops.DequantizeOp, ops.PrepackOp),
)


@dataclass(frozen=True)
class PlanPacking:
    """Attach the memory order of its weight to every operation of `WITH_WEIGHT`."""

    name: ClassVar[str] = "plan-packing"

    def run(self, module: ir.Module) -> None:
        for op in each_op(module, *WITH_WEIGHT):
            op.packing = packing_attr(packed_of(op).packing)


def check_planned(op: Any) -> None:
    """Raises PassError for an operation without a plan; its verifier has checked one that is there."""
    if op.packing is None:
        raise PassError(f"a {op.operation.name} has no packing; run plan-packing first")
