"""The methods of SGLang's layers with low-bit weights: create, load, multiply.

SGLang's models look up a parameter for each tensor of the checkpoint, by its name in the layer, and hand the tensor to
the parameter's loader, with the part of the layer that it belongs to. Our parameters are empty: a loader keeps this
process's slice of the tensor, and when all have come `process_weights_after_loading` makes weights of them. Other
weights that come later go to the memory of those that a layer has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.runtime_context import get_parallel, get_schedule
from torch import Tensor, nn

from lowbit.dialect.errors import SpecError
from lowbit.pylib.integrations.serving.expert_sources import ExpertShare, ExpertsSource, ImportedSource, SavedSource
from lowbit.pylib.integrations.serving.experts import GATES, LEAVE_DENSE, Experts, gated, quantize_experts
from lowbit.pylib.integrations.serving.held import check_like, dequantized, hold, none_came
from lowbit.pylib.integrations.serving.rows import (
    ACTS,
    Layer,
    Rows,
    Share,
    Source,
    put_bias_in_order,
    quantize_rows,
    shares_of,
)
from lowbit.pylib.integrations.serving.startup import Limits, Startup
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.nn.rotated import INPUTS
from lowbit.pylib.quantization.config import QuantConfig

_TOKENS = 8192  # of a step, where prefill is not cut into chunks
_SHARDS: dict[Any, Any] = {"q": 0, "k": 1, "v": 2, None: 0}
_PROJECTIONS = {"w1": ("gate_proj", "w1"), "w3": ("up_proj", "w3"), "w2": ("down_proj", "w2")}


class Method:
    """Loads a layer and multiplies by it.

    name      the layer's
    startup   waits for the layer, and hears what it multiplies by
    """

    def __init__(self, name: str, startup: Startup) -> None:
        super().__init__()
        self.name, self.startup = name, startup

    def expected(self) -> None:
        """Let the start of the model wait for this layer."""
        chunk = get_schedule().chunked_prefill_size or 0
        parallel = get_parallel()
        self.startup.limits = Limits(chunk if chunk > 0 else _TOKENS, parallel.tp_size, parallel.tp_rank)
        self.startup.expect(self)

    @torch.no_grad()
    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the low-bit weights of a layer whose tensors have all come; again if others have."""
        if self.has_loaded(layer):
            with naming(self.name), self.startup.making():
                made = self.make(layer)
            self.startup.loaded(self, self.name, hold(layer, made))

    def has_loaded(self, layer: Any) -> bool:
        """Tells whether there are new tensors, or none yet."""
        raise NotImplementedError

    def make(self, layer: Any) -> nn.Module:
        """Returns what the layer multiplies by."""
        raise NotImplementedError


class Linear(Method, LinearMethodBase):
    """Multiplies by what a linear layer holds."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns y [..., n] for x [..., k]."""
        y = layer.lowbit(x)
        return y if bias is None else layer.lowbit.plus(y, bias)

    def dequantize_weight(self, layer: Any) -> Tensor:
        """Returns the weight [n, k] of this process in the type of x."""
        return dequantized(layer.lowbit)


class SavedLinear(Linear):
    """A linear layer whose modules are low-bit in the checkpoint.

    sources   the modules
    """

    def __init__(self, name: str, sources: Sequence[Source], startup: Startup) -> None:
        super().__init__(name, startup)
        self.sources = sources
        self._came: dict[tuple[int, str], Tensor] = {}

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
        """Creates an empty parameter for each kind of tensor of the modules."""
        rank, processes = get_group_rank_size(layer.tp_group)
        share = Share(output_partition_sizes, input_size_per_partition, rank, processes)
        self.shares = shares_of(self.sources, share, ACTS[params_dtype])
        for tensor in dict.fromkeys(name for source in self.sources for name in source.tensors):
            _register(layer, tensor, self._loader(tensor))
        self.expected()

    def _loader(self, tensor: str) -> Callable[..., None]:
        def load(param: Tensor, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
            part: int = _SHARDS.get(loaded_shard_id, loaded_shard_id)
            shared = self.shares[part]
            check_like(loaded_weight, shared.source.tensors[tensor], f"{shared.source.module}.{tensor}")
            self._came[part, tensor] = shared.sliced(tensor, loaded_weight).to(param.device, copy=True)

        return load

    def has_loaded(self, layer: Any) -> bool:
        return bool(self._came) or not hasattr(layer, "lowbit")

    def make(self, layer: Any) -> nn.Module:
        came, self._came = self._came, {}
        found: list[Layer] = []
        for part, shared in enumerate(self.shares):
            source = shared.source
            with naming(source.module):
                source.check_bias(layer.bias is not None)
                if missing := [name for name in source.tensors if (part, name) not in came]:
                    raise none_came(", ".join(missing))
                found.append(shared.layer({name: came[part, name] for name in source.tensors}))
        put_bias_in_order(layer.bias, self.shares)
        rows = Rows(found)
        rows.check_adds(layer.bias is not None and layer.skip_bias_add)
        return rows


def _register(owner: nn.Module, name: str, loader: Callable[..., None]) -> None:
    """Give a module an empty parameter that hands tensors on. Its name may have dots, as SGLang asks for parameters by
    the whole of their names alone."""
    empty: Any = nn.Parameter(torch.empty(0), requires_grad=False)
    empty.weight_loader = loader
    owner._parameters[name] = empty


class _Dense(Method):
    """Quantizes dense weights when they have been loaded, and drops them.

    dense   their names in the layer
    """

    dense: tuple[str, ...]

    def created(self, layer: Any) -> None:
        """Remember how large the dense weights are."""
        self._shapes = {name: getattr(layer, name).shape for name in self.dense}
        self.expected()

    def has_loaded(self, layer: Any) -> bool:
        return all(getattr(layer, name).shape == shape for name, shape in self._shapes.items())

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.has_loaded(layer):
            super().process_weights_after_loading(layer)
            for name in self.dense:
                getattr(layer, name).data = getattr(layer, name).data.new_empty(0)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Give the layer dense weights again, which the loader fills."""
        for name, shape in self._shapes.items():
            getattr(layer, name).data = getattr(layer, name).data.new_empty(shape)


class OnLoadLinear(_Dense, Linear):
    """A linear layer that is dense in the checkpoint.

    configs   how to quantize each matrix that it is made of
    """

    dense = ("weight",)

    def __init__(self, name: str, configs: Sequence[QuantConfig], startup: Startup) -> None:
        super().__init__(name, startup)
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
        """Creates the dense weight."""
        self.sizes = output_partition_sizes
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype)
        UnquantizedLinearMethod().create_weights(layer, *sizes, **attributes)
        self.created(layer)

    def make(self, layer: Any) -> nn.Module:
        return quantize_rows(layer.weight.data, self.sizes, self.configs)


class ExpertsMethod(Method, FusedMoEMethodBase):
    """Multiplies tokens by the low-bit experts that SGLang has chosen for them."""

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Takes what is computed of experts. Raises SpecError for what no kernel computes."""
        config = moe_runner_config
        limits = (config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit)
        if not config.is_gated or config.activation != "silu" or any(limit is not None for limit in limits):
            raise SpecError(f"{self.name}: in SGLang low-bit experts have the gate SiLU alone; {LEAVE_DENSE}")
        if config.no_combine:
            raise SpecError(f"{self.name}: low-bit experts add up what a token's experts make; {LEAVE_DENSE}")
        self.moe_runner_config = config

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Returns the sum of each token's experts, by their weights, as far as this process has them."""
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        weights, config = topk.topk_weights, self.moe_runner_config
        if config.apply_router_weight_on_input:  # of one expert for each token
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        y = layer.lowbit(x, topk.topk_ids.to(torch.int32), weights)
        factor = config.routed_scaling_factor
        return StandardCombineInput(hidden_states=y if factor is None else y * factor)


class OnLoadExperts(_Dense, ExpertsMethod):
    """Experts that are dense in the checkpoint.

    configs   how to quantize gate_up, and down
    """

    dense = ("w13_weight", "w2_weight")

    def __init__(self, name: str, configs: Sequence[QuantConfig], startup: Startup) -> None:
        super().__init__(name, startup)
        self.configs = configs

    def create_weights(self, layer: Any, *sizes: Any, with_bias: bool = False, **attributes: Any) -> None:
        """Creates the dense weights."""
        if with_bias:
            raise SpecError(f"{self.name}: in SGLang low-bit experts have no biases; {LEAVE_DENSE}")
        UnquantizedFusedMoEMethod().create_weights(layer, *sizes, **attributes)
        self.created(layer)

    def make(self, layer: Any) -> nn.Module:
        gate_up = quantize_experts(layer.w13_weight.data, None, self.configs[0], GATES["silu"])
        down = quantize_experts(layer.w2_weight.data, None, self.configs[1])
        return Experts(gate_up, down, layer.top_k, layer.num_experts)


class SavedExperts(ExpertsMethod):
    """Experts that are low-bit in the checkpoint, lowbit's own or another library's.

    source   what the checkpoint has of them
    """

    def __init__(self, name: str, source: ExpertsSource, startup: Startup) -> None:
        super().__init__(name, startup)
        self.source = source
        self._came: dict[tuple[str, int], Tensor] = {}

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Creates empty parameters by the names that SGLang's models look for."""
        self.count = num_experts
        self.share = ExpertShare(GATES["silu"], ACTS[params_dtype], layer.moe_tp_rank, layer.moe_tp_size)
        wanted = {kind: self.source.wanted(kind, like, self.share) for kind, like in self.source.tensors.items()}
        self.kinds = [kind for kind, like in wanted.items() if like is not None]
        if isinstance(self.source, SavedSource):
            self._register_own(layer, layer.num_experts)
        elif isinstance(self.source, ImportedSource):
            for short in self.source.shorts:
                for matrix in ("w13", "w2"):
                    _register(layer, f"{matrix}_{short}", self._projection_loader(layer, self.source, short))
        self.expected()

    def _register_own(self, layer: Any, experts: int) -> None:
        """Creates parameters as lowbit's files name them, "gate_up.3.codes" say."""
        for name in (f"{INPUTS}.{number}.scale" for number in range(len(self.source.inputs))):
            _register(layer, name, self._own_loader(layer, name))
        kinds = [*self.source.tensors, *(f"{matrix}._extra_state" for matrix in ("gate_up", "down"))]
        for matrix in ("gate_up", "down"):
            modules = nn.ModuleList(nn.Module() for _ in range(experts))
            layer.add_module(matrix, modules)
            for number, kind in ((number, kind) for number in range(experts) for kind in kinds):
                owner, _, short = kind.partition(".")
                if owner == matrix:
                    _register(modules[number], short, self._own_loader(layer, f"{matrix}.{number}.{short}"))

    def _own_loader(self, layer: Any, name: str) -> Callable[..., None]:
        return lambda param, loaded_weight, *_: self._take(layer, name, loaded_weight, param.device)

    def _projection_loader(self, layer: Any, source: ImportedSource, short: str) -> Callable[..., None]:
        def load(
            param: Tensor, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int, **_: Any
        ) -> None:
            projection = next(name for name in _PROJECTIONS[shard_id] if name in source.projections)
            self._take(layer, f"{expert_id}.{projection}.{short}", loaded_weight, param.device)

        return load

    def _take(self, layer: Any, name: str, tensor: Tensor, device: torch.device) -> None:
        """Keep what this process wants of a tensor of the files, by its name among the experts'."""
        with naming(self.name):
            if (taken := self.source.taken(name, tensor)) is None:
                return
            kind, number, values = taken
            check_like(values, self.source.tensors[kind], f"{kind} of expert {number}")
            expert = layer._map_global_expert_id_to_local_expert_id(number)
            wanted = self.source.wanted(kind, values, self.share) if expert >= 0 else None
            if wanted is not None:
                self._came[kind, expert] = wanted.to(device, copy=True)

    def has_loaded(self, layer: Any) -> bool:
        return bool(self._came) or not hasattr(layer, "lowbit")

    def make(self, layer: Any) -> nn.Module:
        came, self._came = self._came, {}
        wanted = [(kind, expert) for kind in self.kinds for expert in range(self.count)]
        if missing := next((key for key in wanted if key not in came), None):
            raise none_came("{} of expert {}".format(*missing))
        tensors = {kind: torch.stack([came.pop((kind, each)) for each in range(self.count)]) for kind in self.kinds}
        gate_up, down = self.source.weights(tensors, self.share)
        gate_up = gated(gate_up, GATES["silu"])
        return Experts(gate_up, down, layer.top_k, layer.num_experts, self.source.inputs)
