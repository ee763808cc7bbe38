"""What the free choices of the kernel by ids of experts are: `TopKSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.decode.schedule import Schedule

_FIXED: Mapping[str, Any] = {"wgmma": False, "min_blocks": 0, "outliers_by_step": False, "refill": "before_mma"}


@dataclass(frozen=True)
class TopKSchedule(Schedule):
    """The free choices of the kernel by ids of experts (`TopK`): those of `Schedule` for one token, of which every
    block has one.

    tokens            1 or 8, the columns that sums have room for
    split_k, cluster  the same: blocks add up through distributed shared memory. 1 where y adds up experts, whose
                      blocks are a cluster
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in _FIXED.items():
            if getattr(self, name) != value:
                raise SpecError(f"schedule: top_k_experts needs {name}={value!r}; got {name}={getattr(self, name)!r}")
        if self.tokens not in (1, 8):
            raise SpecError(f"schedule: tokens={self.tokens} must be 1 or 8 for top_k_experts, whose blocks have one")
        if self.split_k != self.cluster:
            given = f"split_k={self.split_k} and cluster={self.cluster}"
            raise SpecError(f"schedule: top_k_experts adds up in clusters, so {given} must be equal")
