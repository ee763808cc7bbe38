"""Modules without dense weights, which say so to those who want to set one."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from lowbit.dialect.errors import QuantizeError


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
