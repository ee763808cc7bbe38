"""The kernel that brings rows of x into the orders of experts, in the emulator with its look for races."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit.dialect.errors import EmulatorError
from lowbit.passes.builder import Program
from lowbit.passes.kernels import permute_slots as kernel_module
from lowbit.passes.kernels.permute.family import FEW_ROWS, default_schedule, permute_spec
from lowbit.passes.kernels.permute_slots import permute_slots_program
from lowbit.passes.targets import parse_target
from lowbit.pylib.experts.by_kernel import permute_by_kernel
from lowbit.pylib.experts.routing import Routing, route

EXPERTS = 5
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
UNWRITTEN = 0x55AA


def problem(tokens: int, k: int, tile: int, act: str = "f16") -> tuple[Tensor, Tensor, Tensor, Routing]:
    """x, the order of each expert, the expert of each slot, and where the slots are; some are of no expert."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, EXPERTS + 1, (tokens, 3), generator=generator)
    experts = ids.flatten().clamp(-1, EXPERTS).remainder(EXPERTS + 1).sort().values
    orders = torch.stack([torch.randperm(k, generator=generator) for _ in range(EXPERTS)]).int()
    x = torch.randn(tokens, k, generator=generator).to(DTYPES[act])
    return x, orders, experts, route(ids, EXPERTS, tile)


def defined(x: Tensor, orders: Tensor, experts: Tensor, routing: Routing) -> Tensor:
    """What the rows of slots of experts must be."""
    here = experts < EXPERTS
    return x[routing.rows[here].long()].gather(1, orders[experts[here].long()].long())


def is_right(
    tokens: int, k: int, tile: int = 16, target: str = "emulator:sm_80", act: Any = "f16", many: int = 0
) -> bool:
    """Whether slots of experts have the right rows, all others are as they were, and every slot has its number."""
    x, orders, experts, routing = problem(tokens, k, tile, act)
    schedule = default_schedule(permute_spec(k, act), FEW_ROWS + many, parse_target(target))
    kernel = lowbit.compile_program(partial(permute_slots_program, k, act, EXPERTS, schedule), target)
    slots = len(experts)
    y = torch.full((slots, k), UNWRITTEN, dtype=torch.int16)
    numbers = torch.full((slots,), UNWRITTEN, dtype=torch.int32)
    given = {"x": x, "permutation": orders, "rows": routing.rows, "tiles": routing.tiles, "numbers": numbers}
    kernel(**given, y=y.view(x.dtype), m=slots, tile=tile)
    here = experts < EXPERTS
    same = torch.equal(y[here].view(x.dtype), defined(x, orders, experts, routing))
    return same and bool((y[~here] == UNWRITTEN).all()) and torch.equal(numbers, torch.arange(slots).int())


@pytest.mark.parametrize(
    ("tokens", "k", "tile"), [(1, 64, 8), (7, 256, 64), (65, 2880, 16), (40, 16, 192), (3, 70000, 8)]
)
def test_few_slots(tokens: int, k: int, tile: int) -> None:
    """Rows of one piece, of several parts, and of more columns than shared memory holds."""
    assert is_right(tokens, k, tile)


@pytest.mark.parametrize(("tokens", "k", "tile"), [(65, 264, 64), (40, 4104, 8), (9, 12296, 16)])
def test_many_slots(tokens: int, k: int, tile: int) -> None:
    """Several slots of a tile share the order that is loaded, also where the tile ends between them."""
    assert is_right(tokens, k, tile, many=1)


@pytest.mark.parametrize("many", [0, 1])
def test_on_hopper(many: int) -> None:
    assert is_right(33, 512, 32, "emulator:sm_90a", "bf16", many)


@pytest.mark.parametrize("tokens", [0, 1, 90])
def test_calls(tokens: int) -> None:
    x, orders, experts, routing = problem(tokens, 128, 16)
    y, numbers = permute_by_kernel(x, orders.flatten(), routing.rows, routing.tiles, 16, "emulator:sm_80")
    assert torch.equal(y[experts < EXPERTS], defined(x, orders, experts, routing))
    assert torch.equal(numbers, torch.arange(3 * tokens, dtype=torch.int32))


# -- that these tests can fail

BLOCK = kernel_module._Block
PIECE, ROWS = BLOCK._permute_piece, BLOCK._rows
MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "the order of another": (BLOCK, "_permute_piece", lambda self, expert, *rest: PIECE(self, expert * 0, *rest)),
    "rows of the first slots": (BLOCK, "_rows", lambda self, first, end: ROWS(self, first * 0, end)),
    "no barriers": (Program, "barrier", lambda self: None),
    "no numbers": (kernel_module, "_write_numbers", lambda p, threads: None),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutations_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[what])
    right = False
    with contextlib.suppress(EmulatorError):
        right = is_right(65, 1032, many=1)
    assert not right
