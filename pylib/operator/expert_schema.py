"""Declares what a call of experts does to torch, so that torch.compile can trace it: `torch.ops.lowbit.route`,
`expert_matmul` and `combine`, in this order, each of which is one launch on a GPU; and `sum_of_experts`, which is all
of them, or two launches by ids for few tokens: which, the number of tokens decides when it runs.

Their `kernel` argument is that of `torch.ops.lowbit.matmul.packed`: the matmul as text, which says how many experts
there are, and where they run. The functions here are what the operators run on tensors that have values. There are no
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import cast

import torch
from torch import Tensor

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.scheduling.expert_rule import tile_for
from lowbit.passes.targets import parse_target
from lowbit.pylib.experts.by_kernel import combine_by_kernel, route_by_kernel
from lowbit.pylib.experts.routed import RoutedCall, routed_experts
from lowbit.pylib.experts.routing import Routing
from lowbit.pylib.operator.schema import parts
from lowbit.pylib.runtime import expert_matmul as runtime
from lowbit.pylib.runtime.top_k_experts import TopKExperts, ids_and_weights, top_k_experts_of
from lowbit.pylib.torch_types import TORCH

_LIBRARY = torch.library.Library("lowbit", "FRAGMENT")
Run = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Returns the sum of each token's experts, of x, ids, weights, and the tensors of gate_up and down."""


def route(top_k_index: Tensor, kernel: str, tile: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns rows, numbers, tiles and slots of a `Routing` of tokens to experts.

    top_k_index  int32 or int64 [tokens, k]
    tile         the most slots of a token tile
    """
    given = parts(kernel)
    routing = route_by_kernel(top_k_index, given["spec"].experts, tile, given["target"])
    return routing.rows, routing.numbers, routing.tiles, routing.slots


def expert_matmul(
    x: Tensor, rows: Tensor, tiles: Tensor, weight: Sequence[Tensor], kernel: str, tile: int, in_order: bool = False
) -> Tensor:
    """Returns y [slots, n / experts] of the slots that `route` found (`ExpertMatmul`)."""
    return _matmul_of(kernel)(x, rows, tiles, weight, tile, in_order)


def combine(o: Tensor, slots: Tensor, tiles: Tensor, top_k_weights: Tensor, kernel: str) -> Tensor:
    """Returns the sum of each token's experts [tokens, hidden], in the type of o.

    o              [places, hidden]: what the expert of each slot has made
    slots, tiles   as `route` found them
    top_k_weights  [tokens, k]
    """
    routing = Routing(rows=slots, numbers=slots, tiles=tiles, slots=slots)  # rows and numbers play no part
    return combine_by_kernel(o, routing, top_k_weights, parts(kernel)["target"])


def sum_of_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    gate_up_kernel: str,
    down_kernel: str,
    tiles: Sequence[int],
    among: int = 0,
) -> Tensor:
    """Returns the sum of each token's experts [tokens, hidden], whose gate the kernel of gate_up applies: by ids for
    few tokens, where there are kernels for that, else by the other operators.

    x             [tokens, k] in the act type
    ids, weights  [tokens, experts of a token]
    tiles         sizes of token tiles that both matrices have kernels for, the least first
    among         how many experts ids are spread over, those elsewhere among them; 0: those of the weights
    """
    call = RoutedCall(ids.shape[0], ids.shape[1], ids.dtype, weights.dtype)
    return run_of(gate_up_kernel, down_kernel, tuple(tiles), among, call)(x, ids, weights, gate_up, down)


@lru_cache(maxsize=1024)
def run_of(gate_up: str, down: str, tiles: tuple[int, ...], among: int, call: RoutedCall) -> Run:
    """Returns what runs calls of this kind: in two launches by ids, in four, or operator by operator."""
    few = by_ids(gate_up, down, call.count, call.ids, call.weights)
    if few is not None and 0 < call.tokens <= few.most_tokens:
        return few
    tile = tile_for(tiles, call.places, among or parts(gate_up)["spec"].experts)
    routed = routed_experts(_matmul_of(gate_up), _matmul_of(down), call, tile)
    return routed or partial(_one_by_one, gate_up, down, tile)


def _one_by_one(
    gate_up_kernel: str,
    down_kernel: str,
    tile: int,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
) -> Tensor:
    """Returns the sum of each token's experts by the other operators."""
    rows, numbers, table, slots = route(ids, gate_up_kernel, tile)
    a = expert_matmul(x, rows, table, gate_up, gate_up_kernel, tile)
    o = expert_matmul(a, numbers, table, down, down_kernel, tile, in_order=True)
    return combine(o, slots, table, weights, down_kernel)


@lru_cache(maxsize=None)
def by_ids(gate_up: str, down: str, count: int, ids: torch.dtype, weights: torch.dtype) -> TopKExperts | None:
    """Returns what runs few tokens of `count` experts; None where there are no kernels for that."""
    top_k = ids_and_weights(count, ids, weights)
    target = parse_target(parts(gate_up)["target"])
    return top_k and top_k_experts_of(parts(gate_up)["spec"], parts(down)["spec"], top_k, target)


@lru_cache(maxsize=None)
def _matmul_of(kernel: str) -> runtime.ExpertMatmul:
    given = parts(kernel)
    return runtime.expert_matmul(given["spec"], parse_target(given["target"]))


def _fake_route(top_k_index: Tensor, kernel: str, tile: int) -> tuple[Tensor, ...]:
    tokens, k = top_k_index.shape
    shapes = (tokens * k,), (tokens * k,), (tokens * k + 1, 3), (tokens, k)
    return tuple(top_k_index.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _fake_matmul(
    x: Tensor, rows: Tensor, tiles: Tensor, weight: Sequence[Tensor], kernel: str, tile: int, in_order: bool = False
) -> Tensor:
    spec: MatmulSpec = parts(kernel)["spec"]
    return x.new_empty((rows.shape[0], spec.outputs), dtype=TORCH[spec.out_dtype])


def _fake_sum(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor],
    gate_up_kernel: str, down_kernel: str, tiles: Sequence[int], among: int = 0,
) -> Tensor:  # fmt: skip
    spec = cast(MatmulSpec, parts(down_kernel)["spec"])
    return x.new_empty((ids.shape[0], spec.outputs), dtype=TORCH[spec.out_dtype])


def _fake_combine(o: Tensor, slots: Tensor, tiles: Tensor, top_k_weights: Tensor, kernel: str) -> Tensor:
    return o.new_empty((slots.shape[0], o.shape[1]))


for _schema, _function, _fake in (
    ("route(Tensor top_k_index, str kernel, int tile) -> (Tensor, Tensor, Tensor, Tensor)", route, _fake_route),
    (
        (
            "expert_matmul(Tensor x, Tensor rows, Tensor tiles, Tensor[] weight, str kernel, int tile, "
            "bool in_order=False) -> Tensor"
        ),
        expert_matmul,
        _fake_matmul,
    ),
    (
        "combine(Tensor o, Tensor slots, Tensor tiles, Tensor top_k_weights, str kernel) -> Tensor",
        combine,
        _fake_combine,
    ),
    (
        (
            "sum_of_experts(Tensor x, Tensor ids, Tensor weights, Tensor[] gate_up, Tensor[] down, str gate_up_kernel, "
            "str down_kernel, int[] tiles, int among=0) -> Tensor"
        ),
        sum_of_experts,
        _fake_sum,
    ),
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"lowbit::{_function.__name__}", _fake, lib=_LIBRARY)
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_function.__name__, _function, _device)
