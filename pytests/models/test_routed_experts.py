"""The launches of routed experts as a GPU gets them: by addresses, in memory that is laid out for all of them. The
emulator runs what is launched here, and finds the tensors that addresses are in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import MatmulSpec, SpecError
from lowbit.dialect.signature import WORKSPACE
from lowbit.passes.targets import parse_target
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.experts import routed
from lowbit.pylib.experts.by_kernel import (
    combine_by_kernel,
    combine_kernel,
    gather_kernel,
    route_by_kernel,
    route_kernel,
)
from lowbit.pylib.experts.routed import RoutedCall, RoutedExperts, routed_experts
from lowbit.pylib.reference.inputs import random_inputs
from lowbit.pylib.runtime import kernel as kernels
from lowbit.pylib.runtime import top_k_experts
from lowbit.pylib.runtime.activation_maps import maps_of_x
from lowbit.pylib.runtime.driver import PreparedLaunch
from lowbit.pylib.runtime.expert_matmul import ExpertMatmul, spec_of_experts
from lowbit.pylib.runtime.interface import argument_order
from lowbit.pylib.runtime.top_k_experts import CudaLaunches, PreparedTopK, ids_and_weights, top_k_experts_of
from lowbit.pylib.torch_types import TORCH

HIDDEN, WIDTH, EXPERTS, COUNT = 64, 32, 4, 2
TARGET = "emulator:sm_80"
GATE_UP = MatmulSpec(2 * WIDTH, HIDDEN, "u4", 32, zeros="int", act="bf16", out="bf16", epilogue="silu_mul")
DOWN = MatmulSpec(HIDDEN, WIDTH, "u4", 32, zeros="int", act="bf16", out="bf16")


class Memory:
    """The tensors that a call may touch."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors, self.launches = list(tensors), 0

    def allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # From some address that is a multiple of 128 on, as those of GPUs are, and full of what no kernel may leave.
        size = int(np.prod(shape)) * dtype.itemsize
        whole = torch.full((size + 128,), 0xFF, dtype=torch.uint8)
        begin = -whole.data_ptr() % 128
        self.tensors.append(whole[begin : begin + size])
        return self.tensors[-1].view(dtype).view(shape)

    def again(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the memory that was allocated last of this size, but for results."""
        size = int(np.prod(shape)) * dtype.itemsize
        found = [each for each in self.tensors if each.dtype is torch.uint8 and each.numel() == size]
        return found[-1] if dtype is torch.uint8 and found else self.allocate(shape, strides, dtype)

    def at(self, addresses: Iterable[int]) -> dict[int, Tensor]:
        """Returns, for a launch, the bytes from each address to the next of them, or to the end of the tensor that it
        is in."""
        self.launches += 1
        begins, found = sorted(set(addresses)), dict[int, Tensor]()
        for begin, after in zip(begins, [*begins[1:], 1 << 63]):
            flat = (tensor.view(-1).view(torch.uint8) for tensor in self.tensors)
            inside = [each for each in flat if 0 <= begin - each.data_ptr() < each.numel()]
            assert inside, f"a launch was given {begin:#x}, where nothing is"
            offset = begin - inside[0].data_ptr()
            found[begin] = inside[0][offset : offset + after - begin]
        return found


class Launcher:
    """A kernel that a function starts, which takes addresses."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, stream: int, overlap: bool, *values: int) -> None:
        self._run(*values)

    def prepared(self, *values: int) -> Prepared:
        return Prepared(self._run, *values)


class Prepared(PreparedLaunch):
    """Launches with arguments that stay."""

    def __init__(self, run: Callable[..., None], *values: int) -> None:
        self._run, self._values = run, [ctypes.c_uint64(value) for value in values]

    def set(self, *values: int) -> None:
        for held, value in zip(self._values, values, strict=True):
            held.value = value

    def pointer(self, place: int) -> ctypes.c_uint64:
        return self._values[place]

    def start(self, stream: int) -> None:
        self._run(*(held.value for held in self._values))


class Emulated(ExpertMatmul):
    """Whose launches take addresses."""

    def __init__(self, spec: MatmulSpec, memory: Memory, target: str) -> None:
        super().__init__(spec, parse_target(target))
        self._memory = memory

    def launcher(self, device: int, tile: int, slots: int) -> Any:
        artifact, spec = self.kernel(tile, slots), self.spec.for_rows(slots)

        def launch(*values: int) -> None:
            named = dict(zip(argument_order(spec), values, strict=True))
            m = named.pop("m")
            at = self._memory.at(named.values())
            arrays: dict[str, Any] = {name: at[address].numpy() for name, address in named.items()}
            arrays |= maps_of_x(arrays["x"], spec, m, artifact.launch.boxes)
            workspace = np.zeros(artifact.launch.workspace_bytes, np.uint8)
            Emulator(artifact.ptx).run(artifact.launch, {**arrays, WORKSPACE: workspace, "m": m})

        return Launcher(launch)

    def quantizer(self, device: int) -> Any:
        run = self._quantize
        assert run is not None

        def launch(x: int, values: int, scales: int, sums: int, m: int) -> None:
            at = self._memory.at((x, values, scales, sums))
            rows = at[x][: m * self.spec.k * 2].view(TORCH[self.spec.act]).view(m, self.spec.k)
            for address, result in zip((values, scales, sums), run(rows)):
                written = result.view(-1).view(torch.uint8)
                at[address][: len(written)] = written

        return Launcher(launch)


class Around:
    """A kernel beside the matmuls, likewise."""

    def __init__(self, kernel: kernels.Kernel | None, memory: Memory) -> None:
        assert kernel is not None
        self._kernel, self._memory = kernel, memory

    def function(self, device: int) -> Launcher:
        def launch(*values: int) -> None:
            kinds = [param.kind for param in self._kernel.launch.arguments]
            at = self._memory.at(value for kind, value in zip(kinds, values) if kind == "pointer")
            self._kernel.start(*(at[v] if kind == "pointer" else v for kind, v in zip(kinds, values, strict=True)))

        return Launcher(launch)


def routing(tokens: int, ids: torch.dtype, weights: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens + 1000 * seed)
    chosen = torch.randint(-1, EXPERTS + 1, (tokens, COUNT), generator=generator).to(ids)
    return chosen, torch.rand(tokens, COUNT, generator=generator).to(weights)


def packed(spec: MatmulSpec) -> list[Tensor]:
    """Returns a random weight of all experts."""
    dense = replace(spec, n=EXPERTS * spec.n, epilogue=None)
    _, weight = random_inputs(dense, 1)
    made = lowbit.compile(dense, target="cpu").pack(**weight)
    return [getattr(made, slot.name) for slot in spec.tensors]


class Case(NamedTuple):
    launches: int
    tokens: int
    ids: torch.dtype = torch.int64
    weights: torch.dtype = torch.float32
    target: str = TARGET
    tile: int = 8
    gate_up: MatmulSpec = GATE_UP
    down: MatmulSpec = DOWN


HOPPER = "emulator:sm_90a"
IN_I8 = replace(GATE_UP, compute="i8"), replace(DOWN, compute="i8")
IN_E4M3 = replace(GATE_UP, compute="f8e4m3"), replace(DOWN, compute="f8e4m3")
LATER_IN_I8 = replace(GATE_UP, compute="i8", compute_from=2)  # slots of each of the experts
CASES = {
    "one token": Case(4, 1),
    "a few": Case(4, 7, torch.int32, torch.bfloat16),
    "several tiles of an expert": Case(4, 37, weights=torch.float16),
    "i8": Case(6, 7, gate_up=IN_I8[0], down=IN_I8[1]),
    "x alone in i8": Case(5, 5, gate_up=IN_I8[0]),
    "a alone in i8": Case(5, 5, down=IN_I8[1]),
    "i8 from so many slots on": Case(5, 4, gate_up=LATER_IN_I8),
    "not yet as many": Case(4, 3, gate_up=LATER_IN_I8),
    "e4m3": Case(6, 3, target=HOPPER, gate_up=IN_E4M3[0], down=IN_E4M3[1]),
    "rows in order": Case(5, 70, target=HOPPER, tile=128),
    "bytes in order": Case(7, 70, target=HOPPER, tile=128, gate_up=IN_I8[0], down=IN_I8[1]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_between_launches_is_laid_out_for_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits to launches that get tensors of their own."""
    launches, tokens, ids, weights, target, tile, *given = CASES[name]
    specs = [spec_of_experts(spec, EXPERTS) for spec in given]
    stored = [packed(spec) for spec in given]
    x, (chosen, by) = torch.randn(tokens, HIDDEN).bfloat16(), routing(tokens, ids, weights)
    memory = Memory(x, chosen, by, *stored[0], *stored[1])
    matmuls = [Emulated(spec, memory, target) for spec in specs]
    tile, places = max(tile, matmuls[0].tiles[0]), tokens * COUNT
    table = route_by_kernel(chosen, EXPERTS, tile, target)
    a = matmuls[0](x, table.rows, table.tiles, stored[0], tile)
    expected = combine_by_kernel(matmuls[1](a, table.numbers, table.tiles, stored[1], tile, True), table, by, target)

    monkeypatch.setattr(routed, "allocate", memory.allocate)
    monkeypatch.setattr(routed, "current_stream", lambda device: 0)
    monkeypatch.setattr(routed, "gather_kernel", lambda *about: Around(gather_kernel(*about), memory))
    route = Around(route_kernel(places, COUNT, EXPERTS, ids, target), memory)
    combine = Around(combine_kernel(HIDDEN, COUNT, torch.bfloat16, weights, target), memory)
    call = RoutedCall(tokens, COUNT, ids, weights)
    run = RoutedExperts(*matmuls, call, tile, route, combine)  # type: ignore[arg-type]
    y = run(x, chosen, by, *stored)
    assert y.shape == expected.shape and bool((y.view(torch.int16) == expected.view(torch.int16)).all())
    assert y.isfinite().all() and y.any() and memory.launches == launches
    ready = run.prepared(*stored)
    assert torch.equal(ready(x, chosen, by), y) and memory.launches == 2 * launches
    for seed, allocate in enumerate((memory.again, memory.allocate), 1):  # memory at the same place, and elsewhere
        monkeypatch.setattr(routed, "allocate", allocate)
        x, (chosen, by) = torch.randn(tokens, HIDDEN).bfloat16(), routing(tokens, ids, weights, seed)
        memory.tensors += [x, chosen, by]
        assert torch.equal(ready(x, chosen, by), run(x, chosen, by, *stored))
    with pytest.raises(SpecError, match=rf"x must be torch.bfloat16 \[{tokens}, {HIDDEN}\]"):
        run(x[:, :32], chosen, by, *stored)
    with pytest.raises(SpecError, match="one for each id"):
        run(x, chosen, by[:, :1], *stored)


class EmulatedByIds(CudaLaunches):
    """Whose launches take addresses."""

    def __init__(self, spec: MatmulSpec, memory: Memory) -> None:
        super().__init__(spec, parse_target(HOPPER))
        self._memory = memory

    def function(self, device: int) -> Any:
        def launch(*values: int) -> None:
            named = dict(zip(argument_order(self.spec), values, strict=True))
            m = named.pop("m")
            at = self._memory.at(named.values())
            arrays: dict[str, Any] = {name: at[address].numpy() for name, address in named.items()}
            Emulator(self.artifact.ptx).run(self.artifact.launch, {**arrays, "m": m})

        return Launcher(launch)


def test_launches_by_ids_keep_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits to launches that are given all."""
    tokens, gate_up, down = 2, packed(GATE_UP), packed(DOWN)
    top_k = ids_and_weights(COUNT, torch.int64, torch.float32)
    assert top_k is not None
    specs = spec_of_experts(GATE_UP, EXPERTS), spec_of_experts(DOWN, EXPERTS)
    by_ids = top_k_experts_of(specs[0], specs[1], top_k, parse_target(HOPPER))
    assert by_ids is not None and by_ids.prepared(gate_up, down, tokens) is None
    memory = Memory(*gate_up, *down)
    monkeypatch.setattr(top_k_experts, "allocate", memory.allocate)
    monkeypatch.setattr(top_k_experts, "current_stream", lambda device: 0)
    first, second = (EmulatedByIds(launches.spec, memory) for launches in (by_ids._gate_up, by_ids._down))
    ready = PreparedTopK(first, second, gate_up, down, tokens)
    for seed in range(2):
        x, (chosen, by) = torch.randn(tokens, HIDDEN).bfloat16(), routing(tokens, torch.int64, torch.float32, seed)
        chosen[0, 0] = 1
        memory.tensors += [x, chosen, by]
        expected = by_ids(x, chosen, by, gate_up, down)
        assert torch.equal(ready(x, chosen, by), expected) and expected.any()
    assert memory.launches == 4


def test_what_is_taken() -> None:
    call = RoutedCall(4, COUNT, torch.int64, torch.float32)

    def served(gate_up: MatmulSpec, down: MatmulSpec, target: str, call: RoutedCall = call) -> bool:
        first, second = (ExpertMatmul(spec_of_experts(spec, EXPERTS), parse_target(target)) for spec in (gate_up, down))
        return routed_experts(first, second, call, 8) is not None

    assert served(GATE_UP, DOWN, "sm_80") and served(GATE_UP, DOWN, "sm_90a")
    assert not served(GATE_UP, DOWN, TARGET) and not served(GATE_UP, DOWN, "cpu")
    assert not served(replace(GATE_UP, epilogue=None), DOWN, "sm_80")  # torch applies the gate
    assert not served(replace(GATE_UP, permuted=True), DOWN, "sm_80")  # a launch permutes x
    assert not served(GATE_UP, replace(DOWN, permuted=True), "sm_80")
    assert served(GATE_UP, replace(DOWN, compute="i8"), "sm_80")
    assert served(replace(GATE_UP, compute="i8", compute_from=64), replace(DOWN, compute="f8e4m3"), "sm_90a")
    assert not served(GATE_UP, DOWN, "sm_80", call._replace(tokens=0))
    assert not served(GATE_UP, DOWN, "sm_80", call._replace(tokens=1 << 18))
