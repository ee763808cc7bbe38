"""lower-to-llvm: gpu, scf, arith and nvvm become the llvm dialect, by upstream's passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.dialect.bindings import gpu, ir, llvm, passmanager
from lowbit.dialect.errors import PassError
from lowbit.dialect.types import Lowbit
from lowbit.passes.base import at, each_function, each_op

_PIPELINE = (
    "builtin.module(gpu.module(convert-scf-to-cf,convert-gpu-to-nvvm{index-bitwidth=32},convert-nvvm-to-llvm,"
    "reconcile-unrealized-casts,canonicalize,cse))"
)
_BY_VALUE = "llvm.byval"


@dataclass(frozen=True)
class LowerToLLVM:
    """Convert gpu.func bodies to the llvm dialect with upstream's conversion passes."""

    name: ClassVar[str] = "lower-to-llvm"

    def run(self, module: ir.Module) -> None:
        for op in each_op(module, Lowbit.Operation):
            with at(op):
                name = op.operation.name
                raise PassError(f"lower-to-llvm: {name} is left over; run lower-tiles and lower-dequant before")
        functions = map(_by_value, each_function(module, gpu.GPUFuncOp))
        by_value = {name: arguments for name, arguments in functions if arguments}
        manager = passmanager.PassManager.parse(_PIPELINE)
        manager.enable_verifier(False)  # after each of its passes; whoever runs this one verifies the result
        manager.run(module.operation)
        for function in each_function(module, llvm.LLVMFuncOp):
            _restore(function.operation.attributes, by_value)


def _by_value(function: Any) -> tuple[str, dict[int, Any]]:
    """Returns a function's name and the types of the arguments that are passed by value, by position."""
    attributes = function.operation.attributes
    listed = ir.ArrayAttr(attributes["arg_attrs"]) if "arg_attrs" in attributes else ()
    found = {i: each[_BY_VALUE] for i, each in enumerate(map(ir.DictAttr, listed)) if _BY_VALUE in each}
    return ir.StringAttr(attributes["sym_name"]).value, found


def _restore(attributes: Any, by_value: dict[str, dict[int, Any]]) -> None:
    """Marks what a kernel takes by value: upstream's conversion of functions drops the attribute.

    The kernel reads it where it lies (grid_constant, which only an llvm.func may have). Otherwise NVPTX would copy it
    to each thread's local memory, and a copy of a tensor map is not a tensor map.
    """
    arguments = by_value.get(ir.StringAttr(attributes["sym_name"]).value)
    if not arguments:
        return
    listed = list(ir.ArrayAttr(attributes["arg_attrs"]))
    for position, type_ in arguments.items():
        kept = {named.name: named.attr for named in ir.DictAttr(listed[position])}
        listed[position] = ir.DictAttr.get(kept | {_BY_VALUE: type_, "nvvm.grid_constant": ir.UnitAttr.get()})
    attributes["arg_attrs"] = ir.ArrayAttr.get(listed)
