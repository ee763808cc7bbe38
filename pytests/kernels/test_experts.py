"""The kernel for weights of several experts, in the emulator against float64: every slot gets the rows of its expert.

Tables of tiles are made here in NumPy; `pylib` makes them in torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from emulated import HOPPER, run_launch, x_arguments
from sweeps import swept
from torch import Tensor

import lowbit
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import EmulatorError, SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.expert_tiles import ExpertTiles
from lowbit.passes.kernels.experts.schedule import ExpertsSchedule, short_slots
from lowbit.passes.kernels.experts_decode.schedule import ExpertsDecodeSchedule
from lowbit.passes.kernels.experts_mma.schedule import ExpertsMmaSchedule
from lowbit.passes.kernels.persistent.expert_order import ExpertOrder
from lowbit.passes.kernels.persistent.schedule import takes_rows_in_order
from lowbit.passes.kernels.persistent.tile_order import Turn
from lowbit.passes.kernels.registry import family_of, request
from lowbit.passes.kernels.streaming.work import ExpertWork
from lowbit.passes.pipeline import CompiledKernel, compile_kernel
from lowbit.passes.scheduling.expert_rule import schedule_for, schedule_for_few, tiles_of
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.pylib.reference import agrees, matmul, random_inputs, tolerance
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import pack

SMALL = ExpertsMmaSchedule(16, num_stages=2)
FEW = ExpertsDecodeSchedule(8, 1, 1, 2, 64, 2)
FEW_HALVED = replace(FEW, split_k=2, cluster=2, max_blocks_per_sm=4)
FEW_BY_WGMMA = ExpertsDecodeSchedule(16, 1, 4, 2, 128, 3, wgmma=True, refill="after_first_mma")
AMPERE = parse_target("sm_80")
Array = np.ndarray[Any, Any]
AnySchedule = ExpertsMmaSchedule | ExpertsSchedule | ExpertsDecodeSchedule


def routing(experts_of_slots: Array, experts: int, tile: int) -> tuple[Array, Array]:
    """The expert of each slot in their order, sorted (those that are elsewhere last), and the table of tiles, of which
    the short ones are the last."""
    ids = np.where((experts_of_slots < 0) | (experts_of_slots >= experts), experts, experts_of_slots)
    tiles = np.zeros((len(ids) + 1, 3), np.int32)
    found = [
        (expert, first, min(first + tile, end))
        for expert in range(experts)
        for begin, end in [np.searchsorted(np.sort(ids), (expert, expert + 1))]
        for first in range(begin, end, tile)
    ]
    short = [last - first <= short_slots(tile) for _, first, last in found]
    found = [found[i] for i in np.argsort(short, kind="stable")]
    tiles[0, 0], tiles[0, 2] = len(found), sum(short)
    tiles[1 : len(found) + 1] = np.reshape(found, (-1, 3))
    return np.argsort(ids, kind="stable"), tiles


def compiled(spec: MatmulSpec, schedule: AnySchedule, target: Target) -> CompiledKernel:
    return compile_kernel(request(spec, target, schedule))


def run(
    spec: MatmulSpec,
    schedule: AnySchedule,
    ids: Array,
    x: Tensor,
    weight: Mapping[str, Tensor],
    target: Target = AMPERE,
) -> tuple[Tensor, Array, Array]:
    """y of all slots, the expert of each, and its row of x."""
    (order, tiles), tokens = routing(ids, spec.experts, schedule.tokens), len(x)
    rows = (order % len(x)).astype(np.int32)
    if takes_rows_in_order(schedule):
        x, rows = x[rows].contiguous(), np.arange(len(rows), dtype=np.int32)
    y = torch.full((len(ids), spec.outputs), torch.nan, dtype=TORCH[spec.out_dtype])
    w = pack(spec, **weight)
    slots = {"rows": torch.from_numpy(rows), "tiles": torch.from_numpy(tiles)}
    kernel = compiled(spec, schedule, target)
    given = x_arguments(kernel, spec, x)
    run_launch(kernel, w, True, 0, y=y, m=len(ids), **slots, **given)
    return y, ids[order], (order % tokens).astype(np.int32)


def is_right(
    spec: MatmulSpec, schedule: AnySchedule, ids: Array, tokens: int, target: Target = AMPERE
) -> bool:
    """Whether every slot of an expert has what the definition says, and no other was written."""
    rounding: dict[str, Any] = dict(family_of(schedule).rounding(spec, schedule))
    x, weight = random_inputs(spec, tokens)
    y, expert, rows = run(spec, schedule, ids, x, weight, target)
    expected, bound = matmul(spec, x[rows], **weight), tolerance(spec, x[rows], **weight, **rounding)
    here: Array = (expert >= 0) & (expert < spec.experts)
    columns = np.where(here, expert, 0)[:, None] * spec.outputs + np.arange(spec.outputs)
    numbers = np.take_along_axis(expected, columns, 1), np.take_along_axis(bound, columns, 1)
    return bool(agrees(y, *numbers)[here].all() and torch.isnan(y[torch.from_numpy(~here)]).all())


def by_expert(spec: MatmulSpec, weight: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weight of all experts, each with both its halves, of one with the gates of all experts above all others."""
    if not spec.is_gated:
        return weight
    order = torch.arange(spec.n).view(2, spec.experts, -1).transpose(0, 1).reshape(-1)
    rows = {name: (t.to_dense() if t.layout != torch.strided else t)[order] for name, t in weight.items()}
    return {name: t.to_sparse_csr() if weight[name].layout != torch.strided else t for name, t in rows.items()}


ROUTINGS: dict[str, Array] = {
    "one": np.array([2]),
    "none here": np.array([-1, 4, 7]),
    "each its own": np.array([3, 1, 0, 2]),
    "all to one": np.full(37, 1),
    "the same twice": np.array([2, 0, 2, 2, 0, 3, 0, 2]),
    "some elsewhere": np.array([0, 5, 3, -1, 3, 3, 4, 0]),
    "uneven": np.random.default_rng(0).choice(4, 70, p=[0.7, 0.05, 0.25, 0]),
}


@pytest.mark.parametrize("schedule", [SMALL, FEW, replace(FEW, row_blocks=2, warps_n=2)], ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_any_routing(name: str, schedule: AnySchedule) -> None:
    """Experts of 48 rows: part of a tile, which ends in the rows of the next."""
    assert is_right(MatmulSpec(4 * 48, 256, "u4", 64, experts=4), schedule, ROUTINGS[name], 5)


@pytest.mark.parametrize(("slots", "blocks"), [(8, 1), (64, 2), (4096, 2)])
def test_few_tiles_get_a_multiprocessor_each(slots: int, blocks: int) -> None:
    spec = MatmulSpec(128 * 1536, 2048, "u4", 128, experts=128, outliers=True)
    found = schedule_for_few(spec, 16, slots, HOPPER)
    assert isinstance(found, ExpertsMmaSchedule) and found.blocks_per_sm == blocks


def test_few_experts_have_small_tiles() -> None:
    """Of the 192 tiles of 64 rows that eight experts have, some multiprocessors would have two and others one."""
    spec = MatmulSpec(128 * 1536, 2048, "u4", 128, experts=128)
    few, many = (schedule_for_few(spec, 8, slots, HOPPER) for slots in (8, 512))
    assert isinstance(few, ExpertsDecodeSchedule) and isinstance(many, ExpertsDecodeSchedule)
    assert few.rows < many.rows


def test_blocks_share_k_where_tiles_are_few() -> None:
    """Those of Mixtral's down with 8 tokens, but not those of its gate_up."""
    found = [
        schedule_for_few(MatmulSpec(8 * n, k, "u4", 128, act="bf16", scale="bf16", experts=8), 8, 16, HOPPER)
        for n, k in ((4096, 14336), (28672, 4096))
    ]
    assert [isinstance(s, ExpertsDecodeSchedule) and s.cluster for s in found] == [2, 1]


def test_which_kernel_serves_which_tiles() -> None:
    spec = MatmulSpec(128 * 1536, 2048, "u4", 128, experts=128)
    kinds = {
        target: {tile: type(schedule_for(spec, tile, target)) for tile in tiles_of(spec, target)}
        for target in (HOPPER, AMPERE)
    }
    few, many = ExpertsDecodeSchedule, ExpertsSchedule
    fewest = (8, 16, 24, 32, 48, 64, 80)
    assert kinds[HOPPER] == dict.fromkeys(fewest, few) | dict.fromkeys((96, 128, 144, 160, 192, 256), many)
    assert kinds[AMPERE] == dict.fromkeys((8, 16), few) | dict.fromkeys((32, 64, 128, 192), ExpertsMmaSchedule)


def test_rounds_waste_no_columns() -> None:
    """768 columns are three rounds of 256, not two of 512; of 2880, six of these are hardly more than are needed."""
    for k, panels in {768: (128, 2), 2880: (128, 4)}.items():
        spec = MatmulSpec(128 * 2048, k, "u4", 64, experts=128)
        assert schedule_for(spec, 32, AMPERE) == ExpertsMmaSchedule(32, *panels, blocks_per_sm=2)


CASES: list[tuple[dict[str, Any], AnySchedule]] = [
    ({"weight": "u4", "group_size": 32, "zeros": "int", "n": 3 * 128}, ExpertsMmaSchedule(32, 64, 2, row_blocks=2)),
    ({"weight": "i3", "group_size": 64, "n": 3 * 16, "bias": True, "out": "f32"}, SMALL),
    ({"weight": "f6e3m2", "n": 3 * 144, "group_size": 64, "act": "bf16"}, ExpertsMmaSchedule(64, 128, 2)),
    ({"weight": "f4e2m1", "n": 3 * 64, "group_size": 32, "scale": "e8m0", "act": "bf16", "bias": True}, SMALL),
    ({"weight": "nf4", "n": 3 * 80, "group_size": 64, "scale": "f32"}, ExpertsMmaSchedule(32, 64, 4)),
    ({"weight": "u8", "n": 3 * 32, "group_size": None, "zeros": "float"}, ExpertsMmaSchedule(96, 64, 2, row_blocks=2)),
    ({"weight": "f4e2m1", "n": 3 * 48, "group_size": 16, "scale": "e4m3", "row_scales": True}, SMALL),
    ({"weight": "u4", "n": 3 * 64, "group_size": 32, "zeros": "offset", "scale": "u6", "bilevel": Bilevel()}, SMALL),
    ({"weight": "u3", "n": 3 * 48, "group_size": 16, "zeros": "float", "outliers": True}, SMALL),
    ({"weight": "i4", "n": 3 * 144, "group_size": 64}, replace(SMALL, blocks_per_sm=2)),
    ({"weight": "u4", "n": 3 * 48, "group_size": 64, "bias": True, "epilogue": "silu_mul"}, SMALL),
    ({"weight": "i8", "n": 3 * 160, "bias": True, "act": "bf16", "epilogue": "swiglu_oai"}, SMALL),
    ({"weight": "i4", "n": 3 * 128, "outliers": True, "epilogue": "gelu_mul"}, ExpertsMmaSchedule(32, 64, 2)),
    ({"weight": "u1", "n": 3 * 256, "group_size": 128, "k": 1152}, ExpertsMmaSchedule(128, 128, 2, row_blocks=2)),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "schedule"), CASES, ids=str)
def test_any_format(choices: dict[str, Any], schedule: AnySchedule) -> None:
    ids = np.random.default_rng(1).choice(3, 90, p=[0.5, 0.1, 0.4])
    spec: dict[str, Any] = {"k": 512, "experts": 3} | choices
    assert is_right(MatmulSpec(**spec), schedule, ids, 11)


def meets(row: tuple[Any, ...]) -> Iterator[Hashable]:
    """Yields what is to meet where formats are multiplied in tiles: every case and every engine, and every type of x,
    whether there are zeros, and every tile."""
    choices, tile, target = row
    yield str(choices), str(target)
    yield choices.get("act"), choices.get("zeros"), tile > 16
    yield from ((bool(choices.get(name)), tile, str(target)) for name in ("act", "zeros"))


TILES_OF_FEW = [(8, AMPERE), *((tile, HOPPER) for tile in (8, 16, 32, 40, 64))]


@pytest.mark.parametrize(
    ("choices", "tile", "target"), swept([(c, *tile) for c, _ in CASES for tile in TILES_OF_FEW], meets), ids=str
)
def test_any_format_of_few_slots(choices: dict[str, Any], tile: int, target: Target) -> None:
    """By the kernel that is chosen, which streams weights unless they have outliers."""
    spec = MatmulSpec(**{"k": 512, "experts": 3} | choices)
    tile = 16 if spec.outliers else tile
    schedule = schedule_for(spec, tile, target)
    assert schedule is not None and (tile > 16 or isinstance(schedule, ExpertsDecodeSchedule) != spec.outliers)
    ids = np.random.default_rng(1).choice(3, 50, p=[0.7, 0.1, 0.2])
    assert is_right(spec, schedule, ids, 11, target)


@pytest.mark.parametrize("schedule", [SMALL, FEW, FEW_BY_WGMMA, replace(FEW_BY_WGMMA, tokens=40)], ids=str)
def test_a_row_depends_on_no_other(schedule: AnySchedule) -> None:
    """What is no number in one token stays there, and the bits of the others are what they were."""
    spec = MatmulSpec(2 * 64, 512, "u4", 64, experts=2)
    x, weight = random_inputs(replace(spec, experts=1), 6)
    ids = np.array([0, 1, 1, 0, 1, 0])
    before, _, rows = run(spec, schedule, ids, x, weight, HOPPER)
    x[2] = torch.nan
    after, _, _ = run(spec, schedule, ids, x, weight, HOPPER)
    other = torch.from_numpy(rows != 2)
    assert torch.equal(before[other], after[other]) and torch.isnan(after[~other]).all()


HALVED = (FEW_HALVED, replace(FEW_BY_WGMMA, split_k=2, cluster=2, max_blocks_per_sm=1))


LARGE = (ExpertsSchedule(32), ExpertsSchedule(32, gather=True))
BETWEEN = (
    *(replace(FEW, tokens=24), replace(FEW_BY_WGMMA, tokens=40), replace(FEW_BY_WGMMA, tokens=96, num_stages=2)),
    *(ExpertsSchedule(80), ExpertsSchedule(144, 64, 6, last_tokens=32), ExpertsSchedule(80, gather=True)),
)
"""Tiles of sizes that are no powers of two."""


@pytest.mark.parametrize("schedule", [SMALL, *LARGE, FEW, FEW_BY_WGMMA, *HALVED], ids=str)
@pytest.mark.parametrize("name", ["one", "uneven", "some elsewhere", "none here"])
def test_on_hopper(name: str, schedule: AnySchedule) -> None:
    assert is_right(MatmulSpec(4 * 48, 768, "u4", 64, experts=4), schedule, ROUTINGS[name], 5, HOPPER)


@pytest.mark.parametrize("schedule", BETWEEN, ids=str)
@pytest.mark.parametrize("slots", [1, 7, 65, 513])
def test_tiles_between_powers_of_two(slots: int, schedule: AnySchedule) -> None:
    """Of experts that are hit about alike, but for one without slots and slots that are elsewhere."""
    ids = np.random.default_rng(slots).choice([-1, 0, 1, 2, 4], slots)
    assert is_right(MatmulSpec(4 * 48, 512, "u4", 64, experts=4), schedule, ids, 11, HOPPER)


def meets_wgmma(row: tuple[Any, ...]) -> Iterator[Hashable]:
    """Yields every case, and with every schedule a type of x, zeros, an epilogue and outliers, and none."""
    choices, schedule = row
    yield str(choices)
    yield from ((name, bool(choices.get(name)), schedule) for name in ("act", "zeros", "epilogue", "outliers"))


BY_WGMMA = (ExpertsSchedule(64), ExpertsSchedule(64, 64, 6, gather=True), ExpertsSchedule(80))


@pytest.mark.parametrize(
    ("choices", "schedule"), swept([(c, by) for c, _ in CASES for by in BY_WGMMA], meets_wgmma), ids=str
)
def test_any_format_by_wgmma(choices: dict[str, Any], schedule: ExpertsSchedule) -> None:
    ids = np.random.default_rng(1).choice(3, 90, p=[0.5, 0.1, 0.4])
    spec: dict[str, Any] = {"k": 768, "experts": 3} | choices
    assert is_right(MatmulSpec(**spec), schedule, ids, 11, HOPPER)


TILES = {
    "of both kinds": [148, 30, 200, 5, 128, 0, 33],
    "short alone": [3, 32, 0, 1],
    "none short": [128, 33, 256],
}


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("slots", TILES.values(), ids=TILES)
@pytest.mark.parametrize("choices", [{"n": 48}, {"n": 144, "k": 512, "epilogue": "silu_mul"}], ids=str)
def test_short_tiles(choices: dict[str, Any], slots: list[int], gather: bool) -> None:
    """Tiles of up to 32 of 128 slots are multiplied by narrower products, after all others."""
    ids = np.random.default_rng(1).permutation(np.repeat(np.arange(len(slots)), slots))
    spec = {"k": 256, "weight": "u4", "group_size": 64} | choices | {"n": choices["n"] * len(slots)}
    schedule = ExpertsSchedule(128, 64, 4, last_tokens=32, gather=gather)
    assert is_right(MatmulSpec(**spec, experts=len(slots)), schedule, ids, 11, HOPPER)


# -- errors


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"experts": 5}, r"experts=5 needs n=192, the rows of all, to be a multiple of 80: 16 for each; pad"),
        ({"experts": 8}, r"experts=8 needs n=192, the rows of all, to be a multiple of 128"),
        ({"experts": 0}, r"experts=0 must be at least 1"),
        ({"experts": 4, "epilogue": "residual"}, r"experts=4 has no epilogue='residual'"),
    ],
)
def test_specs_that_are_none(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        MatmulSpec(192, 256, "u4", 64, **choices)


@pytest.mark.parametrize(
    ("spec", "schedule", "message"),
    [
        (MatmulSpec(192, 256, "u4", 64), SMALL, "experts_mma is for weights of several experts"),
        (MatmulSpec(192, 256, "u4", 64, experts=4), ExpertsSchedule(), "experts needs sm_90a, the target is sm_80"),
        (MatmulSpec(192, 260, "u4", experts=4), SMALL, "copies x in whole 16-byte pieces"),
        (MatmulSpec(192, 256, "u4", 64, experts=4), replace(SMALL, row_blocks=2), "two warps cannot share tokens=16"),
        (
            MatmulSpec(192, 256, "u4", 64, experts=4),
            ExpertsMmaSchedule(128, 128, 4, blocks_per_sm=2),
            "blocks_per_sm=2 of .* bytes of shared memory each do not fit sm_80",
        ),
        (MatmulSpec(192, 256, "u4", 64), FEW, "experts_decode is for weights of several experts"),
        (MatmulSpec(192, 260, "u4", experts=4), FEW, "copies x in whole 16-byte pieces"),
        (MatmulSpec(192, 256, "u4", 64, experts=4, outliers=True), FEW, "experts_decode adds no outliers; take an Exp"),
        (MatmulSpec(192, 256, "u4", 64, experts=4), FEW_BY_WGMMA, "wgmma"),
        (
            MatmulSpec(192, 256, "u4", 64, experts=4),
            replace(FEW, warps_k=16, max_blocks_per_sm=8),
            "max_blocks_per_sm=8, but sm_80 has room for 2 of these blocks; take fewer",
        ),
    ],
)
def test_schedules_that_do_not_fit(spec: MatmulSpec, schedule: AnySchedule, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        request(spec, AMPERE, schedule)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"split_k": 2}, "adds up in clusters, so split_k=2 and cluster=1 must be equal"),
        (
            {"split_k": 2, "cluster": 2, "max_blocks_per_sm": 3},
            "needs one of cluster=2 and max_blocks_per_sm=3 to be a multiple of the other",
        ),
        ({"preload_weights": True, "num_stages": 1}, "experts_decode needs preload_weights=False"),
        ({"tokens": 128, "wgmma": True, "warps_n": 4}, "tokens=128 must be one of 8, 16, 24, .* 88, 96"),
        ({"wgmma": True, "warps_n": 4, "refill": "per_warp"}, "experts_decode needs another refill than 'per_warp'"),
        ({"max_blocks_per_sm": 0}, "experts_decode needs max_blocks_per_sm of at least 1, got 0"),
    ],
    ids=str,
)
def test_choices_that_do_not_fit(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(FEW, **choice)


@pytest.mark.parametrize("target", ["cpu", "emulator:sm_80"])
def test_a_matmul_is_no_layer(target: str) -> None:
    """Its kernels can be read; a call would lack what says whose the rows of x are."""
    spec = MatmulSpec(64, 256, "u4", 64, experts=2)
    with pytest.raises(SpecError, match=r"rows of x that are sorted by expert, which lowbit.LowbitExperts does"):
        mm = lowbit.compile(spec, target)
        assert "lowbit.expert_matmul" in mm.ir("lowbit")
        mm(torch.zeros(3, 256, dtype=torch.half), mm.pack(*random_inputs(replace(spec, experts=1), 1)[1].values()))


# -- that these tests can fail


def _without_its_last_barrier(work: ExpertWork, block: Any) -> None:
    barrier, work.p.barrier = work.p.barrier, lambda *_, **__: None  # type: ignore[method-assign]

    def whole() -> None:
        work.p.barrier = barrier  # type: ignore[method-assign]
        block()
        work.p.barrier = lambda *_, **__: None  # type: ignore[method-assign]

    RUN(work, whole)


RUN, TILE = ExpertWork.run, ExpertTiles.tile
MUTATIONS: dict[str, tuple[AnySchedule, Any, str, Any]] = {
    "the end of the tile before": (SMALL, Turn, "end_of", lambda self, inside: self.here.end),
    "short tiles that are not told apart": (
        ExpertsSchedule(128, 64, 4, last_tokens=32), ExpertTiles, "short", lambda self: self.count
    ),
    "no rows of their own": (SMALL, ExpertOrder, "first", lambda self: self._position(self.block + 1)),
    "the slots of another": (FEW, ExpertTiles, "tile", lambda self, number: TILE(self, number + 1)),
    "rows of all experts": (FEW, ExpertWork, "first_row", lambda self: self.tile * self.plan.schedule.rows),
    "sums that are overwritten": (FEW, ExpertWork, "run", _without_its_last_barrier),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutations_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, *change = MUTATIONS[what]
    monkeypatch.setattr(*change)
    right = False
    with contextlib.suppress(EmulatorError):
        target = HOPPER if isinstance(schedule, ExpertsSchedule) else AMPERE
        right = is_right(MatmulSpec(4 * 48, 768, "u4", 64, experts=4), schedule, ROUTINGS["uneven"], 5, target)
    assert not right
