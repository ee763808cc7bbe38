"""Random experts of tokens, for tests and for times: as many routings as read weights that no cache holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.pylib.experts.routing import Routing, route
from lowbit.pylib.tune import timing
from lowbit.pylib.weights.packed import PackedWeight

_MOST_CALLS = 64


def random_ids(m: int, top_k: int, experts: int, seed: int = 0) -> Tensor:
    """Returns different experts of each token, all as likely: i64 [m, top_k], the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(m, experts, generator=generator).topk(top_k).indices


@dataclass(frozen=True)
class Routed:
    """Experts of tokens, ids i64 [m, top_k], and the routing that follows."""

    ids: Tensor
    routing: Routing

    @property
    def experts(self) -> Tensor:
        """The expert of each slot."""
        return self.ids.flatten().sort().values


def cold_routings(weight: PackedWeight, m: int, top_k: int, tile: int) -> list[Routed]:
    """Returns as many routings of m tokens as hit so many experts of one weight and its copies that no cache holds
    them, on the weight's device."""
    experts, found, read = weight.spec.experts, list[Routed](), 0
    while len(found) < 2 or (read < timing.DEFEAT_L2_BYTES and len(found) < _MOST_CALLS):
        ids = random_ids(m, top_k, experts, len(found))
        found.append(Routed(ids, route(ids.to(weight.device), experts, tile)))
        read += weight.nbytes * len(ids.unique()) // experts
    return found
