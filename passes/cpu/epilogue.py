"""The end of a matmul on the host: numbers of y from sums in f32, scalars or vectors of neighbouring rows."""

from __future__ import annotations

import math

from lowbit.dialect.bindings import arith, ir
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.epilogue import ACTIVATIONS, RESIDUAL, Activation
from lowbit.passes.cpu.vector_ops import (
    MAGIC,
    Value,
    add,
    at,
    broadcast,
    constant,
    f32,
    i,
    i64,
    load,
    mul,
    round_to,
    scalar_type,
    store,
    vec,
)
from lowbit.passes.cpu.weight import Weight
from lowbit.passes.cpu.worker import Task

_LN2 = 0.693359375, -2.12194440e-4  # the logarithm of 2 in two parts, the first of 10 bits
_EXP = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0
"""Coefficients of e^r for |r| <= ln(2) / 2, the highest first (Cephes mathematical library, Moshier, expf)."""


class Epilogue:
    """What follows sums in the program of a weight, y [m, outputs]. scaled: whether rows of x have scales, which are
    [m] in f32."""

    def __init__(self, weight: Weight, task: Task, scaled: bool) -> None:
        self.spec, self._arrays, self._y, self._scaled = weight.spec, weight.arrays, task.array("y"), scaled
        if scaled:
            self._x_scales, self._last = task.x_scales(self.spec), arith.subi(task.integer("m"), i64(1))
        self._out, self._bytes = scalar_type(self.spec.out_dtype), ELEMENTS[self.spec.out_dtype].bytes

    def scaled(self, sums: Value, row: Value, token: Value, t: int = 0) -> Value:
        """Returns sums of token `token + t` and a row, or of 16 rows from it on, times the token's scale (beyond the
        last token its), and with their bias."""
        if self._scaled:
            scale = load(f32(), at(self._x_scales, mul(arith.minsi(add(token, t), self._last), 4)))
            sums = arith.mulf(sums, broadcast(scale) if isinstance(sums.type, ir.VectorType) else scale)
        return arith.addf(sums, self._like("bias", row, sums)) if self.spec.bias else sums

    def gated(self, gate: Value, up: Value) -> Value:
        """Returns activation(gate) * (up + shift)."""
        activation, kind = ACTIVATIONS[str(self.spec.epilogue)], gate.type
        if activation.is_clamped:
            most, least = constant(kind, activation.limit), constant(kind, -activation.limit)
            gate, up = arith.minimumf(gate, most), arith.maximumf(arith.minimumf(up, most), least)
        if activation.shift:
            up = arith.addf(up, constant(kind, activation.shift))
        return arith.mulf(_activated(activation, gate), up)

    def store(self, numbers: Value, token: Value, column: Value) -> None:
        """Adds the residual, rounds, and stores numbers of a token, from a column of y on."""
        place = add(mul(token, self.spec.outputs), column)
        if self.spec.epilogue == RESIDUAL:
            numbers = arith.addf(numbers, self._like(RESIDUAL, place, numbers))
        store(round_to(numbers, self._out), at(self._y, mul(place, self._bytes)))

    def _like(self, name: str, first: Value, sums: Value) -> Value:
        """Returns as many numbers of an array in y's type as there are sums, in f32."""
        kind = sums.type
        stored = vec(self._out, kind.shape[0]) if isinstance(kind, ir.VectorType) else self._out
        loaded = load(stored, at(self._arrays[name], mul(first, self._bytes)))
        return loaded if self._out == f32() else arith.extf(kind, loaded)


def _activated(activation: Activation, gate: Value) -> Value:
    """Returns g / (1 + exp(-g (c + d g^2)))."""
    kind = gate.type
    slope = constant(kind, -activation.linear)
    if activation.cubic:
        square = arith.mulf(gate, gate)
        slope = arith.addf(slope, arith.mulf(square, constant(kind, -activation.cubic)))
    power = exponential(arith.mulf(gate, slope))
    return arith.divf(gate, arith.addf(power, constant(kind, 1.0)))


def exponential(x: Value) -> Value:
    """Returns e^x, off by 2 ulps at most; infinity from 89 on, and 2^-126 below that."""
    kind = x.type

    def number(value: float) -> Value:
        return constant(kind, value)

    x = arith.minimumf(arith.maximumf(x, number(-87.3)), number(89.0))
    shifted = arith.addf(arith.mulf(x, number(math.log2(math.e))), number(MAGIC))
    power = arith.subf(shifted, number(MAGIC))
    for part in _LN2:
        x = arith.subf(x, arith.mulf(power, number(part)))
    total = number(_EXP[0])
    for coefficient in _EXP[1:]:
        total = arith.addf(arith.mulf(total, x), number(coefficient))
    words = vec(i(32), kind.shape[0]) if isinstance(kind, ir.VectorType) else i(32)
    bits = arith.shli(arith.bitcast(words, shifted), constant(words, 23))
    return arith.mulf(total, arith.bitcast(kind, arith.addi(bits, constant(words, 127 << 23))))
