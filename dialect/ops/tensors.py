"""Tensor level: whole weights, activations and outputs."""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from collections.abc import Sequence
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import expect, in_range, tensor, verifier
from lowbit.dialect.elements import ACTS
from lowbit.dialect.epilogue import ACTIVATIONS, EPILOGUES, RESIDUAL
from lowbit.dialect.formats.byte_codes import SUM_COLUMNS
from lowbit.dialect.formats.packing import ROWS, Packing
from lowbit.dialect.formats.reals import REALS
from lowbit.dialect.optional import Choice, Flag, Optional
from lowbit.dialect.packed_type import Packed
from lowbit.dialect.top_k import TopK
from lowbit.dialect.types import Lowbit, PackedType, ints

_PACKING = "the memory order of the weight: chunk, units, padding, shapes"
_EPILOGUES = ("none", *EPILOGUES)
TILE_COLUMNS = 3  # of the table of tiles of experts: expert, first slot, end
_SCHEDULE = "a dictionary of a schedule's fields"


def packing_attr(packing: Packing) -> ir.Attribute:
    """The memory order of a weight, for the attribute `packing`: what its type implies, in numbers."""
    i64 = ir.IntegerType.get_signless(64)
    numbers = {
        "chunk": packing.chunk,
        "units": packing.units,
        "padded_k": packing.padded_k,
        "padded_group": packing.padded_group or packing.padded_k,
    }
    order: dict[str, Any] = {name: ir.IntegerAttr.get(i64, value) for name, value in numbers.items()}
    order["codes"] = ints(packing.codes_shape)
    order["scales"] = ints(packing.scales_shape)
    return ir.DictAttr.get(order)


def _check_packing(op: Any, w: Packed) -> None:
    """Kernels read memory in one order alone."""
    if op.packing is not None:
        order = packing_attr(w.packing)
        expect(op.packing == order, "packing", f"the weight's order, {order}", op.packing)


class MatmulOp(Lowbit.Operation, name="matmul"):
    """y[t, n] = sum_k x[t, k] W[n, k] (+ bias[n]): x is tensor<?xk>, w a packed weight, y tensor<?xn>.

    An `epilogue` (`dialect.epilogue`) makes y of these sums: "silu_mul", "gelu_mul" and "swiglu_oai" of both halves of
    every row block, tensor<?x n / 2>; "residual" adds `residual`, which is like y.

    With `outliers`, a sparse matrix comes with the weight and is added to it. Sums of both are in f32, rounded once.

    With `invariant`, the order of sums depends on neither the number of rows of x nor the place of a row among them.

    On this and the other operations here, `plan-packing` writes `packing`, `select-schedule` writes `schedule`, and
    `expand-matmul` needs both.
    """

    x: ext.Operand[Any]
    w: ext.Operand[PackedType]
    y: ext.Result[Any]
    bias: Sequence[ext.Operand[Any]]
    residual: Sequence[ext.Operand[Any]]
    outliers = Flag()
    invariant = Flag()
    epilogue = Choice(*_EPILOGUES)
    packing = Optional(ir.DictAttr, _PACKING)
    schedule = Optional(ir.DictAttr, _SCHEDULE)

    @verifier
    def verify_invariants(op: Any) -> None:
        w = Packed.of(op.w.type)
        _check_packing(op, w)
        tensor(op.x, "x", (None, w.shape.k), ACTS)
        _check_output(op, w)


class ExpertMatmulOp(Lowbit.Operation, name="expert_matmul"):
    """y[s, n] = sum_k x[rows[s], k] W[e(s), n, k] (+ bias[e(s), n]): x is tensor<?xk>, w a packed weight of `experts`
    experts, whose rows follow one another, and y tensor<?x n / experts>. An `epilogue` makes half as
    many columns of y of both halves of every row block, as in `matmul`.

    Slots s are sorted by expert. `rows`, tensor<?xi32>, has the row of x of each. `tiles`, tensor<?x3xi32>, says which
    slots are of which expert, some at a time: how many such tiles there are, in its first row, and in each other row an
    expert, the tile's first slot, and the slot before which it ends. A tile has no more slots than the schedule's. Rows
    of y of slots in no tile are not written. `invariant` as for `matmul`: other slots play no part.
    """

    x: ext.Operand[Any]
    w: ext.Operand[PackedType]
    rows: ext.Operand[Any]
    tiles: ext.Operand[Any]
    y: ext.Result[Any]
    bias: Sequence[ext.Operand[Any]]
    experts: ir.IntegerAttr
    outliers = Flag()
    invariant = Flag()
    epilogue = Choice("none", *ACTIVATIONS)
    packing = Optional(ir.DictAttr, _PACKING)
    schedule = Optional(ir.DictAttr, _SCHEDULE)

    @verifier
    def verify_invariants(op: Any) -> None:
        w = Packed.of(op.w.type)
        _check_packing(op, w)
        tensor(op.x, "x", (None, w.shape.k), ACTS)
        _check_experts(op, w)


def _check_experts(op: Any, w: Packed) -> None:
    """What says which slots are whose, y of these slots, and a bias of all experts, if there is one."""
    tensor(op.rows, "rows", (None,), ("i32",))
    tensor(op.tiles, "tiles", (None, TILE_COLUMNS), ("i32",))
    _check_rows_of_experts(op, w)


def _check_rows_of_experts(op: Any, w: Packed) -> None:
    """Every expert has row blocks of its own, y columns for those of one, and a bias all of them."""
    experts = in_range(op.experts, "experts", 2, w.shape.n)
    expect(w.shape.n % (ROWS * experts) == 0, "rows of all experts", f"a multiple of {ROWS * experts}", w.shape.n)
    columns = w.shape.n // experts // (2 if op.epilogue in ACTIVATIONS else 1)
    out = tensor(op.y, "y", (None, columns), tuple(REALS))
    expect(len(op.bias) <= 1, "bias", "one at most", len(op.bias))
    for bias in op.bias:
        tensor(bias, "bias", (w.shape.n,), (out,))


class TopKExpertMatmulOp(Lowbit.Operation, name="top_k_expert_matmul"):
    """y[t k + j, n] = sum_i x[t, i] W[ids[t, j], n, i] (+ bias[ids[t, j], n]) for the k experts of each token: x is
    tensor<?xi>, w a packed weight of `experts` experts, whose rows follow one another, `ids` tensor<?xk x i32> or i64,
    and y tensor<?x n / experts>. An `epilogue` makes half as many columns of y, as in `expert_matmul`.

    With `weights`, tensor<?xk>, x has a row for each of a token's experts, and y one for each token: their numbers,
    rounded to y's type, times their weights, are added up in f32, in the order of j.

    An id that is no expert's stands for one elsewhere: its row of y is not written, or it adds exactly 0.
    """

    x: ext.Operand[Any]
    w: ext.Operand[PackedType]
    ids: ext.Operand[Any]
    y: ext.Result[Any]
    bias: Sequence[ext.Operand[Any]]
    weights: Sequence[ext.Operand[Any]]
    experts: ir.IntegerAttr
    epilogue = Choice("none", *ACTIVATIONS)
    packing = Optional(ir.DictAttr, _PACKING)
    schedule = Optional(ir.DictAttr, _SCHEDULE)

    @verifier
    def verify_invariants(op: Any) -> None:
        w = Packed.of(op.w.type)
        _check_packing(op, w)
        tensor(op.x, "x", (None, w.shape.k), ACTS)
        top_k = top_k_of(op)
        _check_rows_of_experts(op, w)
        expect(len(op.weights) <= 1, "weights", "one at most", len(op.weights))
        for weights in op.weights:
            tensor(weights, "weights", (None, top_k.count), tuple(REALS))


def top_k_of(op: Any) -> TopK:
    """Returns what the types of ids and weights say. A verifier's error where ids are no matrix of integers."""
    type_ = ir.RankedTensorType(op.ids.type)
    expect(type_.rank == 2 and type_.shape[1] > 0, "ids", "tensor<?xk> of the k experts of a token", type_)
    tensor(op.ids, "ids", (None, type_.shape[1]), ("i32", "i64"))
    weights = str(ir.RankedTensorType(op.weights[0].type).element_type) if len(op.weights) else None
    return TopK.read({"count": type_.shape[1], "ids": str(type_.element_type), "weights": weights})


class QuantizeOp(Lowbit.Operation, name="quantize"):
    """x, tensor<?xk>, as numbers of 8 bits: `values` times the scale of their row.

    Values are f8E4M3FN or i8; the columns of every 16 are in the order of `dialect.formats.byte_codes.byte_order`.
    `sums` has the sum of every 32 values.
    """

    x: ext.Operand[Any]
    values: ext.Result[Any]
    scales: ext.Result[Any]
    sums: ext.Result[Any]
    schedule = Optional(ir.DictAttr, _SCHEDULE)

    @verifier
    def verify_invariants(op: Any) -> None:
        tensor(op.x, "x", (None, None), ACTS)
        k = ir.RankedTensorType(op.x.type).shape[1]
        expect(k % SUM_COLUMNS == 0, "columns of x", f"a multiple of {SUM_COLUMNS}", k)
        _check_quantized(op.values, op.scales, op.sums, k)


class PermuteOp(Lowbit.Operation, name="permute"):
    """y[t, j] = x[t, permutation[j]]: columns of x, tensor<?xk>, in the order of a weight whose columns are permuted.

    `permutation` is tensor<k x i32> and has every column once.
    """

    x: ext.Operand[Any]
    permutation: ext.Operand[Any]
    y: ext.Result[Any]
    schedule = Optional(ir.DictAttr, _SCHEDULE)

    @verifier
    def verify_invariants(op: Any) -> None:
        act = tensor(op.x, "x", (None, None), ACTS)
        k = ir.RankedTensorType(op.x.type).shape[1]
        tensor(op.permutation, "permutation", (k,), ("i32",))
        tensor(op.y, "y", (None, k), (act,))


class QuantizedMatmulOp(Lowbit.Operation, name="quantized_matmul"):
    """y[t, n] = scales[t] * sum_k values[t, k] W[n, k] (+ bias[n]), with x as `quantize` makes it.

    With `fold_scales`, weights without the scales of their rows may be rounded to the type of the values, and sums over
    all columns may stay in the tensor core. `invariant` as for `matmul`.
    """

    values: ext.Operand[Any]
    scales: ext.Operand[Any]
    sums: ext.Operand[Any]
    w: ext.Operand[PackedType]
    y: ext.Result[Any]
    bias: Sequence[ext.Operand[Any]]
    residual: Sequence[ext.Operand[Any]]
    fold_scales = Flag()
    invariant = Flag()
    epilogue = Choice(*_EPILOGUES)
    packing = Optional(ir.DictAttr, _PACKING)
    schedule = Optional(ir.DictAttr, _SCHEDULE)

    @verifier
    def verify_invariants(op: Any) -> None:
        w = Packed.of(op.w.type)
        _check_packing(op, w)
        _check_quantized(op.values, op.scales, op.sums, w.shape.k)
        _check_folding(op, w)
        _check_output(op, w)


class QuantizedExpertMatmulOp(Lowbit.Operation, name="quantized_expert_matmul"):
    """y[s, n] = scales[rows[s]] * sum_k values[rows[s], k] W[e(s), n, k] (+ bias[e(s), n]): what `expert_matmul`
    computes, with the values, scales and sums of x as `quantize` makes them; `fold_scales` and `invariant` as for
    `quantized_matmul`, and `epilogue` as there."""

    values: ext.Operand[Any]
    scales: ext.Operand[Any]
    sums: ext.Operand[Any]
    w: ext.Operand[PackedType]
    rows: ext.Operand[Any]
    tiles: ext.Operand[Any]
    y: ext.Result[Any]
    bias: Sequence[ext.Operand[Any]]
    experts: ir.IntegerAttr
    fold_scales = Flag()
    invariant = Flag()
    epilogue = Choice("none", *ACTIVATIONS)
    packing = Optional(ir.DictAttr, _PACKING)
    schedule = Optional(ir.DictAttr, _SCHEDULE)

    @verifier
    def verify_invariants(op: Any) -> None:
        w = Packed.of(op.w.type)
        _check_packing(op, w)
        _check_quantized(op.values, op.scales, op.sums, w.shape.k)
        _check_folding(op, w)
        _check_experts(op, w)


def _check_folding(op: Any, w: Packed) -> None:
    """What is left of the scales of weights that are rounded is that of rows."""
    if op.fold_scales:
        scaled = w.format.group_size is None or w.format.row_scales
        expect(scaled, "scales with fold_scales", "scales of rows, too", "none of rows")


def _check_output(op: Any, w: Packed) -> None:
    """y, and what is added to sums, of y's type: a bias, if there is one, and a residual, if the epilogue adds one."""
    n, gated = w.shape.n, op.epilogue in ACTIVATIONS
    expect(not gated or n % ROWS == 0, f"rows with {op.epilogue}", f"a multiple of {ROWS}", n)
    out = tensor(op.y, "y", (None, n // 2 if gated else n), tuple(REALS))
    expect(len(op.bias) <= 1, "bias", "one at most", len(op.bias))
    for bias in op.bias:
        tensor(bias, "bias", (n,), (out,))
    wanted = int(op.epilogue == RESIDUAL)
    expect(len(op.residual) == wanted, f"residual with epilogue={op.epilogue}", wanted, len(op.residual))
    for residual in op.residual:
        tensor(residual, "residual", (None, n), (out,))


def _check_quantized(values: Any, scales: Any, sums: Any, k: int) -> None:
    """The three tensors of an activation of 8 bits: numbers, the scale of each row, and sums of some columns."""
    tensor(values, "values", (None, k), ("f8E4M3FN", "i8"))
    tensor(scales, "scales", (None,), ("f32",))
    tensor(sums, "sums", (None, k // SUM_COLUMNS), ("f32",))


class DequantizeOp(Lowbit.Operation, name="dequantize"):
    """The weight W [n, k] in the activation's type: s * (decode(code) - z) or s * decode(code) + o, and with `outliers`
    a sparse matrix besides, computed in f32."""

    w: ext.Operand[PackedType]
    y: ext.Result[Any]
    outliers = Flag()
    packing = Optional(ir.DictAttr, _PACKING)
    schedule = Optional(ir.DictAttr, _SCHEDULE)

    @verifier
    def verify_invariants(op: Any) -> None:
        w = Packed.of(op.w.type)
        _check_packing(op, w)
        tensor(op.y, "y", (w.shape.n, w.shape.k), ACTS)


class PrepackOp(Lowbit.Operation, name="prepack"):
    """The codes tensor<n x k x i8> of a weight in memory order, tensor<row blocks x chunks x units x 32 x 4 x i32>.

    `weight` is its !lowbit.packed type. Codes are given as numbers: signed ones in two's complement.
    """

    codes: ext.Operand[Any]
    weight: ir.TypeAttr
    packed: ext.Result[Any]
    packing = Optional(ir.DictAttr, _PACKING)
    schedule = Optional(ir.DictAttr, _SCHEDULE)

    @verifier
    def verify_invariants(op: Any) -> None:
        w = Packed.of(ir.TypeAttr(op.weight).value)
        _check_packing(op, w)
        tensor(op.codes, "codes", (w.shape.n, w.shape.k), ("i8",))
        tensor(op.packed, "packed", w.packing.codes_shape, ("i32",))
