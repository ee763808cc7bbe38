"""What others run the experts of a layer with: vLLM's Marlin kernels, and humming's as vLLM calls them.

Both take codes of 4 bits with a scale for a group of columns, and no zero points. vLLM does what is around their
matmuls: sorting by expert, the gate, and the sum of a token's experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.humming import tuning
from lowbit.dialect.errors import SpecError
from lowbit.pylib.quantization.config import QuantConfig

CODES = 8  # in an i32


@dataclass(frozen=True)
class ExpertsCall:
    """Experts, ready to be called.

    run      x [m, hidden], ids and weights [m, top_k] of its experts -> the sums y [m, hidden]
    ids      type in which ids are given
    weights  the same of the weights of tokens
    """

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    ids: torch.dtype = torch.int32
    weights: torch.dtype = torch.float32

    def encoded(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the arguments of `run` in its types; not timed."""
        return x, ids.to(self.ids), weights.to(self.weights)


class ExpertsPeer:
    """A method that runs all experts of a layer."""

    def prepare(self, dense: nn.Module, config: QuantConfig, top_k: int, tokens: Sequence[int]) -> ExpertsCall:
        """Returns the call with weights rounded to 4 bits, its kernels compiled for some numbers of tokens.

        dense   has gate_up_proj [experts, 2 width, hidden] and down_proj [experts, hidden, width] in bf16

        Raises SpecError for another format.
        """
        if config.weight != "u4" or config.group_size is None or hasattr(dense, "gate_up_proj_bias"):
            raise SpecError(f"{type(self).__name__} is measured with u4, in groups and without biases, only")
        return self.call(dense, config.group_size, top_k, tokens)

    def call(self, dense: nn.Module, group: int, top_k: int, tokens: Sequence[int]) -> ExpertsCall:
        raise NotImplementedError


class Marlin(ExpertsPeer):
    """vLLM's `fused_marlin_moe`, as its GPTQ checkpoints run it."""

    def call(self, dense: nn.Module, group: int, top_k: int, tokens: Sequence[int]) -> ExpertsCall:
        from vllm import _custom_ops as ops  # type: ignore[import-not-found]
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import (  # type: ignore[import-not-found]
            fused_marlin_moe,
        )
        from vllm.model_executor.layers.quantization.utils.marlin_utils import (  # type: ignore[import-not-found]
            marlin_make_workspace_new,
        )
        from vllm.scalar_type import scalar_types  # type: ignore[import-not-found]

        (w1, s1), (w2, s2) = (_marlin(weight, group) for weight in _weights(dense))
        run = partial(
            fused_marlin_moe,
            w1=w1,
            w2=w2,
            bias1=None,
            bias2=None,
            w1_scale=s1,
            w2_scale=s2,
            quant_type_id=scalar_types.uint4b8.id,
            workspace=marlin_make_workspace_new(w1.device, 4),
            moe_sum=lambda o, y, *_: ops.moe_sum(o, y),
        )

        def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            y = torch.empty_like(x)
            run(hidden_states=x, topk_weights=weights, topk_ids=ids, output=y)
            return y

        return ExpertsCall(call)


def _weights(dense: nn.Module) -> tuple[Any, Any]:
    return dense.gate_up_proj, dense.down_proj


def _marlin(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Returns the codes and scales of experts' weights [experts, n, k], as Marlin orders them."""
    from vllm import _custom_ops as ops  # type: ignore[import-not-found]
    from vllm.model_executor.layers.quantization.utils.marlin_utils import (  # type: ignore[import-not-found]
        marlin_moe_permute_scales,
    )

    n, k = weight.shape[1:]
    order = torch.empty(1, 0, dtype=torch.int32, device=weight.device)
    codes, scales = [], []
    for each in weight:
        packed, scale = gptq(each, group)
        codes.append(ops.gptq_marlin_moe_repack(packed[None], order, k, n, 4))
        scales.append(marlin_moe_permute_scales(scale[None], k, n, group))
    return torch.cat(codes), torch.cat(scales)


def gptq(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Returns a weight [n, k] as GPTQ checkpoints have it, rounded to nearest: codes i32 [k / 8, n], of which 8 is zero
    and the first of eight stands in the low bits, and scales [k / group, n]."""
    n, k = weight.shape
    groups = weight.view(n, k // group, group)
    scales = (groups.abs().amax(-1).float() / 7).to(weight.dtype).clamp(min=1e-6)
    codes = (groups / scales[..., None]).round().clamp(-8, 7).view(n, k // CODES, CODES).int() + 8
    shifts = torch.arange(0, 4 * CODES, 4, device=weight.device, dtype=torch.int32)
    packed = (codes << shifts).sum(-1, dtype=torch.int64).to(torch.int32)
    return packed.T.contiguous(), scales.T.contiguous()


class HummingExperts(ExpertsPeer):
    """humming's kernels of rows by index, which vLLM prefers to those of sorted rows. CUDA_HOME must be set."""

    def call(self, dense: nn.Module, group: int, top_k: int, tokens: Sequence[int]) -> ExpertsCall:
        from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import (  # type: ignore[import-not-found]
            moe_fused_mul_sum,
        )

        gate_up, down = layers = [_humming(weight, group) for weight in _weights(dense)]
        _compile(layers, [m * top_k for m in tokens])
        experts = len(dense.gate_up_proj)  # type: ignore[arg-type]

        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            slots, m = _Slots(ids, experts), len(x)
            h = _matmul(gate_up, x, slots, top_k)
            a = h.new_empty(len(h), h.shape[1] // 2)
            torch.ops._C.silu_and_mul(a, h)
            o = _matmul(down, a, slots, 1)
            y = torch.empty_like(x)
            moe_fused_mul_sum(o.view(m, top_k, -1), weights, y)
            return y

        return ExpertsCall(run)


COMPUTE = json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"})


def _humming(weight: Tensor, group: int) -> Any:
    """Returns the layer of experts' weights [experts, n, k], in the kernels' order."""
    from humming.layer import HummingLayer  # type: ignore[import-not-found]

    experts, n, k = weight.shape
    config = {"dtype": "int4", "group_size": group, "has_zero_point": False}
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, num_experts=experts, torch_dtype=weight.dtype)
    layer = layer.to(weight.device)
    rounded = [layer.weight_schema.quant_tensor(each, layer.weight_schema, weight.dtype) for each in weight.split(1)]
    layer.load_from_tensors({name: torch.cat([each[name] for each in rounded]) for name in rounded[0]})
    layer.transform()
    return layer


def _compile(layers: Sequence[Any], slots: Sequence[int]) -> None:
    """Compiles the kernels of all numbers of slots at the same time."""
    from humming.kernel.humming import HummingKernel  # type: ignore[import-not-found]

    for config in (layer.humming_config.to_str() for layer in layers):
        ranges = {json.dumps(each): each for count in slots for each in json.loads(tuning(config, count, "indexed"))}
        HummingKernel.prepare_kernels(config, COMPUTE, json.dumps(list(ranges.values())))


class _Slots:
    """The slots of tokens, sorted by expert, for the size of blocks that a matmul wants: both mostly want the same."""

    def __init__(self, ids: Tensor, experts: int) -> None:
        self.ids, self.experts = ids, experts
        self._found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def blocks(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns slots, the experts of their blocks, and how many there are, padded to blocks of so many rows."""
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import (  # type: ignore[import-not-found]
            moe_align_block_size,
        )

        if rows not in self._found:
            self._found[rows] = moe_align_block_size(self.ids, rows, self.experts, ignore_invalid_experts=True)
        return self._found[rows]


def _matmul(layer: Any, x: Tensor, slots: _Slots, top_k: int) -> Tensor:
    """Returns a row for each slot; x has a row for each as well, or one for each token with its `top_k` slots."""
    count, config = slots.ids.numel(), layer.humming_config.to_str()
    ids, experts, padded = slots.blocks(_rows_of_block(config, count))
    return layer(
        x,
        outputs=x.new_empty(count, layer.shape_n),
        sorted_ids=ids,
        expert_ids=experts,
        num_tokens_padded=padded,
        top_k=top_k,
        valid_shape_m=count,
        compute_config=COMPUTE,
        tuning_config=tuning(config, count, "indexed"),
    )


@cache
def _rows_of_block(config: str, slots: int) -> int:
    """Returns the slots of one expert that a kernel multiplies at once."""
    ranges = json.loads(tuning(config, slots, "indexed"))
    return next(choices["block_shape"][0] for above, up_to, choices in ranges if above < slots <= up_to)


EXPERT_PEERS: dict[str, ExpertsPeer] = {"marlin": Marlin(), "humming": HummingExperts()}
