"""Verifiers and lowering rules: a mistake of theirs is never taken for a valid operation, and none is missing."""

from __future__ import annotations

import re

import pytest

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir, new_context
from lowbit.dialect.ops import tiles
from lowbit.dialect.types import Lowbit
from lowbit.passes.lowering.registry import RULES, import_rules

LOAD_MATRIX = """
!buffer = !lowbit.shared<[8, 16], f32, [24, 1], 0>
!tile = !lowbit.reg<[8, 16], f32, "local(1, 2).spatial(8, 4).local(1, 2)">
func.func @f(%b: !buffer, %m: i32) {
  %0 = "lowbit.load_matrix"(%b, %m) : (!buffer, i32) -> !tile
  return
}
"""


def parse(text: str) -> ir.Module:
    context = new_context()
    ops.register(context)
    with context, ir.Location.unknown():
        return ir.Module.parse(text)


def test_a_key_error_in_a_verifier_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 32-bit element is refused; a helper that fails before it is checked must not let it pass."""
    with pytest.raises(ir.MLIRError, match="of 16 or 8 bits"):
        parse(LOAD_MATRIX)

    def planted(element: object) -> int:
        return {"f16": 16}[str(element)]

    monkeypatch.setattr(tiles, "element_bits", planted)
    with pytest.raises(KeyError, match="f32"):
        parse(LOAD_MATRIX)


DECODE = """
func.func @f(%w: i32) {
  %0 = "lowbit.decode_pair"(%w)
    {format, register = 0, exponent = 0, offset = "raw", operandSegmentSizes = array<i32: 1>} : (i32) -> vector<2xf16>
  return
}
"""
PROGRAM = '''"lowbit.program"() ({
}) {sym_name = "p", threads = 32, grid = "p", params = [], workspace = 0} : () -> ()'''


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (DECODE, "format: expected #lowbit.format<name, table>, got unit"),
        (PROGRAM, 'grid: expected a list, got "p"'),
    ],
    ids=["format", "grid"],
)
def test_attributes_of_another_kind_are_refused(program: str, message: str) -> None:
    with pytest.raises(ir.MLIRError, match=re.escape(message)):
        parse(program)


@pytest.mark.parametrize("sizes", ["-1, 1, 0, 0", "1, 1, -1, 1", "1, 1, 1, 0"])
def test_groups_of_operands_that_do_not_fit_are_refused(sizes: str) -> None:
    program = f"""
!weight = !lowbit.packed<[16, 64], #lowbit.format<"u4", []>, 32, "none", "f16">
func.func @f(%x: tensor<?x64xf16>, %w: !weight) {{
  %y = "lowbit.matmul"(%x, %w) {{operandSegmentSizes = array<i32: {sizes}>}}
      : (tensor<?x64xf16>, !weight) -> tensor<?x16xf16>
  return
}}
"""
    with pytest.raises(ir.MLIRError, match="operandSegmentSizes: expected array<i32: 1, 1, any, any>, 2 in all"):
        parse(program)


def test_every_operation_of_programs_has_a_rule() -> None:
    """What is not of the tensor level, of registers or around a program is lowered by a registered rule."""
    import_rules()
    elsewhere = {"matmul", "dequantize", "prepack", "program", "decode_pair", "decode_shifted_pair", "lookup_pair"}
    elsewhere |= {"pipeline", "permute", "quantize", "quantized_matmul", "expert_matmul", "quantized_expert_matmul"}
    elsewhere |= {"top_k_expert_matmul"}
    names = {op.OPERATION_NAME for op in Lowbit.operations} - {f"lowbit.{name}" for name in elsewhere}
    assert len(names) > 50 and sorted(names - RULES.keys()) == []
