"""What torch has to know of `torch.ops.lowbit.matmul` to trace it: its schema, its result's shape, its gradient.

It takes x, the tensors of a weight in the order of `spec.tensors`, and the matmul: spec, target and schedule as JSON.
So a graph that holds it can be stored and run by another process, which compiles the matmul when it first meets it.
`pylib.matmul` gives the operator its implementation with `implement`.

The gradient to x is dy W, where `torch.ops.lowbit.dequantize` writes W out; the weight's tensors have none. Both are
operators, so that torch.compile can trace the backward pass as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowbit.dialect.errors import LowbitError, SpecError
from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.registry import schedule_from_dict, schedule_to_dict
from lowbit.passes.target import Target
from lowbit.pylib.torch_types import TORCH

_LIBRARY = torch.library.Library("lowbit", "DEF")
_LIBRARY.define(
    "matmul.packed(Tensor x, Tensor[] weight, str kernel) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define("dequantize(Tensor[] weight, str kernel) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
# What graphs call that were saved before a weight was one argument: it is there to say so.
_LIBRARY.define("matmul(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, str kernel) -> Tensor")


def describe(spec: MatmulSpec, target: Target, schedule: KernelSchedule | None) -> str:
    """Returns the `kernel` argument of the operator."""
    written = schedule and schedule_to_dict(schedule)
    return json.dumps({"spec": spec.to_dict(), "target": target.name, "schedule": written})


@cache
def parts(kernel: str) -> dict[str, Any]:
    """Returns the arguments of `compile` that a `kernel` argument describes; raises SpecError if it describes none."""
    try:
        given = json.loads(kernel)
        spec, target, schedule = given["spec"], given["target"], given["schedule"]
        schedule = schedule and schedule_from_dict(schedule)
        return {"spec": interned(MatmulSpec.from_dict(spec)), "target": target, "schedule": schedule}
    except LowbitError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(f"kernel={kernel!r} must be a Matmul's description ({error})") from None


def _fake_matmul(x: Tensor, weight: list[Tensor], kernel: str) -> Tensor:
    spec: MatmulSpec = parts(kernel)["spec"]
    return x.new_empty((*x.shape[:-1], spec.n), dtype=TORCH[spec.out_dtype])


def _fake_dequantize(weight: list[Tensor], kernel: str) -> Tensor:
    spec: MatmulSpec = parts(kernel)["spec"]
    return weight[0].new_empty((spec.n, spec.k), dtype=TORCH[spec.act])


def _save_for_gradient(ctx: Any, inputs: tuple[Tensor, Sequence[Tensor], str], output: Tensor) -> None:
    _, weight, ctx.kernel = inputs
    ctx.save_for_backward(*weight)
    if not ctx.needs_input_grad[0]:  # a scale that requires a gradient must not look as if it got one
        ctx.mark_non_differentiable(output)


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, list[None], None]:
    """Returns dx = dy W; sums are in f32 where y is of another type than x."""
    weight = list(ctx.saved_tensors)
    dx: Tensor | None = None
    if ctx.needs_input_grad[0]:
        w = torch.ops.lowbit.dequantize(weight, ctx.kernel)
        dx = dy @ w if dy.dtype is w.dtype else (dy.float() @ w.float()).to(w.dtype)
    return dx, [None] * len(weight), None


def _refuse_old_graph(*_: object) -> Tensor:
    raise SpecError("this graph is of an earlier version, whose operator took codes by name; export it again")


def implement(matmul: Callable[..., Tensor], dequantize: Callable[..., Tensor]) -> None:
    """Make these functions what the operators run on tensors that have values."""
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl("matmul.packed", matmul, device)
        _LIBRARY.impl("dequantize", dequantize, device)


torch.library.register_fake("lowbit::matmul.packed", _fake_matmul, lib=_LIBRARY)
torch.library.register_fake("lowbit::dequantize", _fake_dequantize, lib=_LIBRARY)
torch.library.register_autograd("lowbit::matmul.packed", _gradient, setup_context=_save_for_gradient, lib=_LIBRARY)
_LIBRARY.impl("matmul", _refuse_old_graph, "CompositeExplicitAutograd")
