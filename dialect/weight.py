"""The tensors of a packed weight, declared once. No MLIR and no torch is needed here.

Packing and references go through `MatmulSpec.given_tensors`, the tensors that `pack` takes. Saving, moving and random
weights, the runtimes, the operator and the parameters of kernels go through `MatmulSpec.tensors`, those in memory. They
are the same but for codes of scales and zeros that share their bytes. To add a tensor, add its slot to `weight_tensors`
and let kernels read the parameter of its name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lowbit.dialect.bilevel import Bilevel, integers_of
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.outliers import LINE, table_lines
from lowbit.dialect.formats.packing import ROWS, Packing

Role = Literal[
    "codes", "scale", "zero", "offset", "group_codes", "super_scale", "super_zero", "super_offset", "bias", "outliers",
    "permutation",
]
Index = Literal["element", "group", "block", "row", "padded_row", "sparse", "column"]
Storage = Literal["i32", "u8", "f16", "bf16", "f32", "e8m0", "e4m3"]

GROUP_CODES = "group_codes"
"""The name of the tensor in memory whose bytes two codes of a group share: that of its scale in the low bits, that of
its zero or offset above it."""


@dataclass(frozen=True)
class TensorSlot:
    """One tensor of a packed weight.

    name      what `pack`, saved weights and kernels call it
    role      what its numbers mean: codes are decoded, a scale multiplies, a zero is subtracted from the decoded code,
              an offset is added to the scaled code, a bias is added to the output, outliers are added to single
              elements of the weight; a permutation says which column of x meets a column of codes; a super scale
              multiplies scales (zeros, offsets) that are codes, less their super zero; a super offset is added;
              group codes are `GROUP_CODES`
    index     what has one number: an element of the weight, a group of a row, a block of groups (`Bilevel`), a row, a
              column of an expert, or some elements ("sparse"); of padded rows there are whole blocks of 16 in memory
    storage   the type of a number in memory; integer zeros (u8) are stored less the least value of the format
    shape     in memory; -1 stands for a length that the values decide
    given     the shape in which `pack` takes it: [n, k], [n, groups], [n] or [experts k]; a scale per row also as one
              number
    code      the format of numbers that are codes (`Bilevel`), such as "u6"; they are stored less its least value
    shared    the tensor in memory whose bytes hold the codes beside others; "": they have a tensor of their own
    bit       the lowest bit of a code in its byte
    """

    name: str
    role: Role
    index: Index
    storage: Storage
    shape: tuple[int, ...]
    given: tuple[int, ...]
    code: str = ""
    shared: str = ""
    bit: int = 0

    @property
    def tensor(self) -> str:
        """The name of the tensor in memory that holds the numbers."""
        return self.shared or self.name

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return integers_of(self.code).bits

    @property
    def least_shape(self) -> tuple[int, ...]:
        """The shape in memory, with the least length where the length is free: that of a weight without outliers."""
        return tuple(table_lines(self.given[0]) if size < 0 else size for size in self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, of the least length where it is free."""
        return math.prod(self.least_shape) * ELEMENTS[self.storage].bytes

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Tells whether a tensor in memory may have this shape."""
        least = self.least_shape
        return len(shape) == len(least) and all(
            size >= low if free < 0 else size == low for size, low, free in zip(shape, least, self.shape)
        )

    @staticmethod
    def of(packing: Packing, name: str, role: Role, index: Index, storage: Storage, experts: int = 1) -> TensorSlot:
        """Returns the slot with the shapes that a tensor with this index has in a weight of so many experts that is
        packed so."""
        n, k, group = packing.n, packing.k, packing.group or packing.k
        shape, given = {
            "element": (packing.codes_shape, (n, k)),
            "group": (packing.scales_shape, (n, k // group)),
            "row": ((n,), (n,)),
            "padded_row": ((packing.row_blocks * ROWS,), (n,)),
            "column": ((experts * k,), (experts * k,)),
            "sparse": ((-1, LINE), (n, k)),
        }[index]
        return TensorSlot(name, role, index, storage, shape, given)


def weight_tensors(
    packing: Packing,
    scale: Storage,
    zero: Storage | None = None,
    offset: Storage | None = None,
    row_scale: Storage | None = None,
    bias: Storage | None = None,
    outliers: Storage | None = None,
    permutation: Storage | None = None,
    bilevel: Bilevel | None = None,
    integer_zeros: bool = False,
    code: str = "",
    experts: int = 1,
) -> tuple[TensorSlot, ...]:
    """Returns the slots of the tensors that `pack` takes, codes first.

    The arguments after the packing are the types of numbers in memory; None where a weight has none.

    bilevel, code: the second level of scales that are codes, and their format; so are offsets and zeros, except for
    integer zeros
    experts: each of which has numbers of its own for columns
    """
    tensors: list[tuple[str, Role, Index, Storage | None]] = [
        ("codes", "codes", "element", "i32"),
        ("scales", "scale", "group", scale),
        ("zeros", "zero", "group", zero),
        ("offsets", "offset", "group", offset),
        ("row_scales", "scale", "padded_row", row_scale),
        ("bias", "bias", "row", bias),
        ("outliers", "outliers", "sparse", outliers),
        ("permutation", "permutation", "column", permutation),  # the last, as no kernel takes it
    ]
    slots = [
        TensorSlot.of(packing, name, role, index, storage, experts) for name, role, index, storage in tensors if storage
    ]
    if bilevel is None:
        return tuple(slots)
    coded = [slot for slot in slots if slot.index == "group" and (slot.role != "zero" or not integer_zeros)]
    placed = {slot.name: slot for slot in _in_bytes([replace(slot, code=code) for slot in coded])}
    result: list[TensorSlot] = []
    for slot in slots:
        result += _two_levels(packing, placed[slot.name], bilevel) if slot.name in placed else [slot]
    return tuple(result)


def _in_bytes(coded: list[TensorSlot]) -> list[TensorSlot]:
    """Returns slots of codes with their places: a scale's and a zero's or offset's share a byte where both fit in."""
    if len(coded) < 2 or any(slot.storage != "u8" for slot in coded) or sum(slot.bits for slot in coded) > 8:
        return coded
    scale, other = coded
    return [replace(scale, shared=GROUP_CODES), replace(other, shared=GROUP_CODES, bit=scale.bits)]


def in_memory(given: Sequence[TensorSlot]) -> tuple[TensorSlot, ...]:
    """Returns the slots of the tensors in memory that hold given ones, in the order of their first."""
    bits = sum(slot.bits for slot in given if slot.shared)
    tensors: dict[str, TensorSlot] = {}
    for slot in given:
        whole = replace(slot, name=GROUP_CODES, role="group_codes", code=f"u{bits}", shared="") if slot.shared else slot
        tensors.setdefault(slot.tensor, whole)
    return tuple(tensors.values())


def _two_levels(packing: Packing, slot: TensorSlot, bilevel: Bilevel) -> list[TensorSlot]:
    """Returns the slot of numbers that are codes, and those of their second level: scale_scales, scale_zeros or
    scale_offsets."""
    shape, given = bilevel.shapes(packing)
    roles: list[tuple[str, Role, bool]] = [
        ("scales", "super_scale", True),
        ("zeros", "super_zero", bilevel.zeros),
        ("offsets", "super_offset", bilevel.offsets),
    ]
    others = [
        TensorSlot(f"{slot.role}_{name}", role, "block", bilevel.scale, shape, given)
        for name, role, there in roles
        if there
    ]
    return [slot, *others]
