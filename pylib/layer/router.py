"""Routers: which experts a token goes to, and with which weights, in one launch (`passes.kernels.router`), or in
operations of torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from lowbit.passes.kernels.router import MOST_TOKENS, TINY, RouterPlan, router_program
from lowbit.pylib.experts.by_kernel import aligned
from lowbit.pylib.runtime.driver import allocate, on_device
from lowbit.pylib.runtime.interface import unwritten

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
    experts, hidden = weight.shape
    if not _are_typed(x, weight, bias, correction, logits, scores):
        return by_torch(x, weight, bias, correction, top_k, rule, logits, scores)
    plan = RouterPlan(
        hidden,
        experts,
        top_k,
        ELEMENTS[x.dtype],
        ELEMENTS[weight.dtype],
        ELEMENTS[logits],
        ELEMENTS[scores],
        rule.softmax,
        rule.renormalized,
        bias is not None,
        correction is not None,
        _SEVERAL if len(x) >= _SEVERAL else 1,
    )
    if target == "cpu" or not 0 < len(x) <= MOST_TOKENS or not _served(plan):
        return by_torch(x, weight, bias, correction, top_k, rule, logits, scores)
    kernel = _router_kernel(plan, target)
    more = [aligned(each) for each in (bias, correction) if each is not None]
    with on_device(x.get_device()):
        products, weights = _unwritten((len(x), experts), logits, x), _unwritten((len(x), top_k), scores, x)
        ids = _unwritten((len(x), top_k), torch.int64, x)
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


def _are_typed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    logits: torch.dtype,
    scores: torch.dtype,
) -> bool:
    """Tells whether a kernel reads and writes these types."""
    alike = bias is None or bias.dtype is weight.dtype
    plain = correction is None or correction.dtype is torch.float32
    return alike and plain and {x.dtype, weight.dtype, logits, scores} <= ELEMENTS.keys()


def _served(plan: RouterPlan) -> bool:
    """Tells whether there is a kernel for these sizes."""
    fits = plan.hidden % _PIECE == 0 and plan.hidden <= _MOST_COLUMNS and plan.experts <= _MOST_EXPERTS
    return fits and plan.top_k <= plan.experts and not (plan.softmax and plan.corrected)


def _unwritten(shape: tuple[int, int], dtype: torch.dtype, like: Tensor) -> Tensor:
    return allocate(shape, (shape[1], 1), dtype) if like.is_cuda else unwritten(shape, dtype)


@lru_cache(maxsize=64)
def _router_kernel(plan: RouterPlan, target: str) -> Kernel:
    from lowbit.pylib.runtime.kernel import compile_program

    return compile_program(partial(router_program, plan), target, overlap=True, racecheck=False)
