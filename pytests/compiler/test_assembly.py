"""The assembly form of the dialect: what is printed can be read, by people and by `parse_module`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowbit.dialect import ops
from lowbit.dialect.assembly import parse_module, print_module, to_generic, to_own
from lowbit.dialect.assembly.declared import Declaration, declarations
from lowbit.dialect.assembly.lines import folded
from lowbit.dialect.assembly.statement import plain, read_generic, write_dict
from lowbit.dialect.assembly.tokens import Reader, SyntaxFault
from lowbit.dialect.bindings import ir, new_context
from lowbit.dialect.spec import Bilevel, MatmulSpec
from lowbit.dialect.top_k import TopK
from lowbit.dialect.types import Lowbit
from lowbit.passes.kernels.permute.family import permute_spec
from lowbit.passes.kernels.quantize.family import quantize_spec
from lowbit.passes.kernels.registry import FAMILIES, request
from lowbit.passes.opt.main import split_chunks
from lowbit.passes.pipeline import passes_to
from lowbit.passes.stages import GPU_STAGES
from lowbit.passes.targets import parse_target
from lowbit.passes.tensor_programs import tensor_program

U4 = MatmulSpec(256, 1024, "u4", group_size=128, zeros="int", bias=True)
BYTES = MatmulSpec(256, 1024, "u4", group_size=128, compute="i8")
LEVELS = MatmulSpec(256, 1024, "u4", group_size=32, zeros="offset", scale="u6", bilevel=Bilevel(groups=8))
TABLE = MatmulSpec(256, 1024, "nf4", group_size=64, outliers=True)
EXPERTS = MatmulSpec(4 * 256, 1024, "u4", group_size=128, experts=4)
EXPERTS_OF_BYTES = replace(EXPERTS, compute="i8", bias=True, epilogue="silu_mul")
LIT_TESTS = Path(__file__).parents[2] / "lit_tests"

KERNELS: dict[str, tuple[str, MatmulSpec, int, str]] = {  # family, spec, tokens and target
    "decode": ("decode", U4, 8, "sm_80"),
    "decode, one token": ("decode", LEVELS, 1, "sm_80"),
    "decode, wgmma": ("decode", MatmulSpec(4096, 4096, "u3", group_size=64), 16, "sm_90a"),
    "decode, outliers": ("decode", TABLE, 8, "sm_90a"),
    "decode_integer": ("decode_integer", MatmulSpec(256, 1024, "u2", group_size=128), 1, "sm_80"),
    "prefill": ("prefill", U4, 256, "sm_90a"),
    "prefill_in_order": ("prefill_in_order", replace(U4, invariant=True), 256, "sm_90a"),
    "prefill_mma_in_order": ("prefill_mma_in_order", replace(U4, zeros="float", invariant=True), 256, "sm_80"),
    "prefill_mma": ("prefill_mma", LEVELS, 128, "sm_80"),
    "dequantize": ("dequantize", TABLE, 0, "sm_80"),
    "prepack": ("prepack", U4, 0, "sm_80"),
    "eight_bit": ("eight_bit", BYTES, 16, "sm_80"),
    "eight_bit_prefill": ("eight_bit_prefill", BYTES, 256, "sm_90a"),
    "eight_bit_in_order": ("eight_bit_in_order", replace(BYTES, weight="i4", invariant=True), 256, "sm_90a"),
    "eight_bit_mma_in_order": ("eight_bit_mma_in_order", replace(BYTES, weight="i4", invariant=True), 256, "sm_80"),
    "eight_bit_prefill_mma": ("eight_bit_prefill_mma", BYTES, 128, "sm_80"),
    "experts": ("experts", EXPERTS, 128, "sm_90a"),
    "experts_mma": ("experts_mma", EXPERTS, 16, "sm_80"),
    "experts_decode": ("experts_decode", EXPERTS, 8, "sm_90a"),
    "eight_bit_experts": ("eight_bit_experts", EXPERTS_OF_BYTES, 128, "sm_90a"),
    "eight_bit_experts_mma": ("eight_bit_experts_mma", EXPERTS_OF_BYTES, 16, "sm_80"),
    "eight_bit_experts_decode": ("eight_bit_experts_decode", EXPERTS_OF_BYTES, 8, "sm_90a"),
    "top_k_experts": ("top_k_experts", replace(EXPERTS, top_k=TopK(2, "i64", "bf16")), 1, "sm_90a"),
    "permute": ("permute", permute_spec(1024, "f16"), 0, "sm_80"),
    "quantize": ("quantize", quantize_spec(1024, "f16", "i8"), 0, "sm_80"),
}


@contextmanager
def dialect() -> Iterator[None]:
    """A context that knows the dialect."""
    context = new_context()
    context.emit_error_diagnostics = True
    ops.register(context)
    with context, ir.Location.unknown():
        yield


def lower_to_tiles(kernel: str) -> ir.Module:
    """A kernel at stage tile."""
    name, spec, tokens, gpu = KERNELS[kernel]
    target, family = parse_target(gpu), FAMILIES[name]
    module = tensor_program(request(spec, target, family.candidates(spec, tokens, target)[0]))
    (stage,) = (stage for stage in GPU_STAGES if stage.name == "tile")
    for step in passes_to(stage, target):
        step.run(module)
    return module


def generic(module: Any) -> str:
    return module.operation.get_asm(print_generic_op_form=True)


def test_every_operation_is_declared():
    assert set(declarations()) == {operation.OPERATION_NAME for operation in Lowbit.operations}


def test_every_family_is_here():
    assert {family for family, *_ in KERNELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_are_printed_to_be_read(kernel):
    with dialect():
        module = lower_to_tiles(kernel)
        text = print_module(module)
        again = parse_module(text)
        assert generic(again) == generic(module)
        assert print_module(again) == text
    lines = text.splitlines()
    assert max(map(len, lines)) < 160
    assert '"lowbit.' not in text and "%arg" not in text
    constants = [line.partition(" = ")[2] for line in lines if re.search(r"= (arith|lowbit)\.constant ", line)]
    assert len(constants) == len(set(constants)) > 0
    (program,) = re.findall(r"lowbit\.program @\w+\((.*?)\)", text, re.DOTALL)
    assert "%y: !llvm.ptr<1>" in program or kernel in ("prepack", "quantize")
    assert re.search(r"%codes_(shared|global|tile)\b", text) or kernel in ("permute", "quantize")


def test_a_decode_kernel_names_what_it_moves():
    with dialect():
        text = print_module(lower_to_tiles("decode, wgmma"))
    for line in (
        "lowbit.program @matmul(%x: !llvm.ptr<1>, %codes: !llvm.ptr<1>, %scales: !llvm.ptr<1>, %y: !llvm.ptr<1>,",
        "%x_shared = lowbit.alloc_shared : !shared_",
        "%codes_tile = lowbit.load %codes_global[",
        "%decode = lowbit.decode %view {exponent = 0",
        "lowbit.store %cast_",
    ):
        assert line in text


def lit_inputs() -> Iterator[str]:
    """Every part of every file of lit_tests, but for those of tests of errors."""
    for file in sorted(LIT_TESTS.rglob("*.mlir")):
        if not file.stem.endswith("_invalid"):
            yield from split_chunks(file.read_text())


def test_lit_tests_go_there_and_back():
    with dialect():
        for text in lit_inputs():
            module = parse_module(text)
            assert generic(parse_module(print_module(module))) == generic(module)


def made_up(declaration: Declaration, many: int) -> str:
    """An operation in the generic form, with `many` operands where their number is open, and all attributes given."""
    count = len(declaration.singles) + (many if declaration.variadic else 0)
    names = [*declaration.operands(count), *declaration.results]
    types = [declaration.fixed.get(name, f"!t{i}") for i, name in enumerate(names)]
    attributes = dict.fromkeys(declaration.defaults, "[7]") | {"other": "3", "unit": None}
    if declaration.has_boundary:
        attributes["boundary"] = "[" + ", ".join(['"zero"', '"none"', '"skip"'][:many]) + "]"
    if declaration.has_symbol:
        attributes |= {"sym_name": '"f"', "params": '["n"]'}
    if (segments := declaration.segments(count)) is not None:
        attributes["operandSegmentSizes"] = segments
    operands = ", ".join(f"%{i}" for i in range(count))
    region = " ({\n^bb0(%n: i32):\n})" if declaration.has_region else ""
    inputs, results = ", ".join(types[:count]), ", ".join(types[count:])
    return f'"{declaration.name}"({operands}){region} {write_dict(attributes)} : ({inputs}) -> ({results})'


def parts(text: str) -> tuple[Any, ...]:
    """What an operation in the generic form says, in whatever order."""
    reader = Reader.of(text)
    s = read_generic(declarations()[reader.take().text[1:-1]], reader)
    return s.operands, s.attributes, [r.arguments for r in s.regions], s.operand_types, s.result_types


@pytest.mark.parametrize("many", [0, 1, 3])
@pytest.mark.parametrize("name", declarations())
def test_every_operation_has_its_own_form(name, many):
    text = made_up(declarations()[name], many)
    own = to_own(text)
    assert own.startswith(name) and "operandSegmentSizes" not in own
    assert parts(to_generic(own)) == parts(text)


def test_what_has_no_own_form_stays_generic():
    """An operation without its attributes, which the verifier refuses: printing IR that is wrong must not fail."""
    wrong = '"lowbit.copy_async"(%x, %b, %i) {operandSegmentSizes = array<i32: 1, 1, 1>} : (!x, !b, i32) -> ()'
    assert to_own(wrong) == wrong
    assert to_own('"lowbit.add"(%a) : (!t) -> !t') == '"lowbit.add"(%a) : (!t) -> !t'
    assert to_own('"lowbit.wait"() {pending = 1 : i64} : () -> ()') == "lowbit.wait {pending = 1}"


@pytest.mark.parametrize(
    ("text", "message", "position"),
    [
        ("  lowbit.wiat {pending = 1}", "there is no operation lowbit.wiat; did you mean lowbit.wait?", 2),
        ("lowbit.add %a : !t", "lowbit.add: expected operands a, b; 1 are there", 14),
        ("lowbit.add %a, %b, %c : !t", "lowbit.add: expected operands a, b; 3 are there", 22),
        ("lowbit.add %a, %b", "lowbit.add: expected ':' and types", 17),
        ("lowbit.add %a, %b : !t, !t", "lowbit.add: expected the types of a, b -> result, got !t, !t", 18),
        ("lowbit.load %a[%i : !t", "nothing closes '['", 14),
    ],
)
def test_faults_say_what_is_expected_and_where(text, message, position):
    with pytest.raises(SyntaxFault) as raised:
        to_generic(text)
    assert str(raised.value).startswith(message) and raised.value.position == position


def test_names_in_texts_and_comments_are_none_of_ours():
    text = '// lowbit.wait {\n"test.op"() {lowbit.wait = 1, s = "lowbit.wait"} : () -> ()\n'
    assert to_generic(text) == to_own(text) == text


def test_rewriting_keeps_lines():
    text = "lowbit.program @f(\n  %n: i32)\n  attributes {threads = 32,\n  workspace = 0} {\n  lowbit.return\n}\n%end\n"
    assert to_generic(text).splitlines()[6] == "%end"
    assert to_generic(text).splitlines()[4].strip().startswith('"lowbit.return"()')


@pytest.mark.parametrize(
    ("bits", "number"),
    [("4B800000", "16777216.0"), ("3DCCCCCD", "0.10000000149011612"), ("00000001", "1.401298464324817e-45"),
     ("60AD78EC", "1.0000000200408773e+20"), ("7F800000", "0x7F800000"), ("FFC00000", "0xFFC00000")],
)  # fmt: skip
def test_numbers_are_exact(bits, number):
    assert plain(f"value = 0x{bits} : f32") == f"value = {number} : f32"
    with dialect():
        assert ir.Attribute.parse(f"{number} : f32") == ir.Attribute.parse(f"0x{bits} : f32")


def test_lines_are_folded_where_nothing_changes():
    line = f'  %a = lowbit.load %x {{layout = "{"a, b : c " * 8}"}} : !{"a" * 50}, !b -> !c'
    assert folded(line).splitlines()[1].startswith("      : !aaa")
    assert " ".join(part.strip() for part in folded(line).splitlines()) == line.strip()
    text = f'"{"a, " * 100}"'
    assert folded(text) == text
