"""Blocks that have equal shares of all rounds in the prefill kernels (`PrefillSchedule.stream_k`): their numbers in the
emulator, with its race check; their shares; their registers; and where they are chosen.

The emulated GPU has four multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from emulated import HOPPER, is_right, run_matmul
from sweeps import without
from test_eight_bit_prefill import is_exact
from test_prefill import compiled
from test_prefill_resources import FITTING, FORMATS, NUMBERS, SCALES, most_spilled, spec_of, spec_of_bytes
from tile_programs import run

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import EmulatorError, SpecError
from lowbit.dialect.layouts.layout import replicated
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program, Scalar
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.persistent import workspace
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.persistent.stream_order import StreamOrder
from lowbit.passes.kernels.persistent.tiles import Shares
from lowbit.passes.kernels.persistent.workspace import Workspace
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule
from lowbit.passes.kernels.registry import FAMILIES, request
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.scheduling.choice import default_schedule
from lowbit.pylib.emulator.launch import SM_COUNT
from lowbit.pylib.reference import random_problem

ALL, EVEN = (PrefillSchedule(48, stream_k=how) for how in ("all", "even"))

CASES: list[Any] = [
    # One tile for all blocks; three, of which some blocks have the end of one and the beginning of another; as many for
    # each block, which nobody shares.
    ({"weight": "u4", "n": 128, "k": 1536, "group_size": 128}, ALL, 40),
    ({"weight": "u4", "n": 300, "k": 2048, "group_size": 128, "bias": True}, ALL, 48),
    ({"weight": "u4", "n": 512, "k": 512, "group_size": 128}, ALL, 33),
    # More tiles than blocks: whole ones first where there are twice as many; tokens and rows that end inside of tiles.
    ({"weight": "u4", "n": 700, "k": 1024, "group_size": 128, "zeros": "int"}, ALL, 40),
    ({"weight": "u4", "n": 650, "k": 768, "group_size": 128, "bias": True}, replace(ALL, tokens=24), 50),
    # Fewer rounds than blocks, and columns that end inside of one.
    ({"weight": "u4", "n": 128, "k": 256, "group_size": 64}, ALL, 5),
    ({"weight": "i4", "n": 136, "k": 1288, "group_size": None, "act": "bf16"}, ALL, 40),
    ({"weight": "u4", "n": 120, "k": 1544, "group_size": None, "bias": True, "out": "f32"}, ALL, 48),
    # As many blocks for each tile: four for one, two for two, and one for three, as if they shared nothing.
    ({"weight": "f6e3m2", "n": 128, "k": 2048, "act": "bf16"}, replace(EVEN, tokens=24), 20),
    ({"weight": "u4", "n": 250, "k": 1536, "group_size": 128}, EVEN, 30),
    ({"weight": "u4", "n": 300, "k": 768, "group_size": 128}, EVEN, 30),
    # Clusters that share x, of which one block may be beyond the last row.
    ({"weight": "u4", "n": 700, "k": 1536, "group_size": 128, "bias": True}, replace(ALL, cluster=2), 40),
    ({"weight": "u4", "n": 500, "k": 1024, "group_size": 128, "out": "f32"}, replace(ALL, cluster=2), 90),
    ({"weight": "u4", "n": 250, "k": 1536, "group_size": 128}, replace(EVEN, cluster=2), 40),
    # Kinds of scales and zeros; those that CI leaves out are in test_prefill_coverage, too.
    ({"weight": "u3", "n": 128, "k": 1536, "group_size": 16, "zeros": "float"}, ALL, 49),
    ({"weight": "f6e3m2", "n": 300, "k": 2048, "group_size": 1024, "scale": "e8m0", "act": "bf16"}, ALL, 33),
    without(({"weight": "nf4", "n": 128, "k": 1024, "group_size": 64, "scale": "f32"}, ALL, 20)),
    ({"weight": "u4", "n": 300, "k": 1024, "group_size": 32, "scale": "u6", "bilevel": Bilevel(groups=4), "zeros": "offset"}, ALL, 20),  # noqa: E501
    without(({"weight": "f4e2m1", "n": 128, "k": 1024, "group_size": 16, "scale": "e4m3", "row_scales": True}, ALL, 20)),  # noqa: E501
    # Tokens that are turned around in pieces of unequal size, and read in such; wide panels; more stages.
    ({"weight": "u4", "n": 128, "k": 1536, "group_size": 128}, replace(ALL, tokens=104), 104),
    ({"weight": "u4", "n": 300, "k": 4608, "group_size": 128}, PrefillSchedule(120, 128, 6, stream_k="all"), 117),
    ({"weight": "u8", "n": 300, "k": 2304, "group_size": 192}, replace(ALL, num_stages=8), 40),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "schedule", "m"), CASES, ids=str)
def test_small_sizes(choices: dict[str, Any], schedule: PrefillSchedule, m: int) -> None:
    assert is_right(MatmulSpec(**choices), schedule, m)


FP8, I8 = {"compute": "f8e4m3"}, {"compute": "i8"}
BYTES: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"weight": "u4", "n": 300, "k": 2048, "group_size": 128, **FP8}, {"tokens": 96, "parts": 2}, 90),
    ({"weight": "u4", "n": 650, "k": 1024, "group_size": 128, "zeros": "int", **FP8}, {"tokens": 64, "parts": 4}, 60),
    ({"weight": "f4e2m1", "n": 300, "k": 1024, "group_size": 128, **FP8}, {"tokens": 48}, 130),
    ({"weight": "i4", "n": 300, "k": 1600, **I8}, {"stream_k": "even"}, 40),
    ({"weight": "u8", "n": 500, "k": 2304, "group_size": 256, **I8}, {"tokens": 64, "cluster": 2}, 60),
]


@pytest.mark.parametrize(("choices", "schedule", "m"), BYTES, ids=str)
def test_activations_of_8_bits(choices: dict[str, Any], schedule: dict[str, Any], m: int) -> None:
    made = replace(EightBitPrefillSchedule(32, stream_k="all"), **schedule)
    assert is_exact(MatmulSpec(**choices, out="f32"), made, m)


SPEC = MatmulSpec(300, 2048, "u4", group_size=128, out="f32")


def test_the_same_bits_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever block comes last, and whether it writes its sums or not."""
    problem = random_problem(SPEC, 40)
    first, again = (run_matmul(compiled(SPEC, ALL), SPEC, problem, launches=launches) for launches in (1, 3))
    monkeypatch.setattr(Program, "others_arrived", lambda self, counters, index, count: count * count < 1)
    written = run_matmul(compile_kernel(request(SPEC, HOPPER, ALL)), SPEC, problem)
    assert torch.equal(first, again) and torch.equal(first, written)


@pytest.mark.parametrize("schedule", [ALL, EVEN, replace(ALL, cluster=2), replace(EVEN, cluster=2)], ids=str)
@pytest.mark.parametrize(("n", "m"), [(128, 40), (300, 48), (512, 33), (700, 40), (1700, 90), (250, 20)])
def test_shares(n: int, m: int, schedule: PrefillSchedule) -> None:
    """Every round of every tile is one block's; no block has more than `Tiles.shares` says."""
    plan, blocks = PersistentPlan(replace(SPEC, n=n), schedule, WGMMA), SM_COUNT // schedule.cluster
    rounds = np.stack([rounds_of(plan, m, block, blocks) for block in range(blocks)])  # [blocks, tiles, rounds]
    assert (rounds.sum(0) == 1).all()
    shares, parts = plan.tiles.shares(m, blocks), rounds.any(2)
    assert rounds.sum((1, 2)).max() == shares.rounds
    assert parts.sum(1).max() <= shares.tiles and parts.sum(0).max() <= shares.parts


def rounds_of(plan: PersistentPlan, m: int, block: int, blocks: int) -> np.ndarray[Any, Any]:
    """How often a block computes the rounds of all tiles, as the program finds out: [tiles, rounds]."""
    found = np.zeros((plan.tiles.count(m), plan.tiles.rounds), np.float32)

    def body(p: Program) -> None:
        order = StreamOrder(plan, p["m"], p["block"], p["blocks"], Scalar.of(0))
        y, layout = p.global_view(p["y"], "f32", found.shape), replicated(32, 2)
        with p.loop(0, order.count()) as turns:
            part = order.part(turns.index)
            with p.loop(part.first, part.end - part.first) as loop:
                here = (part.tile, loop.index)
                p.store(p.add(p.load(y, here, layout), p.constant(1.0, "f32", layout)), y, here)

    run(body, y=found, m=m, block=block, blocks=blocks)
    return found


# -- that these tests can fail


@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        ("_total", lambda self, own, column: own),
        ("_plus_others", lambda self, own, column: own),
        ("write", lambda self, parts: self._first < self._last),
        ("_AT_ONCE", 8),
    ],
)
def test_mutations(name: str, mutation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part alone, or a race; sums that nobody has written; and none, for sums read in other pieces are as right."""
    monkeypatch.setattr(workspace if name.isupper() else Workspace, name, mutation)
    try:
        right = is_right(SPEC, ALL, 40)
    except EmulatorError as error:
        right = "race: " not in str(error)
    assert right == name.isupper()


# -- what it takes

KERNELS: list[tuple[dict[str, Any], Any]] = [
    ({}, PrefillSchedule(104, 128, 8, stream_k="even")),
    ({"zeros": "int", "act": "bf16", "scale": "bf16"}, PrefillSchedule(104, 128, 8, stream_k="all")),
    ({}, PrefillSchedule(128, 128, 4, 2, stream_k="all")),
    ({"group_size": 32}, PrefillSchedule(256, 64, stream_k="all")),
    ({"group_size": None}, PrefillSchedule(80, 128, 6, stream_k="all")),
    ({"compute": "f8e4m3"}, EightBitPrefillSchedule(128, 128, stream_k="all")),
    ({"compute": "f8e4m3", "fold_scales": True}, EightBitPrefillSchedule(256, 128, cluster=2, stream_k="all")),
    ({"compute": "i8", "group_size": None}, EightBitPrefillSchedule(256, 128, stream_k="all")),
]


@pytest.mark.parametrize(("choices", "schedule"), KERNELS, ids=str)
def test_no_spills_and_products_overlap(choices: dict[str, Any], schedule: Any) -> None:
    spec = replace(MatmulSpec(5120, 8192, "u4", 128), **choices)
    kernel = compile_kernel(request(spec, HOPPER, schedule))
    used = resource_usage(kernel.ptx, HOPPER)
    assert (used.spill_stores, used.spill_loads, used.stack, used.serialized) == (0, 0, 0, False)
    if not spec.compute:
        assert kernel.launch.shared_bytes == PersistentPlan(spec, schedule, WGMMA).shared_bytes


def sampled() -> Iterator[MatmulSpec]:
    """Every seventh format in both families, with kinds of scales in turn."""
    for i, weight in list(enumerate(FORMATS))[2::7]:
        yield replace(spec_of(weight, i, i // 7 % len(SCALES)), outliers=False)
    for i, (compute, weight) in list(enumerate(FITTING))[3::7]:
        yield spec_of_bytes(compute, weight, i, i // 7 % len(NUMBERS))


@pytest.mark.parametrize("spec", [*sampled()], ids=str)
def test_no_spills_of_a_sample(spec: MatmulSpec) -> None:
    """Of the widest tile that is a candidate."""
    family = FAMILIES["eight_bit_prefill" if spec.compute else "prefill"]
    spec = replace(spec, n=17408 + spec.n % 128)
    found = [s for tokens in (128, 256) for s in family.candidates(spec, tokens, HOPPER) if s.streams]
    for schedule in sorted(found, key=lambda s: s.tokens)[-1:]:
        made = request(spec, HOPPER, schedule)
        used = resource_usage(compile_kernel(made).ptx, HOPPER)
        assert not used.serialized and max(used.spill_stores, used.spill_loads) <= most_spilled(made)


# -- where it is chosen


def streams(spec: MatmulSpec, tokens: int) -> set[tuple[int, int, str]]:
    """The candidates with shared rounds: tokens of a tile, blocks of a cluster, and which blocks share."""
    family = FAMILIES["eight_bit_prefill" if spec.compute else "prefill"]
    return {(s.tokens, s.cluster, s.stream_k) for s in family.candidates(spec, tokens, HOPPER) if s.streams}


def test_where_tiles_do_not_come_out_even() -> None:
    """The fewest tokens that a tile needs, or two tiles. 132 blocks have tiles of one wave or some; 96 tiles fewer."""
    spec = MatmulSpec(12288, 8192, "u4", 128)
    assert streams(spec, 104) == {(104, 1, "all"), (56, 1, "all")}
    assert streams(spec, 128) == {(t, c, "all") for t in (64, 128) for c in (1, 2)}
    assert {"all", "even"} == {how for _, _, how in streams(replace(spec, n=5120), 104)}
    assert streams(replace(spec, n=5120, compute="f8e4m3"), 128)
    assert not streams(replace(spec, n=128 * 132), 104) - {(56, 1, "all")}
    assert not streams(replace(spec, n=8192), 8192)
    assert not streams(replace(spec, outliers=True), 104)


def test_shares_of_known_launches() -> None:
    """5120 rows are 40 tiles for 132 blocks: 34 rounds each; 34816 rows are 272 tiles of ten."""
    plan = PersistentPlan(MatmulSpec(5120, 17408, "u4", 128), PrefillSchedule(104, 128, stream_k="even"), WGMMA)
    assert plan.tiles.shares(100, 132) == Shares(12, 1, 3, even=True)
    plan = PersistentPlan(plan.spec, replace(plan.schedule, stream_k="all"), WGMMA)
    assert plan.tiles.shares(100, 132) == Shares(11, 2, 4, even=False)
    plan = PersistentPlan(MatmulSpec(34816, 5120, "u4", 128), PrefillSchedule(104, 128, stream_k="all"), WGMMA)
    assert plan.tiles.shares(100, 132) == Shares(21, 3, 2, even=False)


@pytest.mark.parametrize(
    ("n", "k", "tokens", "how"),
    [
        (34816, 5120, 104, "all"),
        (17408, 5120, 80, "all"),
        (10240, 8192, 104, "all"),
        (5120, 17408, 104, "even"),
        (4096, 14336, 104, "even"),
        # As many tiles as blocks, nearly; two blocks for each; many waves; and where k is short.
        (14336, 4096, 104, "off"),
        (8192, 8192, 128, "off"),
        (34816, 5120, 4096, "off"),
        (4096, 4096, 256, "off"),
    ],
)
def test_what_the_rule_takes(n: int, k: int, tokens: int, how: str) -> None:
    chosen = default_schedule(MatmulSpec(n, k, "u4", 128), tokens, HOPPER)
    assert isinstance(chosen, PrefillSchedule) and chosen.stream_k == how


@pytest.mark.parametrize("family", ["prefill", "eight_bit_prefill"])
def test_it_is_tuned(family: str) -> None:
    spec = MatmulSpec(5120, 8192, "u4", 128, compute="i8" if family.startswith("eight") else None)
    assert {s.stream_k for s in FAMILIES[family].search_space(spec, 128, HOPPER)} == {"off", "all", "even"}


def test_what_does_not_fit() -> None:
    with pytest.raises(SpecError, match=r"stream_k='all' does not fit outliers, .*; take stream_k='off'"):
        request(replace(SPEC, outliers=True), HOPPER, ALL)
    with pytest.raises(SpecError, match="stream_k='even' needs split_k=1, got 2"):
        replace(EVEN, split_k=2)
    with pytest.raises(SpecError, match="last_tokens=16 must be one of 0 for tokens=48 and stream_k='all'"):
        replace(ALL, last_tokens=16)
    with pytest.raises(SpecError, match="stream_k='all' must be one of off for PrefillMmaSchedule"):
        PrefillMmaSchedule(stream_k="all")
