"""lower-to-llvm: gpu, scf, arith and nvvm become the llvm dialect, by upstream's passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dialect.bindings import ir, passmanager

_PIPELINE = (
    "builtin.module(gpu.module(convert-scf-to-cf,convert-gpu-to-nvvm{index-bitwidth=32},convert-nvvm-to-llvm,"
    "reconcile-unrealized-casts,canonicalize,cse))"
)


@dataclass(frozen=True)
class LowerToLLVM:
    """Convert gpu.func bodies to the llvm dialect with upstream's conversion passes."""

    name: ClassVar[str] = "lower-to-llvm"

    def run(self, module: ir.Module) -> None:
        passmanager.PassManager.parse(_PIPELINE).run(module.operation)
