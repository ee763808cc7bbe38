"""What the emulator reads of PTX, and what it refuses to read."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from emulator_kernel import HEADER, kernel, run

from lowbit.dialect.errors import EmulatorError
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.emulator.text.lexer import TokenStream
from lowbit.pylib.emulator.text.parser import parse

LLVM = (
    HEADER
    + """
    // .globl    k                       // -- Begin function k
.extern .shared .align 1024 .b8 smem[];
.global .align 4 .b8 __const[4] = {0, 1, 2, 3};
.visible .entry k(
    .param .u64 .ptr .global .align 16 k_param_0,
    .param .align 4 .b8 k_param_1[4]
)
.reqntid 64, 1, 1
.minnctapersm 2
.maxnreg 128
{
    .reg .pred     %p<3>;
    .reg .b32     %r<7>;
    .reg .b64     %rd<4>;
    .loc    1 5 1
    .loc    1 10 3, function_name $L__info_string0, inlined_at 1 5 1
$L__func_begin0:
// %bb.0:
    ld.param.b64     %rd1, [k_param_0];      // comment; with { braces }
    ld.param.b32     %r1, [k_param_1];
    mov.u32     %r2, %tid.x;
    mad.wide.u32     %rd2, %r2, 4, %rd1;
    mov.b32     %r3, 0;
    /* a longer
       comment */
$L__BB0_1:                              // =>This Inner Loop Header: Depth=1
    .pragma "nounroll";
    .pragma "used_bytes_mask 0x33";
    // begin inline asm
    { .reg .pred p; setp.lt.u32 p, %r3, %r2;
      @p add.u32 %r3, %r3, 1; @!p add.u32 %r3, %r3, 100; }
    // end inline asm
    setp.lt.u32     %p1, %r3, 100;
    @%p1 bra     $L__BB0_1;
    add.s32     %r4, %r3, %r1;
    { .reg .b16 %rs; .reg .b32 %r1; mov.b32 %r1, 0f40000000; mov.b32 {_, %rs}, %r1; cvt.u32.u16 %r5, %rs; }
    add.s32     %r6, %r4, %r5;
    st.global.b32     [%rd2], %r6;
    ret;
                                        // -- End function
}
    .file    1 "/a/file.py"
    .section    .debug_abbrev
    {
.b8 1                                   // Abbreviation Code
.b8 17
    }
"""
)


def test_text_in_the_style_of_llvm() -> None:
    """Labels, scopes that shadow names, debug sections, launch bounds, by-value parameters."""
    out = np.zeros(64, np.uint32)
    Emulator(LLVM).launch("k", block=64, args=[out, np.array([7], np.int32)])
    np.testing.assert_array_equal(out, np.arange(64) + 100 + 7 + 0x4000)


def test_module() -> None:
    module = parse(LLVM)
    assert (module.version, module.target) == ("8.6", "sm_90a")
    k = module.kernels["k"]
    assert [(p.name, p.size, p.align, p.array) for p in k.params] == [
        ("k_param_0", 8, 8, False),
        ("k_param_1", 4, 4, True),
    ]
    assert (k.reqntid, k.maxntid) == ((64, 1, 1), None)
    assert k.instructions[0].line == LLVM.split("ld.param.b64")[0].count("\n") + 1
    assert k.instructions[0].text == "ld.param.b64 %rd1, [k_param_0]"


def test_scopes_have_their_own_labels_and_registers() -> None:
    out = np.zeros(1, np.uint32)
    part = """{ .reg .b32 i; mov.u32 i, 0;
    L: add.u32 i, i, 1; setp.lt.u32 %p1, i, 3; @%p1 bra L; add.u32 %r1, %r1, i; }"""
    run(f"mov.u32 %r1, 0; {part} {part} ld.param.u64 %rd0, [p0]; st.global.b32 [%rd0], %r1;", [out], block=1)
    assert out[0] == 6


@pytest.mark.parametrize(
    ("text", "value"),
    [("0x1F", 31), ("0x1FU", 31), ("-1", 2**32 - 1), ("4294967295", 2**32 - 1), ("017", 15), ("0b101", 5),
     ("0f3F800000", 0x3F800000),  ("-2147483648", 2**31)],
)  # fmt: skip
def test_constants(text: str, value: int) -> None:
    out = np.zeros(1, np.uint32)
    run(f"mov.b32 %r1, {text}; ld.param.u64 %rd0, [p0]; st.global.b32 [%rd0], %r1;", [out], block=1)
    assert out[0] == value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("frobnicate.b32 %r1, %r2;", "unknown instruction `frobnicate`"),
        ("call.uni foo;", "unknown instruction `call`|not declared"),
        ("addc.u32 %r1, %r2, %r3;", "unknown instruction `addc`"),
        ("add.cc.u32 %r1, %r2, %r3;", r"modifier \.cc"),
        ("add.rn.u32 %r1, %r2, %r3;", r"modifier \.rn"),
        ("add.ftz.f64 %fd1, %fd2, %fd3;", r"modifier \.ftz"),
        ("fma.rn.sat.bf16 %rs1, %rs2, %rs3, %rs4;", r"modifier \.sat"),
        ("ld.global.L1::sometimes.b32 %r1, [%rd1];", "L1::sometimes"),
        ("ld.acquire.global.b32 %r1, [%rd1];", "needs one of .cta"),
        ("ld.global.b32 %rs1, [%rd1];", r"%rs1 is a \.b16 register, but 32 bits are wanted"),
        ("add.u32 %r1, %rd2, %r3;", r"%rd2 is a \.b64 register, but 32 bits"),
        ("add.u32 %p1, %r2, %r3;", r"%p1 is a \.pred register"),
        ("add.u32 %r1, %r2;", "an operand is missing"),
        ("add.u32 %r1, %r2, %r3, %r4;", "1 operands too many"),
        ("add.u32 %r1, %r2, 4294967296;", "does not fit"),
        ("add.f32 %f1, %f2, 1;", "int constant"),
        ("mov.b32 %r1, 1.5;", "decimal constant"),
        ("ld.global.v4.b64 {%rd1,%rd2,%rd3,%rd4}, [%rd5];", "128 bits"),
        ("setp.lt.f16 %p1|%p2, %rs1, %rs2;", "has one result"),
        ("setp.lt.f16x2 %p1, %r1, %r2;", "has one result"),
        ("mov.b16 %rs1, 0f3F800000;", "f32 constant"),
        ("add.u32 5, %r2, %r3;", "a result goes to a register"),
        ("add.u32 %r1, %r2, %r300;", "neither a declared register"),
        ("mov.u32 %r1, %clock;", "neither a declared register"),
        ("mov.u32 %r1, nowhere;", "`nowhere` is not declared"),
        ("bra NOWHERE;", "`NOWHERE` is not declared"),
        ("{ L: } bra L;", "`L` is not declared"),
        ("@%r1 bra L; L:", "a guard must be a predicate"),
        ("setp.foo.u32 %p1, %r1, %r2;", "needs one of"),
        ("setp.lt.b32 %p1, %r1, %r2;", "does not compare"),
        ("setp.equ.u32 %p1, %r1, %r2;", "does not compare"),
        ("lop3.b32 %r1, %r1, %r1, %r1, 256;", "not 0 to 255"),
        ("lop3.or.b32 %r1|%p1, %r1, %r1, %r1, 3, %p2;", r"modifier|result"),
        ("mov.b32 %r1, {%rs1, %rs2, %rs3};", "3 parts"),
        ("mul.wide.u64 %rd1, %rd1, %rd1;", "128 bits"),
        ("ld.param.b64 %rd1, [p0+4];", "8 bytes at 4 of a parameter with 8"),
        ("ld.param.b32 %r1, [p0+8];", "outside"),
        (".reg .b128 %q; ", r"unknown type `\.b128`"),
        (".maybe;", "unknown directive"),
        ('.pragma "fast";', "unknown pragma"),
        ("add.u32 %r1 %r2, %r3;", "expected `,` or `;`"),
        ("tcgen05.fence::before_thread_sync;", "unknown instruction `tcgen05`"),
        ("shfl.bfly.b32 %r1, %r2, 1, 31;", r"needs one of \.sync"),
        ("tex.1d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [%rd1, {%r1}];", "unknown instruction `tex`"),
    ],
)
def test_refused(body: str, message: str) -> None:
    """Before anything runs, with the line."""
    with pytest.raises(EmulatorError, match=f"(?s)PTX line \\d+: .*({message})"):
        Emulator(kernel(body, ["u64", "u32"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".func f() { ret; }", "functions and calls are not supported"),
        (
            ".extern .func (.param .b32 r) llvm.nvvm.x (.param .b32 a);",
            "functions and calls are not supported",
        ),
        (".visible .entry k() { ret;", "closing `}` is missing"),
        (".visible .entry k(.param u32 a) { ret; }", "a parameter needs a type|unknown"),
        (".address_size 32", "64"),
        (".alias a, b;", "unknown directive"),
        ("` `", "cannot read"),
        (".section .debug_abbrev", "the text ends where more must follow"),
        (".section .debug_abbrev { .b8 1", "the text ends where more must follow"),
        (".version", "the text ends where more must follow"),
    ],
)
def test_refused_modules(text: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        Emulator(HEADER.replace(".address_size 64", "") + text)


def test_line_of_a_refusal() -> None:
    source = kernel("mov.u32 %r1, 0;\n\n  bogus.u32 %r1;")
    line = source[: source.index("bogus")].count("\n") + 1
    with pytest.raises(EmulatorError, match=rf"PTX line {line}: `bogus\.u32 %r1`: unknown instruction"):
        Emulator(source)


def test_a_text_that_ends_too_early() -> None:
    """The end of the text is a place with a line, also behind the last line break."""
    with pytest.raises(EmulatorError, match=r"PTX line \d+: ``: the kernel's closing `}` is missing"):
        parse(LLVM[: LLVM.index("    ret;")])
    tokens = TokenStream(LLVM)
    for token in range(len(tokens.texts)):
        with suppress(EmulatorError):
            parse(LLVM[: tokens.start(token)])


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("add.s32 %r4, %r5, %r4;", False),
        ("add.s32 %r4, %r5, %r6;", True),
        ("@%p1 add.s32 %r4, %r5, %r6;", False),
        ("add.u32 %r4, %r5, %r6;", False),
        ("add.s32 %r4, %r5, 1;", False),
        ("add.s32 %r4, %r5, %rs1;", False),
    ],
)
def test_instructions_of_one_form(other: str, same: bool) -> None:
    """They differ in which registers they have, and not in where one comes twice. One of each form is looked at."""
    registers = ".reg .b32 %r<9>; .reg .b16 %rs<2>; .reg .pred %p<2>;"
    (entry,) = parse(kernel(f"add.s32 %r1, %r2, %r3; {other}", registers=registers)).kernels.values()
    first, second = (i for i in entry.instructions if i.opcode == "add")
    assert (first.form() == second.form()) == same
