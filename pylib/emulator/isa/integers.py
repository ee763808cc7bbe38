"""Integer arithmetic, logic and shifts (PTX ISA 9.7.1, 9.7.8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.pylib.emulator.isa.float_arithmetic import float_binary, float_fma, float_unary, is_float
from lowbit.pylib.emulator.machine.decoder import Dest, Op, dtype_of, instruction
from lowbit.pylib.emulator.machine.faults import Array, Fault, Unsupported, any_of
from lowbit.pylib.emulator.machine.step_results import Mask, Step
from lowbit.pylib.emulator.text.ptx import BITS

INTEGERS = tuple(f"{kind}{bits}" for kind in "us" for bits in (16, 32, 64))
PAIRS = ("u16x2", "s16x2")


def elementwise(dest: Dest, function: Callable[..., Any], *sources: Array) -> Step:
    """d = function(sources): computed for every lane, kept for the active ones."""
    if isinstance(function, np.ufunc) and all(source.dtype == dest.view.dtype for source in sources):
        return _in_place(dest, function, *sources)
    match sources:
        case (a,):
            return lambda mask: dest.write(function(a), mask)
        case (a, b):
            return lambda mask: dest.write(function(a, b), mask)
        case _:
            return lambda mask: dest.write(function(*sources), mask)


def _in_place(dest: Dest, function: np.ufunc, *sources: Array) -> Step:
    """The same where results have the type of d: they are written where they belong when all lanes are active."""
    view = dest.view

    def step(mask: Mask) -> None:
        if mask is None:
            function(*sources, out=view)
            dest.define(mask)
        else:
            dest.write(function(*sources), mask)

    return step


def _integer_binary(op: Op, function: Callable[[Array, Array], Array], kinds: tuple[str, ...] = INTEGERS) -> Step:
    kind = op.type(*kinds)
    dest, a, b = op.dest(_raw(kind)), op.source(_raw(kind)), op.source(_raw(kind))
    if kind in PAIRS:
        half = np.dtype("i2" if kind == "s16x2" else "u2")
        dest = Dest(dest.register, dest.view.view(half).reshape(-1, 2))
        a, b = (np.atleast_1d(x).view(half).reshape(-1, 2) for x in (a, b))
    return elementwise(dest, function, a, b)


def _raw(kind: str) -> str:
    return "b32" if kind in PAIRS else kind


@instruction("add", "sub")
def _add(op: Op) -> Step:
    name = op.instr.opcode
    if is_float(op):
        return float_binary(op, name)
    if op.flag("sat"):
        op.type("s32")
        dest, a, b = op.dest("s32"), op.source("s32"), op.source("s32")
        wide = np.add if name == "add" else np.subtract

        def saturate(a: Array, b: Array) -> Array:
            return np.clip(wide(a, b, dtype=np.int64), -(2**31), 2**31 - 1).astype(np.int32)

        return elementwise(dest, saturate, a, b)
    kinds = (*INTEGERS, *PAIRS) if name == "add" else INTEGERS
    return _integer_binary(op, np.add if name == "add" else np.subtract, kinds)


@instruction("min", "max")
def _min(op: Op) -> Step:
    if is_float(op):
        return float_binary(op, op.instr.opcode)
    function = np.minimum if op.instr.opcode == "min" else np.maximum
    if op.flag("relu"):  # sm_90: what is below zero becomes zero
        return _integer_binary(op, lambda a, b: np.maximum(function(a, b), 0), ("s32", "s16x2"))
    return _integer_binary(op, function, (*INTEGERS, *PAIRS))


@instruction("mul")
def _mul(op: Op) -> Step:
    if is_float(op):
        return float_binary(op, "mul")
    part = op.choice("lo", "hi", "wide")
    kind = op.type(*INTEGERS)
    wide = _widened(kind) if part == "wide" else kind
    dest, a, b = op.dest(wide), op.source(kind), op.source(kind)
    return elementwise(dest, _product(part, kind), a, b)


@instruction("mad")
def _mad(op: Op) -> Step:
    if is_float(op):
        return float_fma(op)
    part = op.choice("lo", "hi", "wide")
    kind = op.type(*INTEGERS)
    wide = _widened(kind) if part == "wide" else kind
    dest, a, b, c = op.dest(wide), op.source(kind), op.source(kind), op.source(wide)
    product = _product(part, kind)
    return elementwise(dest, lambda a, b, c: product(a, b) + c, a, b, c)


def _widened(kind: str) -> str:
    if BITS[kind] == 64:
        raise Unsupported(f"mul.wide.{kind}: the product has 128 bits")
    return f"{kind[0]}{2 * BITS[kind]}"


def _product(part: str, kind: str) -> Callable[[Array, Array], Array]:
    if part == "lo":
        return np.multiply
    if part == "hi" and BITS[kind] == 64:
        high = np.frompyfunc(lambda a, b: int(a) * int(b) >> 64, 2, 1)
        return lambda a, b: np.asarray(high(a, b)).astype(dtype_of(kind))
    wide = dtype_of(_widened(kind))
    if part == "wide":
        return lambda a, b: np.multiply(a, b, dtype=wide)
    return lambda a, b: (np.multiply(a, b, dtype=wide) >> BITS[kind]).astype(dtype_of(kind))


@instruction("div", "rem")
def _div(op: Op) -> Step:
    if is_float(op):
        if op.instr.opcode == "rem":
            raise Unsupported("rem has no floating-point form")
        return float_binary(op, "div")
    kind = op.type(*INTEGERS)
    dest, a, b = op.dest(kind), op.source(kind), op.source(kind)
    remainder = op.instr.opcode == "rem"

    def step(mask: Mask) -> None:
        zero = np.broadcast_to(b == 0, (op.block.lanes,))
        zero = zero if mask is None else zero & mask
        if any_of(zero):
            raise Fault("division by zero", int(np.flatnonzero(zero)[0]))
        # C's division: the quotient is cut towards zero, the remainder has the sign of a.
        quotient = a // b
        rest = a - quotient * b
        if kind[0] == "s":
            wrong = (rest != 0) & ((a < 0) != (b < 0))
            quotient, rest = quotient + wrong, rest - wrong * b
        dest.write(rest if remainder else quotient, mask)

    return step


@instruction("neg", "abs")
def _neg(op: Op) -> Step:
    if is_float(op):
        return float_unary(op, op.instr.opcode)
    kind = op.type("s16", "s32", "s64")
    dest, a = op.dest(kind), op.source(kind)
    return elementwise(dest, np.negative if op.instr.opcode == "neg" else np.abs, a)


@instruction("and", "or", "xor")
def _and(op: Op) -> Step:
    kind = op.type("pred", "b16", "b32", "b64")
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op.instr.opcode]
    dest = op.dest(kind)
    if kind == "pred":
        p, q = op.predicate(), op.predicate()
        return lambda mask: dest.write(function(p(), q()), mask)
    return elementwise(dest, function, op.source(kind), op.source(kind))


@instruction("not")
def _not(op: Op) -> Step:
    kind = op.type("pred", "b16", "b32", "b64")
    dest = op.dest(kind)
    if kind == "pred":
        p = op.predicate()
        return lambda mask: dest.write(~p(), mask)
    return elementwise(dest, np.invert, op.source(kind))


@instruction("shl", "shr")
def _shift(op: Op) -> Step:
    """Shift amounts beyond the width act as the width."""
    left = op.instr.opcode == "shl"
    kind = op.type(*(f"b{n}" for n in (16, 32, 64)), *(() if left else INTEGERS))
    bits = BITS[kind]
    dest, a, amount = op.dest(kind), op.source(kind), op.source("u32")
    if amount.ndim == 0 and int(amount) < bits:
        fixed = a.dtype.type(int(amount))
        return elementwise(dest, np.left_shift if left else np.right_shift, a, np.array(fixed))

    def shift(a: Array, n: Array) -> Array:
        clamped = np.minimum(n, bits - 1).astype(a.dtype)
        if kind[0] == "s":
            return a >> clamped
        return np.where(n < bits, a << clamped if left else a >> clamped, a.dtype.type(0))

    return elementwise(dest, shift, a, amount)


@instruction("dp4a")
def _dp4a(op: Op) -> Step:
    """c plus the dot product of four bytes; each operand has its own signedness, c's follows from both."""
    if len(op.modifiers) != 2 or not set(op.modifiers) <= {"u32", "s32"}:
        raise Unsupported("dp4a needs two of .u32, .s32")
    second, first = op.modifiers.pop(), op.modifiers.pop()
    kind = "u32" if first == second == "u32" else "s32"
    dest, a, b, c = op.dest(kind), op.source("b32"), op.source("b32"), op.source(kind)

    def parts(x: Array, kind: str) -> Array:
        return np.atleast_1d(x).view(np.int8 if kind == "s32" else np.uint8).reshape(-1, 4).astype(np.int64)

    def dot(a: Array, b: Array, c: Array) -> Array:
        return (c + (parts(a, first) * parts(b, second)).sum(axis=1)).astype(dest.view.dtype)

    return elementwise(dest, dot, a, b, c)
