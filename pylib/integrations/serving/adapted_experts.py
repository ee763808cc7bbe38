"""Experts with adapters: low-rank matrices that a server adds to the results of gate_up and of down.

    h[t, j] = W13[ids[t, j]] x[t] + what adapters add           a[t, j] = gate(h[t, j])
    y[t] = sum over j of weights[t, j] * (W2[ids[t, j]] a[t, j] + what adapters add)

The kernel of gate_up returns its sums, without the gate, from the same weights. Adapters take rows in the order of
tokens and their places, so the sums are put in that order, and `a` back into that of slots. On a GPU these are a dozen
launches more than `Experts` has; none waits for the device.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.passes.scheduling.expert_rule import tile_for
from lowbit.pylib.integrations.serving.experts import Experts
from lowbit.pylib.nn.gated_linear import Gate
from lowbit.pylib.runtime.batch_invariant import called
from lowbit.pylib.runtime.interface import gated
from lowbit.pylib.weights import gated_rows
from lowbit.pylib.weights.packed import PackedWeight


class Adapters(Protocol):
    """What a server adds to the results of the experts of a call."""

    def add_to_gate_up(self, h: Tensor) -> None:
        """Adds to h [tokens, k, 2 inner] in place, whose columns are in the order of the dense weight's rows."""
        ...

    def add_to_down(self, a: Tensor, y: Tensor) -> None:
        """Adds to y [tokens, k, hidden] in place, by the weight of each place.

        a   [tokens k, inner]: what down multiplies
        """
        ...


class AdaptedExperts(Experts):
    """Low-bit experts that adapters may add to.

    gate  what is applied to the results of gate_up
    """

    def __init__(
        self, gate_up: PackedWeight, down: PackedWeight, gate: Gate, top_k: int = 1, among: int = 0, sources: int = 1
    ) -> None:
        super().__init__(gate_up, down, top_k, among, sources=sources)
        self.gate = gate

    def _specs(self) -> tuple[MatmulSpec, MatmulSpec]:
        return called(interned(self.gate_up.spec.without_epilogue)), called(self.down.spec)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, adapters: Adapters | None = None) -> Tensor:
        """Returns the sum of each token's experts and of their adapters, by their weights: [tokens, hidden].

        x         [tokens, hidden]
        ids       int32 or int64 [tokens, k]; those that are no expert's add nothing
        weights   [tokens, k]
        adapters  None: there are none in this call
        """
        run, gate_up, down = self._operands(x)
        (of_gate_up, of_down), (tokens, k) = self._kernels, ids.shape
        tile = tile_for(self._tiles, ids.numel(), self._among or self.gate_up.spec.experts)
        rows, numbers, tiles, slots = run.route(ids, of_gate_up, tile)
        sums = run.expert_matmul(x, rows, tiles, gate_up, of_gate_up, tile)
        elsewhere = (slots >= tiles[0, 1]).view(-1, 1)
        h = self._joined(*gated_rows.halves(sums.index_select(0, slots.view(-1)).masked_fill(elsewhere, 0)))
        if adapters is not None:
            adapters.add_to_gate_up(h.view(tokens, k, -1))
        gate, up = (half.float() for half in self._apart(h))
        a = gated(str(self.gate_up.spec.epilogue), gate, up).to(h.dtype)
        places = torch.empty_like(slots.view(-1))
        places.scatter_(0, slots.view(-1).long(), torch.arange(len(a), dtype=places.dtype, device=x.device))
        o = run.expert_matmul(a.index_select(0, places), numbers, tiles, down, of_down, tile, in_order=True)
        y = run.combine(o, slots, tiles, weights, of_down)
        if adapters is None:
            return y
        added = y.new_zeros(tokens, k, y.shape[1])
        adapters.add_to_down(a, added)
        return y + added.sum(1)

    def _joined(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns columns of the gate and those that it multiplies in the order of the dense weight's rows."""
        halves = gate.flatten(1), up.flatten(1)
        return torch.stack(halves, -1).flatten(1) if self.gate.pairs else torch.cat(halves, 1)

    def _apart(self, h: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = h.unflatten(1, (-1, 2)).unbind(-1) if self.gate.pairs else h.chunk(2, 1)
        return gate, up
