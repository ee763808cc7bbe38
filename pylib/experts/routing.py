"""Where the tokens of a mixture of experts go: `route`, and the sum of what their experts make of them: `combine`.

A token has a *slot* for each of its experts. Slots are sorted by expert, so that a kernel reads the weight of an expert
for all of its slots together; a *token tile* is up to T slots of one expert, which a block multiplies at once. Slots of
ids that are no expert stand behind all others, in no tile.

Both are operations of torch alone, whose shapes depend on nothing but those of their arguments. So no host waits for
the device, and a CUDA graph that was captured for one routing is right for any other. `by_kernel.py` has a launch for
each, where torch takes dozens; these serve a CPU and what no kernel does, and say what the kernels compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.experts.schedule import short_slots

_LARGEST = torch.iinfo(torch.int16).max


@dataclass(frozen=True, eq=False)
class Routing:
    """The slots of tokens that are sorted by expert. Made by `route`.

    rows       i32 [slots]: the row of x that a slot reads
    numbers    i32 [slots]: 0, 1 ...: the rows of what a matmul has written for every slot
    tiles      i32 [slots + 1, 3]: in row 0 how many token tiles there are, how many slots they have, and how many of
               them are short (`short_slots`); then for each its expert, its first slot, and the slot before which it
               ends, in the order of experts, short ones behind all others; zeros in rows without a tile
    slots      i32 [tokens, k]: the slot of each place of a token
    """

    rows: Tensor
    numbers: Tensor
    tiles: Tensor
    slots: Tensor

    @property
    def elsewhere(self) -> Tensor:
        """Returns which places have an id that is no expert, bool [tokens, k]: those whose slots are in no tile."""
        return self.slots >= self.tiles[0, 1]


def route(top_k_index: Tensor, experts: int, tile: int) -> Routing:
    """Sorts the slots of tokens by expert, in the order of tokens, and cuts them into token tiles.

    top_k_index  int32 or int64 [tokens, k]: experts of a token, in which one may be more than once. An id below 0, or
                 of `experts` and more, is no expert: it stands for one elsewhere
    tile         the most slots of a token tile

    Raises SpecError for an index of another type or shape, and for numbers of experts or slots that are not positive.
    """
    check_index(top_k_index, experts, tile)
    tokens, k = top_k_index.shape
    ids = top_k_index.reshape(-1).clamp(-1, experts).remainder(experts + 1)  # -1 becomes `experts`, the last
    by_expert, order = ids.to(torch.int16 if experts < _LARGEST else torch.int32).sort(stable=True)
    slot = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    slots = torch.empty_like(slot).scatter_(0, order, slot)
    rows = order.div(max(k, 1), rounding_mode="floor").to(torch.int32)
    tiles = _tiles(by_expert, slot, experts, tile)
    return Routing(rows, slot, tiles, slots.view(tokens, k))


def _tiles(by_expert: Tensor, slot: Tensor, experts: int, tile: int) -> Tensor:
    """Returns the table of token tiles, of experts of slots in order, and numbers of slots."""
    first = torch.searchsorted(by_expert, by_expert, out_int32=True)  # the first slot of the same expert
    beyond = torch.searchsorted(by_expert, by_expert, out_int32=True, right=True)
    here = by_expert < experts
    begins = ((slot - first) % tile == 0) & here  # whether a token tile begins with the slot
    end = torch.minimum(slot + tile, beyond)
    short = begins & (end - slot <= short_slots(tile))
    longs, shorts = (begins & ~short).cumsum(0), short.cumsum(0)
    spare = len(slot) + 1  # a row behind the table, for slots with which none begins
    table = torch.zeros(len(slot) + 2, 3, dtype=torch.int32, device=slot.device)
    if len(slot):
        row = torch.where(short, longs[-1] + shorts, longs)
        each = torch.stack([by_expert.to(torch.int32), slot, end], 1)
        table.index_copy_(0, torch.where(begins, row, spare), each)
        table[0, 0], table[0, 1], table[0, 2] = longs[-1] + shorts[-1], here.sum(), shorts[-1]
    return table[: len(slot) + 1]


def combine(o: Tensor, routing: Routing, top_k_weights: Tensor) -> Tensor:
    """Returns the sum of each token's experts, by their weights: [tokens, hidden] in the type of o.

    o              [slots, hidden]: what the expert of each slot has made. Slots of places elsewhere may hold anything
    top_k_weights  [tokens, k], of any float type

    Products and sums are in f32, in the order of places, and rounded at the end. So a result depends on no other token.
    A weight of 0 multiplies as any other: 0 times an infinity is NaN. A place elsewhere adds 0, whatever its weight.

    Raises SpecError for weights of another shape.
    """
    if top_k_weights.shape != routing.slots.shape:
        given, wanted = list(top_k_weights.shape), list(routing.slots.shape)
        raise SpecError(f"top_k_weights must be {wanted}, one for each id of top_k_index, not {given}")
    tokens, k = routing.slots.shape
    terms = o.index_select(0, routing.slots.view(-1)).view(tokens, k, o.shape[-1])
    elsewhere = routing.elsewhere
    terms.masked_fill_(elsewhere.unsqueeze(-1), 0)
    weights = top_k_weights.masked_fill(elsewhere, 0).to(torch.float32).unsqueeze(-1)
    total = torch.zeros(tokens, o.shape[-1], dtype=torch.float32, device=o.device)
    for place in range(k):
        total = torch.addcmul(total, terms[:, place], weights[:, place])
    return total.to(o.dtype)


def check_index(top_k_index: Tensor, experts: int, tile: int) -> None:
    """Raises SpecError for what `route` can't sort."""
    if not isinstance(top_k_index, Tensor) or top_k_index.dtype not in (torch.int32, torch.int64):
        given = top_k_index.dtype if isinstance(top_k_index, Tensor) else type(top_k_index).__name__
        raise SpecError(f"top_k_index is {given}; it must be torch.int64 or torch.int32, as torch.topk returns it")
    if top_k_index.ndim != 2:
        raise SpecError(f"top_k_index must be [tokens, k], not {list(top_k_index.shape)}")
    if experts < 1 or tile < 1:
        name, value = ("experts", experts) if experts < 1 else ("tile", tile)
        raise SpecError(f"{name}={value} must be at least 1")


def check_routing(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: int) -> None:
    """Raises SpecError unless ids and weights [tokens, k] go with x [tokens, hidden], and with the experts of a layer.

    Ids are looked at on a CPU: below -1, or beyond the number of experts, there is no expert, nor one elsewhere.
    """
    check_index(top_k_index, experts, 1)
    if x.ndim != 2 or x.shape[0] != top_k_index.shape[0]:
        sizes = f"x is {list(x.shape)}, and top_k_index {list(top_k_index.shape)}"
        raise SpecError(f"{sizes}; they must be [tokens, hidden] and [tokens, k], of the same tokens")
    if top_k_weights.shape != top_k_index.shape or not top_k_weights.is_floating_point():
        given, wanted = f"{top_k_weights.dtype} {list(top_k_weights.shape)}", list(top_k_index.shape)
        raise SpecError(f"top_k_weights is {given}; it must be {wanted} of floats, one for each id of top_k_index")
    if not x.device == top_k_index.device == top_k_weights.device:
        devices = f"x is on {x.device}, top_k_index on {top_k_index.device}, top_k_weights on {top_k_weights.device}"
        raise SpecError(f"{devices}; put them on one device")
    if top_k_index.is_cpu and top_k_index.numel():
        _check_ids(top_k_index, experts)


def _check_ids(top_k_index: Tensor, experts: int) -> None:
    """Raises SpecError for ids that are neither of an expert nor of one elsewhere."""
    wrong = ((top_k_index < -1) | (top_k_index > experts)).nonzero()
    if len(wrong):
        token, place = wrong[0].tolist()
        given = f"top_k_index[{token}, {place}]={int(top_k_index[token, place])}"
        rule = f"must be in 0..{experts - 1}, the experts of the layer, or -1 or {experts} for one that is elsewhere"
        raise SpecError(f"{given} {rule}")
