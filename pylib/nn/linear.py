"""`LowbitLinear`: a linear layer whose weight is packed in low-bit codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import PackError, QuantizeError, SpecError
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.pylib.nn.packed_module import PackedModule, autocast
from lowbit.pylib.operator.constants import constant
from lowbit.pylib.operator.schema import of_residual
from lowbit.pylib.quantization.api import quantize
from lowbit.pylib.quantization.calibration import Calibration
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.weights.packed import PackedWeight
from lowbit.pylib.weights.saved import check_same
from lowbit.pylib.weights.values import as_tensor, to_memory


class LowbitLinear(PackedModule, nn.Linear):
    """A linear layer with a packed low-bit weight. Made by `from_linear`, `from_packed` or `empty`.

        layer = lowbit.LowbitLinear.from_linear(linear.bfloat16(), lowbit.QuantConfig("u4", group_size=128))
        y = layer(x)    # x [..., k] in bf16

    The matmul is compiled for the device of the buffers when it is first needed. x must have the spec's act type:
    nothing is cast but under `torch.autocast`. `.to(dtype)`, `.half()` and `.bfloat16()` leave the types of the buffers
    alone.

    spec   what is computed
    """

    def __init__(self, spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> None:
        PackedModule.__init__(self, spec, tensors)
        self.in_features, self.out_features = spec.k, spec.outputs

    def _hold(self, spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> None:
        super()._hold(spec, tensors)
        if not spec.bias:
            self.register_parameter("bias", None)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        config: QuantConfig | None = None,
        calibration: Tensor | Calibration | None = None,
        act: Act | None = None,
    ) -> LowbitLinear:
        """Returns a layer with the quantized weight of another, on the same device.

        act: type of the inputs, "f16" or "bf16"; None: the type of the weight

        Raises QuantizeError and SpecError as `lowbit.quantize` does, and where act must be given.
        """
        config = QuantConfig() if config is None else config
        spec = spec_of(linear, config, act)
        quantized = quantize(linear.weight, config.multiplied_in(spec.act), calibration)
        if quantized.column_scales is not None:
            raise QuantizeError(AWQ_NEEDS_FOLDING)
        bias = None if linear.bias is None else linear.bias.detach()
        return cls.from_packed(quantized.pack(spec, bias)).train(linear.training)

    @classmethod
    def from_packed(cls, packed: PackedWeight, bias: Tensor | None = None) -> LowbitLinear:
        """Returns a layer that shares the tensors of a packed weight.

        bias: [n], for a weight that was packed without one
        """
        if not isinstance(cast(object, packed), PackedWeight):
            raise PackError(f"the weight must be a PackedWeight, not {type(packed).__name__}; use pack()")
        if bias is None:
            return cls(packed.spec, packed)
        if packed.spec.bias:
            raise PackError("the weight was packed with a bias; drop bias=")
        spec = replace(packed.spec, bias=True)
        slot = spec.slot("bias")
        given = to_memory(spec, slot, as_tensor(slot, bias)).to(packed.device)
        return cls.from_packed(PackedWeight(spec, {**packed, "bias": given}))

    @property
    def qweight(self) -> Tensor:
        """The codes, by the name under which PEFT looks for a quantized weight, to put adapters where it is."""
        return self.codes

    def forward(self, input: Tensor) -> Tensor:
        """Returns y [..., n] in the spec's out type for x [..., k] in its act type.

        Raises SpecError for an x of another type or length; it names the fix.
        """
        return self.multiply(input)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """Returns y + residual [..., n] for x [..., k], in one launch and rounded once.

        Raises SpecError for a residual of another shape or type than y.
        """
        tensors, kernel = self.operands()
        return torch.ops.lowbit.matmul.packed(autocast(x, self._act), [*tensors, residual], _of_residual(kernel))

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """Returns a dense layer with the dequantized weight, in the act type or in another."""
        weight = self.dequantize()
        linear = nn.Linear(self.in_features, self.out_features, self.spec.bias, "meta").train(self.training)
        linear.weight = nn.Parameter(weight.to(dtype or weight.dtype))
        if self.spec.bias:
            linear.bias = nn.Parameter(cast(Tensor, self.bias).to(linear.weight.dtype))
        return linear

    def hold(self, packed: PackedWeight) -> None:
        """Take another packed weight in place of this layer's; `in_features` and `out_features` stay as they are."""
        self._hold(packed.spec, packed)

    def update_(
        self,
        weight: Tensor | PackedWeight,
        config: QuantConfig | None = None,
        calibration: Tensor | Calibration | None = None,
    ) -> LowbitLinear:
        """Takes another weight in the memory of this layer's own, so that CUDA graphs and compiled functions multiply
        by it from now on; returns the layer.

            layer.update_(linear.weight, config)    # the config that the layer was quantized with

        weight        floats [n, k], to be quantized where they are; or a weight that is packed already
        config        how to quantize floats; None: QuantConfig()
        calibration   as `from_linear` takes it

        The bias stays as it is; that of a packed weight replaces it. Raises QuantizeError as `lowbit.quantize` does,
        and PackError as `pack` and `PackedWeight.update_` do: for a config that gives another format, say.
        """
        if isinstance(weight, PackedWeight):
            self.packed.update_(weight)
            return self
        config = QuantConfig() if config is None else config
        spec = config.spec(*weight.shape, act=self.spec.act, bias=self.spec.bias)
        check_same(replace(spec, epilogue=self.spec.epilogue), self.spec)
        quantized = quantize(weight.detach(), config.multiplied_in(self.spec.act), calibration)
        if quantized.column_scales is not None:
            raise QuantizeError(AWQ_NEEDS_FOLDING)
        self.packed.update_(quantized.pack(self.spec, cast("Tensor | None", self.bias)))
        return self

    def split_(self, dim: int, index: int, count: int) -> None:
        """Keep one of several parts of the weight, as `PackedWeight.shard` cuts it, for tensor parallelism.

        `in_features` and `out_features` stay those of the whole layer.
        """
        self.hold(self.packed.shard(dim, index, count))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.spec}"


@constant
def _of_residual(kernel: str) -> str:
    return of_residual(kernel)


AWQ_NEEDS_FOLDING = (
    "AWQ's column scales belong into the layer before: use lowbit.quantize_ for the whole model, "
    "quantize(...).fold_into(norm) and LowbitLinear.from_packed, or method='gptq'"
)
CODES = "codes of a model that is quantized already; lowbit.load_checkpoint imports its files"


def spec_of(linear: nn.Linear, config: QuantConfig, act: Act | None) -> MatmulSpec:
    """Returns the spec that a linear layer has after it is quantized. Raises SpecError if there is none."""
    if not isinstance(cast(object, linear), nn.Linear) or linear.weight is None:
        raise SpecError(f"{type(linear).__name__} must be an nn.Linear with a dense weight")
    if not isinstance(cast(object, config), QuantConfig):
        raise SpecError(f"config={config!r} must be a QuantConfig, such as QuantConfig('u4', 128)")
    has_bias = linear.bias is not None
    return config.spec(linear.out_features, linear.in_features, act=act or act_of(linear.weight), bias=has_bias)


def is_codes(weight: Tensor) -> bool:
    """Tells whether a weight has no floats of 16 bits or more, and so means nothing without its scales."""
    return weight.itemsize < 2 or not weight.is_floating_point()


def act_of(weight: Tensor) -> Act:
    """Returns the type of inputs that fits the type of a dense weight. Raises SpecError for f32 and others."""
    if weight.dtype is torch.float16:
        return "f16"
    if weight.dtype is torch.bfloat16:
        return "bf16"
    if is_codes(weight):
        raise SpecError(f"weight is {weight.dtype}: {CODES}")
    types = f"weight is {weight.dtype}, and kernels take inputs in f16 or bf16"
    raise SpecError(f"{types}; convert the model (model.bfloat16()), or say act='bf16'")
