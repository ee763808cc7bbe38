"""The kernels for weights of several experts and activations of 8 bits, in the emulator with the race check.

As in `test_eight_bit`, sums are compared to the last bit where f32 holds all of them. Tables of tiles are those of
`test_experts`.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from eight_bit_problems import FITTING, exact, whole_problem
from emulated import run_launch, x_arguments
from sweeps import every_other
from test_experts import ROUTINGS, Array, by_expert, routing
from torch import Tensor

import lowbit
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import EmulatorError, SpecError
from lowbit.dialect.formats.byte_codes import Compute
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Scalar, Tile
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.eight_bit_experts.schedule import EightBitExpertsSchedule
from lowbit.passes.kernels.eight_bit_experts_decode.schedule import EightBitExpertsDecodeSchedule
from lowbit.passes.kernels.eight_bit_experts_mma.schedule import EightBitExpertsMmaSchedule
from lowbit.passes.kernels.eight_bit_prefill.byte_weight import ByteWeight
from lowbit.passes.kernels.experts.schedule import ExpertsSchedule
from lowbit.passes.kernels.experts_mma.schedule import ExpertsMmaSchedule
from lowbit.passes.kernels.persistent import engine
from lowbit.passes.kernels.persistent.expert_order import ExpertOrder
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import takes_rows_in_order
from lowbit.passes.kernels.registry import family_of, request
from lowbit.passes.kernels.streaming.work import ExpertWork, Work
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.scheduling.expert_rule import schedule_for, tiles_of
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.pylib.reference import agrees, matmul, random_inputs, tolerance
from lowbit.pylib.runtime.activation import quantize_rows
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import PackedWeight, pack

AMPERE, ADA, HOPPER = (parse_target(name) for name in ("sm_80", "sm_89", "sm_90a"))
AnySchedule = EightBitExpertsMmaSchedule | EightBitExpertsSchedule | EightBitExpertsDecodeSchedule
SMALL = EightBitExpertsMmaSchedule(16, num_stages=2)
WGMMA, GATHERING = EightBitExpertsSchedule(64), EightBitExpertsSchedule(64, gather=True)
FEW = EightBitExpertsDecodeSchedule(8, 1, 2, 2, 128, 2)
FEW_BY_WGMMA = EightBitExpertsDecodeSchedule(16, 1, 4, 1, 256, 2, wgmma=True)
I8, FP8 = {"compute": "i8"}, {"compute": "f8e4m3"}


def run(
    spec: MatmulSpec, schedule: AnySchedule, ids: Array, x: Tensor, scales: Tensor, w: PackedWeight, target: Target
) -> tuple[Tensor, Array, Array]:
    """y of all slots of an x of 8 bits, the expert of each slot, and its row of x."""
    order, tiles = routing(ids, spec.experts, schedule.tokens)
    rows = (order % len(x)).astype(np.int32)
    q = lowbit.quantize_activation(x, spec.byte_type, scales=scales)
    y = torch.full((len(ids), spec.outputs), torch.nan, dtype=TORCH[spec.out_dtype])
    given: dict[str, Any] = {"x_scales": q.scales, "x_sums": q.sums, "y": y, "m": len(ids)}
    given |= {"rows": torch.from_numpy(rows), "tiles": torch.from_numpy(tiles)}
    kernel, values = compile_kernel(request(spec, target, schedule)), q.values
    if takes_rows_in_order(schedule):
        values = values.view(torch.uint8)[torch.from_numpy(rows)].view(values.dtype)
    run_launch(kernel, w, True, 0, **given, **x_arguments(kernel, spec, values))
    return y, ids[order], rows


def scales_of_slots(self: ByteWeight, token: Scalar, layout: Layout) -> Tile:
    """What `ByteWeight` multiplies by, if slots were rows of x: the scales of the first rows."""
    scales = self.p.global_view(self.p["x_scales"], "f32", (1, -1), (0, 1), sizes=[self.p["m"]])
    return self.p.load(scales, (0, token % 5), layout, ("none", "clamp"))


def of_expert(spec: MatmulSpec, every: Array, expert: Array) -> Array:
    """The columns of each slot's expert, of those of all experts; for a slot elsewhere, those of the first."""
    here = np.where((expert >= 0) & (expert < spec.experts), expert, 0)
    return np.take_along_axis(every, here[:, None] * spec.outputs + np.arange(spec.outputs), 1)


def is_exact(spec: MatmulSpec, schedule: AnySchedule, ids: Array, tokens: int, target: Target = HOPPER) -> bool:
    """Whether every slot of an expert has the exact result, and no other was written."""
    one = replace(spec, experts=1)
    problem = whole_problem(one, tokens)
    x, x_scales, *weight = problem
    y, expert, rows = run(spec, schedule, ids, x, x_scales, pack(one, *weight), target)
    expected = of_expert(spec, exact(one, problem).numpy()[rows], expert)
    here = torch.from_numpy((expert >= 0) & (expert < spec.experts))
    return torch.equal(y[here], torch.from_numpy(expected)[here]) and bool(torch.isnan(y[~here]).all())


def is_close(spec: MatmulSpec, schedule: AnySchedule, ids: Array, tokens: int, target: Target = HOPPER) -> bool:
    """Whether every slot of an expert has what the definition says of x as it is multiplied, up to rounding."""
    one = replace(spec, experts=1)
    x, weight = random_inputs(one, tokens)
    values, scales = quantize_rows(x, spec.byte_type)
    y, expert, rows = run(spec, schedule, ids, values, scales, pack(spec, **by_expert(spec, weight)), target)
    right, bound = matmul(one, x, **weight), tolerance(one, x, **weight, folded=spec.folds)
    here = (expert >= 0) & (expert < spec.experts)
    numbers = of_expert(spec, right[rows], expert), of_expert(spec, bound[rows], expert)
    return bool(agrees(y, *numbers)[here].all())


def spec_of(compute: Compute, weight: str, number: int) -> MatmulSpec:
    """A small spec of a format: group sizes and zeros take turns. Experts of 48 rows end inside of tiles."""
    bits = dtype(weight).bits
    group = (256 if bits in (3, 5, 6, 7) else 32, None, 256)[number % 3]
    zeros = "int" if weight[0] in "ui" and number % 2 and bits < 8 else "none"
    return MatmulSpec(3 * 48, 512, weight, group, zeros=zeros, compute=compute, out="f32", experts=3)


MIXED = np.random.default_rng(1).choice(3, 40, p=[0.5, 0.1, 0.4])
KINDS = [SMALL, EightBitExpertsMmaSchedule(32, 256, 2, row_blocks=2), WGMMA, GATHERING]


@pytest.mark.parametrize(("compute", "weight"), every_other(FITTING))
def test_every_format_to_the_last_bit(compute: Compute, weight: str) -> None:
    """By one of the kernels each, which take turns."""
    number = FITTING.index((compute, weight)) // 2
    assert is_exact(spec_of(compute, weight, number), KINDS[(number + number // 4) % 4], MIXED, 7, HOPPER)


@pytest.mark.parametrize(("compute", "weight"), every_other(FITTING, 1))
def test_every_format_in_tiles_of_few_slots(compute: Compute, weight: str) -> None:
    """Codes that are multiplied as bytes; in turns by mma.sync, by wgmma, and by clusters that split k, where zeros are
    subtracted from codes."""
    number = FITTING.index((compute, weight)) // 2
    spec = spec_of(compute, weight, number)
    clusters = replace(FEW_BY_WGMMA, tokens=24, step_k=128, split_k=2, cluster=2, warps_n=4)
    schedule = (FEW, FEW_BY_WGMMA, clusters)[(number + number // 3) % 3]
    schedule = replace(schedule, step_k=max(schedule.step_k, spec.packing.chunk))
    if not spec.multiplies_codes:
        with pytest.raises(SpecError, match="is scaled before it is multiplied; take an EightBitExpertsMma"):
            request(spec, HOPPER, schedule)
        spec = replace(spec, group_size=128)
    assert is_exact(spec, schedule, MIXED, 7, HOPPER)


_FOLDED_GATE: dict[str, Any] = {"fold_scales": True, "epilogue": "silu_mul"}


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("choices", [I8, FP8, FP8 | _FOLDED_GATE, I8 | _FOLDED_GATE], ids=str)
def test_short_tiles(choices: dict[str, Any], gather: bool) -> None:
    """Tiles of up to 32 of 128 slots are multiplied by narrower products, after all others."""
    ids = np.random.default_rng(1).permutation(np.repeat(np.arange(4), [148, 0, 31, 128]))
    spec = MatmulSpec(4 * 48, 512, "u4", 128, experts=4, **choices)
    schedule = EightBitExpertsSchedule(128, parts=1 if spec.folds else 2, last_tokens=32, gather=gather)
    assert is_close(spec, schedule, ids, 7)


@pytest.mark.parametrize("schedule", [SMALL, WGMMA, GATHERING, FEW], ids=["mma", "wgmma", "gathering", "few"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_any_routing(name: str, schedule: AnySchedule) -> None:
    """Slots that are uneven, of one expert, or of none; rows of x that several experts get, or one twice."""
    assert is_exact(MatmulSpec(4 * 48, 256, "u4", 64, **I8, out="f32", experts=4), schedule, ROUTINGS[name], 5)


@pytest.mark.parametrize(("k", "stages"), [(1280, 4), (768, 6)])
@pytest.mark.parametrize("gather", [False, True])
def test_rounds_of_half_the_stages(gather: bool, k: int, stages: int) -> None:
    """Five of two panels and two of three; the next tile of a block begins where this one ends."""
    spec = MatmulSpec(4 * 48, k, "u4", 128, **I8, out="f32", experts=4)
    schedule = EightBitExpertsSchedule(64, 128, stages, gather=gather)
    plan = PersistentPlan(spec, schedule, engine.WGMMA)
    assert plan.round.turns == 2 and plan.tiles.columns == k
    assert is_exact(spec, schedule, ROUTINGS["uneven"], 5)


@pytest.mark.parametrize("target", [AMPERE, ADA, parse_target("sm_120")], ids=str)
def test_targets_without_wgmma(target: Target) -> None:
    for compute in (I8, FP8) if target.has_fp8 else (I8,):
        spec = MatmulSpec(4 * 48, 768, "i4", 128, **compute, out="f32", experts=4)
        assert is_exact(spec, SMALL, ROUTINGS["uneven"], 5, target)


FOLDED = FP8 | {"fold_scales": True}
LEVELS, GPT_OSS = {"bilevel": Bilevel()}, {"epilogue": "swiglu_oai"}
CASES: list[tuple[dict[str, Any], AnySchedule, AnySchedule]] = [
    ({"weight": "u4", "zeros": "int", "bias": True, **I8}, KINDS[1], EightBitExpertsSchedule(64, 256)),
    ({"weight": "i8", "group_size": None, "act": "bf16", **I8}, SMALL, WGMMA),
    ({"weight": "i4", "group_size": 32, "out": "bf16", **FP8}, SMALL, EightBitExpertsSchedule(96, parts=2, banks=2)),
    ({"weight": "f4e2m1", "group_size": 32, "scale": "e4m3", "row_scales": True, **FP8}, SMALL, WGMMA),
    ({"weight": "u4", "group_size": 32, "n": 3 * 64, "epilogue": "silu_mul", **I8}, SMALL, WGMMA),
    ({"weight": "f8e4m3", "n": 3 * 160, "epilogue": "gelu_mul", "bias": True, **FP8}, SMALL, WGMMA),
    ({"weight": "nf4", "group_size": 32, "scale": "f32", **FOLDED}, SMALL, WGMMA),
    ({"weight": "u3", "n": 3 * 64, "group_size": 32, "zeros": "float", "bias": True, **GPT_OSS, **FOLDED},
     KINDS[1], EightBitExpertsSchedule(128)),
    ({"group_size": 32, "weight": "u4", "zeros": "offset", "scale": "u6", **LEVELS, **FOLDED}, SMALL, WGMMA),
    ({"weight": "u8", "zeros": "int", **FOLDED}, SMALL, WGMMA),
    ({"weight": "u4", "zeros": "int", **FOLDED, **I8}, SMALL, WGMMA),
    ({"weight": "f6e3m2", "group_size": 64, "act": "bf16", **FOLDED}, replace(SMALL, blocks_per_sm=2), WGMMA),
]  # fmt: skip


@pytest.mark.parametrize("engine", ["mma", "wgmma"])
@pytest.mark.parametrize(("choices", "mma", "wgmma"), CASES, ids=str)
def test_numbers(choices: dict[str, Any], mma: AnySchedule, wgmma: AnySchedule, engine: str) -> None:
    """Scales that are folded in or not, second levels, gates and biases."""
    fields: dict[str, Any] = {"n": 3 * 48, "k": 512, "group_size": 128, "experts": 3} | choices
    schedule, target = (wgmma, HOPPER) if engine == "wgmma" else (mma, ADA)
    assert is_close(MatmulSpec(**fields), schedule, MIXED, 7, target)


def test_folded_weights_are_rounded_for_many_tokens_of_an_expert() -> None:
    spec = MatmulSpec(128, 256, "u4", 32, **FOLDED, experts=2)
    assert not spec.rounds_weights(128) and spec.rounds_weights(129)
    assert replace(spec, weight="nf4").rounds_weights(1)
    of_rows = replace(spec, weight="f8e4m3", group_size=None, row_scales=False)
    for each, tokens, folded in ((spec, 96, False), (spec, 192, True), (of_rows, 96, True)):  # sums stay in any case
        schedule = EightBitExpertsSchedule(tokens)
        assert family_of(schedule).rounding(each, schedule) == {"folded": folded}


# -- which kernels serve


@pytest.mark.parametrize("compute", [I8, FP8, FOLDED, I8 | {"fold_scales": True}], ids=str)
def test_every_size_of_tiles_has_a_kernel(compute: dict[str, Any]) -> None:
    """Weights stream for few slots, if their codes are multiplied; else mma.sync up to 32 slots. By wgmma above where
    there is any."""
    spec = MatmulSpec(128 * 1536, 2048, "u4", 128, **compute, experts=128)
    kinds = {tile: type(schedule_for(spec, tile, HOPPER)) for tile in tiles_of(spec, HOPPER)}
    plain = replace(spec, fold_scales=False)
    for tile in (tile for tile in kinds if tile <= 128):  # whose weights are not rounded
        assert schedule_for(spec, tile, HOPPER) == schedule_for(plain, tile, HOPPER)
    few, many, streaming = EightBitExpertsMmaSchedule, EightBitExpertsSchedule, EightBitExpertsDecodeSchedule
    of_few = dict.fromkeys((8, 16, 24, 32, 48, 64), streaming)
    assert kinds == of_few | dict.fromkeys((80, 96, 128, 144, 160, 192, 256), many)
    assert {type(schedule_for(spec, tile, ADA)) for tile in tiles_of(spec, ADA) if tile > 16} == {few}


@pytest.mark.parametrize(
    ("choices", "schedule", "target", "message"),
    [
        ({"experts": 1, **I8}, SMALL, ADA, "eight_bit_experts_mma is for weights of several experts"),
        (I8, WGMMA, ADA, "eight_bit_experts needs sm_90a, the target is sm_89; take an EightBitExpertsMmaSchedule"),
        (FP8, SMALL, AMPERE, "compute='f8e4m3' needs sm_89 or later, the target is sm_80"),
        ({}, SMALL, ADA, "has no activations of 8 bits"),
        ({}, FEW, ADA, "has no activations of 8 bits; take an ExpertsDecodeSchedule"),
        (FP8, FEW, AMPERE, "compute='f8e4m3' needs sm_89 or later, the target is sm_80"),
        (FOLDED | {"row_scales": True}, FEW, ADA, "u4 is scaled before it is multiplied; take an EightBitExpertsMma"),
        ({"experts": 1, **I8}, FEW, ADA, "eight_bit_experts_decode is for weights of several experts"),
        (I8, ExpertsMmaSchedule(16), ADA, "experts_mma takes no activations of 8 bits, .* EightBitExpertsMmaSchedule"),
        (I8, ExpertsSchedule(), HOPPER, "experts takes no activations of 8 bits, .* an EightBitExpertsSchedule"),
        ({"weight": "u8", "zeros": "int", **I8}, SMALL, ADA, "differences .* no bytes; use a matmul per expert"),
        ({"group_size": None, **I8}, replace(WGMMA, parts=2), HOPPER, "it needs parts=1 and banks=1"),
        (I8, replace(SMALL, row_blocks=2), ADA, "two warps cannot share tokens=16"),
    ],
)  # fmt: skip
def test_schedules_that_do_not_fit(choices: dict[str, Any], schedule: Any, target: Target, message: str) -> None:
    fields: dict[str, Any] = {"weight": "u4", "group_size": 64, "experts": 4} | choices
    with pytest.raises(SpecError, match=message):
        request(MatmulSpec(192, 256, **fields), target, schedule)


# -- that these tests can fail


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "no rows of their own": (ExpertOrder, "first", lambda self: self._position(self.block + 1)),
    "scales of slots": (ByteWeight, "_scales_of_x", scales_of_slots),
    "scales of slots, streaming": (ExpertWork, "scales_of_x", Work.scales_of_x),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutations_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[what])
    right = False
    with contextlib.suppress(EmulatorError):
        spec = MatmulSpec(4 * 48, 768, "u4", 64, zeros="int", **I8, out="f32", experts=4)
        right = is_exact(spec, FEW if "streaming" in what else SMALL, ROUTINGS["uneven"], 5)
    assert not right


def test_short_tiles_have_columns_that_integers_can_have() -> None:
    spec = MatmulSpec(256, 256, "u4", 128, experts=2, compute="i8")
    with pytest.raises(SpecError, match="last_tokens=40 must be 0 with tokens=160: wgmma of integers has"):
        request(spec, HOPPER, EightBitExpertsSchedule(160, last_tokens=40))
    request(replace(spec, compute="f8e4m3"), HOPPER, EightBitExpertsSchedule(160, last_tokens=40))
    request(spec, HOPPER, EightBitExpertsSchedule(144, last_tokens=32))


# -- resources


TAKEN: list[tuple[dict[str, Any], Target, int]] = [
    ({"weight": "u4", **I8}, HOPPER, 52),  # of two blocks that share a multiprocessor, by mma.sync
    ({"weight": "u4", **FP8}, HOPPER, 84),  # the same
    ({"weight": "i8", "group_size": None, **I8}, HOPPER, 0),
    ({"weight": "nf4", "group_size": 32, **FOLDED}, HOPPER, 24),
    ({"weight": "u4", **FP8}, ADA, 0),
    ({"weight": "i8", **I8}, ADA, 32),
    ({"weight": "u4", "group_size": 32, "zeros": "offset", "scale": "u6", **LEVELS, **FOLDED}, ADA, 16),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "target", "most"), TAKEN, ids=str)
def test_few_spills(choices: dict[str, Any], target: Target, most: int) -> None:
    """Of a third of all that may be chosen, another one for each; products of wgmma overlap. The numbers are a record
    of all."""
    fields: dict[str, Any] = {"group_size": 128} | choices
    spec = MatmulSpec(16 * 1536, 2048, **fields, experts=16)
    first = TAKEN.index((choices, target, most)) % 3
    for schedule in (schedule_for(spec, tile, target) for tile in tiles_of(spec, target)[first::3]):
        assert schedule
        kernel = compile_kernel(request(spec, target, schedule))
        used = resource_usage(kernel.ptx, target)
        assert not used.serialized and max(used.spill_stores, used.spill_loads) <= most, (schedule, used)
        assert kernel.launch.shared_bytes <= target.max_shared_per_block
