"""The classes of vLLM's modular kernel of experts that lowbit's plugin builds on, with the signatures that they have in
vLLM 0.26 to 0.33, and ways to send tokens between "processes", which are threads here.

`FusedMoEKernel.apply` calls prepare, experts and finalize as vllm/model_executor/layers/fused_moe/modular_kernel.py
does. The ways of sending follow prepare_finalize/: `no_dp_ep.py`, `naive_dp_ep.py` and, in batches, `deepep_ll.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from threading import Barrier, local
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

UNQUANTIZED = SimpleNamespace(quant_dtype=None)
Formats = Enum("Formats", "Standard BatchedExperts")
HERE = local()
"""The process that a thread is: `group` and `rank`."""


@dataclass
class Group:
    """Processes that have experts each, and the tokens of each."""

    size: int
    given: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size)

    def all_gather(self, rank: int, mine: Any) -> list[Any]:
        """Returns what each process has given."""
        self.barrier.wait()
        self.given[rank] = mine
        self.barrier.wait()
        return [self.given[each] for each in range(self.size)]


class TopKWeightAndReduceNoOP:
    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        return fused_expert_output


class TopKWeightAndReduceDelegate:
    pass


class FusedMoEExperts(ABC):
    def __init__(
        self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None, num_dispatchers: int | None = None
    ) -> None:
        batched = self.activation_format() == Formats.BatchedExperts
        if batched != (max_num_tokens is not None and num_dispatchers is not None):
            raise ValueError("max_num_tokens and num_dispatchers are of batches")
        self.moe_config, self.quant_config = moe_config, quant_config
        self.max_num_tokens, self.num_dispatchers = max_num_tokens, num_dispatchers

    @property
    def expects_unquantized_inputs(self) -> bool:
        return False

    @staticmethod
    @abstractmethod
    def activation_format() -> Any: ...

    @staticmethod
    @abstractmethod
    def _supports_current_device() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_activation(activation: Any) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool: ...

    @staticmethod
    def supports_lora() -> bool:
        return False


class FusedMoEExpertsModular(FusedMoEExperts):
    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        experts, n, _ = w1.shape
        return experts, a1.size(-2), n, a1.size(-1), topk_ids.size(1)

    @abstractmethod
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
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]: ...

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> Any: ...

    @abstractmethod
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
    ) -> None: ...


class LoRAExpertsMixin:
    _lora_context: Any = None

    def set_lora_context(self, ctx: Any) -> None:
        self._lora_context = ctx

    @staticmethod
    def supports_lora() -> bool:
        return True

    def apply_w13_lora(
        self,
        lora_context: Any,
        *,
        y: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None,
        w1: Tensor,
        w2: Tensor,
        num_tokens: int,
        top_k_num: int,
        add_inputs: bool = True,
    ) -> tuple[Any, Any, Any, Any]:
        assert y.shape[:2] == topk_ids.shape == (num_tokens, top_k_num) and len(w1) == lora_context.local_num_experts
        here = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
        mapping = lora_context.local_token_lora_mapping
        for token, place in (here >= 0).nonzero().tolist():
            if mapping[token] >= 0:
                of_expert = lora_context.w13[mapping[token]][here[token, place]]
                y[token, place] += (of_expert.float() @ x[token].float()).to(y.dtype)
        return here, None, None, mapping

    def apply_w2_lora(
        self,
        lora_context: Any,
        *,
        y: Tensor,
        x: Tensor,
        topk_weights: Tensor,
        sorted_token_ids_lora: Tensor | None,
        expert_ids_lora: Tensor | None,
        num_tokens_post_padded_lora: Tensor | None,
        token_lora_mapping: Tensor | None,
        num_tokens: int,
        w1: Tensor,
        w2: Tensor,
        top_k_num: int,
        add_inputs: bool = True,
    ) -> None:
        here: Any = sorted_token_ids_lora
        mapping: Any = token_lora_mapping
        x = x.view(num_tokens, top_k_num, -1)
        for token, place in (here >= 0).nonzero().tolist():
            if mapping[token] >= 0:
                of_expert = lora_context.w2[mapping[token]][here[token, place]].float()
                y[token, place] += (topk_weights[token, place] * (of_expert @ x[token, place].float())).to(y.dtype)


class NoDPEP:
    """All tokens of this process, which other processes have, too."""

    activation_format = Formats.Standard

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> tuple[Any, ...]:
        a1 = a1 * topk_weights.to(a1.dtype) if apply_router_weight_on_input else a1
        return a1, None, None, None, None

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        given = fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
        output.copy_(weight_and_reduce_impl.apply(None, *given))


class NaiveDPEP(NoDPEP):
    """The tokens of all processes, gathered; results are added up, and each process takes those of its own tokens."""

    _lora_context: Any = None

    def set_lora_context(self, ctx: Any) -> None:
        self._lora_context = ctx

    def prepare(self, a1: Tensor, topk_weights: Tensor, topk_ids: Tensor, *rest: Any) -> tuple[Any, ...]:
        a1 = super().prepare(a1, topk_weights, topk_ids, *rest)[0]
        mapping = self._lora_context and self._lora_context.mapping
        everyone = HERE.group.all_gather(HERE.rank, (a1, topk_weights, topk_ids, mapping))
        a1, topk_weights, topk_ids = (torch.cat(each) for each in list(zip(*everyone))[:3])
        if self._lora_context:
            self._lora_context.local_token_lora_mapping = torch.cat([each[3] for each in everyone])
        return a1, None, None, topk_ids, topk_weights

    def finalize(self, output: Tensor, fused_expert_output: Tensor, *rest: Any) -> None:
        summed = torch.empty_like(fused_expert_output)
        super().finalize(summed, fused_expert_output, *rest)
        everyone = HERE.group.all_gather(HERE.rank, (summed.float(), len(output)))
        first = sum(tokens for _, tokens in everyone[: HERE.rank])
        output.copy_(sum(each for each, _ in everyone)[first : first + len(output)])


class Batched(NoDPEP):
    """For each expert of this process the tokens of all processes that have it, in a batch with room for more."""

    activation_format = Formats.BatchedExperts
    most = 8

    def __init__(self, processes: int) -> None:
        self.processes = processes

    def max_num_tokens_per_rank(self) -> int:
        return self.most

    def num_dispatchers(self) -> int:
        return self.processes

    def prepare(self, a1: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_experts: int, *rest: Any) -> Any:
        everyone = HERE.group.all_gather(HERE.rank, (a1, topk_ids))
        count = num_experts // self.processes
        batches = torch.full((count, self.most * self.processes, a1.shape[1]), torch.nan, dtype=a1.dtype)
        counts, self.places = torch.zeros(count, dtype=torch.int32), []
        for rank, (x, ids) in enumerate(everyone):
            for token, place in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
                expert = int(ids[token, place]) - HERE.rank * count
                if 0 <= expert < count:
                    self.places.append((rank, token, place, expert, int(counts[expert])))
                    batches[expert, counts[expert]] = x[token]
                    counts[expert] += 1
        return batches, None, SimpleNamespace(expert_num_tokens=counts), None, None

    def finalize(
        self, output: Tensor, fused_expert_output: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        apply_router_weight_on_input: bool, weight_and_reduce_impl: Any,
    ) -> None:  # fmt: skip
        assert isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate)
        everyone = HERE.group.all_gather(HERE.rank, (fused_expert_output.float(), self.places))
        output.zero_()
        for made, places in everyone:
            for rank, token, place, expert, number in places:
                if rank == HERE.rank:
                    output[token] += (topk_weights[token, place] * made[expert, number]).to(output.dtype)


def maybe_make_prepare_finalize(
    moe: Any,
    quant_config: Any,
    routing_tables: Any = None,
    allow_new_interface: bool = False,
    use_monolithic: bool = False,
) -> Any:
    parallel = moe.moe_parallel_config
    assert allow_new_interface and not use_monolithic and quant_config is UNQUANTIZED
    if parallel.use_batched_activation_format:
        return Batched(parallel.ep_size)
    return NaiveDPEP() if parallel.use_all2all_kernels or parallel.dp_size > 1 else NoDPEP()


class FusedMoEKernel:
    def __init__(self, prepare_finalize: Any, fused_experts: Any) -> None:
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts
        assert prepare_finalize.activation_format == fused_experts.activation_format()

    def apply(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        output, experts = torch.empty_like(hidden_states), self.fused_experts
        x, scale, meta, ids, weights = self.prepare_finalize.prepare(
            hidden_states,
            topk_weights,
            topk_ids,
            global_num_experts,
            expert_map,
            apply_router_weight_on_input,
            experts.quant_config,
            experts.expects_unquantized_inputs,
        )
        ids, weights = topk_ids if ids is None else ids, topk_weights if weights is None else weights
        _, tokens, n, k, top_k = experts.moe_problem_size(x, w1, w2, ids)
        sizes = (tokens, n, k, top_k, global_num_experts, len(w1), meta, activation)
        shapes = experts.workspace_shapes(*sizes)
        workspace13, workspace2, fused_out = (torch.full(s, torch.nan, dtype=hidden_states.dtype) for s in shapes)
        experts.apply(
            output=fused_out,
            hidden_states=x,
            w1=w1,
            w2=w2,
            topk_weights=weights,
            topk_ids=ids,
            activation=activation,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
            a1q_scale=scale,
            a2_scale=None,
            workspace13=workspace13,
            workspace2=workspace2,
            expert_tokens_meta=meta,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        how = apply_router_weight_on_input, experts.finalize_weight_and_reduce_impl()
        self.prepare_finalize.finalize(output, fused_out, topk_weights, topk_ids, *how)
        return output


def modules(moe: str) -> dict[str, dict[str, Any]]:
    """Returns the modules of vLLM that have these names, below `moe`."""
    return {
        f"{moe}.all2all_utils": {"maybe_make_prepare_finalize": maybe_make_prepare_finalize},
        f"{moe}.config": {"FUSED_MOE_UNQUANTIZED_CONFIG": UNQUANTIZED},
        f"{moe}.experts.lora_experts_mixin": {"LoRAExpertsMixin": LoRAExpertsMixin},
        f"{moe}.modular_kernel": {
            "FusedMoEActivationFormat": Formats,
            "FusedMoEExpertsModular": FusedMoEExpertsModular,
            "FusedMoEKernel": FusedMoEKernel,
        },
        f"{moe}.topk_weight_and_reduce": {
            "TopKWeightAndReduceDelegate": TopKWeightAndReduceDelegate,
            "TopKWeightAndReduceNoOP": TopKWeightAndReduceNoOP,
        },
    }
