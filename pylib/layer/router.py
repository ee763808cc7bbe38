"""Routers: which experts a token goes to, and with which weights, in one launch (`passes.kernels.router`), or in
operations of torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from lowbit.passes.kernels.router import MOST_TOKENS, TINY, RouterPlan, router_program
from lowbit.pylib.layer.by_kernel import aligned, compiled, unwritten_like
from lowbit.pylib.runtime.driver import on_device

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


def router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    top_k: int,
    rule: Rule,
    logits: torch.dtype,
    scores: torch.dtype,
    target: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logits [tokens, experts], the weights of a token's experts [tokens, top_k], in the order in which they
    are chosen, and which they are, int64 [tokens, top_k].

    x               [tokens, hidden]
    weight, bias    [experts, hidden] and [experts]; a kernel takes one type for both
    correction      [experts], for sigmoids; a kernel takes float32
    logits, scores  types of what is returned
    target          of the device that x is on, or of an emulator
    """
    plan = _plan(x, weight, bias, correction, top_k, rule, logits, scores)
    if target == "cpu" or plan is None:
        return by_torch(x, weight, bias, correction, top_k, rule, logits, scores)
    kernel = _router_kernel(plan, target)
    more = [aligned(each) for each in (bias, correction) if each is not None]
    with on_device(x.get_device()):
        products = unwritten_like((len(x), plan.experts), x, logits)
        weights, ids = (unwritten_like((len(x), top_k), x, kind) for kind in (scores, torch.int64))
        kernel.start(aligned(x), aligned(weight), products, weights, ids, *more, len(x), rule.scale)
    return products, weights, ids


def by_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    top_k: int,
    rule: Rule,
    logits: torch.dtype,
    scores: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the same, in operations of torch."""
    products = linear(x.float(), weight.float(), None if bias is None else bias.float())
    each = products.softmax(-1) if rule.softmax else products.sigmoid()
    ids = torch.topk(each if correction is None else each + correction, top_k, dim=-1).indices
    chosen = each.gather(1, ids)
    if rule.renormalized:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + (0 if rule.softmax else TINY))
    return products.to(logits), (chosen * rule.scale).to(scores), ids


def _plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    top_k: int,
    rule: Rule,
    logits: torch.dtype,
    scores: torch.dtype,
) -> RouterPlan | None:
    """Returns what a kernel for these tokens is made for; None where there is none for their number, types or sizes."""
    experts, hidden = weight.shape
    elements = [ELEMENTS.get(kind) for kind in (x.dtype, weight.dtype, logits, scores)]
    alike = bias is None or bias.dtype is weight.dtype
    plain = correction is None or (correction.dtype is torch.float32 and not rule.softmax)
    fits = hidden % _PIECE == 0 and hidden <= _MOST_COLUMNS and top_k <= experts <= _MOST_EXPERTS
    if None in elements or not (alike and plain and fits and 0 < len(x) <= MOST_TOKENS):
        return None
    flags = rule.softmax, rule.renormalized, bias is not None, correction is not None
    tokens = _SEVERAL if len(x) >= _SEVERAL else 1
    of_x, of_weight, of_logits, of_scores = cast(list[str], elements)
    return RouterPlan(hidden, experts, top_k, of_x, of_weight, of_logits, of_scores, *flags, tokens)


@lru_cache(maxsize=64)
def _router_kernel(plan: RouterPlan, target: str) -> Kernel:
    return compiled(partial(router_program, plan), target)
