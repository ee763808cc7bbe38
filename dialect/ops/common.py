"""What the verifiers of several levels share: index types, memory, accesses and their boundaries."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lowbit.dialect.bindings import ir
from lowbit.dialect.checks import expect, text
from lowbit.dialect.formats.byte_codes import COMPUTE
from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.raw_codes import can_be_raw, can_defer_offset
from lowbit.dialect.layouts.shared_memory import BANKS
from lowbit.dialect.types import Global, GlobalType, Shared, SharedType, read_strings, row_major

if TYPE_CHECKING:
    I1 = ir.IntegerType
    I32 = ir.IntegerType
else:
    I1, I32 = ir.IntegerType[1], ir.IntegerType[32]  # indices are i32

BOUNDARIES = ("none", "clamp", "zero", "skip")


def one() -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 1)


def memory_of(value: Any) -> Global | Shared:
    type_ = value.type
    expect(isinstance(type_, GlobalType | SharedType), "memory", "!lowbit.global or !lowbit.shared", type_)
    return Global.of(type_) if isinstance(type_, GlobalType) else Shared.of(type_)


def check_access(
    op: Any, memory: Global | Shared, tile: tuple[int, ...], allowed: Sequence[str], limited: bool = False
) -> None:
    rank = len(memory.shape)
    if isinstance(memory, Shared) and memory.swizzle:
        allowed = [word for word in allowed if word != "clamp"]
    expect(len(tile) == rank, "rank of the tile", f"{rank} as the memory", len(tile))
    expect(len(op.offsets) == rank, "offsets", f"one per dim ({rank})", len(op.offsets))
    words = read_strings(op.boundary)
    expect(len(words) == rank, "boundary", f"one word per dim ({rank})", len(words))
    divisors = memory.divisors if isinstance(memory, Global) else (1,) * rank
    for dim, (word, most) in enumerate(zip(words, memory.shape)):
        expect(word in allowed, "boundary", f"one of {', '.join(allowed)}", word)
        first = constant_of(op.offsets[dim])
        expect(first is None or first >= 0, f"offset of dim {dim}", "at least 0", first)
        if word == "none" and most > 0 and divisors[dim] == 1 and not limited:
            expect(tile[dim] <= most, f"size of dim {dim} with boundary none", f"at most {most}", tile[dim])
            end = (first or 0) + tile[dim]
            expect(end <= most, f"end of dim {dim} with boundary none", f"at most {most}", f"{first} + {tile[dim]}")


def check_table(buffer: Any, format_: DType, element: str, copies: int = BANKS) -> None:
    """A buffer must be a table that decodes a format to an element, with so many copies of its entries."""
    expect(format_.kind == "table", "format", "one with a table of values", format_.name)
    shape = DecodeTable(format_, element, copies).shape
    expected = Shared("i32", shape, row_major(shape))
    expect(Shared.of(buffer.type) == expected, f"table from {format_.name} to {element}", expected.type, buffer.type)


def check_shifted(format_: Any) -> None:
    """Shifts are added where the offset of an integer is subtracted."""
    expect(format_.kind in ("uint", "int"), "format with shifts", "an integer one", format_.name)


def check_offset(offset: str, format_: Any, element: Any) -> None:
    """Only some formats can be decoded without the subtraction of an offset."""
    can = {"deferred": can_defer_offset, "raw": can_be_raw}.get(offset)
    if can is not None:
        expected = {"deferred": "narrow integers in f16 or bf16", "raw": "integers in f16"}[offset]
        expect(can(format_, element), f'offset "{offset}"', expected, f"{format_.name} in {element}")


def check_rounding(kind: Any) -> None:
    """Numbers are rounded to one of the types in which bytes are multiplied."""
    expect(text(kind, "kind") in COMPUTE, "kind", " or ".join(COMPUTE), kind)


def constant_of(value: Any) -> int | None:
    """Returns the number of an arith.constant of integers; None for any other value."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "arith.constant":
        return None
    if "value" not in owner.attributes or not isinstance(number := owner.attributes["value"], ir.IntegerAttr):
        return None
    return int(ir.IntegerAttr(number).value)
