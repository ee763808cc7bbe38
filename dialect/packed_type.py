"""The mirror of `!lowbit.packed`, the type of a weight in memory, and the attribute that says what its scales are.

Scales are a string, `#lowbit.bilevel` where they are codes, and `#lowbit.scales` of these where rows have one as well.
What else a `WeightFormat` has is said by operations: a bias and outliers are operands of a matmul, and permuted columns
are those of an x that `permute` has made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from lowbit.dialect.bilevel import Bilevel, SuperScale
from lowbit.dialect.bindings import ir
from lowbit.dialect.checks import expect, text
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.formats.packing import Packing
from lowbit.dialect.shape import Shape
from lowbit.dialect.spec import MatmulSpec
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
from lowbit.dialect.weight_format import WeightFormat


def packed_type(spec: MatmulSpec) -> ir.Type:
    """The type of the weight of a spec; group 0 stands for one scale per row."""
    shape, weight = spec.shape, spec.format
    return PackedType.get(
        ints((shape.n, shape.k)),
        format_attr(weight.dtype),
        ir.IntegerAttr.get(ir.IntegerType.get_signless(64), weight.group_size or 0),
        ir.StringAttr.get(weight.zeros),
        scale_attr(weight),
    )


def scale_attr(weight: WeightFormat) -> ir.Attribute:
    """The type of the scales: a string, or `#lowbit.bilevel` for codes; in `#lowbit.scales` where rows have one."""
    of_groups: ir.Attribute = ir.StringAttr.get(weight.scale)
    if bilevel := weight.bilevel:
        code = format_attr(dtype(weight.scale, bilevel.table)) if bilevel.table else of_groups
        zeros = "float" if bilevel.zeros else "offset" if bilevel.offsets else "none"
        block = ints((bilevel.rows, bilevel.groups))
        of_groups = BilevelAttr.get(code, ir.StringAttr.get(bilevel.scale), block, ir.StringAttr.get(zeros))
    return ScalesAttr.get(of_groups, ir.StringAttr.get(ROW_SCALE)) if weight.row_scales else of_groups


def read_scale(attribute: ir.Attribute) -> dict[str, Any]:
    """The inverse of `scale_attr`: the fields scale, bilevel and row_scales of a `WeightFormat`."""
    attribute = attribute.maybe_downcast()
    if isinstance(attribute, ScalesAttr):
        of_groups, of_rows = attribute.params
        of_rows = ir.StringAttr(of_rows).value
        expect(of_rows == ROW_SCALE, "type of row scales", ROW_SCALE, of_rows)
        return {**_read_group_scale(of_groups), "row_scales": True}
    return _read_group_scale(attribute)


def _read_group_scale(attribute: ir.Attribute) -> dict[str, Any]:
    attribute = attribute.maybe_downcast()
    if not isinstance(attribute, BilevelAttr):
        return {"scale": text(attribute, "scale", "a string, a #lowbit.bilevel or a #lowbit.scales")}
    code, scale, block, zeros = attribute.params
    expect(len(read_ints(block)) == 2, "block of a #lowbit.bilevel", "[rows, groups]", block)
    rows, groups = read_ints(block)
    kind = ir.StringAttr(zeros).value
    expect(kind in ("none", "float", "offset"), "zeros of a #lowbit.bilevel", "none, float or offset", kind)
    name, table = _read_code(code)
    type_ = cast(SuperScale, ir.StringAttr(scale).value)
    return {"scale": name, "bilevel": Bilevel(rows, groups, type_, kind == "float", kind == "offset", table)}


def _read_code(attribute: ir.Attribute) -> tuple[str, tuple[float, ...] | None]:
    """The format of codes, a string, or `#lowbit.format` with the numbers of a table."""
    attribute = attribute.maybe_downcast()
    if isinstance(attribute, FormatAttr):
        format_ = read_format(attribute)
        return format_.name, format_.table
    return text(attribute, "code of a #lowbit.bilevel", "a string or a #lowbit.format"), None


@dataclass(frozen=True)
class Packed:
    """A weight in memory: its shape, and what is stored of it, but for what operations add to it (bias and outliers)
    and the order of its columns."""

    shape: Shape
    format: WeightFormat

    @property
    def packing(self) -> Packing:
        return self.format.packing(self.shape)

    @staticmethod
    def of(type_: ir.Type) -> Packed:
        """Raises SpecError where no `MatmulSpec` has such a weight."""
        shape, element, group, zeros, scale = parameters(PackedType, type_)
        sizes = read_ints(shape)
        expect(len(sizes) == 2, "shape of a packed weight", "[n, k]", list(sizes))
        groups = {"group_size": int(ir.IntegerAttr(group).value) or None, "zeros": ir.StringAttr(zeros).value}
        return _packed(*sizes, **_read_element(element), **groups, **read_scale(scale))


def _read_element(attribute: ir.Attribute) -> dict[str, Any]:
    """The fields of a `WeightFormat` that say what its codes stand for."""
    t = read_format(attribute)
    return {"weight": t.name, "table": t.table if t.name.startswith("lut") else None}


@lru_cache(maxsize=64)
def _packed(n: int, k: int, **stored: Any) -> Packed:
    """Passes and verifiers ask for the same few weights over and over."""
    spec = MatmulSpec(n, k, **stored)
    return Packed(spec.shape, spec.format)
