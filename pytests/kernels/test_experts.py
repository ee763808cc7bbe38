"""The kernel for weights of several experts, in the emulator against float64: every slot gets the rows of its expert.

Tables of tiles are made here in NumPy; `pylib` makes them in torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from emulated import HOPPER, run_launch
from torch import Tensor

import lowbit
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import EmulatorError, SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.experts.choice import schedule_for, schedule_for_few, tiles_of
from lowbit.passes.kernels.experts.schedule import ExpertsSchedule
from lowbit.passes.kernels.experts_mma.schedule import ExpertsMmaSchedule
from lowbit.passes.kernels.persistent.expert_order import ExpertOrder
from lowbit.passes.kernels.persistent.tile_order import Turn
from lowbit.passes.kernels.registry import family_of, request
from lowbit.passes.pipeline import CompiledKernel, compile_kernel
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.pylib.reference import agrees, matmul, random_inputs, tolerance
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import pack

SMALL = ExpertsMmaSchedule(16, num_stages=2)
AMPERE = parse_target("sm_80")
Array = np.ndarray[Any, Any]
AnySchedule = ExpertsMmaSchedule | ExpertsSchedule


def routing(experts_of_slots: Array, experts: int, tile: int) -> tuple[Array, Array]:
    """The expert of each slot in their order, sorted (those that are elsewhere last), and the table of tiles."""
    ids = np.where((experts_of_slots < 0) | (experts_of_slots >= experts), experts, experts_of_slots)
    tiles = np.zeros((len(ids) + 1, 3), np.int32)
    found = [
        (expert, first, min(first + tile, end))
        for expert in range(experts)
        for begin, end in [np.searchsorted(np.sort(ids), (expert, expert + 1))]
        for first in range(begin, end, tile)
    ]
    tiles[0, 0] = len(found)
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
    order, tiles = routing(ids, spec.experts, schedule.tokens)
    rows = (order % len(x)).astype(np.int32)
    y = torch.full((len(ids), spec.outputs), torch.nan, dtype=TORCH[spec.out_dtype])
    w = pack(spec, **weight)
    slots = {"rows": torch.from_numpy(rows), "tiles": torch.from_numpy(tiles)}
    run_launch(compiled(spec, schedule, target), w, True, 0, x=x, y=y, m=len(ids), **slots)
    return y, ids[order], rows


def is_right(
    spec: MatmulSpec, schedule: AnySchedule, ids: Array, tokens: int, target: Target = AMPERE
) -> bool:
    """Whether every slot of an expert has what the definition says, and no other was written."""
    dense = replace(spec, experts=1)
    rounding: dict[str, Any] = dict(family_of(schedule).rounding(spec, schedule))
    x, weight = random_inputs(dense, tokens)
    y, expert, rows = run(spec, schedule, ids, x, by_expert(spec, weight), target)
    expected, bound = matmul(dense, x[rows], **weight), tolerance(dense, x[rows], **weight, **rounding)
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


@pytest.mark.parametrize("name", ROUTINGS)
def test_any_routing(name: str) -> None:
    """Experts of 48 rows: a third of a tile, which ends in the rows of the next."""
    assert is_right(MatmulSpec(4 * 48, 256, "u4", 64, experts=4), SMALL, ROUTINGS[name], 5)


@pytest.mark.parametrize(("slots", "blocks"), [(8, 1), (64, 2), (4096, 2)])
def test_few_tiles_get_a_multiprocessor_each(slots: int, blocks: int) -> None:
    spec = MatmulSpec(128 * 1536, 2048, "u4", 128, experts=128)
    assert schedule_for_few(spec, 16, slots, HOPPER) == ExpertsMmaSchedule(16, 128, 4, blocks_per_sm=blocks)


def test_many_slots_are_multiplied_by_wgmma() -> None:
    spec = MatmulSpec(128 * 1536, 2048, "u4", 128, experts=128)
    kinds = {tile: type(schedule_for(spec, tile, HOPPER)) for tile in tiles_of(spec, HOPPER)}
    assert kinds == dict.fromkeys((16, 32), ExpertsMmaSchedule) | dict.fromkeys((64, 128, 192), ExpertsSchedule)
    assert {type(schedule_for(spec, tile, AMPERE)) for tile in tiles_of(spec, AMPERE)} == {ExpertsMmaSchedule}


def test_rounds_waste_no_columns() -> None:
    """768 columns are three rounds of 256, not two of 512; of 2880, six of these are hardly more than are needed."""
    for k, panels in {768: (128, 2), 2880: (128, 4)}.items():
        spec = MatmulSpec(128 * 2048, k, "u4", 64, experts=128)
        assert schedule_for(spec, 32, HOPPER) == ExpertsMmaSchedule(32, *panels, blocks_per_sm=2)


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


def test_a_row_depends_on_no_other() -> None:
    """What is no number in one token stays there, and the bits of the others are what they were."""
    spec = MatmulSpec(2 * 64, 256, "u4", 64, experts=2)
    x, weight = random_inputs(replace(spec, experts=1), 6)
    ids = np.array([0, 1, 1, 0, 1, 0])
    before, _, rows = run(spec, SMALL, ids, x, weight)
    x[2] = torch.nan
    after, _, _ = run(spec, SMALL, ids, x, weight)
    other = torch.from_numpy(rows != 2)
    assert torch.equal(before[other], after[other]) and torch.isnan(after[~other]).all()


@pytest.mark.parametrize("schedule", [SMALL, ExpertsSchedule(32)], ids=["mma", "wgmma"])
@pytest.mark.parametrize("name", ["one", "uneven", "some elsewhere", "none here"])
def test_on_hopper(name: str, schedule: AnySchedule) -> None:
    assert is_right(MatmulSpec(4 * 48, 768, "u4", 64, experts=4), schedule, ROUTINGS[name], 5, HOPPER)


@pytest.mark.parametrize("choices", [choices for choices, _ in CASES], ids=str)
def test_any_format_by_wgmma(choices: dict[str, Any]) -> None:
    ids = np.random.default_rng(1).choice(3, 90, p=[0.5, 0.1, 0.4])
    spec: dict[str, Any] = {"k": 768, "experts": 3} | choices
    assert is_right(MatmulSpec(**spec), ExpertsSchedule(64), ids, 11, HOPPER)


# -- errors


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"experts": 5}, r"experts=5 needs n=192, the rows of all, to be a multiple of 80: 16 for each; pad"),
        ({"experts": 8}, r"experts=8 needs n=192, the rows of all, to be a multiple of 128"),
        ({"experts": 0}, r"experts=0 must be at least 1"),
        ({"experts": 4, "epilogue": "residual"}, r"experts=4 has no epilogue='residual'"),
        ({"experts": 4, "permuted": True}, r"experts=4 has no permuted=True"),
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
    ],
)
def test_schedules_that_do_not_fit(spec: MatmulSpec, schedule: AnySchedule, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        request(spec, AMPERE, schedule)


@pytest.mark.parametrize("target", ["cpu", "emulator:sm_80"])
def test_a_matmul_is_no_layer(target: str) -> None:
    """Its kernels can be read; a call would lack what says whose the rows of x are."""
    spec = MatmulSpec(64, 256, "u4", 64, experts=2)
    with pytest.raises(SpecError, match=r"rows of x that are sorted by expert, which lowbit.LowbitExperts does"):
        mm = lowbit.compile(spec, target)
        assert "lowbit.expert_matmul" in mm.ir("lowbit")
        mm(torch.zeros(3, 256, dtype=torch.half), mm.pack(*random_inputs(replace(spec, experts=1), 1)[1].values()))


# -- that these tests can fail


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "the end of the tile before": (Turn, "end_of", lambda self, inside: self.here.end),
    "no rows of their own": (ExpertOrder, "first", lambda self: self._position(self.block + 1)),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutations_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[what])
    right = False
    with contextlib.suppress(EmulatorError):
        right = is_right(MatmulSpec(4 * 48, 768, "u4", 64, experts=4), SMALL, ROUTINGS["uneven"], 5)
    assert not right
