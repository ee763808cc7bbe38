"""lower-to-llvm: gpu, scf, arith and nvvm become the llvm dialect, by upstream's passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowbit.dialect.bindings import ir, passmanager
from lowbit.dialect.errors import PassError
from lowbit.dialect.types import Lowbit
from lowbit.passes.base import at, each_op

_PIPELINE = (
    "builtin.module(gpu.module(convert-scf-to-cf,convert-gpu-to-nvvm{index-bitwidth=32},convert-nvvm-to-llvm,"
    "reconcile-unrealized-casts,canonicalize,cse))"
)


@dataclass(frozen=True)
class LowerToLLVM:
    """Convert gpu.func bodies to the llvm dialect with upstream's conversion passes."""

    name: ClassVar[str] = "lower-to-llvm"

    def run(self, module: ir.Module) -> None:
        for op in each_op(module, Lowbit.Operation):
            with at(op):
                name = op.operation.name
                raise PassError(f"lower-to-llvm: {name} is left over; run lower-tiles and lower-dequant before")
        passmanager.PassManager.parse(_PIPELINE).run(module.operation)
