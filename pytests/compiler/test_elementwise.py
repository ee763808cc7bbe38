"""Arithmetic on tiles, in the emulator: every operation against float64, with the error that its docstring states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit.dialect import ops
from lowbit.dialect.bindings import ir, new_context
from lowbit.dialect.errors import PassError
from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.dialect.types import Global, element_bits
from lowbit.passes.builder import Program, Tile

LAYOUT = spatial(8, 4).local(2, 2)
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
HALF_ULP = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
SMALLEST = {"f32": 2.0**-149, "f16": 2.0**-24, "bf16": 2.0**-133}
INTEGERS = {"i8": torch.int8, "i16": torch.int16, "i32": torch.int32}

Body = Callable[[Program, Tile, Tile], Tile]


def run(body: Body, x: Tensor, z: Tensor, out: torch.dtype | None = None, target: str = "emulator:sm_80") -> Tensor:
    """y of a program with two tiles of 16 x 8."""
    y = torch.full(x.shape, 7.0, dtype=out or x.dtype)
    names = {dtype: name for name, dtype in (TYPES | INTEGERS).items()}

    def build() -> ir.Module:
        p = Program("test", 32, (1, 1, 1), dict.fromkeys("xzy", "pointer"))
        with p:
            views = {n: p.global_view(p[n], names[t.dtype], (16, 8)) for n, t in zip("xzy", (x, z, y))}
            p.store(body(p, *(p.load(views[n], (0, 0), LAYOUT) for n in "xz")), views["y"], (0, 0))
        return p.module

    lowbit.compile_program(build, target)(x=x, z=z, y=y)
    return y


def numbers(element: str, seed: int, scale: float = 2.0) -> Tensor:
    x = torch.randn((16, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return x.to(TYPES[element])


# name: body, its value in float64, and the relative error of f32 before it is rounded
OPERATIONS: dict[str, tuple[Body, Callable[[Tensor, Tensor], Tensor], float]] = {
    "add": (lambda p, x, z: x + z, torch.add, 0),
    "sub": (lambda p, x, z: x - z, torch.sub, 0),
    "mul": (lambda p, x, z: x * z, torch.mul, 0),
    "div": (lambda p, x, z: x / z, torch.div, 2.0**-22),
    "max": (lambda p, x, z: p.max(x, z), torch.maximum, 0),
    "min": (lambda p, x, z: p.min(x, z), torch.minimum, 0),
    "neg": (lambda p, x, z: -x, lambda x, z: -x, 0),
    "abs": (lambda p, x, z: abs(x), lambda x, z: x.abs(), 0),
    "exp": (lambda p, x, z: p.exp(x), lambda x, z: x.exp(), 14 * 2.0**-23),  # |x| < 10
    "tanh": (lambda p, x, z: p.tanh(x), lambda x, z: x.tanh(), 2.0**-11),
    "sqrt": (lambda p, x, z: p.sqrt(abs(x)), lambda x, z: x.abs().sqrt(), 2.0**-24),  # rounded twice in f16
}


@pytest.mark.parametrize("element", TYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name: str, element: str) -> None:
    body, exact, error = OPERATIONS[name]
    x, z = numbers(element, 0), numbers(element, 1)
    expected = exact(x.double(), z.double())
    bound = (error + HALF_ULP[element]) * 1.001 * expected.abs() + SMALLEST[element]
    y = run(body, x, z).double()
    assert ((y - expected).abs() <= bound).all()
    assert len(y.unique()) > 60


@pytest.mark.parametrize("target", ["emulator:sm_90a", "emulator:sm_120"])
@pytest.mark.parametrize("element", TYPES)
def test_operations_on_other_targets(element: str, target: str) -> None:
    def body(p: Program, x: Tile, z: Tile) -> Tile:
        return p.select(x < z, p.max(p.tanh(x), p.sqrt(abs(z))), p.exp(p.min(x, z)) / (abs(x) - -1.0))

    x, z = numbers(element, 0), numbers(element, 1)
    a, b = x.double(), z.double()
    expected = torch.where(a < b, a.tanh().maximum(b.abs().sqrt()), torch.minimum(a, b).exp() / (a.abs() + 1))
    bound = (4 * HALF_ULP[element] + 2.0**-11) * expected.abs()
    assert ((run(body, x, z, target=target).double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("element", TYPES)
def test_nan_and_signed_zero(element: str) -> None:
    """max and min give NaN if an operand is, and order zeros; a comparison with NaN holds for "ne" alone."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -1.0, 2.0])
    x = special.repeat(16, 1).to(TYPES[element])
    z = torch.cat([special.view(8, 1).repeat(1, 8)] * 2).to(TYPES[element])
    for name, extreme in (("max", torch.maximum), ("min", torch.minimum)):
        y, expected = run(OPERATIONS[name][0], x, z), extreme(x, z)
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.nan_to_num(9), expected.nan_to_num(9))
        zeros = (x == 0) & (z == 0)
        sign = (x.signbit() & z.signbit()) if name == "max" else (x.signbit() | z.signbit())
        assert torch.equal(y.signbit()[zeros], sign[zeros])
    for predicate in ops.COMPARISONS:
        y = run(partial(_ones_where, predicate), x, z)
        assert torch.equal(y.bool(), getattr(x, f"__{predicate}__")(z)), predicate


def _ones_where(predicate: str, p: Program, x: Tile, z: Tile) -> Tile:
    return p.select(p.compare(x, predicate, z), p.constant(1.0, str(x.reg.element), LAYOUT), 0.0)


def test_select_ignores_the_other_value() -> None:
    x = numbers("f32", 0)
    y = run(lambda p, x, z: p.select(x > 0.0, p.sqrt(x), -x), x, x)
    assert torch.allclose(y.double(), torch.where(x > 0, x.double().sqrt(), -x.double()), rtol=1e-6, atol=0)


def test_exp_and_tanh_far_out() -> None:
    """exp ends in infinity and zero, tanh in 1 and -1; neither in NaN."""
    far = torch.tensor([200.0, -200.0, torch.inf, -torch.inf, 88.0, -87.0, 0.0, -0.0]).repeat(16, 1)
    exp, tanh = run(OPERATIONS["exp"][0], far, far), run(OPERATIONS["tanh"][0], far, far)
    assert torch.allclose(exp, far.exp(), rtol=106 * 2.0**-23, atol=0)
    assert torch.equal(tanh, far.tanh())


@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("target", TYPES)
def test_cast_between_reals(source: str, target: str) -> None:
    x = numbers(source, 0)
    y = run(lambda p, x, z: p.cast(x, target), x, x, TYPES[target])
    assert torch.equal(y, x.to(TYPES[target]))


@pytest.mark.parametrize("element", INTEGERS)
def test_cast_from_integers(element: str) -> None:
    dtype = INTEGERS[element]
    info = torch.iinfo(dtype)
    x = torch.randint(info.min, info.max, (16, 8), generator=torch.Generator().manual_seed(0), dtype=dtype)
    x[0, 0], x[0, 1] = info.min, info.max
    assert torch.equal(run(lambda p, x, z: p.cast(x, "f32", "signed"), x, x, torch.float32), x.float())
    unsigned = torch.where(x < 0, x.long() + (1 << info.bits), x.long()).float()
    assert torch.equal(run(lambda p, x, z: p.cast(x, "f32", "unsigned"), x, x, torch.float32), unsigned)


def integers(seed: int) -> Tensor:
    """Any integers of 32 bits, some of them small."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(1 << 31), 1 << 31, (16, 8), generator=generator).int()
    return torch.where(torch.rand(16, 8, generator=generator) < 0.3, x % 5 - 2, x)


def _without_sign(x: Tensor) -> Tensor:
    return x.long() % (1 << 32)


INTEGER_OPERATIONS: dict[str, tuple[Body, Callable[[Tensor, Tensor], Tensor]]] = {
    "add": (lambda p, x, z: x + z, torch.add),
    "sub": (lambda p, x, z: x - z, torch.sub),
    "mul": (lambda p, x, z: x * z, torch.mul),
    "max": (lambda p, x, z: p.max(x, z), torch.maximum),
    "min": (lambda p, x, z: p.min(x, z), torch.minimum),
    "quotient": (lambda p, x, z: x // z, lambda x, z: (_without_sign(x) // _without_sign(z)).int()),
    "select": (lambda p, x, z: p.select(x < z, x, 7), lambda x, z: torch.where(x < z, x, 7)),
    "numbers": (lambda p, x, z: (1 << 24) + 1 - x * 3, lambda x, z: (1 << 24) + 1 - x * 3),
}


@pytest.mark.parametrize("name", INTEGER_OPERATIONS)
def test_integers(name: str) -> None:
    """Modulo 2^32; divided without a sign, and compared with one."""
    body, exact = INTEGER_OPERATIONS[name]
    x, z = integers(0), integers(1)
    z[z == 0] = 3
    assert torch.equal(run(body, x, z), exact(x, z))


@pytest.mark.parametrize("predicate", ops.COMPARISONS)
def test_integers_compare_with_their_sign(predicate: str) -> None:
    x, z = integers(0), integers(1)
    z[::2] = x[::2]
    assert torch.equal(run(partial(_ones_where, predicate), x, z).bool(), getattr(x, f"__{predicate}__")(z))


@pytest.mark.parametrize(("dim", "combine"), [(0, "sum"), (1, "sum"), (1, "max")])
def test_integers_are_reduced_over_lanes(dim: int, combine: str) -> None:
    x = integers(0)
    y = run(lambda p, x, z: x * 0 + p.reduce(x, dim, combine), x, x)
    expected = x.sum(dim, keepdim=True).int() if combine == "sum" else x.amax(dim, keepdim=True)
    assert torch.equal(y, expected.expand(16, 8))


@pytest.mark.parametrize("dim", [0, 1])
def test_places_along_a_dim(dim: int) -> None:
    y = run(lambda p, x, z: p.iota(dim, LAYOUT) + x * 0, integers(0), integers(1))
    assert y.tolist() == [[(row, column)[dim] for column in range(8)] for row in range(16)]


def test_an_integer_for_all_elements() -> None:
    y = run(lambda p, x, z: p.splat(p.block_id(0) + 40, "i32", LAYOUT), integers(0), integers(1))
    assert (y == 40).all()


@pytest.mark.parametrize("element", TYPES)
def test_numbers_on_either_side(element: str) -> None:
    """Of powers of two every quotient and every sum here is exact in each type."""
    x = torch.tensor([1.0, 2.0, -4.0, 0.5]).repeat(16, 2).to(TYPES[element])
    y = run(lambda p, x, z: 2.0 - x / 4.0 + (1.0 / (4.0 * x) - 5.0), x, x)
    assert torch.equal(y, 2.0 - x / 4.0 + (1.0 / (4.0 * x) - 5.0))


def test_column_is_broadcast() -> None:
    """One number of a row meets all elements of the row."""
    x, z = numbers("f32", 0), numbers("f32", 1)

    def body(p: Program, x: Tile, z: Tile) -> Tile:
        column = p.load(p.global_view(p["z"], "f32", (16, 1), strides=(8, 1)), (0, 0), column_layout)
        return p.select(x < column, p.max(x, column) / column, column)

    column_layout: Layout = spatial(8, 1).replicated(4).local(2, 1)
    column = z[:, :1].double()
    expected = torch.where(x.double() < column, torch.maximum(x.double(), column) / column, column)
    assert torch.allclose(run(body, x, z).double(), expected, rtol=2.0**-21, atol=0)


# -- wrong programs


@contextmanager
def building() -> Iterator[Program]:
    context = new_context()
    ops.register(context)
    with context, ir.Location.unknown():
        p = Program("test", 32, (1, 1, 1), {"x": "pointer"})
        with p:
            yield p


def _truth(p: Program, x: Tile) -> object:
    return 0.0 < x < 1.0


WRONG: Sequence[tuple[Callable[[Program, Tile], object], str]] = [
    (lambda p, x: x // 2, "element of the result: expected i32, got f32"),
    (lambda p, x: p.iota(0, LAYOUT) + 0.5, "value of i32: expected an integer of 32 bits, got 0.5"),
    (lambda p, x: p.exp(p.iota(0, LAYOUT)), "element of the result: expected f16 or bf16 or f32, got i32"),
    (lambda p, x: p.splat(p.block_id(0), "f32", LAYOUT), "value: expected f32, got i32"),
    (lambda p, x: p.max(1.0, 2.0), "at least one operand must be a tile"),
    (_truth, "choose with Program.select"),
    (lambda p, x: p.compare(x, "less", x), "predicate: expected one of lt, le, eq, ne, gt, ge, got less"),
    (lambda p, x: x + p.cast(x, "f16"), "element: expected f32, got f16"),
    (lambda p, x: p.exp(x < 1.0), "element of the result: expected f16 or bf16 or f32, got i1"),
    (lambda p, x: p.alloc_shared("i1", (8, 4)), "element of memory: expected whole bytes"),
    (lambda p, x: p.global_view(p["x"], "float16", (8, 4)), "got 'float16', which is 'f16' here"),
    (lambda p, x: p.constant(0.0, "bfloat16", LAYOUT), "got 'bfloat16', which is 'bf16' here"),
]


@pytest.mark.parametrize(("body", "message"), WRONG)
def test_wrong_program(body: Callable[[Program, Tile], object], message: str) -> None:
    with pytest.raises(lowbit.LowbitError, match=message), building() as p:
        body(p, p.constant(0.0, "f32", LAYOUT))


def test_error_names_the_line_of_an_operator() -> None:
    with pytest.raises(PassError, match=r"test_elementwise.py:\d+: "), building() as p:
        _ = p.constant(0.0, "f32", LAYOUT) + p.constant(0.0, "f16", LAYOUT)


def test_element_names() -> None:
    with pytest.raises(lowbit.LowbitError, match="'float16', which is 'f16' here"):
        Global("float16", (4,), (1,), (1,))
    with pytest.raises(lowbit.LowbitError, match=r"expected a format or one of f16, .*, got 'f64'"):
        element_bits("f64")
