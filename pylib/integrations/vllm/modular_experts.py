"""Low-bit experts as the middle part of vLLM's modular kernel: prepare, experts, finalize.

vLLM's prepare sends tokens to the processes that have their experts, and its finalize brings results back. Between them
tokens come in one of two formats: [tokens, hidden] with ids among the experts of all processes, or in batches
[experts, most tokens, hidden], one for each expert of this process. Adapters (LoRA) on experts come with the first.
"""

from __future__ import annotations

from typing import Any

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
        return (0,), (0,), (M, K)

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
        """Writes the sum of the experts here of each token, by their weights, to output [tokens, hidden]."""
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        ids = local_ids(topk_ids, expert_map)
        if self._lora_context is None:
            output.copy_(self.held(hidden_states, ids, weights))
            return
        adapters = _LoRA(self, hidden_states, topk_ids, weights, expert_map, w1, w2)
        output.copy_(self.held(hidden_states, ids, weights, adapters))


class _LoRA:
    """The adapters of one call, by vLLM's kernels (`Adapters`).

    x, ids, weights   as vLLM gives them; ids are among the experts of all processes
    """

    def __init__(
        self,
        experts: StandardExperts,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        expert_map: Tensor | None,
        w1: Tensor,
        w2: Tensor,
    ) -> None:
        self.experts, self.x, self.ids, self.weights, self.expert_map = experts, x, ids, weights, expert_map
        self.shared: dict[str, Any] = {"w1": w1, "w2": w2, "num_tokens": len(x), "top_k_num": ids.shape[1]}
        self.sorted: Any = None

    def add_to_gate_up(self, h: Tensor) -> None:
        """Adds to h [tokens, k, 2 inner], and keeps how the kernel sorts tokens by adapter and expert."""
        call = {"topk_ids": self.ids, "topk_weights": self.weights, "expert_map": self.expert_map, **self.shared}
        self.sorted = self.experts.apply_w13_lora(self.experts._lora_context, y=h, x=self.x, **call)

    def add_to_down(self, a: Tensor, y: Tensor) -> None:
        """Adds to y [tokens, k, hidden], by weights, for a [tokens k, inner]."""
        names = "sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora", "token_lora_mapping"
        call = {"topk_weights": self.weights, **dict(zip(names, self.sorted, strict=True)), **self.shared}
        self.experts.apply_w2_lora(self.experts._lora_context, y=y, x=a, **call)


class BatchedExperts(_LowbitExperts):
    """Experts of tokens in batches, each of which is a token of one expert to the kernels."""

    @staticmethod
    def activation_format() -> Any:
        """Returns that of a batch for each expert."""
        return FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Returns what weighs results and adds them up: vLLM's finalize."""
        return TopKWeightAndReduceDelegate()

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
        return (0,), (0,), (local_num_experts, M, K)

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
        """Writes each expert's results to output [experts, most tokens, hidden], and zeros where it has no token."""
        experts, most, hidden = hidden_states.shape
        device, counts = hidden_states.device, expert_tokens_meta.expert_num_tokens
        numbers = torch.arange(max(experts, most), dtype=torch.int32, device=device)
        ids = torch.where(numbers[:most] < counts[:, None], numbers[:experts, None], -1).view(-1, 1)
        ones = torch.ones(ids.shape, device=device)
        output.copy_(self.held(hidden_states.reshape(-1, hidden), ids, ones).view_as(output))
