"""The few classes of vLLM that lowbit's methods build on, with the signatures that they have in vLLM 0.26 to 0.33, and
what vLLM's loaders do with a layer: for tests without vLLM.

`installed()` puts them in the place of vLLM while it lasts. `load` and `reload` follow
vllm/model_executor/model_loader/reload/layerwise.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pytests.models import fake_vllm_experts

OURS = "lowbit.pylib.integrations.vllm"
PROCESSED = "_already_called_process_weights_after_loading"
LOAD_FORMAT = "auto"
VERSION = "0.32.0"
TOKENS = 8


class QuantizeMethodBase:
    uses_meta_device = False


class LinearMethodBase(QuantizeMethodBase):
    pass


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @staticmethod
    def get_cache_scale_mapper() -> WeightsMapper:
        return WeightsMapper({re.compile(r"\.kv_scale$"): ".attn.k_scale"})


class WeightsMapper:
    def __init__(self, orig_to_new_regex: Mapping[re.Pattern[str], Any] | None = None) -> None:
        self.orig_to_new_regex = dict(orig_to_new_regex or {})

    def __or__(self, other: WeightsMapper) -> WeightsMapper:
        return WeightsMapper(self.orig_to_new_regex | other.orig_to_new_regex)

    def _map_name(self, key: str) -> str | None:
        for pattern, new in self.orig_to_new_regex.items():
            if pattern.search(key):
                if new is None:
                    return None
                key = pattern.sub(new, key)
        return key


class _Unquantized(QuantizeMethodBase):
    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        weight = nn.Parameter(data, requires_grad=False)
        vars(weight).update(extra_weight_attrs)
        layer.register_parameter("weight", weight)


class UnquantizedLinearMethod(_Unquantized, LinearMethodBase):
    pass


class UnquantizedEmbeddingMethod(_Unquantized):
    pass


class FusedMoEMethodBase(QuantizeMethodBase):
    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.moe = moe
        self.moe_kernel: Any = None

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        return -(-hidden_size // moe_parallel_config.columns) * moe_parallel_config.columns, (
            intermediate_size_per_partition
        )


class RoutedExperts(nn.Module):
    """Experts as vLLM makes them, of one process or of several, before they have a method."""

    def __init__(
        self, experts: int, hidden: int, inner: int, activation: str = "silu", rank: int = 0, count: int = 1
    ) -> None:
        super().__init__()
        self.sizes = {"num_experts": experts, "hidden_size": hidden, "intermediate_size_per_partition": inner // count}
        parallel = SimpleNamespace(
            use_all2all_kernels=False,
            use_batched_activation_format=False,
            all2all_backend="allgather_reducescatter",
            dp_size=1,
            ep_size=1,
            columns=1,  # of what is sent a multiple
        )
        self.moe_config = SimpleNamespace(
            moe_parallel_config=parallel, has_bias=False, tp_rank=rank, tp_size=count, experts_per_token=2
        )
        self.activation, self.apply_router_weight_on_input = activation, False
        self.expert_map: Tensor | None = None
        self.global_num_experts = experts
        self.swiglu_limit: float | None = None

    def take(self, method: Any) -> None:
        """Takes a method, which creates its parameters."""
        self.quant_method = method
        method.create_weights(layer=self, **self.sizes, params_dtype=torch.bfloat16, weight_loader=load_whole)

    def _expert_routing_tables(self) -> None:
        """Returns None: no experts are placed in turns."""

    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        return expert if self.expert_map is None else int(self.expert_map[expert])

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        chosen = {"topk_weights": topk_weights, "topk_ids": topk_ids}
        return self.quant_method.apply(layer=self, x=x, **chosen, shared_experts=None, shared_experts_input=None)


class LinearBase(nn.Module):
    def __init__(self, rows: int = 32, columns: int = 64) -> None:
        super().__init__()
        self.output_size, self.input_size, self.params_dtype = rows, columns, torch.bfloat16


class ReplicatedLinear(LinearBase):
    pass


class VocabParallelEmbedding(nn.Module):
    pass


class ParallelLMHead(VocabParallelEmbedding):
    pass


class Linear(nn.Module):
    """A layer as vLLM makes it, of one process or of several."""

    def __init__(self, method: Any, columns: int, sizes: Sequence[int], bias: bool = False, **about: Any) -> None:
        super().__init__()
        self.input_size, self.skip_bias_add, self.tp_rank, self.tp_size = columns, False, 0, 1
        self.quant_method = method
        vars(self).update(about)
        here = about.get("columns_here", columns)
        method.create_weights(
            self, here, list(sizes), columns, sum(sizes), params_dtype=torch.bfloat16, weight_loader=load_whole
        )
        self.bias = nn.Parameter(torch.empty(sum(sizes)).bfloat16(), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x, None if self.tp_rank else self.bias)


def load_whole(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight)


def recorded(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a layer that has just been made, on meta."""
    return {name: _like(p, "meta") for name, p in layer._parameters.items() if p is not None}


def load(layer: Any, tensors: Mapping[str, Tensor], bias: Tensor | None = None) -> None:
    """Gives a layer its tensors, and has them processed."""
    for name, parameter in list(layer._parameters.items()):
        if parameter is not None and parameter.is_meta:
            layer.register_parameter(name, _like(parameter, "cpu"))
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor)
    if bias is not None:
        layer.bias.data.copy_(bias)
    layer.quant_method.process_weights_after_loading(layer)


def reload(
    layer: Any, made: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], bias: Tensor | None = None
) -> None:
    """Gives a layer other tensors, as vLLM 0.26 does, which has a bias made anew, too.

    made   what `recorded` returned
    """
    kernels = {name: p for name, p in layer._parameters.items() if p is not None}
    _replace(layer, made)
    delattr(layer, PROCESSED)
    load(layer, tensors, bias)
    for name, parameter in kernels.items():
        parameter.data.copy_(getattr(layer, name))
    _replace(layer, kernels)


def _replace(layer: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    for name in [name for name, p in layer._parameters.items() if p is not None]:
        delattr(layer, name)
    for name, parameter in parameters.items():
        layer.register_parameter(name, parameter)


def _like(parameter: nn.Parameter, device: str) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
    vars(made).update(vars(parameter))
    return made


def _modules() -> dict[str, dict[str, Any]]:
    layers, loader = "model_executor.layers", "model_executor.model_loader"
    settings = SimpleNamespace(
        load_config=SimpleNamespace(load_format=LOAD_FORMAT),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4]),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
        lora_config=None,
    )
    return {
        "": {"__version__": VERSION},
        "envs": {"environment_variables": {}},
        "config": {"get_current_vllm_config": lambda: settings},
        "distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
        f"{layers}.fused_moe": {"FusedMoEMethodBase": FusedMoEMethodBase, "RoutedExperts": RoutedExperts},
        **fake_vllm_experts.modules(f"{layers}.fused_moe"),
        f"{layers}.linear": {
            "LinearBase": LinearBase,
            "LinearMethodBase": LinearMethodBase,
            "ReplicatedLinear": ReplicatedLinear,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
            "register_weight_loader_v2_supported_method": lambda cls: cls,
        },
        f"{layers}.quantization": {"register_quantization_config": lambda name: lambda cls: cls},
        f"{layers}.quantization.base_config": {
            "QuantizationConfig": QuantizationConfig,
            "QuantizeMethodBase": QuantizeMethodBase,
        },
        f"{layers}.vocab_parallel_embedding": {
            "ParallelLMHead": ParallelLMHead,
            "UnquantizedEmbeddingMethod": UnquantizedEmbeddingMethod,
            "VocabParallelEmbedding": VocabParallelEmbedding,
        },
        "model_executor.models.utils": {"WeightsMapper": WeightsMapper},
        "platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
        f"{loader}.reload.layerwise": {"initialize_online_processing": lambda layer: None},
    }


@contextmanager
def installed() -> Iterator[ModuleType]:
    """Yields lowbit's methods, made of these classes; `expert_methods` and the other modules are there, too."""
    mine = ("vllm.", *(f"{OURS}.{name}" for name in ("methods", "config", "expert_methods", "modular_experts")))
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "vllm" or name.startswith(mine)}
    try:
        for path, names in _modules().items():
            parts = ["vllm", *filter(None, path.split("."))]
            for count in range(1, len(parts) + 1):
                sys.modules.setdefault(".".join(parts[:count]), ModuleType(".".join(parts[:count])))
            vars(sys.modules[f"vllm.{path}".rstrip(".")]).update(names)
        methods = import_module(f"{OURS}.methods")
        for name in ("expert_methods", "modular_experts", "config"):
            vars(methods)[name] = import_module(f"{OURS}.{name}")
        yield methods
    finally:
        for name in [name for name in sys.modules if name == "vllm" or name.startswith(mine)]:
            del sys.modules[name]
        sys.modules.update(before)
