"""Slices of a last wave whose k the blocks of a cluster split (`PrefillSchedule.last_split_k`), in both families of
persistent blocks: numbers in the emulator, with its race check; which sizes it is for; and what cannot be split.

The emulated GPU has eight multiprocessors, which are four clusters of two, or where that is enough four.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import emulated
import pytest
import torch
from emulated import HOPPER, is_right, run_matmul
from sweeps import without
from test_eight_bit_prefill import is_exact
from test_prefill import PREFILL, compiled
from test_prefill_cuts import CODED, FP8, I8, chosen, waves

from lowbit.dialect.errors import EmulatorError, SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.exchange import Exchange
from lowbit.passes.kernels.persistent.kernel import Kernel
from lowbit.passes.kernels.persistent.panels import BoxPanels
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.persistent.tile_order import TileOrder, Turn
from lowbit.passes.kernels.registry import request, schedule_from_dict, schedule_to_dict
from lowbit.passes.pipeline import compile_kernel
from lowbit.pylib.emulator import launch
from lowbit.pylib.reference import random_problem


def split(tokens: int, last_tokens: int, **choices: Any) -> PrefillSchedule:
    return PrefillSchedule(tokens, cluster=2, last_tokens=last_tokens, last_split_k=2, **choices)


@pytest.fixture
def eight_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (emulated, launch):
        monkeypatch.setattr(module, "SM_COUNT", 8)


# -- numbers

WHOLE = split(32, 32)
CASES: list[Any] = [
    # A wave of pairs of tiles, and one pair whose k is split; rows and tokens that end inside of it.
    ({"weight": "u4", "n": 600, "k": 1024, "group_size": 128}, WHOLE, 30, (1, 32)),
    ({"weight": "u4", "n": 256, "k": 1024, "group_size": 128, "bias": True, "zeros": "int"}, WHOLE, 85, (1, 32)),
    # No slices, since nothing comes before them, or there would be too many.
    ({"weight": "i4", "n": 136, "k": 1288, "group_size": None}, WHOLE, 20, (0, 32)),
    ({"weight": "u4", "n": 256, "k": 512, "group_size": 128}, split(64, 32), 130, (1, 64)),
    # Columns that end inside of a round, and blocks for which no round is left.
    ({"weight": "u4", "n": 256, "k": 1544, "group_size": None, "out": "f32"}, WHOLE, 90, (1, 32)),
    ({"weight": "u4", "n": 256, "k": 256, "group_size": 64}, WHOLE, 65, (1, 32)),
    # Kinds of scales and zeros: to registers, through shared memory, longer than rounds, as codes. CI leaves out two
    # that are in test_prefill_coverage, too.
    ({"weight": "u3", "n": 256, "k": 1536, "group_size": 16, "zeros": "float"}, WHOLE, 85, (1, 32)),
    ({"weight": "f6e3m2", "n": 256, "k": 2048, "group_size": 1024, "scale": "e8m0", "act": "bf16"}, WHOLE, 90, (1, 32)),
    without(({"weight": "nf4", "n": 256, "k": 1024, "group_size": 64, "scale": "f32", "act": "bf16"}, WHOLE, 85, (1, 32))),  # noqa: E501
    without(({"weight": "u4", "n": 256, "k": 1024, "group_size": 32, **CODED}, WHOLE, 85, (1, 32))),
    ({"weight": "f4e2m1", "n": 256, "k": 1024, "group_size": 16, "scale": "e4m3", "row_scales": True}, WHOLE, 85, (1, 32)),  # noqa: E501
    # Wide panels, more stages.
    ({"weight": "u4", "n": 256, "k": 2048, "group_size": 128}, split(32, 32, panel_k=128), 85, (1, 32)),
    ({"weight": "u8", "n": 256, "k": 1152, "group_size": 192}, split(32, 32, num_stages=8), 85, (1, 32)),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "schedule", "m", "expected"), CASES, ids=str)
def test_numbers(choices: dict[str, Any], schedule: PrefillSchedule, m: int, expected: tuple[int, int]) -> None:
    spec = MatmulSpec(**choices)
    assert waves(spec, schedule, m) == expected
    assert is_right(spec, schedule, m)


@pytest.mark.usefixtures("eight_multiprocessors")
@pytest.mark.parametrize(
    ("n", "tokens", "last", "m"),
    [(200, 64, 32, 300), (128, 128, 64, 600), (600, 64, 32, 128), (200, 32, 16, 150)],
)
def test_slices_of_fewer_tokens(n: int, tokens: int, last: int, m: int) -> None:
    """Some of which have no token, or no row."""
    spec, schedule = MatmulSpec(n, 1024, "u4", group_size=128), split(tokens, last)
    assert waves(spec, schedule, m, 8)[0] == 1
    assert is_right(spec, schedule, m)


BYTES: list[tuple[dict[str, Any], dict[str, int], int]] = [
    ({"weight": "u4", "n": 256, "k": 2048, "group_size": 128, **FP8}, {"tokens": 32}, 70),
    ({"weight": "i4", "n": 600, "k": 1600, **I8}, {"tokens": 32}, 30),
    ({"weight": "u4", "n": 256, "k": 1024, "group_size": 128, "zeros": "int", **FP8}, {"tokens": 64, "parts": 2}, 300),
    ({"weight": "u8", "n": 256, "k": 2304, "group_size": 256, **I8}, {"tokens": 32, "banks": 2}, 70),
]


@pytest.mark.usefixtures("eight_multiprocessors")
@pytest.mark.parametrize(("choices", "schedule", "m"), BYTES, ids=str)
def test_activations_of_8_bits(choices: dict[str, Any], schedule: dict[str, int], m: int) -> None:
    made = EightBitPrefillSchedule(**schedule, cluster=2, last_tokens=32, last_split_k=2)
    assert is_exact(MatmulSpec(**choices, out="f32"), made, m)


SPEC = MatmulSpec(256, 1024, "u4", group_size=128)


def test_the_same_bits_every_time() -> None:
    """Whichever block comes first."""
    spec = replace(SPEC, out="f32")
    problem, kernel = random_problem(spec, 85), compiled(spec, WHOLE)
    first, second = (run_matmul(kernel, spec, problem, launches=launches) for launches in (1, 3))
    assert torch.equal(first, second)


# -- that these tests can fail


def one_order(panels: BoxPanels, tokens: int, blocks: int) -> list[tuple[Any, Any]]:
    return [(panels.rank * tokens, panels.rank * tokens)] if blocks == 1 else [(0, 0), (tokens, tokens)]


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "nothing added": (Exchange, "_plus_received", lambda self, own, token: own),
    "shares in one order": (BoxPanels, "_boxes_of_tokens", one_order),
    "first tokens": (Turn, "first_stored", lambda self, rank: self.here.token),
    "first columns": (TileOrder, "_first_round_of_next", lambda self, has_next: 0),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutations_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[what])
    assert not is_right(SPEC, WHOLE, 85)


def test_blocks_have_the_rows_of_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_own_rows(order: TileOrder) -> None:
        cut(order)
        order.slice_row = order.rank

    cut = TileOrder._cut  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(TileOrder, "_cut", with_own_rows)
    with pytest.raises(EmulatorError, match=r"race: writes byte .* of `y` that block"):
        is_right(SPEC, WHOLE, 85)


def test_sums_are_sent_to_blocks_that_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "_announce_signals", lambda self: None)
    with pytest.raises(EmulatorError, match="before any cluster barrier: it may not have started"):
        is_right(SPEC, WHOLE, 85)


# -- what it is for


@pytest.mark.parametrize("m", [192, 256, 512, 1024])
@pytest.mark.parametrize("zeros", ["none", "int"])
def test_rows_just_above_two_waves(m: int, zeros: str) -> None:
    """272 tiles of 128 rows on 132 multiprocessors."""
    assert chosen(34816, 5120, m, zeros=zeros).last_split_k == 2


@pytest.mark.parametrize("m", [256, 1024])
def test_tiles_that_fill_waves(m: int) -> None:
    assert not chosen(8192, 8192, m).last_tokens


@pytest.mark.parametrize(("m", "last"), [(256, 32), (512, 64), (1024, 128), (2048, 256), (4096, None)])
def test_the_tuner_tries_the_smallest_slices_that_fit(m: int, last: int | None) -> None:
    spec = MatmulSpec(34816, 5120, "u4", 128)
    tried = [s for s in PREFILL.search_space(spec, m, HOPPER) if s.tokens == 256 and s.last_split_k > 1]
    assert {s.last_tokens for s in tried} == ({last} if last else set())


def test_saved_schedules_have_it() -> None:
    schedule = split(128, 64)
    assert schedule_from_dict(schedule_to_dict(schedule)) == schedule


# -- what it takes, and what cannot be split


@pytest.mark.parametrize(
    ("choices", "schedule"),
    [
        ({}, split(128, 32, panel_k=128)),
        ({"act": "bf16", "scale": "bf16", "zeros": "float"}, split(256, 256)),
        ({"group_size": 32, **CODED}, split(192, 64)),
    ],
    ids=str,
)
def test_no_spills(choices: dict[str, Any], schedule: PrefillSchedule) -> None:
    spec = MatmulSpec(**{"n": 34816, "k": 5120, "weight": "u4", "group_size": 128} | choices)
    kernel = compile_kernel(request(spec, HOPPER, schedule))
    used = resource_usage(kernel.ptx, HOPPER)
    assert (used.spill_stores, used.spill_loads, used.stack, used.serialized) == (0, 0, 0, False)
    assert kernel.launch.shared_bytes == PersistentPlan(spec, schedule, WGMMA).shared_bytes


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"last_tokens": 32, "last_split_k": 2}, "last_split_k=2 needs as many blocks .*, got cluster=1 and last_tok"),
        ({"cluster": 2, "last_split_k": 2}, "needs as many blocks and slices, got cluster=2 and last_t"),
        ({"cluster": 2, "last_tokens": 48, "last_split_k": 2}, "one of 0, 16, 32, 64, 128 for tokens=128 and last_sp"),
        ({"last_split_k": 4}, "last_split_k=4 must be one of 1, 2 for PrefillSchedule"),
    ],
)
def test_a_wrong_schedule_names_the_field(choices: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        PrefillSchedule(128, **choices)


def test_outliers_are_not_split() -> None:
    with pytest.raises(SpecError, match=r"last_split_k=2 does not fit outliers, .*; take last_split_k=1"):
        request(replace(SPEC, outliers=True), HOPPER, WHOLE)
