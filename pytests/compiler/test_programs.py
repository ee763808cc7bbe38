"""Programs of one's own: where they may be built, and what would corrupt memory if the builder did not refuse it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import lowbit
from lowbit.dialect.errors import LowbitError, PassError
from lowbit.dialect.layouts.layout import local, spatial
from lowbit.passes.builder import Program, Scalar, as_i32

LANES = spatial(32)
EMULATOR = "emulator:sm_80"
PARAMS = {"x": "pointer", "y": "pointer", "m": "i32"}


def program(name: str = "test", **choices: Any) -> Program:
    given: dict[str, Any] = {"threads": 32, "grid": (1, 1, 1), "params": PARAMS}
    return Program(name, **{**given, **choices})


def twice() -> Program:
    """y = 2 x, of 32 numbers in f16."""
    p = program("twice")
    with p:
        x, y = (p.global_view(p[name], "f16", (32,)) for name in "xy")
        p.store(p.load(x, (0,), LANES) * 2, y, (0,))
    return p


# -- built anywhere


@pytest.mark.parametrize("given", [twice, twice(), twice().module, lambda: twice().module])
def test_a_program_is_built_anywhere_and_compiled_twice(given: Any) -> None:
    x = torch.arange(32).half()
    for target in (EMULATOR, "emulator:sm_90a"):
        kernel, y = lowbit.compile_program(given, target), torch.zeros(32, dtype=torch.float16)
        kernel(x=x, y=y, m=1)
        assert torch.equal(y, 2 * x)


def test_what_is_no_program() -> None:
    for wrong in (lambda: None, 3):
        with pytest.raises(PassError, match=r"build must return a Program, or its module `p.module`, not "):
            lowbit.compile_program(wrong, EMULATOR)  # type: ignore[arg-type]


def open_program() -> None:
    with program() as p:
        lowbit.compile_program(p, EMULATOR)


def empty_program() -> None:
    _ = program().module


def failed_program() -> None:
    p = program()
    try:
        with p, p.loop(0, 3):
            raise KeyError
    except KeyError:
        lowbit.compile_program(p, EMULATOR)


def entered_twice() -> None:
    p = twice()
    with p:
        pass


# -- operators


def conditions(m: Any) -> list[Any]:
    return [
        *(m < 3, m <= 3, m > 3, m >= 3, m == 3, m != 3),
        *(3 < m, 3 <= m, 3 > m, 3 >= m, 3 == m, 3 != m),  # noqa: SIM300
        *((m > 1) & (m < 4), (m < 1) | (m > 3), (m < 3) == (m < 2), (m < 3) != (m < 5)),
    ]


def numbers(m: Any) -> list[Any]:
    return [8 - m, -m, m - 8, 2 + m, 3 * m, m & 6, m | 6]


def quotients(m: Any) -> list[Any]:
    return [8 // m, 8 % m, m // 2, m % 2, m // m, 100 // m]


def stored_where(m: int, *lists: Callable[[Any], list[Any]]) -> list[float]:
    """Returns 1 where a condition holds for a parameter m, or a number made of it is what Python makes of the int."""
    expected = [each for of in lists for each in of(m)]
    p = program(params={"y": "pointer", "m": "i32"})
    with p:
        y = p.global_view(p["y"], "f16", (len(expected), 32))
        made = [each for of in lists for each in of(p["m"])]
        for i, (one, wanted) in enumerate(zip(made, expected, strict=True)):
            with p.when(one if isinstance(wanted, bool) else one == wanted):
                p.store(p.constant(1.0, "f16", LANES.reshape((1, 32))), y, (i, 0))
    y = torch.zeros(len(expected), 32, dtype=torch.float16)
    lowbit.compile_program(p, EMULATOR)(y=y, m=m)
    return y[:, 0].tolist()


@pytest.mark.parametrize("m", [-5, 0, 2, 3, 4])
def test_scalars_compute_as_python(m: int) -> None:
    """Quotients do of numbers above zero."""
    holds = [*map(float, conditions(m)), *[1.0] * len(numbers(m))]
    assert stored_where(m, conditions, numbers) == holds
    if m > 0:
        assert set(stored_where(m, quotients)) == {1.0}


@pytest.mark.parametrize("other", [3, "tile"])
def test_tiles_compare_by_element(other: Any) -> None:
    p = program()
    with p:
        x, y = (p.global_view(p[name], "f16", (32,)) for name in "xy")
        tile = p.load(x, (0,), LANES)
        three = p.constant(3.0, "f16", LANES) if other == "tile" else other
        p.store(p.select(tile == three, 1, p.select(tile != three, 2, p.constant(0, "f16", LANES))), y, (0,))
    x, y = torch.arange(32).half(), torch.zeros(32, dtype=torch.float16)
    lowbit.compile_program(p, EMULATOR)(x=x, y=y, m=1)
    assert torch.equal(y, torch.where(x == 3, 1, 2).half())


# -- operations, and values, in the wrong place


def store_after_the_end() -> None:
    with program() as p:
        y, one = p.global_view(p["y"], "f32", (32,)), p.constant(1.0, "f32", LANES)
    p.store(one, y, (0,))


def load_before_the_beginning() -> None:
    p = program()
    p.global_view(p["y"], "f32", (32,))


def tiles_after_the_end() -> None:
    with program() as p:
        one = p.constant(1.0, "f32", LANES)
    _ = 1.0 - one


def comparison_after_the_end() -> None:
    with program() as p:
        one = p.constant(1.0, "f32", LANES)
    _ = one < one


def scalars_after_the_end() -> None:
    with program() as p:
        block = p.block_id(0)
    _ = block * 2


def number_outside() -> None:
    as_i32(4)


def negation_after_the_end() -> None:
    with program() as p:
        condition = p["m"] < 3
    _ = ~condition


def outer_program() -> None:
    with program("a") as p, program("b"):
        p.block_id(0)


def another_thread() -> None:
    found: list[Exception] = []

    def work(p: Program) -> None:
        try:
            p.block_id(0)
        except PassError as error:
            found.append(error)

    with program() as p:
        thread = threading.Thread(target=work, args=[p])
        thread.start()
        thread.join()
    raise found[0]


def tile_of_another() -> None:
    with program("a") as p:
        one = p.constant(1.0, "f32", LANES)
    with program("b") as q:
        q.store(one, q.global_view(q["y"], "f32", (32,)), (0,))


def parameter_of_another() -> None:
    a = program("a")
    with program("b") as q:
        q.global_view(a["x"], "f32", (32,))


def scalar_of_another() -> None:
    with program("a") as p:
        block = p.block_id(0)
    with program("b") as q:
        _ = q.block_id(0) + block


def tile_of_a_loop() -> None:
    with program() as p:
        with p.loop(0, 3):
            one = p.constant(1.0, "f32", LANES)
        _ = one + 1


def index_of_a_loop() -> None:
    with program() as p:
        with p.loop(0, 3) as loop:
            pass
        p.load(p.global_view(p["x"], "f32", (96,)), (loop.index,), LANES)


def tile_of_a_condition() -> None:
    with program() as p:
        with p.when(p["m"] < 3):
            one = p.constant(1.0, "f32", LANES)
        p.store(one, p.global_view(p["y"], "f32", (32,)), (0,))


def result_of_an_inner_loop() -> None:
    with program() as p, p.loop(0, 3, [p.constant(1.0, "f32", LANES)]) as outer:
        with p.loop(0, 3):
            inner = p.constant(1.0, "f32", LANES)
        outer.results = [inner]


def loop_entered_late() -> None:
    with program() as p:
        loop = p.loop(0, 3)
    with loop:
        pass


OUT = "is not being built here; operations belong inside `with p:`"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (open_program, "program test is still being built; compile it after `with p:`"),
        (empty_program, "program test is empty; write its operations inside `with p:`"),
        (failed_program, "program test had an error"),
        (entered_twice, "program twice has been entered before; make another Program"),
        (store_after_the_end, f"Program.store: program test {OUT}"),
        (load_before_the_beginning, f"Program.global_view: program test {OUT}"),
        (tiles_after_the_end, f"arithmetic on tiles (lowbit.sub): its program {OUT}"),
        (comparison_after_the_end, f"comparison of tiles (lowbit.compare): its program {OUT}"),
        (scalars_after_the_end, f"arithmetic on scalars (muli): its program {OUT}"),
        (number_outside, f"index 4: its program {OUT}"),
        (negation_after_the_end, f"arithmetic on scalars (xori): its program {OUT}"),
        (outer_program, f"Program.block_id: program a {OUT}"),
        (another_thread, f"Program.block_id: program test {OUT}"),
        (tile_of_another, "Program.store: a value of program a is used in program b"),
        (parameter_of_another, "Program.global_view: a value of program a is used in program b"),
        (scalar_of_another, "arithmetic on scalars (addi): a value of program a is used in program b"),
        (tile_of_a_loop, "arithmetic on tiles (lowbit.add): a value that was made in a loop, a condition"),
        (index_of_a_loop, "Program.load: a value that was made in a loop"),
        (tile_of_a_condition, "Program.store: a value that was made in a loop"),
        (result_of_an_inner_loop, "Program.loop: a value that was made in a loop"),
        (loop_entered_late, "Program.loop: nothing is in it; write `with p"),
    ],
)
def test_a_wrong_place_is_refused(wrong: Callable[[], None], message: str) -> None:
    with pytest.raises(PassError) as caught:
        wrong()
    found = str(caught.value)
    compiling = wrong in (open_program, failed_program)  # by a call that names no line
    assert message in found and (compiling or found.startswith(f"{__file__}:"))


# -- loops


def test_forgotten_results() -> None:
    with pytest.raises(PassError) as caught, program() as p, p.loop(0, 3, [p.constant(1.0, "f32", LANES)]):
        line = test_forgotten_results.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"{__file__}:{line}: Program.loop: the loop carries 1 tiles, but has no results; "
        "set `loop.results` to a list of 1 at the end of its body"
    )


@pytest.mark.parametrize(
    ("element", "count", "given"),
    [("f16", 1, r"f16 \[32\] in spatial\(32\)"), ("f32", 2, r"f32 .*, f32 .*"), ("f32", 0, "nothing")],
)
def test_results_unlike_the_carried(element: str, count: int, given: str) -> None:
    wanted = rf"loop.results must be f32 \[32\] in spatial\(32\), .*, not {given}$"
    with pytest.raises(PassError, match=wanted), program() as p, p.loop(0, 3, [p.constant(1.0, "f32", LANES)]) as loop:
        loop.results = [p.constant(1.0, element, LANES) for _ in range(count)]


def test_a_loop_without_with() -> None:
    message = rf"{__file__}:\d+: Program.when: nothing is in it; write `with p"
    with pytest.raises(PassError, match=message), program() as p:
        p.when(p["m"] < 3)


# -- what would reach MLIR and LLVM as it is


@pytest.mark.parametrize("name", ["a b", "x;ret", "é", "1x", "", "a\n", "$x", "a" * 129, 3, "shared_memory"])
def test_names_that_ptx_does_not_take(name: Any) -> None:
    with pytest.raises(PassError, match=rf"{__file__}:\d+: Program: name .*(ASCII letters|must be str|compiler's own)"):
        program(name)


@pytest.mark.parametrize("name", ["add", "ret", "main", "memcpy", "memset", "printf", "_", "v" * 128])
def test_names_that_mean_something_elsewhere(name: str) -> None:
    with program(name) as p:
        p.store(p.constant(2.0, "f32", LANES), p.global_view(p["y"], "f32", (32,)), (0,))
    y = torch.zeros(32)
    lowbit.compile_program(p, EMULATOR)(x=y, y=y, m=1)
    assert y.eq(2).all()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"params": {"a b": "pointer"}}, "parameter 'a b': expected a name that Python takes for an argument"),
        ({"params": {"in": "i32"}}, "parameter 'in': expected a name"),
        ({"params": {3: "i32"}}, "params must be a mapping from str to str"),
        ({"params": ["x"]}, "params must be a mapping from str to str, not ['x']"),
        ({"threads": 1 << 70}, "expected a number of 64 bits, got 1180591620717411303424"),
        ({"threads": "32"}, "threads must be int, not '32'"),
        ({"cluster": (1 << 70, 1, 1)}, "list of numbers: expected 64 bits each"),
        ({"grid": 4}, "grid must be a list of int or str, not 4"),
        ({"grid": (1 << 31, 1, 1)}, "grid: expected a number of at most 2147483647 along x, got 2147483648"),
        ({"grid": (1, 65536, 1)}, "grid: expected a number of at most 65535 along y, got 65536"),
    ],
)
def test_a_wrong_frame_is_refused(choices: Mapping[str, Any], message: str) -> None:
    with pytest.raises(LowbitError) as caught:
        program(**choices)
    assert message in str(caught.value) and str(caught.value).startswith(f"{__file__}:")


def source_of_text(p: Program, x: Any) -> None:
    p.load("x", (0,), LANES)  # type: ignore[arg-type]


def source_that_is_a_pointer(p: Program, x: Any) -> None:
    p.load(p["x"], (0,), LANES)  # type: ignore[arg-type]


def boundary_of_text(p: Program, x: Any) -> None:
    p.load(x, (0,), LANES, boundary="none")


def offset_of_64_bits(p: Program, x: Any) -> None:
    p.load(x, (1 << 40,), LANES)


def shape_of_floats(p: Program, x: Any) -> None:
    p.global_view(p["x"], "f32", (4.0,))  # type: ignore[arg-type]


def huge_shape(p: Program, x: Any) -> None:
    p.global_view(p["x"], "f32", (1 << 70,))


def huge_divisor(p: Program, x: Any) -> None:
    p.global_view(p["x"], "f32", (4,), divisors=(1 << 70,))


def huge_tile(p: Program, x: Any) -> None:
    p.constant(1.0, "f32", local(10**9) * LANES)


def number_of_text(p: Program, x: Any) -> None:
    _ = p.load(x, (0,), LANES) + "1"  # type: ignore[operator]


def fraction_of_blocks(p: Program, x: Any) -> None:
    _ = p.block_id(0) + 0.5  # type: ignore[operator]


def arithmetic_on_a_pointer(p: Program, x: Any) -> None:
    _ = p["x"] + 1


def scalar_in_an_if(p: Program, x: Any) -> None:
    if p.block_id(0) < 0:
        p.barrier()


def smaller_of_scalars(p: Program, x: Any) -> None:
    p.load(x, (min(p.block_id(0), p["m"]),), LANES)  # type: ignore[type-var]


def equal_scalars_in_an_if(p: Program, x: Any) -> None:
    if p.block_id(0) == 0:
        p.barrier()


def equal_tiles_in_an_if(p: Program, x: Any) -> None:
    tile = p.load(x, (0,), LANES)
    assert tile in [tile]  # by identity, as in every list of Python
    assert tile != tile


def power_of_a_tile(p: Program, x: Any) -> None:
    _ = p.load(x, (0,), LANES) ** 2


def part_of_a_tile(p: Program, x: Any) -> None:
    for _ in p.load(x, (0,), LANES):
        pass


def fraction_of_a_scalar(p: Program, x: Any) -> None:
    _ = 8 / p["m"]


def negative_divisor(p: Program, x: Any) -> None:
    _ = p["m"] // -2


def negative_dividend(p: Program, x: Any) -> None:
    _ = -7 % p["m"]


def scalar_equal_to_nothing(p: Program, x: Any) -> None:
    _ = p["m"] == None  # noqa: E711


def result_that_is_no_list(p: Program, x: Any) -> None:
    with p.loop(0, 4, [p.load(x, (0,), LANES)]) as loop:
        loop.results = loop.carried[0] + 1  # type: ignore[assignment]


def shared_memory_after_its_end(p: Program, x: Any) -> None:
    buffer = p.alloc_shared("f32", (32,))
    p.free_shared(buffer)
    p.load(buffer, (0,), LANES)


def column_of_the_next_row(p: Program, x: Any) -> None:
    rows = p.global_view(p["x"], "f32", (8, 40))
    p.load(rows, (0, 16), LANES.reshape((1, 32)))


def buffer_that_is_none(p: Program, x: Any) -> None:
    p.free_shared(p.alloc_shared("f32", (4,)), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (source_of_text, "Program.load: source must be Memory, not 'x'"),
        (source_that_is_a_pointer, "Program.load: source must be Memory, not Scalar"),
        (boundary_of_text, "Program.load: boundary must be a list of str or None, not 'none'"),
        (offset_of_64_bits, "index 1099511627776: expected a Scalar or an int of 32 bits"),
        (shape_of_floats, "Program.global_view: shape must be a list of int, not [4.0]"),
        (huge_shape, "sizes and strides: expected below 281474976710656"),
        (huge_divisor, "list of numbers: expected 64 bits each"),
        (huge_tile, "expected at most 16384 elements in a thread, got 1000000000"),
        (number_of_text, "(lowbit.add): an operand must be a Tile or a number, not str"),
        (fraction_of_blocks, "index 0.5: expected a Scalar or an int of 32 bits"),
        (arithmetic_on_a_pointer, "'arith.addi' op operand #0 must be"),
        (scalar_in_an_if, "a scalar is neither true nor false before the program runs; branch with Program.when"),
        (smaller_of_scalars, "a scalar is neither true nor false before the program runs"),
        (equal_scalars_in_an_if, "a scalar is neither true nor false before the program runs"),
        (equal_tiles_in_an_if, "a tile is neither true nor false, its elements are; choose with Program.select"),
        (power_of_a_tile, "a tile has + - * / // abs() and comparisons, with tiles and numbers, and what"),
        (part_of_a_tile, "there is no [ ]"),
        (fraction_of_a_scalar, "a scalar has + - * // % & | ~ and comparisons, with scalars and ints; there is no /"),
        (negative_divisor, "the divisor is -2, but scalars are divided without a sign: expected 1 or more"),
        (negative_dividend, "the dividend is -7, but scalars are divided without a sign: expected 0 or more"),
        (scalar_equal_to_nothing, "index None: expected a Scalar or an int of 32 bits"),
        (result_that_is_no_list, "loop.results must be f32 [32] in spatial(32), as the loop carries, not a Tile"),
        (shared_memory_after_its_end, "buffer: expected nothing that uses it afterwards, got lowbit.load"),
        (column_of_the_next_row, "end of dim 1 with boundary none: expected at most 40, got 16 + 32"),
        (buffer_that_is_none, "Program.free_shared: buffers must be Memory, not None"),
    ],
)
def test_a_wrong_argument_is_refused(body: Callable[[Program, Any], None], message: str) -> None:
    with pytest.raises(LowbitError) as caught, program() as p:
        body(p, p.global_view(p["x"], "f32", (32,)))
    assert message in str(caught.value) and f"{__file__}:" in str(caught.value)


def test_scalars_know_their_program() -> None:
    with program() as p:
        assert isinstance(p["m"] + 1, Scalar)
