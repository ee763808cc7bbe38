"""The routing of tokens to experts, the rows of x in the order of slots, or in the order of columns that an expert may
have, and the sum of what experts make of tokens, by a kernel each (`passes.kernels.route`, `gather_rows`,
`permute_slots` and `combine`).

`routing.py` has the first and the last in operations of torch, of which `route` takes some thirty and `combine` a
dozen.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from lowbit.dialect.spec import Act
from lowbit.passes.kernels.experts.schedule import short_slots
from lowbit.passes.kernels.permute.family import FEW_ROWS, default_schedule, permute_spec
from lowbit.passes.targets import parse_target
from lowbit.pylib.experts.routing import Routing, check_index, combine, route
from lowbit.pylib.runtime.driver import on_device
from lowbit.pylib.runtime.own_kernels import aligned, own_kernel, unwritten_like

if TYPE_CHECKING:
    from lowbit.pylib.runtime.kernel import Kernel

_ELEMENTS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
_PIECE = 8  # columns that a thread reads at once
_FEW_PLACES = 12288  # which each block counts by itself; more are counted by clusters
_MOST_PLACES = 1 << 18
_MOST_EXPERTS = 1024  # a thread has an eighth of them in registers


def route_by_kernel(top_k_index: Tensor, experts: int, tile: int, target: str) -> Routing:
    """Returns what `route` returns, bit by bit. More than 2^18 places or 1024 experts go there, and no tokens do, and
    all on a CPU.

    target   of the device that top_k_index is on, or of an emulator

    Raises SpecError as `route` does.
    """
    check_index(top_k_index, experts, tile)
    (tokens, k), places = top_k_index.shape, top_k_index.numel()
    kernel = route_kernel(places, k, experts, top_k_index.dtype, target)
    if kernel is None:
        return route(top_k_index, experts, tile)
    ids = aligned(top_k_index)
    shapes = (places,), (places,), (places + 1, 3), (tokens, k)
    with on_device(ids.get_device()):
        rows, numbers, tiles, slots = (unwritten_like(shape, ids, torch.int32) for shape in shapes)
        kernel.start(ids, rows, numbers, slots, tiles, tokens, tile, short_slots(tile))
    return Routing(rows, numbers, tiles, slots)


def permute_by_kernel(
    x: Tensor, permutation: Tensor, rows: Tensor, tiles: Tensor, tile: int, target: str
) -> tuple[Tensor, Tensor]:
    """Returns x[rows[s], permutation[e]] for each slot s of an expert e, [slots, k], and the numbers of slots, i32
    [slots]. Rows of slots in no token tile hold anything.

    x            [rows, k], contiguous and at a multiple of 16 bytes
    permutation  i32 [experts k]
    rows, tiles  of a `Routing` to token tiles of up to `tile` slots
    target       a GPU or an emulator
    """
    slots, k = len(rows), x.shape[1]
    kernel = _permute_kernel(k, cast(Act, _ELEMENTS[x.dtype]), len(permutation) // k, slots > FEW_ROWS, target)
    with on_device(x.get_device()):
        y, numbers = unwritten_like((slots, k), x), unwritten_like((slots,), x, torch.int32)
        if slots:
            kernel.start(x, permutation, rows, tiles, y, numbers, slots, tile)
    return y, numbers


def gather_by_kernel(x: Tensor, rows: Tensor, target: str) -> Tensor:
    """Returns x[rows[s]] for each slot s, [slots, k].

    x       [rows, k] of 16 or 8 bits, contiguous and at a multiple of 16 bytes; a row is a multiple of 16 bytes
    rows    i32 [slots]
    target  a GPU or an emulator
    """
    slots, words = len(rows), x.view(torch.float16)
    kernel = gather_kernel(2 * words.shape[1], target)
    with on_device(x.get_device()):
        y = unwritten_like((slots, words.shape[1]), words)
        if slots:
            kernel.start(words, rows, y, slots)
    return y.view(x.dtype)


def combine_by_kernel(o: Tensor, routing: Routing, top_k_weights: Tensor, target: str) -> Tensor:
    """Returns what `combine` returns, up to the rounding of f32. Columns that are no multiple of 8 go there, and all on
    a CPU.

    target   of the device that o is on, or of an emulator

    Raises SpecError as `combine` does.
    """
    (tokens, top_k), hidden = routing.slots.shape, o.shape[-1]
    kernel = combine_kernel(hidden, top_k, o.dtype, top_k_weights.dtype, target)
    if kernel is None or not tokens or top_k_weights.shape != routing.slots.shape:
        return combine(o, routing, top_k_weights)
    weights = aligned(top_k_weights)
    with on_device(o.get_device()):
        y = unwritten_like((tokens, hidden), o)
        kernel.start(aligned(o), routing.slots, routing.tiles, weights, y, tokens)
    return y


def route_kernel(places: int, top_k: int, experts: int, ids: torch.dtype, target: str) -> Kernel | None:
    """Returns the kernel that routes so many places of tokens with `top_k` experts, which takes the arguments of
    `route_program`; None where `route` does. ids: int32 or int64."""
    if not 0 < places <= _MOST_PLACES or experts > _MOST_EXPERTS or target == "cpu":
        return None
    together = places > _FEW_PLACES and parse_target(target).has_clusters
    return _route_kernel(top_k, experts, ids.itemsize // 4, together, target)


def gather_kernel(row_bytes: int, target: str) -> Kernel:
    """Returns the kernel that writes rows of x in the order of slots, which takes the arguments of
    `gather_rows_program`.

    row_bytes  of a row of x, a multiple of 16
    target     a GPU or an emulator
    """
    return _gather_kernel(row_bytes // 2, target)


def combine_kernel(hidden: int, top_k: int, o: torch.dtype, weights: torch.dtype, target: str) -> Kernel | None:
    """Returns the kernel that adds up what experts make, which takes the arguments of `combine_program`; None where
    `combine` does."""
    types = _ELEMENTS.get(o), _ELEMENTS.get(weights)
    if target == "cpu" or None in types or hidden % _PIECE:
        return None
    return _combine_kernel(hidden, top_k, *types, target)


@lru_cache(maxsize=64)
def _route_kernel(top_k: int, experts: int, words: int, together: bool, target: str) -> Kernel:
    from lowbit.passes.kernels.route import CLUSTER, route_program

    return own_kernel(partial(route_program, top_k, experts, words, CLUSTER if together else 1), target)


@lru_cache(maxsize=64)
def _permute_kernel(k: int, act: Act, experts: int, many: bool, target: str) -> Kernel:
    from lowbit.passes.kernels.permute_slots import permute_slots_program

    schedule = default_schedule(permute_spec(k, act), FEW_ROWS + many, parse_target(target))
    return own_kernel(partial(permute_slots_program, k, act, experts, schedule), target)


@lru_cache(maxsize=64)
def _gather_kernel(k: int, target: str) -> Kernel:
    from lowbit.passes.kernels.gather_rows import gather_rows_program

    return own_kernel(partial(gather_rows_program, k), target)


@lru_cache(maxsize=64)
def _combine_kernel(hidden: int, top_k: int, element: str, weights: str, target: str) -> Kernel:
    from lowbit.passes.kernels.combine import combine_program

    return own_kernel(partial(combine_program, hidden, top_k, element, weights), target)
