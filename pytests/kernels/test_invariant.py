"""`MatmulSpec.invariant`: a row of x gives the same bits alone, in any batch and at any place in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowbit
from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.experts_decode.schedule import ExpertsDecodeSchedule
from lowbit.passes.kernels.registry import FAMILIES
from lowbit.passes.kernels.sum_order import SumOrder
from lowbit.passes.scheduling import choice
from lowbit.passes.scheduling.expert_choice import choose_for_slots
from lowbit.passes.scheduling.expert_rule import tiles_of
from lowbit.passes.scheduling.order_choice import order_of
from lowbit.passes.scheduling.tables import Entry, Key, Table
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.pylib.build import kernels
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.reference.inputs import random_inputs, random_residual
from lowbit.pylib.runtime.expert_matmul import EmulatorLaunches
from lowbit.pylib.runtime.quantizers import quantizer
from lowbit.pylib.tune.search_space import candidates, neighbours
from lowbit.pylib.weights.packed import pack

S = lowbit.MatmulSpec
SPECS = {
    "u4": S(96, 768, "u4", 128),
    "u4, zeros": S(64, 512, "u4", 64, zeros="int", bias=True),
    "u3, float zeros": S(64, 512, "u3", 64, zeros="float"),
    "u2, offsets": S(64, 512, "u2", 32, zeros="offset", act="bf16"),
    "i8": S(64, 512, "i8"),
    "nf4": S(64, 512, "nf4", 64, act="bf16", scale="bf16"),
    "f6": S(64, 512, "f6e3m2", row_scales=True),
    "in tf32": S(64, 256, "f8e6m1"),
    "small groups": S(64, 512, "u4", 16),
    "odd": S(40, 260, "u4"),
    "nvfp4": S.preset("nvfp4", 64, 512),
    "two levels": S.preset("q4_k", 64, 1024),
    "outliers": S(64, 512, "u4", 32, outliers=True),
    "permuted": S(64, 512, "i4", 64, permuted=True),
    "gated": S(96, 512, "u4", 64, epilogue="silu_mul"),
    "residual": S(64, 512, "u4", 64, epilogue="residual"),
    "in i8": S(64, 512, "u4", 64, zeros="int", compute="i8"),
    "in fp8": S(64, 512, "u4", 64, compute="f8e4m3"),
    "folded": S(64, 512, "u4", 64, compute="f8e4m3", fold_scales=True),
}
"""One of each way in which codes, zeros and scales are handled, with y in f32, which hides nothing."""
INVARIANT = {name: replace(spec, out="f32", invariant=True) for name, spec in SPECS.items()}
EMULATED = ("emulator:sm_80", "emulator:sm_90a")
Multiply = Callable[[Tensor, slice], Tensor]


def multiply_of(mm: Matmul, tensors: dict[str, Any]) -> Multiply:
    """Returns what multiplies some rows; a residual has the rows of x."""
    w = mm.pack(**tensors)
    residual = random_residual(mm.spec, 400).get("residual")

    def multiply(x: Tensor, rows: slice) -> Tensor:
        return mm(x, w) if residual is None else mm(x, w, residual=residual[rows])

    return multiply


def skip_unless_served(spec: lowbit.MatmulSpec, target: str) -> None:
    if spec.compute == "f8e4m3" and target.endswith("sm_80"):
        pytest.skip("multiplies no fp8")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", SPECS)
def test_on_a_cpu_a_row_has_the_bits_that_it_has_alone(name: str, threads: int) -> None:
    spec, before = INVARIANT[name], torch.get_num_threads()
    x, tensors = random_inputs(spec, 300, 1)
    multiply = multiply_of(lowbit.compile(spec, "cpu"), tensors)
    alone = torch.cat([multiply(x[i : i + 1], slice(i, i + 1)) for i in range(300)])
    try:
        torch.set_num_threads(threads)
        for first, last in ((0, 2), (1, 4), (5, 9), (0, 13), (3, 20), (0, 65), (0, 300)):
            assert torch.equal(multiply(x[first:last], slice(first, last)), alone[first:last])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, "emulator:sm_90a") for name in SPECS] + [(name, "emulator:sm_80") for name in ("u4", "nf4", "in i8")],
)
def test_on_a_gpu_a_row_has_the_bits_that_it_has_alone(name: str, target: str) -> None:
    """With the kernels that are chosen: for few rows, for more, and for several launches."""
    spec = INVARIANT[name]
    x, tensors = random_inputs(spec, 70, 1)
    mm = lowbit.compile(spec, target)
    multiply = multiply_of(mm, tensors)
    alone = multiply(x[:1], slice(0, 1))
    for m in (3 if list(SPECS).index(name) % 2 else 9, 40, 70):
        together = multiply(x[:m], slice(0, m))
        assert torch.equal(together[:1], alone), m
    last = multiply(x[69:70], slice(69, 70))
    assert torch.equal(together[69:70], last)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1024, 2048), (4096, 4096)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_on_this_gpu_a_row_has_the_bits_that_it_has_alone(name: str, sizes: tuple[int, int]) -> None:
    """By all kernels that are chosen for up to 300 rows, first and last, beside rows of NaN, with gaps between."""
    spec = replace(INVARIANT[name], **dict(zip(("n", "k"), sizes)))
    x, tensors = random_inputs(spec, 300, 1)
    mm = lowbit.compile(spec)
    w = mm.pack(**{name: tensor.cuda() for name, tensor in tensors.items()})
    residual = {name: each.cuda() for name, each in random_residual(spec, 300).items()}

    def multiply(x: Tensor, rows: slice) -> Tensor:
        return mm(x, w, **{name: each[rows] for name, each in residual.items()})

    apart = torch.full((300, spec.k + 64), torch.nan, dtype=x.dtype, device="cuda")
    apart[:, : spec.k] = x
    x = apart[:, : spec.k]
    first, last = (multiply(x[i : i + 1].contiguous(), slice(i, i + 1))[0] for i in (0, 299))
    x[150] = torch.nan
    for m in (1, 2, 8, 9, 16, 32, 48, 64, 65, 100, 128, 200, 256, 300):
        assert torch.equal(multiply(x[:m], slice(0, m))[0], first), m
        assert torch.equal(multiply(x[300 - m :], slice(300 - m, 300))[-1], last), m


@settings(max_examples=12)
@given(st.data())
def test_schedules_of_one_order_give_equal_bits(data: st.DataObject) -> None:
    """Of whatever shape, engine and number of tokens they are; beside rows of NaN, and of x with gaps between rows."""
    target = parse_target(data.draw(st.sampled_from(EMULATED)))
    spec = INVARIANT[data.draw(st.sampled_from(sorted(SPECS)))]
    if (spec.compute == "f8e4m3" and target.arch == "sm_80") or spec.call_inputs:  # a residual of its own for each row
        return
    order = data.draw(st.sampled_from(family_of(spec).orders(spec.for_tokens(1), target)))
    schedules = [s for tile in (8, 16, 64) for s in in_order(spec, tile, target, order)]
    first, second = data.draw(st.lists(st.sampled_from(schedules), min_size=2, max_size=2))
    place = data.draw(st.integers(0, second.tokens - 1))
    x, tensors = random_inputs(spec, 1, data.draw(st.integers(0, 99)))
    alone = of_order(spec, target, first, order, tensors)(x, slice(0, 1))
    among = torch.full((second.tokens, spec.k + 8), float("nan"), dtype=x.dtype)
    among[place, : spec.k] = x[0]
    multiply = of_order(spec, target, second, order, tensors)
    y = multiply(among[:, : spec.k], slice(0, second.tokens))
    assert torch.equal(y[place], alone[0]), (first, second)


CUTS = [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4)]
"""Blocks of a cluster, warps, and chains of a warp that share four chains out."""
OF_CUTS = ("u4", "u4, zeros", "u3, float zeros", "i8", "nf4", "nvfp4", "two levels", "in i8", "in fp8")


@pytest.mark.parametrize("preloaded", [False, True])
@pytest.mark.parametrize("wgmma", [False, True])
@pytest.mark.parametrize("name", OF_CUTS)
def test_blocks_warps_and_chains_of_a_warp_share_out_an_order(name: str, wgmma: bool, preloaded: bool) -> None:
    """In whatever way, they give the bits of any other; k is no multiple of what all chains have in a round."""
    spec, target = INVARIANT[name], parse_target("emulator:sm_90a")
    if (spec.compute == "f8e4m3" and not wgmma) or (preloaded and (spec.compute or spec.bilevel or not wgmma)):
        return  # an order of its own; no such kernels
    kind, least = family_of(spec).schedule_type, 128 if spec.bilevel or (spec.compute and wgmma) else 64
    steps = max(spec.packing.chunk, least)
    spec = replace(spec, k=steps * (8 if preloaded else 10))
    x, tensors = random_inputs(spec, 9, 1)
    found: dict[SumOrder, list[Tensor]] = {}
    for split_k, warps_k, chains in CUTS:
        fixed = {"preload_weights": True} if preloaded else {}
        s = kind(16, 1, 4 if wgmma else 1, warps_k, steps * chains, 1 if preloaded else 2, split_k, split_k, wgmma)
        s = replace(s, chains=chains, **fixed)
        order = family_of(spec).sum_order(spec, s)
        found.setdefault(order, []).append(of_order(spec, target, s, order, tensors)(x, slice(0, 9)))
    ((order, (first, *others)),) = found.items()
    assert (order.parts, order.chains, order.step_k) == (1, 4, steps)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("other", [{"split_k": 2, "cluster": 2}, {"warps_k": 4}, {"step_k": 128}], ids=str)
@pytest.mark.parametrize("name", ["u4", "i8", "in fp8"])
def test_another_cut_of_k_gives_other_bits(name: str, other: dict[str, int]) -> None:
    """The tests above would see it: every field of an order counts."""
    spec, target = INVARIANT[name], parse_target("emulator:sm_90a")
    x, tensors = random_inputs(spec, 1, 1)
    schedule = FAMILIES[family_of(spec).name].schedule_type(8, 1, 1, 2, 64, 2)
    results = []
    for s in (schedule, replace(schedule, **other)):
        order = family_of(spec).sum_order(spec, s)
        results.append(of_order(spec, target, s, order, tensors)(x, slice(0, 1)))
    assert not torch.equal(*results)


EXPERTS = ("u4", "u3, float zeros", "i8", "nf4", "f6", "small groups", "nvfp4", "two levels", "gated")
EXPERTS += ("in i8", "in fp8")


def family_for_experts(spec: lowbit.MatmulSpec) -> Any:
    return FAMILIES["eight_bit_experts_decode" if spec.compute else "experts_decode"]


@settings(max_examples=10)
@given(st.data())
def test_kernels_of_experts_with_one_order_give_equal_bits(data: st.DataObject) -> None:
    """Of token tiles of whatever size, wherever a slot stands in one, beside slots of NaN."""
    one = INVARIANT[data.draw(st.sampled_from(EXPERTS))]
    target = parse_target(data.draw(st.sampled_from(EMULATED)) if one.compute != "f8e4m3" else EMULATED[1])
    spec = replace(one, n=3 * one.n, experts=3)
    family = family_for_experts(spec)
    order = data.draw(st.sampled_from(family.orders(spec, target)))
    groups = (group for tile in (8, 16, 32, 64) for group in family.in_order(spec, tile, target, order))
    schedules = [s for group in groups for s in group.schedules]
    if not schedules:  # k is too short for the order
        return
    first, second = data.draw(st.lists(st.sampled_from(schedules), min_size=2, max_size=2))
    x, tensors = random_inputs(spec, 1, data.draw(st.integers(0, 99)))
    alone = slots_of(spec, target, first, x, tensors, 1, 0)
    count = data.draw(st.integers(1, second.tokens + 3))
    assert torch.equal(slots_of(spec, target, second, x, tensors, count, data.draw(st.integers(0, count - 1))), alone)


def test_kernels_of_experts_with_other_orders_give_other_bits() -> None:
    """Which the test above would see."""
    spec, target = replace(INVARIANT["u4"], n=288, experts=3), parse_target("emulator:sm_90a")
    x, tensors = random_inputs(spec, 1, 1)
    s = ExpertsDecodeSchedule(8, 1, 1, 2, 64, 2)
    others = replace(s, warps_k=4), replace(s, step_k=128), replace(s, split_k=2, cluster=2)
    alone, *found = (slots_of(spec, target, each, x, tensors, 1, 0) for each in (s, *others))
    assert not any(torch.equal(each, alone) for each in found)


def slots_of(
    spec: lowbit.MatmulSpec, target: Target, s: Any, x: Tensor, tensors: dict[str, Any], count: int, place: int
) -> Tensor:
    """Returns y of one slot of the last expert, one of so many, which has x; the others have NaN."""
    rows = torch.full((count, spec.k), float("nan"), dtype=x.dtype)
    rows[place] = x[0]
    ends = [(first, min(first + s.tokens, count)) for first in range(0, count, s.tokens)]
    tiles = torch.zeros(count + 1, 3, dtype=torch.int32)
    tiles[0, 0] = len(ends)
    tiles[1 : len(ends) + 1] = torch.tensor([(spec.experts - 1, *each) for each in ends])
    launches = EmulatorLaunches(spec, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "_schedule", lambda tile, slots: s)
        numbers = torch.arange(count, dtype=torch.int32)
        operands = quantizer(spec.k, spec.act, spec.compute, target)(rows) if spec.compute else (rows,)
        return launches.run(operands, numbers, tiles, list(pack(spec, **tensors).values()), s.tokens)[place]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("name", EXPERTS)
def test_all_kernels_of_experts_have_one_order(name: str, target: str) -> None:
    """For every token tile and number of slots; a measured schedule of another order is not taken."""
    skip_unless_served(INVARIANT[name], target)
    spec, on = replace(INVARIANT[name], n=16 * 1024, k=2048, experts=16), parse_target(target)
    family = family_for_experts(spec)
    tiles, order = tiles_of(spec, on), order_of(spec, on)
    assert len(tiles) > 1
    for tile, slots in itertools.product(tiles, (1, 8, 40, 600, 20_000)):
        chosen = choose_for_slots(spec, tile, slots, on, ())
        assert family.sum_order(spec, chosen.schedule) == order
        other = replace(chosen.schedule, step_k=2 * order.step_k)
        entry = Entry(Key.of(spec, slots), other, 0.5, "2026-11-21", "0.1.0")
        table = Table("", on.capability, "", {}).with_entries([entry])
        assert choose_for_slots(spec, tile, slots, on, [table]).schedule == chosen.schedule


def test_the_tuner_times_schedules_of_experts_in_the_order() -> None:
    spec, target = replace(INVARIANT["u4"], n=16 * 1024, k=2048, experts=16), parse_target("sm_90a")
    found = candidates(spec, 64, target, 20)
    order = order_of(spec, target)
    assert len(found) > 3 and {FAMILIES["experts_decode"].sum_order(spec, s) for s in found} == {order}


def test_without_invariance_a_cluster_adds_up_in_another_order() -> None:
    """So do blocks that begin at other columns: orders say so."""
    spec, s = replace(SPECS["u4"], out="f32"), Schedule(8, 4, 1, 2, 64, 2, split_k=4, cluster=4)
    order, invariant = (FAMILIES["decode"].sum_order(each, s) for each in (spec, replace(spec, invariant=True)))
    assert order != invariant == SumOrder(1, 8, 64, ("mma", "raw codes"))
    assert "rotated every 64 rows" in str(order) or "on every 16 rows" in str(order)


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, arch) for i, name in enumerate(SPECS) for arch in ("sm_90a", ("sm_89", "sm_120", "sm_80")[i % 3])],
)
def test_all_kernels_have_one_order(name: str, target: str) -> None:
    """For every number of rows, without the vendor's matmul; the order is that of the architecture, not of a table."""
    spec, parsed = replace(INVARIANT[name], n=4096, k=4096), parse_target(target)
    skip_unless_served(spec, target)
    choices = kernels.Artifacts(spec, parsed, None).choices()  # none of which is compiled
    orders = set()
    for m in (1, 2, 8, 9, 16, 33, 64, 65, 128, 200, 1000, 20000):
        for kernel in choices.launches(m):
            orders.add(FAMILIES[kernel.family].sum_order(kernel.spec, kernel.schedule))
    assert orders == {choice.order_of(spec.for_tokens(1), parsed)}
    assert all(rows.token_tiles for rows in choices.rows)


@pytest.mark.parametrize("size", [(4096, 4096), (8192, 8192)], ids=str)
def test_products_of_e4m3_have_one_instruction(size: tuple[int, int]) -> None:
    """Hopper's wgmma keeps fewer bits of their sums than its mma.sync: to the emulator they are alike."""
    spec, target = S(*size, "u4", 128, compute="f8e4m3", invariant=True), parse_target("sm_90a")
    choices = lowbit.compile(spec, "sm_90a").choices
    assert len({kernel.schedule.wgmma for m in (1, 8, 16, 32, 64) for kernel in choices.launches(m)}) == 1
    cuts: dict[SumOrder, set[bool]] = {}
    for order in family_of(spec).orders(spec, target):
        every = {s.wgmma for tile in (8, 64) for s in in_order(spec, tile, target, order)}
        assert len(every) <= 1, order
        cuts.setdefault(replace(order, products=()), set()).update(every)
    assert any(len(every) == 2 for every in cuts.values())  # some cuts have kernels of both, in two orders


def test_the_tuner_times_schedules_of_the_order() -> None:
    spec, target = replace(SPECS["u4"], n=4096, k=4096, invariant=True), parse_target("sm_90a")
    chooser = choice.Chooser(spec, target)
    found = candidates(spec, 16, target, 20)
    near = neighbours(spec, 16, target, found[0])
    assert len(found) > 10 and near and all(map(chooser.has_order, [*found, *near]))


def test_a_measured_schedule_counts_if_it_has_the_order() -> None:
    """Where it was measured for the very matmul, or for one like it; else what is predicted is taken, and said."""
    spec, target = replace(SPECS["u4"], n=2048, k=4096, invariant=True), parse_target("sm_90a")
    chooser = choice.Chooser(spec, target)
    ours = replace(chooser.predicted(16).schedule, num_stages=5)
    other = replace(ours, split_k=ours.split_k * 2, cluster=1)
    for measured, origins in ((ours, ("measured", "like one measured")), (other, ("rule", "rule"))):
        for key, origin in zip((spec, replace(spec, act="bf16", scale="bf16")), origins):
            entry = Entry(Key.of(key, 16), measured, 0.5, "2026-11-21", "0.1.0")
            found = choice.Chooser(spec, target).expected(16, [Table("", 90, "", {}).with_entries([entry])])
            assert (found.origin, found.schedule == measured) == (origin, measured is ours)


def test_a_schedule_of_another_order_is_refused() -> None:
    spec = replace(SPECS["u4"], n=4096, k=4096, invariant=True)
    message = r"one order of sums for all rows of x, parts=.*, and Schedule\(.* has parts=8, chains=2, step_k=128"
    with pytest.raises(SpecError, match=message):
        lowbit.compile(spec, "sm_90a", Schedule(8, 1, 1, 2, 128, 3, split_k=8))
    with pytest.raises(SpecError, match="has an order of its own; take one with that order, or none"):
        lowbit.compile(spec, "sm_90a", lowbit.PrefillSchedule())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute": "i8", "compute_from": 17}, "compute_from=17 multiplies few rows in another type than many"),
        ({"experts": 2, "top_k": {"count": 2}}, "adds up experts in one way, by rows sorted by expert; drop top_k="),
        ({"weight": "nf4", "compute": "f8e4m3", "fold_scales": True}, "multiplies codes as they are, and those of"),
    ],
)
def test_what_has_several_results_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(S(64, 512, "u4", 64, invariant=True), **fields)


def family_of(spec: lowbit.MatmulSpec) -> Any:
    return FAMILIES["eight_bit" if spec.compute else "decode"]


def in_order(spec: lowbit.MatmulSpec, tile: int, target: Target, order: SumOrder) -> list[Any]:
    groups = family_of(spec).in_order(spec.for_tokens(1), tile, target, order)
    return [s for group in groups for s in group.schedules]


def of_order(
    spec: lowbit.MatmulSpec, target: Target, schedule: Any, order: SumOrder, tensors: dict[str, Any]
) -> Multiply:
    """Returns what multiplies by a kernel, as if its order had been chosen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "order_of", lambda spec, target: order)
        patch.setattr(kernels, "chooser_of", choice.Chooser)  # not one that has asked for the order before
        mm = Matmul(spec, target, schedule)
        assert mm.choices.launches(schedule.tokens)[0].schedule == schedule
        return multiply_of(mm, tensors)
