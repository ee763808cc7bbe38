"""The kernels that read the ids of a token's experts, in the emulator against float64."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from emulated import HOPPER, run_launch
from sweeps import swept
from test_experts import by_expert
from torch import Tensor

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.top_k import TopK
from lowbit.passes.kernels.registry import family_of, request
from lowbit.passes.kernels.streaming.epilogue import SumOfExperts
from lowbit.passes.kernels.top_k_experts.family import TopKExperts
from lowbit.passes.kernels.top_k_experts.schedule import TopKSchedule
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.scheduling.choice import Chooser
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.pylib.reference import agrees, matmul, random_inputs, tolerance
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import pack

AMPERE = parse_target("sm_80")
SMALL = TopKSchedule(8, 1, 1, 2, 64, 2)
IDS = torch.tensor([[2, 0], [3, 3], [-1, 1], [1, 4], [-1, 7]])
Array = np.ndarray[Any, Any]


def problem(spec: MatmulSpec, ids: Tensor) -> tuple[Tensor, dict[str, Tensor], Array, Array]:
    """x and the weight of all experts, and what each place has: [places, n / experts] and the bound of its error."""
    assert spec.top_k
    plain = replace(spec, top_k=None)
    dense = replace(plain, experts=1)
    x, weight = random_inputs(dense, ids.numel() if spec.top_k.weights else len(ids))
    rows = x if spec.top_k.weights else x.repeat_interleave(ids.shape[1], 0)
    rounding: dict[str, Any] = dict(TopKExperts().rounding(spec, SMALL))
    expected, bound = matmul(dense, rows, **weight), tolerance(dense, rows, **weight, **rounding)
    here = np.where((ids < 0) | (ids >= spec.experts), 0, ids).reshape(-1, 1)
    columns = here * spec.outputs + np.arange(spec.outputs)
    every = by_expert(plain, weight)
    return x, every, np.take_along_axis(expected, columns, 1), np.take_along_axis(bound, columns, 1)


def launch(
    spec: MatmulSpec, schedule: TopKSchedule, ids: Tensor, x: Tensor, weight: dict[str, Tensor],
    weights: Tensor | None = None, target: Target = HOPPER,
) -> Tensor:  # fmt: skip
    """y of a launch."""
    assert spec.top_k
    rows = len(ids) if spec.top_k.weights else ids.numel()
    y = torch.full((rows, spec.outputs), torch.nan, dtype=TORCH[spec.out_dtype])
    others = {"ids": ids.to({"i32": torch.int32, "i64": torch.int64}[spec.top_k.ids])}
    if weights is not None:
        others["router_weights"] = weights
    kernel = compile_kernel(request(spec, target, schedule))
    run_launch(kernel, pack(replace(spec, top_k=None), **weight), True, 0, x=x, y=y, m=rows, **others)
    return y


def is_right(spec: MatmulSpec, schedule: TopKSchedule, ids: Tensor, target: Target = HOPPER) -> bool:
    """Whether every row of y is what the definition says, and none is written for experts elsewhere."""
    assert spec.top_k
    x, weight, numbers, bound = problem(spec, ids)
    here = ((ids >= 0) & (ids < spec.experts)).flatten()
    if not spec.top_k.weights:
        y = launch(spec, schedule, ids, x, weight, None, target)
        return bool(agrees(y, numbers, bound)[here.numpy()].all() and torch.isnan(y[~here]).all())
    weights = torch.rand(ids.shape).to(TORCH[spec.top_k.weights])
    x[~here] = torch.nan
    y = launch(spec, schedule, ids, x, weight, weights, target)
    each = np.where(here, weights.flatten().double(), 0)[:, None]
    rounding = float(torch.finfo(TORCH[spec.out_dtype]).eps)
    terms, errors = each * numbers, each * (bound + rounding * np.abs(numbers))
    shape = (*ids.shape, -1)
    total = np.where(each == 0, 0, terms).reshape(shape).sum(1)
    allowed = np.where(each == 0, 0, errors).reshape(shape).sum(1) + 2 * rounding * np.abs(total)
    return bool((np.abs(y.double().numpy() - total) <= allowed).all())


CASES: list[dict[str, Any]] = [
    {"weight": "u4", "group_size": 32, "zeros": "int", "n": 128},
    {"weight": "i3", "group_size": 64, "n": 16, "bias": True, "out": "f32"},
    {"weight": "f6e3m2", "n": 144, "group_size": 64, "act": "bf16"},
    {"weight": "f4e2m1", "n": 64, "group_size": 32, "scale": "e8m0", "act": "bf16", "bias": True},
    {"weight": "nf4", "n": 80, "group_size": 64, "scale": "f32"},
    {"weight": "u8", "n": 32, "group_size": None, "zeros": "float"},
    {"weight": "f4e2m1", "n": 48, "group_size": 16, "scale": "e4m3", "row_scales": True},
    {"weight": "u4", "n": 64, "group_size": 32, "zeros": "offset", "scale": "u6", "bilevel": Bilevel()},
    {"weight": "u2", "n": 48, "group_size": 64, "act": "bf16"},
    {"weight": "u1", "n": 256, "group_size": 128, "k": 1152},
]


def spec_of(choices: dict[str, Any], top_k: TopK) -> MatmulSpec:
    values = {"k": 512, "experts": 4} | choices
    return MatmulSpec(**(values | {"n": values["experts"] * values["n"], "top_k": top_k}))


def chosen(spec: MatmulSpec, target: Target = HOPPER) -> TopKSchedule:
    found = Chooser(spec, target).schedule(1)
    assert isinstance(found, TopKSchedule)
    return found


def meets(row: tuple[Any, ...]) -> Iterator[Hashable]:
    """Yields every case, and with every target the types of x and ids, and whether there are zeros."""
    choices, target, ids = row
    yield str(choices)
    yield from ((str(target), each) for each in (ids, choices.get("act"), bool(choices.get("zeros"))))


@pytest.mark.parametrize(
    ("choices", "target", "ids"), swept(product(CASES, (HOPPER, AMPERE), ("i32", "i64")), meets), ids=str
)
def test_a_row_for_every_id(choices: dict[str, Any], target: Target, ids: Any) -> None:
    spec = spec_of(choices, TopK(2, ids))
    assert is_right(spec, chosen(spec, target), IDS, target)


@pytest.mark.parametrize(
    ("choices", "weights"), [(choices, ("f32", "bf16")[i % 2]) for i, choices in enumerate(CASES)], ids=str
)
def test_experts_are_added_up(choices: dict[str, Any], weights: Any) -> None:
    spec = spec_of(choices, TopK(2, "i64", weights))
    assert is_right(spec, chosen(spec), IDS)


@pytest.mark.parametrize("epilogue", ["silu_mul", "gelu_mul", "swiglu_oai"])
def test_gates(epilogue: Any) -> None:
    spec = spec_of({"weight": "u4", "n": 96, "group_size": 64, "bias": True, "epilogue": epilogue}, TopK(2))
    assert is_right(spec, chosen(spec), IDS)
    assert is_right(spec, TopKSchedule(8, 2, 1, 2, 64, 2, 2, 2), IDS)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_any_number_of_experts(count: int) -> None:
    ids = torch.from_numpy(np.random.default_rng(count).integers(-1, 6, (3, count)))
    for weights in (None, "f32"):
        spec = spec_of({"weight": "i4", "n": 48, "group_size": 64, "experts": 6, "k": 256}, TopK(count, "i64", weights))
        assert is_right(spec, chosen(spec), ids)


@pytest.mark.parametrize(
    "schedule",
    [
        *(SMALL, TopKSchedule(8, 2, 2, 1, 128, 3), TopKSchedule(1, 1, 1, 4, 128, 2)),
        TopKSchedule(8, 1, 4, 1, 256, 1, preload_weights=True),
        TopKSchedule(1, 1, 2, 2, 128, 2, spread_k=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("weights", [None, "f16"])
def test_schedules(schedule: TopKSchedule, weights: Any) -> None:
    spec = spec_of({"weight": "u4", "n": 80, "group_size": 32, "zeros": "float"}, TopK(2, "i64", weights))
    assert is_right(spec, schedule, IDS)


def test_an_id_of_64_bits_is_read_whole() -> None:
    """One whose lower half is an expert's number is none."""
    spec = spec_of({"weight": "u4", "n": 32, "group_size": 64}, TopK(2, "i64", "f32"))
    assert is_right(spec, chosen(spec), torch.tensor([[1, (1 << 32) + 1], [-(1 << 32), 0]]))


@pytest.mark.parametrize(
    ("choices", "target", "message"),
    [
        ({"top_k": TopK(2, "i64", "f32")}, AMPERE, "adds up experts in clusters, which sm_80 does not have"),
        ({"top_k": TopK(16, "i64", "f32")}, HOPPER, "adds up at most 8 experts, the blocks of a cluster, not 16"),
        ({"top_k": None}, HOPPER, "needs a spec with top_k"),
        ({"outliers": True}, HOPPER, "takes no outliers"),
        ({"k": 260, "group_size": None}, HOPPER, "copies x in whole 16-byte pieces"),
    ],
    ids=str,
)
def test_what_does_not_fit(choices: dict[str, Any], target: Target, message: str) -> None:
    values = {"n": 192, "k": 256, "weight": "u4", "group_size": 64, "experts": 4, "top_k": TopK(2)}
    spec = MatmulSpec(**values | choices)
    with pytest.raises(SpecError, match=message):
        request(spec, target, SMALL)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"top_k": TopK(2), "experts": 1}, "top_k= needs experts=, of which tokens have some"),
        ({"top_k": TopK(2), "compute": "i8"}, "takes no compute='i8'; drop one"),
        ({"top_k": 2}, "top_k=2 must be a TopK, with the fields count, ids, weights, or None"),
    ],
)
def test_specs_that_are_none(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        MatmulSpec(**{"n": 192, "k": 256, "weight": "u4", "group_size": 64, "experts": 4} | choices)


def test_top_k_in_json() -> None:
    spec = spec_of(CASES[0], TopK(2, "i32", "f16"))
    assert MatmulSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    for given, message in (
        ({"count": 0}, "top_k: count=0"), ({"count": 2, "ids": "i8"}, "top_k: ids='i8' must be one of 'i32', 'i64'"),
        ({"count": 2, "weights": "i8"}, "top_k: weights='i8' must be one of"), ({"ids": "i32"}, "must be a TopK"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=message):
            TopK.read(given)


@pytest.mark.parametrize("choice", [{"wgmma": True, "warps_n": 4}, {"tokens": 16}, {"split_k": 2}], ids=str)
def test_choices_that_do_not_fit(choice: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="top_k_experts"):
        replace(SMALL, **choice)


def test_a_sum_in_another_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of the wrong experts is wrong: these tests can fail."""
    right = SumOfExperts._term
    monkeypatch.setattr(SumOfExperts, "_term", lambda s, part, place, *rest: right(s, part, 1 - place, *rest))
    spec = spec_of({"weight": "u4", "n": 32, "group_size": 64}, TopK(2, "i64", "f32"))
    assert not is_right(spec, SMALL, IDS)
    assert family_of(SMALL).name == "top_k_experts"
