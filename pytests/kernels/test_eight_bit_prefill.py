"""The prefill kernel for activations of 8 bits: its numbers in the emulator, with the race check; what it takes of a
multiprocessor; and which matmuls it serves.

As in `test_eight_bit`, sums are compared to the last bit where f32 holds all of them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from eight_bit_problems import FITTING, Problem, exact, run_quantized, whole_problem
from sweeps import every_other
from torch import Tensor

import lowbit
from lowbit.dialect.errors import EmulatorError, SpecError
from lowbit.dialect.formats.byte_codes import Compute
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight_format import Zeros
from lowbit.passes.builder import Program
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.eight_bit_prefill import codes, plan, product_sums, weight_bytes
from lowbit.passes.kernels.eight_bit_prefill.family import EightBitPrefill
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.eight_bit_prefill.registers import with_numbers_ahead
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule as Schedule
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.registry import request
from lowbit.passes.pipeline import CompiledKernel, compile_kernel
from lowbit.passes.targets import parse_target
from lowbit.pylib.reference import agrees, matmul, multiplied, random_inputs, random_problem, tolerance

HOPPER = parse_target("sm_90a")
FAMILY = EightBitPrefill()
SMALL = Schedule(16)


def compiled(spec: MatmulSpec, schedule: Schedule) -> CompiledKernel:
    return compile_kernel(request(spec, HOPPER, schedule))


def run(spec: MatmulSpec, schedule: Schedule, problem: Problem) -> Tensor:
    return run_quantized(compiled(spec, schedule), spec, problem)


def is_exact(spec: MatmulSpec, schedule: Schedule, m: int) -> bool:
    problem = whole_problem(spec, m)
    return torch.equal(run(spec, schedule, problem), exact(spec, problem))


# -- numbers


def spec_of(compute: Compute, weight: str, number: int) -> MatmulSpec:
    """A small spec of a format: group sizes and zeros take turns."""
    bits = dtype(weight).bits
    group = (256 if bits in (3, 5, 6, 7) else 32, None, 256)[number % 3]
    zeros = "int" if weight[0] in "ui" and number % 2 and bits < 8 else "none"
    spec = MatmulSpec(40, 4096, weight, group, zeros=zeros, compute=compute, out="f32")
    return replace(spec, k=bytes_plan(spec, SMALL, WGMMA).base.round.step + max(256, spec.packing.chunk))


@pytest.mark.parametrize(("compute", "weight"), every_other(FITTING))
def test_every_format_to_the_last_bit(compute: Compute, weight: str) -> None:
    assert is_exact(spec_of(compute, weight, FITTING.index((compute, weight)) // 2), SMALL, m=5)


FP8, I8 = {"compute": "f8e4m3"}, {"compute": "i8"}
CASES: list[tuple[dict[str, Any], Schedule, int]] = [
    # A tile after the other, rows and tokens that end inside of tiles, columns inside of a round.
    ({"weight": "u4", "n": 300, "k": 544, **I8}, SMALL, 70),
    ({"weight": "i4", "n": 200, "k": 1120, "group_size": 32, **FP8}, Schedule(16, num_stages=8), 20),
    ({"weight": "u4", "n": 130, "k": 1024, "group_size": 128, "zeros": "int", **FP8}, Schedule(32, banks=2), 40),
    ({"weight": "i4", "n": 128, "k": 1536, "group_size": 128, **FP8}, Schedule(48, parts=3, banks=2), 50),
    ({"weight": "i3", "n": 136, "k": 1024, "group_size": 64, "zeros": "int", **I8}, Schedule(32, parts=2), 40),
    ({"weight": "u2", "n": 128, "k": 2048, "group_size": 1024, "zeros": "int", **I8}, Schedule(32, parts=2), 33),
    ({"weight": "i8", "n": 130, "k": 1280, "group_size": 256, **I8}, Schedule(32, 256, banks=2), 40),
    ({"weight": "u8", "n": 128, "k": 2304, "group_size": 192, **I8}, Schedule(32, parts=2, banks=2), 20),
    ({"weight": "f8e4m3", "n": 128, "k": 1024, **FP8}, Schedule(32, parts=2, banks=2), 40),
    ({"weight": "f4e2m1", "n": 128, "k": 1088, "group_size": 32, **FP8}, Schedule(64, parts=4, banks=2), 60),
    # Codes of half a round in shared memory, and of none.
    ({"weight": "u4", "n": 136, "k": 2048, **I8}, Schedule(128, 256), 20),
    ({"weight": "i8", "n": 136, "k": 2048, **I8}, Schedule(128, 256), 20),
    # Clusters, of which one block may be beyond the last row.
    ({"weight": "u4", "n": 300, "k": 1024, "group_size": 64, **FP8}, Schedule(32, parts=2, banks=2, cluster=2), 70),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "schedule", "m"), CASES, ids=str)
def test_small_sizes_to_the_last_bit(choices: dict[str, Any], schedule: Schedule, m: int) -> None:
    assert is_exact(MatmulSpec(**choices, out="f32"), schedule, m)


@pytest.mark.parametrize(
    ("weight", "compute", "group"),
    [("u3", "i8", None), ("i4", "i8", 64), ("u2", "f8e4m3", None), ("f4e2m1", "f8e4m3", 32), ("f8e4m3", "f8e4m3", 128)],
)
def test_clusters(weight: str, compute: Compute, group: int | None) -> None:
    """A format of each kind. Blocks of a cluster copy x to one another."""
    assert is_exact(MatmulSpec(150, 512, weight, group, compute=compute, out="f32"), Schedule(16, cluster=2), 20)


LARGE = MatmulSpec(8192, 8192, "u4", 128, compute="i8", out="f32")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", FAMILY.candidates(LARGE, 4096, HOPPER), ids=str)
def test_what_is_chosen(schedule: Schedule) -> None:
    spec = replace(LARGE, n=272, k=2 * bytes_plan(LARGE, schedule, WGMMA).base.round.step)
    assert is_exact(spec, schedule, schedule.tokens + 9)


def test_any_number_of_rows_by_one_kernel() -> None:
    """As a user calls it: x is quantized, and one launch multiplies."""
    spec = MatmulSpec(128, 1024, "u4", 128, zeros="int", compute="f8e4m3", bias=True)
    mm = lowbit.compile(spec, "emulator:sm_90a")
    assert {mm.choices.launches(m)[0].family for m in (129, 300, 4096, 100000)} == {"eight_bit_prefill"}
    assert len(mm.choices.launches(100000)) == 1 and mm.choices.launches(17)[0].family == "eight_bit"
    x, *of_weight = random_problem(spec, 150)
    y, w = mm(x.view(2, 75, 1024), mm.pack(*of_weight)).view(150, 128), replace(spec, compute=None)
    seen = multiplied(spec, x)
    assert agrees(y, matmul(w, seen, *of_weight), tolerance(w, seen, *of_weight)).all()


def test_scales_of_rows_beside_those_of_groups() -> None:
    spec = MatmulSpec(136, 1024, "f4e2m1", 32, scale="e4m3", row_scales=True, compute="f8e4m3", out="f32")
    mm = lowbit.compile(spec, "emulator:sm_90a")
    x, tensors = random_inputs(spec, 133)
    seen, plain = multiplied(spec, x), replace(spec, compute=None)
    bound = tolerance(plain, seen, **tensors)
    assert agrees(mm(x, mm.pack(**tensors)), matmul(plain, seen, **tensors), bound).all()
    assert mm.choices.launches(133)[0].family == "eight_bit_prefill"


# -- that these tests can fail


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "power of two": (weight_bytes, "byte_exponent", lambda right: lambda *of: right(*of) + 1),
    "offset": (plan, "zero_code", lambda right: lambda t: right(t) - 1),
    "scales": (weight_bytes.PlainBytes, "scale_of", lambda right: lambda self, some, held: None),
    "part": (product_sums.PromotedSums, "_begin", lambda right: lambda self, some, part: right(self, some, 0)),
    "turn": (codes, "turn", lambda right: lambda number, *others: (right(number, *others)[0], *right(0, *others)[1:])),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutations_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrap = MUTATIONS[what]
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    spec = MatmulSpec(64, 1024, "i4", 128, compute="f8e4m3", out="f32")
    assert not is_exact(spec, Schedule(32, parts=2, banks=2), 30)


def test_codes_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a thread waits for one copy less, the emulator says so."""
    wait = Program.wait
    monkeypatch.setattr(Program, "wait", lambda self, pending=0: wait(self, pending + 1))
    with pytest.raises(EmulatorError, match="has not waited for"):
        is_exact(MatmulSpec(64, 1024, "i4", 128, compute="f8e4m3", out="f32"), SMALL, 10)


# -- plans


@pytest.mark.parametrize(
    ("compute", "panel_k", "group"),
    [("i8", 128, 384), *product(("i8", "f8e4m3"), (128, 256), (32, 64, 128, 256, 1024))],
)
def test_products_cover_every_column(compute: Compute, panel_k: int, group: int) -> None:
    """Once, in order, and each is of one group; those of f8e4m3 have at most 128 columns."""
    spec = MatmulSpec(128, 6144, "u8" if compute == "i8" else "u4", group, compute=compute)
    made = bytes_plan(spec, Schedule(16, panel_k), WGMMA)
    panels, step, groups = made.base.round.panels, made.base.round.step, max(1, made.base.scaling.groups)
    found = [(panel * panel_k + some.start, some) for panel in range(panels) for some in made.products.of_panel(panel)]
    assert [start for start, _ in found] == [sum(some.width for _, some in found[:i]) for i in range(len(found))]
    assert sum(some.width for _, some in found) == step
    size = step // groups
    assert all(some.group == start // size == (start + some.width - 1) // size for start, some in found)
    assert max(some.width for _, some in found) <= (panel_k if compute == "i8" else 128)
    held = made.held.of(made.base.tensors.every["scales"])
    assert made.base.round.pieces % made.held.pieces == 0 and groups % held == 0
    of_panels = [{some.group for some in made.products.of_panel(panel)} for panel in range(panels)]
    assert held >= max(map(len, of_panels))


@pytest.mark.parametrize(
    ("group", "zeros", "folds", "scales", "of_zeros"),
    [  # of 4, 8 or 16 in a round of 512 columns, of which a panel needs a fourth
        (128, "int", True, 4, 4),
        (64, "int", True, 8, 8),
        (32, "int", True, 8, 8),
        (32, "float", True, 4, 4),  # which take registers that numbers ahead would take
        (128, "none", True, 4, 0),
        (128, "int", False, 1, 4),  # scales are for sums, behind products
    ],
)
def test_numbers_that_bytes_are_made_with_come_early(
    group: int, zeros: Zeros, folds: bool, scales: int, of_zeros: int
) -> None:
    spec = MatmulSpec(8192, 8192, "u4", group, zeros=zeros, compute="i8", fold_scales=folds)
    schedule = Schedule(256, num_stages=4, cluster=2, parts=1 if folds else 4)
    made = with_numbers_ahead(bytes_plan(spec, schedule, WGMMA))
    assert made.base.round.step == 512
    held = {name: made.held.of(tensor) for name, tensor in made.base.tensors.every.items()}
    assert held == {"scales": scales, **({"zeros": of_zeros} if of_zeros else {})}


@pytest.mark.parametrize(
    ("weight", "schedule", "stages"),
    [  # of i8, whose sums the tensor core keeps
        ("u4", Schedule(256), 4),
        ("i8", Schedule(256), 4),
        ("u3", Schedule(256), 2),
        ("i8", Schedule(256, last_tokens=32, cluster=2), 4),
        ("u4", Schedule(128, 256), 4),
        ("i8", Schedule(128, 256), 2),
        ("u4", Schedule(256, split_k=2), 0),
    ],
    ids=str,
)
def test_codes_wait_in_the_shared_memory_that_is_left(weight: str, schedule: Schedule, stages: int) -> None:
    spec = MatmulSpec(8192, 8192, weight, compute="i8")
    made = bytes_plan(spec, schedule, WGMMA)
    assert made.held.code_stages == stages and (stages == 0 or made.base.round.pieces % stages == 0)
    codes_of_rows = stages * 128 * made.base.round.piece * spec.packing.bits // 8
    found = compiled(spec, schedule).launch.shared_bytes
    assert found - codes_of_rows <= made.base.shared_bytes and found <= HOPPER.max_shared_per_block


# -- resources

VARIANTS: list[dict[str, Any]] = [
    {"weight": "u4", "compute": "f8e4m3"},
    {"weight": "i4", "compute": "f8e4m3", "group_size": 32},
    {"weight": "u4", "compute": "f8e4m3", "zeros": "int"},
    {"weight": "f8e4m3", "compute": "f8e4m3", "group_size": None},
    {"weight": "u4", "compute": "i8", "zeros": "int"},
    {"weight": "i8", "compute": "i8"},
    {"weight": "u3", "compute": "i8", "group_size": None},
]


@pytest.mark.parametrize(
    ("choices", "tokens"),
    [(choices, (129, 512, 4096)[(i + j) % 3]) for i, choices in enumerate(VARIANTS) for j in range(2)],
    ids=str,
)
def test_no_spills_and_products_overlap(choices: dict[str, Any], tokens: int) -> None:
    """Of what the rule takes. A block has all of a multiprocessor, and needs its registers."""
    spec = MatmulSpec(8192, 8192, **({"group_size": 128} | choices))
    found = FAMILY.candidates(spec, tokens, HOPPER)
    kernel = compiled(spec, min(found, key=lambda s: FAMILY.predict(spec, tokens, s, HOPPER)))
    used = resource_usage(kernel.ptx, HOPPER)
    assert (used.spill_stores, used.spill_loads, used.serialized) == (0, 0, False), kernel.schedule
    assert used.registers <= 255 and kernel.launch.shared_bytes <= HOPPER.max_shared_per_block


# -- what it serves

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zeros": "int", "weight": "u8", "compute": "i8"}, "differences of codes and zeros that are no bytes"),
    ({"k": 2176, "group_size": 1088}, "groups of 1088 and rounds of 512 columns must divide one another"),
    ({"compute": None}, "needs compute='f8e4m3' or 'i8'"),
]


@pytest.mark.parametrize(("choices", "message"), REFUSED, ids=str)
def test_what_it_refuses(choices: dict[str, Any], message: str) -> None:
    spec = MatmulSpec(**({"n": 128, "k": 1024, "weight": "u4", "group_size": 128, "compute": "f8e4m3"} | choices))
    with pytest.raises(SpecError, match=message):
        request(spec, HOPPER, SMALL)


def test_other_targets() -> None:
    spec = MatmulSpec(128, 1024, "u4", 128, compute="i8")
    for target in ("sm_80", "sm_89", "sm_90"):
        assert FAMILY.token_tiles(spec, parse_target(target)) == ()
    with pytest.raises(SpecError, match="needs sm_90a"):
        request(spec, parse_target("sm_80"), SMALL)
    assert FAMILY.token_tiles(replace(spec, compute=None), HOPPER) == ()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"panel_k": 64}, "panel_k=64 must be one of 128, 256 for EightBitPrefillSchedule"),
        ({"parts": 5}, "parts=5 must be one of 1, 2, 3, 4, 6, 8"),
        ({"tokens": 48, "parts": 2}, "parts=2 must cut tokens=48 into multiples of 16"),
        ({"banks": True}, "banks=True must be one of 1, 2"),
    ],
)
def test_a_wrong_schedule_names_the_field(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Schedule(**choices)


def test_a_schedule_of_the_other_family() -> None:
    spec = MatmulSpec(128, 1024, "u4", 128, compute="i8")
    with pytest.raises(SpecError, match="activations of 8 bits"):
        request(spec, HOPPER, PrefillSchedule(16))
