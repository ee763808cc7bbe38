"""The schedules that the tuner considers: candidates of the first pass, and neighbours in the second."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
from made_up_gpu import HOPPER, SPEC

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.registry import FAMILIES
from lowbit.passes.kernels.requirements import can_use_wgmma
from lowbit.passes.kernels.streaming import search_space as decode_space
from lowbit.passes.kernels.streaming.candidates import streaming_schedules
from lowbit.passes.kernels.streaming.cost_model import blocks_per_sm, predict
from lowbit.passes.kernels.streaming.legality import check_schedule, enough_blocks, shared_room
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.scheduling.choice import Chooser, default_schedule, schedule_for
from lowbit.passes.scheduling.tables import shipped_tables
from lowbit.passes.targets import parse_target
from lowbit.pylib.tune import search_space
from lowbit.pylib.tune.model_shapes import linear_sizes


@pytest.mark.parametrize("tile", [1, 8, 64])
@pytest.mark.parametrize("weight", ["u4", "u3", "f8e4m3"])
@pytest.mark.parametrize("n", [256, 8192])
def test_candidates(weight: str, tile: int, n: int) -> None:
    spec = replace(SPEC, weight=weight, n=n, k=8192)
    every = search_space.candidates(spec, tile, HOPPER, 10**6)
    assert every[0] == default_schedule(spec, tile, HOPPER) and schedule_for(spec, tile, HOPPER) in every[:30]
    assert len(every) == len(set(every)) > (20 if tile < 64 else 10)
    same_size_entries = search_space.same_size_entries(spec, tile, HOPPER)
    given = {default_schedule(spec, tile, HOPPER), schedule_for(spec, tile, HOPPER), *same_size_entries}
    for s in every:
        check_schedule(spec, s, HOPPER)
        if s not in given:
            assert s.tokens in (tile, max(8, tile)) and (KernelPlan(spec, s).steps.rounds >= 2 or s.preload_weights)
    chosen = len(given)
    shapes = {_shape(s) for s in every}
    assert {_shape(s) for s in every[: chosen + len(shapes)]} == shapes  # each, before any comes twice
    times = [predict(spec, tile, s, HOPPER) for s in every]
    assert 0.1 < min(times[: chosen + 1]) == min(times) and max(times) < math.inf
    again = [i for i in range(chosen + 1, len(every)) if times[i] < times[i - 1]] or [len(every)]
    assert len(again) == 1  # in order, the best of each shape first, then the others
    once = [_shape(s) for s in every[chosen : again[0]]]
    assert len(once) == len(set(once))


def test_the_first_candidates_are_those_of_all() -> None:
    """However many of them are asked for."""
    every = search_space.candidates(SPEC, 8, HOPPER, 10**6)
    assert search_space.candidates(SPEC, 8, HOPPER, 30) == every[:30] and len(every) > 30


def test_candidates_that_are_the_best_with_other_zeros() -> None:
    """They are timed however late their prediction would bring them."""
    plain = MatmulSpec(8192, 8192, "u4", group_size=128)
    zeros = replace(plain, zeros="int", group_size=64)
    best = schedule_for(plain, 1, HOPPER)
    assert best in search_space.same_size_entries(zeros, 1, HOPPER)
    found = search_space.candidates(zeros, 1, HOPPER, 1)
    same_size = search_space.same_size_entries(zeros, 1, HOPPER)
    known = {default_schedule(zeros, 1, HOPPER), schedule_for(zeros, 1, HOPPER), *same_size}
    assert best in found and set(found) == known  # each once, and nothing beyond
    assert not search_space.same_size_entries(replace(zeros, n=8000), 1, HOPPER)


def test_candidates_of_a_small_matmul() -> None:
    """Even where no schedule has two rounds, or the target has little shared memory."""
    for spec in (MatmulSpec(16, 16, "u1"), MatmulSpec(1, 64, "u8", group_size=16), replace(SPEC, weight="u7")):
        assert search_space.candidates(spec, 64, parse_target("sm_86"), 30)


def test_the_prediction_knows_what_was_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of matmuls for one token in the shipped table: the times about, and the winner's shape among the first few."""
    # By the rule alone: choices with tables have seen what is looked for.
    monkeypatch.setattr(Chooser, "schedule", lambda chooser, tile: chooser.predicted(tile).schedule)
    ranks: list[int] = []
    errors: list[float] = []
    known = [(key, entry) for key, entry in shipped_tables()[0].entries.items() if key.tokens == 1]
    for key, entry in known[:: -(-len(known) // 10)]:
        each = search_space.candidates(key.spec, key.tokens, HOPPER, 40)
        shapes = [_shape(s) for s in each]
        ranks.append(shapes.index(_shape(entry.schedule)) if _shape(entry.schedule) in shapes else len(shapes))
        predicted = predict(key.spec, key.tokens, entry.schedule, HOPPER)
        errors.append(abs(math.log(predicted / entry.microseconds)))
    assert len(ranks) >= 5 and sorted(errors)[len(errors) // 2] < 0.25
    for first, part in ((10, 0.5), (40, 0.8)):
        assert sum(rank < first for rank in ranks) >= part * len(ranks)


def _shape(s: Schedule) -> tuple[object, ...]:
    return type(s), *(getattr(s, name) for name in decode_space.SHAPE)


@pytest.mark.parametrize("tile", [1, 16])
def test_neighbours(tile: int) -> None:
    groups = streaming_schedules(SPEC, tile, HOPPER, FAMILIES["decode"])
    streaming = [s for group in groups for s in group.schedules]
    around = min(streaming, key=lambda s: predict(SPEC, tile, s, HOPPER))
    found = search_space.neighbours(SPEC, tile, HOPPER, around)
    assert len(found) == len(set(found)) >= 5 and around not in found
    fields = decode_space.space(SPEC, tile, HOPPER)
    changed: set[str] = set()
    for s in found:
        check_schedule(SPEC, s, HOPPER)
        names = {name for name in fields if getattr(s, name) != getattr(around, name)}
        changed |= names
        if len(names) == 1 and names <= set(decode_space.SECOND):
            continue
        assert len(names - set(decode_space.SECOND)) == 1
        assert s.cluster == s.split_k and s.max_blocks_per_sm == _enough(s)
    assert changed >= {"row_blocks", "warps_k", "step_k", "num_stages"}
    assert "max_blocks_per_sm" in changed or shared_room(KernelPlan(SPEC, around), HOPPER) == 1
    assert ("tokens" in changed) == (tile == 1)
    assert {"split_k", "cluster"} <= changed or tile == 1  # which has no work for more splits


def _enough(s: Schedule) -> int:
    blocks = KernelPlan(SPEC, s).steps.tiles * s.split_k
    if s.wgmma:
        return enough_blocks(blocks, HOPPER)
    free = KernelPlan(SPEC, replace(s, max_blocks_per_sm=0))
    needed, fitting = -(-blocks // HOPPER.multiprocessors), blocks_per_sm(free, HOPPER)
    return needed if needed <= fitting else 0


def test_the_second_pass_tries_splits_without_a_cluster() -> None:
    s = Schedule(16, 1, 4, 2, 64, 3, 2, 2)
    apart = replace(s, cluster=1)
    found = search_space.neighbours(SPEC, 16, HOPPER, s)
    assert [n for n in found if n.cluster != n.split_k] == [apart]
    found = search_space.neighbours(SPEC, 16, HOPPER, apart)
    assert [n for n in found if n.cluster > 1] == [s] and {n.split_k for n in found} == {1, 2, 4}


def test_the_second_pass_tries_outliers_by_step() -> None:
    spec = MatmulSpec.preset("spqr", 4096, 4096)
    s = Schedule(16, 1, 4, 2, 256, 2, wgmma=True)
    by_step = replace(s, outliers_by_step=True)
    assert by_step in search_space.neighbours(spec, 16, HOPPER, s)
    assert s in search_space.neighbours(spec, 16, HOPPER, by_step)
    assert not [n for n in search_space.neighbours(SPEC, 16, HOPPER, WARPGROUP) if n.outliers_by_step]


WARPGROUP = Schedule(16, 1, 4, 2, 64, 3, 2, 2, wgmma=True, max_blocks_per_sm=1)  # 128 blocks


@pytest.mark.parametrize("s", [WARPGROUP, replace(WARPGROUP, wgmma=False), replace(WARPGROUP, max_blocks_per_sm=0)])
def test_the_second_pass_varies_how_many_blocks_a_multiprocessor_takes(s: Schedule) -> None:
    assert shared_room(KernelPlan(SPEC, s), HOPPER) > 2
    found = search_space.neighbours(SPEC, 16, HOPPER, s)
    assert {replace(s, max_blocks_per_sm=blocks) for blocks in {0, 1, 2} - {s.max_blocks_per_sm}} <= set(found)
    halved = [n for n in found if n.split_k == 1]  # in blocks
    split = [n for n in found if n.split_k == 4]
    follows = s.max_blocks_per_sm == 1  # as in the first pass; the other is as somebody wanted it to be
    assert halved and {n.max_blocks_per_sm for n in halved} == {s.max_blocks_per_sm}
    assert split and {n.max_blocks_per_sm for n in split} == {2 if follows else s.max_blocks_per_sm}
    large = replace(s, num_stages=8, warps_k=4)  # leaves room for one, whatever its max_blocks
    assert shared_room(KernelPlan(SPEC, large), HOPPER) == 1
    found = search_space.neighbours(SPEC, 16, HOPPER, large)
    assert found and not [n for n in found if replace(n, max_blocks_per_sm=large.max_blocks_per_sm) == large]


def test_the_first_pass_has_room_for_as_many_blocks_as_are_needed() -> None:
    spec = replace(SPEC, n=8192)
    found = decode_space.all_schedules(spec, 8, HOPPER, FAMILIES["decode"])
    assert {s.max_blocks_per_sm for s in found if not s.wgmma} >= {0, 1, 2, 4}
    assert {s.max_blocks_per_sm for s in found if s.wgmma} == {0, 1, 2}
    for s in found:
        if s.max_blocks_per_sm:
            blocks = KernelPlan(spec, s).steps.tiles * s.split_k
            assert 132 * (s.max_blocks_per_sm - 1) < blocks <= 132 * s.max_blocks_per_sm


def test_clusters_and_wgmma_where_there_are() -> None:
    for tile, wgmma in ((1, {0}), (8, {0, 1}), (16, {1}), (64, {1})):
        found = decode_space.all_schedules(SPEC, tile, HOPPER, FAMILIES["decode"])
        assert {s.wgmma for s in found} == wgmma and {s.split_k for s in found} >= {2, 4, 8}
        assert all(s.cluster == s.split_k for s in found)
    for other in (replace(SPEC, group_size=None, k=4090), replace(SPEC, weight="f8e4m3", act="bf16", scale="bf16")):
        has = {s.wgmma for s in decode_space.all_schedules(other, 16, HOPPER, FAMILIES["decode"])}
        assert has == {int(can_use_wgmma(other, HOPPER))}
    before = decode_space.all_schedules(SPEC, 16, parse_target("sm_90"), FAMILIES["decode"])
    assert {s.wgmma for s in before} == {0} and any(s.cluster > 1 for s in before)
    older = decode_space.all_schedules(SPEC, 16, parse_target("sm_80"), FAMILIES["decode"])
    assert {(s.cluster, s.wgmma) for s in older} == {(1, 0)} and any(s.split_k > 1 for s in older)


@pytest.mark.parametrize("tile", [512, 8192])
def test_prefill_is_tuned(tile: int) -> None:
    """Its schedules are candidates, and those that differ in one choice are its neighbours."""
    found = search_space.candidates(SPEC, tile, HOPPER, 40)
    assert found[0] == default_schedule(SPEC, tile, HOPPER) and all(isinstance(s, PrefillSchedule) for s in found)
    assert len({(s.tokens, s.cluster) for s in found}) > 10
    near = search_space.neighbours(SPEC, tile, HOPPER, found[0])
    assert len(near) > 5 and found[0] not in near
    for s in near:
        assert FAMILIES["prefill"].allows(SPEC, s, HOPPER)
        assert sum(value != asdict(found[0])[name] for name, value in asdict(s).items()) == 1
    times = [FAMILIES["prefill"].predict(SPEC, tile, s, HOPPER) for s in near]
    assert times == sorted(times)


def test_8_bits_are_tuned() -> None:
    spec = replace(SPEC, compute="f8e4m3")
    found = search_space.candidates(spec, 64, HOPPER, 40)
    assert len(found) == 40 and all(FAMILIES["eight_bit"].allows(spec, s, HOPPER) for s in found)
    assert not search_space.same_size_entries(spec, 64, HOPPER)  # those of the table are of activations in f16
    assert search_space.same_size_entries(SPEC, 64, HOPPER)


def test_shapes() -> None:
    assert linear_sizes(["llama-3.1-8B"]) == [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    assert linear_sizes(["Gemma-2-9B/o", "64x256", "64x256"]) == [(3584, 4096), (64, 256)]
    for name in ("gpt", "64x", "Gemma-2-9B/x"):
        with pytest.raises(SpecError, match=f"shape '{name}'"):
            linear_sizes([name])
