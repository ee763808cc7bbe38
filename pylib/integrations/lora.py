"""LoRA beside low-bit layers: what PEFT puts in the place of a `LowbitLinear`. Importing this file registers it there.

PEFT takes a low-bit layer for an nn.Linear, and would look at its dense weight for initializations other than LoRA's
own, and to merge an adapter. `LowbitLora` says why that can't be done.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from peft.tuners.lora.config import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import nn

from lowbit.dialect.errors import QuantizeError, SpecError
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.linear import LowbitLinear

WITHOUT_WEIGHT = (True, False, "gaussian", "eva")
"""Initializations of an adapter that do not change the weight beside it."""


class LowbitLora(Linear):
    """A low-bit layer that stays as it is, and an adapter that is trained beside it."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        _check(config)
        super().__init__(base_layer, adapter_name, config=config, **kwargs)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter. Raises SpecError for a kind that needs the dense weight."""
        _check(config)
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raises QuantizeError: the sum of weight and adapter would have to be rounded again."""
        raise QuantizeError(
            "an adapter can't be merged into packed codes without rounding it away; keep it beside the layer, or merge "
            "it into the dense model and quantize the result"
        )


def refuse_experts(base_layer: nn.Module, adapter_name: str, **kwargs: Any) -> nn.Module:
    """Raises SpecError: an adapter is for one matrix, and experts have two each."""
    raise SpecError(
        "LowbitExperts take no adapter as a whole; name the layers of each in target_modules: 'experts.gate_up.0', "
        "'experts.down.0' ..."
    )


def _check(config: LoraConfig) -> None:
    """Raise SpecError for an adapter that needs the dense weight."""
    if config.init_lora_weights not in WITHOUT_WEIGHT:
        allowed = ", ".join(map(repr, WITHOUT_WEIGHT))
        raise SpecError(f"init_lora_weights={config.init_lora_weights!r} changes the base weight; use one of {allowed}")
    if config.use_dora:
        raise SpecError("use_dora=True needs the dense weight at every step; use plain LoRA beside low-bit layers")


def _register() -> None:
    """Let every new LoraConfig have `LowbitLora` among its layers, by PEFT's own way for each."""
    finish = LoraConfig.__post_init__

    @wraps(finish)
    def finish_and_register(self: LoraConfig) -> None:
        finish(self)
        instead: dict[type[nn.Module], Any] = {LowbitLinear: LowbitLora, LowbitExperts: refuse_experts}
        self._register_custom_module(instead)

    LoraConfig.__post_init__ = finish_and_register


_register()
