"""The few classes of SGLang that lowbit's plugin builds on, with the signatures that they have in SGLang 0.5.23, and
what its models do with the tensors of a checkpoint: for tests without SGLang.

`installed()` puts them in the place of SGLang while it lasts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

OURS = "lowbit.pylib.integrations.sglang"
STACKED = (
    ("qkv_proj", {"q_proj": "q", "k_proj": "k", "v_proj": "v"}),
    ("gate_up_proj", {"gate_proj": 0, "up_proj": 1}),
)


class QuantizeMethodBase:
    pass


class LinearMethodBase(QuantizeMethodBase):
    pass


class FusedMoEMethodBase(QuantizeMethodBase):
    runner: Any = None


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class UnquantizedLinearMethod(LinearMethodBase):
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
        size = sum(output_partition_sizes), input_size_per_partition
        _register(layer, "weight", torch.empty(size, dtype=params_dtype), extra_weight_attrs)


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **extra_weight_attrs: Any,
    ) -> None:
        inner = intermediate_size_per_partition
        for name, size in (("w13_weight", (2 * inner, hidden_size)), ("w2_weight", (hidden_size, inner))):
            _register(layer, name, torch.empty(num_experts, *size, dtype=params_dtype), extra_weight_attrs)


def _register(layer: nn.Module, name: str, tensor: Tensor, attributes: Mapping[str, Any]) -> None:
    parameter = nn.Parameter(tensor, requires_grad=False)
    vars(parameter).update(attributes)
    layer.register_parameter(name, parameter)


class VocabParallelEmbedding(nn.Module):
    pass


class LinearBase(nn.Module):
    def __init__(self, rows: int = 32, columns: int = 64) -> None:
        super().__init__()
        self.output_size, self.input_size, self.params_dtype = rows, columns, torch.bfloat16
        self.bias: nn.Parameter | None = None
        self.tp_group: Any = None
        self.skip_bias_add = False

    def take(
        self, method: Any, sizes: Sequence[int], columns: int | None = None, rank: int = 0, count: int = 1
    ) -> None:
        """Takes a method, which creates its parameters."""
        self.quant_method = method
        self.tp_group = None if count == 1 else SimpleNamespace(rank_in_group=rank, world_size=count)
        method.create_weights(
            layer=self,
            input_size_per_partition=columns or self.input_size,
            output_partition_sizes=list(sizes),
            input_size=self.input_size,
            output_size=self.output_size,
            params_dtype=self.params_dtype,
            skip_block_quant_check=False,
            weight_loader=load_whole,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x, bias=self.bias)


class FusedMoE(nn.Module):
    def __init__(self, experts: int, hidden: int, inner: int, rank: int = 0, count: int = 1) -> None:
        super().__init__()
        self.num_experts, self.hidden_size, self.top_k = experts, hidden, 2
        self.intermediate_size_per_partition, self.moe_tp_rank, self.moe_tp_size = inner // count, rank, count
        self.config = SimpleNamespace(
            activation="silu",
            is_gated=True,
            apply_router_weight_on_input=False,
            no_combine=False,
            routed_scaling_factor=None,
            gemm1_alpha=None,
            gemm1_clamp_limit=None,
            swiglu_limit=None,
        )

    def take(self, method: Any) -> None:
        """Takes a method, which creates its parameters."""
        self.quant_method = method
        method.create_weights(
            layer=self,
            num_experts=self.num_experts,
            hidden_size=self.hidden_size,
            intermediate_size_per_partition=self.intermediate_size_per_partition,
            params_dtype=torch.bfloat16,
            weight_loader=load_whole,
            with_bias=False,
            moe_intermediate_size=self.intermediate_size_per_partition * self.moe_tp_size,
        )
        method.create_moe_runner(self, self.config)

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        return expert_id

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        topk = SimpleNamespace(topk_weights=topk_weights, topk_ids=topk_ids, router_logits=None)
        return self.quant_method.apply(self, SimpleNamespace(hidden_states=x, topk_output=topk)).hidden_states


class StandardCombineInput(NamedTuple):
    hidden_states: Tensor


def get_group_rank_size(group: Any) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank_in_group, group.world_size)


def load_whole(param: Tensor, loaded_weight: Tensor, *_: Any) -> None:
    param.data.copy_(loaded_weight)


def load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Gives a model its tensors as Qwen3MoeForCausalLM.load_weights does, and has its layers process them."""
    parameters = dict(model.named_parameters())
    for name, tensor in weights.items():
        _load_one(parameters, name, tensor)
    for module in model.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)


def _load_one(parameters: Mapping[str, Any], name: str, tensor: Tensor) -> None:
    for fused, parts in STACKED:
        for part, shard in parts.items():
            target = name.replace(part, fused)
            if part in name and "mlp.experts" not in name and target in parameters:
                parameters[target].weight_loader(parameters[target], tensor, shard)
                return
    for shard, projection in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        path, _, rest = name.partition("experts.")
        number, _, short = rest.partition(f".{projection}.")
        target = f"{path}experts.{'w2' if shard == 'w2' else 'w13'}_{short}"
        if number.isdecimal() and target in parameters:
            parameters[target].weight_loader(parameters[target], tensor, target, shard_id=shard, expert_id=int(number))
            return
    if name in parameters:
        getattr(parameters[name], "weight_loader", load_whole)(parameters[name], tensor)


def _modules() -> dict[str, dict[str, Any]]:
    layers, choices = "srt.layers", ["fp8"]
    return {
        "srt.arg_groups.choices": {
            "QUANTIZATION_CHOICES": choices,
            "add_quantization_method_choices": choices.extend,
        },
        "srt.distributed.utils": {"get_group_rank_size": get_group_rank_size},
        f"{layers}.linear": {"LinearBase": LinearBase},
        f"{layers}.moe.fused_moe_triton.layer": {"FusedMoE": FusedMoE},
        f"{layers}.moe.token_dispatcher": {"StandardCombineInput": StandardCombineInput},
        f"{layers}.quantization": {"QUANTIZATION_METHODS": {}},
        f"{layers}.quantization.base_config": {
            "QuantizationConfig": QuantizationConfig,
            "QuantizeMethodBase": QuantizeMethodBase,
            "LinearMethodBase": LinearMethodBase,
            "FusedMoEMethodBase": FusedMoEMethodBase,
        },
        f"{layers}.quantization.unquant": {
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
            "UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod,
        },
        f"{layers}.vocab_parallel_embedding": {"VocabParallelEmbedding": VocabParallelEmbedding},
        "srt.runtime_context": {
            "get_schedule": lambda: SimpleNamespace(chunked_prefill_size=16),
            "get_parallel": lambda: SimpleNamespace(tp_size=1, tp_rank=0),
        },
    }


@contextmanager
def installed() -> Iterator[ModuleType]:
    """Yields lowbit's `config`, made of these classes."""
    mine = ("sglang.", f"{OURS}.methods", f"{OURS}.config")
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "sglang" or name.startswith(mine)}
    try:
        for path, names in _modules().items():
            parts = ["sglang", *path.split(".")]
            for count in range(1, len(parts) + 1):
                sys.modules.setdefault(".".join(parts[:count]), ModuleType(".".join(parts[:count])))
            vars(sys.modules[f"sglang.{path}"]).update(names)
        yield import_module(f"{OURS}.config")
    finally:
        for name in [name for name in sys.modules if name == "sglang" or name.startswith(mine)]:
            del sys.modules[name]
        sys.modules.update(before)
