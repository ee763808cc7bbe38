"""Runs a matmul on an NVIDIA GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.dialect.errors import TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.target import Target
from lowbit.pylib.build.driver import Artifact, Program
from lowbit.pylib.runtime.activation_maps import BoxedFunction
from lowbit.pylib.runtime.driver import Function, allocate, current_stream
from lowbit.pylib.runtime.interface import GpuRuntime, Tensors, argument_order
from lowbit.pylib.weights.tensor_checks import address_of

Launcher = Function | BoxedFunction
_address = Tensor.data_ptr


class CudaRuntime(GpuRuntime):
    """NVIDIA GPUs. `matmul` is the eager path of decoding: 7 us on an H200's host in all (2026-11,
    benchmarks/host_cost.py), less than torch.nn.functional.linear."""

    def __init__(
        self, spec: MatmulSpec, target: Target, schedule: KernelSchedule | None, late_scaling: bool = False
    ) -> None:
        super().__init__(spec, target, schedule, late_scaling)
        self._by_rows: dict[tuple[int, int], Launcher] = {}  # (device, m)
        self._by_token_tile: dict[tuple[int, int | None], Launcher] = {}  # (device, token tile), the same functions
        self._lock = threading.Lock()
        self._several_devices = False  # known before a function can be found

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        device = x.get_device()
        m = x.numel() // self._k
        function = self._by_rows.get((device, m))
        if function is None:
            tiles = self._artifacts.token_tiles(m)
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
        y = allocate_rows(x, m, self._outputs, self._out)
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
        """A launch for every token tile of rows of x; the first brings the weight, or much of it, into the L2 cache."""
        device = x.get_device()
        y = x.new_empty((*x.shape[:-1], self._outputs), dtype=self._out)
        rows = x.reshape(-1, self._k)
        if not rows.is_contiguous() or rows.data_ptr() % 16:
            rows = rows.clone(memory_format=torch.contiguous_format)
        with torch.cuda.device(device):
            for token_tile, operands, part, out in self._parts(tiles, weight, rows, y.view(-1, self._outputs)):
                function = self._function(device, token_tile)
                stream, settled = current_stream(device), is_settled(weight[0])
                addresses = map(_address, operands)
                function(stream, settled, part.data_ptr(), out.data_ptr(), len(part), *addresses)
        return y

    def dequantize(self, weight: Tensors) -> Tensor:
        device = weight[0].get_device()
        function = self._function(device, None)
        with torch.cuda.device(device):
            w = allocate((self._n, self._k), (self._k, 1), self._act)
            no_x = [0] * argument_order(self._spec).index("y")
            addresses = [*map(_address, weight[: self._stored]), *[0] * len(self._spec.call_inputs)]
            function(current_stream(device), False, *no_x, w.data_ptr(), 0, *addresses)
        return w

    def _vendor_matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        if x.numel() == 0:
            check_device(self._target, x.get_device())
            return x.new_empty((*x.shape[:-1], self._outputs), dtype=self._out)
        w = self.dequantize(weight)
        if self._out is self._act and not self._spec.epilogue:
            return torch.nn.functional.linear(x, w, self._bias(weight))
        sums = torch.mm(x.reshape(-1, self._k), w.t(), out_dtype=torch.float32)
        return self._from_sums(sums.view(*x.shape[:-1], self._n), weight)

    def _function(self, device: int, token_tile: int | None) -> Launcher:
        """The kernel for `token_tile` tokens, loaded on `device`."""
        function = self._by_token_tile.get((device, token_tile))
        if function is None:
            check_device(self._target, device)
            self._several_devices = torch.cuda.device_count() > 1
            artifact = self._artifacts.kernel(token_tile)
            with self._lock:
                function = self._by_token_tile.get((device, token_tile))
                function = function or load_matmul(artifact, self._spec, self._target, device)
                self._by_token_tile[device, token_tile] = function
        return function


def allocate_rows(x: Tensor, m: int, n: int, dtype: torch.dtype) -> Tensor:
    """Returns memory on the current device for m rows of n columns, in the shape that the m rows of x have."""
    return allocate((m, n), (n, 1), dtype) if x.ndim == 2 else allocate(*_batched(x.shape, n), dtype)


def _batched(shape: torch.Size, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of [*shape[:-1], n]. (To view a matrix so would take 2.8 us.)"""
    *batch, _ = shape
    strides = [1]
    for size in reversed([*batch[1:], n]):
        strides.append(strides[-1] * size)
    return (*batch, n), tuple(reversed(strides[: len(shape)]))


def is_settled(codes: Tensor) -> bool:
    """Tells whether an earlier launch has waited until the weight was there.

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
    return Function(image, program.launch, device, order)


def load_matmul(artifact: Artifact, spec: MatmulSpec, target: Target, device: int) -> Launcher:
    """A kernel of a spec on a device, which takes the arguments of `argument_order`, each tensor by its address."""
    order = argument_order(spec)
    boxes = artifact.launch.boxes
    function = load_function(artifact, target, device, (*boxes, *order[1:]) if boxes else order)
    return BoxedFunction(function, spec, boxes, order) if boxes else function
