"""The user's own tables of schedules, which `lowbit tune` writes: `schedules/*.json` in the cache directory.

They go before the tables that come with lowbit (`passes.scheduling.tables`) and outlive `LOWBIT_NO_CACHE` and an emptied
cache: they are measurements, not compiled code.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from lowbit.passes.scheduling.choice import trusted_tables
from lowbit.passes.scheduling.tables import Table, read_table, shipped_tables
from lowbit.passes.target import Target
from lowbit.pylib.build import knobs


def user_tables() -> tuple[Table, ...]:
    """Returns the user's tables in the order of their names. Raises SpecError where a file holds no table."""
    return tuple(map(read_table, sorted((knobs.cache_dir() / "schedules").glob("*.json"))))


def trusted(target: Target) -> list[Table]:
    """Returns the tables for a target and this machine's GPU, the most trusted first."""
    user = user_tables()
    return trusted_tables(target, gpu_name(target, user), user)


def user_file(gpu: str) -> Path:
    """Where the user's table for a GPU lies: "NVIDIA H200" has nvidia_h200.json."""
    name = "_".join("".join(c if c.isalnum() else " " for c in gpu.lower()).split())
    return knobs.cache_dir() / "schedules" / f"{name}.json"


def gpu_name(target: Target, user: tuple[Table, ...] = ()) -> str | None:
    """Returns the name of this machine's GPU if the target has tables for several GPUs, which the name tells apart."""
    names = {t.gpu for t in (*user, *shipped_tables()) if t.capability == target.capability}
    return _this_gpu() if target.kind == "cuda" and len(names) > 1 else None


@lru_cache(maxsize=1)
def _this_gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
