"""The mirror of `!lowbit.packed`, the type of a weight in memory, and the attribute that says what its scales are.

Scales are a string, `#lowbit.bilevel` where they are codes, and `#lowbit.scales` of these where rows have one as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from lowbit.dialect.bilevel import Bilevel, SuperScale
from lowbit.dialect.bindings import ir
from lowbit.dialect.checks import expect, text
from lowbit.dialect.formats.dtypes import DType, dtype
from lowbit.dialect.formats.packing import Packing
from lowbit.dialect.spec import MatmulSpec, Scale, Zeros
from lowbit.dialect.types import (
    ROW_SCALE,
    BilevelAttr,
    FormatAttr,
    PackedType,
    ScalesAttr,
    format_attr,
    ints,
    parameters,
    read_format,
    read_ints,
)


def packed_type(spec: MatmulSpec) -> ir.Type:
    """The type of the weight of a spec; group 0 stands for one scale per row."""
    return PackedType.get(
        ints((spec.n, spec.k)),
        format_attr(spec.dtype),
        ir.IntegerAttr.get(ir.IntegerType.get_signless(64), spec.group_size or 0),
        ir.StringAttr.get(spec.zeros),
        scale_attr(spec.scale, spec.bilevel, spec.row_scales),
    )


def scale_attr(scale: str, bilevel: Bilevel | None, row_scales: bool) -> ir.Attribute:
    """The type of the scales: a string, or `#lowbit.bilevel` for codes; in `#lowbit.scales` where rows have one."""
    of_groups: ir.Attribute = ir.StringAttr.get(scale)
    if bilevel:
        code = format_attr(dtype(scale, bilevel.table)) if bilevel.table else of_groups
        zeros = "float" if bilevel.zeros else "offset" if bilevel.offsets else "none"
        block = ints((bilevel.rows, bilevel.groups))
        of_groups = BilevelAttr.get(code, ir.StringAttr.get(bilevel.scale), block, ir.StringAttr.get(zeros))
    return ScalesAttr.get(of_groups, ir.StringAttr.get(ROW_SCALE)) if row_scales else of_groups


def read_scale(attribute: ir.Attribute) -> tuple[str, Bilevel | None, bool]:
    """The inverse of `scale_attr`."""
    attribute = attribute.maybe_downcast()
    if isinstance(attribute, ScalesAttr):
        of_groups, of_rows = attribute.params
        of_rows = ir.StringAttr(of_rows).value
        expect(of_rows == ROW_SCALE, "type of row scales", ROW_SCALE, of_rows)
        return *_read_group_scale(of_groups), True
    return *_read_group_scale(attribute), False


def _read_group_scale(attribute: ir.Attribute) -> tuple[str, Bilevel | None]:
    attribute = attribute.maybe_downcast()
    if not isinstance(attribute, BilevelAttr):
        return text(attribute, "scale", "a string, a #lowbit.bilevel or a #lowbit.scales"), None
    code, scale, block, zeros = attribute.params
    expect(len(read_ints(block)) == 2, "block of a #lowbit.bilevel", "[rows, groups]", block)
    rows, groups = read_ints(block)
    kind = ir.StringAttr(zeros).value
    expect(kind in ("none", "float", "offset"), "zeros of a #lowbit.bilevel", "none, float or offset", kind)
    name, table = _read_code(code)
    type_ = cast(SuperScale, ir.StringAttr(scale).value)
    return name, Bilevel(rows, groups, type_, kind == "float", kind == "offset", table)


def _read_code(attribute: ir.Attribute) -> tuple[str, tuple[float, ...] | None]:
    """The format of codes, a string, or `#lowbit.format` with the numbers of a table."""
    attribute = attribute.maybe_downcast()
    if isinstance(attribute, FormatAttr):
        format_ = read_format(attribute)
        return format_.name, format_.table
    return text(attribute, "code of a #lowbit.bilevel", "a string or a #lowbit.format"), None


@dataclass(frozen=True)
class Packed:
    """A weight in memory: everything of a `MatmulSpec` that does not concern x, y and the bias."""

    n: int
    k: int
    format: DType
    group: int | None
    zeros: str
    scale: str
    bilevel: Bilevel | None
    row_scales: bool

    @property
    def packing(self) -> Packing:
        return Packing(self.format.bits, self.n, self.k, self.group)

    @staticmethod
    def of(type_: ir.Type) -> Packed:
        """Raises SpecError where no `MatmulSpec` has such a weight."""
        shape, format_, group, zeros, scale = parameters(PackedType, type_)
        sizes = read_ints(shape)
        expect(len(sizes) == 2, "shape of a packed weight", "[n, k]", list(sizes))
        group_size = int(ir.IntegerAttr(group).value) or None
        return _packed(*sizes, read_format(format_), group_size, ir.StringAttr(zeros).value, *read_scale(scale))


@lru_cache(maxsize=64)
def _packed(
    n: int, k: int, t: DType, group: int | None, zeros: str, scale: str, bilevel: Bilevel | None, row_scales: bool
) -> Packed:
    """Passes and verifiers ask for the same few weights over and over."""
    table = t.table if t.name.startswith("lut") else None
    kinds = cast(Zeros, zeros), cast(Scale, scale)
    spec = MatmulSpec(n, k, t.name, group, *kinds, table=table, bilevel=bilevel, row_scales=row_scales)
    return Packed(spec.n, spec.k, t, spec.group_size, spec.zeros, spec.scale, spec.bilevel, spec.row_scales)
