"""Register level: a pair of codes of one thread."""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from collections.abc import Sequence
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import expect, in_range, verifier
from lowbit.dialect.formats.packing import run_of
from lowbit.dialect.formats.raw_codes import OFFSETS
from lowbit.dialect.formats.reals import REALS
from lowbit.dialect.ops.common import I32, check_offset, check_shifted
from lowbit.dialect.optional import Choice
from lowbit.dialect.types import FormatAttr, Lowbit, read_format


class DecodePairOp(Lowbit.Operation, name="decode_pair", traits=[ext.Pure]):
    """Two codes of one thread as numbers, times 2^-exponent.

    Operand i is the word with piece i of register `register` of a run (`dialect.formats.packing`). The result is a
    vector of two f16, bf16 or f32. `offset` is as in `decode`.
    """

    words: Sequence[ext.Operand[I32]]
    format: FormatAttr
    register: ir.IntegerAttr
    exponent: ir.IntegerAttr
    offset = Choice(*OFFSETS)
    result: ext.Result[Any]

    @verifier
    def verify_invariants(op: Any) -> None:
        in_range(op.exponent, "exponent", -1022, 1023)
        _check_pair(op)
        check_offset(op.offset, read_format(op.format), str(ir.VectorType(op.result.type).element_type))


class DecodeShiftedPairOp(Lowbit.Operation, name="decode_shifted_pair", traits=[ext.Pure]):
    """Two integer codes of one thread, each plus its shift (see `decode`), times 2^-exponent.

    `shift` is a vector as the result; all else is as in `decode_pair`.
    """

    shift: ext.Operand[Any]
    words: Sequence[ext.Operand[I32]]
    format: FormatAttr
    register: ir.IntegerAttr
    exponent: ir.IntegerAttr
    result: ext.Result[Any]

    @verifier
    def verify_invariants(op: Any) -> None:
        in_range(op.exponent, "exponent", -1022, 1023)
        _check_pair(op)
        check_shifted(read_format(op.format))
        expect(op.shift.type == op.result.type, "shift", op.result.type, op.shift.type)


class LookupPairOp(Lowbit.Operation, name="lookup_pair", traits=[ext.Pure]):
    """Two codes of one thread as numbers, from a table in shared memory (`fill_table`).

    `table` points to it, `column` is the place of this lane in an entry, in bytes; `words` and `register` are as in
    `decode_pair`.
    """

    table: ext.Operand[Any]
    column: ext.Operand[I32]
    words: Sequence[ext.Operand[I32]]
    format: FormatAttr
    register: ir.IntegerAttr
    result: ext.Result[Any]

    @verifier
    def verify_invariants(op: Any) -> None:
        expect(str(op.table.type) == "!llvm.ptr<3>", "table", "!llvm.ptr<3>", op.table.type)
        format_ = read_format(op.format)
        expect(format_.kind == "table", "format", "one with a table of values", format_.name)
        _check_pair(op)


def _check_pair(op: Any) -> None:
    """The words and the register of a pair of codes, and its numbers."""
    run = run_of(read_format(op.format).bits)
    pieces = run[in_range(op.register, "register", 0, len(run) - 1)]
    expect(len(op.words) == len(pieces), "words", f"one per piece ({len(pieces)})", len(op.words))
    allowed = [f"vector<2x{real}>" for real in REALS]
    expect(str(op.result.type) in allowed, "result", " or ".join(allowed), op.result.type)
