"""Matmuls and tables of schedules that tests of the choice share."""

from __future__ import annotations

from dataclasses import replace

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.scheduling.choice import schedule_for
from lowbit.passes.scheduling.tables import Entry, Key, Table
from lowbit.passes.targets import parse_target

HOPPER = parse_target("sm_90a")
SPEC = MatmulSpec(n=6144, k=1536, weight="u4", group_size=128)
ODD = Schedule(tokens=16, row_blocks=2, warps_n=2, warps_k=4, step_k=64, num_stages=5)  # as no rule would have it


def entry(spec: MatmulSpec, schedule: Schedule, microseconds: float = 0.5) -> Entry:
    """As fast as no prediction is, so that it is taken."""
    return Entry(Key.of(spec, schedule.tokens), schedule, microseconds, "2026-11-21", "0.1.0")


def table(*entries: Entry, gpu: str = "NVIDIA H200") -> Table:
    return Table(gpu, 90, "by hand", {}).with_entries(entries)


def chosen(spec: MatmulSpec, *tables: Table, token_tile: int = 16, gpu: str | None = None) -> Schedule:
    return schedule_for(spec, token_tile, HOPPER, gpu, tables)


NEAR = {
    "act": replace(SPEC, act="bf16"),
    "group": replace(SPEC, group_size=64),
    "rows": replace(SPEC, group_size=None),
    "format": replace(SPEC, weight="i4"),
    "n": replace(SPEC, n=5888),
    "k": replace(SPEC, k=1792),
}
