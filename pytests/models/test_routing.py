"""`route` and `combine`: slots of tokens sorted by expert, and the sum of what experts make of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lowbit import SpecError
from lowbit.pylib.experts.by_kernel import combine_by_kernel
from lowbit.pylib.experts.routing import Routing, combine, route

Ids = NDArray[np.int64]


@st.composite
def routings(draw: st.DrawFn) -> tuple[Ids, int, int]:
    """Ids of any routing, some of them of no expert; the number of experts; and the slots of a token tile."""
    tokens, k, experts = draw(st.integers(0, 40)), draw(st.integers(1, 10)), draw(st.integers(1, 12))
    ids = st.integers(-3, experts + 3) if draw(st.booleans()) else st.integers(0, experts - 1)
    found = draw(st.lists(ids, min_size=tokens * k, max_size=tokens * k))
    return np.array(found, np.int64).reshape(tokens, k), experts, draw(st.sampled_from([1, 2, 3, 16, 128]))


def defined(ids: Ids, experts: int, tile: int) -> tuple[list[int], list[list[int]]]:
    """The definition of rows and tiles, number by number."""
    flat = ids.reshape(-1).tolist()
    order = [i for expert in range(experts) for i, own in enumerate(flat) if own == expert]
    rows = [i // ids.shape[1] for i in order] + [
        i // ids.shape[1] for i, own in enumerate(flat) if not 0 <= own < experts
    ]
    tiles: list[list[int]] = []
    first = 0
    for expert in range(experts):
        end = first + flat.count(expert)
        tiles += [[expert, slot, min(slot + tile, end)] for slot in range(first, end, tile)]
        first = end
    short = [each for each in tiles if tile == 128 and each[2] - each[1] <= 32]
    table = [[len(tiles), first, len(short)], *(each for each in tiles if each not in short), *short]
    return rows, table + [[0, 0, 0]] * (len(flat) + 1 - len(table))


@settings(max_examples=300, deadline=None)
@given(routings(), st.sampled_from([torch.int32, torch.int64]))
def test_rows_and_tiles_are_those_of_the_definition(problem: tuple[Ids, int, int], dtype: torch.dtype) -> None:
    ids, experts, tile = problem
    found = route(torch.from_numpy(ids).to(dtype), experts, tile)
    rows, tiles = defined(ids, experts, tile)
    assert found.rows.tolist() == rows and found.tiles.tolist() == tiles
    assert found.numbers.tolist() == list(range(len(rows)))
    assert found.rows.dtype is found.tiles.dtype is torch.int32 and found.tiles.is_contiguous()


@settings(max_examples=200, deadline=None)
@given(routings())
def test_every_place_has_a_slot_of_its_own(problem: tuple[Ids, int, int]) -> None:
    """The slot reads the row of its token, and is in the tile of its expert; places elsewhere are in none."""
    ids, experts, tile = problem
    found = route(torch.from_numpy(ids), experts, tile)
    assert sorted(found.slots.flatten().tolist()) == list(range(ids.size))
    expert_of = np.full(ids.size, -1)
    for expert, first, end in found.tiles[1 : 1 + int(found.tiles[0, 0])].tolist():
        assert first < end <= first + tile and (expert_of[first:end] == -1).all()
        expert_of[first:end] = expert
    for (token, place), slot in np.ndenumerate(found.slots.numpy()):
        here = 0 <= ids[token, place] < experts
        assert found.rows[slot] == token and bool(found.elsewhere[token, place]) != here
        assert expert_of[slot] == (ids[token, place] if here else -1)


@pytest.mark.parametrize("tokens", [0, 1, 1 << 17])
def test_many_tokens_and_none(tokens: int) -> None:
    """2^20 slots, whose counts NumPy finds."""
    ids = torch.randint(-1, 129, (tokens, 8), generator=torch.Generator().manual_seed(0))
    found = route(ids, 128, 64)
    counts = np.bincount(ids.flatten().numpy() % 129, minlength=129)[:128]
    assert int(found.tiles[0, 0]) == int((-(-counts // 64)).sum())
    tiles = found.tiles[1 : 1 + int(found.tiles[0, 0])].long()
    held = torch.zeros(128, dtype=torch.int64).index_add_(0, tiles[:, 0], tiles[:, 2] - tiles[:, 1])
    assert held.tolist() == counts.tolist() and not found.tiles[1 + len(tiles) :].any()


def test_more_experts_than_16_bits_count() -> None:
    ids = torch.tensor([[39999, 3], [40000, 39999]])
    assert route(ids, 40000, 16).tiles.tolist()[:3] == [[2, 3, 0], [3, 0, 1], [39999, 1, 3]]


def problem_of(tokens: int, k: int, hidden: int, experts: int) -> tuple[Tensor, Routing, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts + 1, (tokens, k), generator=generator)
    routing = route(ids, experts, 16)
    o = torch.randn(tokens * k, hidden, generator=generator).bfloat16()
    o[routing.slots[routing.elsewhere]] = torch.tensor([torch.nan, torch.inf]).repeat(hidden)[:hidden].bfloat16()
    return o, routing, torch.rand(tokens, k, generator=generator)


@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (1, 1), (7, 2), (33, 8), (5, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_that_of_the_definition(tokens: int, k: int, dtype: torch.dtype) -> None:
    """In f64, rounded once; places elsewhere add 0, though their rows hold NaN and infinities."""
    o, routing, weights = problem_of(tokens, k, 48, 5)
    weights = weights.to(dtype)
    wide, here = o.double().nan_to_num(0, 0, 0)[routing.slots], ~routing.elsewhere
    expected = (wide * (weights.double() * here).unsqueeze(-1)).sum(1)
    found = combine(o, routing, weights)
    assert found.dtype is o.dtype and found.shape == (tokens, 48)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)


def test_weights_elsewhere_are_not_looked_at() -> None:
    o, routing, weights = problem_of(9, 4, 16, 3)
    expected = combine(o, routing, weights)
    assert torch.equal(combine(o, routing, weights.masked_fill(routing.elsewhere, torch.nan)), expected)


def test_zero_times_infinity_is_nan() -> None:
    routing = route(torch.tensor([[0, 1], [1, 0]]), 2, 16)
    o = torch.ones(4, 16)
    o[routing.slots[0, 1]] = torch.inf
    found = combine(o, routing, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert found[0].isnan().all() and (found[1] == 1).all()


def test_a_row_depends_on_no_other() -> None:
    """Each token's sum is to the last bit what it is alone."""
    o, routing, weights = problem_of(33, 8, 64, 6)
    whole = combine(o, routing, weights)
    for token in range(33):
        here = slice(token, token + 1)
        alone = replace(routing, slots=routing.slots[here])
        assert torch.equal(combine(o, alone, weights[here])[0], whole[token])


def test_shapes_may_be_traced() -> None:
    """torch.compile finds no size that depends on values, and one graph serves any number of tokens."""

    def layer(ids: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        routing = route(ids, 4, 16)
        return combine(x[routing.rows.long()], routing, weights)

    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for tokens in (3, 8, 21):
        ids, x = torch.randint(-1, 5, (tokens, 2)), torch.randn(tokens, 16)
        weights = torch.rand(tokens, 2)
        assert torch.equal(compiled(ids, x, weights), layer(ids, x, weights))


@pytest.mark.parametrize(
    ("ids", "experts", "tile", "message"),
    [
        (torch.zeros(2, 2), 4, 16, "top_k_index is torch.float32; it must be torch.int64 or torch.int32"),
        ([[0]], 4, 16, "top_k_index is list"),
        (torch.zeros(2, dtype=torch.int64), 4, 16, r"top_k_index must be \[tokens, k\], not \[2\]"),
        (torch.zeros(2, 2, dtype=torch.int64), 0, 16, "experts=0 must be at least 1"),
        (torch.zeros(2, 2, dtype=torch.int64), 4, 0, "tile=0 must be at least 1"),
    ],
)
def test_index_that_does_not_fit(ids: Tensor, experts: int, tile: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        route(ids, experts, tile)


def test_weights_that_do_not_fit() -> None:
    routing = route(torch.zeros(2, 2, dtype=torch.int64), 4, 16)
    with pytest.raises(SpecError, match=r"top_k_weights must be \[2, 2\], one for each id of top_k_index, not \[2\]"):
        combine(torch.zeros(4, 16), routing, torch.zeros(2))


# -- the kernel that adds up


@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(1, 1, 8), (5, 2, 64), (3, 8, 520), (2, 3, 1024)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_kernel_adds_up_the_same(tokens: int, top_k: int, hidden: int, dtype: torch.dtype) -> None:
    """Elsewhere is what is no number, in rows and weights alike: it adds nothing."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, 5, (tokens, top_k), generator=generator)
    routing, weights = route(ids, 4, 16), torch.rand(tokens, top_k, generator=generator)
    o = torch.randn(tokens * top_k, hidden, generator=generator).to(dtype)
    o[routing.slots[routing.elsewhere]] = torch.nan
    weights[routing.elsewhere] = torch.inf
    found = combine_by_kernel(o, routing, weights, "emulator:sm_80")
    torch.testing.assert_close(found, combine(o, routing, weights), rtol=1e-6 if dtype is torch.float32 else 0, atol=0)


def test_a_kernel_keeps_what_is_no_number_in_its_token() -> None:
    ids, weights = torch.tensor([[0, 1], [1, 2], [2, 0]]), torch.ones(3, 2)
    routing, o = route(ids, 3, 16), torch.ones(6, 16)
    o[routing.slots[1, 0]] = torch.nan
    found = combine_by_kernel(o, routing, weights, "emulator:sm_80")
    assert found.isnan().any(1).tolist() == [False, True, False] and (found[0] == 2).all()


def test_a_kernel_takes_slices_at_any_address() -> None:
    ids, weights, o = torch.tensor([[0, 1, 1]] * 3), torch.rand(4, 3), torch.randn(9, 16)
    routing = route(ids, 2, 16)
    found = combine_by_kernel(o, routing, weights[1:], "emulator:sm_80")
    assert torch.equal(found, combine(o, routing, weights[1:]))


def test_columns_that_no_kernel_has() -> None:
    ids, weights = torch.tensor([[0, 1]]), torch.ones(1, 2)
    o = torch.randn(2, 12)
    routing = route(ids, 2, 16)
    found = combine_by_kernel(o, routing, weights, "emulator:sm_80")
    assert torch.equal(found, combine(o, routing, weights))
