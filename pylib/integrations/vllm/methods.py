"""The methods of vLLM's layers with low-bit weights: create, load, multiply.

A method belongs to one layer. It creates parameters on meta for the tensors of the checkpoint, low-bit or dense. vLLM
keeps what it reads for a layer until all has come, puts it on the device, and calls `process_weights_after_loading`,
which makes low-bit weights of it. So memory holds the finished model and one layer besides.

What the layer multiplies by is hidden from vLLM, but for its tensors: they are parameters of the layer. When vLLM loads
a model again, the method gets the new tensors in the same way, and writes the new weights into the memory of those that
it has, where captured CUDA graphs read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

from lowbit.pylib.integrations.serving.gates import BeforeGate
from lowbit.pylib.integrations.serving.held import check_like, dequantized, hold, none_came, own_tensors, packed_modules
from lowbit.pylib.integrations.serving.names import parameter
from lowbit.pylib.integrations.serving.rows import (
    ACTS,
    Layer,
    Rows,
    Share,
    SharedSource,
    Source,
    put_bias_in_order,
    quantize_rows,
    shares_of,
)
from lowbit.pylib.integrations.serving.startup import Startup
from lowbit.pylib.nn.embedding import LowbitEmbedding
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.runtime.batch_invariant import MODE
from lowbit.pylib.torch_types import TORCH

_PROCESSED = "_already_called_process_weights_after_loading"  # vLLM deletes it before it loads a layer again
_FILLED_LATER = ("dummy",)  # load formats that pass no tensors of the files


class Method:
    """Loads a layer and multiplies by it.

    waiting   names of the layer's parameters that are there until it is loaded
    """

    uses_meta_device = True
    waiting: Sequence[str] = ()
    _startup = Startup()  # of layers that none waits for
    _name = ""

    def report_to(self, startup: Startup, name: str) -> None:
        """Let the start of the model wait for this layer, and hear what it multiplies by."""
        self._startup, self._name = startup, name
        startup.expect(self)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the low-bit weights of a layer whose tensors have all come."""
        if getattr(layer, _PROCESSED, False):
            return
        with torch.no_grad():
            with self._startup.making():
                made = self.make(layer)
            for name in self.waiting:
                delattr(layer, name)
            self._hold(layer, made)
        setattr(layer, _PROCESSED, True)

    def make(self, layer: Any) -> nn.Module:
        """Returns what the layer multiplies by, of its parameters."""
        raise NotImplementedError

    def _hold(self, layer: Any, made: nn.Module) -> None:
        """Give a layer what it multiplies by; or the values of that, in the memory of what it has."""
        held = hold(layer, made)
        self._startup.loaded(self, self._name, held)
        for number, module in enumerate(packed_modules(held)):
            for name, tensor in own_tensors(module):
                first = number == 0 and name == "codes"
                # vLLM's LoRA looks for a qweight, to put adapters where it is
                layer.register_parameter("qweight" if first else f"lowbit{number}_{name}", tensor)


class Multiplies(Method, BeforeGate):
    """Multiplies x by what the layer holds, which adds the layer's bias where vLLM would.

    What torch.compile traces is the operator on the layer's parameters, where that is all: to trace modules of modules
    takes twice the time.
    """

    _adds_bias = False
    _operands: Sequence[str] = ()  # the parameters
    _kernel = ""  # the matmul as text

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns y [..., n] for x [..., k]."""
        if self._operands and is_compiling() and not MODE.on:
            y = torch.ops.lowbit.matmul.packed(x, [getattr(layer, name) for name in self._operands], self._kernel)
        else:
            y = layer.lowbit(x)
        return y if bias is None or self._adds_bias else layer.lowbit.plus(y, bias[: y.shape[-1]])

    def _hold(self, layer: Any, made: nn.Module) -> None:
        """Give a layer what it multiplies by, and note what to trace."""
        is_loaded = hasattr(layer, "lowbit")
        super()._hold(layer, made)
        if not is_loaded and not MODE.on and (names := _parameters_of(layer)):
            self._operands, (_, self._kernel) = names, layer.lowbit.linears[0].operands()

    def dequantize_weight(self, layer: Any) -> Tensor:
        """Returns the weight [n, k] of this process in the type of x."""
        return dequantized(layer.lowbit)

    def _with_rest(self, layer: Any, rows: Rows, columns: int) -> Rows:
        """Returns rows that do what the model would do with their results: add the layer's bias, or apply the
        activation behind a layer without one."""
        is_whole = columns == layer.input_size and not getattr(layer, "gather_output", False)  # without other processes
        if layer.bias is None and is_whole:
            return self.with_gate(layer, rows)
        return self._with_bias(layer, rows, columns)

    def _with_bias(self, layer: Any, rows: Rows, columns: int) -> Rows:
        """Returns rows that add the layer's bias themselves, where vLLM would add it to what they give."""
        bias: Tensor | None = layer.bias
        rows.check_adds(bias is not None and layer.skip_bias_add)
        adds_up = columns != layer.input_size  # results of all processes, of which the first has the bias
        if bias is None or layer.skip_bias_add or (adds_up and _rank_of(layer)):
            return rows
        self._adds_bias = all(TORCH[linear.spec.out_dtype] is bias.dtype for linear in rows.linears)
        return rows.with_bias(bias.data) if self._adds_bias else rows


def _parameters_of(layer: Any) -> tuple[str, ...]:
    """Returns the names of the parameters that are the tensors of the one matmul of a layer; nothing if it has several,
    or more to do."""
    held = layer.lowbit.linears if isinstance(layer.lowbit, Rows) else list[Layer]()
    if [type(linear) for linear in held] != [LowbitLinear]:
        return ()
    tensors, _ = held[0].operands()
    names = {(tensor.data_ptr(), tensor.shape): name for name, tensor in layer.named_parameters(recurse=False)}
    found = [names.get((tensor.data_ptr(), tensor.shape), "") for tensor in tensors]
    return tuple(found) if all(found) else ()


def is_filled_later() -> bool:
    """Tells whether vLLM makes a model without the tensors of the files."""
    return str(get_current_vllm_config().load_config.load_format) in _FILLED_LATER


def where_copied(param: Tensor, loaded_weight: Tensor) -> Tensor:
    """Returns a tensor of the files to copy from; without values while vLLM only counts what a loader would copy."""
    return loaded_weight.to("meta") if param.is_meta else loaded_weight


def _rank_of(layer: Any) -> int:
    """Returns which of the processes that share a layer this is; vLLM 0.26 does not say it of embeddings."""
    rank = getattr(layer, "tp_rank", None)
    return get_tensor_model_parallel_rank() if rank is None else rank


class SavedLinear(Multiplies, LinearMethodBase):
    """A linear layer whose modules are low-bit in the checkpoint.

    sources   the modules
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        super().__init__()
        self.sources = sources
        self._came: set[str] = set()  # parameters that the loader has filled

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
        """Creates a parameter for each tensor of the modules, on meta."""
        rows = self.rows_of(layer, output_partition_sizes)
        share = Share(rows, input_size_per_partition, _rank_of(layer), layer.tp_size)
        self.columns, self.filled_later = input_size_per_partition, is_filled_later()
        self.shares = shares_of(self.sources, share, ACTS[params_dtype])
        for part, shared in enumerate(self.shares):
            for tensor, like in shared.waited_for().items():
                self._wait_for(layer, parameter(part, tensor), tensor, shared, like)
        initialize_online_processing(layer)

    def rows_of(self, layer: Any, sizes: Sequence[int]) -> Sequence[int]:
        """Returns the rows that this process has of each module."""
        return sizes

    def _wait_for(self, layer: Any, name: str, tensor: str, shared: SharedSource, like: Tensor) -> None:
        waiting: Any = nn.Parameter(torch.empty_like(like, device="meta"), requires_grad=False)
        waiting.weight_loader = self._loader(name, tensor, shared)
        layer.register_parameter(name, waiting)
        self.waiting = (*self.waiting, name)

    def _loader(self, name: str, tensor: str, shared: SharedSource) -> Callable[..., None]:
        """Returns what puts a tensor of the checkpoint into its parameter, or this process's slice of it."""

        def load(param: Tensor, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
            source = shared.source
            check_like(loaded_weight, source.tensors[tensor], f"{source.module}.{tensor}")
            param.data.copy_(shared.sliced(tensor, where_copied(param, loaded_weight)))
            if not param.is_meta:
                self._came.add(name)

        return load

    def make(self, layer: Any) -> nn.Module:
        """Returns this process's part of the modules."""
        for source in self.sources:
            source.check_bias(layer.bias is not None)
        put_bias_in_order(layer.bias, self.shares)
        return self._with_rest(layer, Rows(self.parts(layer)), self.columns)

    def parts(self, layer: Any) -> list[Layer]:
        """Returns this process's parts of the modules, of tensors that have come; random ones if vLLM passes none."""
        came, self._came = self._came, set()
        found: list[Layer] = []
        for part, shared in enumerate(self.shares):
            source = shared.source
            tensors = {name: getattr(layer, parameter(part, name)).data for name in source.tensors}
            with naming(source.module):
                if missing := [name for name in tensors if parameter(part, name) not in came]:
                    found.append(self._without(shared, missing, came, tensors[missing[0]].device))
                else:
                    found.append(shared.layer(tensors))
        return found

    def _without(self, shared: SharedSource, missing: list[str], came: set[str], device: torch.device) -> Layer:
        """Returns a random part. Raises CheckpointError unless vLLM fills a model in another way."""
        if came or not self.filled_later:
            raise none_came(", ".join(missing))
        return shared.random(str(device))


class SavedHead(SavedLinear):
    """An output layer that is low-bit in the checkpoint. vLLM adds its bias."""

    def rows_of(self, layer: Any, sizes: Sequence[int]) -> Sequence[int]:
        """Returns the rows of this process. One process has as many as there are tokens, where vLLM has some more."""
        return [layer.org_vocab_size] if layer.tp_size == 1 else sizes

    def make(self, layer: Any) -> nn.Module:
        """Returns this process's part of the layer."""
        self.sources[0].check_bias(getattr(layer, "bias", None) is not None)
        return Rows(self.parts(layer))


class SavedEmbedding(SavedHead):
    """An embedding that is low-bit in the checkpoint; a tied output layer multiplies by its table."""

    def make(self, layer: Any) -> nn.Module:
        """Returns this process's part of the table."""
        (part,) = self.parts(layer)
        with naming(self.sources[0].module):
            return LowbitEmbedding.from_packed(part.packed)

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


class OnLoad(Multiplies, LinearMethodBase):
    """Quantizes a dense weight when it has been loaded, and drops it. It is no method of vLLM's dense layers, whose
    weights vLLM takes as they are (in MLA, say).

    dense     vLLM's method, which creates the dense weight
    name      the layer's
    configs   how to quantize each matrix that the layer is made of
    """

    dense: type[Any]
    waiting = ("weight",)

    def __init__(self, name: str, configs: Sequence[QuantConfig]) -> None:
        super().__init__()
        self.name = name
        self.configs = configs

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Creates the dense weight, on meta."""
        self.sizes, self.columns = output_partition_sizes, input_size_per_partition
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype)
        with torch.device("meta"):
            self.dense().create_weights(layer, *sizes, **attributes)
        initialize_online_processing(layer)

    def quantized(self, layer: Any) -> Rows:
        """Returns the quantized weight."""
        with naming(self.name):
            return quantize_rows(layer.weight.data, self.sizes, self.configs)


@register_weight_loader_v2_supported_method
class OnLoadLinear(OnLoad):
    """A linear layer that is dense in the checkpoint."""

    dense = UnquantizedLinearMethod

    def make(self, layer: Any) -> nn.Module:
        """Returns the quantized layer."""
        return self._with_rest(layer, self.quantized(layer), self.columns)


class OnLoadHead(OnLoad):
    """An output layer that is dense in the checkpoint. vLLM adds its bias."""

    dense = UnquantizedEmbeddingMethod

    def make(self, layer: Any) -> nn.Module:
        """Returns the quantized layer."""
        return self.quantized(layer)
