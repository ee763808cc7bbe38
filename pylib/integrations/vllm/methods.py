"""The methods of vLLM's layers with low-bit weights: create, load, multiply.

A method belongs to one layer. vLLM calls `create_weights` when it builds the layer, `process_weights_after_loading`
when it has read all tensors of the checkpoint, and `apply` to multiply. The second of these reads low-bit weights: the
files alone say what their tensors are, and lowbit alone can cut them for tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from lowbit.dialect.spec import Act
from lowbit.pylib.integrations.vllm.rows import ACTS, Rows, Share, load_rows, load_weight, quantize_rows
from lowbit.pylib.nn.embedding import LowbitEmbedding
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.quantization.config import QuantConfig


class Multiplies:
    """Multiplies by `layer.lowbit`, which adds the layer's bias as well."""

    def hold(self, layer: Any, rows: Rows) -> None:
        """Give a layer what it multiplies by."""
        layer.lowbit = rows
        layer.bias = None
        layer.register_buffer("qweight", rows[0].codes, persistent=False)  # tells vLLM's LoRA where the layer is

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns y [..., n] for x [..., k]."""
        y = layer.lowbit(x)
        return y if bias is None else y + bias


class SavedLinear(Multiplies, LinearMethodBase):
    """A linear layer whose modules are low-bit in the checkpoint.

    folder    where the checkpoint is
    modules   their names in it
    """

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        self.folder = folder
        self.modules = modules

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Notes what the layer needs. It has no tensors yet."""
        rows = self.rows_of(layer, output_partition_sizes)
        self.share = Share(rows, input_size_per_partition, layer.tp_rank, layer.tp_size)
        self.act: Act = ACTS[params_dtype]
        self.device = torch.get_default_device()  # that vLLM builds the model for

    def rows_of(self, layer: Any, sizes: Sequence[int]) -> Sequence[int]:
        """Returns the rows that this process has of each module."""
        return sizes

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read the weights, and this process's part of them."""
        bias = layer.bias is not None
        self.hold(layer, load_rows(self.folder, self.modules, self.share, self.act, self.device, bias=bias))


class SavedHead(SavedLinear):
    """An output layer that is low-bit in the checkpoint."""

    def rows_of(self, layer: Any, sizes: Sequence[int]) -> Sequence[int]:
        """Returns the rows of this process. One process has as many as there are tokens, where vLLM has some more."""
        return [layer.org_vocab_size] if layer.tp_size == 1 else sizes


class SavedEmbedding(SavedHead):
    """An embedding that is low-bit in the checkpoint; a tied output layer multiplies by its table."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read the table, and this process's part of it."""
        (module,), (rows,) = self.modules, self.share.rows
        packed = load_weight(self.folder, module, self.act, self.device, bias=False)
        with naming(module):
            layer.lowbit = LowbitEmbedding.from_packed(self.share.of(packed, rows))

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Returns the rows [..., size] of tokens [...]."""
        return layer.lowbit(input_)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns y [..., tokens] for x [..., size]."""
        y = layer.lowbit.multiply(x)
        return y if bias is None else y + bias


class TiedHead(QuantizeMethodBase):
    """An output layer that has no tensors: a low-bit embedding takes its place."""

    def create_weights(self, layer: Any, *_: Any, **__: Any) -> None:
        """Creates none."""

    def apply(self, layer: Any, *args: Any, **_: Any) -> Tensor:
        """Raises RuntimeError: it is not called once the layer is tied."""
        raise RuntimeError("the output layer has not been tied to its embedding by the model")

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Returns the embedding."""
        return embed_tokens


class _OnLoad(Multiplies):
    """Quantizes a dense weight after it has been loaded, and drops it.

    configs   how to quantize each matrix that the layer is made of
    """

    def __init__(self, configs: Sequence[QuantConfig]) -> None:
        super().__init__()
        self.configs = configs

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the weight."""
        adds_up = layer.weight.shape[1] != layer.input_size  # results of all processes, of which the first has the bias
        bias = None if adds_up and layer.tp_rank else layer.bias
        with naming(layer.prefix):
            rows = quantize_rows(layer.weight, bias, layer.output_partition_sizes, self.configs)
        del layer.weight
        self.hold(layer, rows)


@register_weight_loader_v2_supported_method
class OnLoadLinear(_OnLoad, UnquantizedLinearMethod):
    """A linear layer that is dense in the checkpoint."""


class OnLoadHead(_OnLoad, UnquantizedEmbeddingMethod):
    """An output layer that is dense in the checkpoint."""
