"""Every code of every format, in every register position and both halves, decodes to exactly its value.

One kernel per format: a thread has the words of a run, decodes every register of it to every type, and stores the
pairs; values of a table come from a constant array and from a table in shared memory. Bits of the words that do not
belong to the codes are random, so that a mask too wide shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tables import table

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, gpu, ir, llvm, new_context
from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.dtypes import DType, all_names, dtype
from lowbit.dialect.formats.packing import Piece, run_of
from lowbit.dialect.formats.raw_codes import can_defer_offset, deferred_offset, raw_exponents, raw_lows
from lowbit.dialect.formats.reals import REALS
from lowbit.dialect.formats.recipes import compute_element, exponent, magic, place
from lowbit.dialect.layouts.shared_memory import BANKS
from lowbit.dialect.types import format_attr
from lowbit.passes.codegen.lower_to_llvm import LowerToLLVM
from lowbit.passes.codegen.ptx import emit_ptx, translate
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.lower_dequant import LowerDequant
from lowbit.passes.lowering.tables import words as table_words
from lowbit.passes.targets import parse_target
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.torch_types import TORCH

THREADS = 1024
TARGETS = ("sm_80", "sm_90a")
ELEMENTS = ("f16", "bf16", "f32")

FORMATS = [
    *map(dtype, all_names()),
    *(dtype(f"lut{bits}", table(bits)) for bits in range(1, 9)),
    dtype("lut4", table(4, 2.0**18)),  # beyond f16
    dtype("lut5", table(5, 2.0**-18)),  # where f16 has few bits left
    dtype("lut2", (0.0, -0.0, 0.0, 0.0)),
]


@dataclass(frozen=True)
class Variant:
    """A type to decode into, and the power of two that is left to the kernel's scale."""

    element: str
    exponent: int
    shared: bool = False  # looked up in shared memory


def variants(t: DType) -> list[Variant]:
    """What kernels ask for, and the plain values where the type holds them all."""
    found: list[Variant] = []
    for element in ELEMENTS:
        if element == "f16" and compute_element(t, "f16") != "f16":
            continue
        found.append(Variant(element, exponent(t, element)))
        if t.kind == "table":
            found.append(Variant(element, exponent(t, element), shared=True))
        elif exponent(t, element):
            found.append(Variant(element, 0))
    return found


def decode_module(t: DType) -> ir.Module:
    """@decode(words, tables, out0, out1, ...): words int32 [registers, pieces, threads], each register with its own;
    tables as they shall be in shared memory; an output per variant, [registers, threads, 2]."""
    module = ir.Module.create()
    outputs = variants(t)
    space = emit.pointer(1)
    with ir.InsertionPoint(module.body):
        inner = gpu.GPUModuleOp("decode_module").regions[0].blocks.append()
    with ir.InsertionPoint(inner):
        emit.define(
            "llvm.mlir.global external @memory() {addr_space = 3 : i32, alignment = 1024 : i64} : !llvm.array<0 x i8>"
        )
        type_ = ir.FunctionType.get([space] * (2 + len(outputs)), [])
        function = gpu.GPUFuncOp(ir.TypeAttr.get(type_), sym_name="decode", kernel=True)
    block = function.operation.regions[0].blocks.append(*type_.inputs)
    words, source, *results = block.arguments
    integer = emit.integer(64)
    with ir.InsertionPoint(block):
        thread = arith.index_cast(emit.integer(), gpu.thread_id(gpu.Dimension.x))
        column = arith.muli(arith.remui(thread, emit.constant(BANKS)), emit.constant(4))
        memory, place = llvm.mlir_addressof(emit.pointer(3), "memory"), arith.muli(thread, emit.constant(4))
        for start in range(0, 4 * tables_of(t).size, 4 * THREADS):
            word = llvm.load(emit.integer(), emit.offset_bytes(source, dynamic=place, static=start))
            llvm.store(word, emit.offset_bytes(memory, dynamic=place, static=start), alignment=4)
        gpu.barrier()
        tables = [v for v in outputs if v.shared]
        row = 0
        for register, pieces in enumerate(run_of(t.bits)):
            read = emit.offset_bytes(words, dynamic=arith.muli(thread, emit.constant(4)))
            given = [
                llvm.load(emit.integer(), emit.offset_bytes(read, static=4 * THREADS * (row + i)))
                for i in range(len(pieces))
            ]
            row += len(pieces)
            number = ir.IntegerAttr.get(integer, register)
            for variant, result in zip(outputs, results):
                vector = ir.VectorType.get([2], ir.Type.parse(variant.element))
                power = ir.IntegerAttr.get(integer, variant.exponent)
                if variant.shared:
                    table = emit.offset_bytes(memory, static=4 * tables_of(t)[: tables.index(variant)].size)
                    value = ops.LookupPairOp(table, column, given, format_attr(t), number, vector).result
                else:
                    value = ops.DecodePairOp(given, format_attr(t), number, power, vector).result
                size = 8 if variant.element == "f32" else 4
                write = emit.offset_bytes(result, dynamic=arith.muli(thread, emit.constant(size)))
                llvm.store(value, emit.offset_bytes(write, static=size * THREADS * register), alignment=size)
        gpu.return_([])
    return module


def tables_of(t: DType) -> np.ndarray:
    """The tables of the variants that have one, int32 [tables, words]: every entry 32 times, and zeros to fill up."""
    tables = [(DecodeTable(t, v.element), v.exponent) for v in variants(t) if v.shared]
    size = max((table.bytes // 4 for table, _ in tables), default=0)
    result = np.zeros((len(tables), -(-size // THREADS) * THREADS), np.uint32)
    for row, (each, power) in zip(result, tables):
        row[: each.bytes // 4] = np.repeat(table_words(each, power), BANKS)
    return result


def decode_llvm(t: DType) -> str:
    """LLVM IR of the kernel."""
    context = new_context()
    ops.register(context)
    with context, ir.Location.unknown():
        module = decode_module(t)
        module.operation.verify()
        LowerDequant().run(module)
        LowerToLLVM().run(module)
        return translate(module)


def pairs_of_codes(t: DType) -> np.ndarray:
    """[threads, 2]: all pairs of up to 5 bits; of more, all codes in both halves with ever different partners."""
    thread = np.arange(THREADS)
    low = thread % t.codes
    return np.stack([low, (thread // t.codes + 37 * low) % t.codes], axis=1)


def words_of_codes(t: DType, pairs: np.ndarray, pieces: tuple[Piece, ...]) -> np.ndarray:
    """The words [pieces, threads] that hold the pairs in these pieces."""
    rng = np.random.default_rng(0)
    stored = pairs ^ (t.codes // 2) if t.kind == "int" else pairs  # offset binary
    words = rng.integers(0, 1 << 32, (len(pieces), THREADS), dtype=np.uint64)
    for word, piece in zip(words, pieces):
        for half in range(2):
            at, mask = piece.shift + 16 * half, (1 << piece.bits) - 1
            field = (stored[:, half] >> piece.low) & mask
            word[:] = word & ~np.uint64(mask << at) | field.astype(np.uint64) << np.uint64(at)
    return words.astype(np.uint32)


def rounded(values: np.ndarray, element: str) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(TORCH[element])


@pytest.mark.parametrize("t", FORMATS, ids=lambda t: f"{t.name}-{t.max:.2g}" if t.kind == "table" else t.name)
def test_every_code_decodes_to_its_value(t: DType) -> None:
    llvm_ir, pairs, run = decode_llvm(t), pairs_of_codes(t), run_of(t.bits)
    assert all(len(np.unique(pairs[:, half])) == t.codes for half in range(2))
    words = np.concatenate([words_of_codes(t, pairs, pieces) for pieces in run])
    for target in TARGETS:
        outputs = [torch.zeros(len(run), THREADS, 2, dtype=TORCH[v.element]) for v in variants(t)]
        memory = [output.view(-1).view(torch.uint8).numpy() for output in outputs]
        emulator = Emulator(emit_ptx(llvm_ir, parse_target(target)))
        tables = tables_of(t)
        emulator.launch("decode", block=THREADS, args=[words, tables, *memory], shared_bytes=tables.nbytes)
        for variant, output in zip(variants(t), outputs):
            values = t.values() * 2.0**-variant.exponent
            expected = rounded(values, variant.element)
            if t.kind != "table":
                assert np.array_equal(expected.double().numpy(), values, equal_nan=True), "the type holds them all"
            wanted = expected[torch.from_numpy(pairs)].expand_as(output)
            same = (output == wanted) & (output.signbit() == wanted.signbit())
            wrong = ~(same | output.isnan() & wanted.isnan())
            if wrong.any():
                register, thread, half = wrong.nonzero()[0].tolist()
                pytest.fail(
                    f"{target} {variant}: code {pairs[thread, half]:#x} in register {register}, half {half} "
                    f"gave {output[register, thread, half]}, not {wanted[register, thread, half]} "
                    f"({int(wrong.sum())} wrong)"
                )


@pytest.mark.parametrize("t", [t for t in FORMATS if t.kind == "table"], ids=lambda t: t.name)
@pytest.mark.parametrize("element", ELEMENTS)
def test_lookups_have_no_bank_conflicts(t: DType, element: str) -> None:
    """Whatever the codes of a warp's lanes, their words are in different banks; and every code has an entry."""
    table = DecodeTable(t, element)
    entries, lanes = table.shape
    assert table.bytes <= 32768 and len({tuple(codes) for codes in table.codes().tolist()}) == entries
    assert {codes for row in table.codes().tolist() for codes in row} == set(range(t.codes))
    indices = np.random.default_rng(0).integers(0, entries, BANKS)
    words = lanes * indices + np.arange(BANKS)  # one a lane, each in a bank of its own
    assert sorted(words % BANKS) == list(range(BANKS))


def shifts_of(t: DType, element: str) -> int:
    """Shifts of words for a run decoded by magic exponents."""
    fields = [
        (piece.word, f.shift)
        for register, pieces in enumerate(run_of(t.bits))
        for f in magic(t, REALS[element], register, 0, t.bits).fields
        for piece in [pieces[f.piece]]
    ]
    return len({(word, shift) for word, shift in fields if shift})


@pytest.mark.parametrize(
    ("weight", "element", "shifts"),
    [
        ("u1", "f16", 1),  # ten codes of sixteen as they are, six in a word shifted once
        ("u2", "f16", 1),
        ("u3", "f16", 3),  # one a word: its spare bit comes with it to where the sixteenth code has it
        ("u3", "bf16", 6),
        ("u4", "f16", 1),
        ("u5", "f16", 5),
        ("u7", "f16", 12),
        ("u8", "f16", 1),
    ],
)
def test_shifts_are_shared(weight: str, element: str, shifts: int) -> None:
    assert shifts_of(dtype(weight), element) == shifts


@pytest.mark.parametrize(
    ("bits", "lows", "shifts"),
    [(1, (0, 1), 7), (2, (0, 2), 3), (3, (0, 3), 9), (4, (0, 4), 1), (5, (0, 5), 11), (8, (0, 0), 1)],
)
def test_bare_codes_are_in_two_places(bits: int, lows: tuple[int, int], shifts: int) -> None:
    """Even registers of a run in one, odd ones in the other, and no other choice needs fewer shifts."""
    moved = {
        (pieces[f.piece].word, f.shift)
        for register, pieces in enumerate(run_of(bits))
        for f in place(dtype(f"u{bits}"), register, 0, bits, lows[register % 2])
    }
    assert raw_lows(bits) == lows
    assert len({(word, shift) for word, shift in moved if shift}) == shifts
    assert raw_exponents(dtype(f"u{bits}")) == (24 - lows[0], 24 - lows[1])


@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize("bits", range(1, 7))
def test_biases_are_small(bits: int, element: str) -> None:
    t, real = dtype(f"u{bits}"), REALS[element]
    assert can_defer_offset(t, element)
    assert all(1 << bits <= deferred_offset(t, real, register) <= 128 for register in range(len(run_of(bits))))
