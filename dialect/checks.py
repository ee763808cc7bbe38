"""What types and verifiers check, and in what words: what was expected and what came."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.elements import ACTS, OPERANDS, TIMES
from lowbit.dialect.errors import LayoutError, LowbitError
from lowbit.dialect.formats.reals import REALS
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.optional import optional_attributes

NUMBERS = (*REALS, "i32")
_SEGMENTS = ("operandSegmentSizes", "resultSegmentSizes")


class Mismatch(LowbitError):
    """Raised with the fault that a verifier found."""


def expect(ok: bool, what: str, expected: object, got: object) -> None:
    """Raise a verifier's message unless `ok`."""
    if not ok:
        raise Mismatch(f"{what}: expected {expected}, got {got}")


def verifier(check: Callable[[Any], None]) -> Any:
    """Turns a function that raises into the bindings' verifier hook, which reports and returns a bool.

    Before it, attributes are checked: what is there must be declared, of that kind. What is missing is left to IRDL,
    whose verifier comes next and says which it is; `check` is not asked then.
    """

    def verify_invariants(op: Any) -> bool:
        required = _required_attributes(op.__class__)
        if any(name not in op.attributes for name in required) or not _has_values(op):
            return True
        try:
            _check_segments(op)
            _check_declared(op, required)
            check(op)
        except LowbitError as error:
            location = error.location or op.location
            location.emit_error(f"'{op.operation.name}' op {error}")
            return False
        return True

    return staticmethod(verify_invariants)


@lru_cache(maxsize=None)
def _required_attributes(operation: Any) -> dict[str, Any]:
    """Returns the kinds of the attributes that an operation must have, by their names."""
    declared: list[Any] = [field for field in operation._fields if isinstance(field, ext.AttributeDef)]
    return {field.name: field.constraint for field in declared}


def _has_values(op: Any) -> bool:
    """Tells whether there are as many operands and results as are declared, where no group may have any number."""
    operands, results = _declared_values(op.__class__)
    return (operands is None or len(op.operands) == operands) and (results is None or len(op.results) == results)


@lru_cache(maxsize=None)
def _declared_values(operation: Any) -> tuple[int | None, int | None]:
    """Returns the numbers of operands and results; None where a group may have any number."""
    groups = [
        [f.variadicity for f in operation._fields if isinstance(f, kind)] for kind in (ext.OperandDef, ext.ResultDef)
    ]
    operands, results = [None if any(v.value for v in group) else len(group) for group in groups]
    return operands, results


_KINDS: dict[Any, str] = {
    ir.StringAttr: "a string",
    ir.IntegerAttr: "an integer",
    ir.FloatAttr: "a number",
    ir.ArrayAttr: "a list",
    ir.TypeAttr: "a type",
}


def _check_declared(op: Any, required: dict[str, Any]) -> None:
    """Every attribute must be declared in the operation's class, or be named by another dialect."""
    optional = optional_attributes(op.__class__)
    for name in op.attributes:
        attribute = op.attributes[name]
        if words := _KINDS.get(required.get(name)):
            expect(isinstance(attribute, required[name]), name, words, attribute)
        elif name in optional:
            expect(optional[name].accepts(attribute), name, optional[name].words, attribute)
        elif name not in required and name not in _SEGMENTS:
            foreign = "." in name and not name.startswith("lowbit.")
            declared = ", ".join(sorted(required.keys() | optional.keys()))
            expect(foreign, "attributes", f"none but {declared}" if declared else "none", name)


def _check_segments(op: Any) -> None:
    """IRDL works out by itself how many operands one variadic group has, but the bindings read this attribute, and of
    several groups IRDL does, too."""
    kinds: list[int] | None = op._ODS_OPERAND_SEGMENTS  # 1 for a single operand, -1 for any number
    if kinds is None:
        return
    name, rest = "operandSegmentSizes", len(op.operands) - kinds.count(1)
    got = str(op.attributes[name]) if name in op.attributes else "nothing"
    if kinds.count(-1) > 1:
        sizes = [int(size) for size in re.findall(r"-?\d+", got.partition(":")[2])]
        singles = all(size == 1 if kind == 1 else size >= 0 for size, kind in zip(sizes, kinds))
        fits = len(sizes) == len(kinds) and singles and sum(sizes) == len(op.operands)
        groups = ", ".join("1" if kind == 1 else "any" for kind in kinds)
        expect(fits, name, f"array<i32: {groups}>, {len(op.operands)} in all", got)
        return
    expected = f"array<i32: {', '.join('1' if kind == 1 else str(rest) for kind in kinds)}>"
    expect(got == expected, name, expected, got)


def text(attribute: Any, what: str, allowed: str = "a string") -> str:
    """The text in an attribute, which must be a string."""
    expect(isinstance(attribute, ir.StringAttr), what, allowed, attribute)
    return ir.StringAttr(attribute).value


def in_range(attribute: Any, what: str, least: int, most: int | None = None) -> int:
    """The number in an attribute, which must be in least..most."""
    expect(isinstance(attribute, ir.IntegerAttr), what, "an integer", attribute)
    value = int(ir.IntegerAttr(attribute).value)
    expected = f"at least {least}" if most is None else f"{least}..{most}"
    expect(value >= least and (most is None or value <= most), what, expected, value)
    return value


def same_element(expected: object, got: object, what: str) -> None:
    expect(expected == got, what, expected, got)


def real(element: object, what: str) -> None:
    """An element must be one that can be computed with."""
    expect(element in REALS, f"element of the {what}", " or ".join(REALS), element)


def number(element: object, what: str) -> None:
    """An element must be one that can be added and compared: a real or an integer of 32 bits."""
    expect(element in NUMBERS, f"element of the {what}", " or ".join(NUMBERS), element)


def activation(element: object, what: str) -> None:
    """An element must be one that activations have."""
    expect(element in ACTS, what, " or ".join(ACTS), element)


def factors(a: object, b: object, sums: object, *, wide: bool) -> None:
    """The elements of a and b must be multiplied by tensor cores, and be summed in that of the accumulators.

    wide: whether there is a product of f32 with narrower numbers
    """
    expect(b in TIMES, "element of b", " or ".join(TIMES), b)
    allowed = [element for element in TIMES[str(b)] if wide or element != "f32"]
    expect(a in allowed, "element of a", " or ".join(allowed), a)
    accumulator(sums, b, "element of c")


def accumulator(element: object, operand: object, what: str) -> None:
    """An element must be that of the sums of products with `operand`."""
    same_element(OPERANDS[str(operand)].sums, element, what)


def tensor(value: Any, what: str, sizes: Sequence[int | None], elements: Sequence[str]) -> str:
    """The element of a tensor, which must have these sizes (None: any) and one of these elements."""
    shape = "".join("?x" if n is None else f"{n}x" for n in sizes)
    kind = value.type
    fits = isinstance(kind, ir.RankedTensorType) and kind.rank == len(sizes)
    fits = fits and all(n in (None, kind.shape[d]) for d, n in enumerate(sizes))
    fits = fits and str(kind.element_type) in elements
    expect(fits, what, " or ".join(f"tensor<{shape}{e}>" for e in elements), kind)
    return str(kind.element_type)


def fragments(layout: Layout, instruction: Layout, what: str) -> Layout:
    """The layout of the fragments in a tile, whose last two dims must be made of the instruction's own."""
    wide = instruction.reshape((*(1,) * (layout.rank - 2), *instruction.shape))
    try:
        return layout / wide
    except LayoutError:
        raise Mismatch(f"layout of {what}: expected a multiple of {instruction}, got {layout}") from None


def within_warp(blocks: Layout, dim: int, what: str) -> None:
    """No dim of a layout of fragments may be spread over warps that do not exchange data."""
    spread = any(digit.dim == dim for digit in blocks.thread_digits())
    expect(not spread, what, "within each warp", f"spread over warps: {blocks} (in fragments)")


def same_warps(blocks: Layout, results: Layout, what: str) -> None:
    """An operand's fragments must be in the warps that hold the results which need them."""
    try:
        blocks.slots_for(results)
    except LayoutError:
        raise Mismatch(f"warps of {what}: expected the result's, {results}, got {blocks} (in fragments)") from None
