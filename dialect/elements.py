"""The types of numbers in one table: of activations, outputs, accumulators, scales, zero points and words in memory.

What a kernel does with x follows from its element: how many make a 16-byte copy, how far apart rows lie in shared
memory, how many columns a swizzled row holds, how many an mma multiplies, and of what type the sums are. No MLIR is
needed here.
"""

from __future__ import annotations

from dataclasses import dataclass

VECTOR_BITS = 128  # of the widest copy and load of a thread
PANEL_BITS = 1024  # of a row of shared memory that wgmma reads swizzled
MMA_BITS = 256  # of a row of operand A in one mma.sync or wgmma (PTX ISA 9.7.14.5, 9.7.15.5)


@dataclass(frozen=True)
class Element:
    """One type of number.

    name   as specs spell it
    bits   of one number in memory
    mlir   the type that memory has in the IR: bytes, for numbers that are only stored there
    torch  the name of the torch type
    mma    the type's name as an operand of mma and wgmma in PTX; "" if they do not multiply it
    sums   the type of the accumulators of its products
    byte   the type that a number of 8 bits has in the IR as an operand: three types of numbers are bytes in memory
    """

    name: str
    bits: int
    mlir: str
    torch: str
    mma: str = ""
    sums: str = "f32"
    byte: str = ""

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

    @property
    def mma_k(self) -> int:
        """How many columns one mma or wgmma multiplies: the k of its shape."""
        return MMA_BITS // self.bits

    @property
    def operand(self) -> str:
        """The type that a number has in the IR as an operand of a product."""
        return self.byte or self.mlir


_ALL = (
    Element("f16", 16, "f16", "float16", "f16"),
    Element("bf16", 16, "bf16", "bfloat16", "bf16"),
    Element("f32", 32, "f32", "float32", "tf32"),
    Element("i32", 32, "i32", "int32"),
    Element("i8", 8, "i8", "int8", "s8", "i32", "i8"),
    Element("u8", 8, "i8", "uint8", "u8", "i32", "ui8"),
    Element("e4m3", 8, "i8", "float8_e4m3fn", "e4m3", "f32", "f8E4M3FN"),
    Element("e8m0", 8, "i8", "float8_e8m0fnu"),
)
ELEMENTS = {element.name: element for element in _ALL}

ACTS = ("f16", "bf16")  # the types of activations
OPERANDS = {element.operand: element for element in _ALL if element.mma}  # by their types in the IR
TIMES: dict[str, tuple[str, ...]] = {
    "f16": ("f16", "f32"),
    "bf16": ("bf16", "f32"),
    "f8E4M3FN": ("f8E4M3FN",),
    "i8": ("i8", "ui8"),
}
"""The types that operand a may have, by that of operand b. Unsigned bytes are multiplied by signed ones, and types that
are not listed as f32."""


def product_types(a: str, b: str) -> str:
    """Returns the types in the name of an mma or wgmma of two operands, that of the sums first: PTX has s32 for i32."""
    return f"{OPERANDS[b].sums.replace('i', 's')}.{OPERANDS[a].mma}.{OPERANDS[b].mma}"
