"""Floating-point arithmetic (PTX ISA 9.7.3 to 9.7.5): f16, bf16, their pairs, f32 and f64.

Each result is the exact one rounded once. Approximate instructions (ex2, rcp, rsqrt, ...) give the correctly
rounded result, which is better than hardware's: compare with a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from lowbit.pylib.emulator.isa.floats import FLOATS, Float, sum_to_odd
from lowbit.pylib.emulator.machine.decoder import Dest, Op, instruction
from lowbit.pylib.emulator.machine.faults import Array, Unsupported, any_of
from lowbit.pylib.emulator.machine.step_results import Mask, Step

TYPES = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64")


def is_float(op: Op) -> bool:
    return bool(op.modifiers) and op.modifiers[-1] in TYPES


class Format:
    """The type of a floating-point instruction and how it treats its result: .rnd, .ftz, .sat, .relu."""

    def __init__(self, op: Op, sat: bool = True, *allowed: str) -> None:
        name = op.type(*(allowed or TYPES))
        self.packed = name.endswith("x2")
        self.fmt: Float = FLOATS[name.removesuffix("x2")]
        f32 = self.fmt.name == "f32"
        wide = self.fmt.bits >= 32
        self.rounding = op.flag(*(("rn", "rz", "rm", "rp") if wide else ("rn",))) or "rn"
        self.ftz = bool(self.fmt.name != "f64" and op.flag("ftz"))
        self.sat = bool(sat and (f32 or self.fmt.name == "f16") and op.flag("sat"))
        self.plain = f32 and self.rounding == "rn" and not (self.ftz or self.sat)

    def dest(self, op: Op) -> Dest:
        return op.float_dest(self.fmt, self.packed)

    def source(self, op: Op) -> Callable[[], Array]:
        read = op.raw_float(self.fmt, packed=self.packed)
        return (lambda: self.fmt.flush(read())) if self.ftz else read

    def sum(self, a: Array, b: Array) -> Array:
        """a + b as `encode` needs it to round only once. When rounding down, x - x is -0."""
        total = sum_to_odd(a, b)
        if self.rounding == "rm":
            return np.where((total == 0) & (np.signbit(a) | np.signbit(b)), -0.0, total)
        return total

    def encode(self, x: Array) -> Array:
        if self.sat:
            x = np.where(np.isnan(x), 0.0, np.clip(x, 0.0, 1.0))
        if self.ftz and self.fmt.name == "f16":
            x = self.fmt.flush(x)  # what rounding would make normal is zero, too (H200, 2026-11)
        elif self.ftz:
            x = self.fmt.flush(np.where(np.isnan(x), x, self.fmt.round(x, self.rounding)))
        return self.fmt.encode(x, self.rounding)


def _narrow(op: Op) -> Float | None:
    """The 16-bit type of all operands but the last, where it is not that of the result: add.f32.f16 (PTX ISA 9.7.5)."""
    if op.modifiers[-2:-1] != ["f32"] or op.modifiers[-1] not in ("f16", "bf16"):
        return None
    return FLOATS[op.type()]


def _canonical(x: Array) -> Array:
    """f32 results: a NaN is always 0x7fffffff."""
    bad = np.isnan(x)
    return np.where(bad, np.array(0x7FFFFFFF, np.uint32).view(np.float32), x) if any_of(bad) else x


_NEAREST: dict[str, Callable[[Array, Array], Array]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def float_binary(op: Op, name: str) -> Step:
    if name in ("min", "max"):
        return _min_max(op, name)
    if name == "div":
        return _div(op)
    narrow = None if name == "mul" else _narrow(op)
    form = Format(op)
    if form.plain and not narrow:
        dest, a, b, function = op.dest("f32"), op.source("f32"), op.source("f32"), _NEAREST[name]
        return lambda mask: dest.write(_canonical(function(a, b)), mask)
    if form.fmt.name == "f64":
        _nearest_only(form, op)
        dest, a, b, function = op.dest("f64"), op.source("f64"), op.source("f64"), _NEAREST[name]
        return lambda mask: dest.write(function(a, b), mask)
    dest, x, y = form.dest(op), op.raw_float(narrow) if narrow else form.source(op), form.source(op)
    exact: Callable[[], Array] = {
        "add": lambda: form.sum(x(), y()),
        "sub": lambda: form.sum(x(), -y()),
        "mul": lambda: x() * y(),
    }[name]
    return lambda mask: dest.write(form.encode(exact()), mask)


def _nearest_only(form: Format, op: Op) -> None:
    if form.rounding != "rn":
        raise Unsupported(f"`{op.instr.name}`: f64 is rounded to nearest only")


@instruction("fma")
def float_fma(op: Op) -> Step:
    relu, narrow = op.flag("relu"), _narrow(op)
    form = Format(op)
    dest = form.dest(op)
    x, y = (op.raw_float(narrow) if narrow else form.source(op) for _ in range(2))
    z = form.source(op)
    if form.fmt.name == "f64":
        _nearest_only(form, op)
        return lambda mask: dest.write(_fma_f64(x(), y(), z()).view(np.uint64), mask)
    if form.fmt.name == "f16" and not relu:
        # Products have 22 bits, and a sum too long for float64 is decided by its upper part or overflows.
        return lambda mask: dest.write(form.encode(x() * y() + z()), mask)

    def step(mask: Mask) -> None:
        result = form.sum(x() * y(), z())
        if relu:
            result = np.where(result < 0, 0.0, result)
        dest.write(form.encode(result), mask)

    return step


def _one_fma(a: float, b: float, c: float) -> float:
    rough = a * b + c
    if not np.isfinite(rough) or rough == 0.0:
        if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)):
            return rough
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return rough
    try:
        return float(exact)
    except OverflowError:
        return np.inf if exact > 0 else -np.inf


_FMA = np.frompyfunc(_one_fma, 3, 1)


def _fma_f64(a: Array, b: Array, c: Array) -> Array:
    return np.asarray(_FMA(a, b, c)).astype(np.float64)


def _min_max(op: Op, name: str) -> Step:
    nan, xorsign = op.flag("NaN"), op.flag("xorsign")
    if xorsign:
        raise Unsupported("min/max.xorsign.abs")
    form = Format(op, False)
    smaller = name == "min"

    def pick(a: Array, b: Array) -> Array:
        """The other operand beats a NaN unless .NaN is said; -0 is smaller than +0."""
        result = (np.minimum if nan else np.fmin)(a, b) if smaller else (np.maximum if nan else np.fmax)(a, b)
        zeros = (a == 0) & (b == 0)
        if any_of(zeros):
            negative = (np.signbit(a) | np.signbit(b)) if smaller else (np.signbit(a) & np.signbit(b))
            result = np.where(zeros, np.where(negative, -0.0, 0.0), result)
        return result

    if form.plain:
        dest, a, b = op.dest("f32"), op.source("f32"), op.source("f32")
        return lambda mask: dest.write(_canonical(pick(a, b)), mask)
    dest, x, y = form.dest(op), form.source(op), form.source(op)
    return lambda mask: dest.write(form.encode(pick(x(), y())), mask)


def float_unary(op: Op, name: str) -> Step:
    """neg and abs change the sign bit only (PTX leaves a NaN's sign open)."""
    form = Format(op, False)
    function: Callable[[Array], Array] = np.negative if name == "neg" else np.abs
    if form.plain:
        dest, a = op.dest("f32"), op.source("f32")
        return lambda mask: dest.write(_canonical(function(a)), mask)
    dest, x = form.dest(op), form.source(op)
    return lambda mask: dest.write(form.encode(function(x())), mask)


def _div(op: Op) -> Step:
    kind = op.flag("approx", "full")
    form = Format(op, False, "f32", "f64")
    dest, x, y = form.dest(op), form.source(op), form.source(op)
    if form.rounding != "rn":
        raise Unsupported("division is rounded to nearest only")
    if kind and form.fmt.name != "f32":
        raise Unsupported(f"div.{kind} is for f32")
    # float64 has more than 2 * 24 + 2 bits, so the second rounding does no harm.
    return lambda mask: dest.write(form.encode(x() / y()), mask)


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@instruction(*_FUNCTIONS)
def _function(op: Op) -> Step:
    name = op.instr.opcode
    approximate = op.flag("approx")
    allowed = TYPES[:5] if name in ("ex2", "tanh") else ("f32", "f64") if name in ("rcp", "sqrt") else ("f32",)
    form = Format(op, False, *allowed)
    if not approximate and (name not in ("rcp", "sqrt") or form.rounding != "rn"):
        raise Unsupported(f"`{op.instr.name}`: only .approx, or .rn for rcp and sqrt")
    dest, x, function = form.dest(op), form.source(op), _FUNCTIONS[name]
    return lambda mask: dest.write(form.encode(function(x())), mask)
