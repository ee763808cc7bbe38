"""Formats with a table of values: how the table gets into shared memory, and lookups, there or in a constant array.

A kernel's main loop looks codes up in shared memory (`dialect.formats.decode_table`), where a pair costs one load
without bank conflicts. What is left is to bring its two codes next to each other, right where an address wants them. A
word holds the fields of several pairs, first codes in its lower half and second codes 16 bits above. Rotated by 16
minus the width of a field and mixed with itself, every other field from each, it has the two fields of every other pair
side by side (fields of four bits, from bit 0 on):

    word           a b c d  A B C D    pairs (a, A) .. (d, D)
    rotated by 12  . A B C  D . . .
    mixed          a A c C  ...        and with the mask inverted: . b B d  D ...

One rotation and two lop3 serve all pairs of the word (LLVM sees that they are the same), and a pair then takes a shift
and a lop3, which also puts in the lane's column. The spare bit of a half word of three-bit codes is the lowest of a
sixth field, cut off: where it lands, its partner is as far away as in any pair, and so the codes made of spare bits
take a shift and a lop3 per word. Lookups by prmt in registers would need 2.6 instructions per weight of four bits on
the ALU pipe, against 1.2 here, and with two and three bits about as many as this.

Without a table in shared memory (`decode_pair`: the dequantize kernel, whose blocks are too short to fill one) the same
indices go to a constant array in device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, gpu, ir, llvm
from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.packing import run_of
from lowbit.dialect.formats.reals import REALS, Real
from lowbit.dialect.formats.recipes import place
from lowbit.dialect.layouts.shared_memory import BANK_BYTES
from lowbit.dialect.types import Reg, read_format
from lowbit.passes.base import enclosing
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.context import LoweringContext, int_attr, text_attr, when
from lowbit.passes.lowering.fragment import Fragment
from lowbit.passes.lowering.registry import lowers

COLUMN_BITS = 7  # of an address: the word of a lane in an entry of 128 bytes
_LOADS = 16  # of entries that a thread has under way while it fills a table
_VECTOR = 16  # bytes that it stores at once


@lowers(ops.FillTableOp)
def fill_table(op: Any, c: LoweringContext) -> None:
    """Every thread writes 16 bytes, four copies of an entry or four entries, at a time."""
    c.pending.finish_reads()
    copies = c.places[op.buffer].type.shape[-1]
    table = DecodeTable(read_format(op.format), text_attr(op, "element"), copies)
    symbol = constant_table(c.shared_base.owner, table, int_attr(op, "exponent"))
    threads, vectors = c.threads_per_block, table.bytes // _VECTOR
    thread = c.thread_digit(threads)
    per_entry = vectors // table.shape[0]
    entry = arith.muli(arith.divui(thread, emit.constant(per_entry)), emit.constant(BANK_BYTES)) if per_entry else None
    place = arith.muli(thread, emit.constant(_VECTOR))
    start = emit.offset_bytes(c.places[op.buffer].base, dynamic=place)

    def load(first: int) -> Any:
        if entry is None:
            return emit.read_constant(symbol, place, 8 * _VECTOR, static=first * _VECTOR)
        word = emit.read_constant(symbol, entry, 32, static=first // per_entry * BANK_BYTES)
        vector = llvm.mlir_undef(ir.VectorType.get([4], emit.integer()))
        for i in range(4):
            vector = llvm.insertelement(vector, word, emit.constant(i))
        return vector

    def store(vector: Any, first: int) -> None:
        llvm.store(vector, emit.offset_bytes(start, static=first * _VECTOR), alignment=_VECTOR)

    whole = range(0, vectors - threads + 1, threads)
    for batch in (whole[i : i + _LOADS] for i in range(0, len(whole), _LOADS)):
        for first, vector in [(first, load(first)) for first in batch]:
            store(vector, first)
    if rest := vectors % threads:
        first = vectors - rest
        some = arith.cmpi(arith.CmpIPredicate.ult, thread, emit.constant(rest))
        when(some, lambda: store(load(first), first))
    gpu.barrier()


@lowers(ops.LookupBytesOp)
def lookup_bytes(op: Any, c: LoweringContext) -> None:
    """Each number by a load, which may meet others in a bank: there are few."""
    places, table = c.tiles[op.source], c.places[op.table]

    def number(slot: int) -> Any:
        offset = arith.muli(arith.extui(emit.integer(), places.scalar(slot)), emit.constant(BANK_BYTES))
        return llvm.load(ir.F32Type.get(), emit.offset_bytes(table.base, dynamic=offset), alignment=BANK_BYTES)

    result = Fragment(Reg.of(op.result.type), "scalar", number)
    c.pending.computed(result, [places])
    c.tiles[op.result] = result


def lower_lookup_pair(op: Any) -> Any:
    """The numbers of a lowbit.lookup_pair: from this lane's column of a table in shared memory."""

    def read(address: Any) -> Any:
        return llvm.load(emit.integer(), emit.offset_bytes(op.table, dynamic=address), alignment=4)

    return _numbers(op, read, COLUMN_BITS, op.column)


def lower_decode_pair(op: Any) -> Any:
    """The numbers of a lowbit.decode_pair: from an array in device memory."""
    table = DecodeTable(read_format(op.format), str(ir.VectorType(op.result.type).element_type))
    symbol = constant_table(op, table, int_attr(op, "exponent"))
    return _numbers(op, lambda address: emit.read_constant(symbol, address, 32), 2, emit.constant(0))


def _numbers(op: Any, read: Callable[[Any], Any], at: int, base: Any) -> Any:
    """`read` gets the addresses in bytes: an index from bit `at` on, or-ed with `base`."""
    vector = ir.VectorType(op.result.type)
    table = DecodeTable(read_format(op.format), str(vector.element_type))
    sources, register = list(op.words), int_attr(op, "register")
    if table.paired:
        return emit.bitcast(vector, read(_pair_address(table.format.bits, sources, register, at, base)))
    both, low = _both_codes(table.format, sources, register)
    mask = (table.shape[0] - 1) << at
    first, second = (read(emit.mask_or(emit.shift_right(both, low + 16 * half - at), mask, base)) for half in range(2))
    if table.element == "f32":
        return emit.pair(*(emit.bitcast(vector.element_type, number) for number in (first, second)))
    return emit.bitcast(vector, emit.select_bits(first, 0xFFFF, second))


def _pair_address(bits: int, sources: list[Any], register: int, at: int, address: Any) -> Any:
    """Or-s the index of a pair into an address, from bit `at` on."""
    for word, piece in zip(sources, run_of(bits)[register]):
        mixed = emit.select_bits(word, _every_other(bits, piece.shift), emit.rotate_right(word, 16 - bits))
        target = at + piece.low
        both = ((1 << piece.bits) - 1) * (1 | 1 << bits)
        address = emit.mask_or(emit.shift_right(mixed, piece.shift - target), both << target, address)
    return address


def _every_other(bits: int, shift: int) -> int:
    """A mask of the field at bit `shift` of a word's lower half and every other one from it, up and down."""
    return sum(((1 << bits) - 1) << at for at in range(shift % (2 * bits), 16, 2 * bits))


def _both_codes(t: DType, sources: list[Any], register: int) -> tuple[Any, int]:
    """A word with both codes, 16 bits apart, and where the first begins: where the pieces need the fewest shifts."""
    if len(sources) == 1:
        return sources[0], run_of(t.bits)[register][0].shift
    low = min(range(17 - t.bits), key=lambda low: sum(f.shift != 0 for f in place(t, register, 0, t.bits, low)))
    both: Any = None
    for field in place(t, register, 0, t.bits, low):
        word, mask = emit.shift_right(sources[field.piece], field.shift), field.mask * 0x10001
        both = emit.mask(word, mask) if both is None else emit.mask_or(word, mask, both)
    return both, low


def constant_table(op: Any, table: DecodeTable, exponent: int) -> str:
    """The symbol of the entries in device memory, defined in the module around an operation."""
    name = f"lowbit_table_{table.format.name}_{table.element}{'_pairs' if table.paired else ''}"
    module = enclosing(op, "gpu.module", "builtin.module")
    return emit.constant_array(module.regions[0].blocks[0], name, words(table, exponent), 32)


def words(table: DecodeTable, exponent: int) -> list[int]:
    """The entries: numbers times 2^-exponent, rounded to nearest even, as bit patterns of the element."""
    real = REALS[table.element]
    numbers = _bits(np.array(table.format.table) * 2.0**-exponent, real)[table.codes()]
    if real.bits == 32:
        return [int(n) for (n,) in numbers]
    return [int(n[0] | n[-1] << 16) for n in numbers]


def _bits(values: np.ndarray, real: Real) -> np.ndarray:
    """Bit patterns of the nearest numbers, int64; a bf16 is the upper half of an f32."""
    if real.name == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.int64)
    bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
    return bits if real.bits == 32 else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
