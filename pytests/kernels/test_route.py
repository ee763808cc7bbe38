"""The kernel that sorts places of tokens by expert, in the emulator: bit by bit what `route` makes in torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit.dialect.errors import EmulatorError
from lowbit.passes.builder import Program
from lowbit.passes.kernels import route as kernel_module
from lowbit.passes.kernels.experts.schedule import short_slots
from lowbit.passes.kernels.route import route_program
from lowbit.pylib.experts import by_kernel
from lowbit.pylib.experts.by_kernel import route_by_kernel
from lowbit.pylib.experts.routing import Routing, route
from lowbit.pylib.runtime.kernel import Kernel

TARGET, HOPPER = "emulator:sm_80", "emulator:sm_90a"


@lru_cache(maxsize=None)
def compiled(top_k: int, experts: int, words: int, target: str = TARGET, cluster: int = 1) -> Kernel:
    """The kernel, with a look for races."""
    return lowbit.compile_program(lambda: route_program(top_k, experts, words, cluster), target)


def run(kernel: Kernel, ids: Tensor, tile: int) -> Routing:
    """What a kernel makes in memory that held something else."""
    places = ids.numel()
    shapes = (places,), (places,), (places + 1, 3), tuple(ids.shape)
    rows, numbers, tiles, slots = (torch.full(shape, 0x55AA, dtype=torch.int32) for shape in shapes)
    words = ids.contiguous().view(torch.int32)
    sizes = {"m": len(ids), "tile": tile, "short": short_slots(tile)}
    kernel(ids=words, rows=rows, numbers=numbers, slots=slots, tiles=tiles, **sizes)
    return Routing(rows, numbers, tiles, slots)


def assert_same(found: Routing, expected: Routing) -> None:
    for name in ("rows", "numbers", "tiles", "slots", "elsewhere"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert mine.dtype is theirs.dtype and torch.equal(mine, theirs), name


def is_right(ids: Tensor, experts: int, tile: int, target: str = TARGET, cluster: int = 1) -> bool:
    kernel = compiled(ids.shape[1], experts, ids.element_size() // 4, target, cluster)
    found, expected = run(kernel, ids, tile), route(ids, experts, tile)
    return all(torch.equal(*pair) for pair in zip(vars(found).values(), vars(expected).values(), strict=True))


def any_ids(tokens: int, top_k: int, experts: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Ids of experts, some more than once in a token, and some that are none."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(-1, experts + 1, (tokens, top_k), generator=generator).to(dtype)


@pytest.mark.parametrize("tokens", [1, 7, 63, 64, 65, 255, 257, 513])
def test_numbers_of_places(tokens: int) -> None:
    """Pieces are of 64, and every block takes several where there are many."""
    assert is_right(any_ids(tokens, 1, 8), 8, (16, 48, 192)[tokens % 3])


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "tile"),
    [
        *((3, 1, 1, 16), (4099, 1, 8, 192), (33, 8, 128, 16), (26, 10, 512, 16), (9, 16, 31, 64), (5, 3, 32, 1)),
        *((160, 4, 4, 128), (150, 4, 40, 256), (650, 1, 4, 128)),
    ],
)
def test_numbers_of_experts(tokens: int, top_k: int, experts: int, tile: int) -> None:
    assert is_right(any_ids(tokens, top_k, experts, torch.int32), experts, tile)


ROUTINGS: dict[str, Callable[[], Tensor]] = {
    "all to one": lambda: torch.full((90, 8), 100),
    "all to the last": lambda: torch.full((20, 8), 127),
    "none here": lambda: torch.full((9, 8), -1),
    "the same twice": lambda: torch.tensor([[3, 3, 0, 3, 0, 127, 3, 0]]),
    "the last first": lambda: torch.arange(127, -1, -1).view(16, 8),
    "64 bits": lambda: torch.tensor([[5, (1 << 32) + 5, 5 - (1 << 32), 1 << 31, -(1 << 63), (1 << 63) - 1, 128, 0]]),
}


@pytest.mark.parametrize("cluster", [1, 8])
@pytest.mark.parametrize("name", ROUTINGS)
def test_any_routing(name: str, cluster: int) -> None:
    assert is_right(ROUTINGS[name](), 128, 16, HOPPER if cluster > 1 else TARGET, cluster)


# Clusters of 2 are two in the emulator, and of 8 one. A block's share is more than a piece, and more than is counted at
# once; it ends within a part; and blocks have none.
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "tile", "cluster"),
    [
        *((1, 1, 1, 16, 2), (130, 2, 8, 16, 2), (321, 4, 130, 48, 2), (1100, 2, 8, 96, 2), (2600, 1, 40, 128, 2)),
        *((3, 8, 128, 16, 8), (65, 16, 512, 16, 8), (700, 1, 4, 144, 8), (563, 8, 64, 64, 8), (9, 2, 1024, 8, 2)),
    ],
)
def test_blocks_that_count_together(tokens: int, top_k: int, experts: int, tile: int, cluster: int) -> None:
    assert is_right(any_ids(tokens, top_k, experts), experts, tile, HOPPER, cluster)


def test_many_places_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = any_ids(6149, 2, 8)
    asked = list[int]()

    def program(top_k: int, experts: int, words: int, cluster: int) -> Program:
        asked.append(cluster)
        return route_program(top_k, experts, words, cluster)

    monkeypatch.setattr(kernel_module, "route_program", program)
    by_kernel._route_kernel.cache_clear()
    for target, tokens in ((HOPPER, 6149), (HOPPER, 6144), (TARGET, 6149)):
        assert_same(route_by_kernel(ids[:tokens], 8, 96, target), route(ids[:tokens], 8, 96))
    assert asked == [2, 1, 1]
    by_kernel._route_kernel.cache_clear()


def test_on_hopper() -> None:
    """There it may start before the kernel in front of it has ended."""
    assert is_right(any_ids(70, 4, 16), 16, 32, HOPPER)
    assert compiled(4, 16, 2, HOPPER).launch.may_overlap and compiled(2, 8, 2, HOPPER, 8).launch.may_overlap


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_at_any_address(dtype: torch.dtype) -> None:
    """Slices, columns, and every other token."""
    ids = any_ids(20, 5, 8, dtype)
    for index in (ids[1:, :2], ids[::3, 1:3], ids.t()[:, :2], ids[3:9, 2:4].t().contiguous().t()):
        assert_same(route_by_kernel(index, 8, 16, TARGET), route(index, 8, 16))


@pytest.mark.parametrize(("tokens", "experts"), [(0, 8), ((1 << 17) + 1, 8), (3, 1025)])
def test_what_torch_sorts(tokens: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokens, more places than blocks count, and more experts than a thread has registers for."""
    monkeypatch.delattr(kernel_module, "route_program")
    ids = any_ids(tokens, 2, experts)
    assert_same(route_by_kernel(ids, experts, 16, TARGET), route(ids, experts, 16))


def test_index_that_does_not_fit() -> None:
    with pytest.raises(lowbit.SpecError, match=r"top_k_index must be \[tokens, k\], not \[2\]"):
        route_by_kernel(torch.zeros(2, dtype=torch.int64), 4, 16, TARGET)


# -- that these tests can fail


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "no order in a piece": (kernel_module._Block, "_before_in_part", lambda self, expert: expert * 0),
    "places beyond the end": (kernel_module._Block, "_of_places", lambda self, place, index, end: index),
    "no barriers": (Program, "barrier", lambda self, scope="block": None),
    "no order of parts": (
        kernel_module._Block,
        "_start_parts",
        lambda self: [
            self.p.store(
                self.p.load(self.before, (0, 0), kernel_module._over(self.width)), self.starts, (0, part * self.width)
            )
            for part in range(self.parts)
        ],
    ),
}


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("what", MUTATIONS)
def test_mutations_are_found(what: str, cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[what])
    ids, right = any_ids(330, 2, 8), False
    with contextlib.suppress(EmulatorError, AssertionError):
        target = HOPPER if cluster > 1 else TARGET
        found = run(lowbit.compile_program(lambda: route_program(2, 8, 2, cluster), target), ids, 16)
        assert_same(found, route(ids, 8, 16))
        right = True
    assert not right
