"""The methods of vLLM's experts: low-bit in the checkpoint, or quantized when they have been loaded.

vLLM has already chosen the experts of each token when it calls `apply`, and adds up the results of its processes. The
shared experts of a layer are linear layers of their own, which vLLM runs beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.pylib.checkpoints.checkpoint import EXTRA_STATE, Checkpoint
from lowbit.pylib.integrations.vllm.experts import (
    GATES,
    LEAVE_DENSE,
    Experts,
    check_one_spec,
    each_of,
    gated,
    quantize_experts,
    shard_of_expert,
    stacked,
)
from lowbit.pylib.integrations.vllm.methods import Method, copy, is_filled_later, none_came
from lowbit.pylib.integrations.vllm.rows import ACTS
from lowbit.pylib.nn.dense_experts import LISTS
from lowbit.pylib.nn.gated_linear import Gate
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.runtime.expert_matmul import spec_of_experts
from lowbit.pylib.torch_types import stored_type
from lowbit.pylib.tune.timing import random_weight
from lowbit.pylib.weights.packed import PackedWeight
from lowbit.pylib.weights.saved import SPEC, check_same, read_spec, write_spec

_ABOUT = EXTRA_STATE[1:]
_OF_OAI = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}  # numbers of the epilogue "swiglu_oai"


class ExpertsMethod(Method, FusedMoEMethodBase):
    """Multiplies tokens by the low-bit experts that vLLM has chosen for them.

    name   the layer's

    Raises SpecError for a gate that no kernel applies, and where experts are sent to other processes.
    """

    def __init__(self, name: str, layer: Any) -> None:
        super().__init__(layer.moe_config)
        self.name = name
        self.gate = gate_of_layer(layer)
        if layer.moe_config.moe_parallel_config.use_all2all_kernels:
            raise SpecError("low-bit experts run with tensor parallelism; drop data parallelism, or serve them dense")
        _check_adapters(get_current_vllm_config().lora_config)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Returns None: scales are the kernels' own."""

    def maybe_make_prepare_finalize(self, *_: Any, **__: Any) -> None:
        """Returns None: no tokens are sent to other processes."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """Returns the sum of each token's experts, by their weights, as far as this process has them: [tokens, hidden].

        topk_ids   [tokens, k]: the experts' numbers among all. Those of other processes add nothing
        """
        if layer.apply_router_weight_on_input:  # of one expert for each token
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        if (local := layer.expert_map) is not None:
            topk_ids = local[topk_ids.long().clamp(0, len(local) - 1)]
        elif topk_ids.dtype not in (torch.int32, torch.int64):
            topk_ids = topk_ids.to(torch.int32)
        return layer.lowbit(x, topk_ids, topk_weights)


def _check_adapters(lora: Any) -> None:
    """Raise SpecError where vLLM would put adapters on experts: on all layers, if nothing says on which."""
    targets = [] if lora is None else getattr(lora, "target_modules", None)
    if targets is None or "experts" in targets:
        raise SpecError(
            "vLLM would put adapters on these experts, and low-bit experts take none; name the other layers that have "
            "some (--lora-target-modules q_proj v_proj), leave experts dense, or drop --enable-lora"
        )


def gate_of_layer(layer: Any) -> Gate:
    """Returns what a layer applies to the results of gate_up. Raises SpecError if no kernel does."""
    name = str(getattr(layer.activation, "value", layer.activation))
    gate = GATES.get(name)
    numbers = {key: value for key in _OF_OAI if (value := getattr(layer, key, None)) is not None}
    fits = gate is not None and all(gate.epilogue == "swiglu_oai" and _OF_OAI[key] == numbers[key] for key in numbers)
    if gate is None or not fits:
        of = ", ".join([name, *(f"{key}={value:g}" for key, value in numbers.items())])
        raise SpecError(f"no kernel applies the activation of these experts, {of}; {LEAVE_DENSE}")
    return gate


class OnLoadExperts(ExpertsMethod):
    """Experts that are dense in the checkpoint.

    configs   how to quantize gate_up, and down
    """

    def __init__(self, name: str, layer: Any, configs: Sequence[QuantConfig]) -> None:
        super().__init__(name, layer)
        self.configs = configs

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Creates the dense weights, on meta."""
        wide = 2 * intermediate_size_per_partition
        shapes = {"w13_weight": (wide, hidden_size), "w2_weight": (hidden_size, intermediate_size_per_partition)}
        if self.moe.has_bias:
            shapes |= {"w13_bias": (wide,), "w2_bias": (hidden_size,)}
        for name, shape in shapes.items():
            dense = torch.empty(num_experts, *shape, dtype=params_dtype, device="meta")
            _register(layer, name, dense, attributes)
        self.waiting = tuple(shapes)
        initialize_online_processing(layer)

    def make(self, layer: Any) -> nn.Module:
        """Returns the quantized experts."""
        pairs = [(getattr(layer, f"{m}_weight").data, getattr(layer, f"{m}_bias", None)) for m in ("w13", "w2")]
        with naming(self.name):
            gate_up, down = (
                quantize_experts(weight, bias, config, gate)
                for (weight, bias), config, gate in zip(pairs, self.configs, (self.gate, None), strict=True)
            )
            return Experts(gate_up, down, self.moe.experts_per_token)


def _register(layer: Any, name: str, tensor: Tensor, attributes: Mapping[str, Any]) -> None:
    parameter = nn.Parameter(tensor, requires_grad=False)
    for key, value in attributes.items():
        setattr(parameter, key, value)
    layer.register_parameter(name, parameter)


class SavedExperts(ExpertsMethod):
    """Experts that are low-bit in the checkpoint, each of two modules.

    specs   of one expert's gate_up and down
    """

    def __init__(self, name: str, layer: Any, specs: Mapping[str, MatmulSpec]) -> None:
        super().__init__(name, layer)
        self.specs = specs
        self._came: set[tuple[str, int]] = set()

    def create_weights(self, layer: Any, num_experts: int, params_dtype: torch.dtype, **_: Any) -> None:
        """Creates a parameter for each kind of tensor of all experts, on meta."""
        self.count, self.filled_later = num_experts, is_filled_later()
        self.specs = {matrix: interned(replace(spec, act=ACTS[params_dtype])) for matrix, spec in self.specs.items()}
        for matrix, spec in self.specs.items():
            for slot in spec.tensors:
                shape, kind = (num_experts, *slot.shape), stored_type(slot.storage)
                name = f"{matrix}_{slot.name}"
                waiting = torch.empty(shape, dtype=kind, device="meta")
                _register(layer, name, waiting, {"weight_loader": self._loader(name)})
                self.waiting = (*self.waiting, name)
        layer.load_weights = lambda weights: self._load(layer, weights)  # vLLM knows no other names than w1, w2, w3
        initialize_online_processing(layer)

    def _loader(self, name: str) -> Any:
        def load(param: Tensor, loaded_weight: Tensor, expert: int) -> None:
            copy(param.data[expert], loaded_weight, f"{self.name}: {name} of expert {expert}")
            if not param.is_meta:
                self._came.add((name, expert))

        return load

    def _load(self, layer: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Takes tensors of experts by their names in the layer, "gate_up.3.codes" say; yields those of parameters.

        Raises PackError for experts of another format.
        """
        for name, tensor in weights:
            matrix, number, kind = name.split(".")
            expert = layer._map_global_expert_id_to_local_expert_id(int(number))
            if kind == _ABOUT:
                with naming(f"{self.name}.{matrix}.{number}"):
                    check_same(read_spec(tensor), self.specs[matrix])
            elif expert >= 0:
                parameter = getattr(layer, f"{matrix}_{kind}")
                parameter.weight_loader(parameter, tensor, expert)
                yield f"{matrix}_{kind}"

    def make(self, layer: Any) -> nn.Module:
        """Returns this process's part of the experts."""
        missing = self._missing()
        with naming(self.name):
            if missing and (self._came or not self.filled_later):
                raise none_came(missing)
            made = {matrix: self._packed(layer, matrix, bool(missing)) for matrix in self.specs}
            self._came = set()
            return Experts(gated(made["gate_up"], self.gate), made["down"], self.moe.experts_per_token)

    def _missing(self) -> str:
        """Returns the first tensor that has not come; "" if all have."""
        wanted = ((name, expert) for name in self.waiting for expert in range(self.count))
        return next((f"{name} of expert {expert}" for name, expert in wanted if (name, expert) not in self._came), "")

    def _packed(self, layer: Any, matrix: str, at_random: bool) -> PackedWeight:
        """Returns this process's part of a matrix of all experts."""
        spec = spec_of_experts(self.specs[matrix], self.count)
        tensors = {slot.name: getattr(layer, f"{matrix}_{slot.name}").data.flatten(0, 1) for slot in spec.tensors}
        device = next(iter(tensors.values())).device
        if at_random:
            whole = random_weight(spec, str(device))
        else:
            whole = PackedWeight.from_state_dict({**tensors, SPEC: write_spec(spec)}, spec)
        index, count = self.moe.tp_rank, self.moe.tp_size
        if count == 1:
            return whole
        return stacked([shard_of_expert(each, matrix, self.gate, index, count) for each in each_of(whole)])


def specs_of_saved(checkpoint: Checkpoint, modules: Sequence[str]) -> dict[str, MatmulSpec]:
    """Returns the specs of gate_up and down of experts that lowbit has saved, by these names.

    modules   those of all experts of a layer

    Raises SpecError for experts of several formats, and for those of another library.
    """
    found: dict[str, dict[str, MatmulSpec]] = {matrix: {} for matrix in LISTS.values()}
    for module in modules:
        matrix = module.split(".")[-2]
        if matrix not in found or checkpoint.format is not None:
            raise SpecError(
                f"{module}: in vLLM, lowbit runs experts that it has saved itself; serve this checkpoint without "
                "--quantization lowbit and LOWBIT_VLLM=1, or with transformers"
            )
        about = checkpoint.tensors[module + EXTRA_STATE]
        found[matrix][module] = read_spec(about)
    return {matrix: check_one_spec(specs) for matrix, specs in found.items()}
