"""Plans: a configuration for each layer, by what the layers were measured to lose."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowbit
from lowbit.dialect.errors import QuantizeError, SpecError
from lowbit.pylib.nn.bit_allocation import Choice, Sensitivity, drawn_together, hull
from lowbit.pylib.nn.sensitivity import kl_divergence

CONFIG = lowbit.QuantConfig()
CANDIDATES = [lowbit.QuantConfig(weight, 64, method="gptq") for weight in ("u2", "u4", "u8")]


class Model(nn.Module):
    """Three layers, of which the second hardly matters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.idle, self.last = nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last(x + 0.01 * self.idle(x)) * 4


def inputs() -> list[Tensor]:
    return list(torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(1)))


def test_layers_that_matter_get_more_bits() -> None:
    model, data = Model(), inputs()
    before = {name: p.clone() for name, p in model.named_parameters()}
    measured = lowbit.sensitivity(model, CANDIDATES, calibration=data, act="f16")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()) and model.training
    plan = measured.plan(bits=4.5, trust=1.0)
    width = {name: config.dtype.bits for name, config in plan.items()}
    assert width["idle"] < min(width["first"], width["last"]) and plan.bits <= 4.5
    assert plan.bytes == sum(_bytes(measured, name, config) for name, config in plan.items())
    assert measured.plan(bytes=plan.bytes, trust=1.0).to_dict() == plan.to_dict()
    again = lowbit.plan(model, bits=4.5, calibration=data, candidates=CANDIDATES, act="f16", trust=1.0)
    assert again.to_dict() == plan.to_dict()


def _bytes(measured: Sensitivity, name: str, config: lowbit.QuantConfig) -> int:
    return next(choice.bytes for choice in measured.choices[name] if choice.config == config)


def test_a_plan_is_better_than_uniform_choices_of_its_size() -> None:
    """On the text by which it was made."""
    data = inputs()
    measured = lowbit.sensitivity(Model(), CANDIDATES, calibration=data, act="f16")

    @torch.no_grad()
    def found(config: Any) -> float:
        model = Model()
        lowbit.quantize_(model, config, calibration=data, act="f16", progress=False)
        return sum(kl_divergence(Model()(x), model(x.half()).float()) for x in data)

    size = sum(_bytes(measured, name, CANDIDATES[1]) for name in measured.choices)
    plan = measured.plan(bytes=size, trust=1.0)
    assert plan.bytes <= size and found(plan) < 0.8 * found(CANDIDATES[1])


def test_the_prediction_is_near_what_happens() -> None:
    """Of one layer, the divergence scales as its squared output error."""
    data = inputs()
    measured = lowbit.sensitivity(Model(), CANDIDATES, calibration=data, act="f16")
    for name in ("first", "last"):
        model = Model()
        lowbit.quantize_(model, {name: CANDIDATES[1]}, calibration=data, act="f16", progress=False)

        def run(x: Tensor, model: nn.Module = model) -> Tensor:
            layers = dict(model.named_children())
            for layer in layers.values():
                if isinstance(layer, lowbit.LowbitLinear):
                    layer.register_forward_pre_hook(lambda _, args: (args[0].half(),))
                    layer.register_forward_hook(lambda _, args, y: y.float())
            return model(x)

        actual = sum(kl_divergence(Model()(x), run(x)) for x in data) / len(data)
        expected = next(c.divergence for c in measured.choices[name] if c.config == CANDIDATES[1])
        assert 0.5 * actual < expected < 2 * actual


def test_plans_are_files(tmp_path: Path) -> None:
    model, data = Model(), inputs()
    plan = lowbit.plan(model, bits=3.5, calibration=data, candidates=CANDIDATES, act="f16")
    plan.save(tmp_path / "plan.json")
    loaded = lowbit.QuantPlan.load(tmp_path / "plan.json")
    assert dict(loaded) == dict(plan) and loaded.to_dict() == plan.to_dict()
    assert "bits per weight" in str(plan) and "last " in str(plan)
    report = lowbit.quantize_(model, tmp_path / "plan.json", calibration=data, act="f16", progress=False)
    assert {row.name: row.format.split()[0] for row in report} == {n: c.weight for n, c in plan.items()}
    assert sum(row.bytes_after for row in report) == plan.bytes


def choices(points: Sequence[tuple[int, float]]) -> list[Choice]:
    return [Choice(CONFIG, size, 0.0, loss) for size, loss in points]


@st.composite
def layers(draw: st.DrawFn) -> dict[str, list[Choice]]:
    point = st.tuples(st.integers(1, 40), st.floats(0, 10))
    lists = draw(st.lists(st.lists(point, min_size=1, max_size=5), min_size=1, max_size=4))
    return {str(i): choices(points) for i, points in enumerate(lists)}


@given(layers(), st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_plans_fit_and_are_near_the_best(of_layers: Mapping[str, Sequence[Choice]], share: float) -> None:
    """At a vertex of the front a plan is the best; anywhere it is at most one step of one layer behind the bound."""
    least = sum(min(c.bytes for c in each) for each in of_layers.values())
    most = sum(max(c.bytes for c in each) for each in of_layers.values())
    budget = least + round(share * (most - least))
    plan = Sensitivity(of_layers, 100).plan(bytes=budget, trust=1.0)
    assert plan.bytes <= budget
    best = min(
        sum(c.divergence for c in each)
        for each in itertools.product(*of_layers.values())
        if sum(c.bytes for c in each) <= budget
    )
    steps = [a.divergence - b.divergence for each in of_layers.values() for a, b in itertools.pairwise(hull(each))]
    assert best - 1e-9 <= plan.divergence <= best + max(steps, default=0) + 1e-9


def test_layers_that_hardly_counted_get_more_bits_with_less_trust() -> None:
    """By hand: the smallest choices add 6 in 4 bytes, so an average layer of their size adds 3, and half of it counts.
    What was measured is what the plan says it adds."""
    config = {bits: lowbit.QuantConfig(f"u{bits}", 64) for bits in (2, 4)}
    sizes = ((2, 2, 8.0), (4, 4, 2.0))  # bits, bytes and error
    found = {
        name: [Choice(config[bits], size, error, added * error / 8) for bits, size, error in sizes]
        for name, added in (("idle", 0.0), ("busy", 6.0))
    }
    drawn = drawn_together(found, 0.5)
    assert {name: [each.divergence for each in of_layer] for name, of_layer in drawn.items()} == {
        "idle": [1.5, 0.375], "busy": [4.5, 1.125],
    }  # fmt: skip
    assert drawn_together(found, 1.0) == found
    measured = Sensitivity(found, 100)
    widths = [[config.dtype.bits for config in measured.plan(bytes=8, trust=trust).values()] for trust in (1.0, 0.5)]
    assert widths == [[2, 4], [4, 4]]
    assert measured.plan(bytes=6).divergence == 1.5 and measured.plan(bytes=6)["busy"] == config[4]


def test_hull_by_hand() -> None:
    found = hull(choices([(1, 10), (2, 9), (3, 4), (3, 5), (4, 4.5), (5, 3)]))
    assert [(c.bytes, c.divergence) for c in found] == [(1, 10), (3, 4), (5, 3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "plan takes one of bits=, per weight, and bytes="),
        ({"bits": 3, "bytes": 10}, "plan takes one of bits=, per weight, and bytes="),
        ({"bits": -1}, "bits=-1 must be a number above 0"),
        ({"bytes": True}, "bytes=True must be a number above 0"),
        ({"bits": 9, "trust": 0}, "trust=0 must be a number above 0 and at most 1; 1 takes divergences as measured"),
        ({"bits": 1}, r"the smallest candidates take 3\.\d+ bits per weight, \d+ bytes; ask for more"),
    ],
)
def test_errors_of_sizes(arguments: dict[str, Any], message: str) -> None:
    measured = Sensitivity({"a": choices([(40, 1.0), (50, 0.5)])}, 100)
    with pytest.raises((SpecError, QuantizeError), match=message):
        measured.plan(**arguments)


def test_errors_of_models(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="plan needs calibration="):
        lowbit.plan(Model(), bits=3)
    with pytest.raises(SpecError, match="candidates must be QuantConfigs"):
        lowbit.plan(Model(), bits=3, calibration=inputs(), candidates=[])
    with pytest.raises(SpecError, match="candidates: AWQ's column scales"):
        lowbit.plan(Model(), bits=3, calibration=inputs(), candidates=[lowbit.QuantConfig.preset("awq4")])
    with pytest.raises(SpecError, match="first: no candidate fits a weight"):
        lowbit.plan(Model(), bits=3, calibration=inputs(), candidates=[lowbit.QuantConfig("u4", 48)], act="f16")
    with pytest.raises(QuantizeError, match="no linear layer"):
        lowbit.plan(nn.Sequential(nn.ReLU()), bits=3, calibration=inputs())
    with pytest.raises(QuantizeError, match=r"output must be logits .*, not tuple; pass divergence="):
        kl_divergence((1, 2), (1, 2))
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 100000)
    for number in ("1" + "0" * 400, "NaN", "true"):
        plan = f'{{"version": 1, "bits": {number}, "layers": {{}}}}'
        (tmp_path / f"{number[:4]}.json").write_text(plan)
        with pytest.raises(SpecError, match=r"bits, bytes and divergence of a plan must be numbers below 2\^63"):
            lowbit.QuantPlan.load(tmp_path / f"{number[:4]}.json")
    for file in ("other.json", "missing.json", "deep.json"):
        with pytest.raises(SpecError):
            lowbit.QuantPlan.load(tmp_path / file)
