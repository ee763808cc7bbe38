"""What a choice of schedules costs: candidates that can't win are not made, and what is chosen is the best of all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelFamily
from lowbit.passes.kernels.registry import FAMILIES
from lowbit.passes.scheduling.choice import Choice, Chooser
from lowbit.passes.scheduling.tables import shipped_tables
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target

HOPPER = parse_target("sm_90a")
TARGETS = [parse_target(name) for name in ("sm_80", "sm_86", "sm_89", "sm_120")]
TARGETS += [HOPPER, replace(HOPPER, has_wgmma=False)]
SPECS = [
    MatmulSpec(256, 512, "u4", 128),
    MatmulSpec(5120, 17408, "u4", 128, zeros="float", act="bf16", scale="bf16"),
    MatmulSpec(1000, 4160, "nf4", 32),
    MatmulSpec(4096, 4096, "u2", 128),
    MatmulSpec(34816, 5120, "f6e3m2"),
    MatmulSpec(100, 16, "u8"),
    MatmulSpec(7168, 2048, "u4", 128, compute="i8"),
    MatmulSpec(6144, 4096, "u4", 32, compute="f8e4m3", fold_scales=True),
    MatmulSpec(4096, 4096, "i8", compute="i8"),
    MatmulSpec.preset("spqr", 6144, 4096),
    MatmulSpec.preset("q4_k", 6144, 4096),
    MatmulSpec.preset("nvfp4", 14336, 4096),
    MatmulSpec.preset("nvfp4", 2048, 4096, compute="f8e4m3", fold_scales=True),
]
PAIRS = [(s, t) for s in SPECS for t in TARGETS if s.compute != "f8e4m3" or t.has_fp8]
MOST = 150
"""Schedules that are predicted to choose one: all candidates of all token tiles are some thousands."""


class Exhaustive(Chooser):
    """Predicts every candidate, once."""

    def __init__(self, spec: MatmulSpec, target: Target) -> None:
        super().__init__(spec, target)
        self._best: dict[int, Choice] = {}

    def _find(self, token_tile: int, below: float, settled: Collection[KernelFamily[Any]]) -> Choice | None:
        if token_tile not in self._best:
            self._best[token_tile] = self._of_all(token_tile)
        found = self._best[token_tile]
        return found if found.microseconds < below else None

    def _of_all(self, token_tile: int) -> Choice:
        spec, target = self._spec, self._target
        every = (
            Choice(s, family.predict(spec, token_tile, s, target))
            for family in self.families(token_tile)
            for s in family.candidates(spec, token_tile, target)
        )
        return min(every, key=lambda choice: choice.microseconds)


@pytest.mark.parametrize(("spec", "target"), PAIRS, ids=str)
def test_the_choice_is_that_of_all_candidates(spec: MatmulSpec, target: Target) -> None:
    """By the rule, from tables, and of several token tiles by one chooser and by one each."""
    tables = [table for table in shipped_tables() if table.capability == target.capability]
    exhaustive, chooser = Exhaustive(spec, target), Chooser(spec, target)
    for tile in exhaustive.token_tiles:
        wanted = exhaustive.expected(tile, tables)
        assert chooser.expected(tile, tables) == wanted == Chooser(spec, target).expected(tile, tables), tile
        assert chooser.predicted(tile) == exhaustive.predicted(tile)


@pytest.mark.parametrize(("spec", "target"), PAIRS, ids=str)
def test_no_candidate_is_predicted_below_a_bound(spec: MatmulSpec, target: Target) -> None:
    chooser = Chooser(spec, target)
    for tile in {1, 8, 64, 128, 192, 512, 2048}.intersection(chooser.token_tiles):
        kind = spec.for_tokens(tile)
        for family in chooser.families(tile):
            of_all = family.least_time(kind, tile, target)
            for group in family.groups(kind, tile, target):
                times = [family.predict(kind, tile, s, target) for s in group.schedules]
                assert all(time >= max(of_all, group.least) for time in times), (family.name, tile)


@pytest.mark.parametrize(("spec", "target"), PAIRS, ids=str)
def test_few_schedules_are_predicted(spec: MatmulSpec, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted: list[Any] = []

    def counted(family: KernelFamily[Any]) -> Any:
        original = family.predict
        return lambda *arguments: predicted.append(arguments) or original(*arguments)

    for family in FAMILIES.values():
        monkeypatch.setattr(family, "predict", counted(family))
    for tile in Chooser(spec, target).token_tiles:
        predicted.clear()
        Chooser(spec, target).schedule(tile)
        assert len(predicted) <= MOST, (tile, len(predicted))
