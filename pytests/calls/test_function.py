"""`pylib.runtime.driver.Function` with a stand-in for the driver: what it loads, and what each call hands over."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowbit.dialect.errors import SpecError, TargetError
from lowbit.dialect.signature import Param, parse_grid
from lowbit.passes.launch import Launch
from lowbit.pylib.runtime import driver
from lowbit.pylib.runtime.driver import Function

PARAMS = (Param("x", "pointer"), Param("alpha", "f32"), Param("m", "i32"))


class Result(IntEnum):
    """CUresult."""

    SUCCESS = 0
    INVALID_VALUE = 1


class FakeDriver:
    """cuda.bindings.driver and libcuda's cuLaunchKernelEx. Remembers calls; `faults` are answers by function's name."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")
    CUresult = Result

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.launches: list[dict[str, Any]] = []
        self.faults: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            code = Result((self.faults.get(name) or [0]).pop(0))
            return (code,) if name.startswith(("cuInit", "cuCtx", "cuFunc")) else (code, 1000 + len(self.calls))

        return call

    def cuGetErrorName(self, code: Result) -> tuple[Result, bytes]:
        return Result.SUCCESS, f"CUDA_ERROR_{code.name}".encode()

    def cuGetErrorString(self, code: Result) -> tuple[Result, bytes]:
        return Result.SUCCESS, code.name.lower().replace("_", " ").encode()

    def launch(self, config: Any, handle: Any, addresses: Any, extra: None) -> int:
        config = config._obj
        x = ctypes.c_uint64.from_address(addresses[0]).value
        alpha = ctypes.c_float.from_address(addresses[1]).value
        m = ctypes.c_int32.from_address(addresses[2]).value
        shown = {"grid": tuple(config.grid), "block": tuple(config.block), "shared": config.shared_bytes}
        overlap = config.attribute_count and (config.attributes[0].id, config.attributes[0].value[0])
        self.launches.append({**shown, "stream": config.stream, "values": (x, alpha, m), "overlap": overlap})
        return (self.faults.get("launch") or [0]).pop(0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(driver, "launch_function", lambda: fake.launch)
    monkeypatch.setattr(driver, "sm_count", lambda device: 132)
    driver._primary_context.cache_clear()
    yield fake
    driver._primary_context.cache_clear()


def function(grid: tuple[Any, ...] = (3, 2, 1), may_overlap: bool = True, **options: Any) -> Function:
    launch = Launch("k", parse_grid(grid), threads=64, shared_bytes=512, params=PARAMS, may_overlap=may_overlap)
    return Function(b"image", launch, 0, **options)


def test_loading(fake: FakeDriver) -> None:
    """In the device's context, with a capture left alone; the mode of captures is restored, also after an error."""
    function()
    names = [name for name, *_ in fake.calls]
    assert names[:3] == ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent"]
    assert names[3] == "cuThreadExchangeStreamCaptureMode"
    assert names[4:8] == ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuFuncSetAttribute"]
    assert names[8:] == ["cuThreadExchangeStreamCaptureMode", "cuCtxPopCurrent"]
    assert fake.calls[4][1] == b"image" and fake.calls[5][2] == b"k" and fake.calls[7][2:] == ("shared", 512)
    assert fake.calls[8][1] == 1004  # what the first exchange returned
    fake.calls.clear()
    fake.faults["cuLibraryLoadData"] = [1]
    with pytest.raises(TargetError, match=r"cuLibraryLoadData: CUDA_ERROR_INVALID_VALUE \(invalid value\)"):
        function()
    assert [name for name, *_ in fake.calls][-2:] == ["cuThreadExchangeStreamCaptureMode", "cuCtxPopCurrent"]


def test_a_call(fake: FakeDriver) -> None:
    start = function()
    start(5, True, 1 << 40, 0.5, 7)
    start(6, False, 1 << 41, -2.0, -1)
    same = {"grid": (3, 2, 1), "block": (64, 1, 1), "shared": 512}
    assert fake.launches == [
        {**same, "stream": 5, "values": (1 << 40, 0.5, 7), "overlap": (6, 1)},
        {**same, "stream": 6, "values": (1 << 41, -2.0, -1), "overlap": 0},
    ]
    function(may_overlap=False)(5, True, 0, 0.0, 0)
    assert fake.launches[-1]["overlap"] == 0


def test_a_call_in_an_order_of_its_own(fake: FakeDriver) -> None:
    function(order=("m", "bias", "x", "alpha"))(5, True, 7, 99, 1 << 40, 0.5)
    assert fake.launches[0]["values"] == (1 << 40, 0.5, 7)
    with pytest.raises(SpecError, match="kernel k is called without alpha; it takes x, alpha, m"):
        function(order=("m", "x"))


def test_grids(fake: FakeDriver) -> None:
    """From the GPU once, from the arguments at every call; without a block nothing is launched."""
    start = function(("sm_count * 2", "ceil(m / 16)", 1), order=("m", "x", "alpha"))
    for m in (1, 16, 17, 0, 4096):
        start(5, m % 2 == 0, m, 0, 1.0)
    assert [launch["grid"] for launch in fake.launches] == [(264, n, 1) for n in (1, 1, 2, 256)]


def test_prepared_launches_keep_their_arguments(fake: FakeDriver) -> None:
    """Each its own, but for those that are written; other launches of the kernel change none."""
    start = function(("sm_count * 2", "ceil(m / 16)", 1), order=("m", "x", "alpha"))
    first, second = start.prepared(17, 1 << 40, 0.5), start.prepared(1, 2, -2.0)
    first.start(5)
    start(6, False, 99, 3, 1.0)
    first.pointer(1).value = 7 << 40
    second.start(7)
    first.start(8)
    second.set(1, 4, 8.0)
    second.start(9)
    assert [(each["stream"], each["grid"][1], each["values"], each["overlap"]) for each in fake.launches] == [
        (5, 2, (1 << 40, 0.5, 17), (6, 1)),
        (6, 7, (3, 1.0, 99), 0),
        (7, 1, (2, -2.0, 1), (6, 1)),
        (8, 2, (7 << 40, 0.5, 17), (6, 1)),
        (9, 1, (4, 8.0, 1), (6, 1)),
    ]
    fake.faults["launch"] = [201]
    first.start(5)
    assert fake.launches[-2:] == [fake.launches[-1]] * 2 and fake.calls[-1][0] == "cuCtxSetCurrent"


def test_a_prepared_launch_finds_the_workspace_of_its_stream(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {5: torch.zeros(4), 6: torch.zeros(4)}
    monkeypatch.setattr(driver, "workspace", lambda device, stream, size, graph: memory[stream])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    params = Param("workspace", "pointer"), *PARAMS[1:]
    launch = Launch("k", parse_grid((3, 2, 1)), 64, 512, params, workspace_bytes=16)
    prepared = Function(b"image", launch, 0).prepared(0.5, 7)
    for stream in (5, 6):
        prepared.start(stream)
        assert fake.launches[-1]["values"] == (memory[stream].data_ptr(), 0.5, 7)
    prepared.set(0.5, 8)
    prepared.start(5)
    assert fake.launches[-1]["values"] == (memory[5].data_ptr(), 0.5, 8)


def test_a_thread_without_a_context_gets_one(fake: FakeDriver) -> None:
    start = function()
    fake.faults["launch"] = [201]
    start(5, True, 1, 1.0, 1)
    assert len(fake.launches) == 2 and fake.calls[-1][0] == "cuCtxSetCurrent"


@pytest.mark.parametrize(("code", "words"), [(1, r"CUDA_ERROR_INVALID_VALUE \(invalid value\)"), (777, r"error 777")])
def test_a_launch_that_fails(fake: FakeDriver, code: int, words: str) -> None:
    start = function()
    fake.faults["launch"] = [code]
    with pytest.raises(TargetError, match=f"launch of k failed: {words}"):
        start(5, True, 1, 1.0, 1)
