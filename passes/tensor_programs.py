"""Programs on tensors: modules of one lowbit.matmul or another operation on tensors, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from lowbit.dialect import ops
from lowbit.dialect.assembly import print_module
from lowbit.dialect.bindings import func, ir, new_context
from lowbit.dialect.call import Act, Call, Out
from lowbit.dialect.epilogue import Epilogue
from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.byte_codes import SUM_COLUMNS, Compute
from lowbit.dialect.packed_type import Packed, packed_type
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelRequest, KernelSchedule, Operation
from lowbit.passes.kernels.permute.family import permute_spec
from lowbit.passes.kernels.quantize.family import quantize_spec
from lowbit.passes.kernels.registry import family_named, schedule_from_dict, schedule_to_dict

_ANY = ir.ShapedType.get_dynamic_size()


def tensor_program(request: KernelRequest) -> ir.Module:
    """The program that a request is compiled from: one operation, which carries the schedule."""
    module = MODULES[family_named(request.family).operation](request.spec)
    (function,) = module.body.operations
    function.regions[0].blocks[0].operations[0].schedule = schedule_attr(request.schedule)
    return module


def matmul_text(spec: MatmulSpec) -> str:
    """The module of a matmul as text, before any choice is made: what every target starts from."""
    context = new_context()
    ops.register(context)
    with context, ir.Location.unknown():
        return print_module(matmul_module(spec))


def matmul_module(spec: MatmulSpec) -> ir.Module:
    """A module with @matmul(x, w[, bias][, residual]) -> y, of one lowbit.matmul; needs a context with the dialect."""
    x, y = _tensor([_ANY, spec.k], spec.act), _tensor([_ANY, spec.outputs], spec.out_dtype)

    def matmul(arguments: list[Any]) -> Any:
        x, w, *added = arguments
        op = ops.MatmulOp(x, w, y, added[: spec.bias], added[spec.bias :])
        op.outliers = spec.outliers
        op.invariant = spec.invariant
        op.epilogue = spec.epilogue or "none"
        return op

    return _function("matmul", [x, packed_type(spec), *_added_types(spec)], [y], matmul)


def expert_matmul_module(spec: MatmulSpec) -> ir.Module:
    """A module with @expert_matmul(x, w, rows, tiles[, bias]) -> y, of one lowbit.expert_matmul."""
    x, y = _tensor([_ANY, spec.k], spec.act), _tensor([_ANY, spec.outputs], spec.out_dtype)

    def matmul(arguments: list[Any]) -> Any:
        op = ops.ExpertMatmulOp(*arguments[:4], y, arguments[4:], _attribute(spec.experts))
        op.outliers = spec.outliers
        op.invariant = spec.invariant
        op.epilogue = spec.epilogue or "none"
        return op

    return _function("expert_matmul", [x, packed_type(spec), *_routing_types(spec)], [y], matmul)


def quantized_expert_matmul_module(spec: MatmulSpec) -> ir.Module:
    """A module with @quantized_expert_matmul(values, scales, sums, w, rows, tiles[, bias]) -> y, of one
    lowbit.quantized_expert_matmul."""
    y = _tensor([_ANY, spec.outputs], spec.out_dtype)

    def matmul(arguments: list[Any]) -> Any:
        op = ops.QuantizedExpertMatmulOp(*arguments[:6], y, arguments[6:], _attribute(spec.experts))
        op.fold_scales = spec.fold_scales
        op.invariant = spec.invariant
        op.epilogue = spec.epilogue or "none"
        return op

    inputs = [*_quantized_types(spec), packed_type(spec), *_routing_types(spec)]
    return _function("quantized_expert_matmul", inputs, [y], matmul)


def top_k_expert_matmul_module(spec: MatmulSpec) -> ir.Module:
    """A module with @top_k_expert_matmul(x, w, ids[, bias][, weights]) -> y, of one lowbit.top_k_expert_matmul."""
    x, y, top_k = _tensor([_ANY, spec.k], spec.act), _tensor([_ANY, spec.outputs], spec.out_dtype), spec.top_k
    if top_k is None:
        raise SpecError(f"({spec}) has no top_k, which says how ids are given")

    def matmul(arguments: list[Any]) -> Any:
        x, w, ids, *added = arguments
        op = ops.TopKExpertMatmulOp(x, w, ids, y, added[: spec.bias], added[spec.bias :], _attribute(spec.experts))
        op.epilogue = spec.epilogue or "none"
        return op

    bias = [_tensor([spec.n], spec.out_dtype)] * spec.bias
    weights = [_tensor([_ANY, top_k.count], top_k.weights)] if top_k.weights else []
    inputs = [x, packed_type(spec), _tensor([_ANY, top_k.count], top_k.ids), *bias, *weights]
    return _function("top_k_expert_matmul", inputs, [y], matmul)


def _routing_types(spec: MatmulSpec) -> list[Any]:
    """Returns the types of what says which slots are whose, and of the bias of all experts, if there is one."""
    bias = [_tensor([spec.n], spec.out_dtype)] * spec.bias
    return [_tensor([_ANY], "i32"), _tensor([_ANY, ops.TILE_COLUMNS], "i32"), *bias]


def dequantize_module(spec: MatmulSpec) -> ir.Module:
    """A module with @dequantize(w) -> W, of one lowbit.dequantize."""
    y = ir.RankedTensorType.get([spec.n, spec.k], ir.Type.parse(spec.act))

    def dequantized(arguments: list[Any]) -> Any:
        op = ops.DequantizeOp(arguments[0], y)
        op.outliers = spec.outliers
        return op

    return _function("dequantize", [packed_type(spec)], [y], dequantized)


def prepack_module(spec: MatmulSpec) -> ir.Module:
    """A module with @prepack(codes) -> packed codes, of one lowbit.prepack."""
    codes = ir.RankedTensorType.get([spec.n, spec.k], ir.Type.parse("i8"))
    packed = ir.RankedTensorType.get(list(spec.packing.codes_shape), ir.Type.parse("i32"))
    weight = ir.TypeAttr.get(packed_type(spec))
    return _function("prepack", [codes], [packed], lambda arguments: ops.PrepackOp(arguments[0], weight, packed))


def permute_module(spec: MatmulSpec) -> ir.Module:
    """A module with @permute(x, permutation) -> y, of one lowbit.permute."""
    x, permutation = _tensor([_ANY, spec.k], spec.act), _tensor([spec.k], "i32")
    return _function("permute", [x, permutation], [x], lambda arguments: ops.PermuteOp(*arguments, x))


def quantize_module(spec: MatmulSpec) -> ir.Module:
    """A module with @quantize(x) -> (values, scales, sums), of one lowbit.quantize."""
    x, quantized = _tensor([_ANY, spec.k], spec.act), _quantized_types(spec)
    return _function("quantize", [x], quantized, lambda arguments: ops.QuantizeOp(*arguments, *quantized))


def quantized_matmul_module(spec: MatmulSpec) -> ir.Module:
    """A module with @quantized_matmul(values, scales, sums, w[, bias]) -> y, of one lowbit.quantized_matmul."""
    y = _tensor([_ANY, spec.outputs], spec.out_dtype)
    inputs = [*_quantized_types(spec), packed_type(spec), *_added_types(spec)]

    def matmul(arguments: list[Any]) -> Any:
        added = arguments[4:]
        op = ops.QuantizedMatmulOp(*arguments[:4], y, added[: spec.bias], added[spec.bias :])
        op.fold_scales = spec.fold_scales
        op.invariant = spec.invariant
        op.epilogue = spec.epilogue or "none"
        return op

    return _function("quantized_matmul", inputs, [y], matmul)


def _added_types(spec: MatmulSpec) -> list[Any]:
    """Returns the types of what a matmul adds to its sums: a bias [n], a residual [m, n]."""
    shapes = ([[spec.n]] if spec.bias else []) + [[_ANY, spec.n] for _ in spec.call_inputs]
    return [_tensor(shape, spec.out_dtype) for shape in shapes]


def _quantized_types(spec: MatmulSpec) -> list[Any]:
    """Returns the types of an activation of 8 bits: values, scales and sums."""
    sums = _tensor([_ANY, spec.k // SUM_COLUMNS], "f32")
    return [_tensor([_ANY, spec.k], spec.x.operand), _tensor([_ANY], "f32"), sums]


def _tensor(shape: list[int], element: str) -> Any:
    return ir.RankedTensorType.get(shape, ir.Type.parse(element))


def _function(name: str, inputs: list[Any], results: list[Any], make: Callable[[list[Any]], Any]) -> ir.Module:
    """A module with a function that returns the results of the operation that `make` makes of its arguments."""
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        function = func.FuncOp(name, (inputs, results))
        with ir.InsertionPoint(function.add_entry_block()):
            func.ReturnOp(list(make(list(function.arguments)).operation.results))
    module.operation.verify()
    return module


MODULES: dict[Operation, Callable[[MatmulSpec], ir.Module]] = {
    "matmul": matmul_module,
    "expert_matmul": expert_matmul_module,
    "top_k_expert_matmul": top_k_expert_matmul_module,
    "dequantize": dequantize_module,
    "prepack": prepack_module,
    "permute": permute_module,
    "quantize": quantize_module,
    "quantized_matmul": quantized_matmul_module,
    "quantized_expert_matmul": quantized_expert_matmul_module,
}
_OF_EXPERTS = (ops.ExpertMatmulOp, ops.QuantizedExpertMatmulOp, ops.TopKExpertMatmulOp)
_SUMMED = (ops.MatmulOp, ops.QuantizedMatmulOp, *_OF_EXPERTS)
"""Operations that may add a bias."""


def packed_of(op: Any) -> Packed:
    """The weight of a tensor operation: an operand, or what a prepack makes."""
    return Packed.of(ir.TypeAttr(op.weight).value if isinstance(op, ops.PrepackOp) else op.w.type)


def spec_of(op: Any) -> MatmulSpec:
    """The spec that an operation's types spell out."""
    if isinstance(op, ops.PermuteOp | ops.QuantizeOp):
        x = ir.RankedTensorType(op.x.type)
        k, act = x.shape[1], cast(Act, str(x.element_type))
        return permute_spec(k, act) if isinstance(op, ops.PermuteOp) else quantize_spec(k, act, _compute_of(op.values))
    w = packed_of(op)
    outliers = isinstance(op, ops.MatmulOp | ops.ExpertMatmulOp | ops.DequantizeOp) and op.outliers
    summed = isinstance(op, _SUMMED)
    format = replace(w.format, bias=summed and len(op.bias) > 0, outliers=outliers)
    epilogue = cast(Epilogue, op.epilogue) if summed and op.epilogue != "none" else None
    return MatmulSpec.of(w.shape, format, _call_of(op), epilogue)


def _call_of(op: Any) -> Call:
    """The types of an operation's tensors; those of one that has neither x nor y are as good as any."""
    experts = int(op.experts.value) if isinstance(op, _OF_EXPERTS) else 1
    if isinstance(op, ops.MatmulOp | ops.ExpertMatmulOp | ops.TopKExpertMatmulOp):
        act, out = _element(op.x), _element(op.y)
        top_k = ops.top_k_of(op) if isinstance(op, ops.TopKExpertMatmulOp) else None
        out = None if out == act else cast(Out, out)
        invariant = isinstance(op, ops.MatmulOp | ops.ExpertMatmulOp) and op.invariant
        return Call(cast(Act, act), out, experts=experts, top_k=top_k, invariant=invariant)
    if isinstance(op, ops.QuantizedMatmulOp | ops.QuantizedExpertMatmulOp):
        out = None if _element(op.y) == "f16" else cast(Out, _element(op.y))
        folds, invariant = op.fold_scales, op.invariant
        return Call(out=out, compute=_compute_of(op.values), fold_scales=folds, experts=experts, invariant=invariant)
    return Call(cast(Act, _element(op.y))) if isinstance(op, ops.DequantizeOp) else Call()


def _element(value: Any) -> str:
    return str(ir.RankedTensorType(value.type).element_type)


def _compute_of(values: Any) -> Compute:
    return "i8" if _element(values) == "i8" else "f8e4m3"


def schedule_attr(schedule: KernelSchedule) -> Any:
    """A schedule as a dictionary attribute."""
    return ir.DictAttr.get({name: _attribute(value) for name, value in schedule_to_dict(schedule).items()})


def read_schedule(attribute: Any) -> KernelSchedule:
    """The schedule in an attribute `schedule`. Raises SpecError for a field or a value that is none."""
    return schedule_from_dict({named.name: _value(named.attr) for named in attribute})


def _attribute(value: int | bool | str) -> Any:
    if isinstance(value, str):
        return ir.StringAttr.get(value)
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def _value(attribute: Any) -> int | bool | str | None:
    """The inverse of `_attribute`, None for any other attribute."""
    for kind in (ir.BoolAttr, ir.IntegerAttr, ir.StringAttr):
        if isinstance(attribute, kind):
            return kind(attribute).value
    return None
