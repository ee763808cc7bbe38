"""The types of numbers: of activations and outputs, of scales and zero points, and of words in memory.

What a kernel does with x follows from the width of its element: how many make a 16-byte copy, how far apart rows lie in
shared memory, how many columns a swizzled row holds. No MLIR is needed here.
"""

from __future__ import annotations

from dataclasses import dataclass

VECTOR_BITS = 128  # of the widest copy and load of a thread
PANEL_BITS = 1024  # of a row of shared memory that wgmma reads swizzled


@dataclass(frozen=True)
class Element:
    """One type of number.

    name  as specs spell it
    bits  of one number in memory
    mlir  the type that memory has in the IR: bytes, for numbers that are only stored there
    """

    name: str
    bits: int
    mlir: str

    @property
    def bytes(self) -> int:
        """Bytes of one number in memory."""
        return self.bits // 8

    @property
    def per_vector(self) -> int:
        """How many numbers a thread copies at once, in 16 bytes."""
        return VECTOR_BITS // self.bits

    @property
    def per_panel(self) -> int:
        """How many columns of x a swizzled row of shared memory holds, in 128 bytes."""
        return PANEL_BITS // self.bits


_ALL = (
    Element("f16", 16, "f16"),
    Element("bf16", 16, "bf16"),
    Element("f32", 32, "f32"),
    Element("e8m0", 8, "i8"),
    Element("e4m3", 8, "i8"),
    Element("u8", 8, "i8"),
)
ELEMENTS = {element.name: element for element in _ALL}
