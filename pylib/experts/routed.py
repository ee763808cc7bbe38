"""Tokens through experts with a gate, in four launches: `RoutedExperts`.

    rows, numbers, tiles, slots = route(ids)
    a[s] = gate(W13[expert of s] x[rows[s]])                 for each slot s
    o[s] = W2[expert of s] a[s]
    y[t] = sum over j of weights[t, j] * o[slots[t, j]]

The host takes longer for few tokens than a GPU does. So all that is between two launches is one piece of memory, laid
out once for every number of tokens, and a call makes no other tensor than that and y.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.experts.schedule import short_slots
from lowbit.pylib.experts.by_kernel import combine_kernel, route_kernel
from lowbit.pylib.runtime.driver import allocate, current_stream, on_device
from lowbit.pylib.runtime.expert_matmul import ExpertMatmul
from lowbit.pylib.runtime.gpu import Launcher, is_settled
from lowbit.pylib.runtime.kernel import CudaKernel
from lowbit.pylib.runtime.own_kernels import aligned
from lowbit.pylib.torch_types import TORCH

_LINE = 128  # bytes


class RoutedCall(NamedTuple):
    """A number of tokens, of experts of each, and the types of ids and weights."""

    tokens: int
    count: int
    ids: torch.dtype
    weights: torch.dtype

    @property
    def places(self) -> int:
        return self.tokens * self.count


def routed_experts(gate_up: ExpertMatmul, down: ExpertMatmul, call: RoutedCall, tile: int) -> RoutedExperts | None:
    """Returns what runs such calls on GPUs, in tiles of up to so many slots; None where there are other launches than
    four, and in the emulator."""
    if gate_up.target.kind != "cuda" or not gate_up.spec.is_gated:
        return None
    if not (gate_up.is_one_launch(tile, call.places) and down.is_one_launch(tile, call.places, True)):
        return None
    route = route_kernel(call.places, call.count, gate_up.spec.experts, call.ids, gate_up.target.name)
    o = TORCH[down.spec.out_dtype]
    combine = combine_kernel(down.spec.outputs, call.count, o, call.weights, gate_up.target.name)
    if not (isinstance(route, CudaKernel) and isinstance(combine, CudaKernel)):
        return None
    return RoutedExperts(gate_up, down, call, tile, route, combine)


class RoutedExperts:
    """The launches of calls with one number of tokens. Any thread may call it."""

    def __init__(
        self,
        gate_up: ExpertMatmul,
        down: ExpertMatmul,
        call: RoutedCall,
        tile: int,
        route: CudaKernel,
        combine: CudaKernel,
    ) -> None:
        self._call, self._gate_up, self._down, self._route, self._combine = call, gate_up, down, route, combine
        self._x, self._act = (call.tokens, gate_up.spec.k), TORCH[gate_up.spec.act]
        self._y, self._out = (call.tokens, down.spec.outputs), TORCH[down.spec.out_dtype]
        *self._offsets, self._bytes = accumulate((-(-size // _LINE) * _LINE for size in self._sizes()), initial=0)
        self._tile, self._short = tile, short_slots(tile)
        self._functions: dict[int, tuple[Launcher, Launcher, Launcher, Launcher]] = {}

    def _sizes(self) -> Iterator[int]:
        """Yields the bytes of rows, numbers, tiles, slots, a and o."""
        places = self._call.places
        yield from (4 * prod(shape) for shape in ((places,), (places,), (places + 1, 3), (places,)))
        for spec in (self._gate_up.spec, self._down.spec):
            yield places * spec.outputs * TORCH[spec.out_dtype].itemsize

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor]
    ) -> Tensor:
        """Returns the sum of each token's experts [tokens, hidden].

        x              [tokens, k] in the act type
        ids, weights   [tokens, experts of a token]
        gate_up, down  the tensors of the specs, in their order

        Raises SpecError for an x or weights that do not fit, and for tensors on several devices.
        """
        device, call = x.get_device(), self._call
        self._check(x, ids, weights)
        x, ids, weights = aligned(x), aligned(ids), aligned(weights)
        route, first, second, combine = self._functions.get(device) or self._load(device)
        with on_device(device):
            y = allocate(self._y, (self._y[1], 1), self._out)
            between = allocate((self._bytes,), (1,), torch.uint8)
            begin, stream = between.data_ptr(), current_stream(device)
            rows, numbers, tiles, slots, a, o = [begin + offset for offset in self._offsets]
            route(stream, True, ids.data_ptr(), rows, numbers, slots, tiles, call.tokens, self._tile, self._short)
            addresses = [tensor.data_ptr() for tensor in gate_up]
            first(stream, is_settled(gate_up[0]), x.data_ptr(), a, call.places, *addresses, rows, tiles)
            addresses = [tensor.data_ptr() for tensor in down]
            second(stream, is_settled(down[0]), a, o, call.places, *addresses, numbers, tiles)
            combine(stream, True, o, slots, tiles, weights.data_ptr(), y.data_ptr(), call.tokens)
        return y

    def _check(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Raises SpecError for tensors that kernels would misread."""
        if x.dtype is not self._act or x.shape != self._x:
            raise SpecError(f"x must be {self._act} {list(self._x)}, not {x.dtype} {list(x.shape)}")
        if weights.shape != ids.shape:
            raise SpecError(f"top_k_weights must be {list(ids.shape)}, one for each id, not {list(weights.shape)}")
        if not x.get_device() == ids.get_device() == weights.get_device():
            raise SpecError(f"x is on {x.device}, ids on {ids.device}, weights on {weights.device}; put them on one")

    def _load(self, device: int) -> tuple[Launcher, Launcher, Launcher, Launcher]:
        call = self._call
        first, second = (each.launcher(device, self._tile, call.places) for each in (self._gate_up, self._down))
        found = self._route.function(device), first, second, self._combine.function(device)
        return self._functions.setdefault(device, found)
