"""The sum of a token's experts by the operators of `expert_schema`: one that is all of it, unless torch applies the
gate between the two matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.scheduling.expert_rule import tile_for
from lowbit.pylib.operator import expert_schema
from lowbit.pylib.operator.tracing import is_observed


class Weight(Protocol):
    """A matrix of all experts.

    tensors  those of the spec of all experts, in its order
    kernel   the matmul as text, as operators take it
    """

    @property
    def spec(self) -> MatmulSpec: ...
    @property
    def tensors(self) -> Sequence[Tensor]: ...
    @property
    def kernel(self) -> str: ...


def sum_of_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weight,
    down: Weight,
    tiles: Sequence[int],
    gate: Callable[[Tensor], Tensor],
    among: int = 0,
) -> Tensor:
    """Returns the sum of each token's experts, by their weights: [tokens, hidden] in the type of down's y.

    x        [tokens, k] in the act type
    ids      int32 or int64 [tokens, experts of a token]; those that are no expert's add exactly 0
    weights  likewise, of any float type
    tiles    sizes of token tiles that both matrices have kernels for, the least first
    gate     is applied to the sums of gate_up, unless their kernel does that
    among    how many experts ids are spread over, those elsewhere among them; 0: those of the weights
    """
    run: Any = torch.ops.lowbit if is_compiling() or is_observed() else expert_schema
    if gate_up.spec.is_gated:
        kernels = gate_up.kernel, down.kernel
        return run.sum_of_experts(x, ids, weights, gate_up.tensors, down.tensors, *kernels, tiles, among)
    tile = tile_for(tiles, ids.shape[0] * ids.shape[1], among or gate_up.spec.experts)
    rows, numbers, table, slots = run.route(ids, gate_up.kernel, tile)
    a = gate(run.expert_matmul(x, rows, table, gate_up.tensors, gate_up.kernel, tile))
    o = run.expert_matmul(a, numbers, table, down.tensors, down.kernel, tile, in_order=True)
    return run.combine(o, slots, table, weights, down.kernel)
