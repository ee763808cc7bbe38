"""cvt between all integer and floating-point types, and its packed forms (PTX ISA 9.7.9.21)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lowbit.pylib.emulator.isa.floats import FLOATS, ROUND, Float, sum_to_odd
from lowbit.pylib.emulator.isa.integers import elementwise
from lowbit.pylib.emulator.machine.decoder import Dest, Op, dtype_of, instruction
from lowbit.pylib.emulator.machine.faults import Array, Unsupported
from lowbit.pylib.emulator.machine.step_results import Mask, Step
from lowbit.pylib.emulator.text.ptx import BITS

_INTEGERS = tuple(f"{kind}{bits}" for kind in "us" for bits in (8, 16, 32, 64))
_FLOATS = ("f16", "bf16", "f32", "f64")
_PACKED = ("f16x2", "bf16x2", "e4m3x2", "e5m2x2")


@instruction("cvt")
def _cvt(op: Op) -> Step:
    if len(op.modifiers) < 2:
        raise Unsupported("cvt needs two types")
    source, target = op.modifiers.pop(), op.modifiers.pop()
    if target in _PACKED:
        return _packed(op, target, source)
    if target in _INTEGERS and source in _INTEGERS:
        return _integer_to_integer(op, target, source)
    if target in _INTEGERS and source in _FLOATS:
        return _float_to_integer(op, target, source)
    if target in _FLOATS and source in _INTEGERS:
        return _integer_to_float(op, target, source)
    if target in (*_FLOATS, "tf32") and source in _FLOATS:
        return _float_to_float(op, target, source)
    raise Unsupported(f"cvt from .{source} to .{target}")


def _integer_to_integer(op: Op, target: str, source: str) -> Step:
    saturate = op.flag("sat")
    dest, a = op.dest(target, wider=True), op.source(source, wider=True)
    narrow = dtype_of(target)
    if not saturate:
        # Cut to the target's bits; a wider register then gets its sign or zero extension from Dest.
        return elementwise(dest, lambda a: a.astype(narrow), a)
    limits = np.iinfo(narrow)
    own = np.iinfo(a.dtype)
    low, high = max(limits.min, own.min), min(limits.max, own.max)
    return elementwise(dest, lambda a: np.clip(a, low, high).astype(narrow), a)


def _float_to_integer(op: Op, target: str, source: str) -> Step:
    """Out-of-range values clamp. NaN becomes 0 from 16 and 32-bit formats, else the top bit alone."""
    rounding = ROUND["r" + op.choice("rni", "rzi", "rmi", "rpi")[1]]
    fmt, ftz = FLOATS[source], op.flag("ftz")
    op.flag("sat")  # implied
    dest = op.dest(target, wider=True)
    x = op.raw_float(fmt)
    narrow = dtype_of(target)
    limits = np.iinfo(narrow)
    top = 1 << limits.bits - 1
    nan = 0 if source != "f64" and limits.bits < 64 else (limits.min if target[0] == "s" else top)

    def convert(x: Array) -> Array:
        y = rounding(fmt.flush(x) if ftz else x)
        inside = (y > float(limits.min)) & (y < float(limits.max))
        clamped = np.where(y > 0, narrow.type(limits.max), narrow.type(limits.min))
        result = np.where(inside, np.where(inside, y, 0).astype(narrow), clamped)
        return np.where(np.isnan(y), narrow.type(nan), result)

    return lambda mask: dest.write(convert(x()), mask)


def _integer_to_float(op: Op, target: str, source: str) -> Step:
    rounding = op.choice("rn", "rz", "rm", "rp")
    fmt = FLOATS[target]
    dest, a = op.float_dest(fmt), op.source(source, wider=True)
    if BITS[source] < 64:
        return lambda mask: dest.write(fmt.encode(a.astype(np.float64), rounding), mask)
    if fmt.name == "f64" and rounding != "rn":
        raise Unsupported(f"`{op.instr.name}`: directed rounding of 64-bit integers to f64")
    if fmt.name == "f64":
        return lambda mask: dest.write(a.astype(np.float64).view(np.uint64), mask)

    def convert(mask: Mask) -> None:
        # Two halves, each exact in float64.
        high, low = (a >> 32).astype(np.float64) * 2.0**32, (a & 0xFFFFFFFF).astype(np.float64)
        dest.write(fmt.encode(sum_to_odd(high, low), rounding), mask)

    return convert


def _float_to_float(op: Op, target: str, source: str) -> Step:
    """Widening is exact; narrowing rounds; same-size `.rni` and its like round to an integral value."""
    integral = op.flag("rni", "rzi", "rmi", "rpi")
    rounding = op.flag("rna") if target == "tf32" else None
    rounding = rounding or op.flag("rn", "rz", "rm", "rp")
    ftz, saturate, relu = op.flag("ftz"), op.flag("sat"), op.flag("relu")
    source_fmt, fmt = FLOATS[source], FLOATS[target]
    narrows = fmt.mantissa < source_fmt.mantissa or fmt.emax < source_fmt.emax
    if narrows != bool(rounding) or (integral and target != source):
        raise Unsupported(f"`{op.instr.name}`: .rn or its like is needed exactly where precision is lost")
    dest = op.float_dest(fmt) if target != "tf32" else op.dest("b32")
    if rounding == "rna":
        number = op.source("f32")
        return lambda mask: dest.write(_nearest_away(number.view(np.uint32)), mask)
    x = op.raw_float(source_fmt)

    def convert(mask: Mask) -> None:
        y = x()
        if ftz and source_fmt.name == "f32":
            y = source_fmt.flush(y)
        if integral:
            y = np.copysign(ROUND["r" + integral[1]](y), y)
        if saturate:
            y = np.where(y > 0.0, np.minimum(y, 1.0), 0.0)  # -0, too, becomes 0 (H200, 2026-11)
        if relu:
            y = np.where(y < 0, 0.0, y)
        if ftz and fmt.name == "f32":
            y = fmt.flush(np.where(np.isnan(y), y, fmt.round(y, rounding or "rn")))
        dest.write(fmt.encode(y, rounding or "rn"), mask)

    return convert


def _nearest_away(bits: Array) -> Array:
    """f32 to tf32, ties away from zero: half an ulp on the bits, then cut. That is what sm_90 executes; NaNs are cut,
    too, and of those whose payload is below, inf is left."""
    finite = bits & np.uint32(0x7F800000) != 0x7F800000
    return np.where(finite, bits + np.uint32(0x1000), bits) & np.uint32(0xFFFFE000)


def _packed(op: Op, target: str, source: str) -> Step:
    """Two values a register: `cvt d, a, b` puts a in the upper half; `cvt d, ab` converts both halves."""
    fmt = FLOATS[target.removesuffix("x2")]
    rounding = op.choice("rn", "rz") if fmt.bits == 16 and source == "f32" else op.choice("rn")
    relu = op.flag("relu")
    saturate = bool(op.flag("satfinite"))
    if fmt.bits == 8 and not saturate:
        raise Unsupported(f"`{op.instr.name}` needs .satfinite")
    if source == "f32":
        dest = op.float_dest(fmt, packed=True)
        high, low = op.raw_float(FLOATS["f32"]), op.raw_float(FLOATS["f32"])
        both = np.empty((op.block.lanes, 2))

        def pair() -> Array:
            both[:, 0], both[:, 1] = low(), high()
            return both

        return _write_pair(dest, fmt, rounding, saturate, relu, pair)
    source_fmt = FLOATS[source.removesuffix("x2")]
    known = (("f16x2", "e4m3x2"), ("f16x2", "e5m2x2"), ("e4m3x2", "f16x2"), ("e5m2x2", "f16x2"))
    if (target, source) not in known:
        raise Unsupported(f"cvt from .{source} to .{target}")
    dest = op.float_dest(fmt, packed=True)
    return _write_pair(dest, fmt, rounding, saturate, relu, op.raw_float(source_fmt, packed=True))


def _write_pair(
    dest: Dest, fmt: Float, rounding: str, saturate: bool, relu: str | None, values: Callable[[], Array]
) -> Step:
    def convert(mask: Mask) -> None:
        x = values()
        if relu:
            x = np.where(x < 0, 0.0, x)
        dest.write(fmt.encode(x, rounding, saturate), mask)

    return convert
