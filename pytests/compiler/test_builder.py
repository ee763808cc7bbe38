"""Programs that are wrong: what the builder says of them, and where."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir, new_context
from lowbit.dialect.errors import LayoutError, LowbitError, PassError
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.layouts.fragments import MMA_M16N8_D, MMA_M16N8K16_A, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import local, spatial
from lowbit.passes.builder import Program, locations

UNIT = "vector<4xi32>"


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    context = new_context()
    ops.register(context)
    with context, ir.Location.unknown():
        yield


def program(**choices: Any) -> Program:
    given: dict[str, Any] = {"threads": 32, "grid": (1, 1, 1), "params": {"x": "pointer", "m": "i32"}}
    return Program("test", **{**given, **choices})


def line_of(body: Callable[..., None], text: str) -> int:
    """The number of the line in a function's body that contains a text."""
    lines, first = inspect.getsourcelines(body)
    return first + next(i for i, line in enumerate(lines) if text in line)


# -- each takes an open program and a view x of f16 [-1, 64]


def other_threads(p: Program, x: Any) -> None:
    p.load(x, (0, 0), spatial(4, 4))


def tile_beyond_the_view(p: Program, x: Any) -> None:
    p.load(x, (0, 0), spatial(1, 32).local(1, 4))


def unknown_boundary(p: Program, x: Any) -> None:
    p.load(x, (0, 0), spatial(8, 4), boundary=("wrap", "none"))


def one_offset_too_few(p: Program, x: Any) -> None:
    p.load(x, (0,), spatial(8, 4))


def operands_swapped(p: Program, x: Any) -> None:
    a = p.load(x, (0, 0), MMA_M16N8K16_B_NK)
    b = p.load(x, (0, 0), MMA_M16N8K16_A)
    p.mma(a, b, p.constant(0.0, "f32", MMA_M16N8_D))


def accumulator_of_f16(p: Program, x: Any) -> None:
    a, b = p.load(x, (0, 0), MMA_M16N8K16_A), p.load(x, (0, 0), MMA_M16N8K16_B_NK)
    p.mma(a, b, p.constant(0.0, "f16", MMA_M16N8_D))


def depths_differ(p: Program, x: Any) -> None:
    a = p.load(x, (0, 0), local(1, 2) * MMA_M16N8K16_A)
    b = p.load(x, (0, 0), MMA_M16N8K16_B_NK)
    p.mma(a, b, p.constant(0.0, "f32", MMA_M16N8_D))


def view_of_other_bits(p: Program, x: Any) -> None:
    words = p.load(p.global_view(p["x"], UNIT, (1, 32)), (0, 0), spatial(1, 32))
    p.view(words, dtype("u6"), local(1, 4) * MMA_M16N8K16_A)


def decode_of_numbers(p: Program, x: Any) -> None:
    p.decode(p.load(x, (0, 0), spatial(8, 4)), "f32")


def elements_differ(p: Program, x: Any) -> None:
    p.add(p.load(x, (0, 0), spatial(8, 4)), p.constant(0.0, "f32", spatial(8, 4)))


def broadcast_between_threads(p: Program, x: Any) -> None:
    row = p.constant(1.0, "f16", spatial(1, 4).replicated(8))
    p.mul(p.load(x, (0, 0), spatial(8, 4)), row)


def cast_of_bytes(p: Program, x: Any) -> None:
    view = p.global_view(p["x"], "i8", (8, 4))
    p.cast(p.load(view, (0, 0), spatial(8, 4)), "f32")


def size_missing(p: Program, x: Any) -> None:
    p.global_view(p["x"], "f16", (-1, 4))


def negative_size(p: Program, x: Any) -> None:
    p.alloc_shared("f16", (-4, 8))


def strides_missing(p: Program, x: Any) -> None:
    p.alloc_shared("f16", (4, 8), (8,))


def unknown_element(p: Program, x: Any) -> None:
    p.alloc_shared("f64", (4, 8))


def codes_in_memory(p: Program, x: Any) -> None:
    p.global_view(p["x"], dtype("u4"), (4, 8))


def copy_of_another_shape(p: Program, x: Any) -> None:
    p.copy_async(x, p.alloc_shared("f16", (4, 64)), (0, 0), spatial(4, 8).local(2, 8))


def slice_between_threads(p: Program, x: Any) -> None:
    p.slice(p.load(x, (0, 0), spatial(8, 4)), 0, 0, 4)


def reshape_of_another_size(p: Program, x: Any) -> None:
    p.reshape(p.load(x, (0, 0), spatial(8, 4)), (8, 8))


def reduce_between_threads(p: Program, x: Any) -> None:
    p.reduce(p.constant(0.0, "f16", spatial(8, 4)), 0)


def matrix_rows_unaligned(p: Program, x: Any) -> None:
    p.load_matrix(p.alloc_shared("f16", (8, 16), (20, 1)), p["m"], MMA_M16N8K16_B_NK)


def no_such_parameter(p: Program, x: Any) -> None:
    _ = p["y"]


def other_scope(p: Program, x: Any) -> None:
    p.barrier("grid")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (other_threads, "layout spatial(4, 4) in lowbit.load: expected 32 threads, got 16"),
        (tile_beyond_the_view, "size of dim 1 with boundary none: expected at most 64, got 128"),
        (unknown_boundary, "boundary: expected one of none, clamp, zero, got wrap"),
        (one_offset_too_few, "offsets: expected one per dim (2), got 1"),
        (operands_swapped, "c: expected [8, 16], got [16, 8]"),
        (accumulator_of_f16, "element of c: expected f32, got f16"),
        (depths_differ, "b: expected [8, 32], got [8, 16]"),
        (view_of_other_bits, "bits per thread: expected 128, got 192"),
        (decode_of_numbers, "source: expected codes of a low-bit format, got f16"),
        (elements_differ, "element: expected f16, got f32"),
        (broadcast_between_threads, "moves elements between threads"),
        (cast_of_bytes, "element of the source: expected f16 or bf16 or f32, got i8"),
        (size_missing, "sizes: expected one per dynamic dim (1), got 0"),
        (negative_size, "shape: expected sizes of at least 1, got [-4, 8]"),
        (strides_missing, "strides: expected one per dim (2), got 1"),
        (unknown_element, "element: expected a format or one of f16, bf16, f32"),
        (codes_in_memory, "element of memory: expected whole bytes"),
        (copy_of_another_shape, "shape of the layout: expected the target's, (4, 64), got (8, 64)"),
        (slice_between_threads, "local digits alone do not cut [0, 4) of dim 0"),
        (reshape_of_another_size, "cannot reshape"),
        (reduce_between_threads, "dim 0: expected within each thread, or in f32 and i32 within each warp"),
        (matrix_rows_unaligned, "strides: expected multiples of 8 (16 bytes)"),
        (no_such_parameter, "test has no parameter 'y'; it has x, m"),
        (other_scope, "scope: expected one of warps, block, cluster, cluster_arrive, cluster_wait, got 'grid'"),
    ],
)
def test_a_wrong_program_is_refused(body: Callable[[Program, Any], None], message: str) -> None:
    with pytest.raises(LowbitError) as caught, program() as p:
        body(p, p.global_view(p["x"], "f16", (-1, 64), sizes=[p["m"]]))
    assert message in str(caught.value)
    # The error is raised at the line, or, where only the whole program shows it, names the line.
    named = f"{__file__}:" in str(caught.value)
    assert named or any(entry.name == body.__name__ for entry in caught.traceback)


def test_the_line_is_named() -> None:
    with pytest.raises(PassError) as caught, program() as p:
        accumulator_of_f16(p, p.global_view(p["x"], "f16", (-1, 64), sizes=[p["m"]]))
    line = line_of(accumulator_of_f16, "p.mma")
    assert str(caught.value).startswith(f"program test is wrong: {__file__}:{line}: 'lowbit.mma' op element of c")


BOUNDS = ("clamp", "none")


def test_the_line_is_named_where_mlir_sees_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with its packages for Python 3.12: the builder gives operations their lines."""
    monkeypatch.setattr(locations, "_sees_frames", lambda: False)
    test_the_line_is_named()
    with program() as p:
        p.load(p.global_view(p["x"], "f16", (-1, 64), sizes=[p["m"]]), (p["m"] + 1, 0), spatial(4, 8), BOUNDS)
    made = [(op.name, locations.user_line(op.location)) for op in p.op.body.blocks[0]]
    where = (__file__, line_of(test_the_line_is_named_where_mlir_sees_no_frames, "p.load"))
    assert all(line == where for name, line in made if name != "lowbit.return") and len(made) > 3


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"threads": 48}, "threads: expected a multiple of 32, got 48"),
        ({"threads": 2048}, "threads: expected 32..1024, got 2048"),
        ({"grid": (4, 0, 1)}, "test: grid: expected numbers of at least 1, 'ceil(PARAMETER / NUMBER)', "),
        ({"grid": (4, True, 1)}, "'sm_count / NUMBER', got True"),
        ({"grid": (4, "m / 16", 1)}, "'sm_count / NUMBER', got 'm / 16'"),
        ({"grid": (4, "ceil(m / 0)", 1)}, "'sm_count / NUMBER', got 'ceil(m / 0)'"),
        ({"grid": (4, "ceil(n / 16)", 1)}, "grid: expected the name of an i32 parameter, got ceil(n / 16)"),
        ({"grid": (4, "ceil(x / 16)", 1)}, "grid: expected the name of an i32 parameter, got ceil(x / 16)"),
        ({"grid": (2**31, 1, 1)}, "grid: expected a number of at most 2147483647 along x, got 2147483648"),
        ({"grid": (1, 65536, 1)}, "grid: expected a number of at most 65535 along y, got 65536"),
        ({"grid": (1, 1, 10**21)}, "grid: expected a number of at most 65535 along z, got 1000000000000000000000"),
        ({"grid": ("sm_count * 2097152", 1, 1)}, "at most 2097151 along x, got 'sm_count * 2097152'"),
        ({"grid": ("ceil(m / 2147483648)", 1, 1)}, "at most 2147483647 along x, got 'ceil(m / 2147483648)'"),
        ({"grid": (f"ceil(m / {'9' * 5000})", 1, 1)}, "test: grid: expected numbers of at least 1"),
        ({"grid": (4, 1)}, "grid: expected three extents, got [4, 1]"),
        ({"workspace": -1}, "workspace: expected at least 0, got -1"),
        ({"workspace": 4}, "workspace: expected a pointer parameter called 'workspace', got x, m"),
        (
            {"params": {"x": "f16"}},
            "test: parameter x is a 'f16'; it must be one of pointer, i32, f32, tensor_map",
        ),
        (
            {"grid": ("ceil(m / 8)", 2, 1), "cluster": (2, 2, 1)},
            "cluster: expected three divisors of the grid's ['ceil(m / 8)', 2, 1], got [2, 2, 1]",
        ),
        (
            {"grid": ("sm_count * 3", 2, 1), "cluster": (2, 1, 1)},
            "cluster: expected three divisors of the grid's ['sm_count * 3', 2, 1], got [2, 1, 1]",
        ),
    ],
)
def test_a_wrong_frame_is_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(PassError) as caught, program(**choices):
        pass
    assert message in str(caught.value)


def test_an_error_of_the_user_passes_through() -> None:
    """What the body raises is not hidden by complaints about the half of a program that is there."""
    with pytest.raises(ZeroDivisionError), program() as p:
        p.load(p.global_view(p["x"], "f16", (4, 4)), (0, 0), spatial(2, 2))
        _ = 1 / 0


def test_layouts_refuse_on_their_own() -> None:
    with pytest.raises(LayoutError, match="spatial"):
        _ = spatial(8, 4) * spatial(2, 2, 2)


def test_scalars_fold_what_is_nothing() -> None:
    """Adding 0 and multiplying by 1 leave no operation behind; numbers may stand on the left."""
    with program() as p:
        m = p["m"]
        assert (m + 0) is m and (0 + m) is m and (m - 0) is m and (m * 1) is m and (1 * m) is m and (m // 1) is m
        _ = (2 * m + 1) % 3
    text = str(p.module)
    assert [text.count(op) for op in ("arith.muli", "arith.addi", "arith.remui")] == [1, 1, 1]
