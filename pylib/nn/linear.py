"""`LowbitLinear`: a linear layer whose weight is packed in low-bit codes.

The tensors of the packed weight are buffers with the names of `spec.tensors`: codes, scales, zeros, bias. There is no
dense weight: `layer.weight` is None. The spec travels in the state dictionary as extra state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result, is_compiling

from lowbit.dialect.errors import PackError, QuantizeError, SpecError
from lowbit.dialect.spec import Act, MatmulSpec, interned
from lowbit.dialect.weight import TensorSlot
from lowbit.pylib import saved_weight
from lowbit.pylib.matmul import Matmul, compile, this_machine
from lowbit.pylib.packed import PackedWeight
from lowbit.pylib.quantization.api import quantize
from lowbit.pylib.quantization.calibration import Calibration
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.torch_types import TORCH, stored_type

_EXTRA_STATE = "_extra_state"  # torch's name for it in a state dictionary


class LowbitLinear(nn.Linear):
    """A linear layer with a packed low-bit weight. Made by `from_linear`, `from_packed` or `empty`.

        layer = lowbit.LowbitLinear.from_linear(linear.bfloat16(), lowbit.QuantConfig("u4", group_size=128))
        y = layer(x)    # x [..., k] in bf16

    The matmul is compiled for the device of the buffers when it is first needed. x must have the spec's act type:
    nothing is cast. `.to(dtype)`, `.half()` and `.bfloat16()` leave the buffers' types alone.

    spec   what is computed
    """

    spec: MatmulSpec
    codes: Tensor

    def __init__(self, spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate a dense weight
        self.in_features, self.out_features = spec.k, spec.n
        self.register_parameter("weight", None)
        self._hold(spec, tensors)

    def _hold(self, spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> None:
        """Take a weight's tensors for buffers."""
        self.spec = interned(spec)
        self._spec_text = json.dumps(spec.to_dict())  # torch.compile takes no spec as a constant
        self._slots = tuple(slot.name for slot in spec.tensors)
        self._buffers.clear()
        for slot in spec.tensors:
            self.register_buffer(slot.name, tensors[slot.name])
        if not spec.bias:
            self.register_parameter("bias", None)
        self._last_packed: PackedWeight | None = None
        self._last_matmul: tuple[torch.device, Matmul] | None = None

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
        quantized = quantize(linear.weight, config, calibration)
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
        given = bias.detach().to(packed.device, TORCH[spec.out_dtype])
        return cls.from_packed(PackedWeight(spec, {**packed, "bias": given}))

    @classmethod
    def empty(cls, spec: MatmulSpec, device: torch.device | str | None = None) -> LowbitLinear:
        """Returns a layer of zeros to load a state dictionary into; on "meta" it takes no memory, and is loaded with
        `assign=True`."""
        if not isinstance(cast(object, spec), MatmulSpec):
            raise SpecError(f"spec={spec!r} must be a MatmulSpec, such as MatmulSpec(n=64, k=256, weight='u4')")
        return cls(spec, {s.name: _zeros(s, device) for s in spec.tensors})

    @property
    def packed(self) -> PackedWeight:
        """The weight as `PackedWeight`, which shares the buffers."""
        tensors = {slot.name: getattr(self, slot.name) for slot in self.spec.tensors}
        last = self._last_packed
        if last is None or any(a is not b for a, b in zip(last.tensors, tensors.values())):
            last = self._last_packed = PackedWeight(self.spec, tensors)
        return last

    @property
    def matmul(self) -> Matmul:
        """The matmul for the device of the buffers, which is compiled when it is first needed."""
        device = self.codes.device
        last = self._last_matmul
        if last is None or last[0] != device:
            last = self._last_matmul = device, _matmul_on(self.spec, device.type, device.index)
        return last[1]

    @property
    def qweight(self) -> Tensor:
        """The codes, by the name under which PEFT looks for a quantized weight, to put adapters where it is."""
        return self.codes

    def forward(self, input: Tensor) -> Tensor:
        """Returns y [..., n] in the spec's out type for x [..., k] in its act type.

        Raises SpecError for an x of another type or length; it names the fix.
        """
        if is_compiling():  # a graph holds the matmul as text; the operator checks x when the graph runs
            device = self.codes.device
            tensors = [getattr(self, name) for name in self._slots]
            kernel = _description(self._spec_text, device.type, device.index)
            return torch.ops.lowbit.matmul.packed(input, tensors, kernel)
        return self.matmul(input, self.packed)

    def dequantize(self) -> Tensor:
        """Returns the weight [n, k] in the act type."""
        return self.matmul.dequantize(self.packed)

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """Returns a dense layer with the dequantized weight, in the act type or in another."""
        weight = self.dequantize()
        linear = nn.Linear(self.in_features, self.out_features, self.spec.bias, "meta").train(self.training)
        linear.weight = nn.Parameter(weight.to(dtype or weight.dtype))
        if self.spec.bias:
            linear.bias = nn.Parameter(cast(Tensor, self.bias).to(linear.weight.dtype))
        return linear

    def split_(self, dim: int, index: int, count: int) -> None:
        """Keep one of several parts of the weight, as `PackedWeight.shard` cuts it, for tensor parallelism.

        `in_features` and `out_features` stay those of the whole layer.
        """
        part = self.packed.shard(dim, index, count)
        self._hold(part.spec, part)

    def check(self) -> None:
        """Check buffers that were set one by one as those of a file are checked, and lay them out for kernels.

        Raises PackError for a shape, a type or a value that kernels can't read. Buffers on meta are left alone.
        """
        tensors: dict[str, Tensor] = {name: getattr(self, name) for name in self._slots}
        if any(tensor.is_meta for tensor in tensors.values()):
            return
        _, checked = saved_weight.read({**tensors, saved_weight.SPEC: self.get_extra_state()}, self.spec)
        for name, tensor in checked.items():
            setattr(self, name, tensor)
        self._last_packed = None

    def reset_parameters(self) -> None:
        """Does nothing: there are no parameters, and a packed weight has no random start."""

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.spec}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LowbitLinear:
        """Move the buffers and keep their types; what others have added to the layer goes torch's way."""
        moved = {name: buffer if buffer is None else _moved(buffer, fn) for name, buffer in self._buffers.items()}
        self._buffers.clear()
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(moved)
        self._last_packed = None
        return self

    # -- saving and loading

    def get_extra_state(self) -> Tensor:
        """Returns the spec as JSON in bytes, which every format of files can hold."""
        return saved_weight.write_spec(self.spec)

    def set_extra_state(self, state: Tensor) -> None:
        """Does nothing: the state has been compared with the spec by `_load_from_state_dict`."""

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *rest: Any
    ) -> None:
        """Check tensors as kernels will read them before torch copies or assigns them."""
        error_msgs: list[str] = rest[2]
        names = [slot.name for slot in self.spec.tensors]
        if all(prefix + name in state_dict for name in (*names, _EXTRA_STATE)):
            tensors = {name: state_dict[prefix + name] for name in names}
            tensors[saved_weight.SPEC] = state_dict[prefix + _EXTRA_STATE]
            try:
                _, checked = saved_weight.read(tensors, self.spec)
            except PackError as error:
                error_msgs.append(f"{prefix.removesuffix('.') or 'the layer'}: {error}")
                return
            state_dict.update({prefix + name: tensor for name, tensor in checked.items()})
            self._make_room(checked)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)
        self._last_packed = None

    def _make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives buffers of a free length that of the tensors which torch is about to copy into them."""
        for slot in self.spec.tensors:
            buffer, shape = getattr(self, slot.name), tensors[slot.name].shape
            if buffer.shape != shape:
                setattr(self, slot.name, buffer.new_empty(shape))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last_packed": None, "_last_matmul": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.spec = interned(self.spec)


AWQ_NEEDS_FOLDING = (
    "AWQ's column scales belong into the layer before: use lowbit.quantize_ for the whole model, "
    "quantize(...).fold_into(norm) and LowbitLinear.from_packed, or method='gptq'"
)


def spec_of(linear: nn.Linear, config: QuantConfig, act: Act | None) -> MatmulSpec:
    """Returns the spec that a linear layer has after it is quantized. Raises SpecError if there is none."""
    if not isinstance(cast(object, linear), nn.Linear) or linear.weight is None:
        raise SpecError(f"{type(linear).__name__} must be an nn.Linear with a dense weight")
    has_bias = linear.bias is not None
    return config.spec(linear.out_features, linear.in_features, act=act or act_of(linear.weight), bias=has_bias)


def act_of(weight: Tensor) -> Act:
    """Returns the type of inputs that fits the type of a dense weight. Raises SpecError for f32 and others."""
    if weight.dtype is torch.float16:
        return "f16"
    if weight.dtype is torch.bfloat16:
        return "bf16"
    types = f"weight is {weight.dtype}, and kernels take inputs in f16 or bf16"
    raise SpecError(f"{types}; convert the model (model.bfloat16()), or say act='bf16'")


def _zeros(slot: TensorSlot, device: torch.device | str | None) -> Tensor:
    """Returns a tensor of zeros for a slot; of outliers, as few as there can be."""
    return torch.zeros(slot.least_shape, dtype=stored_type(slot.storage), device=device)


def _moved(buffer: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a buffer where `fn` moves it to, in its own type: torch converts floats only, so it gets to see bytes."""
    as_bytes = buffer.view(torch.uint8)
    moved = fn(as_bytes)
    if moved.dtype is not torch.uint8:
        moved = as_bytes.to(moved.device)
    return buffer if moved is as_bytes else moved.view(buffer.dtype)


def _matmul_on(spec: MatmulSpec, device: str, index: int | None) -> Matmul:
    """Returns the matmul for tensors on a device."""
    if device != "cuda":
        return compile(spec, "cpu")
    with torch.cuda.device(index):
        return compile(spec, this_machine())


@assume_constant_result
def _description(spec: str, device: str, index: int | None) -> str:
    """Returns the matmul of a spec, given as JSON, as text: a constant to torch.compile."""
    return _matmul_on(MatmulSpec.from_dict(json.loads(spec)), device, index).description
