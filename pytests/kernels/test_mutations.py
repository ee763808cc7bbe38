"""The tests of the kernels can fail: the compiler with one piece broken makes kernels that they find out.

Every mutation replaces one function by a wrong one. The kernel must still compile, or it proves nothing, and then give
wrong numbers or do something that the emulator refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from compiled import compile_matmul
from emulated import Inputs, Problem, exhaustive_inputs, exhaustive_problem, matmul_is_right, run_matmul

from lowbit.dialect.bindings import arith, nvvm
from lowbit.dialect.errors import EmulatorError
from lowbit.dialect.formats import recipes
from lowbit.dialect.formats.packing import Packing
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.epilogue import Epilogue
from lowbit.passes.kernels.scales.block_scales import Scales
from lowbit.passes.kernels.scales.conversion import ScaleConversion
from lowbit.passes.kernels.streaming.steps import Steps
from lowbit.passes.lowering import emit, lower_dequant
from lowbit.passes.lowering import mma as lower_mma
from lowbit.passes.lowering import tables as lower_table
from lowbit.passes.lowering.addressing import Access
from lowbit.passes.lowering.context import LoweringContext, int_attr
from lowbit.passes.lowering.registry import RULES
from lowbit.passes.pipeline import CompiledKernel
from lowbit.passes.targets import parse_target
from lowbit.pylib.reference import matmul
from lowbit.pylib.torch_types import TORCH

Wrap = Callable[[Any], Any]  # from the right function to the wrong one

U4 = MatmulSpec(n=40, k=192, weight="u4", group_size=32, zeros="int", out="f32")
FLOAT = replace(U4, zeros="float")
OFFSET = replace(U4, zeros="offset", row_scales=True)
I4_OFFSET = MatmulSpec(n=16, k=128, weight="i4", group_size=32, zeros="offset", out="f32")
I4 = MatmulSpec(n=16, k=72, weight="i4", out="f32")
U6 = MatmulSpec(n=16, k=256, weight="u6", group_size=128, out="f32")
F4 = MatmulSpec(n=16, k=128, weight="f4e2m1", group_size=64, out="f32")
F6 = MatmulSpec(n=16, k=256, weight="f6e3m2", group_size=128, out="f32")
F8 = MatmulSpec(n=25, k=64, weight="f8e4m3", act="bf16", out="f32")
NF4 = MatmulSpec(n=16, k=128, weight="nf4", group_size=64, bias=True)
PADDED = MatmulSpec(n=16, k=150, weight="u4", group_size=50, out="f32")
SCHEDULES = {  # by bits
    4: Schedule(row_blocks=1, warps_k=2, step_k=64, num_stages=2),
    6: Schedule(row_blocks=1, warps_k=2, step_k=128, num_stages=2),
    8: Schedule(row_blocks=1, warps_k=2, step_k=32, num_stages=2),
}


def compiled(spec: MatmulSpec, **choices: int) -> CompiledKernel:
    return compile_matmul(spec, parse_target("sm_80"), replace(SCHEDULES[spec.dtype.bits], **choices))


def problem_of(spec: MatmulSpec) -> Problem | Inputs:
    if spec.zeros == "offset":
        return exhaustive_inputs(spec, m=3, seed=1)
    return exhaustive_problem(spec, m=3, seed=1)


def with_argument(index: int, change: Callable[[Any], Any]) -> Wrap:
    """Called with one argument changed."""
    return lambda right: lambda *a: right(*a[:index], change(a[index]), *a[index + 1 :])


def with_fields(**change: Callable[[Any], Any]) -> Wrap:
    """The right result but for some fields."""

    def wrong(right: Any) -> Any:
        def call(*arguments: Any) -> Any:
            result = right(*arguments)
            return replace(result, **{name: f(getattr(result, name)) for name, f in change.items()})

        return call

    return wrong


def registers(*order: int) -> Wrap:
    """The registers of the A fragment in another order."""
    return with_argument(0, lambda a: [a[i] for i in order])


def swapped(right: Any) -> Any:
    """The first two things that a function lists change places."""
    return lambda *a: (right(*a)[1], right(*a)[0], *right(*a)[2:])


def constant(number: float) -> Wrap:
    """Instead of a tile of scales or zeros, this number."""
    return lambda right: lambda self, tile, *_: self.p.constant(number, "f32", tile.layout)


def constant_per_row(number: float) -> Wrap:
    """Instead of numbers of rows, this one."""
    return lambda right: lambda self, name, element, total, row: self.p.constant(
        number, element, total.layout.reduce((1,))
    )


def exchanged(a: str, b: str) -> Wrap:
    """Two tensors of groups change places."""
    other = {a: b, b: a}
    return lambda right: lambda self, name, group: right(self, other.get(name, name), group)


def of_next_group(tensor: str) -> Wrap:
    """A tensor of groups is read one group on, within a step."""
    return lambda right: lambda self, name, group: right(
        self, name, (group + (name == tensor)) % self.plan.steps.groups
    )


def without_barrier(number: int) -> Wrap:
    """Leaves out one barrier, counted in program order."""

    def wrong(right: Any) -> Any:
        seen: list[Any] = []

        def call(op: Any, c: LoweringContext) -> None:
            seen.append(op)
            return c.pending.finish_reads() if len(seen) == number + 1 else right(op, c)

        return call

    return wrong


@dataclass(frozen=True)
class Mutation:
    """`owner.name`, or `owner[name]`, replaced by `wrap` of it, for a kernel of `spec` with some choices of its
    schedule changed."""

    what: str
    spec: MatmulSpec
    owner: Any
    name: str
    wrap: Wrap
    choices: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return self.what.replace(" ", "-")

    def kernel(self) -> CompiledKernel:
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(self.owner, dict):
                patch.setitem(self.owner, self.name, self.wrap(self.owner[self.name]))
            else:
                patch.setattr(self.owner, self.name, self.wrap(getattr(self.owner, self.name)))
            return compiled(self.spec, **dict(self.choices))


TWO_ROW_BLOCKS, TWO_SPLITS = (("row_blocks", 2),), (("split_k", 2), ("warps_k", 1))
WRONG_NUMBERS = [
    Mutation("rows of the fragment swapped", U4, lower_mma, "mma_sync", registers(1, 0, 3, 2)),
    Mutation("columns of the fragment swapped", U4, lower_mma, "mma_sync", registers(2, 3, 0, 1)),
    Mutation("fragment transposed", U4, lower_mma, "mma_sync", registers(0, 2, 1, 3)),
    Mutation("registers stored otherwise", U4, Packing, "place", with_argument(2, lambda r: r ^ 1)),
    Mutation("blocks stored otherwise", U4, Packing, "place", with_argument(1, lambda b: b ^ 1)),
    Mutation("registers of a run swapped", U6, recipes, "run_of", swapped),
    Mutation(
        "mask a bit too wide", U6, recipes.Field, "mask", lambda right: property(lambda f: right.fget(f) << 1 | 1)
    ),
    Mutation("offset off by one", I4, lower_dequant, "magic", with_fields(offset=lambda x: x + 1)),
    Mutation("sign lost", F6, lower_dequant, "float_places", with_fields(sign=lambda _: ())),
    Mutation("sign lost of four", F4, lower_dequant, "float_bytes", with_fields(sign=lambda f: replace(f, width=0))),
    Mutation("bytes exchanged", F4, lower_dequant, "float_bytes", with_fields(selector=lambda x: x ^ 0x1010)),
    Mutation("exponent off by one", F8, lower_dequant, "float_places", with_fields(factor=lambda x: 2 * x)),
    Mutation("nan lost", F8, lower_dequant, "float_places", with_fields(unit=lambda _: 0)),
    Mutation("table entry lost", NF4, lower_table, "words", lambda right: lambda *a: [*right(*a)[:-1], 0]),
    Mutation("scale dropped", NF4, ScaleConversion, "as_f32", constant(0.25)),
    Mutation("power of two dropped", F6, ScaleConversion, "with_exponent", lambda right: lambda self, scale: scale),
    Mutation("zero dropped", U4, ScaleConversion, "minus_zero", constant(0.0)),
    Mutation("offset dropped", OFFSET, ScaleConversion, "beside", lambda right: lambda self, s, _: self.p.mul(s, 0.0)),
    Mutation("scale and offset exchanged", OFFSET, Scales, "of_group", exchanged("scales", "offsets")),
    Mutation("offset of the next group", OFFSET, Scales, "of_group", of_next_group("offsets")),
    Mutation("offset of codes lost", I4_OFFSET, ScaleConversion, "with_code_offset", lambda right: lambda _, o, s: o),
    Mutation("scale of rows dropped", OFFSET, Epilogue, "per_row", constant_per_row(1.0)),
    Mutation("sum of x lost", FLOAT, Program, "row_sums", lambda right: lambda p, b, to: p.constant(0.0, "f32", to)),
    Mutation("zeros of groups exchanged", U4, Program, "decode", with_argument(5, lambda shifts: shifts[::-1])),
    Mutation("zero of one group for all", U4, Program, "decode", with_argument(5, lambda shifts: shifts[:1])),
    Mutation("padding of groups read", PADDED, Program, "copy_padded", with_argument(6, lambda padded: 50)),
    Mutation("one row too many", U4, Access, "_below", with_argument(2, lambda x: arith.addi(x, emit.constant(1)))),
    Mutation("one column too many", I4, Access, "_below", with_argument(2, lambda x: arith.addi(x, emit.constant(1)))),
    Mutation("one round too few", U4, Steps, "rounds", lambda right: property(lambda self: right.func(self) - 1)),
    Mutation("no clamp", U4, Access, "_linear", lambda right: lambda self, dim: True, TWO_ROW_BLOCKS),
    Mutation("tokens beyond m", U4, lower_mma._MatrixLoads, "__init__", with_argument(4, lambda m: emit.constant(8))),
    Mutation("splits miscounted", U6, Program, "last_arrival", with_argument(3, lambda n: n + 1), TWO_SPLITS),
]
WRONG_ORDER = [
    Mutation("no wait", U4, RULES, "lowbit.wait", lambda right: lambda op, c: None),
    Mutation(
        "wait for a round too few",
        U4,
        RULES,
        "lowbit.wait",
        lambda right: lambda op, c: nvvm.cp_async_wait_group(int_attr(op, "pending") + 1),
    ),
    *(
        Mutation(
            f"{stages} stages, {warps_n} warps along n, no barrier {number}",
            U4,
            RULES,
            "lowbit.barrier",
            without_barrier(number),
            (("num_stages", stages), ("warps_n", warps_n)),
        )
        # Arrived, (consumed,) after the loop, partial sums. One is spare: (1, 2) has two at the loop's end.
        for stages, warps_n, barriers in ((1, 1, (0, 1, 2, 3)), (1, 2, (0, 3)), (2, 1, (0, 1, 2)), (2, 2, (0, 1, 2)))
        for number in barriers
    ),
]


def failure(kernel: CompiledKernel, spec: MatmulSpec, *, racecheck: bool = False) -> str:
    """How a kernel fails its test; "" if it passes."""
    problem = problem_of(spec)
    try:
        y = run_matmul(kernel, spec, problem, racecheck=racecheck)
    except EmulatorError as error:
        return str(error)
    return "" if matmul_is_right(y, spec, problem) else "wrong numbers"


@pytest.mark.parametrize("spec", [U4, I4, U6, F6, F8, NF4, PADDED, OFFSET, I4_OFFSET], ids=str)
def test_nothing_mutated(spec: MatmulSpec) -> None:
    assert failure(compiled(spec), spec, racecheck=True) == ""


@pytest.mark.parametrize("mutation", WRONG_NUMBERS, ids=str)
def test_wrong_numbers(mutation: Mutation) -> None:
    assert failure(mutation.kernel(), mutation.spec) != ""


@pytest.mark.parametrize("mutation", WRONG_ORDER, ids=str)
def test_wrong_order(mutation: Mutation) -> None:
    """No barrier and no wait can go: the emulator sees it, whatever the numbers come to."""
    message = failure(mutation.kernel(), mutation.spec, racecheck=True)
    assert any(word in message for word in ("barrier", "never written", "waited", "in flight")), message


def test_transposed_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side of the layout: a weight packed with rows and columns of its blocks exchanged."""
    kernel, order = compiled(U4), Packing.fragment_order()
    monkeypatch.setattr(Packing, "fragment_order", staticmethod(lambda: order % 16 * 16 + order // 16))
    assert failure(kernel, U4) == "wrong numbers"


RESULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "unwritten": lambda y: torch.where(torch.arange(y.shape[1]) == 39, torch.nan, y),
    "tokens exchanged": lambda y: y.flip(0),
    "rows exchanged": lambda y: y.roll(1, 1),
    "transposed": lambda y: y.T.reshape(y.shape),
    "a percent off": lambda y: y * 1.01,
}


@pytest.mark.parametrize("change", RESULTS)
def test_tolerance_is_tight(change: str) -> None:
    problem = problem_of(U4)
    y = torch.from_numpy(matmul(U4, *problem)).to(TORCH[U4.out_dtype])
    assert matmul_is_right(y, U4, problem)
    assert not matmul_is_right(RESULTS[change](y), U4, problem)


@pytest.mark.parametrize("weight", ["u1", "u8", "i8", "f3e2m0", "f6e3m2", "nf4"])
def test_tolerance_sees_one_code(weight: str) -> None:
    """One code of the weight next to the right one moves results in f32 out of the tolerance."""
    spec = MatmulSpec(n=25, k=64, weight=weight, out="f32")
    problem = exhaustive_problem(spec, m=5)
    x, codes, *rest = problem
    values = spec.dtype.values()
    order = np.argsort(values, kind="stable")
    row, column = 7, 33
    code = int(codes[row, column]) & spec.dtype.codes - 1
    rank = int(np.flatnonzero(order == code)[0])
    near = int(order[rank - 1 if rank else 1])
    changed = codes.clone()
    changed[row, column] = int(values[near]) if spec.dtype.kind == "int" else near
    y = torch.from_numpy(matmul(spec, x, changed, *rest)).float()
    assert not matmul_is_right(y, spec, problem)
