"""Rules of `lower-tiles` for views of device memory, buffers in shared memory, loads and stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm, nvvm
from lowbit.dialect.errors import PassError
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import UNIT, Global, Reg, Shared, element_bits, read_layout, read_strings
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Access, Place, first_replica
from lowbit.passes.lowering.context import ALIGN, CLUSTERS, LoweringContext, either, when
from lowbit.passes.lowering.fragment import Fragment
from lowbit.passes.lowering.registry import lowers

_SWIZZLE_ALIGN = 1024  # bytes: eight rows


@lowers(ops.GlobalViewOp)
def global_view(op: Any, c: LoweringContext) -> None:
    view = Global.of(op.result.type)
    dynamic = [c.scalars[v] for v in op.sizes]
    sizes = tuple(dynamic.pop(0) if n < 0 else emit.constant(n) for n in view.shape)
    c.places[op.result] = Place(view, c.scalars[op.pointer], sizes)


@lowers(ops.AllocSharedOp)
def alloc_shared(op: Any, c: LoweringContext) -> None:
    c.places[op.result] = allocated(op.result, c)


def allocated(result: Any, c: LoweringContext) -> Place:
    """Returns a new buffer of the type of an SSA value, which is freed by the value's name."""
    buffer = Shared.of(result.type)
    start = c.shared.allocate(result, buffer.bytes, _SWIZZLE_ALIGN if buffer.swizzle else ALIGN)
    sizes = tuple(emit.constant(n) for n in buffer.shape)
    return Place(buffer, emit.offset_bytes(c.shared_base, static=start), sizes)


@lowers(ops.FreeSharedOp)
def free_shared(op: Any, c: LoweringContext) -> None:
    c.shared.free(op.buffer)


@lowers(ops.StageOp)
def stage(op: Any, c: LoweringContext) -> None:
    whole = c.places[op.buffer]
    stride = whole.type.strides[0] * (element_bits(whole.type.element) // 8)
    step = arith.muli(c.scalars[op.index], emit.constant(stride))
    base = emit.offset_bytes(whole.base, dynamic=step)
    c.places[op.result] = Place(Shared.of(op.result.type), base, whole.sizes[1:])


@lowers(ops.PeerOp, needs=CLUSTERS)
def peer(op: Any, c: LoweringContext) -> None:
    here = c.places[op.buffer]
    base = nvvm.mapa(emit.pointer(7), here.base, c.scalars[op.rank])
    c.places[op.result] = Place(here.type, base, here.sizes)


# -- loads and stores


def access(place: Place, layout: Layout, op: Any, c: LoweringContext) -> Access:
    """Returns the access of an operation with `offsets` and a `boundary`."""
    return Access(c.threads, place, layout, c.offsets(op), read_strings(op.boundary))


@lowers(ops.LoadOp)
def load(op: Any, c: LoweringContext) -> None:
    reg = Reg.of(op.result.type)
    if "skip" in read_strings(op.boundary):
        raise PassError("lower-tiles: a load cannot skip elements; use 'zero' or 'clamp'")
    fragment = _loaded(reg, access(c.places[op.source], reg.layout, op, c))
    c.pending.add_read(fragment)
    c.tiles[op.result] = fragment


def _loaded(reg: Reg, source: Access) -> Fragment:
    """Returns a tile that is read with the widest accesses that fit."""
    wide = reg.element == UNIT
    length = source.vector_length(1 if wide else max(1, 16 // source.bytes))
    scalar = emit.integer() if wide else ir.Type.parse(str(reg.element))
    per_load = 4 if wide else length
    type_ = ir.VectorType.get([per_load], scalar) if per_load > 1 else scalar
    alignment = source.bytes * (1 if wide else length)
    made: dict[int, Any] = {}

    def vector(first_slot: int) -> Any:
        if first_slot not in made:
            inside = source.inside(first_slot, "zero")
            made[first_slot] = _load_or_zero(type_, source.address(first_slot), alignment, inside)
        return made[first_slot]

    def register(i: int) -> Any:
        slot, part = (i // 4, i % 4) if wide else (i // length * length, i % length)
        value = vector(slot)
        return emit.element(value, part) if per_load > 1 else value

    return Fragment(reg, "word" if wide else "scalar", register)


@lowers(ops.GatherOp)
def gather(op: Any, c: LoweringContext) -> None:
    """A load for each element of a thread."""
    index, reg = c.tiles[op.index], Reg.of(op.result.type)
    address = _indexed(c.places[op.source], op, c)
    type_, alignment = ir.Type.parse(str(reg.element)), element_bits(reg.element) // 8

    def element(slot: int) -> Any:
        return llvm.load(type_, address(index.scalar(slot)), alignment=alignment)

    fragment = Fragment(reg, "scalar", element)
    c.pending.add_read(fragment)
    c.tiles[op.result] = fragment


@lowers(ops.ScatterOp)
def scatter(op: Any, c: LoweringContext) -> None:
    """A store for each element of a thread whose index is inside, or an addition that other threads can't divide."""
    c.pending.finish_reads()
    value, index, target = c.tiles[op.value], c.tiles[op.index], c.places[op.target]
    address, first = _indexed(target, op, c), first_replica(value.reg.layout, c.threads)
    alignment = element_bits(value.reg.element) // 8

    def write(slot: int, place: Any) -> None:
        if op.combine == "add":
            _add_to_shared(address(place), value.scalar(slot))
        else:
            llvm.store(value.scalar(slot), address(place), alignment=alignment)

    for slot in range(value.reg.layout.locals):
        place = index.scalar(slot)
        inside = arith.cmpi(arith.CmpIPredicate.ult, place, target.sizes[-1])
        keep = Access.all([x for x in (first, inside) if x is not None])
        value.scalar(slot)  # not under the condition: others may use the register
        when(keep, lambda s=slot, p=place: write(s, p))


def _add_to_shared(address: Any, number: Any) -> None:
    text = "red.shared.add.u32 [$0], $1;"
    llvm.inline_asm(None, [address, number], text, "r,r,~{memory}", has_side_effects=True, asm_dialect=0)


def _indexed(place: Place, op: Any, c: LoweringContext) -> Callable[[Any], Any]:
    """Returns what makes the address of an element of the last dim, by its index, at an operation's offsets."""
    *outer, last = place.type.strides
    row = place.base
    for offset, stride in zip(c.offsets(op), outer):
        row = emit.offset_bytes(row, dynamic=_in_bytes(offset, stride, place))
    return lambda index: emit.offset_bytes(row, dynamic=_in_bytes(index, last, place))


@lowers(ops.ReadIndexOp)
def read_index(op: Any, c: LoweringContext) -> None:
    """All threads load the same address."""
    place = c.places[op.source]
    address = place.base
    for offset, stride in zip(c.offsets(op), place.type.strides):
        address = emit.offset_bytes(address, dynamic=_in_bytes(offset, stride, place))
    c.scalars[op.result] = llvm.load(emit.integer(32), address, alignment=4)


def _in_bytes(index: Any, stride: int, place: Place) -> Any:
    """Returns index * stride in bytes, in the width of an address of a place."""
    wide = isinstance(place.type, Global)
    number = arith.extui(emit.integer(64), index) if wide else index
    return arith.muli(number, emit.constant(stride * (element_bits(place.type.element) // 8), 64 if wide else 32))


def _load_or_zero(type_: Any, address: Any, alignment: int, inside: Any | None) -> Any:
    """Reads memory if a condition holds, else zero; None: always reads."""
    if inside is None:
        return llvm.load(type_, address, alignment=alignment)
    (value,) = either(
        inside,
        [type_],
        lambda: [llvm.load(type_, address, alignment=alignment)],
        lambda: [llvm.mlir_zero(type_)],
    )
    return value


@lowers(ops.PrefetchOp)
def prefetch(op: Any, c: LoweringContext) -> None:
    source = access(c.places[op.source], read_layout(op.layout), op, c)
    for slot in range(0, source.layout.locals, source.vector_length(max(1, 16 // source.bytes))):
        text, address = "prefetch.global.L2 [$0];", source.address(slot)
        llvm.inline_asm(None, [address], text, "l", has_side_effects=True, asm_dialect=0)


@lowers(ops.StoreOp)
def store(op: Any, c: LoweringContext) -> None:
    c.pending.finish_reads()
    value = c.tiles[op.value]
    reg = value.reg
    wide = reg.element == UNIT
    target = access(c.places[op.target], reg.layout, op, c)
    length = target.vector_length(max(1, 16 // target.bytes))
    first = target.first_replica()
    for slot in range(0, reg.layout.locals, length):
        keep = Access.all([x for x in (first, target.inside(slot, "skip", "zero")) if x is not None])
        if wide:
            data = _vector(value.register, 4 * slot, 4)
        else:
            data = value.scalar(slot) if length == 1 else _vector(value.scalar, slot, length)
        address = target.address(slot)
        when(keep, lambda d=data, a=address: llvm.store(d, a, alignment=target.bytes * length))


def _vector(element: Callable[[int], Any], first: int, length: int) -> Any:
    """Returns a vector of `length` elements from `first` on."""
    elements = [element(first + i) for i in range(length)]
    vector = llvm.mlir_undef(ir.VectorType.get([length], elements[0].type))
    for i, x in enumerate(elements):
        vector = llvm.insertelement(vector, x, emit.constant(i))
    return vector
