"""Norms, rotation and cache, attention, and what joins parts of a layer that decodes, by a kernel each
(`passes.kernels.rms_norm`, `rope`, `shift`, `attention` and `join`).

Each starts while the kernel in front of it is still running (programmatic dependent launch), as the matmuls around them
do: so the next matmul's weights are on their way while these are computed. `reference.py` has the same in operations of
torch, for a CPU and for sizes that no kernel has.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.pylib.layer import reference
from lowbit.pylib.layer.reference import Norm
from lowbit.pylib.runtime.batch_invariant import MODE
from lowbit.pylib.runtime.driver import on_device
from lowbit.pylib.runtime.own_kernels import aligned, own_kernel, unwritten_like

if TYPE_CHECKING:
    from lowbit.pylib.runtime.kernel import Kernel

MOST_ROWS = 64
"""Tokens up to which attention is one kernel that reads the cache for each."""
_ELEMENTS = {torch.float16: "f16", torch.bfloat16: "bf16"}
_PIECE = 8  # numbers that a thread reads at once
_COLUMNS = (64, 128, 256)  # of a head
_BLOCKS = 128  # of attention, about as many as a GPU has multiprocessors: places are shared out among them
_MOST_PARTS = 16
_MOST_PLACES = 4096  # of a cache that `passes.kernels.shift` moves


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


def join(
    x: Tensor,
    residual: Tensor,
    scale: float,
    norm: Norm | None,
    target: str,
    following: Norm | None = None,
    counter: Tensor | None = None,
    count: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Returns y = residual + scale * norm(x) [..., hidden], and the following norm of y, if there is one.

    norm       None: of x as it is
    counter    with a following norm: as `rms_norm` has it
    """
    hidden, norms = x.shape[-1], [each for each in (norm, following) if each]
    if not served(target, x, residual, *(each.gain for each in norms)) or hidden % _PIECE:
        if counter is not None:
            counter += count
        return reference.join(x, residual, scale, norm, following)
    shifts = [each.shift if each else None for each in (norm, following)]
    kernel = _join_kernel(hidden, _ELEMENTS[x.dtype], shifts[0], shifts[1], target)
    with on_device(x.get_device()):
        y, h = unwritten_like(x.shape, x), unwritten_like(x.shape, x) if following else None
        given = [aligned(x), aligned(residual), y, x.numel() // hidden, scale]
        given += [aligned(norm.gain), norm.eps] if norm else []
        if following and counter is not None:
            given += [aligned(following.gain), following.eps, h, _word(counter), count]
        kernel.start(*given)
    return y, h


def rope(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    gains: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    held: Tensor,
    eps: float,
    shift: float,
    target: str,
    repeated: bool = True,
    beside: bool = False,
) -> Tensor:
    """Returns the queries of tokens, and appends their keys and values to a cache.

    x              [b, t, heads * columns]: queries, keys and values side by side
    cos, sin       [b, t, columns that are rotated], whose halves are equal; the others are those behind. None: nothing
                   is rotated
    gains          of queries' and keys' norms [columns], if they have some; eps and shift are theirs
    keys, values   [b, heads, length, columns], contiguous
    held           int32 or int64 [1] or []: the tokens in the cache, behind which the new ones go
    repeated       False: cos and sin have only one of the halves
    beside         whether columns that are rotated together are neighbours, and not in halves
    """
    (b, t, _), (_, count, length, columns) = x.shape, keys.shape
    queries, turns = x.shape[-1] // columns - 2 * count, [each for each in (cos, sin) if each is not None]
    turned = turns[0].shape[-1] * (1 if repeated else 2) if turns else 0
    tensors = x, *turns, keys, values, *(gains or ())
    if not served(target, *tensors) or columns % (2 * _PIECE) or turned % (2 * _PIECE):
        return _rope_by_torch(x, turns, gains, keys, values, held, eps, shift, repeated, beside)
    element, normed = _ELEMENTS[x.dtype], gains is not None
    kernel = _rope_kernel(queries, count, columns, element, normed, shift, turned, repeated, beside, target)
    norm = (aligned(gains[0]), aligned(gains[1]), eps) if gains else ()
    angles = (aligned(each.expand(b, t, -1)) for each in turns)
    with on_device(x.get_device()):
        q = unwritten_like((b, t, queries * columns), x)
        kernel.start(aligned(x), *angles, q, keys, values, _word(held), b * t, t, length, *norm)
    return q


def _rope_by_torch(
    x: Tensor,
    turns: list[Tensor],
    gains: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    held: Tensor,
    eps: float,
    shift: float,
    repeated: bool,
    beside: bool,
) -> Tensor:
    """Does the same in operations of torch."""
    heads, count = x.unflatten(-1, (-1, keys.shape[-1])), keys.shape[1]
    q, k, v = heads.split((heads.shape[2] - 2 * count, count, count), 2)
    if gains is not None:
        q, k = (reference.rms_norm(each.float(), gain, eps, shift) for each, gain in zip((q, k), gains))
    if turns:
        cos, sin = turns if repeated else (torch.cat([each, each], -1) for each in turns)
        q, k = (reference.rotated(each, cos, sin, beside) for each in (q, k))
    for cache, new in ((keys, k), (values, v)):
        reference.appended(cache, new.to(x.dtype), held)
    return q.to(x.dtype).flatten(2)


def drop_first(keys: Tensor, values: Tensor, held: Tensor, target: str) -> None:
    """Moves the tokens of a full cache [b, heads, length, columns] up by one place, the first of which is dropped, and
    makes `held`, int32 or int64 [1] or [], length - 1."""
    b, heads, length, columns = keys.shape
    if not served(target, keys, values) or columns % (2 * _PIECE) or length > _MOST_PLACES:
        reference.drop_first(keys, values, held)
        return
    with on_device(keys.get_device()):
        _shift_kernel(length, columns, _ELEMENTS[keys.dtype], target).start(keys, values, _word(held), b * heads)


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    held: Tensor,
    mask: Tensor | None,
    scale: float,
    target: str,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Returns what tokens make of the values in a cache [b, t, queries * columns].

    q              [b, t, queries * columns]
    keys, values   [b, heads, length, columns], contiguous, with the tokens' own
    held           int32 or int64 [1] or []: how many tokens the cache held before these
    mask           bool [b or 1, 1, t, length], True for places that may be looked at; at most those up to a token's own
                   are. Or numbers of q's type, which are added to products
    sinks          [queries] in q's type: a product of each query with a place of which there is no value
    cap            a product s becomes cap * tanh(s / cap); 0: none
    """
    (b, t, _), (_, count, length, columns) = q.shape, keys.shape
    queries, added = q.shape[-1] // columns, mask is not None and mask.dtype is not torch.bool
    tensors = [q, keys, values, *([mask] if mask is not None and added else []), *([] if sinks is None else [sinks])]
    if not served(target, *tensors) or columns not in _COLUMNS or b * t > MOST_ROWS:
        heads = q.unflatten(-1, (queries, columns))
        return reference.attention(heads, keys, values, held, mask, scale, sinks, cap).flatten(2)
    kind = mask is not None, added, sinks is not None, cap > 0
    kernel = _attention_kernel(queries, count, columns, _ELEMENTS[q.dtype], b * t, kind, target)
    more = () if mask is None else _rows_of(mask)
    more += () if sinks is None else (aligned(sinks),)
    more += (cap, 1 / cap) if cap else ()
    with on_device(q.get_device()):
        y = unwritten_like(q.shape, q)
        kernel.start(aligned(q), keys, values, _word(held), y, b * t, t, length, scale, *more)
    return y


def _rows_of(mask: Tensor) -> tuple[Tensor, int]:
    """Returns the bytes or numbers of a mask [b or 1, 1, t, length], and how many rows of them a sequence has: none of
    its own if all sequences share them."""
    if mask.shape[0] > 1 and mask.stride(0) == 0:
        mask = mask[:1]
    whole = aligned(mask)
    return whole.view(torch.int8) if mask.dtype is torch.bool else whole, mask.shape[2] * (mask.shape[0] > 1)


def served(target: str, *tensors: Tensor) -> bool:
    """Tells whether kernels take tensors of these types and this target, and there are tokens."""
    first = tensors[0]
    alike = all(tensor.dtype is first.dtype for tensor in tensors)
    return target != "cpu" and first.dtype in _ELEMENTS and alike and first.numel() > 0


def _word(number: Tensor) -> Tensor:
    """Returns the low word of an integer in memory, where it is."""
    return number.reshape(1).view(torch.int32)


@lru_cache(maxsize=64)
def _norm_kernel(hidden: int, element: str, shift: float, counts: bool, target: str) -> Kernel:
    from lowbit.passes.kernels.rms_norm import rms_norm_program

    return own_kernel(partial(rms_norm_program, hidden, element, shift, counts), target)


@lru_cache(maxsize=64)
def _join_kernel(hidden: int, element: str, shift: float | None, next_shift: float | None, target: str) -> Kernel:
    """Returns the kernel for norms with these shifts; None: without the norm."""
    from lowbit.passes.kernels.join import JoinPlan, join_program

    norms = shift is not None, shift or 0.0, next_shift is not None, next_shift or 0.0
    return own_kernel(partial(join_program, JoinPlan(hidden, element, *norms)), target)


@lru_cache(maxsize=64)
def _rope_kernel(
    queries: int,
    keys: int,
    columns: int,
    element: str,
    normed: bool,
    shift: float,
    turned: int,
    repeated: bool,
    beside: bool,
    target: str,
) -> Kernel:
    from lowbit.passes.kernels.rope import HeadNorm, Heads, Rotation, rope_program

    heads, norm = Heads(queries, keys, columns), HeadNorm(shift) if normed else None
    return own_kernel(partial(rope_program, heads, element, norm, Rotation(turned, repeated, beside)), target)


@lru_cache(maxsize=64)
def _shift_kernel(length: int, columns: int, element: str, target: str) -> Kernel:
    from lowbit.passes.kernels.shift import shift_program

    return own_kernel(partial(shift_program, length, columns, element), target)


_Kind = tuple[bool, bool, bool, bool]  # masked, added, sinks and capped of an `AttentionPlan`


def _attention_kernel(
    queries: int, keys: int, columns: int, element: str, rows: int, kind: _Kind, target: str
) -> Kernel:
    """Returns the kernel for so many tokens: few share out their places among many blocks. Within
    `lowbit.batch_invariant` all do as one does: parts are added up in their order."""
    from lowbit.passes.kernels.attention import AttentionPlan
    from lowbit.passes.kernels.rope import Heads

    rows, most = (1, MOST_ROWS) if MODE.on else (rows, 0)
    blocks, parts = rows * AttentionPlan(Heads(queries, keys, columns), element).blocks, 1
    while parts < _MOST_PARTS and blocks * parts * 2 <= _BLOCKS:
        parts *= 2
    return _attention_of_parts(queries, keys, columns, element, parts, kind, most, target)


@lru_cache(maxsize=64)
def _attention_of_parts(
    queries: int, keys: int, columns: int, element: str, parts: int, kind: _Kind, most: int, target: str
) -> Kernel:
    from lowbit.passes.kernels.attention import AttentionPlan, attention_program
    from lowbit.passes.kernels.rope import Heads

    masked, *others = kind
    plan = AttentionPlan(Heads(queries, keys, columns), element, parts, masked, most, *others)
    return own_kernel(partial(attention_program, plan), target)
