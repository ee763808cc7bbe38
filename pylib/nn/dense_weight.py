"""The weight of a low-bit module, for code that reads `module.weight` (`DenseWeight`) or sets it (`NoDense`).

Model code asks a linear layer for the type, the device or the shape of its weight, and now and then multiplies by it.
A `DenseWeight` answers without memory, and is dequantized when an operation takes its values. It can't be written to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lowbit.dialect.errors import QuantizeError


class DenseWeight(Tensor):
    """A tensor [n, k] whose values are made of packed codes at each use.

    make   returns the values
    """

    make: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, make: Callable[[], Tensor]) -> Any:
        weight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        weight.make = make
        weight._is_hf_initialized = True  # transformers gives no random values to a tensor that has this
        return weight

    def __init__(self, *_: object) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what would be written to a copy and lost."""
        if func in (Tensor.__setitem__, Tensor.data.__set__) and isinstance(args[0], DenseWeight):  # type: ignore[attr-defined]
            raise QuantizeError(READ_ONLY)
        with torch._C.DisableTorchFunctionSubclass():  # which would make results DenseWeights, too
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch on the values."""
        if func is torch.ops.aten.detach.default:
            return DenseWeight(args[0].shape, args[0].dtype, args[0].device, args[0].make)
        if func._schema.is_mutable:
            raise QuantizeError(READ_ONLY)
        given: Any = tree_map_only(DenseWeight, lambda weight: weight.make(), (args, kwargs or {}))
        return func(*given[0], **given[1])

    def __deepcopy__(self, memo: object) -> Tensor:
        return self.make().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.make().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        return f"DenseWeight({list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"


READ_ONLY = (
    "the weight of a low-bit layer can't be written to: its codes would have to be rounded again; change the dense "
    "weight (to_linear(), to_embedding()) and quantize that"
)


class NoDense(nn.Module):
    """A module that multiplies by packed codes, and not by what is put where a dense module has its weight.

    _dense   the names of the dense module's weights
    """

    _dense: ClassVar[tuple[str, ...]] = ("weight",)

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_not_dense(name, value)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._check_not_dense(name, param)
        super().register_parameter(name, param)

    def _check_not_dense(self, name: str, value: object) -> None:
        """Raise QuantizeError for a dense weight, which would not be multiplied by."""
        if name in self._dense and value is not None:
            raise QuantizeError(
                f"{type(self).__name__} multiplies by packed codes; a {name} that is set would have no effect. Put a "
                "dense layer in its place (set_submodule, to_linear()), or quantize the new weight: "
                "LowbitLinear.from_linear, lowbit.quantize_"
            )
