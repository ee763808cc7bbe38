"""Checks that the arguments of a call fit the spec and each other. Every error says how to mend the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.dialect.errors import PackError, SpecError, TargetError
from lowbit.dialect.formats.byte_codes import SUM_COLUMNS
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.operator.tracing import check_transforms
from lowbit.pylib.runtime.activation import VALUES, QuantizedActivation
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import PackedWeight
from lowbit.pylib.weights.tensor_checks import ALIGNMENT, check_storage


def check_call(spec: MatmulSpec, x: Tensor, w: PackedWeight) -> None:
    """Raises SpecError for an x and PackError for a weight that do not fit, TargetError for two devices."""
    _check_x(spec, x)
    check_weight(spec, w)
    check_devices(x, w)


def check_quantized_call(spec: MatmulSpec, x: QuantizedActivation, w: PackedWeight) -> None:
    """Raises what `check_call` raises, for an activation of 8 bits."""
    check_weight(spec, w)
    check_quantized(spec, x)
    check_devices(x, w)


def check_weight(spec: MatmulSpec, w: PackedWeight) -> None:
    """Raises PackError unless w is a weight that was packed for an equal spec."""
    if not isinstance(w, PackedWeight):
        raise PackError(f"the weight must be a PackedWeight, not {type(w).__name__}; use pack()")
    if w.spec is not spec and w.spec != spec:
        raise PackError(f"the weight was packed for ({w.spec}), not for ({spec}); pack it anew")


def check_quantized(spec: MatmulSpec, x: QuantizedActivation) -> None:
    """Raises SpecError unless an activation of 8 bits has the spec's type and columns, and its parts fit each other."""
    if x.compute != spec.compute:
        raise SpecError(
            f"x was quantized to {x.compute!r}, but the spec has compute={spec.compute!r}; quantize it anew"
        )
    *rows, k = x.shape or (0,)
    if k != spec.k:
        raise SpecError(f"x must be [..., k={spec.k}], not {list(x.shape)}")
    if [*x.scales.shape] != rows or [*x.sums.shape] != [*rows, k // SUM_COLUMNS]:
        parts = f"values {list(x.shape)}, scales {list(x.scales.shape)} and sums {list(x.sums.shape)}"
        raise SpecError(f"x has {parts}, which are not of the same rows; quantize it anew")


def check_readable(w: object) -> None:
    """Raises PackError if w is a weight whose tensors have no values, or no longer the memory of them."""
    if not isinstance(w, PackedWeight):
        return
    if w.readable_spec is None:
        what = "on meta" if w.device.type == "meta" else f"of type {type(w.codes).__name__}"
        raise PackError(f"the weight's tensors are {what}: they have no values; load them, or trace x as well")
    for slot, t in zip(w.spec.tensors, w.tensors):
        check_storage(f"packed {slot.name}", t, PackError)


def check_memory_of_x(x: Tensor) -> None:
    """Raises SpecError if x is no plain array of numbers."""
    if x.layout is not torch.strided:
        raise SpecError(f"x is {x.layout}; use x.to_dense()")
    check_transforms(x)
    check_storage("x", x, SpecError)
    if not x.data_ptr() and x.numel():
        raise SpecError("x has no memory that a kernel could read; clone it")


def check_one_expert(spec: MatmulSpec) -> None:
    """Raises SpecError for a spec of several experts, whose kernels take more than x and a weight."""
    if spec.experts > 1:
        raise SpecError(
            f"({spec}) multiplies rows of x that are sorted by expert, which lowbit.LowbitExperts does for a layer; "
            "for one expert, or all rows at once, use a spec with experts=1"
        )


def check_residual(
    spec: MatmulSpec, x_shape: Sequence[int], device: torch.device, residual: Tensor | None, gradient: bool = True
) -> None:
    """Raises SpecError unless a residual is there where the epilogue adds one, and fits an x of this shape and device.

    gradient: whether it may require one
    """
    check_one_expert(spec)
    if not spec.call_inputs:
        if residual is not None:
            raise SpecError(f"({spec}) adds no residual; use a spec with epilogue='residual', or drop residual=")
        return
    shape, kind = [*x_shape[:-1], spec.n], TORCH[spec.out_dtype]
    if not isinstance(residual, Tensor):
        raise SpecError(f"({spec}) adds a residual {shape}, not {type(residual).__name__}; call mm(x, w, residual=r)")
    if [*residual.shape] != shape:
        raise SpecError(f"residual must be {shape}, as y is, not {[*residual.shape]}")
    if residual.dtype is not kind:
        raise SpecError(f"residual is {residual.dtype}, but y is {kind}; use residual.to({kind})")
    if residual.device != device:
        raise TargetError(f"residual is on {residual.device}, but x is on {device}; move one of them")
    if residual.layout is not torch.strided:
        raise SpecError(f"residual is {residual.layout}; use residual.to_dense()")
    check_storage("residual", residual, SpecError)
    if not gradient and residual.requires_grad and torch.is_grad_enabled():
        raise SpecError("x in 8 bits has no gradients, nor has a residual beside it; use residual.detach()")


def in_memory(residual: Tensor) -> Tensor:
    """Returns a residual as kernels read it: contiguous, at a multiple of 16 bytes."""
    if residual.is_contiguous() and residual.data_ptr() % ALIGNMENT == 0 and not residual.is_neg():
        return residual
    return residual.resolve_neg().clone(memory_format=torch.contiguous_format)


def check_devices(x: Tensor | QuantizedActivation, w: PackedWeight | Tensor) -> None:
    """Raises TargetError unless x and a weight, or a tensor of it, are on one device."""
    if x.device != w.device:
        raise TargetError(f"x is on {x.device}, but the weight is on {w.device}; use w.to({str(x.device)!r})")


def _check_x(spec: MatmulSpec, x: Tensor) -> None:
    act = TORCH[spec.act]
    if not isinstance(x, Tensor):
        fix = "call mm(x, w)" if isinstance(x, PackedWeight) else "use torch.as_tensor(x)"
        raise SpecError(f"x must be a torch tensor, not {type(x).__name__}; {fix}")
    if x.dtype is not act and spec.compute and x.dtype is VALUES[spec.compute]:
        raise SpecError(f"x is {x.dtype} and needs its scales, one per row: mm(x, w, x_scale=...)")
    if x.dtype is not act:
        raise SpecError(f"x is {x.dtype}, but act={spec.act!r}; use x.to({act})")
    if x.ndim == 0 or x.shape[-1] != spec.k:
        raise SpecError(f"x must be [..., k={spec.k}], not {list(x.shape)}")
