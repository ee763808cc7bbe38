"""The implementations of torch's operators. A call becomes an operator where torch watches it
(`pylib.operator.tracing`).

An operator gets the tensors of a weight as a list, in the order of `spec.tensors`, and not as a `PackedWeight`. Making
one looks at every tensor, which takes as long as everything else; so tensors that have passed once are noted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.dialect.errors import PackError
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.operator.call_checks import (
    check_call,
    check_devices,
    check_quantized,
    check_readable,
    check_residual,
    in_memory,
)
from lowbit.pylib.operator.tracing import check_transforms
from lowbit.pylib.runtime.activation import Quantized, QuantizedActivation
from lowbit.pylib.runtime.interface import Runtime
from lowbit.pylib.runtime.matmul_runtimes import MatmulRuntimes
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights import dequantized, gated_rows
from lowbit.pylib.weights.packed import PackedWeight
from lowbit.pylib.weights.tensor_checks import SeenTensors
from lowbit.pylib.weights.written import check_operand


class OperatorCalls:
    """The calls of one matmul as operators make them: `x` is as `Matmul` takes it, `weight` the list of tensors, behind
    which stand those of `MatmulSpec.call_inputs`."""

    def __init__(self, spec: MatmulSpec, runtimes: MatmulRuntimes) -> None:
        self._spec = spec
        self._act, self._k = TORCH[spec.act], spec.k
        self._stored = len(spec.tensors)
        self._runtimes = runtimes
        self._run = runtimes.ordinary.matmul
        self._seen = SeenTensors()  # weights that the ordinary runtime multiplies

    def matmul(self, x: Tensor, weight: Sequence[Tensor]) -> Tensor:
        """Returns y [..., n], or [..., n / 2] of a gated MLP."""
        if self._spec.call_inputs:
            return self._matmul_with_residual(x, weight)
        if not self._seen.has(weight):
            return self._first_matmul(x, weight)
        if x.dtype is not self._act or not x.ndim or x.shape[-1] != self._k or x.get_device() != weight[0].get_device():
            check_call(self._spec, x, self._as_weight(weight))
        if forward_ad._current_level >= 0:
            check_transforms(x)
        return self._run(x, weight)

    def _first_matmul(self, x: Tensor, weight: Sequence[Tensor]) -> Tensor:
        """Runs the matmul with a weight that was not seen before, or whose wide range must be looked at in every
        call."""
        w = self._readable(weight)
        check_call(self._spec, x, w)
        check_transforms(x)
        return self._runtime_of(w, weight).matmul(x, weight)

    def _matmul_with_residual(self, x: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """The same with a residual behind the tensors of the weight."""
        *weight, residual = operands
        w = self._readable(weight)
        check_call(self._spec, x, w)
        check_residual(self._spec, x.shape, x.device, residual)
        check_transforms(x)
        return self._runtime_of(w, weight).matmul(x, [*weight, in_memory(residual)])

    def _runtime_of(self, w: PackedWeight, weight: Sequence[Tensor]) -> Runtime:
        """Returns the runtime that multiplies a weight by x in the act type, and notes the weight if it is the ordinary
        one."""
        runtime = self._runtimes.wide if w.wide_range else self._runtimes.ordinary
        if runtime is self._runtimes.ordinary:
            self._seen.add(weight)
        return runtime

    def quantized_matmul(self, x: Quantized, weight: Sequence[Tensor]) -> Tensor:
        """Returns y [..., n] of an activation of 8 bits."""
        weight, others = weight[: self._stored], weight[self._stored :]
        if not self._seen.has(weight):
            self._runtime_of(self._readable(weight), weight)
        activation = QuantizedActivation(*x, self._spec.byte_type)
        check_quantized(self._spec, activation)
        check_devices(activation, weight[0])
        check_residual(self._spec, activation.shape, activation.device, others[0] if others else None)
        return self._runtimes.of_eight_bits.multiply(x, [*weight, *map(in_memory, others)])

    def dequantize(self, weight: Sequence[Tensor]) -> Tensor:
        """Returns W [n, k] in the act type."""
        if not self._seen.has(weight):
            self._readable(weight)
        return gated_rows.given(self._spec, self._runtimes.ordinary.dequantize(weight))

    def input_gradient(self, dy: Tensor, weight: Sequence[Tensor]) -> Tensor:
        """Returns dx = dy W [..., k] in the act type; sums are in f32 where dy is of another type than x, and for a
        weight of a wide range."""
        w = self._readable(weight)
        if w.wide_range:
            return (dy.float() @ dequantized.dequantize(self._spec, w, torch.float32)).to(self._act)
        dense = self._runtimes.ordinary.dequantize(weight)
        return dy @ dense if dy.dtype is self._act else (dy.float() @ dense.float()).to(self._act)

    def _readable(self, weight: Sequence[Tensor]) -> PackedWeight:
        """Returns the weight of these tensors. Raises PackError if they do not fit the spec, have no values, or are
        codes of a layer that were written to."""
        w = self._as_weight(weight)
        check_readable(w)
        check_operand(w.codes)
        return w

    def _as_weight(self, weight: Sequence[Tensor]) -> PackedWeight:
        names = [slot.name for slot in self._spec.tensors]
        if len(weight) != len(names):
            raise PackError(f"({self._spec}) takes {len(names)} tensors, {', '.join(names)}, not {len(weight)}")
        return PackedWeight(self._spec, dict(zip(names, weight)))
