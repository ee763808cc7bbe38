"""The kernel that permutes columns of x: in the emulator, and what calls on a GPU give it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowbit
from lowbit.dialect.errors import EmulatorError, SpecError
from lowbit.dialect.spec import Act
from lowbit.passes.builder import Program
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.permute.family import FEW_ROWS, default_schedule, permute_spec
from lowbit.passes.kernels.permute.schedule import PermuteSchedule
from lowbit.passes.kernels.registry import request
from lowbit.passes.lowering import memory
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.pylib import reference
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.runtime import permuters
from lowbit.pylib.runtime.devices import this_machine
from lowbit.pylib.runtime.interface import memory_of
from lowbit.pylib.runtime.permuters import CudaPermuter, permuter
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.dequantized import inverse_of
from lowbit.pylib.weights.packed import PackedWeight

HOPPER, AMPERE, ADA = (parse_target(f"emulator:sm_{arch}") for arch in ("90a", "80", "89"))


def problem(m: int, k: int, act: Act = "f16") -> tuple[Tensor, Tensor]:
    """Rows in which every column has bits of its own, and a permutation."""
    generator = torch.Generator().manual_seed(m + k)
    words = torch.arange(m * k, dtype=torch.int64).view(m, k) * 7919 + 13
    return words.short().view(TORCH[act]), torch.randperm(k, generator=generator).int()


def permuted(x: Tensor, permutation: Tensor, schedule: PermuteSchedule, target: Target = HOPPER) -> Tensor:
    """Returns what the kernel with a schedule writes, checked for races."""
    spec = permute_spec(x.shape[1], "f16" if x.dtype is torch.float16 else "bf16")
    compiled = compile_kernel(request(spec, target, schedule))
    y = torch.full_like(x, float("nan"))
    named = {"x": x, "permutation": permutation, "y": y}
    arguments = {name: memory_of(t) for name, t in named.items()}
    Emulator(compiled.ptx).run(compiled.launch, {**arguments, "m": len(x)}, racecheck=True)
    return y


def is_right(y: Tensor, x: Tensor, permutation: Tensor) -> bool:
    """Tells whether y has the bits of x."""
    return torch.equal(y.view(torch.int16), x.view(torch.int16)[:, permutation.long()])


# k with pieces of 16, 8, 4 and 2 bytes, of less than a warp and of more than a block
@pytest.mark.parametrize("k", [16, 17, 96, 100, 130, 1000, 2056, 4099, 8192, 9216])
@pytest.mark.parametrize("tokens", [FEW_ROWS, FEW_ROWS + 1])
def test_default_schedules(k: int, tokens: int) -> None:
    cases: tuple[tuple[Act, Target, int], ...] = (("f16", HOPPER, 1), ("bf16", AMPERE, 5))
    for act, target, m in cases:
        schedule = default_schedule(permute_spec(k, act), tokens, target)
        x, permutation = problem(m, k, act)
        assert is_right(permuted(x, permutation, schedule, target), x, permutation)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(16, 700),
    st.integers(1, 6),
    st.sampled_from([32, 64, 96]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_schedule(k: int, m: int, threads: int, rows: int, pieces: int, staged: bool) -> None:
    x, permutation = problem(m, k)
    schedule = PermuteSchedule(threads, rows if staged else 1, pieces, staged)
    assert is_right(permuted(x, permutation, schedule), x, permutation)


def test_rows_too_long_for_shared_memory() -> None:
    """They are gathered from device memory; 65536 columns fit where a block has 128 KB."""
    spec = permute_spec(65536, "f16")
    for target, staged in ((HOPPER, True), (AMPERE, True), (ADA, False)):
        assert {default_schedule(spec, m, target).staged for m in (1, 2048)} == {staged}
    x, permutation = problem(2, spec.k)
    for target in (HOPPER, ADA):
        assert is_right(permuted(x, permutation, default_schedule(spec, 1, target), target), x, permutation)


@pytest.mark.parametrize("k", [16, 97, 100, 4096, 8192, 14336, 28672, 32766, 32767, 50001, 65536])
def test_registers_and_shared_memory(k: int) -> None:
    for arch in ("sm_90a", "sm_80", "sm_89"):
        target, spec = parse_target(arch), permute_spec(k, "f16")
        for tokens in (1, 2048):
            compiled = compile_kernel(request(spec, target, default_schedule(spec, tokens, target)))
            used = resource_usage(compiled.ptx, target)
            assert (used.spill_stores, used.spill_loads) == (0, 0), (arch, tokens)
            assert used.registers <= 128 and compiled.launch.shared_bytes <= target.max_shared_per_block


def test_few_rows_keep_several_multiprocessors_busy_and_many_share_the_permutation() -> None:
    spec = permute_spec(8192, "f16")
    few, many = (default_schedule(spec, tokens, HOPPER) for tokens in (FEW_ROWS, FEW_ROWS + 1))
    assert few == PermuteSchedule(256, 1, 1) and many == PermuteSchedule(256, 4, 4)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (PermuteSchedule(33), "threads=33 must be a multiple of 32 from 32 to 1024"),
        (PermuteSchedule(32, rows=0), "rows=0 must be in 1..64"),
        (PermuteSchedule(32, rows=2, staged=False), "rows=2 must be 1 with staged=False"),
        (PermuteSchedule(32, pieces=0), "pieces=0 must be in 1..64"),
        (PermuteSchedule(256, rows=8), r"8 rows of k=16384 take 262144 bytes .* sm_90a has 232448; use fewer rows"),
    ],
)
def test_schedules_that_are_refused(schedule: PermuteSchedule, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        request(permute_spec(16384, "f16"), parse_target("sm_90a"), schedule)
    with pytest.raises(SpecError, match=r"1 rows of k=120000 take 240000 bytes .* use staged=False"):
        request(permute_spec(120000, "f16"), parse_target("sm_90a"), PermuteSchedule())


MUTATIONS: dict[str, tuple[object, str, Callable[[Any], Any]]] = {
    "rows of another block": (Program, "block_id", lambda right: lambda self, axis: right(self, 1 - axis)),
    "no barrier": (Program, "barrier", lambda right: lambda self: None),
    "offsets of bytes as of elements": (memory, "_in_bytes", lambda right: lambda x, stride, place: x),
    "all of the first row": (
        Program, "gather", lambda right: lambda self, source, offsets, index: right(self, source, (0,), index)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, function, wrap = MUTATIONS[name]
    x, permutation = problem(7, 1000)
    schedule = PermuteSchedule(32, 2, 2)
    assert is_right(permuted(x, permutation, schedule), x, permutation)
    assert not is_right(permuted(x, permutation, schedule), x, inverse_of(permutation))
    monkeypatch.setattr(place, function, wrap(getattr(place, function)))
    try:
        found = is_right(permuted(x, permutation, schedule), x, permutation)
    except EmulatorError:
        found = False
    assert not found


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (2, 3, 4), (0,), (3, 0), (FEW_ROWS + 5,)])
def test_calls_in_the_emulator(shape: tuple[int, ...]) -> None:
    """Of any number of dims and rows, and of an x with any strides and address."""
    k = 48
    x = torch.randn(*shape, k).half()
    permutation = torch.randperm(k).int()
    strided = torch.randn(*shape, 2 * k).half()[..., ::2]
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    for each in (x, strided, moved):
        y = permuter(k, "f16", HOPPER)(each, permutation)
        assert torch.equal(y, each[..., permutation.long()]) and y.is_contiguous()


@pytest.mark.parametrize("target", ["emulator:sm_80", "emulator:sm_90a"])
def test_matmul_and_dequantize_are_those_of_the_weight_in_order(target: str) -> None:
    """To the last bit, of an x that torch has permuted."""
    cases: tuple[tuple[Act, int], ...] = (("f16", 96), ("bf16", 100))
    for act, k in cases:
        spec = lowbit.MatmulSpec(n=24, k=k, weight="u4", act=act, zeros="int", permuted=True)
        x, tensors = reference.random_inputs(spec, 9)
        permutation = tensors.pop("permutation")
        mm, in_order = (lowbit.compile(each, target) for each in (spec, replace(spec, permuted=False)))
        w, w_in_order = mm.pack(**tensors, permutation=permutation), in_order.pack(**tensors)
        for rows in (x, x[0], x.view(3, 3, k)):
            assert torch.equal(mm(rows, w), in_order(rows[..., permutation], w_in_order))
        assert torch.equal(mm.dequantize(w)[:, permutation], in_order.dequantize(w_in_order))


def test_the_inverse() -> None:
    permutation = torch.randperm(99).int()
    assert torch.equal(permutation[inverse_of(permutation).long()], torch.arange(99, dtype=torch.int32))


# -- calls on a GPU, with kernels of Python in place of loaded ones

STREAM, K = 7, 64


class Kernels:
    """The permute kernel, and what it has been given."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, bool, int]] = []  # stream, overlap, m

    def permute(self, stream: int, overlap: bool, x: int, permutation: int, y: int, m: int) -> None:
        assert x % 16 == y % 16 == 0
        self.launches.append((stream, overlap, m))
        rows, out = (tensor_at(address, (m, K), torch.float16) for address in (x, y))
        out.copy_(rows.index_select(1, tensor_at(permutation, (K,), torch.int32)))


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns the tensor that lies at an address."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    found = Kernels()
    loaded: list[Any] = []
    monkeypatch.setattr(permuters, "load", lambda *_: object())
    monkeypatch.setattr(permuters, "load_function", lambda *given: loaded.append(given) or found.permute)
    monkeypatch.setattr(permuters, "allocate_rows", lambda x, m, n, dtype: torch.empty(*x.shape[:-1], n, dtype=dtype))
    monkeypatch.setattr(permuters, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(permuters, "check_device", lambda target, device: None)
    yield found
    assert len(loaded) <= 2  # one for few rows, one for many, however often they are called


def test_what_a_launch_is_given(kernels: Kernels) -> None:
    """The first launch with a permutation does not overlap: what has written it may be the kernel in front."""
    permute = CudaPermuter(K, "f16", parse_target("sm_90a"))
    x, permutation = torch.randn(3, K).half(), torch.randperm(K).int()
    for _ in range(2):
        assert torch.equal(permute(x, permutation), x[:, permutation.long()])
    permute(x, permutation.clone())
    assert kernels.launches == [(STREAM, False, 3), (STREAM, True, 3), (STREAM, False, 3)]


@pytest.mark.parametrize("shape", [(), (2, 3), (0,), (FEW_ROWS + 1,)])
def test_any_x_on_a_gpu(shape: tuple[int, ...], kernels: Kernels) -> None:
    permute = CudaPermuter(K, "f16", parse_target("sm_90a"))
    permutation, size = torch.randperm(K).int(), torch.Size(shape).numel() * K
    whole = torch.randn(2 * size + 1).half()
    for x in (whole[:size], whole[1 : 1 + size], whole[: 2 * size : 2]):
        x = x.view(*shape, K)
        y = permute(x, permutation)
        assert torch.equal(y, x[..., permutation.long()])
    assert len(kernels.launches) == (3 if size else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("act", ["f16", "bf16"])
@pytest.mark.parametrize("k", [96, 97, 100, 4096, 8192, 14336, 65536, 120000])
def test_on_a_gpu(k: int, act: Act) -> None:
    """Bits of every column, for few rows and for many, without and with a kernel to overlap with."""
    permute = permuter(k, act, parse_target(this_machine()))
    permutation = torch.randperm(k, device="cuda").int()
    for m in (1, 3, 16, FEW_ROWS, FEW_ROWS + 1, 515):
        x = torch.randint(-(1 << 15), 1 << 15, (m, k), device="cuda").short().view(TORCH[act])
        expected = x.view(torch.int16).index_select(1, permutation)
        moved = torch.empty(m * k + 1, dtype=x.dtype, device="cuda")[1:].view(m, k).copy_(x)
        for each in (x, moved, x.t().contiguous().t()):
            for _ in range(3):
                assert torch.equal(permute(each, permutation).view(torch.int16), expected)
        twice = permute(permute(x, permutation), inverse_of(permutation))
        assert torch.equal(twice.view(torch.int16), x.view(torch.int16))


@pytest.mark.gpu
def test_calls_in_a_row_and_in_a_graph() -> None:
    """Each call reads what the one before has written: launches overlap, numbers do not."""
    spec = lowbit.MatmulSpec(n=1024, k=1024, weight="u4", group_size=128, zeros="int", permuted=True)
    for m in (1, 16, 300):
        x, tensors = reference.random_inputs(spec, m)
        permutation = tensors.pop("permutation")
        mm, in_order = (lowbit.compile(each) for each in (spec, replace(spec, permuted=False)))
        w, plain = mm.pack(**tensors, permutation=permutation).to("cuda"), in_order.pack(**tensors).to("cuda")
        x, permutation = x.cuda(), permutation.cuda()

        expected = chain(lambda t, order=permutation: t.index_select(1, order), in_order, plain, x)
        assert torch.equal(chain(lambda t: t, mm, w, x), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = chain(lambda t: t, mm, w, x)
        for _ in range(3):
            graph.replay()
        assert torch.equal(y, expected)
        assert torch.equal(mm.dequantize(w)[:, permutation], in_order.dequantize(plain))


def chain(order: Callable[[Tensor], Tensor], mm: Matmul, w: PackedWeight, x: Tensor) -> Tensor:
    """Returns what four products in a row make of x."""
    for _ in range(4):
        x = mm(order(x), w)
    return x
