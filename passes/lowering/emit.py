"""Short names for the operations that lowered code is made of: 32-bit integers, packed reals, pointers.

All of them insert at the current insertion point. Integers are signless i32 unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowbit.dialect.bindings import arith, ir, llvm, nvvm

AND_OR = 0xEA  # lop3's truth table of (a & b) | c
AND_XOR = 0x6A  # and of (a & b) ^ c
SELECT = 0xE2  # of (a & b) | (c & ~b)
_DYNAMIC = -(1 << 31)  # llvm.getelementptr's mark of an index that is an operand


def integer(bits: int = 32) -> Any:
    return ir.IntegerType.get_signless(bits)


def pointer(space: int) -> Any:
    """1: device memory, 3: shared memory."""
    return ir.Type.parse(f"!llvm.ptr<{space}>")


def constant(value: int, bits: int = 32) -> Any:
    """An integer from its bits."""
    value &= (1 << bits) - 1
    signed = value - (1 << bits) if value >> (bits - 1) and bits > 1 else value
    return arith.constant(integer(bits), signed)


def real(value: float, type_: Any) -> Any:
    """A constant of a float type, or of a vector of one, all elements alike."""
    if isinstance(type_, ir.VectorType):
        attribute = ir.FloatAttr.get(type_.element_type, value)
        return arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, attribute))
    return arith.constant(type_, value)


def shift_right(x: Any, by: int) -> Any:
    """x >> by, or x << -by; x itself for 0."""
    if by == 0:
        return x
    return arith.shrui(x, constant(by)) if by > 0 else arith.shli(x, constant(-by))


def mask(x: Any, bits: int) -> Any:
    return arith.andi(x, constant(bits))


def rotate_right(x: Any, by: int) -> Any:
    return llvm.intr_fshr(x, x, constant(by))


def mask_or(x: Any, bits: int, y: Any) -> Any:
    """(x & bits) | y."""
    return _lop3(x, bits, y, AND_OR)


def mask_xor(x: Any, bits: int, y: Any) -> Any:
    """(x & bits) ^ y."""
    return _lop3(x, bits, y, AND_XOR)


def select_bits(x: Any, bits: int, y: Any) -> Any:
    """The given bits of x, the others of y."""
    return _lop3(x, bits, y, SELECT)


def _lop3(x: Any, bits: int, y: Any, truth_table: int) -> Any:
    """One lop3.b32; LLVM would make two operations of it."""
    return llvm.inline_asm(
        integer(), [x, constant(bits), y], f"lop3.b32 $0, $1, $2, $3, {truth_table};", "=r,r,n,r", asm_dialect=0
    )


def permute_bytes(a: Any, b: Any, selector: int) -> Any:
    """One prmt.b32: four of the bytes of a (0 to 3) and b (4 to 7), the lowest by the lowest digit of the selector."""
    operands = [a, b, constant(selector)]
    return llvm.inline_asm(integer(), operands, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,n", asm_dialect=0)


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once; also on vectors of two."""
    return llvm.intr_fma(a, b, c)


def f32_instruction(name: str, *operands: Any) -> Any:
    """One PTX instruction from f32 to f32 that LLVM has no operation for."""
    places = ", ".join(f"${i + 1}" for i in range(len(operands)))
    constraints = ",".join(["=f", *["f"] * len(operands)])
    return llvm.inline_asm(ir.F32Type.get(), list(operands), f"{name} $0, {places};", constraints, asm_dialect=0)


def kept(x: Any) -> Any:
    """A number in f32 that is computed here, for all that LLVM knows: by no instruction, which has its side effects."""
    return llvm.inline_asm(x.type, [x], "", "=f,0", has_side_effects=True, asm_dialect=0)


def intrinsic(name: str, x: Any) -> Any:
    """An LLVM intrinsic from a real number, or a vector of them, to its own type."""
    return llvm.call_intrinsic(x.type, ir.StringAttr.get(name), [x], [], [])


def convert(type_: Any, x: Any) -> Any:
    """A real number as another type of real: exactly, or rounded to nearest even."""
    if x.type == type_:
        return x
    f32 = ir.F32Type.get()
    wide = x if x.type == f32 else arith.extf(f32, x)
    return wide if type_ == f32 else arith.truncf(type_, wide)


def bitcast(type_: Any, x: Any) -> Any:
    return x if x.type == type_ else llvm.bitcast(type_, x)


def pair(a: Any, b: Any) -> Any:
    """A vector of two."""
    type_ = ir.VectorType.get([2], a.type)
    return llvm.insertelement(llvm.insertelement(llvm.mlir_undef(type_), a, constant(0)), b, constant(1))


def below(x: Any, end: Any) -> Any:
    """x < end, signed."""
    return arith.cmpi(arith.CmpIPredicate.slt, x, end)


def element(vector: Any, index: int) -> Any:
    return llvm.extractelement(vector, constant(index))


def offset_bytes(base: Any, *, dynamic: Any = None, static: int = 0) -> Any:
    """base + dynamic + static, in bytes."""
    byte = integer(8)
    if static >= 1 << 31:  # beyond what the instruction has room for
        base, static = offset_bytes(base, dynamic=constant(static, 64)), 0
    if dynamic is not None:
        base = llvm.getelementptr(base.type, base, [dynamic], [_DYNAMIC], byte, 0)
    if static:
        base = llvm.getelementptr(base.type, base, [], [static], byte, 0)
    return base


def read_constant(symbol: str, offset: Any, bits: int, static: int = 0) -> Any:
    """An integer of `bits` bits, `offset` + `static` bytes into the constant array `symbol` in device memory."""
    array, dynamic = llvm.mlir_addressof(pointer(1), symbol), arith.extui(integer(64), offset)
    address = offset_bytes(array, dynamic=dynamic, static=static)
    return llvm.load(integer(bits), address, invariant=True, alignment=bits // 8)


def constant_array(module_body: Any, name: str, entries: Sequence[int], bits: int) -> str:
    """The symbol of a constant array: that in a module's block, or a new one at its head, `name` if it is free."""
    values = ", ".join(str(e - (1 << bits) if e >> (bits - 1) else e) for e in entries)
    attribute = ir.Attribute.parse(f"dense<[{values}]> : tensor<{len(entries)}xi{bits}>")
    globals_ = [op for op in module_body.operations if op.operation.name == "llvm.mlir.global"]
    there = {ir.StringAttr(op.attributes["sym_name"]).value: op.attributes for op in globals_}
    symbol = name
    while symbol in there:
        if "value" in there[symbol] and there[symbol]["value"] == attribute:
            return symbol
        symbol += "_"
    with ir.InsertionPoint.at_block_begin(module_body):
        define(
            f"llvm.mlir.global internal constant @{symbol}({attribute})"
            f" {{addr_space = 1 : i32, alignment = 16 : i64}} : !llvm.array<{len(entries)} x i{bits}>"
        )
    return symbol


def define(text: str) -> None:
    """An operation from its text, at the current insertion point."""
    ir.InsertionPoint.current.insert(ir.Operation.parse(text))


def from_lane_beside(value: Any, distance: int) -> Any:
    """The f32 of the lane whose number differs in one bit, `distance`. All lanes of the warp take part."""
    kind = ir.Attribute.parse("#nvvm<shfl_kind bfly>")
    return nvvm.shfl_sync(constant(-1), value, constant(distance), constant(31), kind)


def of_lane(lane: int, value: Any) -> Any:
    """Returns for all lanes of the warp the value that one of them has."""
    kind = ir.Attribute.parse("#nvvm<shfl_kind idx>")
    return nvvm.shfl_sync(constant(-1), value, constant(lane), constant(31), kind)


def from_e4m3(code: Any) -> Any:
    """f32 from an f8e4m3 code without NaN that is extended by copies of its sign: bits into place, then 2^(127-7) makes
    up for the bias."""
    f32 = ir.F32Type.get()
    bits = mask(shift_right(code, -20), 0x87F00000)
    return arith.mulf(bitcast(f32, bits), real(2.0**120, f32))


def from_e8m0(code: Any) -> Any:
    """f32 2^(code-127): the code is the exponent field, but for code 0, which is f32's subnormal 2^-127."""
    smallest = arith.cmpi(arith.CmpIPredicate.eq, code, constant(0))
    bits = arith.select(smallest, constant(1 << 22), shift_right(code, -23))
    return bitcast(ir.F32Type.get(), bits)
