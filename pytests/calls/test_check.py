"""`lowbit check`: the second definition, random cases, processes that die, and the minimal spec."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np
import pytest
from typer.testing import CliRunner

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.dtypes import all_names, dtype
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib import reference
from lowbit.pylib.check import definition
from lowbit.pylib.check.cases import CHOICES, Case, draw, simpler
from lowbit.pylib.check.session import Drawn, outcomes
from lowbit.pylib.check.trial import Outcome, minimal, try_case
from lowbit.pylib.cli.main import app

OF_QUANTILES = 2e-7  # nf4 is published in f32, of quantiles that were computed in f32


@pytest.mark.parametrize("name", all_names())
def test_values_of_every_code(name: str) -> None:
    with np.errstate(invalid="ignore"):
        error = np.abs(definition.values(name) - dtype(name).values())
    assert (np.isnan(definition.values(name)) == np.isnan(dtype(name).values())).all()
    assert np.nan_to_num(error).max() <= (OF_QUANTILES if name == "nf4" else 1e-10)


def cases(count: int) -> Iterator[Case]:
    """Random specs, in sizes for which float64 has little to do."""
    for number in range(100_000):
        try:
            case = draw(random.Random(number), "cpu", number)
        except SpecError:
            continue
        if count and case.spec.weight != "nf4":
            count -= 1
            yield replace(case, m=min(case.m, 20))
        elif not count:
            return


def test_both_definitions_agree() -> None:
    for case in cases(100):
        x, tensors = reference.random_inputs(case.spec, case.m, case.seed)
        tensors |= reference.random_residual(case.spec, case.m)
        one, two = definition.matmul(asdict(case.spec), x, tensors), reference.matmul(case.spec, x, **tensors)
        np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-9 * np.abs(two).max(), err_msg=str(case))


def test_every_choice_is_drawn() -> None:
    drawn = list(cases(1000))
    for name in ("weight", "zeros", "scale", "group_size", "act", "out", "compute", "n", "k"):
        assert {getattr(case.spec, name) for case in drawn} >= set(CHOICES[name]) - {"nf4"}, name
    assert {case.spec.bilevel.rows for case in drawn if case.spec.bilevel} == {1, 16}


def test_a_seed_is_the_same_cases() -> None:
    one, two = list(Drawn("cpu", 20, seed=3)), list(Drawn("cpu", 30, seed=3))
    assert one == two[:20] and one != list(Drawn("cpu", 20, seed=4))


def test_wrong_is_wrong() -> None:
    """A weight that is off by one code in one place is found; what is refused says why."""
    case = Case(MatmulSpec(16, 64, "u4", 32, scale="f32", out="f32"), "cpu", 3)
    assert try_case(case).verdict == "right"
    with pytest.MonkeyPatch.context() as patch:
        whole = definition.weight
        patch.setattr(definition, "weight", lambda *given: whole(*given) + np.eye(16, 64) / 100)
        assert try_case(case).verdict == "wrong"
    refused = try_case(replace(case, target="emulator:sm_80", spec=replace(case.spec, compute="f8e4m3")))
    assert refused.verdict == "refused" and refused.detail.startswith("compute")


def fails_with_offsets(case: Case) -> Outcome:
    return Outcome(case, "wrong" if case.spec.zeros == "offset" and case.m > 16 else "right")


def test_minimal_spec() -> None:
    spec = MatmulSpec(
        40, 384, "f6e3m2", 128, zeros="offset", scale="e4m3", bias=True, row_scales=True, act="bf16", outliers=True
    )
    least = minimal(fails_with_offsets(Case(spec, "cpu", 129)), fails_with_offsets)
    assert least.case == Case(MatmulSpec(16, 64, "f4e2m1", zeros="offset"), "cpu", 17) or least.case == Case(
        MatmulSpec(16, 64, "u4", zeros="offset"), "cpu", 17
    )
    assert all(fails_with_offsets(case).verdict == "right" for case in simpler(least.case))


def dies_of_one(case: Case) -> Outcome:
    if case.seed == 1:
        os._exit(3)
    return Outcome(case, "right")


def test_a_process_that_dies_is_an_outcome() -> None:
    some = [Case(MatmulSpec(16, 64, "u4"), "cpu", 1, seed) for seed in range(4)]
    found = list(outcomes(some, 2, dies_of_one))
    assert [each.case for each in found] == some
    assert [each.verdict for each in found] == ["right", "wrong", "right", "right"]
    assert found[1].detail == "its process died"


def test_command() -> None:
    result = CliRunner().invoke(app, ["check", "-t", "cpu", "--count", "3", "-j", "1", "--seed", "1", "--json"])
    facts = json.loads(result.stdout)
    assert result.exit_code == 0
    assert facts["checked"] == 3 and facts["wrong"] == [] and facts["kernels"] == {"cpu": {"right": 3}}
    assert facts["minimal"] is None and 0 < facts["worst_error_of_allowed"] <= 1


def test_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that can't run are not wrong."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(app, ["check", "-t", "sm_90a", "--count", "1"])
    assert result.exit_code == 1 and "emulator:sm_90a" in result.stderr and not result.stdout


def test_report_of_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def three(case: Case, jobs: int) -> list[Outcome]:
        first, second, third = case
        return [
            Outcome(first, "right", "decode", worst=0.5),
            Outcome(second, "refused", detail="compute"),
            Outcome(third, "wrong", "prefill", "error 3", 9.0),
        ]

    monkeypatch.setattr("lowbit.pylib.check.session.outcomes", three)
    monkeypatch.setattr("lowbit.pylib.check.trial.minimal", lambda outcome: outcome)
    result = CliRunner().invoke(app, ["check", "-t", "cpu", "--count", "3"])
    assert result.exit_code == 1
    for text in ("decode", "prefill", "50% of what rounding explains", "refused 1 times: compute", "wrong", "minimal"):
        assert text in result.stdout, text


def test_an_interrupted_check_reports_what_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(cases: Iterator[Case], jobs: int) -> Iterator[Outcome]:
        yield from (Outcome(case, "right", "decode", worst=0.5) for case in list(cases)[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr("lowbit.pylib.check.session.outcomes", two)
    result = CliRunner().invoke(app, ["check", "-t", "cpu", "--count", "9", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["checked"] == 2


def test_no_case_begins_when_time_is_up() -> None:
    result = CliRunner().invoke(app, ["check", "-t", "cpu", "--count", "3", "-j", "1", "--seconds", "0", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["checked"] == 0
