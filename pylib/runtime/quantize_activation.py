"""Activations quantized to 8 bits once, for several matmuls.

    q = lowbit.quantize_activation(x, "f8e4m3")
    query, key = mm_query(q, w_query), mm_key(q, w_key)
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.dialect.errors import SpecError
from lowbit.pylib.operator.tracing import is_observed
from lowbit.pylib.runtime.activation import VALUES, QuantizedActivation, check_rows, compute_of, from_values
from lowbit.pylib.runtime.devices import target_at, target_named, this_machine
from lowbit.pylib.runtime.quantizers import quantize_on


def quantize_activation(
    x: Tensor, compute: str, *, scales: Tensor | None = None, target: str | None = None
) -> QuantizedActivation:
    """Returns x with 8 bits a number and one scale per row, for `Matmul` calls with this `MatmulSpec.compute`.

    x        [..., k] in f16 or bf16; or in torch.float8_e4m3fn or torch.int8, with its scales
    compute  "f8e4m3" or "i8"
    scales   [...] in f32, of an x of 8 bits
    target   as for `lowbit.compile`: None is this machine's GPU for an x there, and torch for one on the CPU

    A row's scale is its largest |x|, but at least 2^-100, times the f32 nearest to 1/448 (f8e4m3) or 1/127 (i8). Its
    values are x times the reciprocal of the scale, both in f32, rounded to nearest even. A row of zeros has zeros, and
    a row with a NaN or an infinity gets a scale that makes its row of y NaN.

    Raises SpecError for tensors that do not fit; TargetError where the target has no such type or is elsewhere.
    """
    chosen = compute_of(compute)
    check_rows(x)
    if x.dtype in VALUES.values():
        return from_values(x, scales, chosen)
    if scales is not None:
        raise SpecError(f"scales= are those of an x of 8 bits, but x is {x.dtype}; drop them, or give values of 8 bits")
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise SpecError(f"x is {x.dtype}; it must be torch.float16, torch.bfloat16, or of 8 bits with scales")
    if x.requires_grad and torch.is_grad_enabled():
        raise SpecError("quantized activations have no gradient; use mm(x, w), which has one, or x.detach()")
    traced = is_observed() or type(x) is not Tensor or x.requires_grad or x.is_neg()
    name = _target(x, traced) if target is None else target_named(target).name
    quantize = torch.ops.lowbit.quantize_activation if traced else quantize_on  # the operator takes some us more
    values, row_scales, sums = quantize(x.detach() if traced else x, chosen, name)
    return QuantizedActivation(values, row_scales, sums, chosen)


def _target(x: Tensor, traced: bool) -> str:
    """Returns the target for an x: that of its GPU, or of the current one where torch traces."""
    if traced:
        return this_machine() if x.is_cuda else "cpu"
    return target_at(x.get_device())
