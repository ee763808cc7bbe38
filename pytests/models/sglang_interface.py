"""What lowbit's plugin needs of SGLang, compared with the source of an SGLang, which is parsed and not imported.

python -m pytests.models.sglang_interface WHEEL_OR_FOLDER    such as sglang-0.5.23-...whl, or site-packages
"""

from __future__ import annotations

import sys
from pathlib import Path

from pytests.models.vllm_interface import Needs, missing

_LAYERS = "sglang.srt.layers"
_QUANTIZATION = f"{_LAYERS}.quantization.base_config"
_EXPERTS = f"{_LAYERS}.moe.fused_moe_triton.layer"

FUNCTIONS = {
    ("sglang.srt.distributed.utils", "get_group_rank_size"): ("group",),
    (_QUANTIZATION, "QuantizationConfig.from_config"): ("config",),
    (_QUANTIZATION, "QuantizationConfig.get_quant_method"): ("layer", "prefix"),
    (_QUANTIZATION, "QuantizationConfig.override_quantization_method"): ("hf_quant_cfg", "user_quant"),
    (_QUANTIZATION, "QuantizationConfig.get_scaled_act_names"): (),
    (_QUANTIZATION, "QuantizeMethodBase.process_weights_after_loading"): ("layer",),
    (_QUANTIZATION, "QuantizeMethodBase.restore_weights_before_loading"): ("layer",),
    (_QUANTIZATION, "LinearMethodBase.create_weights"): (
        "layer",
        "input_size_per_partition",
        "output_partition_sizes",
        "input_size",
        "output_size",
        "params_dtype",
    ),
    (_QUANTIZATION, "LinearMethodBase.apply"): ("layer", "x", "bias"),
    (_QUANTIZATION, "FusedMoEMethodBase.create_weights"): (
        "layer",
        "num_experts",
        "hidden_size",
        "intermediate_size_per_partition",
        "params_dtype",
    ),
    (_QUANTIZATION, "FusedMoEMethodBase.create_moe_runner"): ("layer", "moe_runner_config"),
    (_QUANTIZATION, "FusedMoEMethodBase.apply"): ("layer", "dispatch_output"),
    (_EXPERTS, "FusedMoE._map_global_expert_id_to_local_expert_id"): ("expert_id",),
    (_EXPERTS, "FusedMoE.weight_loader"): ("param", "loaded_weight", "weight_name", "shard_id", "expert_id"),
}
ATTRIBUTES = {
    (f"{_LAYERS}.linear", "LinearBase"): ("input_size", "output_size", "params_dtype", "skip_bias_add", "tp_group"),
    (f"{_LAYERS}.linear", "ColumnParallelLinear"): ("tp_group",),
    (f"{_LAYERS}.linear", "RowParallelLinear"): ("tp_group", "input_size_per_partition"),
    (_EXPERTS, "FusedMoE"): (
        "hidden_size",
        "intermediate_size_per_partition",
        "moe_tp_rank",
        "moe_tp_size",
        "num_experts",
        "top_k",
    ),
    (f"{_LAYERS}.moe.moe_runner.base", "MoeRunnerConfig"): (
        "activation",
        "apply_router_weight_on_input",
        "gemm1_alpha",
        "gemm1_clamp_limit",
        "is_gated",
        "no_combine",
        "routed_scaling_factor",
        "swiglu_limit",
    ),
}
CALLS = {
    ("sglang.srt.plugins", "sglang.srt.plugins"): "the group of entry points",
    (f"{_LAYERS}.quantization", "return QUANTIZATION_METHODS[quantization]"): "a method is found by its name",
    ("sglang.srt.model_loader.weight_utils", 'hf_quant_config["hf_config"]'): "the plugin finds the folder by it",
}
SGLANG = Needs("sglang", Path(__file__).parents[2] / "pylib/integrations/sglang", FUNCTIONS, ATTRIBUTES, CALLS)

if __name__ == "__main__":
    lacks = missing(Path(sys.argv[1]), SGLANG)
    print("\n".join(lacks) or "all that lowbit's plugin needs is there")
    sys.exit(bool(lacks))
