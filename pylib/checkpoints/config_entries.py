"""What a quantization_config may say: entries that the reader of its format knows, and entries that change nothing.

A library may rotate or scale the inputs of a layer before its weight sees them, and say so in an entry alone: all
tensors can be read, and make another model. So an entry that is neither known nor harmless is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from lowbit.dialect.errors import CheckpointError

Entries = Mapping[str, "Entries | Callable[[Any], str]"]
"""Names of entries, or "*" for any name, each with the entries in it, or with a function that returns what is wrong
with its value; "" if nothing is."""


def anything(_: object) -> str:
    """Returns that a value can be read, or that the reader checks it."""
    return ""


def named(*names: str) -> dict[str, Callable[[Any], str]]:
    """Returns entries of these names, with any value."""
    return dict.fromkeys(names, anything)


def one_of(*allowed: str) -> Callable[[Any], str]:
    """Returns the check of an entry that has one of a few values."""
    return lambda value: "" if value in allowed else f"what can be read is {', '.join(map(repr, allowed))}"


HARMLESS = (
    # names and kinds of modules that stay dense; which are quantized, tensors say
    *("modules_to_not_convert", "ignore", "ignored_layers", "exclude", "llm_int8_skip_modules", "skip_modules"),
    *("modules_to_convert", "modules_in_block_to_quantize", "block_name_to_quantize", "to_quant_block_names"),
    *("module_name_preceding_first_block", "quant_block_list", "lm_head", "quant_lm_head", "inside_layer_modules"),
    *("exclude_modules", "regex_config", "supported_types"),
    # how a checkpoint was made
    *("quant_method", "method", "meta", "producer", "provider", "version_info", "quantizer", "transformers_version"),
    *("tokenizer",),
    *("dataset", "nsamples", "seqlen", "model_seqlen", "max_input_length", "batch_size", "pad_token_id", "seed"),
    *("static_groups", "true_sequential", "damp_percent", "damp_auto_increment", "act_group_aware", "mse", "gptaq"),
    *("foem", "hessian", "failsafe", "fallback", "mock_quantization", "observer", "observer_kwargs", "offload_meta"),
    *("cache_block_outputs", "model_name_or_path", "model_file_base_name", "model_free", "calib_config"),
    *("autoround_version", "iters", "lr", "minmax_lr", "amp", "enable_quanted_input", "enable_minmax_tuning"),
    *("enable_norm_bias_tuning", "low_gpu_mem_usage", "low_cpu_mem_usage", "gradient_accumulate_steps", "scale_dtype"),
    *("super_bits", "super_group_size", "data_type", "global_compression_ratio", "nblocks", "enable_alg_ext"),
    # which kernels the library would run
    *("backend", "use_exllama", "disable_exllama", "exllama_config", "use_cuda_fp16", "do_fuse", "fuse_max_seq_len"),
    *("modules_to_fuse", "run_compressed", "dequantize", "use_optimized_inference", "pack_impl", "offload_to_disk"),
    *("offload_to_disk_path", "device", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
    # activations and caches of 8 bits: they stay as they are
    *("activation_scheme", "input_activations", "output_activations", "kv_cache_scheme", "kv_cache_quant_algo"),
    *("activation_scale_ub", "act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym"),
    *("attention_input_activations", "static_attention_dtype", "static_attention_granularity", "static_kv_dtype"),
    *("static_kv_granularity",),
)
"""Entries of any library that say nothing of what a layer computes from inputs in 16 bits."""


def check_config(config: Mapping[str, Any], entries: Entries) -> None:
    """Raise CheckpointError for an entry of a quantization_config, at any depth, that is neither one of a format's
    entries nor HARMLESS, and that is not off."""
    _check(config, entries, "")


def _check(config: Mapping[str, Any], entries: Entries, path: str) -> None:
    for name, value in config.items():
        if _is_off(value) or (name in HARMLESS and name not in entries):
            continue
        known = entries.get(name, entries.get("*"))
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            _check(cast(Mapping[str, Any], value), known, f"{path}{name}.")
        elif known is None or isinstance(known, Mapping):
            raise CheckpointError(
                f"the quantization_config has {path}{name}, which lowbit does not know; it may change what goes into "
                "layers or comes out of them, as rotations do. Delete the entry if you know that it changes nothing"
            )
        elif wrong := known(value):
            raise CheckpointError(f"the quantization_config has {path}{name}={_short(value)}; {wrong}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:36]} ..."


def _is_off(value: object) -> bool:
    """Tells whether an entry says that there is nothing: null, "none", or that it is not enabled."""
    match value:
        case str():
            return value.lower() in ("", "none")
        case {"enabled": enabled}:
            return not enabled
        case _:
            return not value
