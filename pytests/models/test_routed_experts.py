"""The four launches of routed experts as a GPU gets them: by addresses, in memory that is laid out for all of them. The
emulator runs what is launched here, and finds the tensors that addresses are in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

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
from lowbit.pylib.experts.by_kernel import combine_by_kernel, combine_kernel, route_by_kernel, route_kernel
from lowbit.pylib.experts.routed import RoutedCall, RoutedExperts, routed_experts
from lowbit.pylib.reference.inputs import random_inputs
from lowbit.pylib.runtime import kernel as kernels
from lowbit.pylib.runtime.expert_matmul import ExpertMatmul, spec_of_experts
from lowbit.pylib.runtime.interface import argument_order

HIDDEN, WIDTH, EXPERTS, COUNT = 64, 32, 4, 2
TARGET = "emulator:sm_80"
GATE_UP = MatmulSpec(2 * WIDTH, HIDDEN, "u4", 32, zeros="int", act="bf16", out="bf16", epilogue="silu_mul")
DOWN = MatmulSpec(HIDDEN, WIDTH, "u4", 32, zeros="int", act="bf16", out="bf16")


class Memory:
    """The tensors that a call may touch."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = list(tensors)

    def allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # From some address that is a multiple of 128 on, as those of GPUs are, and full of what no kernel may leave.
        size = int(np.prod(shape)) * dtype.itemsize
        whole = torch.full((size + 128,), 0xFF, dtype=torch.uint8)
        begin = -whole.data_ptr() % 128
        self.tensors.append(whole[begin : begin + size])
        return self.tensors[-1].view(dtype).view(shape)

    def at(self, addresses: Iterable[int]) -> dict[int, Tensor]:
        """Returns the bytes from each address to the next of them, or to the end of the tensor that it is in."""
        begins, found = sorted(set(addresses)), dict[int, Tensor]()
        for begin, after in zip(begins, [*begins[1:], 1 << 63]):
            flat = (tensor.view(-1).view(torch.uint8) for tensor in self.tensors)
            inside = [each for each in flat if 0 <= begin - each.data_ptr() < each.numel()]
            assert inside, f"a launch was given {begin:#x}, where nothing is"
            offset = begin - inside[0].data_ptr()
            found[begin] = inside[0][offset : offset + after - begin]
        return found


class Emulated(ExpertMatmul):
    """Whose launches take addresses."""

    def __init__(self, spec: MatmulSpec, memory: Memory) -> None:
        super().__init__(spec, parse_target(TARGET))
        self._memory = memory

    def launcher(self, device: int, tile: int, slots: int) -> Any:
        artifact = self.kernel(tile, slots)

        def launch(stream: int, overlap: bool, *values: int) -> None:
            named = dict(zip(argument_order(self.spec), values, strict=True))
            m = named.pop("m")
            at = self._memory.at(named.values())
            arrays = {name: at[address].numpy() for name, address in named.items()}
            workspace = np.zeros(artifact.launch.workspace_bytes, np.uint8)
            Emulator(artifact.ptx).run(artifact.launch, {**arrays, WORKSPACE: workspace, "m": m})

        return launch


class Around:
    """A kernel beside the matmuls, likewise."""

    def __init__(self, kernel: kernels.Kernel | None, memory: Memory) -> None:
        assert kernel is not None
        self._kernel, self._memory = kernel, memory

    def function(self, device: int) -> Callable[..., None]:
        def launch(stream: int, overlap: bool, *values: int) -> None:
            kinds = [param.kind for param in self._kernel.launch.arguments]
            at = self._memory.at(value for kind, value in zip(kinds, values) if kind == "pointer")
            self._kernel.start(*(at[v] if kind == "pointer" else v for kind, v in zip(kinds, values, strict=True)))

        return launch


def routing(tokens: int, ids: torch.dtype = torch.int64, weights: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.randint(-1, EXPERTS + 1, (tokens, COUNT), generator=generator).to(ids)
    return chosen, torch.rand(tokens, COUNT, generator=generator).to(weights)


@pytest.mark.parametrize(
    ("tokens", "ids", "weights"),
    [(1, torch.int64, torch.float32), (7, torch.int32, torch.bfloat16), (37, torch.int64, torch.float16)],
)
def test_what_is_between_launches_is_laid_out_for_all(
    tokens: int, ids: torch.dtype, weights: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bits to launches that get tensors of their own."""
    specs = [spec_of_experts(spec, EXPERTS) for spec in (GATE_UP, DOWN)]
    stored = []
    for spec in specs:
        dense = replace(spec, experts=1, epilogue=None)
        _, weight = random_inputs(dense, 1)
        stored.append([getattr(lowbit.compile(dense, target="cpu").pack(**weight), slot.name) for slot in spec.tensors])
    x, (chosen, by) = torch.randn(tokens, HIDDEN).bfloat16(), routing(tokens, ids, weights)
    memory = Memory(x, chosen, by, *stored[0], *stored[1])
    matmuls = [Emulated(spec, memory) for spec in specs]
    tile, places = matmuls[0].tiles[0], tokens * COUNT
    table = route_by_kernel(chosen, EXPERTS, tile, TARGET)
    a = matmuls[0](x, table.rows, table.tiles, stored[0], tile)
    expected = combine_by_kernel(matmuls[1](a, table.numbers, table.tiles, stored[1], tile, True), table, by, TARGET)

    monkeypatch.setattr(routed, "allocate", memory.allocate)
    monkeypatch.setattr(routed, "current_stream", lambda device: 0)
    route = Around(route_kernel(places, COUNT, EXPERTS, ids, TARGET), memory)
    combine = Around(combine_kernel(HIDDEN, COUNT, torch.bfloat16, weights, TARGET), memory)
    call = RoutedCall(tokens, COUNT, ids, weights)
    run = RoutedExperts(*matmuls, call, tile, route, combine)  # type: ignore[arg-type]
    y = run(x, chosen, by, *stored)
    assert y.shape == expected.shape and bool((y.view(torch.int16) == expected.view(torch.int16)).all())
    with pytest.raises(SpecError, match=rf"x must be torch.bfloat16 \[{tokens}, {HIDDEN}\]"):
        run(x[:, :32], chosen, by, *stored)
    with pytest.raises(SpecError, match="one for each id"):
        run(x, chosen, by[:, :1], *stored)


def test_only_calls_of_four_launches_are_taken() -> None:
    call = RoutedCall(4, COUNT, torch.int64, torch.float32)

    def served(gate_up: MatmulSpec, down: MatmulSpec, target: str, call: RoutedCall = call) -> bool:
        first, second = (ExpertMatmul(spec_of_experts(spec, EXPERTS), parse_target(target)) for spec in (gate_up, down))
        return routed_experts(first, second, call, 8) is not None

    assert served(GATE_UP, DOWN, "sm_80") and served(GATE_UP, DOWN, "sm_90a")
    assert not served(GATE_UP, DOWN, TARGET) and not served(GATE_UP, DOWN, "cpu")
    assert not served(replace(GATE_UP, epilogue=None), DOWN, "sm_80")  # torch applies the gate
    assert not served(replace(GATE_UP, permuted=True), DOWN, "sm_80")  # a launch permutes x
    assert not served(GATE_UP, replace(DOWN, compute="i8"), "sm_80")  # one quantizes it
    assert not served(GATE_UP, DOWN, "sm_80", call._replace(tokens=0))
    assert not served(GATE_UP, DOWN, "sm_80", call._replace(tokens=1 << 17))
