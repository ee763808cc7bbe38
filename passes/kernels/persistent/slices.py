"""Schedules that cut the tiles of an incomplete last wave (`PrefillSchedule.last_tokens`, `last_split_k`), for families
of persistent blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.cost_model import waves_of
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.target import Target

S = TypeVar("S", bound=PrefillSchedule)


def with_slices(spec: MatmulSpec, tokens: int, schedules: Iterable[S], target: Target) -> Iterator[S]:
    """Yields every schedule and, where an incomplete wave of its tiles follows others, those that cut these into the
    smallest slices that fit one wave: for one block each, and for blocks of a cluster that split their k. Where it is
    the only wave, smaller tiles do the same."""
    for s in schedules:
        yield s
        waves = waves_of(PersistentPlan(spec, s, WGMMA), tokens, target)
        if waves.full and waves.busy:
            for split in sorted({1, s.cluster} & {*s.allowed["last_split_k"]}):
                cuts = (replace(s, last_tokens=last, last_split_k=split) for last in s.slice_sizes(split))
                yield from islice((c for c in cuts if waves.busy * PersistentPlan(spec, c, WGMMA).tiles.slices <= 1), 1)
