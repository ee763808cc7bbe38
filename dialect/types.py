"""The types of the `lowbit` dialect, and their mirrors as frozen dataclasses.

    !lowbit.packed<shape, format, group, zeros, scale>   a weight in memory: codes, scales, zeros or offsets together
    !lowbit.global<shape, element, strides, divisors>    a view of device memory; -1: a size known at run time
    !lowbit.shared<shape, element, strides, swizzle>     a buffer in shared memory
    !lowbit.reg<shape, element, layout>                  a tile spread over the registers of a block's threads

MLIR hands types back as bags of attributes; code works on the dataclasses (`Global`, `Shared`, `Reg`, and `Packed` in
`dialect.packed_type`), made from a type with `.of(type)` and turned into one with `.type`. Elements are written as in
MLIR ("f16", "vector<4xi32>") or are a `DType`: a low-bit format, `#lowbit.format<"u4", []>` in the IR.

IRDL checks of what kind a parameter is. Whether parameters make sense together is checked when a mirror is made,
which raises `Mismatch` or the error of what it is made of (`LayoutError`, `SpecError`); verifiers make mirrors.
"""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import Mismatch, expect, verifier
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.dtypes import DType, dtype
from lowbit.dialect.formats.names import short_name
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.layouts.parse import parse_layout
from lowbit.dialect.layouts.shared_memory import Swizzle
from lowbit.dialect.signature import PARAM_TYPES, Grid, ParamKind, parse_grid

Element = str | DType
Mirror = TypeVar("Mirror")

_MOST_SHARED = 1 << 18  # bytes: more than a block has on any GPU
_ADDRESSES = 1 << 48
_I64 = 1 << 63


class Lowbit(ext.Dialect, name="lowbit"):
    """The dialect: operations are in `dialect.ops`."""

    @classmethod
    def _emit_module(cls) -> ir.Module:
        """The dialect in IRDL, as every context loads it: built once, and read again for the contexts that follow."""
        return ir.Module.parse(_irdl())


@cache
def _irdl() -> str:
    return str(super(Lowbit, Lowbit)._emit_module())


Lowbit.Operation.verify_invariants = verifier(lambda op: None)  # for operations that have no rules of their own


class FormatAttr(Lowbit.Attribute, name="format"):
    format_name: ir.StringAttr
    table: ir.ArrayAttr


class BilevelAttr(Lowbit.Attribute, name="bilevel"):
    code: Any
    scale: ir.StringAttr
    block: ir.ArrayAttr
    zeros: ir.StringAttr


class ScalesAttr(Lowbit.Attribute, name="scales"):
    of_groups: Any
    of_rows: ir.StringAttr


class PackedType(Lowbit.Type, name="packed"):
    shape: ir.ArrayAttr
    format: FormatAttr
    group: ir.IntegerAttr
    zeros: ir.StringAttr
    scale: Any


class GlobalType(Lowbit.Type, name="global"):
    shape: ir.ArrayAttr
    element: Any
    strides: ir.ArrayAttr
    divisors: ir.ArrayAttr


class SharedType(Lowbit.Type, name="shared"):
    shape: ir.ArrayAttr
    element: Any
    strides: ir.ArrayAttr
    swizzle: ir.IntegerAttr


class RegType(Lowbit.Type, name="reg"):
    shape: ir.ArrayAttr
    element: Any
    layout: ir.StringAttr


_mirrors: ContextVar[dict[ir.Type, Any] | None] = ContextVar("mirrors", default=None)


@contextmanager
def remembered_mirrors() -> Generator[None]:
    """Within it, the mirror of a type is made once. Types hold their context, so what is remembered goes at the end."""
    token = _mirrors.set({})
    try:
        yield
    finally:
        _mirrors.reset(token)


def mirror_of(type_: ir.Type, kind: type[Mirror], make: Callable[[ir.Type], Mirror]) -> Mirror:
    """Returns the mirror of a type, of the kind that `make` makes, or the one that is remembered."""
    known = _mirrors.get()
    if known is None:
        return make(type_)
    found = known.get(type_)
    if not isinstance(found, kind):  # a verifier may take a type for one of another kind, which `make` refuses
        found = known[type_] = make(type_)
    return found


def parameters(kind: Any, type_: ir.Type) -> list[Any]:
    """The parameters of a type of this kind. Operands may be of any type when a verifier sees them."""
    expect(isinstance(type_, kind), "type", f"!{kind.type_name}", type_)
    return kind(type_).params


def ints(values: "tuple[int, ...] | list[int]") -> ir.ArrayAttr:
    """A list of i64 attributes. Raises Mismatch for numbers of more bits."""
    expect(all(-_I64 <= v < _I64 for v in values), "list of numbers", "64 bits each", list(values))
    i64 = ir.IntegerType.get_signless(64)
    return ir.ArrayAttr.get([ir.IntegerAttr.get(i64, v) for v in values])


def read_ints(attribute: ir.Attribute) -> tuple[int, ...]:
    """The numbers of `ints`."""
    try:
        return tuple(int(ir.IntegerAttr(a).value) for a in ir.ArrayAttr(attribute))
    except ValueError:
        raise Mismatch(f"expected a list of integers, got {attribute}") from None


def grid_attr(grid: Grid) -> ir.ArrayAttr:
    """A list of three extents: i64 attributes for constants, strings for the others."""
    i64 = ir.IntegerType.get_signless(64)
    written = [extent.written for extent in grid]
    each = [ir.StringAttr.get(w) if isinstance(w, str) else ir.IntegerAttr.get(i64, w) for w in written]
    return ir.ArrayAttr.get(each)


def read_grid(attribute: ir.Attribute) -> Grid:
    """The extents of `grid_attr`."""
    try:
        extents = list(ir.ArrayAttr(attribute))
    except ValueError:
        raise Mismatch(f"grid: expected a list of extents, got {attribute}") from None
    return parse_grid([a.value if isinstance(a, ir.StringAttr | ir.IntegerAttr) else str(a) for a in extents])


def param_kind(type_: ir.Type, name: str) -> ParamKind:
    """The kind of the parameter `name` of a kernel, by its type."""
    text = str(type_)
    for kind, known in PARAM_TYPES.items():
        if text == known:
            return kind
    raise Mismatch(f"{name}: expected {', '.join(PARAM_TYPES.values())} (a tensor map), got {text}")


def strings(values: "tuple[str, ...] | list[str]") -> ir.ArrayAttr:
    """A list of string attributes."""
    return ir.ArrayAttr.get([ir.StringAttr.get(v) for v in values])


def read_strings(attribute: ir.Attribute) -> tuple[str, ...]:
    """The texts of `strings`."""
    try:
        return tuple(ir.StringAttr(a).value for a in ir.ArrayAttr(attribute))
    except ValueError:
        raise Mismatch(f"expected a list of strings, got {attribute}") from None


def format_attr(t: DType) -> ir.Attribute:
    """`#lowbit.format<name, table>`; the table of a named format is implied and left out."""
    table = t.table if t.name.startswith("lut") else ()
    f64 = ir.F64Type.get()
    values = ir.ArrayAttr.get([ir.FloatAttr.get(f64, v) for v in table])
    return FormatAttr.get(ir.StringAttr.get(t.name), values)


def read_format(attribute: ir.Attribute) -> DType:
    """The format of a `#lowbit.format`."""
    try:
        name, table = FormatAttr(attribute).params
    except ValueError:
        raise Mismatch(f"format: expected #lowbit.format<name, table>, got {attribute}") from None
    try:
        values = tuple(float(ir.FloatAttr(v).value) for v in ir.ArrayAttr(table))
    except ValueError:
        raise Mismatch(f"table of a format: expected a list of floats, got {table}") from None
    return dtype(ir.StringAttr(name).value, values or None)


def element_attr(element: Element) -> ir.Attribute:
    """The attribute that stands for an element in a type."""
    if isinstance(element, DType):
        return format_attr(element)
    _check_name(element)
    return ir.TypeAttr.get(ir.Type.parse(element))


def read_element(attribute: ir.Attribute) -> Element:
    """The element an attribute stands for."""
    attribute = attribute.maybe_downcast()
    if isinstance(attribute, FormatAttr):
        return read_format(attribute)
    element = str(attribute.value) if isinstance(attribute, ir.TypeAttr) else str(attribute)
    expect(element in _BITS, "element", f"a #lowbit.format or one of {', '.join(_BITS)}", element)
    return element


SWIZZLE_128 = Swizzle(bits=3, base=4, shift=3)  # of byte offsets in a buffer

ROW_SCALE = "f32"  # the type of scales of rows

CONDITION = "i1"  # in registers only

UNIT = "vector<4xi32>"  # 16 bytes of packed codes: what a lane loads at once

_NUMBERS = {name: element.bits for element in ELEMENTS.values() for name in (element.mlir, element.operand)}
_BITS = _NUMBERS | {"i16": 16, CONDITION: 1, UNIT: 128}


def element_bits(element: Element) -> int:
    """Bits of one element in memory and in registers."""
    if isinstance(element, DType):
        return element.bits
    _check_name(element)
    return _BITS[element]


def _check_name(element: object) -> None:
    """Raises Mismatch for what names no element, with our name of one that is called otherwise elsewhere."""
    ours = short_name(element)
    hint = f", which is {ours!r} here" if ours in _BITS and ours != element else ""
    expect(element in _BITS, "element", f"a format or one of {', '.join(_BITS)}", f"{element!r}{hint}")


def row_major(shape: "tuple[int, ...]") -> tuple[int, ...]:
    """Strides of a dense array, in elements."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.insert(0, step)
        step *= n
    return tuple(strides)


@dataclass(frozen=True)
class Reg:
    """A tile in registers: `layout` says which thread holds what, in which slot."""

    element: Element
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def bits_per_thread(self) -> int:
        return self.layout.locals * element_bits(self.element)

    @property
    def type(self) -> ir.Type:
        return RegType.get(ints(self.shape), element_attr(self.element), ir.StringAttr.get(str(self.layout)))

    @staticmethod
    def of(type_: ir.Type) -> "Reg":
        return mirror_of(type_, Reg, _reg)


def read_layout(attribute: ir.Attribute) -> Layout:
    """The layout that an attribute writes. Raises LayoutError."""
    return parse_layout(ir.StringAttr(attribute).value)


def _reg(type_: ir.Type) -> Reg:
    shape, element, text = parameters(RegType, type_)
    layout = read_layout(text)
    sizes = read_ints(shape)
    expect(sizes == layout.shape, "shape", f"that of the layout, {layout.shape}", sizes)
    return Reg(read_element(element), layout)


def _check_array(
    element: Element, shape: tuple[int, ...], strides: tuple[int, ...], dynamic: bool = False
) -> None:
    words = "whole bytes (codes and conditions are in registers)"
    expect(element_bits(element) % 8 == 0 and not isinstance(element, DType), "element of memory", words, element)
    allowed = "sizes of at least 1" + (" or -1" if dynamic else "")
    expect(all(n > 0 or (dynamic and n == -1) for n in shape), "shape", allowed, list(shape))
    expect(len(strides) == len(shape), "strides", f"one per dim ({len(shape)})", len(strides))
    expect(min(strides, default=0) >= 0, "strides", "none below 0", list(strides))


@dataclass(frozen=True)
class Shared:
    """A buffer in shared memory: element (i, j, ...) at i*strides[0] + j*strides[1] + ..., in elements.

    swizzle 128: rows are 128 bytes, whose eight pieces of 16 bytes are permuted by the row's number, so that a column
    of pieces meets all banks (`SWIZZLE_128`; PTX ISA 5.5.7, 128-byte mode). 0: none.
    """

    element: Element
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        _check_array(self.element, self.shape, self.strides)
        expect(self.bytes <= _MOST_SHARED, "bytes of shared memory", f"at most {_MOST_SHARED}", self.bytes)
        expect(self.swizzle in (0, 128), "swizzle", "0 or 128", self.swizzle)
        if self.swizzle:
            rows = 128 * 8 // element_bits(self.element)
            whole = (rows, 1) == self.strides[-2:] and not any(s % (8 * rows) for s in self.strides[:-2])
            expect(whole, "strides", f"[multiples of {8 * rows}, {rows}, 1] with swizzle 128", list(self.strides))

    @property
    def type(self) -> ir.Type:
        i64 = ir.IntegerType.get_signless(64)
        swizzle = ir.IntegerAttr.get(i64, self.swizzle)
        return SharedType.get(ints(self.shape), element_attr(self.element), ints(self.strides), swizzle)

    @property
    def bytes(self) -> int:
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides))
        return (last + 1) * element_bits(self.element) // 8

    @staticmethod
    def of(type_: ir.Type) -> "Shared":
        return mirror_of(type_, Shared, _shared)


def _shared(type_: ir.Type) -> Shared:
    shape, element, strides, swizzle = parameters(SharedType, type_)
    return Shared(read_element(element), read_ints(shape), read_ints(strides), int(ir.IntegerAttr(swizzle).value))


@dataclass(frozen=True)
class Global:
    """A view of device memory: element (i, j, ...) at i//divisors[0]*strides[0] + ..., in elements.

    A size of -1 is known only at run time; it is an operand of the `lowbit.global_view` that made the view.
    """

    element: Element
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    divisors: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_array(self.element, self.shape, self.strides, dynamic=True)
        largest = max((*self.shape, *self.strides), default=0)
        expect(largest < _ADDRESSES, "sizes and strides", f"below {_ADDRESSES}", largest)
        rank, divisors = len(self.shape), self.divisors
        expect(len(divisors) == rank, "divisors", f"one per dim ({rank})", len(divisors))
        expect(min(divisors, default=1) >= 1, "divisors", "none below 1", list(divisors))

    @property
    def type(self) -> ir.Type:
        return GlobalType.get(
            ints(self.shape), element_attr(self.element), ints(self.strides), ints(self.divisors)
        )

    @staticmethod
    def of(type_: ir.Type) -> "Global":
        return mirror_of(type_, Global, _global)


def _global(type_: ir.Type) -> Global:
    shape, element, strides, divisors = parameters(GlobalType, type_)
    return Global(read_element(element), read_ints(shape), read_ints(strides), read_ints(divisors))
