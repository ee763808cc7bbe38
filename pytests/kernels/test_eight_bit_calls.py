"""Calls that quantize x on a GPU, with kernels of Python in place of loaded ones: what they are given, and where."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_pipeline import FakePipeline, pipeline
from torch import Tensor

import lowbit
from lowbit.passes.targets import parse_target
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.reference import random_problem
from lowbit.pylib.runtime import devices, eight_bit, gpu, quantizers
from lowbit.pylib.runtime.activation import quantize_in_torch

__all__ = ["pipeline"]

SPEC = lowbit.MatmulSpec(n=16, k=256, weight="u8", group_size=64, zeros="int", compute="i8", out="f32")
STREAM = 7


class Kernels:
    """The quantize kernel, and one that writes sums over columns, times the row's scale, to the first column of y."""

    def __init__(self) -> None:
        self.allocated: list[range] = []  # addresses
        self.launches: list[tuple[str, int, bool, tuple[int, ...]]] = []

    def allocate(self, shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        found = torch.empty_strided(shape, strides, dtype=dtype)
        self.allocated.append(range(found.data_ptr(), found.data_ptr() + found.nbytes + 1))
        return found

    def quantize(self, stream: int, overlap: bool, *values: int) -> None:
        self.launches.append(("quantize", stream, overlap, values))
        x, *outputs, m = values
        found = quantize_in_torch(tensor_at(x, (m, SPEC.k), torch.float16), "i8")
        for address, part in zip(outputs, found):
            assert any(address in each and address + part.nbytes in each for each in self.allocated)
            ctypes.memmove(address, part.data_ptr(), part.nbytes)

    def multiply(self, stream: int, overlap: bool, *values: int) -> None:
        self.launches.append(("multiply", stream, overlap, values))
        x, scales, sums, y, m, *_ = values
        out = tensor_at(y, (m, SPEC.n), torch.float32)
        out.zero_()
        out[:, 0] = tensor_at(x, (m, SPEC.k), torch.int8).float().sum(1) * tensor_at(scales, (m,), torch.float32)
        out[:, 1] = tensor_at(sums, (m, SPEC.k // 32), torch.float32).sum(1)


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns the tensor that lies at an address."""
    assert address % dtype.itemsize == 0
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, pipeline: FakePipeline) -> Iterator[Kernels]:
    found = Kernels()
    monkeypatch.setattr(quantizers, "load_function", lambda *_: found.quantize)
    monkeypatch.setattr(gpu, "load_matmul", lambda *_: found.multiply)
    for module in (gpu, eight_bit, quantizers):
        monkeypatch.setattr(module, "allocate", found.allocate)
        monkeypatch.setattr(module, "current_stream", lambda device: STREAM)
        monkeypatch.setattr(module, "check_device", lambda target, device: None, raising=False)
    quantizers.quantizer.cache_clear()  # of kernels that the pipeline has not made
    yield found
    quantizers.quantizer.cache_clear()


def made(m: int) -> tuple[Tensor, Matmul, lowbit.PackedWeight]:
    x, *weight = random_problem(SPEC, m)
    mm = Matmul(SPEC, parse_target("sm_89"), None)
    return x, mm, mm.pack(*weight)  # type: ignore[arg-type]


def expected(x: Tensor) -> Tensor:
    values, scales, sums = quantize_in_torch(x, "i8")
    y = torch.zeros(*x.shape[:-1], SPEC.n)
    y[..., 0], y[..., 1] = values.float().sum(-1) * scales, sums.sum(-1)
    return y


@pytest.mark.parametrize("shape", [(1,), (3,), (64,), (2, 5), (1, 1, 7), (), (3, 0)])
def test_two_launches_and_two_allocations(shape: tuple[int, ...], kernels: Kernels) -> None:
    """All that stands for x is in one piece of memory, which the second kernel reads where the first has written."""
    x, mm, w = made(max(1, torch.Size(shape).numel()))
    x = x[: torch.Size(shape).numel()].view(*shape, SPEC.k)
    for settled in (False, True):
        kernels.allocated.clear()
        kernels.launches.clear()
        torch.testing.assert_close(mm(x, w), expected(x))
        assert len(kernels.allocated) == 2
        if x.numel():
            (first, *one, written), (second, *two, read) = kernels.launches
            assert (first, second, one, two) == ("quantize", "multiply", [STREAM, True], [STREAM, settled])
            assert written[0] == x.data_ptr() and written[1:4] == read[:3] and written[4] == read[4]
            assert all(address % 16 == 0 for address in written[1:4])


def test_more_rows_take_several_launches(kernels: Kernels) -> None:
    """Each kernel is given where its rows begin, of an x that is quantized at once and of one that comes quantized."""
    x, mm, w = made(150)
    torch.testing.assert_close(mm(x, w), expected(x))
    assert [name for name, *_ in kernels.launches] == ["quantize", *["multiply"] * 3]
    assert [values[4] for *_, values in kernels.launches[1:]] == [64, 64, 22]
    q = lowbit.quantize_activation(x.view(3, 50, -1), "i8", target="sm_89")
    torch.testing.assert_close(mm(q, w), expected(x).view(3, 50, -1))


def test_an_activation_for_several_matmuls_is_quantized_once(kernels: Kernels) -> None:
    x, mm, w = made(6)
    for given in (x, x.view(2, 3, -1), x[0], x.t().contiguous().t()):
        q = lowbit.quantize_activation(given, "i8", target="sm_89")
        for found, exact in zip(q.tensors, quantize_in_torch(given, "i8")):
            assert torch.equal(found, exact) and found.shape == exact.shape
        assert [name for name, *_ in kernels.launches].count("quantize") == 1
        for _ in range(2):
            torch.testing.assert_close(mm(q, w), expected(given))
        assert [name for name, *_ in kernels.launches].count("quantize") == 1
        kernels.launches.clear()


def test_the_target_is_that_of_the_gpu_of_x(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for once for each GPU."""
    asked: list[int] = []
    device = SimpleNamespace(index=-1)

    @contextmanager
    def on(index: int) -> Iterator[None]:
        device.index = index
        yield

    def named() -> str:
        asked.append(device.index)
        return ("sm_80", "sm_90a")[device.index]

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(devices, "this_machine", named)
    devices.target_at.cache_clear()
    found = [devices.target_at(index) for index in (1, 0, 1, -1, 0)]
    devices.target_at.cache_clear()
    assert found == ["sm_90a", "sm_80", "sm_90a", "cpu", "sm_80"] and asked == [1, 0]
