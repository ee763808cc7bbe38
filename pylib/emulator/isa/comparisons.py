"""setp, set, selp and slct (PTX ISA 9.7.6, 9.7.7)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lowbit.pylib.emulator.isa.float_arithmetic import TYPES, Format
from lowbit.pylib.emulator.machine.decoder import Op, instruction
from lowbit.pylib.emulator.machine.faults import Array, Unsupported
from lowbit.pylib.emulator.machine.step_results import Mask, Step

_INTEGERS = tuple(f"{kind}{bits}" for kind in "usb" for bits in (16, 32, 64))
_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
#: Unsigned spellings.
_ALIASES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def _ordered(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: function(a, b) & ~(np.isnan(a) | np.isnan(b))


def _unordered(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: function(a, b) | np.isnan(a) | np.isnan(b)


#: Floats: `ne` is false for NaN, `neu` true.
_FLOAT_COMPARE = {
    **{name: _ordered(function) for name, function in _COMPARE.items()},
    **{name + "u": _unordered(function) for name, function in _COMPARE.items()},
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


def _comparison(op: Op) -> tuple[Callable[[], Array], bool]:
    """The comparison of the next two operands, and whether it has two results per lane (packed types)."""
    name = op.choice(*_FLOAT_COMPARE, *_ALIASES)
    if op.modifiers[-1:] and op.modifiers[-1] in TYPES:
        if name not in _FLOAT_COMPARE:
            raise Unsupported(f".{name} does not compare floating-point values")
        form = Format(op, False)
        x, y, compare = form.source(op), form.source(op), _FLOAT_COMPARE[name]
        return (lambda: compare(x(), y())), form.packed
    kind = op.type(*_INTEGERS)
    name = _ALIASES.get(name, name)
    if name not in _COMPARE or (kind[0] == "b" and name not in ("eq", "ne")):
        raise Unsupported(f".{name} does not compare .{kind} values")
    a, b, compare = op.source(kind), op.source(kind), _COMPARE[name]
    return (lambda: compare(a, b)), False


@instruction("setp")
def _setp(op: Op) -> Step:
    """p = (a cmp b) op c, and q = !(a cmp b) op c; for packed types p is the low half, q the high one."""
    combine = op.flag(*_COMBINE)
    first, second = op.pair()
    p = op.dest("pred", first)
    q = op.dest("pred", second) if second is not None else None
    half = op.modifiers[-1:] and op.modifiers[-1] in ("f16", "bf16")
    compare, packed = _comparison(op)
    if packed != (q is not None) and (packed or half):
        raise Unsupported("setp of f16 and bf16 has one result, of their pairs two")
    third = op.predicate() if combine else None

    def step(mask: Mask) -> None:
        result = compare()
        low, high = (result[..., 0], result[..., 1]) if packed else (result, ~result)
        if combine and third:
            function, c = _COMBINE[combine], third()
            low, high = function(low, c), function(high, c)
        p.write(low, mask)
        if q is not None:
            q.write(high, mask)

    return step


@instruction("set")
def _set(op: Op) -> Step:
    """All ones (an integer; of packed types each half of it) or 1.0 (a float) where the comparison holds, else 0."""
    if len(op.modifiers) < 2 or op.modifiers[-2] not in ("u32", "s32", "f32"):
        raise Unsupported("set gives .u32, .s32 or .f32")
    target = op.modifiers.pop(-2)
    dest = op.dest(target)
    compare, packed = _comparison(op)
    if packed:
        if target == "f32":
            raise Unsupported("set of packed types gives .u32 or .s32")
        return lambda mask: dest.write(_halves(compare()).view(dest.view.dtype), mask)
    true = np.array(1.0 if target == "f32" else -1).astype(dest.view.dtype)
    return lambda mask: dest.write(np.where(compare(), true, dest.view.dtype.type(0)), mask)


def _halves(holds: Array) -> Array:
    """Words of 16 bits each of two results."""
    return (holds * np.array([0xFFFF, 0xFFFF << 16], np.uint32)).sum(axis=-1, dtype=np.uint32)


@instruction("selp")
def _selp(op: Op) -> Step:
    kind = op.type(*_INTEGERS, "f32", "f64")
    dest, a, b, p = op.dest(kind), op.source(kind), op.source(kind), op.predicate()
    return lambda mask: dest.write(np.where(p(), a, b), mask)


@instruction("slct")
def _slct(op: Op) -> Step:
    """a where c >= 0, else b (NaN chooses b)."""
    by = op.type("s32", "f32")
    kind = op.type(*_INTEGERS, "f32", "f64")
    dest, a, b, c = op.dest(kind), op.source(kind), op.source(kind), op.source(by)
    if by == "f32" and op.flag("ftz"):
        return lambda mask: dest.write(np.where((c >= 0) | (np.abs(c) < 2.0**-126), a, b), mask)
    return lambda mask: dest.write(np.where(c >= 0, a, b), mask)
