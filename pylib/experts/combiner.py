"""The sum of a token's experts by one kernel (`passes.kernels.combine`): `routing.combine` takes a dozen launches."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.pylib.experts.routing import Routing, combine
from lowbit.pylib.weights.tensor_checks import ALIGNMENT

if TYPE_CHECKING:
    from lowbit.pylib.runtime.kernel import Kernel

_ELEMENTS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
_PIECE = 8  # columns that a thread reads at once


def combine_by_kernel(
    o: Tensor, routing: Routing, top_k_index: Tensor, top_k_weights: Tensor, experts: int, target: str
) -> Tensor:
    """Returns what `combine` returns, up to the rounding of f32. Columns that are no multiple of 8 go there.

    top_k_index  [tokens, k]: what `routing` was made of
    target       of the device that o is on, or of an emulator
    """
    tokens, top_k = top_k_index.shape
    hidden = o.shape[-1]
    if hidden % _PIECE or not tokens or o.dtype not in _ELEMENTS or top_k_weights.shape != top_k_index.shape:
        return combine(o, routing, top_k_weights)
    words = top_k_index.element_size() // 4
    kernel = _kernel(hidden, top_k, experts, _ELEMENTS[o.dtype], words, target)
    y = o.new_empty((tokens, hidden))
    kernel(
        o=_aligned(o),
        ids=_aligned(top_k_index).view(torch.int32),
        slots=routing.slots.view(torch.int32),
        weights=_aligned(top_k_weights.to(torch.float32)),
        y=y,
        m=tokens,
    )
    return y


def _aligned(tensor: Tensor) -> Tensor:
    """Returns a tensor as kernels read it: contiguous, at a multiple of 16 bytes, which slices may not be."""
    whole = tensor.contiguous()
    return whole.clone() if whole.data_ptr() % ALIGNMENT else whole


@lru_cache(maxsize=64)
def _kernel(hidden: int, top_k: int, experts: int, element: str, words: int, target: str) -> Kernel:
    from lowbit.passes.kernels.combine import combine_program
    from lowbit.pylib.runtime.kernel import compile_program

    return compile_program(lambda: combine_program(hidden, top_k, experts, element, words), target, racecheck=False)
