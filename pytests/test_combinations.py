"""Every two fields of a spec meet, and element, scale and zeros in threes: on the CPU and in the emulator, against the
definition of `pylib.check`, which shares no code with the compiler.

A third of the cases run in CI, all of them with `-m slow`.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from combinations import FACTORS, completed, covering_array, legal, wanted_pairs, wanted_triples

from lowbit.pylib.check.cases import Case
from lowbit.pylib.check.trial import try_case

SHARE = 3  # one case in so many is run in CI


def listed(number: int, case: Case) -> Any:
    """A case as a parameter."""
    marks = [pytest.mark.slow] if number % SHARE else []
    return pytest.param(case, id=f"{number}-{case.spec.weight}-{case.target}-{case.m}", marks=marks)


@pytest.mark.parametrize("case", [listed(*each) for each in enumerate(covering_array().cases)])
def test_case(case: Case) -> None:
    outcome = try_case(case)
    refused = outcome.verdict == "refused" and outcome.detail.startswith("fold_scales takes")  # in e4m3, by `pack`
    assert outcome.verdict == "right" or (refused and case.spec.scale == "e4m3"), f"{case}: {outcome.detail}"


def test_all_pairs_and_triples_are_covered() -> None:
    choices = covering_array().choices
    pairs = {frozenset(pair) for choice in choices for pair in itertools.combinations(choice.items(), 2)}
    names = ("weight", "scale", "zeros")
    triples = {tuple(choice[name] for name in names) for choice in choices}
    missing = [each for each in wanted_pairs() if completed(each) and frozenset(each.items()) not in pairs]
    assert not missing
    missing = [each for each in wanted_triples() if completed(each) and tuple(each.values()) not in triples]
    assert not missing


def test_no_legal_pair_is_left_out() -> None:
    """Of random legal choices, whatever the array thinks of them, all pairs are in it."""
    choices = covering_array().choices
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
