"""Norms, rotation and cache, and attention of a layer that decodes, by a kernel each (`passes.kernels.rms_norm`, `rope`
and `attention`).

Each starts while the kernel in front of it is still running (programmatic dependent launch), as the matmuls around them
do: so the next matmul's weights are on their way while these are computed. `reference.py` has the same in operations of
torch, for a CPU and for sizes that no kernel has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.pylib.layer import reference
from lowbit.pylib.runtime.batch_invariant import MODE
from lowbit.pylib.runtime.driver import allocate, on_device
from lowbit.pylib.runtime.interface import unwritten
from lowbit.pylib.weights.tensor_checks import ALIGNMENT

if TYPE_CHECKING:
    from lowbit.passes.builder import Program
    from lowbit.pylib.runtime.kernel import Kernel

MOST_ROWS = 64
"""Tokens up to which attention is one kernel that reads the cache for each."""
_ELEMENTS = {torch.float16: "f16", torch.bfloat16: "bf16"}
_PIECE = 8  # numbers that a thread reads at once
_COLUMNS = (64, 128, 256)  # of a head
_BLOCKS = 128  # of attention, about as many as a GPU has multiprocessors: places are shared out among them
_MOST_PARTS = 16


def rms_norm(
    x: Tensor, gain: Tensor, eps: float, shift: float, target: str, counter: Tensor | None = None, count: int = 0
) -> Tensor:
    """Returns x [..., hidden] / sqrt(mean of x^2 + eps) * (gain + shift), in x's type.

    gain      [hidden], in x's type
    target    of the device that x is on, or of an emulator
    counter   int32 or int64 [1], to which `count` is added; both are below 2^31
    """
    hidden = x.shape[-1]
    if not served(target, x, gain) or hidden % _PIECE:
        if counter is not None:
            counter += count
        return reference.rms_norm(x, gain, eps, shift)
    kernel = _norm_kernel(hidden, _ELEMENTS[x.dtype], shift, counter is not None, target)
    counted = () if counter is None else (_word(counter), count)
    with on_device(x.get_device()):
        y = unwritten_like(x.shape, x)
        kernel.start(aligned(x), aligned(gain), y, eps, x.numel() // hidden, *counted)
    return y


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    gains: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    held: Tensor,
    eps: float,
    shift: float,
    target: str,
) -> Tensor:
    """Returns the queries of tokens, and appends their keys and values to a cache.

    x              [b, t, heads * columns]: queries, keys and values side by side
    cos, sin       [b, t, columns], whose halves are equal
    gains          of queries' and keys' norms [columns], if they have some; eps and shift are theirs
    keys, values   [b, heads, length, columns], contiguous
    held           int32 or int64 [1] or []: the tokens in the cache, behind which the new ones go
    """
    (b, t, _), (_, count, length, columns) = x.shape, keys.shape
    queries = x.shape[-1] // columns - 2 * count
    if not served(target, x, cos, sin, keys, values, *(gains or ())) or columns % (2 * _PIECE):
        return _rope_by_torch(x, cos, sin, gains, keys, values, held, eps, shift)
    kernel = _rope_kernel(queries, count, columns, _ELEMENTS[x.dtype], gains is not None, shift, target)
    normed = (aligned(gains[0]), aligned(gains[1]), eps) if gains else ()
    turns = (aligned(each.expand(b, t, columns)) for each in (cos, sin))
    with on_device(x.get_device()):
        q = unwritten_like((b, t, queries * columns), x)
        kernel.start(aligned(x), *turns, q, keys, values, _word(held), b * t, t, length, *normed)
    return q


def _rope_by_torch(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    gains: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    held: Tensor,
    eps: float,
    shift: float,
) -> Tensor:
    """Does the same in operations of torch."""
    heads, count = x.unflatten(-1, (-1, keys.shape[-1])), keys.shape[1]
    q, k, v = heads.split((heads.shape[2] - 2 * count, count, count), 2)
    if gains is not None:
        q, k = (reference.rms_norm(each.float(), gain, eps, shift) for each, gain in zip((q, k), gains))
    q, k = (reference.rotated(each, cos, sin).to(x.dtype) for each in (q, k))
    for cache, new in ((keys, k), (values, v)):
        reference.appended(cache, new, held)
    return q.flatten(2)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, held: Tensor, mask: Tensor | None, scale: float, target: str
) -> Tensor:
    """Returns what tokens make of the values in a cache [b, t, queries * columns].

    q              [b, t, queries * columns]
    keys, values   [b, heads, length, columns], contiguous, with the tokens' own
    held           int32 or int64 [1] or []: how many tokens the cache held before these
    mask           bool [b or 1, 1, t, length], True for places that may be looked at; at most those up to a token's own
                   are
    """
    (b, t, _), (_, count, length, columns) = q.shape, keys.shape
    queries = q.shape[-1] // columns
    if not served(target, q, keys, values) or columns not in _COLUMNS or b * t > MOST_ROWS:
        y = reference.attention(q.unflatten(-1, (queries, columns)), keys, values, held, mask, scale)
        return y.flatten(2)
    kernel = _attention_kernel(queries, count, columns, _ELEMENTS[q.dtype], b * t, mask is not None, target)
    masked = () if mask is None else _rows_of(mask)
    with on_device(q.get_device()):
        y = unwritten_like(q.shape, q)
        kernel.start(aligned(q), keys, values, _word(held), y, b * t, t, length, scale, *masked)
    return y


def _rows_of(mask: Tensor) -> tuple[Tensor, int]:
    """Returns the bytes of a mask [b or 1, 1, t, length], and how many rows of them a sequence has: none of its own if
    all sequences share them."""
    if mask.shape[0] > 1 and mask.stride(0) == 0:
        mask = mask[:1]
    return aligned(mask).view(torch.int8), mask.shape[2] * (mask.shape[0] > 1)


def served(target: str, *tensors: Tensor) -> bool:
    """Tells whether kernels take tensors of these types and this target, and there are tokens."""
    first = tensors[0]
    alike = all(tensor.dtype is first.dtype for tensor in tensors)
    return target != "cpu" and first.dtype in _ELEMENTS and alike and first.numel() > 0


def aligned(tensor: Tensor) -> Tensor:
    """Returns a tensor as kernels read it: contiguous, at a multiple of 16 bytes, which slices may not be."""
    whole = tensor.contiguous()
    return whole.clone() if whole.data_ptr() % ALIGNMENT else whole


def _word(number: Tensor) -> Tensor:
    """Returns the low word of an integer in memory, where it is."""
    return number.reshape(1).view(torch.int32)


def unwritten_like(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns memory for a result of a kernel, in the type of `like` or in another, on the current device if `like` is
    on a GPU."""
    kind = dtype or like.dtype
    if not like.is_cuda:
        return unwritten(shape, kind)
    return allocate(tuple(shape), _strides(shape), kind)  # it takes no torch.Size


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


@lru_cache(maxsize=64)
def _norm_kernel(hidden: int, element: str, shift: float, counts: bool, target: str) -> Kernel:
    from lowbit.passes.kernels.rms_norm import rms_norm_program

    return compiled(partial(rms_norm_program, hidden, element, shift, counts), target)


@lru_cache(maxsize=64)
def _rope_kernel(
    queries: int, keys: int, columns: int, element: str, normed: bool, shift: float, target: str
) -> Kernel:
    from lowbit.passes.kernels.rope import HeadNorm, Heads, rope_program

    norm = HeadNorm(shift) if normed else None
    return compiled(partial(rope_program, Heads(queries, keys, columns), element, norm), target)


def _attention_kernel(
    queries: int, keys: int, columns: int, element: str, rows: int, masked: bool, target: str
) -> Kernel:
    """Returns the kernel for so many tokens: few share out their places among many blocks. Within
    `lowbit.batch_invariant` all do as one does: parts are added up in their order."""
    from lowbit.passes.kernels.attention import AttentionPlan
    from lowbit.passes.kernels.rope import Heads

    rows, most = (1, MOST_ROWS) if MODE.on else (rows, 0)
    blocks, parts = rows * AttentionPlan(Heads(queries, keys, columns), element).blocks, 1
    while parts < _MOST_PARTS and blocks * parts * 2 <= _BLOCKS:
        parts *= 2
    return _attention_of_parts(queries, keys, columns, element, parts, masked, most, target)


@lru_cache(maxsize=64)
def _attention_of_parts(
    queries: int, keys: int, columns: int, element: str, parts: int, masked: bool, most: int, target: str
) -> Kernel:
    from lowbit.passes.kernels.attention import AttentionPlan, attention_program
    from lowbit.passes.kernels.rope import Heads

    plan = AttentionPlan(Heads(queries, keys, columns), element, parts, masked, most)
    return compiled(partial(attention_program, plan), target)


def compiled(program: Callable[[], Program], target: str) -> Kernel:
    from lowbit.pylib.runtime.kernel import compile_program

    return compile_program(program, target, overlap=True, racecheck=False)
