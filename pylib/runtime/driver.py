"""Loads kernels on NVIDIA GPUs and starts them.

All but the launch goes through cuda.bindings (cuda-python), which is imported when the first kernel is loaded. At m = 1
the host takes as long for a launch as the GPU for the kernel. So whatever stays the same between calls (launch
configuration, attributes, the addresses of arguments) is built when a kernel is loaded, and a call only overwrites the
arguments and the stream: 4.1 us on an H200's host, 3.2 of them in the driver (2026-11). The launch itself is a ctypes
call of that one function: 3.3 to 5.2 us where that of cuda.bindings took 3.8 to 5.2, on two H200 hosts
(`benchmarks/host_cost.py`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch

from lowbit.dialect.errors import TargetError
from lowbit.passes.launch import Launch
from lowbit.pylib.runtime.arguments import ArgumentBuffer
from lowbit.pylib.runtime.workspaces import workspace

# As Inductor allocates (shape, strides, dtype; on the current device), without the dispatcher: 1.0 us where
# torch.empty takes 3.0 (H200 host, torch 2.11).
allocate: Callable[..., torch.Tensor] = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
# The handle of a device's current stream. None in a torch without CUDA.
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_HERE = nullcontext()
# From cuda.h, for the launch; the driver's binary interface does not change them.
_INVALID_CONTEXT = 201
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute; of its 64-byte union we need the first int."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def bindings() -> Any:
    """Returns the module cuda.bindings.driver, initialized. Raises TargetError where it or the driver is missing."""
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError as error:
        wheel = "'cuda-bindings>=13.0.3,<14'"
        raise TargetError(f"kernels are loaded with cuda-bindings ({error}); pip install {wheel}") from None
    try:
        (code,) = driver.cuInit(0)
    except RuntimeError as error:  # no libcuda
        raise TargetError(f"no NVIDIA driver on this machine ({error}); use target='cpu'") from None
    if code:
        raise TargetError(f"cuInit: {_described(driver, code)}")
    return driver


def driver_call(name: str, *arguments: object) -> Any:
    """Calls a function of cuda.bindings.driver. Returns its result, or a tuple where it has several.

    Raises TargetError with the driver's words for what went wrong.
    """
    code, *results = getattr(bindings(), name)(*arguments)
    if code:
        raise TargetError(f"{name}: {describe(code)}")
    return results[0] if len(results) == 1 else tuple(results)


def describe(code: int) -> str:
    """Returns CUDA_ERROR_... and what the driver says of it."""
    return _described(bindings(), code)


def _described(driver: Any, code: int) -> str:
    try:
        result = driver.CUresult(code)
    except ValueError:  # a newer driver than these bindings
        return f"error {code}"
    (_, name), (_, text) = driver.cuGetErrorName(result), driver.cuGetErrorString(result)
    return f"{name.decode()} ({text.decode()})"


@cache
def launch_function() -> Any:
    """Returns cuLaunchKernelEx of libcuda, which `bindings` has found."""
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx


@cache
def tensor_map_function() -> Any:
    """Returns cuTensorMapEncodeTiled of libcuda, with the types of its arguments: called by ctypes, since cuda-python
    wants an object for every number. Raises TargetError if there is no driver."""
    bindings()
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, number, ctypes.c_uint32, *[pointer] * 5, *[number] * 4]
    return function


@cache
def _primary_context(device: int) -> Any:
    """Returns the context that torch uses on `device`."""
    return driver_call("cuDevicePrimaryCtxRetain", driver_call("cuDeviceGet", device))


@contextmanager
def _loading_on(device: int) -> Iterator[None]:
    """Makes `device` current, and lets code be loaded even while this thread captures a graph."""
    driver_call("cuCtxPushCurrent", _primary_context(device))
    relaxed = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = driver_call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        driver_call("cuThreadExchangeStreamCaptureMode", mode)
        driver_call("cuCtxPopCurrent")


def sm_count(device: int) -> int:
    """Returns the number of multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _several_devices() -> bool:
    return torch.cuda.device_count() > 1


def on_device(device: int) -> AbstractContextManager[Any]:
    """Makes a GPU current within it. It takes no time where there is one only, and none for a CPU, which is below 0."""
    away = device >= 0 and _several_devices() and torch.cuda.current_device() != device
    return torch.cuda.device(device) if away else _HERE


class Function:
    """A kernel that is loaded on one device. Safe to call from any thread.

    image      cubin, or PTX (which the driver compiles) ending in a zero byte
    order      the names of the arguments in the order of a call; by default that of the kernel's signature. It may
               name pointers that the kernel does not take: they are not passed on

    `start(configuration, handle, addresses, None)` launches it, as cuLaunchKernelEx does. Raises TargetError if the
    driver refuses the image or the amount of shared memory.
    """

    def __init__(
        self, image: bytes, launch: Launch, device: int, order: Sequence[str] | None = None
    ) -> None:
        self._launch = launch
        self._device = device
        self._order = order = order or [p.name for p in launch.arguments]
        self._workspace_bytes, self._workspace = launch.workspace_bytes, torch.empty(0)
        self._lock = threading.Lock()
        arguments = ArgumentBuffer(launch, order)
        self._set_arguments, self.addresses = arguments.set, arguments.addresses
        # Axis, place in a call of the argument that is divided, and divisor.
        ceil = [(axis, extent) for axis, extent in enumerate(launch.grid) if extent.rule == "ceil"]
        self._varying = [(axis, list(order).index(extent.param), extent.number) for axis, extent in ceil]
        self._ordered = self._configuration(False)
        self._overlapping = self._configuration(launch.may_overlap)
        self.handle = self._load(image)
        self.start = launch_function()

    def _configuration(self, overlap: bool) -> tuple[_LaunchConfig, Any]:
        """Returns a launch configuration and the reference that ctypes passes for it."""
        launch = self._launch
        config = _LaunchConfig(block=(launch.threads, 1, 1), shared_bytes=launch.shared_bytes)
        for axis, extent in enumerate(launch.grid):
            if extent.rule != "ceil":
                config.grid[axis] = extent.blocks({}, sm_count(self._device) if extent.rule != "constant" else 0)
        if overlap:
            attribute = _LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
            attribute.value[0] = 1
            config.attributes, config.attribute_count = ctypes.pointer(attribute), 1
        return config, ctypes.byref(config)

    def _load(self, image: bytes) -> ctypes.c_void_p:
        attribute = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with _loading_on(self._device):
            library = driver_call("cuLibraryLoadData", image, [], [], 0, [], [], 0)
            kernel = driver_call("cuLibraryGetKernel", library, self._launch.name.encode())
            function = driver_call("cuKernelGetFunction", kernel)
            driver_call("cuFuncSetAttribute", function, attribute, self._launch.shared_bytes)
        return ctypes.c_void_p(int(function))

    def __call__(self, stream: int, overlap: bool, *values: Any) -> None:
        """Start the kernel on `stream` of the current device.

        overlap   whether it may start before its predecessor ends, if it is a kernel that can
        values    of the arguments, in their order: addresses, numbers, and tensor maps as `TensorMap.encode` makes them
        """
        with self._lock:
            if self._workspace_bytes:
                self._workspace = self.workspace(stream)
                values = (*values, self._workspace.data_ptr())
            self._set_arguments(*values)
            config, reference = self._overlapping if overlap else self._ordered
            config.stream = stream
            for axis, place, divisor in self._varying:
                config.grid[axis] = blocks = -(-values[place] // divisor)
                if not blocks:
                    return  # there is no work, and the driver would refuse
            code = self.start(reference, self.handle, self.addresses, None)
            if code:
                self.start_again(reference, self.addresses, code)

    def start_again(self, reference: object, addresses: object, code: int) -> None:
        """Gives a thread that has not used CUDA yet the context that it lacks. Raises TargetError for other errors.

        reference   to the launch configuration
        addresses   of the arguments
        code        with which the driver refused a launch
        """
        if code == _INVALID_CONTEXT:
            driver_call("cuCtxSetCurrent", _primary_context(self._device))
            code = self.start(reference, self.handle, addresses, None)
        if code:
            raise TargetError(f"launch of {self._launch.name} failed: {describe(code)}")

    def prepared(self, *values: Any) -> PreparedLaunch:
        """Returns launches with these arguments, for which there is work; they overlap with their predecessor where the
        kernel can. See `__call__`."""
        config = self._configuration(self._launch.may_overlap)
        for axis, place, divisor in self._varying:
            config[0].grid[axis] = -(-values[place] // divisor)
        launch = PreparedLaunch(self, ArgumentBuffer(self._launch, self._order), config)
        launch.set(*values)
        return launch

    @property
    def has_workspace(self) -> bool:
        """Tells whether the kernel takes memory that is shared on a stream, as its last argument."""
        return self._workspace_bytes > 0

    def workspace(self, stream: int) -> torch.Tensor:
        """Returns this memory for a stream, whose launches share it."""
        graph = _capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0
        return workspace(self._device, stream, self._workspace_bytes, graph)


class PreparedLaunch:
    """Launches of a kernel whose arguments stay from one to the next until others are written. `Function.prepared`
    makes it. One thread at a time may use it.

    set(*values)   writes all arguments, in their order. Numbers must be those that it was made with
    """

    def __init__(
        self, function: Function, arguments: ArgumentBuffer, configuration: tuple[_LaunchConfig, Any]
    ) -> None:
        self._function, self._start, self._handle = function, function.start, function.handle
        self._arguments, self._addresses = arguments, arguments.addresses
        self._config, self._reference = configuration
        self._has_workspace, self._workspace = function.has_workspace, torch.empty(0)

    def set(self, *values: Any) -> None:
        """Writes all arguments; see above."""
        self._arguments.set(*values, *(0,) * self._has_workspace)

    def pointer(self, place: int) -> ctypes.c_uint64:
        """Returns the argument at a place of a call, an address: write its `value`."""
        return ctypes.c_uint64.from_address(self._arguments.places[place])

    def start(self, stream: int) -> None:
        """Starts the kernel on `stream` of the current device."""
        if self._has_workspace:
            self._workspace = self._function.workspace(stream)
            self.pointer(-1).value = self._workspace.data_ptr()
        self._config.stream = stream
        code = self._start(self._reference, self._handle, self._addresses, None)
        if code:
            self._function.start_again(self._reference, self._addresses, code)


def _capture_id(stream: int) -> int:
    """Returns the number of the graph that is being captured on `stream`."""
    _, number, *_ = driver_call("cuStreamGetCaptureInfo", stream)
    return int(number)
