"""Low-bit experts as the middle part of vLLM's modular kernel: prepare, experts, finalize.

vLLM's prepare sends tokens to the processes that have their experts, and its finalize brings results back. Between them
tokens come in one of two formats: [tokens, hidden] with ids among the experts of all processes, or in batches
[experts, most tokens, hidden], one for each expert of this process. Adapters (LoRA) on experts come with the first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    FusedMoEKernel,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

from lowbit.dialect.errors import SpecError
from lowbit.pylib.integrations.serving.adapted_experts import AdaptedExperts
from lowbit.pylib.integrations.serving.experts import GATES, Experts

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def kernel_of(layer: Any, held: Experts) -> Any:
    """Returns vLLM's kernel of a layer whose tokens are sent to other processes, or whose experts have adapters.

    held   what multiplies, on every call of the kernel
    """
    moe = layer.moe_config
    tables = layer._expert_routing_tables()
    prepare = maybe_make_prepare_finalize(moe, FUSED_MOE_UNQUANTIZED_CONFIG, tables, allow_new_interface=True)
    if prepare.activation_format == FusedMoEActivationFormat.BatchedExperts:
        sizes = {"max_num_tokens": prepare.max_num_tokens_per_rank(), "num_dispatchers": prepare.num_dispatchers()}
        return FusedMoEKernel(prepare, BatchedExperts(moe, held, **sizes))
    return FusedMoEKernel(prepare, StandardExperts(moe, held))


def local_ids(ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Returns the numbers that experts have in this process, -1 for those elsewhere and for ids that are no expert's.

    expert_map   [experts of all processes], -1 for those elsewhere; None: all are here
    """
    if expert_map is None:
        return ids if ids.dtype in (torch.int32, torch.int64) else ids.to(torch.int32)
    here = nn.functional.pad(expert_map, (0, 1), value=-1)
    return here[ids.long().clamp(-1, len(expert_map))]


class _Call(NamedTuple):
    """What vLLM gives for a call.

    x             [tokens, hidden], or in batches [experts, most tokens, hidden]
    ids, weights  [tokens, k]; ids are among the experts of all processes
    expert_map    see `local_ids`
    w1, w2        for adapters: parameters with the sizes of the matrices
    meta          of batches: how many tokens each expert has
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    expert_map: Tensor | None
    w1: Tensor
    w2: Tensor
    meta: Any


class _LowbitExperts(FusedMoEExpertsModular):
    """What both formats share. Scales, gates and biases are the kernels' own, and they need no workspace of vLLM's."""

    def __init__(self, moe: Any, held: Experts, **sizes: Any) -> None:
        super().__init__(moe, FUSED_MOE_UNQUANTIZED_CONFIG, **sizes)
        self.held = held

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return getattr(activation, "value", activation) in GATES

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        """Returns how many experts, tokens, rows of gate_up, columns of x, and experts of a token there are."""
        spec = self.held.gate_up.spec
        return spec.experts, a1.shape[-2], spec.n // spec.experts, a1.shape[-1], topk_ids.shape[1]

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> Shapes:
        """Returns the shapes of two workspaces, and of the results."""
        return (0,), (0,), self.results_shape(M, K, local_num_experts)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes the results of a call to output."""
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        output.copy_(self.results(_Call(hidden_states, topk_ids, weights, expert_map, w1, w2, expert_tokens_meta)))

    def results_shape(self, tokens: int, hidden: int, experts: int) -> tuple[int, ...]:
        """Returns the shape of the results for so many tokens, or for batches of so many."""
        raise NotImplementedError

    def results(self, call: _Call) -> Tensor:
        """Returns what goes back to vLLM."""
        raise NotImplementedError


class StandardExperts(LoRAExpertsMixin, _LowbitExperts):
    """Experts of tokens [tokens, hidden], whose results are added up here."""

    @staticmethod
    def activation_format() -> Any:
        """Returns that of tokens with ids of experts."""
        return FusedMoEActivationFormat.Standard

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Returns what vLLM does to results before it sends them back: nothing."""
        return TopKWeightAndReduceNoOP()

    def set_lora_context(self, ctx: Any) -> None:
        """Take the adapters of the calls to come. Raises SpecError for experts that were not made for any."""
        if not isinstance(self.held, AdaptedExperts):
            raise SpecError("these experts were made without adapters; start the server with --enable-lora")
        if self.held.gate.pairs and ctx.w13_num_slices != 1:
            raise SpecError(
                "adapters have the gate and what it multiplies apart, and these experts' rows alternate; use adapters "
                "of gate_up_proj"
            )
        super().set_lora_context(ctx)

    def results_shape(self, tokens: int, hidden: int, experts: int) -> tuple[int, ...]:
        """Returns that of the sums of tokens."""
        return tokens, hidden

    def results(self, call: _Call) -> Tensor:
        """Returns the sum of the experts here of each token, by their weights: [tokens, hidden]."""
        ids = local_ids(call.ids, call.expert_map)
        if self._lora_context is None:
            return self.held(call.x, ids, call.weights)
        return self.held(call.x, ids, call.weights, _LoRA(self, call))


class _LoRA:
    """The adapters of one call, by vLLM's kernels (`Adapters`)."""

    def __init__(self, experts: StandardExperts, call: _Call) -> None:
        self.experts, self.call = experts, call
        tokens, k = call.ids.shape
        self.shared: dict[str, Any] = {"w1": call.w1, "w2": call.w2, "num_tokens": tokens, "top_k_num": k}
        self.sorted: Any = None

    def add_to_gate_up(self, h: Tensor) -> None:
        """Adds to h [tokens, k, 2 inner], and keeps how the kernel sorts tokens by adapter and expert."""
        call = self.call
        chosen = {"topk_ids": call.ids, "topk_weights": call.weights, "expert_map": call.expert_map}
        self.sorted = self.experts.apply_w13_lora(self.experts._lora_context, y=h, x=call.x, **chosen, **self.shared)

    def add_to_down(self, a: Tensor, y: Tensor) -> None:
        """Adds to y [tokens, k, hidden], by weights, for a [tokens k, inner]."""
        names = "sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora", "token_lora_mapping"
        order = dict(zip(names, self.sorted, strict=True))
        given = {"topk_weights": self.call.weights, **order, **self.shared}
        self.experts.apply_w2_lora(self.experts._lora_context, y=y, x=a, **given)


class BatchedExperts(_LowbitExperts):
    """Experts of tokens in batches, each of which is a token of one expert to the kernels."""

    @staticmethod
    def activation_format() -> Any:
        """Returns that of a batch for each expert."""
        return FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Returns what weighs results and adds them up: vLLM's finalize."""
        return TopKWeightAndReduceDelegate()

    def results_shape(self, tokens: int, hidden: int, experts: int) -> tuple[int, ...]:
        """Returns that of a batch for each expert."""
        return experts, tokens, hidden

    def results(self, call: _Call) -> Tensor:
        """Returns each expert's results [experts, most tokens, hidden], and zeros where it has no token."""
        experts, most, hidden = call.x.shape
        device, counts = call.x.device, call.meta.expert_num_tokens
        numbers = torch.arange(max(experts, most), dtype=torch.int32, device=device)
        ids = torch.where(numbers[:most] < counts[:, None], numbers[:experts, None], -1).view(-1, 1)
        ones = torch.ones(ids.shape, device=device)
        return self.held(call.x.reshape(-1, hidden), ids, ones).view_as(call.x)
