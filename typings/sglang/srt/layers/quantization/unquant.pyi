from typing import Any

from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase
from torch import nn

class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(self, layer: nn.Module, *sizes: Any, **attributes: Any) -> None: ...

class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    def create_weights(self, layer: nn.Module, *sizes: Any, **attributes: Any) -> None: ...
