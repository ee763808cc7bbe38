"""Starting kernels on NVIDIA GPUs: libcuda through ctypes.

At m = 1 the host takes as long for a launch as the GPU for the kernel. So whatever stays the same between
calls (launch configuration, attributes, the array of argument addresses) is built when a kernel is loaded. A
call only overwrites some 64-bit words and the stream (`Function`): 4.1 us on an H200's host, 3.2 of them in
the driver (2026-11).
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from lowbit.dialect.errors import TargetError
from lowbit.passes.kernels.decode.schedule import Launch

# As Inductor allocates (shape, strides, dtype; on the current device), without the dispatcher: 1.0 us where
# torch.empty takes 3.0 (H200 host, torch 2.11).
allocate: Callable[..., torch.Tensor] = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
# The handle of a device's current stream. None in a torch without CUDA.
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# From cuda.h; the driver's binary interface does not change them.
_INVALID_CONTEXT = 201
_MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_CAPTURE_MODE_RELAXED = 2


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


class _Driver:
    """libcuda, with errors by name."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TargetError(f"no NVIDIA driver on this machine ({error}); use target='cpu'") from None
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver. Raises TargetError with the driver's words for what went wrong."""
        if code := getattr(self.library, name)(*arguments):
            raise TargetError(f"{name}: {self.describe(code)}")

    def describe(self, code: int) -> str:
        """CUDA_ERROR_... and what the driver says of it."""
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(name))
        self.library.cuGetErrorString(code, ctypes.byref(text))
        return f"{(name.value or b'error %d' % code).decode()} ({(text.value or b'unknown').decode()})"


@cache
def _driver() -> _Driver:
    return _Driver()


def driver_call(name: str, *arguments: object) -> None:
    """Call a function of libcuda. Raises TargetError with the driver's words for what went wrong."""
    _driver().call(name, *arguments)


@cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """The context that torch uses on `device`."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _driver().call("cuDeviceGet", ctypes.byref(handle), device)
    _driver().call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    return context


@contextmanager
def _loading_on(device: int) -> Iterator[None]:
    """Make `device` current, and let code be loaded even while this thread captures a graph."""
    call, mode = _driver().call, ctypes.c_int(_CAPTURE_MODE_RELAXED)
    call("cuCtxPushCurrent_v2", _primary_context(device))
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class Function:
    """A kernel that is loaded on one device. Safe to call from any thread.

    image      cubin, or PTX (which the driver compiles) ending in a zero byte
    overlap    whether the kernel executes griddepcontrol.wait before it touches what an earlier kernel has
               written, so that it may start before that one ends (PTX ISA 9.7.13.13); needs sm_90 or later
    order      the names of a call's arguments; those that the kernel does not take are not passed on

    Raises TargetError if the driver refuses the image or the amount of shared memory.
    """

    def __init__(self, image: bytes, launch: Launch, device: int, overlap: bool, order: Sequence[str]) -> None:
        self._launch = launch
        self._device = device
        self._handle = self._load(image)
        self._workspace_bytes = launch.workspace_bytes
        self._workspaces: dict[tuple[int, bool], tuple[int, torch.Tensor]] = {}
        self._lock = threading.Lock()
        names = (*order, "workspace") if launch.workspace_bytes else order
        self._words = (ctypes.c_uint64 * len(names))()
        at = {name: ctypes.addressof(self._words) + 8 * i for i, name in enumerate(names)}
        self._addresses = (ctypes.c_void_p * len(launch.params))(*(at[name] for name in launch.params))
        self._ordered = self._configuration(False)
        self._overlapping = self._configuration(overlap)
        self._set_words = partial(struct.Struct(f"{len(names)}Q").pack_into, self._words, 0)
        self._start = _driver().library.cuLaunchKernelEx

    def _configuration(self, overlap: bool) -> tuple[_LaunchConfig, object]:
        """A launch configuration and the reference that ctypes passes for it."""
        launch = self._launch
        config = _LaunchConfig(launch.grid, (launch.threads, 1, 1), launch.shared_bytes)
        if overlap:
            attribute = _LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
            attribute.value[0] = 1
            config.attributes, config.attribute_count = ctypes.pointer(attribute), 1
        return config, ctypes.byref(config)

    def _load(self, image: bytes) -> ctypes.c_void_p:
        call, launch = _driver().call, self._launch
        library, kernel, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        with _loading_on(self._device):
            call("cuLibraryLoadData", ctypes.byref(library), image, None, None, 0, None, None, 0)
            call("cuLibraryGetKernel", ctypes.byref(kernel), library, launch.name.encode())
            call("cuKernelGetFunction", ctypes.byref(function), kernel)
            call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, launch.shared_bytes)
        return function

    def __call__(self, stream: int, overlap: bool, *values: int) -> None:
        """Start the kernel on `stream` of the current device.

        overlap   whether it may start before its predecessor ends, if it is a kernel that can
        values    addresses and numbers in the given order
        """
        if self._workspace_bytes:
            values = (*values, self._workspace(stream))
        with self._lock:
            self._set_words(*values)
            config, reference = self._overlapping if overlap else self._ordered
            config.stream = stream
            code = self._start(reference, self._handle, self._addresses, None)
            if code == _INVALID_CONTEXT:  # a thread that has not used CUDA yet has no context
                _driver().call("cuCtxSetCurrent", _primary_context(self._device))
                code = self._start(reference, self._handle, self._addresses, None)
        if code:
            raise TargetError(f"launch of {self._launch.name} failed: {_driver().describe(code)}")

    def _workspace(self, stream: int) -> int:
        """The address of memory that was zero before this kernel's first launch with it.

        Launches on one stream use it in turn (after griddepcontrol.wait), so they share it. Streams
        run side by side: each has its own. So has each captured graph: it may be replayed on any stream.
        """
        graph = _capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0
        owner, buffer = self._workspaces.get((stream, graph != 0), (0, None))
        if buffer is None or owner != graph:
            # While capturing, this makes a node that zeroes memory which the graph owns. The buffer of the
            # graph before may go: its memory stays with that graph.
            buffer = torch.zeros(self._workspace_bytes, dtype=torch.uint8, device=f"cuda:{self._device}")
            self._workspaces[stream, graph != 0] = graph, buffer
        return buffer.data_ptr()


def _capture_id(stream: int) -> int:
    """Of the graph that is being captured on `stream`."""
    status, graph = ctypes.c_int(), ctypes.c_uint64()
    arguments = (ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(graph), None, None, None)
    _driver().call("cuStreamGetCaptureInfo_v2", *arguments)
    return graph.value
