"""Kernels of which every two choices meet in some case, few in number, since the emulator takes time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from sweeps import telling
from tables import table

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.streaming.arithmetic import always_uses_raw_codes
from lowbit.passes.kernels.streaming.legality import check_schedule
from lowbit.passes.targets import parse_target

TOKENS = (8, 16, 32, 64, 128, 256)  # that a schedule can be for
MOST_WORK = 64  # mma instructions per warp and step, if there is a choice: LLVM and the emulator take time


def spec_of(weight: str, n: int, k: int, **choices: Any) -> MatmulSpec:
    """A spec; lut<b> gets a table."""
    return MatmulSpec(n, k, weight, table=table(int(weight[3:])) if weight.startswith("lut") else None, **choices)


@dataclass(frozen=True)
class Case:
    """A kernel and the number of tokens it gets."""

    spec: MatmulSpec
    schedule: Schedule
    target: str
    m: int

    def __str__(self) -> str:
        s, p = self.spec, self.schedule
        parts = [s.weight, f"{s.n}x{s.k}", f"g{s.group_size}", f"z{s.zeros}", s.scale, s.act, s.out_dtype]
        parts += [f"m{self.m}", f"r{p.row_blocks}n{p.warps_n}k{p.warps_k}", f"step{p.step_k}"]
        parts += [f"stages{p.num_stages}", f"splits{p.split_k}", *["cluster"] * (p.cluster > 1), *["wgmma"] * p.wgmma]
        parts += ["preload"] * p.preload_weights + ["overlap"] * p.overlap_groups + ["raw"] * p.raw_codes
        parts += [p.refill] * (p.refill != "before_mma") + [f"grid{p.min_blocks}"] * (p.min_blocks > 0)
        parts += [f"prefetch{p.prefetch_limit}"] * (p.prefetch_limit > 0)
        return "-".join([*parts, self.target, *["rows"] * s.row_scales, *["bias"] * s.bias])


def for_integers(choice: dict[str, Any]) -> dict[str, Any]:
    """Only they have integer zeros, and can be multiplied raw, in f16; where they have no offset they are anyway."""
    integer = choice["weight"][0] in "ui"
    zeros = "float" if choice["zeros"] == "int" and not integer else choice["zeros"]
    optional = integer and choice.get("act") == "f16" and (choice["weight"][0] == "i" or zeros != "none")
    return choice | {"zeros": zeros, "raw_codes": optional and choice.get("raw_codes", False)}


def as_asked(spec: MatmulSpec, schedule: Schedule) -> Schedule:
    """Returns the schedule without `raw_codes` where codes are raw in any case."""
    anyway = schedule.raw_codes and always_uses_raw_codes(spec, schedule)
    return replace(schedule, raw_codes=False) if anyway else schedule


def work_of(schedule: Schedule) -> int:
    """mma instructions per warp and step."""
    return schedule.row_blocks * schedule.step_k // 16 * schedule.columns // 8


def tokens_of(m: int) -> int:
    return next(tokens for tokens in TOKENS if m <= tokens)


def is_allowed(spec: MatmulSpec, schedule: Schedule, target: str) -> bool:
    try:
        check_schedule(spec, schedule, parse_target(target))
    except SpecError:
        return False
    return True


def pairs(choice: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    return itertools.combinations(choice.items(), 2)


def in_ci(cases: Sequence[Case], most: int) -> list[Any]:
    """Returns cases that `covering` has made as parameters of a test: CI runs the first, in which the most pairs meet,
    and those are all but a few."""
    marks = (*[()] * most, *[pytest.mark.slow] * (len(cases) - most))
    return [pytest.param(case, id=str(case), marks=mark) for case, mark in zip(cases, marks)]


def share_of_pairs(choices: Sequence[dict[str, Any]], most: int) -> float:
    """Returns the share of all pairs in some choices that meet in the first of them."""
    every, found = (set(itertools.chain(*map(pairs, some))) for some in (choices, choices[:most]))
    return len(found) / len(every)


def covering(
    factors: dict[str, Sequence[Any]], fit: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns choices in which every two values of every two factors meet, if `fit` lets them: first those in which the
    most meet."""
    return telling(_covering(factors, fit), pairs)


def _covering(
    factors: dict[str, Sequence[Any]],
    fit: Callable[[dict[str, Any]], dict[str, Any]],
    tries: int = 20,
    patience: int = 60,
) -> Iterator[dict[str, Any]]:
    """Yields at each turn the best of some random choices that have a missing pair (Cohen et al., "The AETG System",
    1997). Some are not needed in the end: what `fit` changes has pairs that others were made for."""
    rng = random.Random(0)
    left = {
        ((a, x), (b, y)): None for a, b in itertools.combinations(factors, 2) for x in factors[a] for y in factors[b]
    }

    def gain(choice: dict[str, Any]) -> int:
        return sum(pair in left for pair in pairs(choice))

    def draw() -> dict[str, Any]:
        choice = {name: rng.choice(values) for name, values in factors.items()}
        return choice | dict(rng.choice(wanted))

    failures = 0
    while left and failures < patience:
        wanted = list(left)
        best = fit(max((draw() for _ in range(tries)), key=gain))
        failures = 0 if gain(best) else failures + 1
        if not failures:
            yield best
        for pair in pairs(best):
            left.pop(pair, None)
