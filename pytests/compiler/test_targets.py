"""Targets: what an architecture has, and which one a GPU gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowbit.dialect.errors import SpecError, TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.prefill.legality import check_schedule
from lowbit.passes.targets import GPUS, parse_target, target_of_gpu


@pytest.mark.parametrize(
    ("name", "shared_kb"),
    [("sm_80", 163), ("sm_86", 99), ("sm_87", 163), ("sm_89", 99), ("sm_90", 227), ("sm_90a", 227)]
    + [("sm_100", 227), ("sm_103", 227), ("sm_120", 99)],
)
def test_gpu_targets(name: str, shared_kb: int) -> None:
    target, emulated = parse_target(name), parse_target(f"emulator:{name}")
    assert (target.kind, target.arch, str(target)) == ("cuda", name, name)
    assert target.capability == int(name[3:].rstrip("a"))
    assert target.max_shared_per_block == shared_kb * 1024 == target.shared_per_sm - 1024
    assert (target.has_wgmma, target.runs_later) == (name == "sm_90a", name != "sm_90a")
    assert target.has_clusters == (name in ("sm_90", "sm_90a", "sm_100", "sm_103"))
    assert bool(target.hardware) == (name == "sm_90a")
    assert (emulated.kind, emulated.arch, emulated.features) == ("emulator", name, target.features)
    assert emulated.is_gpu
    assert parse_target(emulated.name) == emulated


@pytest.mark.parametrize(
    ("capability", "shared_kb", "target"),
    [(75, 64, None), (80, 163, "sm_80"), (88, 99, "sm_86"), (90, 227, "sm_90a"), (100, 227, "sm_100")]
    + [(103, 227, "sm_103"), (110, 227, "sm_103"), (120, 99, "sm_120"), (121, 99, "sm_120"), (130, 227, "sm_120")],
)
def test_target_of_a_gpu(capability: int, shared_kb: int, target: str | None) -> None:
    """Its own, or its nearest predecessor's whose kernels do not ask for more shared memory than there is."""
    found = target_of_gpu(capability, shared_kb * 1024)
    assert found == (target and parse_target(target))


def test_other_targets() -> None:
    assert parse_target("emulator") == parse_target("emulator:sm_80")
    assert not parse_target("cpu").is_gpu
    assert parse_target("sm_90a").features == "+ptx86"


@pytest.mark.parametrize(
    "name", ["", "cuda", "sm_75", "sm_90A", "sm_100a", "sm_101", "emulator:", "emulator:cpu", ":sm_80"]
)
def test_unknown_targets_list_the_known(name: str) -> None:
    with pytest.raises(TargetError, match=f"unknown target {name!r}; allowed: 'cpu', 'sm_80'.*'emulator'"):
        parse_target(name)


def test_numbers_of_targets() -> None:
    """Each has what predictions are made of, and no number is a part of what makes targets equal: caches stay valid."""
    for target in GPUS:
        assert target.costs.decode.clock > 0 and target.rates.memory > 1e5
        assert target.most_multiprocessors >= target.multiprocessors
        assert replace(target, rates=GPUS[0].rates, fitted=None) == target
    with pytest.raises(TargetError, match="cpu has one program for every number of rows"):
        _ = parse_target("cpu").costs


def test_more_blocks_than_the_workspace_has_room_for() -> None:
    spec, shared, hopper = MatmulSpec(4096, 4096, "u4"), PrefillSchedule(stream_k="all"), parse_target("sm_90a")
    check_schedule(spec, shared, hopper)
    larger = replace(hopper, most_multiprocessors=170)
    with pytest.raises(SpecError, match="a workspace for 144 blocks, sm_90a runs more; take stream_k='off'"):
        check_schedule(spec, shared, larger)
    check_schedule(spec, PrefillSchedule(), larger)
