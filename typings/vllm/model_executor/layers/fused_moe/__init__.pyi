from typing import Any

from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

class RoutedExperts(nn.Module): ...

class FusedMoEMethodBase(QuantizeMethodBase):
    moe: Any
    moe_kernel: Any
    def __init__(self, moe: Any) -> None: ...
    def maybe_roundup_sizes(self, hidden_size: int, *sizes: Any, **more: Any) -> tuple[int, int]: ...
