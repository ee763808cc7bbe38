"""expand-matmul: `lowbit.matmul`, `lowbit.dequantize` and `lowbit.prepack` become tile programs.

The kernels are functions from a spec (and a schedule) to a program: `passes.kernels.decode.kernel`,
`passes.kernels.decode.integer`, `passes.kernels.dequantize`, `passes.kernels.prepack`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.dialect import ops
from lowbit.dialect.bindings import func, ir
from lowbit.dialect.errors import PassError
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.types import packed_type
from lowbit.passes.base import at, each_op
from lowbit.passes.kernels.decode.integer import decode_matmul_integer
from lowbit.passes.kernels.decode.kernel import decode_matmul
from lowbit.passes.kernels.dequantize import dequantize
from lowbit.passes.kernels.prepack import prepack
from lowbit.passes.transforms.plan_packing import check_planned, spec_of
from lowbit.passes.transforms.select_schedule import SCHEDULE, read_schedule


@dataclass(frozen=True)
class ExpandMatmul:
    """Replace functions around lowbit.matmul or lowbit.dequantize by the tile programs that compute them."""

    name: ClassVar[str] = "expand-matmul"

    def run(self, module: ir.Module) -> None:
        for op in each_op(module, ops.MatmulOp):
            with at(op):
                check_planned(op)
                _check_alone(op)
                if SCHEDULE not in op.operation.attributes:
                    raise PassError("expand-matmul: a lowbit.matmul has no schedule; run select-schedule first")
                schedule = read_schedule(op.operation.attributes[SCHEDULE])
                program = decode_matmul_integer if schedule.integer_mma else decode_matmul
                _replace_function(op, program(spec_of(op), schedule))
        for kind, kernel in ((ops.DequantizeOp, dequantize), (ops.PrepackOp, prepack)):
            for op in each_op(module, kind):
                with at(op):
                    check_planned(op)
                    _check_alone(op)
                    _replace_function(op, kernel(spec_of(op)))


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


def matmul_module(spec: MatmulSpec) -> ir.Module:
    """A module with @matmul(x, w[, bias]) -> y, of one lowbit.matmul; needs a context with the dialect."""
    dynamic = ir.ShapedType.get_dynamic_size()

    def tensor(shape: list[int], element: str) -> Any:
        return ir.RankedTensorType.get(shape, ir.Type.parse(element))

    x, y = tensor([dynamic, spec.k], spec.act), tensor([dynamic, spec.n], spec.out_dtype)
    inputs = [x, packed_type(spec)] + ([tensor([spec.n], spec.out_dtype)] if spec.bias else [])

    def matmul(arguments: list[Any]) -> Any:
        x, w, *bias = arguments
        return ops.MatmulOp(x, w, y, bias).y

    return _function("matmul", inputs, y, matmul)


def dequantize_module(spec: MatmulSpec) -> ir.Module:
    """A module with @dequantize(w) -> W, of one lowbit.dequantize."""
    y = ir.RankedTensorType.get([spec.n, spec.k], ir.Type.parse(spec.act))

    def dequantized(arguments: list[Any]) -> Any:
        return ops.DequantizeOp(arguments[0], y).y

    return _function("dequantize", [packed_type(spec)], y, dequantized)


def prepack_module(spec: MatmulSpec) -> ir.Module:
    """A module with @prepack(codes) -> packed codes, of one lowbit.prepack."""
    codes = ir.RankedTensorType.get([spec.n, spec.k], ir.Type.parse("i8"))
    packed = ir.RankedTensorType.get(list(spec.packing.codes_shape), ir.Type.parse("i32"))
    weight = ir.TypeAttr.get(packed_type(spec))
    return _function("prepack", [codes], packed, lambda arguments: ops.PrepackOp(arguments[0], weight, packed).packed)


def _function(name: str, inputs: list[Any], result: Any, make: Callable[[list[Any]], Any]) -> ir.Module:
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        function = func.FuncOp(name, (inputs, [result]))
        with ir.InsertionPoint(function.add_entry_block()):
            func.ReturnOp([make(list(function.arguments))])
    module.operation.verify()
    return module
