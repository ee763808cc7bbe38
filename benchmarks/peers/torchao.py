"""torchao: int4 in the layout of aten's int4 matmul, in whole models."""

from __future__ import annotations

from torch import nn

from benchmarks.peers.peer import Peer, random_linear


class TorchAo(Peer):
    """4-bit integers with float zeros, in bf16. The matmul alone is the peer "tinygemm"."""

    name = "torchao"
    package = "torchao"
    install = "torchao"
    model_format = "int4", 128

    def linear(self, layer: nn.Linear) -> nn.Module:
        from torchao.quantization import Int4WeightOnlyConfig, quantize_  # type: ignore[import-not-found]

        made = nn.Sequential(random_linear(layer))  # it replaces children only
        config = Int4WeightOnlyConfig(
            group_size=self.model_format[1], int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
        quantize_(made, config)
        return made[0]
