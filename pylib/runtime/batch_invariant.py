"""`lowbit.batch_invariant`: a block in which low-bit layers give a token the same bits whatever is beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from threading import Lock

from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.pylib.operator.constants import constant


class _Mode:
    """Whether all layers of the process multiply so. torch.compile traces anew where that changes."""

    on = False


MODE = _Mode()


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Within, low-bit layers multiply as those of a spec with `invariant=True` do, and lowbit's attention shares out
    the places of a token in one way:

        with lowbit.batch_invariant():
            logits = model(tokens)    # a token's bits do not depend on the others

    enabled   False: within, layers multiply as their specs say

    It holds for all threads of the process, until each has left its blocks. Layers raise SpecError for a spec that
    can't be invariant, which says why.
    """
    block = [enabled]
    _enter(block)
    try:
        yield
    finally:
        _leave(block)


_LOCK, _OPEN = Lock(), list[list[bool]]()  # the blocks of all threads that have not been left, in the order of entering


def _enter(block: list[bool]) -> None:
    with _LOCK:
        _OPEN.append(block)
        MODE.on = block[0]


def _leave(block: list[bool]) -> None:
    """Ends a block; the one that was entered last of those that are left says how layers multiply."""
    with _LOCK:
        _OPEN[:] = [each for each in _OPEN if each is not block]
        MODE.on = _OPEN[-1][0] if _OPEN else False


def called(spec: MatmulSpec) -> MatmulSpec:
    """Returns the spec that calls of a layer compute now. Raises SpecError for one that can't be invariant."""
    return interned(replace(spec, invariant=True)) if MODE.on else spec


@constant
def invariant_text(spec: str) -> str:
    """Returns a spec, as JSON, with `invariant`. Raises SpecError for one that can't have it."""
    return _invariant_text(spec)


@cache
def _invariant_text(spec: str) -> str:
    return json.dumps(replace(MatmulSpec.from_dict(json.loads(spec)), invariant=True).to_dict())
