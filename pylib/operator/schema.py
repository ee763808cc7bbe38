"""Declares `torch.ops.lowbit.matmul` to torch, so that it can be traced: schema, shape of the result, gradient.

It takes x, the tensors of `spec.call_operands`, a weight's and perhaps a residual, and the matmul: spec, target and
schedule as JSON. So a graph that holds it can be stored and run by another process, which compiles the matmul when it
first meets it. `pylib.matmul` gives the operators their implementations with `implement`.

The gradient to x is dy W, which `torch.ops.lowbit.input_gradient` computes; the weight's tensors have none. It is an
operator as well, so that torch.compile can trace the backward pass.

A call that needs no gradient costs what torch's dispatcher takes to call one Python function: the autograd kernel runs
the matmul itself where nothing else than the device would come after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.epilogue import ACTIVATIONS, HALF
from lowbit.dialect.errors import LowbitError, SpecError
from lowbit.dialect.fields import shown
from lowbit.dialect.formats.byte_codes import SUM_COLUMNS, Compute
from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.registry import schedule_from_dict, schedule_to_dict
from lowbit.passes.target import Target
from lowbit.pylib.operator.calls import OperatorCalls
from lowbit.pylib.operator.tracing import check_transforms
from lowbit.pylib.runtime.activation import VALUES
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights import gated_rows

_LIBRARY = torch.library.Library("lowbit", "DEF")
_LIBRARY.define(
    "matmul.packed(Tensor x, Tensor[] weight, str kernel) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "matmul.quantized(Tensor values, Tensor scales, Tensor sums, Tensor[] weight, str kernel) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "quantize_activation(Tensor x, str compute, str target) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define("dequantize(Tensor[] weight, str kernel) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    "input_gradient(Tensor dy, Tensor[] weight, str kernel) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
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
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"kernel={shown(kernel)} must be a Matmul's description ({error})") from None


@cache
def of_sums(kernel: str) -> str:
    """Returns the `kernel` argument of the matmul without its epilogue: of its sums, in the order of stored rows."""
    spec: MatmulSpec = parts(kernel)["spec"]
    if not spec.epilogue:
        return kernel
    return json.dumps({**json.loads(kernel), "spec": spec.without_epilogue.to_dict(), "schedule": None})


@cache
def of_residual(kernel: str) -> str:
    """Returns the `kernel` argument of a matmul without an epilogue with a residual added to what it returns."""
    return json.dumps({**json.loads(kernel), "spec": {**parts(kernel)["spec"].to_dict(), "epilogue": "residual"}})


def gated_gradient(spec: MatmulSpec, dy: Tensor, sums: Tensor) -> Tensor:
    """Returns the gradient to the sums [..., n] of a gated MLP, whose halves alternate as rows are stored.

    With p = 1 / (1 + exp(-s)) and s = g (c + d g^2), the gate's is dy u (p + g p (1 - p) (c + 3 d g^2)). It is 0 where
    a limit cuts off.
    """
    activation, given = ACTIVATIONS[str(spec.epilogue)], dy.float().unflatten(-1, (-1, HALF))
    halves, most = gated_rows.halves(sums.float()), activation.limit
    gate, up = halves[0].clamp(max=most), halves[1].clamp(-most, most)
    to_gate, to_up = (given * (half == clamped) for half, clamped in zip(halves, (gate, up)))
    square = gate * gate
    p = torch.sigmoid(gate * (activation.linear + activation.cubic * square))
    slope = p + gate * p * (1 - p) * (activation.linear + 3 * activation.cubic * square)
    return torch.stack([to_gate * (up + activation.shift) * slope, to_up * gate * p], -2).flatten(-3).to(dy.dtype)


def _fake_matmul(x: Tensor, weight: list[Tensor], kernel: str) -> Tensor:
    spec: MatmulSpec = parts(kernel)["spec"]
    return x.new_empty((*x.shape[:-1], spec.outputs), dtype=TORCH[spec.out_dtype])


def _fake_quantized(values: Tensor, scales: Tensor, sums: Tensor, weight: list[Tensor], kernel: str) -> Tensor:
    return _fake_matmul(values, weight, kernel)


def _fake_quantize(x: Tensor, compute: Compute, target: str) -> tuple[Tensor, Tensor, Tensor]:
    *batch, k = x.shape
    f32 = torch.float32
    values = x.new_empty(x.shape, dtype=VALUES[compute])
    return values, x.new_empty(batch, dtype=f32), x.new_empty((*batch, k // SUM_COLUMNS), dtype=f32)


def _fake_dequantize(weight: list[Tensor], kernel: str) -> Tensor:
    spec: MatmulSpec = parts(kernel)["spec"]
    return weight[0].new_empty((spec.n, spec.k), dtype=TORCH[spec.act])


_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


class _Product(torch.autograd.Function):
    """The matmul with its gradients to x and to a residual; scales that require one get None."""

    @staticmethod
    def forward(ctx: Any, keys: Any, x: Tensor, kernel: str, *weight: Tensor) -> Tensor:
        ctx.kernel, spec = kernel, parts(kernel)["spec"]
        ctx.save_for_backward(*weight[: len(spec.tensors)], *([x] if spec.is_gated else []))
        with torch._C._ExcludeDispatchKeyGuard(_VIEWS):  # y is no view, so that it can be added to in place
            return _below_autograd(keys, x, weight, kernel)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), spec = grads, parts(ctx.kernel)["spec"]
        weight, others = list(ctx.saved_tensors), [dy] * len(spec.call_inputs)
        kernel, dh, dx = of_sums(ctx.kernel), dy, None
        if spec.is_gated:
            x = weight.pop()
            dh = gated_gradient(spec, dy, torch.ops.lowbit.matmul.packed(x, weight, kernel))
        if ctx.needs_input_grad[1]:  # or a residual alone needs one
            dx = torch.ops.lowbit.input_gradient(dh, weight, kernel)
        return None, dx, None, *[None] * len(weight), *others


def _below_autograd(keys: Any, x: Tensor, weight: Sequence[Tensor], kernel: str) -> Tensor:
    """Call the operator as what comes after autograd sees it: functionalization, modes, and the device at last."""
    with torch._C._AutoDispatchBelowAutograd():
        operator = torch.ops.lowbit.matmul.packed
        return operator.redispatch(keys & torch._C._after_autograd_keyset, x, list(weight), kernel)


def _autograd_of(matmul: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the operator's kernel for autograd. It gets the dispatch keys of its arguments first."""
    plain = {_plain_keys("CPU", "AutogradCPU"), _plain_keys("CUDA", "AutogradCUDA")}

    def run(keys: Any, x: Tensor, weight: Sequence[Tensor], kernel: str) -> Tensor:
        if (x.requires_grad or _adds_differentiable(weight, kernel)) and torch.is_grad_enabled():
            check_transforms(x)
            return cast(Tensor, _Product.apply(keys, x, kernel, *weight))
        if keys.raw_repr() in plain:
            return matmul(x, weight, kernel)
        return _below_autograd(keys, x, weight, kernel)

    return run


def _adds_differentiable(weight: Sequence[Tensor], kernel: str) -> bool:
    """Tells whether a call adds a residual that requires a gradient."""
    return bool(weight) and weight[-1].requires_grad and bool(parts(kernel)["spec"].call_inputs)


def _plain_keys(*names: str) -> int:
    """Returns the dispatch keys of a call that has these alone, as a number."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    for name in names:
        keys = keys.add(getattr(torch._C.DispatchKey, name))
    return cast(int, keys.raw_repr())


def _fake_input_gradient(dy: Tensor, weight: list[Tensor], kernel: str) -> Tensor:
    spec: MatmulSpec = parts(kernel)["spec"]
    return dy.new_empty((*dy.shape[:-1], spec.k), dtype=TORCH[spec.act])


def _save_weight(ctx: Any, inputs: tuple[Tensor, Sequence[Tensor], str], output: Tensor) -> None:
    _, weight, ctx.kernel = inputs
    ctx.save_for_backward(*weight)


def _second_gradient(ctx: Any, g: Tensor) -> tuple[Tensor, list[None], None]:
    """Returns the gradient to dy of dx = dy W: g W^T."""
    weight = list(ctx.saved_tensors)
    w = torch.ops.lowbit.dequantize(weight, ctx.kernel)
    dy_type = TORCH[parts(ctx.kernel)["spec"].out_dtype]
    return (g.float() @ w.float().T).to(dy_type), [None] * len(weight), None


def _refuse_old_graph(*_: object) -> Tensor:
    raise SpecError("this graph is of an earlier version, whose operator took codes by name; export it again")


def implement(
    calls: Callable[[str], OperatorCalls], quantize: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> None:
    """Give the operators what they run on tensors that have values.

    calls      returns the calls of the matmul that a `kernel` argument describes
    quantize   what `quantize_activation` runs
    """

    def matmul(x: Tensor, weight: Sequence[Tensor], kernel: str) -> Tensor:
        return calls(kernel).matmul(x, weight)

    def quantized(values: Tensor, scales: Tensor, sums: Tensor, weight: Sequence[Tensor], kernel: str) -> Tensor:
        return calls(kernel).quantized_matmul((values, scales, sums), weight)

    def dequantize(weight: Sequence[Tensor], kernel: str) -> Tensor:
        return calls(kernel).dequantize(weight)

    def input_gradient(dy: Tensor, weight: Sequence[Tensor], kernel: str) -> Tensor:
        return calls(kernel).input_gradient(dy, weight)

    for device in ("CPU", "CUDA"):
        _LIBRARY.impl("matmul.packed", matmul, device)
        _LIBRARY.impl("matmul.quantized", quantized, device)
        _LIBRARY.impl("quantize_activation", quantize, device)
        _LIBRARY.impl("dequantize", dequantize, device)
        _LIBRARY.impl("input_gradient", input_gradient, device)
    _LIBRARY.impl("matmul.packed", _autograd_of(matmul), "Autograd", with_keyset=True)


torch.library.register_fake("lowbit::matmul.packed", _fake_matmul, lib=_LIBRARY)
torch.library.register_fake("lowbit::matmul.quantized", _fake_quantized, lib=_LIBRARY)
torch.library.register_fake("lowbit::quantize_activation", _fake_quantize, lib=_LIBRARY)
torch.library.register_fake("lowbit::dequantize", _fake_dequantize, lib=_LIBRARY)
torch.library.register_fake("lowbit::input_gradient", _fake_input_gradient, lib=_LIBRARY)
torch.library.register_autograd("lowbit::input_gradient", _second_gradient, setup_context=_save_weight, lib=_LIBRARY)
_LIBRARY.impl("matmul", _refuse_old_graph, "CompositeExplicitAutograd")
