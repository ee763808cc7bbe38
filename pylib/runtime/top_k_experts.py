"""Few tokens through their experts in two launches, without a table of slots: `TopKExperts`.

    a[t, j] = gate(W13[ids[t, j]] x[t])                     one launch, whose blocks read ids
    y[t] = sum over j of weights[t, j] * W2[ids[t, j]] a[t, j]     one launch, whose clusters have a token's experts

The second starts before the first has ended, and has its weights under way by then. Every token reads the weights of
its experts, so this is for so few tokens that hardly two of them have the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.errors import SpecError
from lowbit.dialect.signature import WORKSPACE
from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.dialect.top_k import Ids, RouterWeights, TopK
from lowbit.passes.kernels.base import KernelRequest
from lowbit.passes.kernels.registry import request
from lowbit.passes.scheduling.choice import Chooser
from lowbit.passes.target import Target
from lowbit.pylib.build.driver import Artifact, load
from lowbit.pylib.runtime.driver import Function, PreparedLaunch, allocate, current_stream, on_device
from lowbit.pylib.runtime.gpu import check_device, is_settled, load_function
from lowbit.pylib.runtime.interface import argument_order, check_x_on_cpu, memory_of, unwritten
from lowbit.pylib.runtime.own_kernels import aligned
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.tensor_checks import address_of

if TYPE_CHECKING:
    from lowbit.pylib.emulator import Emulator

MOST_TOKENS = 4
_MOST_READ_TWICE = 1.2
"""How many times the bytes of the experts that are hit may be read, on the average of a uniform routing."""


def most_tokens(experts: int, count: int) -> int:
    """Returns up to how many tokens go through their experts one by one, if `count` of so many are a token's."""

    def read(tokens: int) -> float:
        hit = experts * (1 - (1 - count / experts) ** tokens)
        return tokens * count / hit

    return max(tokens for tokens in range(MOST_TOKENS + 1) if tokens <= 1 or read(tokens) <= _MOST_READ_TWICE)


@lru_cache(maxsize=None)
def top_k_experts_of(gate_up: MatmulSpec, down: MatmulSpec, top_k: TopK, target: Target) -> TopKExperts | None:
    """Returns what runs few tokens by the ids of their experts, None where no kernels do.

    gate_up, down  the weights of all experts (`spec_of_experts`); the first is gated
    top_k          how ids are given, and the type of weights
    """
    if not target.is_gpu or not gate_up.is_gated or gate_up.for_rows(1).compute or down.for_rows(1).compute:
        return None
    try:
        first = replace(gate_up.for_rows(1), top_k=replace(top_k, weights=None))
        specs = interned(first), interned(replace(down.for_rows(1), top_k=top_k))
        served = all(Chooser(spec, target).token_tiles for spec in specs)
    except SpecError:
        return None
    return TopKExperts(*specs, target) if served else None


class TopKExperts:
    """The two launches of a layer's experts. Any thread may call it.

    most_tokens  of a call
    """

    def __init__(self, gate_up: MatmulSpec, down: MatmulSpec, target: Target) -> None:
        self.most_tokens = most_tokens(gate_up.experts, gate_up.top_k.count if gate_up.top_k else 1)
        self._gate_up, self._down = launches_of(gate_up, target), launches_of(down, target)

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor]
    ) -> Tensor:
        """Returns the sum of each token's experts [tokens, hidden].

        x             [tokens, k] in the act type
        ids, weights  [tokens, experts of a token]
        gate_up, down  the tensors of the specs, in their order
        """
        tokens = x.shape[0]
        if not tokens:
            return x.new_empty((0, self._down.spec.outputs), dtype=TORCH[self._down.spec.out_dtype])
        ids = aligned(ids)
        a = self._gate_up.run(aligned(x), ids.numel(), gate_up, (ids,))
        return self._down.run(a, tokens, down, (ids, aligned(weights)))

    def prepared(self, gate_up: Sequence[Tensor], down: Sequence[Tensor], tokens: int) -> PreparedTopK | None:
        """Returns calls on a GPU with these weights, which a call has read before and which stay where they are; None
        in the emulator, and without tokens."""
        first, second = self._gate_up, self._down
        if not (isinstance(first, CudaLaunches) and isinstance(second, CudaLaunches) and tokens):
            return None
        return PreparedTopK(first, second, gate_up, down, tokens)

    @property
    def requests(self) -> tuple[KernelRequest, KernelRequest]:
        """The kernels of gate_up and down, before they are made."""
        return self._gate_up.request, self._down.request

    def prepare(self) -> tuple[Artifact, Artifact]:
        """Returns the kernels of gate_up and down, made if they were not."""
        return self._gate_up.artifact, self._down.artifact


class Launches:
    """The launches of the kernel of one spec, which is compiled at the first. `launches_of` makes it."""

    def __init__(self, spec: MatmulSpec, target: Target) -> None:
        self.spec, self._target, self._out = spec, target, TORCH[spec.out_dtype]
        self._lock = threading.RLock()
        self._artifact: Artifact | None = None

    def run(self, x: Tensor, rows: int, weight: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """Returns y, of so many rows. others: ids, and weights if experts are added up."""
        raise NotImplementedError

    @property
    def request(self) -> KernelRequest:
        """The kernel, before it is made."""
        return request(self.spec, self._target, Chooser(self.spec, self._target).schedule(1))

    @property
    def artifact(self) -> Artifact:
        """The kernel."""
        with self._lock:
            if self._artifact is None:
                sizes = f"{self.spec.experts}x{self.spec.outputs}x{self.spec.k}"
                name = f"top_k_experts_{self.spec.weight}_{sizes}_{self._target.arch}"
                self._artifact = load(self.request, name)
            return self._artifact


class CudaLaunches(Launches):
    """On NVIDIA GPUs, on the current stream."""

    def __init__(self, spec: MatmulSpec, target: Target) -> None:
        super().__init__(spec, target)
        self._functions: dict[int, Function] = {}

    def run(self, x: Tensor, rows: int, weight: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        device, n = x.get_device(), self.spec.outputs
        function = self.function(device)
        with on_device(device):
            y = allocate((rows, n), (n, 1), self._out)
            addresses = [each.data_ptr() for each in (*weight, *others)]
            function(current_stream(device), is_settled(weight[0]), address_of(x), y.data_ptr(), rows, *addresses)
        return y

    def function(self, device: int) -> Function:
        """Returns the kernel as it is loaded on a device, which takes the arguments of `argument_order`."""
        return self._functions.get(device) or self._load(device)

    def _load(self, device: int) -> Function:
        check_device(self._target, device)
        with self._lock:
            found = load_function(self.artifact, self._target, device, argument_order(self.spec))
            self._functions[device] = found
        return found


class PreparedTopK:
    """Calls of so many tokens with weights that stay where they are: the arguments of the two launches stay from one to
    the next, but for those that a call has tensors for. Any thread may call it.

    It takes x, ids and weights as `TopKExperts` does.
    """

    def __init__(
        self,
        gate_up: CudaLaunches,
        down: CudaLaunches,
        of_gate_up: Sequence[Tensor],
        of_down: Sequence[Tensor],
        tokens: int,
    ) -> None:
        self._device, self._lock = of_gate_up[0].get_device(), threading.Lock()
        slots = tokens * (gate_up.spec.top_k.count if gate_up.spec.top_k else 1)
        first, (self._x, self._a, self._ids), self._new_a = _prepared(gate_up, self._device, slots, of_gate_up, 1)
        second, places, self._new_y = _prepared(down, self._device, tokens, of_down, 2)
        self._read_a, self._result, self._ids_of_down, self._weights = places
        self._starts = first.start, second.start

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x, ids, weights = aligned(x), aligned(ids), aligned(weights)
        with on_device(self._device), self._lock:
            a, y, stream = allocate(*self._new_a), allocate(*self._new_y), current_stream(self._device)
            self._x.value, self._weights.value, self._result.value = x.data_ptr(), weights.data_ptr(), y.data_ptr()
            self._a.value = self._read_a.value = a.data_ptr()
            self._ids.value = self._ids_of_down.value = ids.data_ptr()
            for start in self._starts:
                start(stream)
        return y


def _prepared(
    launches: CudaLaunches, device: int, rows: int, weight: Sequence[Tensor], others: int
) -> tuple[PreparedLaunch, list[Any], tuple[tuple[int, int], tuple[int, int], torch.dtype]]:
    """Returns launches; their arguments x, y and those behind the weight, so many, which are to be written; and how y
    is allocated."""
    n, behind = launches.spec.outputs, 3 + len(weight)
    values = 0, 0, rows, *(tensor.data_ptr() for tensor in weight), *[0] * others
    made = launches.function(device).prepared(*values)
    pointers = [made.pointer(place) for place in (0, 1, *range(behind, behind + others))]
    return made, pointers, ((rows, n), (n, 1), TORCH[launches.spec.out_dtype])


class EmulatorLaunches(Launches):
    """In the emulator, on CPU tensors."""

    _emulator: Emulator | None = None

    def run(self, x: Tensor, rows: int, weight: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        from lowbit.pylib.emulator import Emulator

        check_x_on_cpu(self._target.name, x, *weight, *others)
        y, artifact = unwritten((rows, self.spec.outputs), self._out), self.artifact
        with self._lock:
            self._emulator = self._emulator or Emulator(artifact.ptx)
        named = {"x": x, "y": y} | dict(zip(self.spec.call_operands, (*weight, *others)))
        values: dict[str, object] = {name: memory_of(tensor) for name, tensor in named.items()}
        values |= {WORKSPACE: np.zeros(artifact.launch.workspace_bytes, np.uint8), "m": rows}
        self._emulator.run(artifact.launch, values)
        return y


_KINDS: dict[str, Callable[[MatmulSpec, Target], Launches]] = {
    "cuda": CudaLaunches,
    "emulator": EmulatorLaunches,
}


def launches_of(spec: MatmulSpec, target: Target) -> Launches:
    """Returns the launches of a spec with `top_k` on a GPU or in an emulator."""
    return _KINDS[target.kind](spec, target)


_IDS: dict[torch.dtype, Ids] = {torch.int32: "i32", torch.int64: "i64"}
_WEIGHTS: dict[torch.dtype, RouterWeights] = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


def ids_and_weights(count: int, ids: torch.dtype, weights: torch.dtype) -> TopK | None:
    """Returns how a call gives the ids of a token's experts, so many, and their weights; None for types that no kernel
    reads."""
    kinds = _IDS.get(ids), _WEIGHTS.get(weights)
    return TopK(count, kinds[0], kinds[1]) if kinds[0] and kinds[1] and count else None
