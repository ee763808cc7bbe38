"""Tokens through experts with a gate, in four launches, or a few more: `RoutedExperts`.

    rows, numbers, tiles, slots = route(ids)
    a[s] = gate(W13[expert of s] x[rows[s]])                 for each slot s
    o[s] = W2[expert of s] a[s]
    y[t] = sum over j of weights[t, j] * o[slots[t, j]]

A launch in front of a matmul in 8 bits quantizes x, or a. Where a matmul wants rows of x in the order of slots, one
writes them.

The host takes longer for few tokens than a GPU does. So all that is between two launches is one piece of memory, laid
out once for every number of tokens, and a call makes no other tensor than that and y.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.byte_codes import SUM_COLUMNS
from lowbit.passes.kernels.experts.schedule import short_slots
from lowbit.pylib.experts.by_kernel import combine_kernel, gather_kernel, route_kernel
from lowbit.pylib.runtime.activation_maps import PreparedBoxedLaunch
from lowbit.pylib.runtime.driver import PreparedLaunch, allocate, current_stream, on_device
from lowbit.pylib.runtime.expert_matmul import Before, ExpertMatmul
from lowbit.pylib.runtime.gpu import Launcher, is_settled
from lowbit.pylib.runtime.kernel import CudaKernel
from lowbit.pylib.runtime.own_kernels import aligned
from lowbit.pylib.torch_types import TORCH

_LINE = 128  # bytes

_Launch = tuple[Launcher, bool, tuple[int, ...]]
"""A kernel, whether it may start before its predecessor has ended, and its arguments."""


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
    """Returns what runs such calls on GPUs, in tiles of up to so many slots; None where columns are permuted, where
    torch routes, applies the gate or adds up, and in the emulator."""
    if gate_up.target.kind != "cuda" or not gate_up.spec.is_gated:
        return None
    if gate_up.before(tile, call.places) is None or down.before(tile, call.places, True) is None:
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
        self._x, self._act, self._tile = (call.tokens, gate_up.spec.k), TORCH[gate_up.spec.act], tile
        self._on: dict[int, _Launches] = {}

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor]
    ) -> Tensor:
        """Returns the sum of each token's experts [tokens, hidden].

        x              [tokens, k] in the act type
        ids, weights   [tokens, experts of a token]
        gate_up, down  the tensors of the specs, in their order

        Raises SpecError for an x or weights that do not fit, and for tensors on several devices.
        """
        self._check(x, ids, weights)
        return self.run(x, ids, weights, gate_up, down)

    def run(
        self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor]
    ) -> Tensor:
        """Returns what a call does, of tensors that are known to fit."""
        device = x.get_device()
        launches = self._on.get(device) or self._load(device)
        with on_device(device):
            return launches.run(aligned(x), aligned(ids), aligned(weights), gate_up, down)

    def prepared(self, gate_up: Sequence[Tensor], down: Sequence[Tensor]) -> PreparedExperts:
        """Returns calls with these weights, which a call has read before and which stay where they are."""
        device = gate_up[0].get_device()
        return PreparedExperts(self._on.get(device) or self._load(device), gate_up, down)

    def _check(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Raises SpecError for tensors that kernels would misread."""
        if x.dtype is not self._act or x.shape != self._x:
            raise SpecError(f"x must be {self._act} {list(self._x)}, not {x.dtype} {list(x.shape)}")
        if weights.shape != ids.shape:
            raise SpecError(f"top_k_weights must be {list(ids.shape)}, one for each id, not {list(weights.shape)}")
        if not x.get_device() == ids.get_device() == weights.get_device():
            raise SpecError(f"x is on {x.device}, ids on {ids.device}, weights on {weights.device}; put them on one")

    def _load(self, device: int) -> _Launches:
        kernels = self._gate_up, self._down, self._route, self._combine
        return self._on.setdefault(device, _Launches(device, self._call, self._tile, *kernels))


class _Layout:
    """Things that lie one after the other in memory."""

    def __init__(self) -> None:
        self.bytes = 0

    def place(self, size: int) -> int:
        """Returns where the next thing begins, of so many bytes."""
        begin = self.bytes
        self.bytes += -(-size // _LINE) * _LINE
        return begin


class _Launches:
    """The launches of calls on one device, and where in memory lies what is between them."""

    def __init__(
        self,
        device: int,
        call: RoutedCall,
        tile: int,
        gate_up: ExpertMatmul,
        down: ExpertMatmul,
        route: CudaKernel,
        combine: CudaKernel,
    ) -> None:
        self.device, self._tokens, self._tile, self._short = device, call.tokens, tile, short_slots(tile)
        self._route, self._combine = route.function(device), combine.function(device)
        layout, places = _Layout(), call.places
        self._routing = [layout.place(4 * size) for size in (places, places, places, 3 * (places + 1))]
        self._gate_up = _Matmul(gate_up, device, tile, call.tokens, places, layout, in_order=False)
        self._down = _Matmul(down, device, tile, places, places, layout, in_order=True)
        self._bytes = (layout.bytes,)
        self._y, self._out = (call.tokens, down.spec.outputs), TORCH[down.spec.out_dtype]
        self._strides = (down.spec.outputs, 1)

    def run(
        self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor]
    ) -> Tensor:
        """Returns y. The device is the current one."""
        y, between, stream = self.result(), self.between(), current_stream(self.device)
        addresses = x.data_ptr(), ids.data_ptr(), weights.data_ptr(), y.data_ptr()
        for function, overlap, values in self.each(between.data_ptr(), *addresses, gate_up, down):
            function(stream, overlap, *values)
        return y

    def result(self) -> Tensor:
        """Returns memory for y."""
        return allocate(self._y, self._strides, self._out)

    def between(self) -> Tensor:
        """Returns memory for all that is between launches."""
        return allocate(self._bytes, (1,), torch.uint8)

    def each(
        self, begin: int, x: int, ids: int, weights: int, y: int, gate_up: Sequence[Tensor], down: Sequence[Tensor]
    ) -> Iterator[_Launch]:
        """Yields the launches: first that of the kernel that reads ids, then of the one that reads x, last of the one
        that reads weights and writes y.

        begin   where the memory between launches begins
        x, ids, weights, y  addresses
        """
        rows, numbers, slots, tiles = [begin + offset for offset in self._routing]
        yield self._route, True, (ids, rows, numbers, slots, tiles, self._tokens, self._tile, self._short)
        yield from self._gate_up.each(begin, x, rows, tiles, gate_up)
        yield from self._down.each(begin, begin + self._gate_up.y, numbers, tiles, down)
        yield self._combine, True, (begin + self._down.y, slots, tiles, weights, y, self._tokens)


class _Matmul:
    """The launches of a matmul on one device: one quantizes the rows of its x, one writes a row for each slot, and one
    multiplies; the first two where they are needed. What they write has a place in `layout`."""

    def __init__(
        self, matmul: ExpertMatmul, device: int, tile: int, rows: int, places: int, layout: _Layout, in_order: bool
    ) -> None:
        before, spec = cast(Before, matmul.before(tile, places, in_order)), matmul.spec  # `routed_experts` has seen it
        self._m, self._places = rows, places
        self._multiply = matmul.launcher(device, tile, places)
        self._quantize = self._gather = None
        if before.quantizes:
            self._quantize = matmul.quantizer(device)
            self._of_x = tuple(map(layout.place, (rows * spec.k, 4 * rows, 4 * rows * (spec.k // SUM_COLUMNS))))
        if before.gathers:
            row = spec.k * (1 if before.quantizes else TORCH[spec.act].itemsize)
            kernel = cast(CudaKernel, gather_kernel(row, matmul.target.name))
            self._gather, self._in_order = kernel.function(device), layout.place(places * row)
        self.y = layout.place(places * spec.outputs * TORCH[spec.out_dtype].itemsize)

    def each(
        self, begin: int, x: int, rows: int, tiles: int, weight: Sequence[Tensor]
    ) -> Iterator[_Launch]:
        """Yields the launches.

        begin        where memory begins
        x            the address of x [rows, k]
        rows, tiles  those of a `Routing`
        """
        operands = (x,)
        if self._quantize is not None:
            values, scales, sums = self._of_x
            operands = begin + values, begin + scales, begin + sums
            yield self._quantize, True, (x, *operands, self._m)
        if self._gather is not None:
            in_order = begin + self._in_order
            yield self._gather, True, (operands[0], rows, in_order, self._places)
            operands = in_order, *operands[1:]
        addresses = [tensor.data_ptr() for tensor in weight]
        values = *operands, begin + self.y, self._places, *addresses, rows, tiles
        yield self._multiply, is_settled(weight[0]), values


class PreparedExperts:
    """Calls with weights that stay where they are: the arguments of launches stay from one to the next, but for those
    that a call has tensors for. Any thread may call it.

    It takes x, ids and weights as `RoutedExperts` does, which must fit.
    """

    def __init__(self, launches: _Launches, gate_up: Sequence[Tensor], down: Sequence[Tensor]) -> None:
        self._launches, self._weights, self._lock = launches, (gate_up, down), threading.Lock()
        self._begin = self._x = 0  # where memory begins, and x, of which arguments tell
        self._prepared: list[PreparedLaunch | PreparedBoxedLaunch] = []
        self._starts: list[Callable[[int], None]] = []

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x, ids, weights, launches = aligned(x), aligned(ids), aligned(weights), self._launches
        with on_device(launches.device), self._lock:
            y, between = launches.result(), launches.between()
            begin, source, stream = between.data_ptr(), x.data_ptr(), current_stream(launches.device)
            if begin != self._begin or source != self._x:
                self._place(begin, source)
            self._ids.value, self._router_weights.value = ids.data_ptr(), weights.data_ptr()
            self._y.value = y.data_ptr()
            for start in self._starts:
                start(stream)
        return y

    def _place(self, begin: int, x: int) -> None:
        """Writes all arguments, where those that every call writes may be anything."""
        if begin == self._begin and isinstance(self._prepared[1], PreparedLaunch):
            self._prepared[1].pointer(0).value = self._x = x
            return
        self._begin = 0  # until all are written
        every = self._launches.each(begin, x, x, x, x, *self._weights)
        if self._prepared:
            for launch, (_, _, values) in zip(self._prepared, every):
                launch.set(*values)
        else:
            self._prepare(every)
        self._begin, self._x = begin, x

    def _prepare(self, every: Iterable[_Launch]) -> None:
        self._prepared = [function.prepared(*values) for function, _, values in every]
        self._starts = [launch.start for launch in self._prepared]
        first, last = cast(PreparedLaunch, self._prepared[0]), cast(PreparedLaunch, self._prepared[-1])
        self._ids, self._router_weights, self._y = first.pointer(0), last.pointer(3), last.pointer(4)
