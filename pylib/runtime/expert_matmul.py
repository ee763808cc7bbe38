"""Multiplies the slots of tokens by the weights of their experts, in one launch for all: `ExpertMatmul`.

A spec with `experts` has the weights of all of them, one after the other. Which slots an expert has stands in device
memory (`pylib.experts.routing`), and a launch reads it there. With `compute`, a launch before it quantizes the rows of
x, each once for all of its slots. Where columns are permuted, one writes a row of x for each slot, in the order of its
expert; where many slots are multiplied by wgmma, one writes these rows as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.errors import SpecError, TargetError
from lowbit.dialect.signature import WORKSPACE
from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.persistent.schedule import takes_rows_in_order
from lowbit.passes.kernels.registry import request
from lowbit.passes.scheduling.expert_choice import choose_for_slots
from lowbit.passes.scheduling.expert_rule import tiles_of
from lowbit.passes.target import Target
from lowbit.pylib.build import user_tables
from lowbit.pylib.build.driver import Artifact, load
from lowbit.pylib.experts.by_kernel import gather_by_kernel, permute_by_kernel
from lowbit.pylib.runtime.activation_maps import maps_of_x
from lowbit.pylib.runtime.cpu_experts import ALL_SLOTS, CpuExperts
from lowbit.pylib.runtime.driver import Function, allocate, current_stream, on_device
from lowbit.pylib.runtime.gpu import Launcher, check_device, is_settled, load_matmul
from lowbit.pylib.runtime.interface import check_x_on_cpu, memory_of, unwritten
from lowbit.pylib.runtime.quantizers import CudaQuantizer, quantizer
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.tensor_checks import address_of

if TYPE_CHECKING:
    from lowbit.pylib.emulator import Emulator


def spec_of_experts(spec: MatmulSpec, experts: int) -> MatmulSpec:
    """Returns the spec of the weights of several experts, of that of one. Raises SpecError if there is none."""
    return interned(replace(spec, n=experts * spec.n, experts=experts))


@lru_cache(maxsize=None)
def expert_matmul(spec: MatmulSpec, target: Target) -> ExpertMatmul:
    """Returns the matmul of a spec with several experts on a target: one for all layers.

    Raises SpecError for a spec that the kernels do not serve.
    """
    return ExpertMatmul(spec, target)


class Before(NamedTuple):
    """The launches in front of a kernel: one that quantizes the rows of x, and one that then writes a row for each
    slot."""

    quantizes: bool
    gathers: bool


class ExpertMatmul:
    """One launch for all experts, and one that quantizes x where slots are multiplied in 8 bits, or permutes its
    columns; on a CPU a call for each expert that has slots. Kernels are compiled when their token tile is first needed.
    Any thread may call it.

    tiles   sizes of token tiles that there are kernels for, the least first
    """

    def __init__(self, spec: MatmulSpec, target: Target) -> None:
        self.spec, self.target, self._act = spec, target, TORCH[spec.act]
        self._permutes = spec.permuted and target.is_gpu  # a CPU's programs do so themselves
        of_kernels = replace(spec, permuted=False) if self._permutes else spec
        self.tiles = tiles_of(of_kernels, target) if target.is_gpu else (ALL_SLOTS,)
        every = [_LAUNCHES[target.kind](kind, target) for kind in of_kernels.kinds]
        self._few, self._many = every[0], every[-1]
        self._quantize = quantizer(spec.k, spec.act, spec.compute, target) if spec.compute else None

    def __call__(
        self, x: Tensor, rows: Tensor, tiles: Tensor, weight: Sequence[Tensor], tile: int, in_order: bool = False
    ) -> Tensor:
        """Returns y [slots, n / experts]. Rows of slots in no token tile are not written.

        x          [rows, k] in the act type
        rows       i32 [slots]: the row of x of each slot
        tiles      i32 [slots + 1, 3]: the table of token tiles (`Routing.tiles`)
        weight     the tensors of the spec, in their order
        tile       the most slots of a token tile, one of `self.tiles`
        in_order   whether `rows` are 0, 1 ... (`Routing.numbers`), so that a kernel need not read them
        """
        self._check(x, tile)
        launches = self._of(len(rows))
        operands = self._operands(x, launches.spec)
        if self._permutes:
            *weight, permutation = weight
            x, rows = permute_by_kernel(operands[0], permutation, rows, tiles, tile, self.target.name)
            operands = (x,)
        elif not in_order and len(rows) and launches.wants_order(tile, len(rows)):
            operands = (gather_by_kernel(operands[0], rows, self.target.name), *operands[1:])
        return launches.run(operands, rows, tiles, weight, tile)

    def kernel(self, tile: int, slots: int) -> Artifact:
        """The kernel for so many slots in token tiles of so many, one of `self.tiles`."""
        return self._of(slots).kernel(tile, slots)

    def prepare(self, tile: int, slots: int, device: str, in_order: bool = False) -> None:
        """Have the kernel for such a call ready, and on a device those that quantize rows of x and write them in the
        order of slots."""
        launches = self._of(slots)
        self.kernel(tile, slots)
        if not (in_order or self._permutes) and launches.wants_order(tile, slots):
            x = torch.zeros(1, self.spec.k, dtype=self._act, device=device)
            rows = torch.zeros(1, dtype=torch.int32, device=device)
            gather_by_kernel(self._operands(x, launches.spec)[0], rows, self.target.name)

    def before(self, tile: int, slots: int, in_order: bool = False) -> Before | None:
        """Returns what such a call launches in front of the kernel, on a GPU or in an emulator; None where it permutes
        columns, and on a CPU."""
        launches = self._of(slots)
        if isinstance(launches, CpuExperts) or self._permutes:
            return None
        return Before(launches.spec.compute is not None, not in_order and launches.wants_order(tile, slots))

    def quantizer(self, device: int) -> Function:
        """Returns the kernel that quantizes rows of x, loaded on a GPU (`CudaQuantizer.function`).

        Raises TargetError for other targets, and for a spec whose x stays as it is.
        """
        if not isinstance(self._quantize, CudaQuantizer):
            raise TargetError(f"no kernel for {self.target} quantizes x of ({self.spec}) on a GPU")
        return self._quantize.function(device)

    def launcher(self, device: int, tile: int, slots: int) -> Launcher:
        """Returns the kernel for such a call as it is loaded on a GPU, which takes tensors by their addresses.

        Raises TargetError for other targets.
        """
        launches = self._of(slots)
        if not isinstance(launches, CudaLaunches):
            raise TargetError(f"kernels for {self.target} are not loaded on a GPU")
        return launches.launcher(device, tile, slots)

    def _of(self, slots: int) -> Launches | CpuExperts:
        return self._few if slots < self.spec.first_in_eight_bits else self._many

    def _operands(self, x: Tensor, spec: MatmulSpec) -> tuple[Tensor, ...]:
        """Returns x as kernels of this spec take it: in pieces of 16 bytes, or its values, scales and sums."""
        if spec.compute and self._quantize:
            return self._quantize(x)
        if x.data_ptr() % 16 or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        return (x,)

    def _check(self, x: Tensor, tile: int) -> None:
        """Raises SpecError for an x that does not fit, and for a token tile without a kernel."""
        if x.dtype is not self._act or x.ndim != 2 or x.shape[1] != self.spec.k:
            wanted = f"{self._act} [rows, k={self.spec.k}]"
            raise SpecError(f"x must be {wanted}, not {x.dtype} {list(x.shape)}")
        if tile not in self.tiles:
            raise SpecError(f"tile={tile} must be one of {', '.join(map(str, self.tiles))}, which have kernels")


class Launches:
    """The launches of the kernels of one spec, whose `compute_from` is 1, on slots of which each has a row of x."""

    def __init__(self, spec: MatmulSpec, target: Target) -> None:
        self.spec, self._target, self._out = spec, target, TORCH[spec.out_dtype]
        self._artifacts: dict[KernelSchedule, Artifact] = {}
        self._wants_order: dict[tuple[int, int], bool] = {}  # by token tile and slots
        self._lock = threading.RLock()

    def run(
        self, x: Sequence[Tensor], rows: Tensor, tiles: Tensor, weight: Sequence[Tensor], tile: int
    ) -> Tensor:
        """Returns y [slots, n / experts].

        x   x alone, or its values, scales and sums; in the order of slots, if the kernel wants that
        """
        raise NotImplementedError

    def wants_order(self, tile: int, slots: int) -> bool:
        """Whether the kernel takes a row of x for each slot, and reads no list of rows."""
        found = self._wants_order.get((tile, slots))
        if found is None:
            found = self._wants_order[tile, slots] = takes_rows_in_order(self._schedule(tile, slots))
        return found

    def kernel(self, tile: int, slots: int) -> Artifact:
        """The kernel for so many slots in token tiles of so many."""
        return self._artifact(self._schedule(tile, slots), tile)

    def _schedule(self, tile: int, slots: int) -> KernelSchedule:
        """The schedule for so many slots in tiles of so many, one of those that have kernels."""
        return choose_for_slots(self.spec, tile, slots, self._target, user_tables.trusted(self._target)).schedule

    def _artifact(self, schedule: KernelSchedule, tile: int) -> Artifact:
        with self._lock:
            if schedule not in self._artifacts:
                made = request(self.spec.for_tokens(tile), self._target, schedule)
                sizes = f"{self.spec.experts}x{self.spec.outputs}x{self.spec.k}_{tile}"
                self._artifacts[schedule] = load(made, f"experts_{self.spec.weight}_{sizes}_{self._target.arch}")
            return self._artifacts[schedule]


class CudaLaunches(Launches):
    """On NVIDIA GPUs, on the current stream."""

    def __init__(self, spec: MatmulSpec, target: Target) -> None:
        super().__init__(spec, target)
        self._functions: dict[tuple[int, KernelSchedule], Launcher] = {}
        self._by_slots: dict[tuple[int, int, int], Launcher] = {}  # (device, token tile, slots), the same functions

    def run(
        self, x: Sequence[Tensor], rows: Tensor, tiles: Tensor, weight: Sequence[Tensor], tile: int
    ) -> Tensor:
        device, m, n = x[0].get_device(), len(rows), self.spec.outputs
        function = self._by_slots.get((device, tile, m)) or self.launcher(device, tile, m)
        with on_device(device):
            y = allocate((m, n), (n, 1), self._out)
            if m:
                settled = is_settled(weight[0])  # the weight is read ahead of the launch's turn in the stream
                addresses = (each.data_ptr() for each in (*weight, rows, tiles))
                function(current_stream(device), settled, *map(address_of, x), y.data_ptr(), m, *addresses)
        return y

    def launcher(self, device: int, tile: int, slots: int) -> Launcher:
        """Returns the kernel for so many slots in token tiles of so many, loaded on a device."""
        check_device(self._target, device)
        schedule = self._schedule(tile, slots)
        artifact = self._artifact(schedule, tile)
        with self._lock:
            found = self._functions.get((device, schedule))
            found = found or load_matmul(artifact, self.spec, self._target, device)
            self._functions[device, schedule] = self._by_slots[device, tile, slots] = found
        return found


class EmulatorLaunches(Launches):
    """In the emulator, on CPU tensors."""

    def __init__(self, spec: MatmulSpec, target: Target) -> None:
        super().__init__(spec, target)
        self._emulators: dict[KernelSchedule, Emulator] = {}

    def run(
        self, x: Sequence[Tensor], rows: Tensor, tiles: Tensor, weight: Sequence[Tensor], tile: int
    ) -> Tensor:
        check_x_on_cpu(self._target.name, *x, rows, tiles, *weight)
        y = unwritten((len(rows), self.spec.outputs), self._out)
        if len(rows):
            schedule = self._schedule(tile, len(rows))
            artifact = self._artifact(schedule, tile)
            launch = artifact.launch
            of_x, names = dict(zip(("x", "x_scales", "x_sums"), x)), self.spec.call_operands
            named = of_x | {"y": y} | dict(zip(names, (*weight, rows, tiles)))
            values: dict[str, object] = {name: memory_of(tensor) for name, tensor in named.items()}
            values |= maps_of_x(values["x"], self.spec, len(x[0]), launch.boxes)
            values |= {WORKSPACE: np.zeros(launch.workspace_bytes, np.uint8), "m": len(rows)}
            self._emulator(schedule, artifact).run(launch, values)
        return y

    def _emulator(self, schedule: KernelSchedule, artifact: Artifact) -> Emulator:
        from lowbit.pylib.emulator import Emulator

        with self._lock:
            found = self._emulators.get(schedule) or Emulator(artifact.ptx)
            self._emulators[schedule] = found
        return found


_LAUNCHES: dict[str, Callable[[MatmulSpec, Target], Launches | CpuExperts]] = {
    "cuda": CudaLaunches,
    "emulator": EmulatorLaunches,
    "cpu": CpuExperts,
}
"""What multiplies, by the kind of the target."""
