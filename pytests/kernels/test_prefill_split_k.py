"""Blocks of a cluster that split k in the prefill kernels: their numbers in the emulator, with its race check; their
registers; and what cannot be split.

The emulated GPU has four multiprocessors, so that blocks have several tiles, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import HOPPER, is_right, run_matmul
from sweeps import without
from test_eight_bit_prefill import is_exact
from test_prefill import compiled
from test_prefill_resources import FITTING, FORMATS, NUMBERS, SCALES, most_spilled, spec_of, spec_of_bytes

from lowbit.dialect.bilevel import Bilevel
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
from lowbit.passes.kernels.persistent.tile_order import Turn
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule
from lowbit.passes.kernels.registry import FAMILIES, request
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.scheduling.choice import default_schedule
from lowbit.pylib.reference import random_problem

TWO, FOUR = PrefillSchedule(32, split_k=2), PrefillSchedule(64, split_k=4)

CASES: list[Any] = [
    # As many rounds each; rows and tokens that end inside of tiles and of shares; several tiles, some rows twice.
    ({"weight": "u4", "n": 300, "k": 1024, "group_size": 128}, TWO, 70),
    ({"weight": "u4", "n": 130, "k": 2048, "group_size": 128, "bias": True, "zeros": "int"}, FOUR, 100),
    # Columns that end inside of a round, and blocks for which no round is left.
    ({"weight": "i4", "n": 136, "k": 1288, "group_size": None}, TWO, 40),
    ({"weight": "u4", "n": 128, "k": 1544, "group_size": None, "out": "f32"}, FOUR, 20),
    ({"weight": "u4", "n": 128, "k": 256, "group_size": 64}, TWO, 5),
    # Kinds of scales and zeros: at the end, to registers, through shared memory, longer than rounds, as codes. CI
    # leaves out two that are in test_prefill_coverage, too.
    ({"weight": "u3", "n": 128, "k": 1536, "group_size": 16, "zeros": "float"}, TWO, 20),
    ({"weight": "f6e3m2", "n": 128, "k": 2048, "group_size": 1024, "scale": "e8m0", "act": "bf16"}, TWO, 33),
    ({"weight": "nf4", "n": 128, "k": 1024, "group_size": 64, "scale": "f32"}, TWO, 20),
    without(({"weight": "u4", "n": 128, "k": 1024, "group_size": 32, "scale": "u6", "bilevel": Bilevel(groups=4), "zeros": "offset"}, TWO, 20)),  # noqa: E501
    without(({"weight": "f4e2m1", "n": 128, "k": 1024, "group_size": 16, "scale": "e4m3", "row_scales": True}, TWO, 20)),  # noqa: E501
    # Shares of 8, 24 and 40 tokens, which leave shared memory in half as wide pieces.
    ({"weight": "u4", "n": 300, "k": 1024, "group_size": 128}, PrefillSchedule(16, split_k=2), 35),
    ({"weight": "u4", "n": 130, "k": 1024, "group_size": 128, "bias": True}, PrefillSchedule(48, split_k=2), 75),
    ({"weight": "u4", "n": 128, "k": 1536, "group_size": 128, "out": "f32"}, PrefillSchedule(80, 128, split_k=2), 100),
    # Wide panels, more stages.
    ({"weight": "u4", "n": 128, "k": 2048, "group_size": 128}, PrefillSchedule(32, 128, split_k=2), 60),
    ({"weight": "u8", "n": 129, "k": 2304, "group_size": 192}, PrefillSchedule(96, num_stages=8, split_k=2), 50),
    ({"weight": "u4", "n": 128, "k": 4096, "group_size": 128}, PrefillSchedule(144, 128, split_k=2), 100),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "schedule", "m"), CASES, ids=str)
def test_small_sizes(choices: dict[str, Any], schedule: PrefillSchedule, m: int) -> None:
    assert is_right(MatmulSpec(**choices), schedule, m)


def test_the_same_bits_every_time() -> None:
    """Whichever block comes first."""
    spec = MatmulSpec(128, 2048, "u4", 128, out="f32")
    problem, kernel = random_problem(spec, 40), compiled(spec, FOUR)
    first, second = (run_matmul(kernel, spec, problem, launches=launches) for launches in (1, 3))
    assert torch.equal(first, second)


FP8, I8 = {"compute": "f8e4m3"}, {"compute": "i8"}
BYTES: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"weight": "u4", "n": 300, "k": 2048, "group_size": 128, **FP8}, {"tokens": 32}, 70),
    ({"weight": "i4", "n": 130, "k": 1600, **I8}, {"tokens": 32}, 40),
    # A share that has parts, parts that have shares, and groups of integers.
    ({"weight": "u4", "n": 128, "k": 1024, "group_size": 128, "zeros": "int", **FP8}, {"tokens": 64, "parts": 4}, 60),
    ({"weight": "u8", "n": 128, "k": 2304, "group_size": 256, **I8}, {"tokens": 64, "parts": 2, "split_k": 4}, 60),
]


@pytest.mark.parametrize(("choices", "schedule", "m"), BYTES, ids=str)
def test_activations_of_8_bits(choices: dict[str, Any], schedule: dict[str, Any], m: int) -> None:
    made = replace(EightBitPrefillSchedule(32, split_k=2), **schedule)
    assert is_exact(MatmulSpec(**choices, out="f32"), made, m)


# -- that these tests can fail

SPEC = MatmulSpec(300, 1024, "u4", group_size=128)
MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "nothing added": (Exchange, "_plus_received", lambda self, own, token: own),
    "shares in one order": (BoxPanels, "_boxes_of_tokens", lambda self, tokens, blocks: [(0, 0), (tokens, tokens)]),
    "first tokens": (Turn, "first_stored", lambda self, rank: self.here.token),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutations_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[what])
    assert not is_right(SPEC, TWO, 70)


def test_sums_that_come_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the next tile, before what came for this one has been read; or before all blocks have started."""
    monkeypatch.setattr(Exchange, "_await_read", lambda self, number: None)
    with pytest.raises(EmulatorError, match=r"race|exits"):
        is_right(SPEC, TWO, 70)
    monkeypatch.undo()
    monkeypatch.setattr(Kernel, "_await_signals", lambda self: None)
    with pytest.raises(EmulatorError, match="before any cluster barrier: it may not have started"):
        is_right(SPEC, TWO, 70)


# -- what it takes

KERNELS: list[tuple[dict[str, Any], Any]] = [
    ({}, PrefillSchedule(128, 128, split_k=2)),
    ({"zeros": "int", "act": "bf16", "scale": "bf16"}, PrefillSchedule(128, 128, split_k=4)),
    ({"group_size": 32}, PrefillSchedule(256, 64, split_k=2)),
    ({"group_size": None}, PrefillSchedule(64, 256, split_k=2)),
    ({"compute": "f8e4m3"}, EightBitPrefillSchedule(128, 128, split_k=2)),
    ({"compute": "i8", "group_size": None}, EightBitPrefillSchedule(256, 128, split_k=2)),
]


@pytest.mark.parametrize(("choices", "schedule"), KERNELS, ids=str)
def test_no_spills_and_products_overlap(choices: dict[str, Any], schedule: Any) -> None:
    spec = replace(MatmulSpec(8192, 8192, "u4", 128), **choices)
    kernel = compile_kernel(request(spec, HOPPER, schedule))
    used = resource_usage(kernel.ptx, HOPPER)
    assert (used.spill_stores, used.spill_loads, used.stack, used.serialized) == (0, 0, 0, False)
    assert used.registers * kernel.launch.threads <= 65536
    if not spec.compute:
        assert kernel.launch.shared_bytes == PersistentPlan(spec, schedule, WGMMA).shared_bytes


def sampled() -> Iterator[MatmulSpec]:
    """Every seventh format in both families, with kinds of scales in turn."""
    for i, weight in list(enumerate(FORMATS))[::7]:
        yield replace(spec_of(weight, i, i // 7 % len(SCALES)), outliers=False)
    for i, (compute, weight) in list(enumerate(FITTING))[1::7]:
        yield spec_of_bytes(compute, weight, i, i // 7 % len(NUMBERS))


@pytest.mark.parametrize("spec", [*sampled()], ids=str)
def test_no_spills_of_a_sample(spec: MatmulSpec) -> None:
    family, spec = FAMILIES["eight_bit_prefill" if spec.compute else "prefill"], replace(spec, n=8192 + spec.n % 128)
    split = [s for s in family.candidates(spec, 128, HOPPER) if s.split_k > 1]
    for schedule in split[:1]:
        made = request(spec, HOPPER, schedule)
        used = resource_usage(compile_kernel(made).ptx, HOPPER)
        assert not used.serialized and max(used.spill_stores, used.spill_loads) <= most_spilled(made)


def test_nothing_waits_for_all_of_memory() -> None:
    """A barrier of the cluster with release does, and a store that another one publishes."""
    kernel = compiled(MatmulSpec(8192, 8192, "u4", 128), PrefillSchedule(128, 128, split_k=2))
    assert "barrier.cluster.arrive.relaxed" in kernel.ptx and "st.shared::cluster" not in kernel.ptx
    assert kernel.ptx.count("barrier.cluster.") == 2


# -- where it is chosen


def splits(spec: MatmulSpec, tokens: int) -> dict[int, set[int]]:
    """The candidates that split k: in how many parts, by the tokens of a tile."""
    found: dict[int, set[int]] = {}
    for s in FAMILIES["eight_bit_prefill" if spec.compute else "prefill"].candidates(spec, tokens, HOPPER):
        if s.split_k > 1:
            found.setdefault(s.tokens, set()).add(s.split_k)
    return found


def test_where_tiles_leave_multiprocessors_idle() -> None:
    """66 clusters of two run at a time, and 29 of four: what is more would be another wave."""
    assert splits(MatmulSpec(8192, 8192, "u4", 128), 128) == {t: {2} for t in (128, 160, 176, 192, 224, 256)}
    assert splits(MatmulSpec(3584, 8192, "u4", 128), 128)[128] == {2, 4}
    assert 4 not in splits(MatmulSpec(4096, 8192, "u4", 128), 128)[128]
    assert not splits(MatmulSpec(34816, 5120, "u4", 128), 128)
    assert not splits(MatmulSpec(8192, 8192, "u4", 128), 4096)
    assert not splits(MatmulSpec(8192, 8192, "u4", 128, outliers=True), 128)


@pytest.mark.parametrize(
    ("n", "k", "compute", "tokens", "split_k"),
    [
        (4096, 14336, None, 256, 2),
        (8192, 8192, None, 128, 2),
        (8192, 8192, "f8e4m3", 160, 2),
        (4096, 14336, "i8", 128, 2),
        (4096, 4096, None, 256, 2),
        (8192, 8192, None, 256, 2),
        (4096, 4096, "f8e4m3", 256, 2),
        # The sums take longer to meet than columns are saved.
        (4096, 4096, None, 512, 1),
        (6144, 4096, None, 256, 1),
    ],
)
def test_what_the_rule_takes(n: int, k: int, compute: Any, tokens: int, split_k: int) -> None:
    chosen = default_schedule(MatmulSpec(n, k, "u4", 128, compute=compute), tokens, HOPPER)
    assert isinstance(chosen, PrefillSchedule) and chosen.split_k == split_k


@pytest.mark.parametrize("family", ["prefill", "eight_bit_prefill"])
def test_it_is_tuned(family: str) -> None:
    spec = MatmulSpec(8192, 8192, "u4", 128, compute="i8" if family.startswith("eight") else None)
    found = FAMILIES[family].search_space(spec, 128, HOPPER)
    assert {s.split_k for s in found} == {1, 2} and all(s.cluster == 1 for s in found if s.split_k > 1)
    assert len({FAMILIES[family].shape(s) for s in found}) > len({(s.tokens, s.cluster) for s in found})


# -- what cannot be split


@pytest.mark.parametrize(
    ("change", "schedule", "message"),
    [
        ({}, PrefillSchedule(32, cluster=2, split_k=2), "split_k=2 needs cluster=1, got 2: blocks of a clust"),
        ({"outliers": True}, TWO, "split_k=2 does not fit outliers, .*; take split_k=1"),
        (FP8, EightBitPrefillSchedule(96, split_k=2, parts=3), "parts=3 and split_k=2 must divide one another"),
        (FP8, EightBitPrefillSchedule(32, cluster=2, split_k=2), "split_k=2 needs cluster=1"),
    ],
)  # fmt: skip
def test_what_does_not_fit(change: dict[str, Any], schedule: PrefillSchedule, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        request(replace(SPEC, **change), HOPPER, schedule)


def test_shares_of_a_tile() -> None:
    with pytest.raises(SpecError, match="schedule: split_k=2 must cut tokens=72 into multiples of 8"):
        PrefillSchedule(72, split_k=2)
    with pytest.raises(SpecError, match="split_k=3 must be one of 1, 2, 4 for PrefillSchedule"):
        PrefillSchedule(48, split_k=3)
    with pytest.raises(SpecError, match="split_k=2 must be one of 1 for PrefillMmaSchedule"):
        PrefillMmaSchedule(split_k=2)
