"""Routers: which experts a token goes to, and with which weights, in one launch (`passes.kernels.router`), or in
operations of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from lowbit.passes.kernels.router import MOST_TOKENS, TINY, RouterPlan, router_program
from lowbit.pylib.runtime.batch_invariant import MODE
from lowbit.pylib.runtime.driver import on_device
from lowbit.pylib.runtime.own_kernels import aligned, own_kernel, unwritten_like

if TYPE_CHECKING:
    from lowbit.pylib.runtime.kernel import Kernel

ELEMENTS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
_PIECE = 8  # columns that a thread reads at once
_MOST_EXPERTS = 1024
_MOST_COLUMNS = 8192  # all of a token's are in a block's registers
_SEVERAL = 4  # tokens of a block, from so many on


@dataclass(frozen=True)
class Rule:
    """How weights of tokens follow from logits.

    softmax       scores are softmax over all experts; else the sigmoid of each, to which a correction may be added for
                  the choice
    renormalized  the scores of a token's experts are divided by their sum
    scale         by which they are multiplied then
    """

    softmax: bool = True
    renormalized: bool = True
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Router:
    """A router of tokens [tokens, hidden].

    weight, bias    [experts, hidden] and [experts]; a kernel takes one type for both
    correction      [experts], for sigmoids; a kernel takes float32
    top_k           experts of a token
    logits, scores  types of what it returns
    """

    weight: Tensor
    bias: Tensor | None
    correction: Tensor | None
    top_k: int
    rule: Rule
    logits: torch.dtype
    scores: torch.dtype


Routed = tuple[Tensor, Tensor, Tensor]
"""Logits [tokens, experts]; the weights of a token's experts [tokens, top_k], in the order in which they are chosen;
which they are, int64 [tokens, top_k]."""


def route_tokens(x: Tensor, router: Router, target: str) -> Routed:
    """Returns where tokens [tokens, hidden] go: few of them by one launch, where a kernel has their types and sizes.
    Within `lowbit.batch_invariant` many are few at a time, and one at a time where torch computes.

    target   of the device that x is on, or of an emulator
    """
    plan = None if target == "cpu" else _plan(x, router)
    few = MOST_TOKENS if plan else 1
    if MODE.on and len(x) > few:
        each = [_route_few(some, router, plan, target) for some in x.split(few)]
        logits, weights, ids = (torch.cat(parts) for parts in zip(*each))
        return logits, weights, ids
    return _route_few(x, router, plan if len(x) <= few else None, target)


def _route_few(x: Tensor, router: Router, plan: RouterPlan | None, target: str) -> Routed:
    """Returns where tokens go: by a launch if there is a plan, for up to `MOST_TOKENS`."""
    if plan is None:
        return by_torch(x, router)
    kernel = _router_kernel(replace(plan, tokens=_SEVERAL if len(x) >= _SEVERAL else 1), target)
    more = [aligned(each) for each in (router.bias, router.correction) if each is not None]
    with on_device(x.get_device()):
        products = unwritten_like((len(x), plan.experts), x, router.logits)
        weights, ids = (unwritten_like((len(x), plan.top_k), x, kind) for kind in (router.scores, torch.int64))
        kernel.start(aligned(x), aligned(router.weight), products, weights, ids, *more, len(x), router.rule.scale)
    return products, weights, ids


def by_torch(x: Tensor, router: Router) -> Routed:
    """Returns the same, in operations of torch."""
    rule, bias = router.rule, router.bias
    products = linear(x.float(), router.weight.float(), None if bias is None else bias.float())
    each = products.softmax(-1) if rule.softmax else products.sigmoid()
    choice = each if router.correction is None else each + router.correction
    ids = torch.topk(choice, router.top_k, dim=-1).indices
    chosen = each.gather(1, ids)
    if rule.renormalized:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + (0 if rule.softmax else TINY))
    return products.to(router.logits), (chosen * rule.scale).to(router.scores), ids


def _plan(x: Tensor, router: Router) -> RouterPlan | None:
    """Returns what a kernel for tokens like these is made for; None where there is none for their types or sizes."""
    weight, bias, correction, rule, top_k = router.weight, router.bias, router.correction, router.rule, router.top_k
    experts, hidden = weight.shape
    elements = [ELEMENTS.get(kind) for kind in (x.dtype, weight.dtype, router.logits, router.scores)]
    alike = bias is None or bias.dtype is weight.dtype
    plain = correction is None or (correction.dtype is torch.float32 and not rule.softmax)
    fits = hidden % _PIECE == 0 and hidden <= _MOST_COLUMNS and top_k <= experts <= _MOST_EXPERTS
    if None in elements or not (alike and plain and fits and len(x)):
        return None
    flags = rule.softmax, rule.renormalized, bias is not None, correction is not None
    of_x, of_weight, of_logits, of_scores = cast(list[str], elements)
    return RouterPlan(hidden, experts, top_k, of_x, of_weight, of_logits, of_scores, *flags)


@lru_cache(maxsize=64)
def _router_kernel(plan: RouterPlan, target: str) -> Kernel:
    return own_kernel(partial(router_program, plan), target)
