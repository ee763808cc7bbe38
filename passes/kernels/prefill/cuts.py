"""Schedules that cut the tiles of an incomplete last wave (`PrefillSchedule.last_tokens`), for families of persistent
blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.prefill.cost_model import waves_of
from lowbit.passes.kernels.prefill.plan import PrefillPlan, Waves
from lowbit.passes.kernels.prefill.schedule import PrefillSchedule
from lowbit.passes.target import Target

S = TypeVar("S", bound=PrefillSchedule)


def with_cuts(spec: MatmulSpec, tokens: int, schedules: Iterable[S], target: Target) -> Iterator[S]:
    """Yields every schedule and, where an incomplete wave of its tiles follows others, the one that cuts these into the
    smallest slices that fit one wave. Where it is the only wave, smaller tiles do the same."""
    for s in schedules:
        yield s
        cuts = (replace(s, last_tokens=last) for last in s.slice_sizes)
        yield from islice((c for c in cuts if _is_cut(waves_of(PrefillPlan(spec, c), tokens, target), c)), 1)


def _is_cut(waves: Waves, s: PrefillSchedule) -> bool:
    """Whether the last of several waves has slices."""
    return waves.full > 0 and waves.busy > 0 and waves.last == s.last_tokens
