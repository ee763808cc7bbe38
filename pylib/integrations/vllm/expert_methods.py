"""The methods of vLLM's experts: low-bit in the checkpoint, or quantized when they have been loaded.

vLLM has already chosen the experts of each token when it calls `apply`, and adds up the results of its processes. The
shared experts of a layer are linear layers of their own, which vLLM runs beside. Where tokens are sent between
processes, or experts have adapters, the call goes through vLLM's modular kernel (`modular_experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import Act
from lowbit.pylib.checkpoints.registry import import_experts
from lowbit.pylib.integrations.serving.adapted_experts import AdaptedExperts
from lowbit.pylib.integrations.serving.expert_sources import ExpertShare, ExpertsSource
from lowbit.pylib.integrations.serving.experts import GATES, LEAVE_DENSE, Experts, gated, quantize_experts, stacked
from lowbit.pylib.integrations.serving.held import check_like, none_came
from lowbit.pylib.integrations.serving.rows import ACTS
from lowbit.pylib.integrations.vllm.methods import Method, is_filled_later, where_copied
from lowbit.pylib.integrations.vllm.modular_experts import kernel_of, local_ids
from lowbit.pylib.nn.gated_linear import Gate
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.nn.rotated import Rotation
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.weights.packed import PackedWeight

_OF_OAI = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}  # numbers of the epilogue "swiglu_oai"


_DISPATCHING = ("moonep", "passthrough")  # all2all backends whose experts send tokens themselves


class ExpertsMethod(Method, FusedMoEMethodBase):
    """Multiplies tokens by the low-bit experts that vLLM has chosen for them.

    name     the layer's
    sends    whether tokens are sent between processes
    adapts   whether adapters may be put on the experts

    Raises SpecError for a gate that no kernel applies, and for ways of sending tokens that experts take part in.
    """

    def __init__(self, name: str, layer: Any) -> None:
        super().__init__(layer.moe_config)
        self.name = name
        self.gate = gate_of_layer(layer)
        self.parallel = layer.moe_config.moe_parallel_config
        self.sends = self.parallel.use_all2all_kernels or self.parallel.dp_size > 1
        self.adapts = _has_adapters(get_current_vllm_config().lora_config)
        if self.sends and self.parallel.all2all_backend in _DISPATCHING:
            raise SpecError(
                f"low-bit experts do not send tokens, as --all2all-backend {self.parallel.all2all_backend} wants them "
                "to; drop the option, or serve experts dense"
            )

    def maybe_roundup_sizes(self, hidden_size: int, *sizes: Any, **more: Any) -> tuple[int, int]:
        """Returns the sizes of a layer. Raises SpecError where tokens can't be sent as they are."""
        hidden, inner = super().maybe_roundup_sizes(hidden_size, *sizes, **more)
        if hidden != hidden_size:
            raise SpecError(
                f"{self.name}: --all2all-backend {self.parallel.all2all_backend} sends tokens of {hidden} numbers, and "
                f"these have {hidden_size}, which low-bit weights can't fill up; use allgather_reducescatter"
            )
        return hidden, inner

    def _wait_for(self, layer: Any, name: str, tensor: Tensor, attributes: Mapping[str, Any]) -> None:
        """Give a layer a parameter, on meta, for tensors of the checkpoint."""
        parameter = nn.Parameter(tensor, requires_grad=False)
        for key, value in attributes.items():
            setattr(parameter, key, self._while_ours(layer, value) if key == "weight_loader" else value)
        layer.register_parameter(name, parameter)

    def _while_ours(self, layer: Any, load: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a loader that raises SpecError once adapters are on the layer, by a method of vLLM that makes nothing
        of what is loaded."""

        @wraps(load)
        def checked(*args: Any, **more: Any) -> Any:
            if getattr(layer, "quant_method", self) is not self:
                raise SpecError(
                    f"{self.name}: vLLM makes no low-bit weights for experts that have adapters; start the server "
                    "again with the new weights, or reload them without --enable-lora, or with --lora-target-modules "
                    "that leave experts out"
                )
            return load(*args, **more)

        return checked

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Returns None: scales are the kernels' own."""

    def maybe_make_prepare_finalize(self, *_: Any, **__: Any) -> None:
        """Returns None: where tokens are sent, the layer's kernel has been made."""

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
        if self.moe_kernel is not None:
            return self.moe_kernel.apply(
                hidden_states=x,
                w1=layer.w13_weight,
                w2=layer.w2_weight,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                activation=layer.activation,
                global_num_experts=layer.global_num_experts,
                expert_map=layer.expert_map,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                shared_experts=shared_experts,
                shared_experts_input=shared_experts_input,
            )
        if layer.apply_router_weight_on_input:  # of one expert for each token
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        return layer.lowbit(x, local_ids(topk_ids, layer.expert_map), topk_weights)

    def _experts(
        self, layer: Any, gate_up: PackedWeight, down: PackedWeight, inputs: Sequence[Rotation] = ()
    ) -> Experts:
        """Returns experts of this process, to which ids are those of all processes.

        inputs   what multiplies tokens before they meet experts
        """
        among, top_k = 0 if layer.expert_map is None else len(layer.expert_map), self.moe.experts_per_token
        if self.parallel.use_batched_activation_format:
            return Experts(gate_up, down, 1, among, inputs, gate_up.spec.experts * self.parallel.ep_size)
        if not self.adapts:
            return Experts(gate_up, down, top_k, among, inputs, self.parallel.dp_size)
        if inputs:
            raise SpecError(
                "inputs of these experts are scaled, which adapters do not know of; name the other layers that have "
                "some (--lora-target-modules q_proj v_proj), or drop --enable-lora"
            )
        return AdaptedExperts(gate_up, down, self.gate, top_k, among, self.parallel.dp_size)

    def _hold(self, layer: Any, made: nn.Module) -> None:
        """Give a layer its experts, and what vLLM's modular kernel reads of it: sizes of matrices."""
        super()._hold(layer, made)
        if not (self.sends or self.adapts):
            return
        held: Experts = layer.lowbit
        for name, matrix in (("w13_weight", held.gate_up), ("w2_weight", held.down)):
            sizes = torch.empty(matrix.spec.experts, 0, matrix.spec.k, device=matrix.codes.device)
            layer.register_parameter(name, nn.Parameter(sizes, requires_grad=False))
        if self.moe_kernel is None:
            self.moe_kernel = kernel_of(layer, held)


def _has_adapters(lora: Any) -> bool:
    """Tells whether vLLM puts adapters on experts: on all layers, if nothing says on which."""
    targets = [] if lora is None else getattr(lora, "target_modules", None)
    return targets is None or "experts" in targets


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
            self._wait_for(layer, name, dense, attributes)
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
            return self._experts(layer, gate_up, down)


class SavedExperts(ExpertsMethod):
    """Experts that are low-bit in the checkpoint.

    source   what the checkpoint has of them
    """

    def __init__(self, name: str, layer: Any, source: ExpertsSource) -> None:
        super().__init__(name, layer)
        self.source = source
        self._came: set[tuple[str, int]] = set()

    def create_weights(self, layer: Any, num_experts: int, params_dtype: torch.dtype, **_: Any) -> None:
        """Creates a parameter for each kind of tensor of all experts, on meta."""
        self.count, self.filled_later = num_experts, is_filled_later()
        self.share = ExpertShare(self.gate, ACTS[params_dtype], self.moe.tp_rank, self.moe.tp_size)
        self.kinds: list[str] = []
        for kind, like in self.source.tensors.items():
            with naming(self.name):
                wanted = self.source.wanted(kind, like, self.share)
            if wanted is not None:
                waiting = torch.empty(num_experts, *wanted.shape, dtype=wanted.dtype, device="meta")
                self._wait_for(layer, _parameter(kind), waiting, {"weight_loader": self._loader(kind)})
                self.kinds.append(kind)
        self.waiting = [_parameter(kind) for kind in self.kinds]
        layer.load_weights = lambda weights: self._load(layer, weights)  # vLLM knows no other names than w1, w2, w3
        initialize_online_processing(layer)

    def _loader(self, kind: str) -> Any:
        def load(param: Tensor, loaded_weight: Tensor, expert: int) -> None:
            check_like(loaded_weight, self.source.tensors[kind], f"{self.name}: {kind} of expert {expert}")
            wanted = self.source.wanted(kind, where_copied(param, loaded_weight), self.share)
            param.data[expert].copy_(cast(Tensor, wanted))
            if not param.is_meta:
                self._came.add((kind, expert))

        return load

    def _load(self, layer: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Takes tensors of experts by their names in the layer, "gate_up.3.codes" or "3.gate_proj.qweight" say; yields
        those of parameters."""
        for name, tensor in weights:
            with naming(self.name):
                taken = self.source.taken(name, tensor)
            if taken is None:
                continue
            kind, number, values = taken
            expert = layer._map_global_expert_id_to_local_expert_id(number)
            if expert >= 0 and kind in self.kinds:
                parameter = getattr(layer, _parameter(kind))
                parameter.weight_loader(parameter, values, expert)
                yield _parameter(kind)

    def make(self, layer: Any) -> nn.Module:
        """Returns this process's part of the experts."""
        missing, came, self._came = self._missing(), bool(self._came), set()
        tensors = {kind: getattr(layer, _parameter(kind)).data for kind in self.kinds}
        with naming(self.name):
            if missing and (came or not self.filled_later):
                raise none_came(missing)
            device = next(iter(tensors.values())).device
            made = self.source.random(self.count, device, self.share) if missing else None
            gate_up, down = made or self.source.weights(tensors, self.share)
            return self._experts(layer, gated(gate_up, self.gate), down, self.source.inputs)

    def _missing(self) -> str:
        """Returns the first tensor that has not come; "" if all have."""
        wanted = ((kind, expert) for kind in self.kinds for expert in range(self.count))
        return next((f"{kind} of expert {expert}" for kind, expert in wanted if (kind, expert) not in self._came), "")


def _parameter(kind: str) -> str:
    return f"experts_{kind.replace('.', '_')}"


class GptOssExperts(ExpertsMethod):
    """The experts of gpt-oss in MXFP4. The class of the model in vLLM cuts them for processes, into whole groups of 32,
    and puts them into parameters of these names.

    config   the checkpoint's quantization_config
    """

    def __init__(self, name: str, layer: Any, config: Mapping[str, Any]) -> None:
        super().__init__(name, layer)
        self.config = config

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Creates codes, scales and biases, on meta."""
        self.act: Act = ACTS[params_dtype]
        whole = intermediate_size_per_partition * self.moe.tp_size
        inner = -(-whole // _GROUP // self.moe.tp_size) * _GROUP  # the last process may have fewer, and zeros
        for name, rows, columns in (("w13", 2 * inner, hidden_size), ("w2", hidden_size, inner)):
            sizes = {"weight": (rows, columns // 2), "weight_scale": (rows, columns // _GROUP), "bias": (rows,)}
            for kind, size in sizes.items():
                dtype = params_dtype if kind == "bias" else torch.uint8
                waiting = torch.empty(num_experts, *size, dtype=dtype, device="meta")
                self._wait_for(layer, f"{name}_{kind}", waiting, {"weight_loader": _load_first})
                self.waiting = (*self.waiting, f"{name}_{kind}")
        initialize_online_processing(layer)

    def make(self, layer: Any) -> nn.Module:
        """Returns this process's part of the experts."""
        with naming(self.name):
            gate_up, down = (self._weight(layer, name) for name in ("w13", "w2"))
            return self._experts(layer, gated(gate_up, self.gate), down)

    def _weight(self, layer: Any, name: str) -> PackedWeight:
        codes, scales, bias = (getattr(layer, f"{name}_{kind}").data for kind in ("weight", "weight_scale", "bias"))
        tensors = {"blocks": codes.unflatten(-1, (-1, _GROUP // 2)), "scales": scales, "bias": bias}
        return stacked(import_experts(self.config, tensors, self.act))


_GROUP = 32  # columns that share a scale in MXFP4


def _load_first(param: Tensor, loaded_weight: Tensor, *_: Any, **__: Any) -> None:
    """Put a tensor into the first places of a parameter, and zeros into the others."""
    param.data.zero_()
    param.data[tuple(slice(size) for size in loaded_weight.shape)].copy_(loaded_weight)
