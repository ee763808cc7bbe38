"""Tells whether torch watches a call: it compiles or traces a program, or has a transform or a dispatch mode on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch._C import (
    DispatchKey,
    _dispatch_tls_is_dispatch_key_included,
    _get_tracing_state,
    _is_tracing,
    _len_torch_dispatch_stack,
    _set_tracing_state,  # type: ignore[attr-defined]
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from lowbit.dialect.errors import SpecError

_PRE_DISPATCH = DispatchKey.PreDispatch  # has a stack of modes of its own, which make_fx(pre_dispatch=True) uses


def is_observed() -> bool:
    """Tells whether torch must see a call as an operator, and whether to run one would leave a trace."""
    return (
        is_dynamo_compiling()
        or _len_torch_dispatch_stack() > 0
        or _is_tracing()
        or forward_ad._current_level >= 0
        or _dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
    )


def sizes_as_numbers() -> AbstractContextManager[None]:
    """Returns a context in which the sizes of tensors are numbers, while torch.jit.trace records them as tensors."""
    return _unrecorded() if not is_dynamo_compiling() and _is_tracing() else nullcontext()


@contextmanager
def _unrecorded() -> Iterator[None]:
    state = _get_tracing_state()
    _set_tracing_state(None)
    try:
        yield
    finally:
        _set_tracing_state(state)


def check_transforms(x: Tensor) -> None:
    """Raise SpecError in forward mode, and if x belongs to a transform of torch.func.

    Here a tangent is out of sight, so forward mode is refused whether or not x has one.
    """
    if is_dynamo_compiling():
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(x):  # type: ignore[attr-defined]
        raise SpecError("torch.func's transforms (grad, vmap, jvp) do not go through a matmul; call it outside of them")
    if forward_ad._current_level >= 0:
        raise SpecError("forward-mode gradients do not go through a matmul; call it outside of forward mode")
