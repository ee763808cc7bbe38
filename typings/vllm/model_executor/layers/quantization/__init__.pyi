from collections.abc import Callable
from typing import TypeVar

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

_Config = TypeVar("_Config", bound=type[QuantizationConfig])

def register_quantization_config(quantization: str) -> Callable[[_Config], _Config]: ...
