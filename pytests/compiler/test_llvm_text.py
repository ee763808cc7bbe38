"""LLVM IR from MLIR, and its text across versions of LLVM."""

from __future__ import annotations

import re

import numpy as np
import pytest
from llvm_programs import parse
from numpy.typing import NDArray

from lowbit.dialect.bindings import ir
from lowbit.dialect.errors import PassError
from lowbit.passes.codegen.llvm import binding
from lowbit.passes.codegen.llvm_text import downgrade
from lowbit.passes.codegen.ptx import translate

UNSIGNED = {"half": np.uint16, "bfloat": np.uint16, "float": np.uint32, "double": np.uint64}
MLIR_TYPE = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64"}
MANTISSA = {"half": 10, "bfloat": 7, "float": 23, "double": 52}


def bit_patterns(kind: str) -> NDArray[np.unsignedinteger]:
    """16 bits: all that are positive, and some negative; wider types: every class, and random ones."""
    unsigned = UNSIGNED[kind]
    bits = 8 * unsigned().itemsize
    if bits == 16:
        return np.concatenate([np.arange(1 << 15), np.arange(1 << 15, 1 << 16, 31)]).astype(unsigned)
    random = np.random.default_rng(0).integers(0, 1 << bits, 1500, dtype=unsigned, endpoint=False)
    if bits == 32:
        decimals = np.float32([0.1, 1 / 3, 1e10, 1e-45, 1e-38, 3.4028235e38, 16777216.0, 123456.789])
    else:
        decimals = np.float64([0.1, 1 / 3, 1e22, 1e23, 5e-324, 2.2250738585072011e-308, 1.7976931348623157e308])
    one = np.array(1, unsigned)
    infinity = np.array(((1 << (bits - 1 - MANTISSA[kind])) - 1) << MANTISSA[kind], unsigned)
    quiet = one << unsigned(MANTISSA[kind] - 1)
    special = [
        0 * one,
        one,
        infinity,
        infinity | one,
        infinity | quiet,
        infinity | quiet | one,
        infinity - one,
    ]
    positive = np.array([*special, *decimals.view(unsigned)], unsigned)
    return np.concatenate([positive, positive | one << unsigned(bits - 1), random])


@pytest.mark.parametrize("kind", UNSIGNED)
def test_every_float_literal_keeps_its_bits(context: ir.Context, kind: str) -> None:
    """MLIR prints the constants, LLVM 22 reads them, and says which bits it read."""
    expected = bit_patterns(kind)
    size, element = len(expected), MLIR_TYPE[kind]
    module = ir.Module.parse(
        f'llvm.mlir.global constant @c(dense<"0x{expected.tobytes().hex()}"> : tensor<{size}x{element}>) : '
        f"!llvm.array<{size} x {element}>"
    )
    text = downgrade(translate(module))
    literals = re.findall(rf"{kind} ([^,\]]+)", text.split(f"[{size} x {kind}]", 1)[1].splitlines()[0])
    integer = f"i{8 * expected.itemsize}"
    globals_ = [f"@c{i} = constant {integer} bitcast ({kind} {x} to {integer})" for i, x in enumerate(literals)]
    parsed = str(binding().parse_assembly("\n".join(globals_)))
    read = [int(x) for x in re.findall(rf"constant {integer} (-?\d+)", parsed)]
    signed = expected.view(expected.dtype.str.replace("u", "i"))
    assert read == signed.tolist()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  %5 = fadd float %0, 1.000000e-01", "  %5 = fadd float %0, 0x3FB99999A0000000"),
        ("  %9 = phi half [ %1, %2 ], [ -inf, %3 ]", "  %9 = phi half [ %1, %2 ], [ 0xHFC00, %3 ]"),
        ("ret <2 x half> splat (half 9.997550e-02)", "ret <2 x half> splat (half 0xH2E66)"),
        ("<half 1.0, bfloat 1.0>", "<half 0xH3C00, bfloat 0xR3F80>"),
        ("call void @f(float 1.5, double -0.0, i32 1)",)
        + ("call void @f(float 0x3FF8000000000000, double 0x8000000000000000, i32 1)",),
        ("float f0xD9C2825F", "float 0xC338504BE0000000"),
        ("float -snan(0x1), float +nan(0x1)", "float 0xFFF0000020000000, float 0x7FF8000020000000"),
        # halfway between two floats and then a little: rounding to double first would lose the little
        ("float 1.00000005960464477540", "float 0x3FF0000020000000"),
        ("float 1.00000005960464477539", "float 0x3FF0000000000000"),
        ("half 65520.0, half 65519.9", "half 0xH7C00, half 0xH7BFF"),
        # not literals
        ('call float asm "add.f32 $0, 0.5 \\22 half 0.1; // float 0.3", "=f"()',) * 2,
        ("  %float = load float, ptr @half.0.5, align 4 ; float 0.5",) * 2,
        ("%x.1.5 = add i32 %float.2.5, 1",) * 2,
        ('!0 = !{!"float 0.5", i32 7}',) * 2,
        # attributes
        ("attributes #0 = { noipa nooutline nounwind flatten }", "attributes #0 = { nounwind }"),
        ("define void @f(ptr dead_on_return(8) noalias %flatten)", "define void @f(ptr noalias %flatten)"),
        ('attributes #1 = { "noipa" }',) * 2,
        (
            "denormal_fpenv(preservesign|ieee, float: positivezero)",
            '"denormal-fp-math"="preserve-sign,ieee" "denormal-fp-math-f32"="positive-zero,positive-zero"',
        ),
    ],
)
def test_downgrade_of_one_line(before: str, after: str) -> None:
    assert downgrade(before) == after
    assert downgrade(after) == after


@pytest.mark.parametrize("line", ["ret fp128 1.500000e+00", "ret half f0x3C00, x86_fp80 2.0"])
def test_unknown_literal_types_are_an_error(line: str) -> None:
    with pytest.raises(PassError, match="fp"):
        downgrade(line)


@pytest.mark.parametrize(
    ("body", "name", "hint"),
    [
        ("%0 = arith.addi %i, %i : i32", "arith.addi", "llvm dialect"),
        ("cf.br ^b\n^b:", "cf.br", "llvm dialect"),
        ("%0 = gpu.thread_id x", "gpu.thread_id", "llvm dialect"),
        (
            "%0 = builtin.unrealized_conversion_cast %i : i32 to index",
            "builtin.unrealized_con",
            "llvm dialect",
        ),
        ('"no.such"() : () -> ()', "no.such", "llvm dialect"),
        ('nvvm.inline_ptx "bar.sync 0;"', "nvvm.inline_ptx", "convert-nvvm-to-llvm"),
        ("nvvm.mbarrier.try_wait.parity %p, %i, %i : !llvm.ptr<3>, i32, i32",)
        + ("nvvm.mbarrier.try_wait.parity", "convert-nvvm-to-llvm"),
    ],
)
def test_what_has_no_translation_is_named(context: ir.Context, body: str, name: str, hint: str) -> None:
    """Each of these would end the process inside the bindings."""
    context.allow_unregistered_dialects = True
    with pytest.raises(PassError, match=f"(?s)^{name}.*{hint}.*at loc"):
        translate(parse(body))


def test_a_module_that_does_not_verify_is_an_error(context: ir.Context) -> None:
    module = parse("%0 = llvm.add %i, %i : i32")
    block = module.body.operations[0].regions[0].blocks[0]
    with ir.InsertionPoint(block.operations[0]):
        ir.Operation.create("llvm.add", results=[ir.Type.parse("i64")], operands=list(block.arguments)[:1])
    with pytest.raises(PassError, match=r"(?s)does not verify.*llvm\.add"):
        translate(module)


def test_translate_takes_the_device_code(context: ir.Context) -> None:
    kernel = "llvm.func @{0}() attributes {{nvvm.kernel}} {{ llvm.return }}"
    one = f"gpu.module @m {{ {kernel.format('inner')} }}"
    assert "define ptx_kernel void @inner()" in translate(ir.Module.parse(one))
    with pytest.raises(PassError, match=r"2 gpu.module"):
        translate(ir.Module.parse(one + one.replace("@m", "@m2")))
