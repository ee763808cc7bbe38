"""Where a matmul runs: on a GPU, in the PTX emulator, or on this machine's CPU.

Every runtime has `matmul(x [..., k], weight) -> y [..., n]` and `dequantize(weight) -> W [n, k]`, where `weight` are
the tensors of `spec.tensors` in their order, which fit the spec: `pylib.matmul` sees to that. The emulator goes the way
the GPU goes, launch for launch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.errors import SpecError, TargetError
from lowbit.dialect.signature import WORKSPACE
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.registry import family_of
from lowbit.passes.target import Target
from lowbit.pylib import knobs
from lowbit.pylib.build.choices import KernelChoices
from lowbit.pylib.build.driver import Artifact, Program
from lowbit.pylib.build.kernels import Artifacts
from lowbit.pylib.dequantized import in_order_of_x
from lowbit.pylib.runtime.boxed import BoxedFunction, maps_of_x
from lowbit.pylib.runtime.driver import Function, allocate, current_stream
from lowbit.pylib.tensor_checks import address_of
from lowbit.pylib.torch_types import TORCH

if TYPE_CHECKING:
    from lowbit.pylib.emulator import Emulator


Tensors = Sequence[Tensor]
Launcher = Function | BoxedFunction
_address = Tensor.data_ptr


def argument_order(spec: MatmulSpec) -> tuple[str, ...]:
    """Returns the order in which the kernels of a spec are called with their arguments."""
    x = ("x", "x_scales", "x_sums") if spec.compute else ("x",)
    return (*x, "y", "m", *(slot.name for slot in spec.tensors))


class Runtime(Protocol):
    """The place where a `Matmul` runs. A tile of None means the kernel that dequantizes."""

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor: ...

    def dequantize(self, weight: Tensors) -> Tensor: ...

    @property
    def schedule(self) -> KernelSchedule | None: ...

    def kernel(self, m: int) -> Artifact: ...

    def stages(self, m: int) -> dict[str, str]: ...

    def choices(self) -> KernelChoices: ...


def make_runtime(
    spec: MatmulSpec, target: Target, schedule: Schedule | None, *, late_scaling: bool = False
) -> Runtime:
    """The runtime for a target. late_scaling: no kernel rounds weights, as `Artifacts` has it; a CPU's never does."""
    if spec.permuted:
        in_order = replace(spec, permuted=False)
        return PermutedRuntime(make_runtime(in_order, target, schedule, late_scaling=late_scaling))
    if target.kind == "cuda":
        return CudaRuntime(spec, target, schedule, late_scaling)
    if target.kind == "emulator":
        return EmulatorRuntime(spec, target, schedule, late_scaling)
    check_schedule(target, schedule)
    return CpuRuntime(spec)


def check_schedule(target: Target, schedule: Schedule | None) -> None:
    """Raise SpecError for a schedule on a CPU."""
    if schedule is not None and not target.is_gpu:
        raise SpecError("schedule= is for GPU targets; the CPU's kernel has no such choices, so drop it")


class _GpuRuntime:
    """The base of runtimes that run PTX, on a GPU or in the emulator."""

    def __init__(
        self, spec: MatmulSpec, target: Target, schedule: Schedule | None, late_scaling: bool = False
    ) -> None:
        self._spec, self._n, self._k = spec, spec.n, spec.k
        self._act, self._out = TORCH[spec.act], TORCH[spec.out_dtype]
        self._names = [slot.name for slot in spec.tensors]
        self._biases = [i for i, slot in enumerate(spec.tensors) if slot.role == "bias"]
        self._target = target
        self._artifacts = Artifacts(spec, target, schedule, late_scaling)
        self.schedule = self.kernel(1).schedule  # compiles it, so that its errors show here
        if schedule is not None and not late_scaling:
            self._artifacts.kernel(schedule.tokens)

    def kernel(self, m: int) -> Artifact:
        return self._artifacts.kernel(self._artifacts.tile(m))

    def stages(self, m: int) -> dict[str, str]:
        return self._artifacts.stages(self._artifacts.tile(m))

    def choices(self) -> KernelChoices:
        return self._artifacts.choices()

    def _bias(self, weight: Tensors) -> Tensor | None:
        """Returns the bias that the vendor's matmul adds where no kernel of ours does."""
        return weight[self._biases[0]] if self._biases else None


class CudaRuntime(_GpuRuntime):
    """NVIDIA GPUs. `matmul` is the eager path of decoding: 7 us on an H200's host in all (2026-11,
    benchmarks/host_cost.py), less than torch.nn.functional.linear."""

    def __init__(
        self, spec: MatmulSpec, target: Target, schedule: Schedule | None, late_scaling: bool = False
    ) -> None:
        super().__init__(spec, target, schedule, late_scaling)
        self._by_rows: dict[tuple[int, int], Launcher] = {}  # (device, m)
        self._by_tile: dict[tuple[int, int | None], Launcher] = {}  # (device, token tile), the same functions
        self._lock = threading.Lock()
        self._several_devices = False  # known once a function is loaded

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        device = x.get_device()
        m = x.numel() // self._k
        function = self._by_rows.get((device, m))
        if function is None:
            tiles = self._artifacts.tiles(m)
            if tiles is None or m == 0:
                return self._vendor_matmul(x, weight)
            if len(tiles) > 1:
                return self._in_tiles(tiles, x, weight)
            function = self._by_rows[device, m] = self._function(device, tiles[0])
        if self._several_devices and torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                return self.matmul(x, weight)
        source = x.data_ptr()
        if source % 16 or not source or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
            source = address_of(x)
        n = self._n
        y = allocate((m, n), (n, 1), self._out) if x.ndim == 2 else allocate(*_batched(x.shape, n), self._out)
        stream, target, codes = current_stream(device), y.data_ptr(), weight[0]
        first = codes.data_ptr()
        settled = getattr(codes, "_lowbit_settled", 0) == first or is_settled(codes)
        if len(weight) == 2:  # the usual weights by hand: the star over map costs 0.1 us
            function(stream, settled, source, target, m, first, weight[1].data_ptr())
        elif len(weight) == 3:
            function(stream, settled, source, target, m, first, weight[1].data_ptr(), weight[2].data_ptr())
        else:
            function(stream, settled, source, target, m, *map(_address, weight))
        return y

    def _in_tiles(self, tiles: list[int], x: Tensor, weight: Tensors) -> Tensor:
        """A launch for every tile of rows of x; the first brings the weight, or much of it, into the L2 cache."""
        device = x.get_device()
        y = x.new_empty((*x.shape[:-1], self._n), dtype=self._out)
        rows = x.reshape(-1, self._k)
        if not rows.is_contiguous() or rows.data_ptr() % 16:
            rows = rows.clone(memory_format=torch.contiguous_format)
        addresses = tuple(map(_address, weight))
        with torch.cuda.device(device):
            for tile, part, out in parts_of_rows(tiles, rows, y.view(-1, self._n)):
                function = self._function(device, tile)
                stream, settled = current_stream(device), is_settled(weight[0])
                function(stream, settled, part.data_ptr(), out.data_ptr(), len(part), *addresses)
        return y

    def dequantize(self, weight: Tensors) -> Tensor:
        device = weight[0].get_device()
        function = self._function(device, None)
        with torch.cuda.device(device):
            w = allocate((self._n, self._k), (self._k, 1), self._act)
            no_x = [0] * argument_order(self._spec).index("y")
            function(current_stream(device), False, *no_x, w.data_ptr(), 0, *map(_address, weight))
        return w

    def _vendor_matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        if x.numel() == 0:
            check_device(self._target, x.get_device())
            return x.new_empty((*x.shape[:-1], self._n), dtype=self._out)
        w, bias = self.dequantize(weight), self._bias(weight)
        if self._out is self._act:
            return torch.nn.functional.linear(x, w, bias)
        y = torch.mm(x.reshape(-1, self._k), w.t(), out_dtype=torch.float32)
        y = y if bias is None else y.add_(bias)
        return y.to(self._out).view(*x.shape[:-1], self._n)

    def _function(self, device: int, tile: int | None) -> Launcher:
        """The kernel for `tile` tokens, loaded on `device`."""
        function = self._by_tile.get((device, tile))
        if function is None:
            check_device(self._target, device)
            artifact = self._artifacts.kernel(tile)
            with self._lock:
                function = self._by_tile.get((device, tile)) or load_matmul(artifact, self._spec, self._target, device)
                self._by_tile[device, tile] = function
            self._several_devices = torch.cuda.device_count() > 1
        return function


def _batched(shape: torch.Size, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of [*shape[:-1], n]. (To view a matrix so would take 2.8 us.)"""
    *batch, _ = shape
    strides = [1]
    for size in reversed([*batch[1:], n]):
        strides.append(strides[-1] * size)
    return (*batch, n), tuple(reversed(strides[: len(shape)]))


def parts_of_rows(tiles: list[int] | None, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each tile with its rows of the tensors."""
    sizes = [*tiles[:-1], len(tensors[0]) - sum(tiles[:-1])] if tiles else []
    return zip(tiles or (), *(rows.split(sizes) for rows in tensors))


def is_settled(codes: Tensor) -> bool:
    """Whether an earlier launch has waited until the weight was there.

    A kernel that overlaps its predecessor reads the weight without waiting. If the predecessor is what packed
    or copied the weight, that is a race; so the first launch on every weight does not overlap.
    """
    address = codes.data_ptr()
    if getattr(codes, "_lowbit_settled", 0) == address:
        return True
    codes._lowbit_settled = address  # type: ignore[attr-defined]
    return False


def check_device(target: Target, device: int) -> None:
    """Raise TargetError if there is no device or it can't run code for the target."""
    if device < 0:
        if torch.cuda.is_available():
            raise TargetError(f"a matmul for {target} takes CUDA tensors; use .cuda(), or target='cpu'")
        raise TargetError(
            f"this matmul is for {target}, but torch finds no CUDA device here; use target='cpu', or run the "
            f"same PTX with target='emulator:{target}'"
        )
    have = _capability(device)
    fits = have >= target.capability if target.runs_later else have == target.capability
    if not fits:
        raise TargetError(
            f"this matmul is for {target}, but cuda:{device} ({torch.cuda.get_device_name(device)}) is "
            f"sm_{have}; compile with target=None for the GPU at hand"
        )


def _capability(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def load_function(program: Program, target: Target, device: int, order: Sequence[str] | None = None) -> Function:
    """A kernel on a device, which takes its arguments in this order. Raises TargetError if the driver refuses it."""
    # A cubin runs on its own major architecture; for a later one the driver compiles the PTX.
    same_major = target.capability // 10 == _capability(device) // 10
    image = program.cubin if same_major and program.cubin else program.ptx.encode() + b"\0"
    return Function(image, program.launch, device, target.has_clusters, order)


def load_matmul(artifact: Artifact, spec: MatmulSpec, target: Target, device: int) -> Launcher:
    """A kernel of a spec on a device, which takes the arguments of `argument_order`, each tensor by its address."""
    order = argument_order(spec)
    boxes = family_of(artifact.schedule).x_boxes(spec, artifact.schedule)
    function = load_function(artifact, target, device, (*boxes, *order[1:]) if boxes else order)
    return BoxedFunction(function, spec, boxes, order) if boxes else function


class EmulatorRuntime(_GpuRuntime):
    """The GPU's kernels on CPU tensors, PTX instruction by instruction: to test them, not to be fast."""

    def __init__(
        self, spec: MatmulSpec, target: Target, schedule: Schedule | None, late_scaling: bool = False
    ) -> None:
        super().__init__(spec, target, schedule, late_scaling)
        self._emulators: dict[int | None, Emulator] = {}

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        check_cpu(self._target.name, x, weight[0])
        m = x.numel() // self._k
        tiles = self._artifacts.tiles(m)
        if tiles is None:
            w, bias = self.dequantize(weight), self._bias(weight)
            y = torch.nn.functional.linear(x.float(), w.float(), None if bias is None else bias.float())
            return y.to(self._out)
        y = torch.empty((*x.shape[:-1], self._n), dtype=self._out, device="cpu")
        rows = x.reshape(-1, self._k).contiguous()
        for tile, part, out in parts_of_rows(tiles, rows, y.view(-1, self._n)) if m else ():
            self._launch(tile, len(part), weight, x=part, y=out)
        return y

    def dequantize(self, weight: Tensors) -> Tensor:
        check_cpu(self._target.name, weight[0])
        w = torch.empty((self._n, self._k), dtype=self._act, device="cpu")
        self._launch(None, 0, weight, y=w)
        return w

    def _launch(self, tile: int | None, m: int, weight: Tensors, **tensors: Tensor) -> None:
        artifact = self._artifacts.kernel(tile)
        launch, named = artifact.launch, dict(zip(self._names, weight)) | tensors
        values: dict[str, object] = {name: memory_of(t) for name, t in named.items()}
        boxes = family_of(artifact.schedule).x_boxes(self._spec, artifact.schedule)
        values |= maps_of_x(values.get("x"), self._spec, m, boxes)
        values |= {WORKSPACE: np.zeros(launch.workspace_bytes, np.uint8), "m": m}
        self._emulator(tile).run(launch, values)

    def _emulator(self, tile: int | None) -> Emulator:
        emulator = self._emulators.get(tile)
        if emulator is None:
            from lowbit.pylib.emulator import Emulator

            emulator = self._emulators[tile] = Emulator(self._artifacts.kernel(tile).ptx)
        return emulator


class CpuRuntime:
    """This machine's CPU."""

    schedule = None

    def __init__(self, spec: MatmulSpec) -> None:
        from lowbit.pylib.runtime.cpu import CpuMatmul

        self._spec = spec
        self._program = CpuMatmul(spec, knobs.cpu(), knobs.num_threads())

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        check_cpu("cpu", x, weight[0])
        return self._program.matmul(x, weight)

    def dequantize(self, weight: Tensors) -> Tensor:
        check_cpu("cpu", weight[0])
        return self._program.dequantize(weight)

    def kernel(self, m: int) -> Artifact:
        raise TargetError("target cpu has no PTX or cubin: see ir('asm'), or compile for 'sm_90a', say")

    def stages(self, m: int) -> dict[str, str]:
        from lowbit.passes.tensor_programs import matmul_text

        return {"lowbit": matmul_text(self._spec)} | self._program.stages(m)

    def choices(self) -> KernelChoices:
        raise TargetError("target cpu has one program for every number of rows; choices are those of a GPU target")


class PermutedRuntime:
    """Another runtime for weights whose columns are permuted: it brings x into their order first, once per call.

    A gather can be recorded in a CUDA graph. The kernels are those of the same weight in order.
    """

    def __init__(self, inner: Runtime) -> None:
        self._inner = inner
        self.schedule = inner.schedule
        self.kernel, self.stages, self.choices = inner.kernel, inner.stages, inner.choices

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        *in_order, permutation = weight
        return self._inner.matmul(x.index_select(-1, permutation), in_order)

    def dequantize(self, weight: Tensors) -> Tensor:
        *in_order, permutation = weight
        return in_order_of_x(self._inner.dequantize(in_order), permutation)


def check_cpu(target: str, *tensors: Tensor) -> None:
    """Raise TargetError for tensors that are elsewhere."""
    for tensor in tensors:
        if not tensor.is_cpu:
            raise TargetError(f"target {target} takes CPU tensors, not {tensor.device}; use .cpu()")


def memory_of(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous CPU tensor, shared."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()
