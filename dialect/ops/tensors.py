"""Tensor level: whole weights, activations and outputs."""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from collections.abc import Sequence
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import REALS, expect, tensor, verifier
from lowbit.dialect.types import Lowbit, Packed, PackedType


class MatmulOp(Lowbit.Operation, name="matmul"):
    """y[t, n] = sum_k x[t, k] W[n, k] (+ bias[n]): x is tensor<?xk>, w a packed weight, y tensor<?xn>."""

    x: ext.Operand[Any]
    w: ext.Operand[PackedType]
    y: ext.Result[Any]
    bias: Sequence[ext.Operand[Any]]

    @verifier
    def verify_invariants(op: Any) -> None:
        w = Packed.of(op.w.type)
        tensor(op.x, "x", (None, w.k), ("f16", "bf16"))
        out = tensor(op.y, "y", (None, w.n), REALS)
        expect(len(op.bias) <= 1, "bias", "one at most", len(op.bias))
        for bias in op.bias:
            tensor(bias, "bias", (w.n,), (out,))


class DequantizeOp(Lowbit.Operation, name="dequantize"):
    """The weight W [n, k] in the activation's type: s * (decode(code) - z), rounded once."""

    w: ext.Operand[PackedType]
    y: ext.Result[Any]

    @verifier
    def verify_invariants(op: Any) -> None:
        w = Packed.of(op.w.type)
        tensor(op.y, "y", (w.n, w.k), ("f16", "bf16"))


class PrepackOp(Lowbit.Operation, name="prepack"):
    """The codes tensor<n x k x i8> of a weight in memory order, tensor<row blocks x chunks x units x 32 x 4 x i32>.

    `weight` is its !lowbit.packed type. Codes are given as numbers: signed ones in two's complement.
    """

    codes: ext.Operand[Any]
    weight: ir.TypeAttr
    packed: ext.Result[Any]

    @verifier
    def verify_invariants(op: Any) -> None:
        w = Packed.of(ir.TypeAttr(op.weight).value)
        tensor(op.codes, "codes", (w.n, w.k), ("i8",))
        tensor(op.packed, "packed", w.packing.codes_shape, ("i32",))
