"""Every two fields of a spec meet, and element, scale and zeros in threes: on the CPU and in the emulator, against the
definition of `pylib.check`, which shares no code with the compiler.

A tenth of the cases run in CI, picked so that nine tenths of all pairs meet in them, and a third of those of experts;
all of them with `-m slow`.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from combinations import (
    EXPERT_FACTORS,
    FACTORS,
    CoveringArray,
    completed,
    covering_array,
    expert_array,
    features,
    fives_of,
    integer_cases,
    is_as_made,
    legal,
    wanted_fives,
    wanted_pairs,
    wanted_triples,
)
from torch import Tensor

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.streaming.scaling import Scaling
from lowbit.pylib import matmul
from lowbit.pylib.build.kernels import Artifacts
from lowbit.pylib.check.cases import Case
from lowbit.pylib.check.trial import try_case
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.runtime.devices import target_named
from lowbit.pylib.weights import packed

KERNELS = (
    *("cpu", "decode", "decode with wgmma", "decode_integer", "prefill", "prefill_mma", "dequantize"),
    *("eight_bit", "eight_bit with wgmma", "eight_bit_prefill", "eight_bit_prefill_mma"),
)
Tensors = dict[str, Tensor]


def listed(array: CoveringArray, in_ci: Container[int]) -> Iterator[Any]:
    """Yields cases as parameters."""
    for number, case in enumerate(array.cases):
        marks = [] if number in in_ci else [pytest.mark.slow]
        yield pytest.param(case, id=f"{number}-{case.spec.weight}-{case.target}-{case.m}", marks=marks)


ARRAY, OF_EXPERTS = covering_array(), expert_array()
IN_CI, OF_EXPERTS_IN_CI = ARRAY.in_ci(140), OF_EXPERTS.in_ci(50)


@pytest.mark.parametrize("case", [*listed(ARRAY, set(IN_CI)), *integer_cases()])
def test_case(case: Case) -> None:
    assert_right(case)


@pytest.mark.parametrize("case", [*listed(OF_EXPERTS, set(OF_EXPERTS_IN_CI))])
def test_case_of_experts(case: Case) -> None:
    assert_right(case)


def assert_right(case: Case) -> None:
    outcome = try_case(case)
    refused = outcome.verdict == "refused" and outcome.detail.startswith("fold_scales takes")  # in e4m3, by `pack`
    assert outcome.verdict == "right" or (refused and case.spec.scale == "e4m3"), f"{case}: {outcome.detail}"


def test_all_pairs_and_triples_are_covered() -> None:
    choices = ARRAY.choices
    pairs = {frozenset(pair) for choice in choices for pair in itertools.combinations(choice.items(), 2)}
    names = ("weight", "scale", "zeros")
    triples = {tuple(choice[name] for name in names) for choice in choices}
    missing = [each for each in wanted_pairs() if completed(each) and frozenset(each.items()) not in pairs]
    assert not missing
    missing = [each for each in wanted_triples() if completed(each) and tuple(each.values()) not in triples]
    assert not missing


@pytest.mark.parametrize(("array", "numbers"), [(ARRAY, IN_CI), (OF_EXPERTS, OF_EXPERTS_IN_CI)], ids=["", "experts"])
def test_most_of_what_is_to_meet_does_in_ci(array: CoveringArray, numbers: list[int]) -> None:
    """Of pairs, of threes and of fives; and every value."""
    every = Counter(itertools.chain(*map(features, array.choices)))
    found = Counter(itertools.chain(*(features(array.choices[number]) for number in numbers)))
    assert len(found) > 0.75 * len(every)
    pairs = [feature for feature in every if len(feature) == 2]
    assert len([pair for pair in pairs if pair in found]) > 0.85 * len(pairs)
    assert {value for pair in pairs for value in pair} == {value for pair in pairs if pair in found for value in pair}


def test_every_value_is_covered_with_experts() -> None:
    missing = {(name, value) for name, values in EXPERT_FACTORS.items() for value in values} - {
        item for choice in OF_EXPERTS.choices for item in choice.items()
    }
    assert not missing


@pytest.mark.slow
def test_the_arrays_are_as_they_would_be_made_now() -> None:
    assert is_as_made(), "python -m pytests.kernels.combinations"


def test_all_fives_are_covered() -> None:
    """All but integer zeros, which only integers have."""
    found = set().union(*map(fives_of, ARRAY.choices))
    assert {five for five in wanted_fives() if five not in found} == {
        five for five in wanted_fives() if five[2] == "int" and five[0] != "integer"
    }


def test_no_legal_pair_is_left_out() -> None:
    """Of random legal choices, whatever the array thinks of them, all pairs are in it."""
    choices = ARRAY.choices
    pairs = {frozenset(pair) for choice in choices for pair in itertools.combinations(choice.items(), 2)}
    rng, found = random.Random(1), 0
    for _ in range(60_000):
        choice: dict[str, Any] = {name: rng.choice(values) for name, values in FACTORS.items()}
        if rng.random() < 0.7:
            choice |= dict.fromkeys(("second_level", "second_rows", "second_groups", "second_scale"))
        if rng.random() < 0.7:
            choice |= {"compute": None, "fold_scales": False, "compute_from": 1}
        if legal(choice):
            found += 1
            left_out = [pair for pair in itertools.combinations(choice.items(), 2) if frozenset(pair) not in pairs]
            assert not left_out
    assert found > 500


# -- the array can fail


def without_a_zero(tensors: Tensors) -> Tensors:
    """The zero of the first group of the first row is dropped."""
    zeros = tensors["zeros"].clone()
    zeros[0, 0] = 0
    return tensors | {"zeros": zeros}


def with_scales_swapped(tensors: Tensors) -> Tensors:
    """The scales of the first two rows change places."""
    scales = tensors["scales"].clone()
    scales[:2] = tensors["scales"][:2].flip(0)
    return tensors | {"scales": scales}


def rounded_once_more(y: Tensor) -> Tensor:
    """Each y is cut to the even neighbour below: to a bit less."""
    bits = y.view(torch.int16 if y.element_size() == 2 else torch.int32)
    return (bits & ~1).view(y.dtype)


CASES = integer_cases() + ARRAY.cases


def cases_of(family: str, wanted: Callable[[MatmulSpec], bool] = lambda spec: True) -> Iterator[Case]:
    """Yields the cases that a family of kernels serves; to choose kernels for all takes ten seconds. In 8 bits one
    group of many is less than rounding explains: the least groups come first, and numbers of rows that are served."""
    likely = [(number, case) for number, case in enumerate(CASES) if wanted(case.spec) and may_serve(family, case)]
    if family.startswith("eight_bit"):
        sign = -1 if "prefill" in family else 1
        likely.sort(key=lambda each: (sign * each[1].m, groups_of(each[1].spec)))
    return (case for number, case in likely if family_of_case(number) == family)


def groups_of(spec: MatmulSpec) -> int:
    """Returns how many groups a row has."""
    return spec.k // (spec.group_size or spec.k)


def may_serve(family: str, case: Case) -> bool:
    """Tells, without choosing a kernel, whether a family may serve a case."""
    return (
        (bool(case.spec.compute) or not family.startswith("eight_bit"))
        and (case.target == "emulator:sm_90a" or "wgmma" not in family)
        and (case.schedule is not None or family != "decode_integer")
    )


@cache
def family_of_case(number: int) -> str:
    case = CASES[number]
    target = target_named(case.target)
    if not target.is_gpu:
        return "cpu"
    request = Artifacts(case.spec.for_rows(case.m), target, case.schedule).request_for(case.m)
    return request.family + (" with wgmma" if getattr(request.schedule, "wgmma", False) else "")


@pytest.mark.parametrize("change", [without_a_zero, with_scales_swapped])
@pytest.mark.parametrize("family", KERNELS)
def test_a_wrong_weight_is_found(family: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = Matmul.pack
    monkeypatch.setattr(Matmul, "pack", lambda mm, **tensors: pack(mm, **change(tensors)))
    zeros = change is without_a_zero
    assert is_found(cases_of(family, lambda spec: not zeros or spec.zeros in ("int", "float")))


@pytest.mark.parametrize("target", ["cpu", "emulator:sm_80", "emulator:sm_90a"])
def test_a_wrong_weight_of_experts_is_found(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the first expert has the scales of its second row in its first is seen where that has slots."""
    pack = packed.pack
    monkeypatch.setattr(packed, "pack", lambda spec, **tensors: pack(spec, **with_scales_swapped(tensors)))
    assert is_found(case for case in OF_EXPERTS.cases if case.target == target)


@pytest.mark.parametrize("family", KERNELS)
def test_a_wrong_rounding_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that kernels round to f16 explain more than a bit of f16, and sums of f8e4m3 more than one of bf16."""
    call = Matmul.__call__
    monkeypatch.setattr(Matmul, "__call__", lambda mm, x, w, **others: rounded_once_more(call(mm, x, w, **others)))

    def shows(spec: MatmulSpec) -> bool:
        coarse = (spec.act, spec.out_dtype) == ("f16", "bf16") and not spec.compute
        plain = not spec.epilogue and not spec.outliers
        return plain and (coarse or (spec.compute == "i8" and spec.out_dtype != "f32"))

    assert is_found(cases_of(family, shows))


def test_a_power_of_two_that_codes_lack_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding small floats leaves it out: zeros and offsets were multiplied by it, in the one case where weights that
    come with them are scaled by e4m3. It must be compiled anew: an earlier test may have left its right kernel."""
    monkeypatch.setattr(Scaling, "code_power", 0)
    monkeypatch.setattr(matmul, "_compile", matmul._compile.__wrapped__)
    monkeypatch.setattr(matmul, "_alive", {})
    monkeypatch.setenv("LOWBIT_NO_CACHE", "1")

    def shows(spec: MatmulSpec) -> bool:
        return (spec.scale, spec.act, spec.dtype.kind) == ("e4m3", "f16", "float") and spec.zeros != "none"

    assert is_found(cases_of("decode with wgmma", shows))


def is_found(cases: Iterable[Case]) -> bool:
    """Tells whether one of the first cases is wrong."""
    return any(try_case(case).verdict == "wrong" for case in itertools.islice(cases, 12))
