"""Prompts of invariant matmuls: the kernel for many tokens gives the bits of those for few, in every format."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from eight_bit_problems import in_order as by_definition
from sweeps import swept

import lowbit
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats import byte_codes
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.base import KernelRequest, KernelSchedule
from lowbit.passes.kernels.eight_bit_in_order.schedule import EightBitInOrderSchedule
from lowbit.passes.kernels.eight_bit_mma_in_order.schedule import EightBitMmaInOrderSchedule
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill_in_order.legality import products_of
from lowbit.passes.kernels.prefill_in_order.plan import InOrderPlan
from lowbit.passes.kernels.prefill_in_order.schedule import PrefillInOrderSchedule
from lowbit.passes.kernels.prefill_mma_in_order.schedule import PrefillMmaInOrderSchedule
from lowbit.passes.kernels.registry import FAMILIES, family_of, request
from lowbit.passes.kernels.sum_order import SumOrder
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.scheduling import choice, order_choice, order_tables
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.pylib.build import kernels
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.reference.inputs import random_inputs

S = lowbit.MatmulSpec
K, ROWS = 512, 136
SPECS = {
    "u4": S(136, K, "u4", 128, bias=True),
    "u4, zeros": S(128, K, "u4", 64, zeros="int"),
    "zeros beside scales in f32": S(128, K, "u4", 64, zeros="int", scale="f32"),
    "zeros beside scales of e4m3": S(128, K, "u4", 16, zeros="int", scale="e4m3", row_scales=True),
    "i4 in bf16": S(128, K, "i4", 128, act="bf16", scale="bf16"),
    "nf4": S(128, K, "nf4", 64, act="bf16", scale="bf16"),
    "i8": S(128, K, "i8"),
    "u8, zeros of rows": S(128, K, "u8", zeros="int"),
    "f6": S(128, K, "f6e3m2", row_scales=True),
    "scales of rows beside groups": S(128, K, "u4", 64, row_scales=True),
    "small groups": S(128, K, "u4", 16),
    "u3": S(128, K, "u3", 32, scale="f32"),
    "nvfp4": S.preset("nvfp4", 128, K),
    "mxfp4": S.preset("mxfp4", 128, K),
    "gated": S(256, K, "u4", 64, epilogue="silu_mul"),
    "permuted": S(128, K, "i4", 64, permuted=True),
    "zeros beside powers of two": S(128, K, "u4", 32, zeros="int", scale="e8m0", act="bf16"),
    "float zeros": S(136, K, "u4", 64, zeros="float", bias=True),
    "float zeros of signed codes": S(128, K, "i4", 128, zeros="float", scale="f32"),
    "float zeros of small groups": S(128, K, "u2", 16, zeros="float"),
    "offsets": S(128, K, "u3", 32, zeros="offset", act="bf16", scale="bf16"),
    "offsets beside scales in f16": S(128, K, "u3", 32, zeros="offset", act="bf16"),
    "offsets of floats": S(128, K, "f4e2m1", 64, zeros="offset", row_scales=True),
    "float zeros of rows": S(128, K, "u4", zeros="float"),
    "offsets of rows": S(128, K, "i8", zeros="offset", act="bf16", scale="bf16", row_scales=True),
    "q4_k": S.preset("q4_k", 128, 2 * K),
    "q2_k in bf16": replace(S.preset("q2_k", 128, 2 * K), act="bf16"),
    "second levels with zeros": S(
        128, K, "u3", 16, zeros="float", scale="u3", bilevel=Bilevel(rows=16, groups=1, zeros=True)
    ),
    "q3_k": S.preset("q3_k", 128, 2 * K),
    "nested nf4": S.preset("nf4_nested", 128, K, act="bf16"),
    "fp8": S(136, K, "f8e4m3", compute="f8e4m3", bias=True),
    "groups in fp8": S(128, K, "f8e4m3", 128, compute="f8e4m3"),
    "scales of rows beside groups in fp8": S(128, K, "u4", 64, compute="f8e4m3", row_scales=True),
    "signed codes in fp8": S(128, K, "i4", 256, compute="f8e4m3"),
    "in i8": S(128, K, "i8", compute="i8"),
    "scales of rows in i8": S(128, K, "i4", compute="i8", row_scales=True),
    "groups in i8": S(128, K, "u4", 128, compute="i8"),
    "zeros in i8": S(256, K, "u4", 64, zeros="int", compute="i8", epilogue="silu_mul"),
    "zeros of rows in i8": S(128, K, "u8", zeros="int", compute="i8"),
}
TARGET, AMPERE, ADA = (parse_target(f"emulator:{name}") for name in ("sm_90a", "sm_80", "sm_89"))
DECODE, PREFILL = FAMILIES["decode"], FAMILIES["prefill_in_order"]
TILE = 160
"""A token tile that schedules are chosen for: `ROWS` are whole and cut tiles of these."""


MMA, MMA_OF_BYTES = PrefillMmaInOrderSchedule(), EightBitMmaInOrderSchedule()


def invariant(name: str) -> lowbit.MatmulSpec:
    return replace(SPECS[name], out="f32", invariant=True)


def in_order(
    family: Any, spec: lowbit.MatmulSpec, tile: int, order: SumOrder, target: Target = TARGET
) -> list[Any]:
    return [s for group in family.in_order(spec.for_tokens(1), tile, target, order) for s in group.schedules]


def has_order(
    family: Any, spec: lowbit.MatmulSpec, tile: int, order: SumOrder, target: Target = TARGET
) -> bool:
    return any(group.schedules for group in family.in_order(spec.for_tokens(1), tile, target, order))


def multiplied(
    spec: lowbit.MatmulSpec,
    schedule: Any,
    order: SumOrder,
    x: torch.Tensor,
    tensors: Any,
    target: Target = TARGET,
) -> torch.Tensor:
    """Returns y by a kernel with a schedule, as if its order had been chosen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "order_of", lambda spec, target: order)
        patch.setattr(kernels, "chooser_of", choice.Chooser)  # not one that has asked for the order before
        mm = Matmul(spec, target, schedule)
        assert mm.kernel(len(x)).schedule == schedule
        return mm(x, mm.pack(**tensors))


def families_of(spec: lowbit.MatmulSpec, target: Target) -> tuple[Any, Any]:
    """Returns the family for few tokens, and that for many."""
    few, many = ("eight_bit", "eight_bit") if spec.compute else ("decode", "prefill")
    return FAMILIES[few], FAMILIES[f"{many}_in_order" if target.has_wgmma else f"{many}_mma_in_order"]


def order_of(spec: lowbit.MatmulSpec, target: Target, chance: random.Random) -> SumOrder:
    """Returns an order that kernels for few tokens and for many have, one of several chains and parts if there is."""
    few, many = families_of(spec, target)
    orders = sorted(few.orders(spec, target), key=lambda o: ((o.parts > 1) + (o.chains > 1), chance.random()))
    serving = ((few, 8), (many, TILE))
    return next(o for o in reversed(orders) if all(has_order(f, spec, tile, o, target) for f, tile in serving))


def without_wgmma(spec: lowbit.MatmulSpec) -> Target:
    """Returns a target that has none, but the instructions that the spec needs."""
    return ADA if spec.compute == "f8e4m3" else AMPERE


def met_by_a_prompt(row: tuple[str, bool]) -> Iterator[Hashable]:
    """Yields every spec, and its zeros, scales, products and epilogue with its engine, one by one and two by two."""
    name, by_wgmma = row
    yield name
    spec = SPECS[name]
    groups = spec.group_size and min(spec.group_size, 64)
    values = {"zeros": spec.zeros, "groups": groups, "levels": spec.bilevel, "compute": spec.compute}
    values |= {"scale": spec.scale, "rows": spec.row_scales}
    values |= {"act": spec.act, "epilogue": spec.epilogue, "permuted": spec.permuted}
    yield from ((by_wgmma, each) for each in values.items())
    yield from ((by_wgmma, *pair) for pair in combinations(list(values.items())[:4], 2))


@pytest.mark.parametrize(("name", "by_wgmma"), swept(product(SPECS, (True, False)), met_by_a_prompt))
def test_rows_of_a_prompt_have_the_bits_that_few_have(name: str, by_wgmma: bool) -> None:
    """Of several chains and parts of k where a format has such orders; beside a row of NaN, in cut and whole tiles."""
    spec, chance = invariant(name), random.Random(name)
    target = TARGET if by_wgmma else without_wgmma(spec)
    for_few, for_many = families_of(spec, target)
    order = order_of(spec, target, chance)
    x, tensors = random_inputs(spec, ROWS, 1)
    x[70] = float("nan")
    few = multiplied(spec, in_order(for_few, spec, 8, order, target)[-1], order, x[:8], tensors, target)
    schedule = chance.choice(in_order(for_many, spec, TILE, order, target))
    many = multiplied(spec, schedule, order, x, tensors, target)
    assert torch.equal(many[:8], few)
    assert many[70].isnan().all() and not many[-1].isnan().any()


INTEGERS = [name for name in byte_codes.fitting_names("i8") if name not in ("u1", "i1")]


def met_by_integers(row: tuple[Any, ...]) -> Iterator[Hashable]:
    """Yields every two values that meet, but weights with groups, which have nothing to do with one another."""
    weight, zeros, group, row_scales, by_wgmma = row
    yield from ((weight, zeros), (weight, by_wgmma))
    yield from combinations((("zeros", zeros), ("group", group), ("rows", row_scales), ("wgmma", by_wgmma)), 2)


@pytest.mark.parametrize(
    ("weight", "zeros", "group", "row_scales", "by_wgmma"),
    swept(product(INTEGERS, ("none", "int"), (32, 128, None), (False, True), (True, False)), met_by_integers),
)
def test_products_of_integers_are_exact(
    weight: str, zeros: Any, group: int | None, row_scales: bool, by_wgmma: bool
) -> None:
    """So kernels give the bits of the definition, whether they multiply codes as they are stored, less their zeros, or
    with signs."""
    spec = S(128, K, weight, group, zeros=zeros, row_scales=row_scales, compute="i8", out="f32", invariant=True)
    target, chance = TARGET if by_wgmma else AMPERE, random.Random(f"{spec}")
    for_few, for_many = families_of(spec, target)
    order = order_of(spec, target, chance)
    assert order.products == ("bytes",)
    x, tensors = random_inputs(spec, ROWS, 1)
    x[3], x[5] = x[3].abs(), -x[5].abs()  # sums of x as large as they become
    expected = by_definition(spec, order, x, tensors)
    for family, m in ((for_few, 8), (for_few, 32), (for_many, ROWS)):
        schedule = chance.choice(in_order(family, spec, TILE if m == ROWS else m, order, target))
        assert torch.equal(multiplied(spec, schedule, order, x[:m], tensors, target), expected[:m]), schedule


@pytest.mark.parametrize(
    ("name", "row_blocks"),
    [("u4", 1), ("u4", 2), ("float zeros of small groups", 2), ("u8, zeros of rows", 1), ("zeros in i8", 2)],
)
def test_every_tile_of_mma_sync_has_the_bits_of_every_row(name: str, row_blocks: int) -> None:
    """In any number of rows of x, in whole tiles and cut ones, one launch gives those of a call of one row."""
    spec = invariant(name)
    (for_few, for_many), order = families_of(spec, AMPERE), order_of(spec, AMPERE, random.Random(name))
    tiles = {s.tokens: s for s in in_order(for_many, spec, TILE, order, AMPERE) if s.row_blocks == row_blocks}
    x, tensors = random_inputs(spec, 301, 1)
    few, places = in_order(for_few, spec, 8, order, AMPERE)[0], (0, 63, 64, 200, 300)
    alone = torch.cat([multiplied(spec, few, order, x[i : i + 1], tensors, AMPERE) for i in places])
    for schedule, m in zip(tiles.values(), (301, 129, 201, 133)):
        here = [i for i, place in enumerate(places) if place < m]
        many = multiplied(spec, schedule, order, x[:m], tensors, AMPERE)
        assert torch.equal(many[[places[i] for i in here]], alone[here]), schedule


@pytest.mark.parametrize(
    ("name", "cut"), [("q4_k", (1, 4, 128)), ("q3_k", (1, 2, 256)), ("float zeros of small groups", (1, 2, 128))]
)
def test_rounds_whose_columns_lie_apart_have_many_scales(name: str, cut: tuple[int, int, int]) -> None:
    """They are copied to shared memory in runs of columns that are side by side; second levels may be of more."""
    spec = invariant(name)
    order = SumOrder.of(spec, *cut, products_of(spec))
    plans = [(s, PersistentPlan(spec, s, WGMMA)) for s in in_order(PREFILL, spec, TILE, order)]
    schedule = next(s for s, plan in plans if plan.tensors.staged and not plan.tiles.chains.are_whole)
    x, tensors = random_inputs(spec, ROWS, 1)
    few = multiplied(spec, in_order(DECODE, spec, 8, order)[-1], order, x[:8], tensors)
    assert torch.equal(multiplied(spec, schedule, order, x, tensors)[:8], few)


@pytest.mark.parametrize("target", [TARGET, AMPERE], ids=str)
def test_another_order_gives_other_bits(target: Target) -> None:
    """Which the tests above would see."""
    spec = replace(invariant("u4"), group_size=64)
    family = families_of(spec, target)[1]
    x, tensors = random_inputs(spec, ROWS, 1)
    found: list[torch.Tensor] = []
    for cut in ((1, 1, 64), (1, 2, 64), (1, 4, 64)):
        order = SumOrder(*cut, ("mma", "raw codes"))
        schedule = in_order(family, spec, TILE, order, target)[0]
        found.append(multiplied(spec, schedule, order, x, tensors, target))
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize(("k", "target", "group"), swept(product((576, 1344), (TARGET, AMPERE), (64, 192))), ids=str)
def test_k_need_not_be_whole_chains(k: int, target: Target, group: int) -> None:
    """Columns beyond the last are zeros of x. Steps may be parts of groups, whose columns lie apart in a round."""
    spec, step = replace(invariant("u4"), k=k, group_size=group), 128 if group == 64 else 64
    order = SumOrder(1, 4, step, ("mma", "raw codes"))
    x, tensors = random_inputs(spec, ROWS, 1)
    for_few, for_many = families_of(spec, target)
    few = multiplied(spec, in_order(for_few, spec, 8, order, target)[0], order, x[:8], tensors, target)
    schedule = in_order(for_many, spec, TILE, order, target)[0]
    assert torch.equal(multiplied(spec, schedule, order, x, tensors, target)[:8], few)


@pytest.mark.parametrize(
    ("name", "k", "cut", "shape"),
    [
        ("u4", 1280, (1, 1, 256), {"last_tokens": 16}),
        ("u4", 1536, (1, 2, 256), {"panel_k": 64, "num_stages": 8}),
        ("float zeros of small groups", 1280, (1, 1, 256), {}),
        ("float zeros of small groups", 1536, (1, 2, 256), {"cluster": 2}),
    ],
)
def test_rounds_of_half_the_stages(name: str, k: int, cut: tuple[int, int, int], shape: dict[str, Any]) -> None:
    """Of chains of 2.5 and 1.5 rounds of all stages no columns beyond the last are multiplied; a panel's stage is
    another in the next round, and in the next tile of a block, since the first chain has five rounds."""
    spec = replace(invariant(name), n=136, k=k, group_size=64 if name == "u4" else 16)
    order = SumOrder.of(spec, *cut, products_of(spec))
    cuts = dict(zip(("order_parts", "order_chains", "order_step_k"), cut))
    schedule = PrefillInOrderSchedule(32, **{"panel_k": 128, "num_stages": 4, "parts": 2, "banks": 1, **shape}, **cuts)
    plan = PersistentPlan(spec, schedule, WGMMA)
    assert plan.round.turns == 2 and plan.tiles.rounds * plan.round.step == k
    x, tensors = random_inputs(spec, ROWS, 1)
    few = multiplied(spec, in_order(DECODE, spec, 8, order)[-1], order, x[-8:], tensors)
    assert torch.equal(multiplied(spec, schedule, order, x, tensors)[-8:], few)


@pytest.mark.parametrize(
    ("name", "cut", "shape", "shared"),
    [
        ("u4, zeros", (1, 2, 256), {"tokens": 256}, 160),
        ("float zeros", (1, 2, 256), {"tokens": 224, "cluster": 2}, 96),
        ("i8", (1, 4, 128), {"tokens": 224, "last_tokens": 32}, 128),
        ("u8, zeros of rows", (1, 4, 128), {"tokens": 192}, 48),
        ("u4, zeros", (1, 1, 256), {"tokens": 256}, 0),
    ],
)
def test_totals_in_shared_memory(
    name: str, cut: tuple[int, int, int], shape: dict[str, Any], shared: int
) -> None:
    """Sums of chains for which wide tiles leave no registers: they give the same bits, and hardly anything spills."""
    spec = replace(invariant(name), k=4 * K)
    cuts = dict(zip(("order_parts", "order_chains", "order_step_k"), cut))
    schedule = PrefillInOrderSchedule(**{"panel_k": 64, "num_stages": 4, "parts": 1, "banks": 1, **shape, **cuts})
    plan = InOrderPlan(spec, schedule, WGMMA)
    assert plan.shared_tokens == shared
    kernel = compile_kernel(request(spec, parse_target("sm_90a"), schedule))
    assert kernel.launch.shared_bytes == plan.shared_bytes
    used = resource_usage(kernel.ptx, parse_target("sm_90a"))
    assert max(used.spill_stores, used.spill_loads) <= 40 and not used.serialized
    order, rows = SumOrder.of(spec, *cut, products_of(spec)), schedule.tokens + 20
    x, tensors = random_inputs(spec, rows, 1)
    few = multiplied(spec, in_order(DECODE, spec, 8, order)[-1], order, x[-8:], tensors)
    many = multiplied(spec, schedule, order, x, tensors)
    assert torch.equal(many[-8:], few)
    assert torch.equal(multiplied(spec, replace(schedule, tokens=64, last_tokens=0), order, x, tensors), many)


@pytest.mark.parametrize("name", ["u4, zeros", "float zeros"])
def test_a_single_chain_has_two_rounds(name: str) -> None:
    """However short k is: of one round the assembler would have every product wait for the one before."""
    spec = replace(invariant(name), n=512, k=256)
    shape = {"tokens": 256, "panel_k": 64, "num_stages": 4, "cluster": 2, "parts": 1, "banks": 1}
    schedule, target = PrefillInOrderSchedule(**shape, order_step_k=64), parse_target("sm_90a")
    usual = replace(spec, out="f16", bias=False)
    assert not resource_usage(compile_kernel(request(usual, target, schedule)).ptx, target).serialized
    order = PREFILL.sum_order(spec, schedule)
    assert order is not None
    x, tensors = random_inputs(spec, 270, 1)
    few = multiplied(spec, in_order(DECODE, spec, 8, order)[0], order, x[-8:], tensors)
    assert torch.equal(multiplied(spec, schedule, order, x, tensors)[-8:], few)


@pytest.mark.parametrize("by_wgmma", [True, False])
def test_x_is_added_up_step_by_step_for_zeros_of_rows(by_wgmma: bool) -> None:
    """Where panels hold several steps, too."""
    spec, target = invariant("float zeros of rows"), TARGET if by_wgmma else AMPERE
    schedule = (PrefillInOrderSchedule if by_wgmma else PrefillMmaInOrderSchedule)(panel_k=128, order_step_k=64)
    order = SumOrder(1, 1, 64, products_of(spec))
    x, tensors = random_inputs(spec, ROWS, 1)
    few = multiplied(spec, in_order(DECODE, spec, 8, order, target)[0], order, x[:8], tensors, target)
    assert torch.equal(multiplied(spec, schedule, order, x, tensors, target)[:8], few)


ASSEMBLED = [parse_target(name) for name in ("sm_90a", "sm_80")]
IN_TYPE = [("u4", "f16"), ("u3", "bf16"), ("f6e3m2", "bf16"), ("nf4", "f16"), ("i8", "bf16")]


@pytest.mark.parametrize("target", ASSEMBLED, ids=str)
@pytest.mark.parametrize(("weight", "act"), IN_TYPE)
def test_few_spills(weight: str, act: Any, target: Target) -> None:
    """Of what is chosen for a prompt few registers are spilled, none with u4, and no product waits for another."""
    spec = S(8192, 8192, weight, 128, act=act, invariant=True)
    (kernel,) = lowbit.compile(spec, target.name).choices.launches(512)
    assert kernel.family == families_of(spec, target)[1].name
    check_registers(kernel, most=128 if weight != "u4" else 0 if target.has_wgmma else 8)


def check_registers(kernel: KernelRequest, most: int) -> None:
    """Fails if more than so many bytes are spilled."""
    used = resource_usage(compile_kernel(kernel).ptx, kernel.target)
    assert max(used.spill_stores, used.spill_loads) <= most and not used.serialized, kernel.schedule


OF_MORE_NUMBERS = {
    "float zeros": S(8192, 8192, "u4", 128, zeros="float"),
    "float zeros of rows": S(8192, 8192, "u4", zeros="float"),
    "float zeros of u3": S(8192, 8192, "u3", 64, zeros="float", act="bf16"),
    "q4_1": S.preset("q4_1", 8192, 8192),
    "q4_k": S.preset("q4_k", 8192, 8192),
    "q6_k": S.preset("q6_k", 8192, 8192),
    "fp8": S(8192, 8192, "f8e4m3", compute="f8e4m3"),
    "zeros in fp8": S(8192, 8192, "u4", 128, zeros="int", compute="f8e4m3"),
    "i8": S(8192, 8192, "i8", compute="i8"),
    "groups of i4 in i8": S(8192, 8192, "i4", 64, compute="i8"),
}


def met_by_more_numbers(row: tuple[str, bool]) -> Iterator[Hashable]:
    """Yields every spec, and its zeros, second levels and products with its engine."""
    name, by_wgmma = row
    spec = OF_MORE_NUMBERS[name]
    yield name
    yield from ((by_wgmma, each) for each in (spec.zeros, spec.bilevel, spec.compute))


@pytest.mark.parametrize(("name", "by_wgmma"), swept(product(OF_MORE_NUMBERS, (True, False)), met_by_more_numbers))
def test_few_spills_beside_sums_of_x_and_second_levels(name: str, by_wgmma: bool) -> None:
    """Whether these kernels are chosen or not, the one that is predicted to be the fastest. By mma.sync float zeros of
    u3 spill the most, in every tile."""
    spec = replace(OF_MORE_NUMBERS[name], invariant=True)
    target = parse_target("sm_90a" if by_wgmma else without_wgmma(spec).arch)
    family = families_of(spec, target)[1]
    every = order_choice.ranked_orders(spec, target, 1.5)
    best_order = min((r for r in every if has_order(family, spec, 512, r.order, target)), key=lambda r: r.all).order
    found = in_order(family, spec, 512, best_order, target)
    best = min(found, key=lambda s: family.predict(spec, 512, s, target))
    check_registers(request(spec, target, best), most=128 if by_wgmma else 224)


PROMPTS = [((4096, 4096), None), ((6144, 2560), None), ((57344, 8192), None), ((8192, 8192), "i8")]


@pytest.mark.parametrize("target", ["sm_80", "sm_120"])
@pytest.mark.parametrize("compute", [None, "i8"])
def test_prompts_without_wgmma_are_one_launch(compute: Any, target: str) -> None:
    """From the first number of rows on that takes more than two launches for few."""
    spec = S(8192, 8192, "u4", 128, compute=compute, invariant=True)
    launches = [lowbit.compile(spec, target).choices.launches(m) for m in (129, 200, 512, 5000)]
    assert [[kernel.family for kernel in each] for each in launches] == [[families_of(spec, AMPERE)[1].name]] * 4


@pytest.mark.parametrize(("size", "compute"), PROMPTS, ids=str)
def test_prompts_are_one_launch(size: tuple[int, int], compute: Any) -> None:
    """And few tokens are predicted to take no longer than `SLACK` allows because of it."""
    spec = S(*size, "u4", 128, compute=compute, invariant=True)
    choices, name = lowbit.compile(spec, "sm_90a").choices, "eight_bit_in_order" if compute else "prefill_in_order"
    assert [kernel.family for m in (200, 512, 5000) for kernel in choices.launches(m)] == [name] * 3
    ranked = order_choice.ranked_orders(spec, TARGET, 1.5)
    chosen = next(r for r in ranked if r.order == order_choice.predicted_order(spec, TARGET))
    assert chosen.few <= order_choice.SLACK * min(r.few for r in ranked)


@pytest.mark.parametrize(
    ("spec", "schedule", "message"),
    [
        (S(128, 1024, "u4", 128), PrefillInOrderSchedule(), "is for invariant matmuls; take a PrefillSchedule"),
        (
            S(128, 1024, "u4", 64, outliers=True, invariant=True),
            PrefillInOrderSchedule(),
            "does not serve experts, products of 8 bits and outliers; take a Schedule",
        ),
        (
            S(128, 1024, "u4", zeros="float", invariant=True),
            PrefillInOrderSchedule(order_step_k=256),
            "do not hold steps of 256, over which x is added; take another panel_k",
        ),
        (
            S(128, 1024, "u4", 128, invariant=True),
            PrefillInOrderSchedule(panel_k=64, order_chains=2),
            "panels of panel_k=64 columns do not hold products of 128; take another panel_k",
        ),
        (S(128, 1024, "u4", 128, compute="i8"), EightBitInOrderSchedule(), "invariant matmuls; take an EightBitP"),
        (
            S(128, 1024, "i4", compute="f8e4m3", invariant=True),
            EightBitInOrderSchedule(),
            "does not serve sums of x in f8e4m3 over whole rows, which depend on their order; take an EightBitSchedule",
        ),
        (
            S(128, 1024, "u4", 256, compute="i8", invariant=True),
            EightBitInOrderSchedule(order_chains=2, order_step_k=256),
            "panels of panel_k=128 columns do not hold products of 256; take another panel_k",
        ),
        (S(128, 1024, "u4", 128, invariant=True), MMA, "does not serve emulator:sm_90a, which has wgmma"),
        (S(128, 1024, "u4", compute="i8", invariant=True), MMA_OF_BYTES, "serve emulator:sm_90a, which has wgmma"),
    ],
)
def test_what_does_not_fit_is_refused(spec: lowbit.MatmulSpec, schedule: KernelSchedule, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        family_of(schedule).check(spec, schedule, TARGET)


@pytest.mark.parametrize(
    ("spec", "schedule", "message"),
    [
        (S(128, 1024, "u4", 128), MMA, "is for invariant matmuls; take a PrefillMmaSchedule"),
        (S(128, 1024, "u4", 128, invariant=True), PrefillInOrderSchedule(), "prefill needs sm_90a, the target is emul"),
        (S(128, 1024, "u4", 128, outliers=True, invariant=True), MMA, "does not serve experts, products of 8 bits"),
        (
            S(128, 1024, "u4", 128, invariant=True),
            PrefillMmaInOrderSchedule(panel_k=64),
            "panels of panel_k=64 columns do not hold products of 128; take another panel_k",
        ),
        (
            S(128, 1024, "u4", 128, invariant=True),
            PrefillMmaInOrderSchedule(256, 256, order_step_k=256),
            "bytes of shared memory, emulator:sm_80 allows",
        ),
        (S(128, 1024, "u4", 128, compute="i8"), MMA_OF_BYTES, "invariant matmuls; take an EightBitPrefillMmaS"),
        (
            S(128, 1024, "u4", 64, compute="i8", invariant=True),
            EightBitMmaInOrderSchedule(order_parts=2, order_chains=2, order_step_k=128, num_stages=4),
            "rounds of 512 columns",
        ),
    ],
)
def test_what_does_not_fit_without_wgmma_is_refused(
    spec: lowbit.MatmulSpec, schedule: KernelSchedule, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        family_of(schedule).check(spec, schedule, AMPERE)


def test_a_measured_order_is_taken(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the very matmul, whatever the type of y; and no other."""
    spec, target = S(256, 1024, "u4", 64, invariant=True), parse_target("sm_90a")
    predicted = order_choice.predicted_order(spec, target)
    other = next(o for o in DECODE.orders(spec, target) if o != predicted)
    (tmp_path / "sm_90a.json").write_text(order_tables.to_text({spec: other}))
    monkeypatch.setattr(order_tables, "FOLDER", tmp_path)
    for function in (order_tables.known_orders, order_choice.order_of):
        function.cache_clear()
    try:
        assert order_choice.order_of(spec, target) == other == order_choice.order_of(replace(spec, out="f32"), target)
        ampere = parse_target("sm_80")
        assert order_choice.order_of(spec, ampere) == order_choice.predicted_order(spec, ampere)
        assert order_tables.measured_order(replace(spec, k=2048), target) is None
    finally:
        for function in (order_tables.known_orders, order_choice.order_of):
            function.cache_clear()
