"""A schedule that a user gives: the kernels that it is for get it, and one that would serve no rows is refused."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

import lowbit
from lowbit.dialect.errors import SpecError
from lowbit.dialect.presets import PRESETS
from lowbit.passes.kernels.eight_bit_experts_mma.schedule import EightBitExpertsMmaSchedule
from lowbit.passes.kernels.experts_mma.schedule import ExpertsMmaSchedule
from lowbit.passes.kernels.permute.schedule import PermuteSchedule
from lowbit.passes.kernels.registry import FAMILIES, schedule_from_dict
from lowbit.passes.scheduling.tables import spelled_out
from lowbit.passes.targets import parse_target
from lowbit.pylib.build.kernels import kernel_choices

SPEC = lowbit.MatmulSpec(4096, 4096, "u4", 128)
FOLDED = replace(SPEC, compute="f8e4m3", fold_scales=True)
MIXED = replace(SPEC, compute="f8e4m3", compute_from=65)
EXPERTS = replace(SPEC, experts=8)
HOPPER, AMPERE = parse_target("sm_90a"), parse_target("sm_80")


@pytest.mark.parametrize(
    ("spec", "schedule", "message"),
    [
        (SPEC, lowbit.EightBitSchedule(8), r"8 bits, which \(u4.*\) does not; take one of Schedule, Integ"),
        (replace(SPEC, compute="i8"), lowbit.Schedule(8), r"in f16, and \(u4.* in i8.*take one of EightBitSchedule, "),
        (FOLDED, lowbit.Schedule(8), r"in f16, and \(.* in f8e4m3, folded .*take one of EightBitSchedule, "),
        (FOLDED, lowbit.EightBitSchedule(1), "serves no rows of .* take EightBitSchedule with tokens=8, 16, 32, 64"),
        (MIXED, lowbit.EightBitSchedule(8), r"serves no 65 to any number of rows of \(.*from 65 rows on .*tokens=128"),
        (MIXED, lowbit.Schedule(128, 1, 4, 1, wgmma=True), r"serves no 1 to 64 rows of \(.*, from 65 rows on"),
        (SPEC, lowbit.PrefillMmaSchedule(), "prefill_mma is for targets without wgmma, sm_90a has it"),
        (EXPERTS, EightBitExpertsMmaSchedule(), r"which \(u4.* does not; take one of ExpertsSchedule, Exp"),
        (replace(EXPERTS, compute="i8"), ExpertsMmaSchedule(), "in i8; take one of EightBitExpertsSchedule, "),
        (SPEC, PermuteSchedule(), r"serves no rows of .* on sm_90a; take Schedule with tokens=1, 8.* or PrefillSched"),
    ],
    ids=str,
)
def test_a_schedule_that_serves_no_rows_is_refused(spec: lowbit.MatmulSpec, schedule: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        kernel_choices(spec, HOPPER, schedule)
    with pytest.raises(SpecError, match=message):
        lowbit.compile(spec, "sm_90a", schedule)


def test_a_misfit_does_not_show_a_spec_of_our_own() -> None:
    """Calls of few rows have a spec without `compute`, which the user never wrote."""
    with pytest.raises(SpecError) as raised:
        kernel_choices(MIXED, HOPPER, lowbit.Schedule(16, 1, 4, outliers_by_step=True, wgmma=True))
    assert str(MIXED.in_act) not in str(raised.value) and "u4 with groups of 128" in str(raised.value)


def _chosen(choices: Any) -> dict[int, Any]:
    return {tile: kernel.schedule for tile, kernel in choices.kernels.items() if tile is not None}


@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=str)
@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, compute="i8"), replace(SPEC, weight="u2"), MIXED], ids=str)
def test_whatever_was_chosen_can_be_given(spec: lowbit.MatmulSpec, target: Any) -> None:
    if spec is MIXED and not target.has_fp8:
        spec = replace(spec, compute="i8")
    chosen = kernel_choices(spec, target)
    for choices in filter(None, (chosen, chosen.few)):
        for tile, schedule in _chosen(choices).items():
            pinned = kernel_choices(spec, target, schedule)
            assert _chosen(pinned if choices is chosen else pinned.few)[tile] == schedule


@pytest.mark.parametrize(("target", "family"), [("emulator:sm_90a", "prefill"), ("emulator:sm_80", "prefill_mma")])
def test_a_prefill_schedule_as_it_is_printed(target: str, family: str) -> None:
    """`choices.to_dict()` has it as a dictionary, which `compile` takes."""
    spec = replace(SPEC, n=256, k=512)
    written = json.loads(json.dumps(lowbit.compile(spec, target).choices.to_dict()))["kernels"]["m320"]["schedule"]
    given = written | {"tokens": 64}
    mm = lowbit.compile(spec, target, given)
    assert mm.kernel(300).schedule == schedule_from_dict(given) and given["family"] == family
    assert lowbit.compile(spec, target, mm.kernel(300).schedule) is mm
    assert mm.schedule == lowbit.compile(spec, target).schedule  # the kernel for one token is of another family


def test_every_schedule_of_a_matmul_is_exported() -> None:
    for family in FAMILIES.values():
        if family.operation in ("matmul", "quantized_matmul"):
            assert getattr(lowbit, family.schedule_type.__name__) is family.schedule_type


def test_what_a_table_has_can_be_given() -> None:
    schedule = kernel_choices(SPEC, HOPPER).launches(300)[0].schedule
    mm = lowbit.compile(SPEC, "sm_90a", spelled_out(schedule))
    assert mm.choices.launches(300)[0].schedule == schedule


@pytest.mark.parametrize("name", PRESETS)
def test_the_spec_of_choices_can_be_read_back(name: str) -> None:
    spec = lowbit.MatmulSpec.preset(name, 512, 4096)
    for each in (spec, replace(spec, bias=True, out="f32")):
        written = json.loads(json.dumps(kernel_choices(each, HOPPER).to_dict()))
        assert lowbit.MatmulSpec.from_dict(written["spec"]) == each


def test_the_specs_of_both_choices_can_be_read_back() -> None:
    written = json.loads(json.dumps(kernel_choices(MIXED, HOPPER).to_dict()))
    read = [lowbit.MatmulSpec.from_dict(part["spec"]) for part in (written, written["few"])]
    assert read == [MIXED, MIXED.in_act] and asdict(read[0]) == asdict(MIXED)
