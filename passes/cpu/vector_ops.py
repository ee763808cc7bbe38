"""A few words for vector code on the host: constants, addresses in bytes, shifts, loops.

Everything works on plain SSA values at the current insertion point. Integers that count or address are i64; a
memory access is (pointer, byte offset), the offset being a constant plus an optional SSA value.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.dialect.bindings import arith, ir, llvm, scf, vector
from lowbit.dialect.elements import ELEMENTS

_INBOUNDS = llvm.GEPNoWrapFlags.inboundsFlag | llvm.GEPNoWrapFlags.nusw
_MOST_CONSTANT = 2**31 - 1  # bytes of a constant index of getelementptr
_DYNAMIC = -(1 << 31)  # marks an index of a GEP that is an operand
LANES = 16  # f32 elements of a vector: one zmm register, or two ymm
MAGIC = 1.5 * 2.0**23  # added to a number below 2^22, it leaves the nearest integer in the low bits
Value = Any


def i(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)


def f32() -> ir.Type:
    return ir.F32Type.get()


def pointer() -> ir.Type:
    return ir.Type.parse("!llvm.ptr")


def vec(element: ir.Type, lanes: int = LANES) -> ir.Type:
    return ir.VectorType.get([lanes], element)


def scalar_type(name: str) -> ir.Type:
    """The MLIR type of "f16", "bf16" or "f32"."""
    return ir.Type.parse(ELEMENTS[name].mlir)


def element_type(type_: ir.Type) -> ir.Type:
    """Returns the type of a vector's elements, or a scalar's own type."""
    return ir.VectorType(type_).element_type if isinstance(type_, ir.VectorType) else type_


def constant(type_: ir.Type, value: float) -> Value:
    """A scalar, or a vector of equal elements. Integers are taken modulo 2**width."""
    element = element_type(type_)
    if isinstance(element, ir.IntegerType):
        half = 1 << (element.width - 1)
        attribute: ir.Attribute = ir.IntegerAttr.get(element, (int(value) + half) % (2 * half) - half)
    else:
        attribute = ir.FloatAttr.get(element, value)
    if isinstance(type_, ir.VectorType):
        attribute = ir.DenseElementsAttr.get_splat(type_, attribute)
    return arith.constant(type_, attribute)


def constants(element: ir.Type, values: Sequence[float]) -> Value:
    """A vector of i32 or f32."""
    kind = np.int32 if isinstance(element, ir.IntegerType) else np.float32
    type_ = vec(element, len(values))
    return arith.constant(type_, ir.DenseElementsAttr.get(np.asarray(values, dtype=kind), type=type_))


def i64(value: int) -> Value:
    return constant(i(64), value)


def add(a: Value, b: Value | int) -> Value:
    if isinstance(b, int):
        return arith.addi(a, i64(b)) if b else a
    return arith.addi(a, b)


def mul(a: Value, b: int) -> Value:
    return arith.muli(a, i64(b))


def divmod_(a: Value, b: int) -> tuple[Value, Value]:
    return arith.divui(a, i64(b)), arith.remui(a, i64(b))


def shift_left(x: Value, by: int) -> Value:
    return arith.shli(x, constant(x.type, by)) if by else x


def shift_right(x: Value, by: int, *, signed: bool = False) -> Value:
    """x >> by, or x << -by."""
    if by <= 0:
        return shift_left(x, -by)
    return (arith.shrsi if signed else arith.shrui)(x, constant(x.type, by))


def bits_and(x: Value, mask: int) -> Value:
    return arith.andi(x, constant(x.type, mask))


def fma(a: Value, b: Value, c: Value) -> Value:
    """a * b + c, rounded once."""
    return vector.fma(a, b, c)


def square_root(x: Value) -> Value:
    """The square root of f32, or of a vector of it."""
    lanes = f"v{ir.VectorType(x.type).shape[0]}" if isinstance(x.type, ir.VectorType) else ""
    return llvm.call_intrinsic(x.type, f"llvm.sqrt.{lanes}f32", [x], [], [])


def broadcast(x: Value, lanes: int = LANES) -> Value:
    return vector.broadcast(vec(x.type, lanes), x)


def take(x: Value, elements: Sequence[int]) -> Value:
    """The elements of a vector at constant places."""
    return vector.shuffle(x, x, list(elements))


def at(base: Value, offset: Value | None = None, byte: int = 0) -> Value:
    """The address `base` + offset + byte, in bytes."""
    if offset is not None:
        base = llvm.getelementptr(pointer(), base, [offset], [_DYNAMIC], i(8), _INBOUNDS)
    if byte > _MOST_CONSTANT:
        return at(base, i64(byte))
    if byte:
        base = llvm.getelementptr(pointer(), base, [], [byte], i(8), _INBOUNDS)
    return base


def load(type_: ir.Type, address: Value) -> Value:
    """A load that asks for the element's alignment only."""
    return llvm.load(type_, address, alignment=_element_bytes(type_))


def store(value: Value, address: Value) -> None:
    llvm.store(value, address, alignment=_element_bytes(value.type))


def fetch_add(address: Value, value: int) -> Value:
    """Adds to an i64 that threads share; returns what it was. What a thread wrote before is seen by those that
    find the sum."""
    return llvm.atomicrmw(llvm.AtomicBinOp.add, address, i64(value), llvm.AtomicOrdering.acq_rel)


def load_acquire(address: Value) -> Value:
    """An i64 that other threads change."""
    return llvm.load(i(64), address, alignment=8, ordering=llvm.AtomicOrdering.acquire)


def pause() -> None:
    """Tells an x86 that the thread only waits."""
    llvm.call_intrinsic(None, "llvm.x86.sse2.pause", [], [], [])


def gather(base: Value, index: Value) -> Value:
    """The f32 at base + 4 * index, for every element of a vector<16xi32>."""
    addresses = llvm.getelementptr(vec(pointer()), base, [index], [_DYNAMIC], f32(), _INBOUNDS)
    return llvm.intr_masked_gather(vec(f32()), addresses, constant(vec(i(1)), 1), [], 4)


def constant_array(name: str, element: ir.Type, values: NDArray[np.int32] | NDArray[np.float32]) -> None:
    """Defines a constant array in the module at the insertion point."""
    array = ir.Type.parse(f"!llvm.array<{len(values)} x {element}>")
    data = ir.DenseElementsAttr.get(values, type=ir.RankedTensorType.get([len(values)], element))
    llvm.mlir_global(array, name, ir.Attribute.parse("#llvm.linkage<private>"), constant=True, value=data)


def look_up(name: str, type_: ir.Type, index: Value) -> Value:
    """The element, or the vector, at an index of a constant array of 32-bit elements."""
    return load(type_, at(llvm.mlir_addressof(pointer(), name), mul(index, 4)))


def to_bf16(low: Value, high: Value) -> Value:
    """Two vector<16xf32> to one vector<32xbf16>, by AVX512_BF16, which makes zeros of subnormals."""
    type_ = vec(ir.BF16Type.get(), 2 * LANES)
    return llvm.call_intrinsic(type_, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", [high, low], [], [])


def dot_bf16(a: Value, b: Value, c: Value) -> Value:
    """c + the products of two vector<32xbf16>, neighbours added: vector<16xf32>."""
    return llvm.call_intrinsic(c.type, "llvm.x86.avx512bf16.dpbf16ps.512", [c, a, b], [], [])


def dot_i16(a: Value, b: Value, wide: bool) -> Value:
    """The products of two vector<32xi16>, neighbours added: vector<16xi32>. wide: by AVX512BW, at once; else by
    AVX2."""
    if wide:
        return llvm.call_intrinsic(vec(i(32)), "llvm.x86.avx512.pmaddw.d.512", [a, b], [], [])
    halves = [range(start, start + LANES) for start in (0, LANES)]
    kind, name = vec(i(32), LANES // 2), "llvm.x86.avx2.pmadd.wd"
    low, high = (llvm.call_intrinsic(kind, name, [take(a, half), take(b, half)], [], []) for half in halves)
    return vector.shuffle(low, high, list(range(LANES)))


def sum_of(values: Value) -> Value:
    """The sum of a vector's elements, in any order."""
    return vector.reduction(f32(), vector.CombiningKind.ADD, values, fastmath=arith.FastMathFlags.reassoc)


def round_to(value: Value, element: ir.Type) -> Value:
    """f32, or a vector of it, rounded to the nearest number of a type, ties to even."""
    if element == f32():
        return value
    vectors = isinstance(value.type, ir.VectorType)
    return arith.truncf(vec(element, ir.VectorType(value.type).shape[0]) if vectors else element, value)


def sum_each(vectors: Sequence[Value]) -> Value:
    """The sums of 1, 2, 4, 8 or 16 vectors' elements, in any order: a vector with as many elements.

    The halves of two vectors are added into one vector, which then has half of its elements from each; and so on. The
    same additions then fold what is left of each.
    """
    left, width = list(vectors), LANES  # elements of a vector that are still to be added up
    while width > 1:
        half = width // 2
        low = [start + e for start in range(0, ir.VectorType(left[0].type).shape[0], width) for e in range(half)]
        pairs = [(left[0], left[0])]
        if len(left) > 1:
            low += [LANES + e for e in low]
            pairs = list(zip(left[::2], left[1::2]))
        high = [e + half for e in low]
        left = [arith.addf(vector.shuffle(a, b, low), vector.shuffle(a, b, high)) for a, b in pairs]
        width = half
    return left[0]


def _element_bytes(type_: ir.Type) -> int:
    element = element_type(type_)
    if element == pointer():
        return 8
    width = ir.IntegerType(element).width if isinstance(element, ir.IntegerType) else ir.FloatType(element).width
    return width // 8


def scratch(nbytes: int) -> Value:
    """Stack memory on a cache line. Only at the entry of a function: a loop would eat the stack."""
    return llvm.alloca(pointer(), i64(nbytes), i(8), alignment=64)


@contextmanager
def loop(
    start: Value | int, stop: Value | int, step: int = 1, carried: Sequence[Value] = (), unroll: bool = False
) -> Generator[Loop]:
    """`for index in range(start, stop, step)`, with loop-carried values.

    LLVM may unroll it if `unroll`. Else it stays as written: it is in vectors already, and LLVM's guesses
    would take as long as all the rest of the compilation.
    """
    bounds = [i64(b) if isinstance(b, int) else b for b in (start, stop, step)]
    op = scf.ForOp(*bounds, list(carried))
    if not unroll:
        op.operation.attributes["loop_annotation"] = ir.Attribute.parse(
            "#llvm.loop_annotation<disableNonforced = true>"
        )
    with ir.InsertionPoint(op.body):
        body = Loop(op)
        yield body
        scf.YieldOp(body.carried)
    body.carried = list(op.results)


class Loop:
    """Inside: `index`, and the `carried` values, to be replaced by the next round's. After: the last."""

    def __init__(self, op: Any) -> None:
        self.index: Value = op.induction_variable
        self.carried: list[Value] = list(op.inner_iter_args)


class While:
    """A `loop_while`: `carried` as in a `Loop`."""

    def __init__(self, value: Value) -> None:
        self.carried: list[Value] = [value]


@contextmanager
def loop_while(start: Value, condition: Callable[[Value], Value]) -> Generator[While]:
    """A loop that carries one value and goes on as long as the condition on it holds."""
    op = scf.WhileOp([start.type], [start])
    before, after = (region.blocks.append(start.type) for region in op.regions)
    with ir.InsertionPoint(before):
        scf.ConditionOp(condition(before.arguments[0]), [before.arguments[0]])
    with ir.InsertionPoint(after):
        body = While(after.arguments[0])
        yield body
        scf.YieldOp(body.carried)
    body.carried = list(op.results)


@contextmanager
def when(condition: Value) -> Generator[None]:
    op = scf.IfOp(condition)
    with ir.InsertionPoint(op.then_block):
        yield
        scf.YieldOp([])


def less(a: Value, b: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)
