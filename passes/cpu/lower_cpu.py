"""The CPU target: a `MatmulSpec` to programs of vector code for the host. The weight in memory is the one GPUs read.

Programs, each a module with one function (`task.ENTRY`):

few          y for few tokens: codes are decoded in registers                  `few`
many         y for many: codes are decoded once, into memory                   `many`
scaled_few,  the same of an x [m, k] whose rows have scales [m], such as that
scaled_many  of 8 bits: sums are scaled before anything is added to them
dequantize   the weight in the activation's type                               `dequantize`

What stands between the matmuls of a layer is in `layer`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np

from lowbit.dialect.bindings import ir, passmanager
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.decode import SCALE_TABLE, TABLE, Isa
from lowbit.passes.cpu.dequantize import build_dequantize, dequantize_needs
from lowbit.passes.cpu.few import build_few, few_needs
from lowbit.passes.cpu.many import build_many, many_needs
from lowbit.passes.cpu.task import Needs
from lowbit.passes.cpu.vector_ops import constant_array, f32

Program = Literal["few", "many", "scaled_few", "scaled_many", "dequantize"]
_PROGRAMS: dict[Program, tuple[Callable[[MatmulSpec, Isa], None], Callable[[MatmulSpec, Isa], Needs]]] = {
    "few": (build_few, few_needs),
    "many": (build_many, many_needs),
    "scaled_few": (partial(build_few, scaled=True), few_needs),
    "scaled_many": (partial(build_many, scaled=True), many_needs),
    "dequantize": (build_dequantize, dequantize_needs),
}
_LOWERING = (
    "builtin.module(arith-expand{include-bf16=true},canonicalize,cse,loop-invariant-code-motion,convert-scf-to-cf,"
    "convert-vector-to-llvm{reassociate-fp-reductions=true},convert-arith-to-llvm,convert-func-to-llvm,"
    "convert-cf-to-llvm,convert-ub-to-llvm,reconcile-unrealized-casts)"
)

# No tables for exceptions, of which there are none; and without "no-builtins" LLVM would call memset for a loop of
# zeros, but a program has no library to call.
_ATTRIBUTES = ("nounwind", "no-builtins")


def build_cpu_program(spec: MatmulSpec, program: Program, isa: Isa = "generic") -> ir.Module:
    """A program in the func, scf, arith, vector and llvm dialects. Needs a context."""
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        if spec.dtype.kind == "table":
            constant_array(TABLE, f32(), spec.dtype.values().astype(np.float32))
        if spec.bilevel and spec.bilevel.table:
            constant_array(SCALE_TABLE, f32(), np.array(spec.bilevel.table, dtype=np.float32))
        build, _ = _PROGRAMS[program]
        build(spec, isa)
    return module


def cpu_needs(spec: MatmulSpec, program: Program, isa: Isa = "generic") -> Needs:
    """The scratch memory that a program wants."""
    _, scratch = _PROGRAMS[program]
    return scratch(spec, isa)


def lower_cpu_to_llvm(module: ir.Module) -> ir.Module:
    """A program in the llvm dialect alone; changed in place."""
    passes = passmanager.PassManager.parse(_LOWERING)
    passes.enable_verifier(False)  # the translation verifies the result
    passes.run(module.operation)
    for op in module.body.operations:
        if op.operation.name == "llvm.func":
            op.attributes["passthrough"] = ir.ArrayAttr.get([ir.StringAttr.get(a) for a in _ATTRIBUTES])
    return module
