"""Answers what vLLM asks about a low-bit model. Importing this file makes `quantization="lowbit"` known to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from vllm import __version__
from vllm.config import get_current_vllm_config
from vllm.envs import environment_variables
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

from lowbit.dialect.errors import SpecError
from lowbit.pylib.build.knobs import takes_over_vllm, vllm_is_invariant
from lowbit.pylib.checkpoints.registry import FORMATS
from lowbit.pylib.integrations.choose import check_names, wishes_without
from lowbit.pylib.integrations.config import QUANT_METHOD, LowbitConfig
from lowbit.pylib.integrations.serving.expert_sources import source_of_experts
from lowbit.pylib.integrations.serving.gates import BeforeGate
from lowbit.pylib.integrations.serving.names import Names
from lowbit.pylib.integrations.serving.rows import ACTS, Source, check_whole, opened
from lowbit.pylib.integrations.serving.startup import Limits, Startup, check_version
from lowbit.pylib.integrations.vllm.expert_methods import GptOssExperts, OnLoadExperts, SavedExperts
from lowbit.pylib.integrations.vllm.methods import (
    Method,
    OnLoadHead,
    OnLoadLinear,
    SavedEmbedding,
    SavedHead,
    SavedLinear,
    TiedHead,
)
from lowbit.pylib.nn.plan import check_config, naming, plan_module
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.runtime.batch_invariant import MODE

ROUTERS = ("gate", "router")
"""The last names of layers that choose experts for tokens, which has to be precise: they stay dense."""

_STARTUPS = WeakSet[Startup]()  # of models that this process serves

# vLLM keeps what it has compiled, and finds it at the next start by its settings and these. Besides it looks at sources
# that torch has traced and at nothing more, while the texts of matmuls are constants of graphs.
environment_variables["VLLM_LOWBIT_LAYERS"] = lambda: " ".join(sorted(startup.identity for startup in _STARTUPS))


@register_quantization_config(QUANT_METHOD)
class LowbitServing(QuantizationConfig):
    """Which layers of a model in vLLM are low-bit: those that its files have so. If they have none, those that a
    `LowbitConfig` wants to be quantized while the model is loaded.

    config   that of config.json, of `hf_overrides`, or LowbitConfig()
    """

    def __init__(self, config: LowbitConfig | None = None) -> None:
        super().__init__()
        check_version(__version__)
        MODE.on = MODE.on or vllm_is_invariant()
        self.config = LowbitConfig() if config is None else config
        self.startup = Startup()
        self.tied = False
        self.folder = Path()
        self.names: Names

    # -- before the model is built

    def get_name(self) -> Any:
        """Returns the name of the quantization."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Returns the types of activations that kernels take."""
        return list(ACTS)

    @classmethod
    def get_min_capability(cls) -> int:
        """Returns the least compute capability of a GPU, times 10."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Returns no names of files besides config.json."""
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LowbitServing:
        """Returns what the quantization_config of a config.json says, lowbit's or another library's."""
        if config.get("quant_method") == QUANT_METHOD:
            return cls(LowbitConfig.from_dict(config))
        return cls(LowbitConfig(from_checkpoint=True).importing(config))

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> Any:
        """Returns "lowbit" if the caller wants it for a checkpoint of another library: by `--quantization lowbit`, or
        by LOWBIT_VLLM=1 and no other wish."""
        imports = hf_quant_cfg and hf_quant_cfg.get("quant_method") in FORMATS
        wanted = user_quant == QUANT_METHOD or (user_quant is None and takes_over_vllm())
        return QUANT_METHOD if imports and wanted else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Look into the files of the model. Raises SpecError where they can't be quantized as wanted."""
        self.folder = _folder(model_name, revision)
        check_whole(self.folder)
        checkpoint = opened(self.folder)
        self.names = Names(checkpoint)
        self.tied = bool(getattr(hf_config, "tie_word_embeddings", False))
        if not checkpoint.modules:
            _check_on_load(self.config, [name.removesuffix(".weight") for name in checkpoint.dense])

    # -- while it is built and loaded

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Take over the names that vLLM gives to modules."""
        self.names.rename(hf_to_vllm_mapper._map_name)  # all versions have it; since 0.27 it is public, too

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the method of the layer of this name; None for layers that lowbit does not serve."""
        with naming(prefix or type(layer).__name__):
            method = self._method(layer, prefix)
        if isinstance(method, Method):
            settings = get_current_vllm_config()
            self.startup.limits = _limits(settings)
            _STARTUPS.add(self.startup)
            if isinstance(method, BeforeGate):
                method.leaves_gate = settings.lora_config is not None
            method.report_to(self.startup, prefix or type(layer).__name__)
        return method

    def _method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            return self._of_experts(layer, prefix)
        if isinstance(layer, ParallelLMHead):
            return self._of_head(layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return self._of_embedding(layer, prefix)
        return self._of_linear(layer, prefix) if isinstance(layer, LinearBase) else None

    def _of_linear(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        if modules := self.names.take(prefix, self.packed_modules_mapping):
            return SavedLinear(self._sources(modules))
        if _is_router(layer, prefix):
            return UnquantizedLinearMethod()
        columns = getattr(layer, "input_size_per_partition", layer.input_size)
        configs = self._configs(prefix, layer.output_size, columns, layer.params_dtype)
        return OnLoadLinear(prefix, configs) if configs else UnquantizedLinearMethod()

    def _of_head(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        if modules := self.names.take(prefix, {}):
            return SavedHead(self._sources(modules))
        if self.tied:
            return TiedHead() if self._table(layer, "") else None
        configs = self._configs(prefix, layer.num_embeddings_padded, layer.embedding_dim, torch.get_default_dtype())
        return OnLoadHead(prefix, configs) if configs else None

    def _of_embedding(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        modules = self._table(layer, prefix)
        return SavedEmbedding(self._sources(modules)) if modules else None

    def _table(self, layer: Any, prefix: str) -> tuple[str, ...]:
        return self.names.take_table(prefix, (layer.org_vocab_size, layer.embedding_dim))

    def _sources(self, modules: Sequence[str]) -> list[Source]:
        return [Source.of(opened(self.folder), module) for module in modules]

    def _of_experts(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        if modules := self.names.below(prefix):
            checkpoint = opened(self.folder)
            if checkpoint.format is FORMATS["mxfp4"]:
                return GptOssExperts(prefix, layer, checkpoint.quantization_config)
            return SavedExperts(prefix, layer, source_of_experts(checkpoint, modules))
        if self.names.low_bit:
            return None
        hidden, inner = layer.moe_config.hidden_dim, layer.moe_config.intermediate_size_per_partition
        wishes = wishes_without(self.config, self.config.modules_to_not_convert or [])
        sizes = ((hidden, 2 * inner), (inner, hidden))
        matrices = [nn.Linear(*size, False, "meta", layer.params_dtype) for size in sizes]
        configs = [plan_module(prefix, matrix, wishes).config for matrix in matrices]
        found = [config for config in configs if config is not None]
        return OnLoadExperts(prefix, layer, found) if len(found) == len(configs) else None

    def _configs(self, prefix: str, rows: int, columns: int, dtype: torch.dtype) -> list[QuantConfig]:
        """Returns how to quantize each matrix of a layer of a dense checkpoint; nothing if it stays dense."""
        if self.names.low_bit:
            return []
        wishes = wishes_without(self.config, self.config.modules_to_not_convert or [])
        dense = nn.Linear(columns, rows, False, "meta", dtype)
        parts = self.names.parts(prefix, self.packed_modules_mapping)
        found = {part: plan_module(part, dense, wishes).config for part in parts}
        configs = [config for config in found.values() if config is not None]
        if configs and len(configs) < len(parts):
            raise SpecError(f"vLLM makes one layer of {', '.join(parts)}; quantize all of them or none")
        return configs

    def get_cache_scale_mapper(self) -> WeightsMapper:
        """Returns how vLLM's loaders must rename tensors of the checkpoint: those of low-bit modules, besides what vLLM
        renames itself. This hook is the one that all versions of vLLM call."""
        opened.cache_clear()  # all layers have been made, and know what they wait for
        self.names.check_taken()
        names = self.names.renamed()
        ours: Any = {re.compile("^.*$"): lambda match: names.get(match[0], match[0])}
        if unused := "|".join(map(re.escape, sorted(self.names.unused()))):
            ours = {re.compile(f"^({unused})$"): None} | ours
        return WeightsMapper(orig_to_new_regex=ours) | super().get_cache_scale_mapper()


def _limits(settings: Any) -> Limits:
    """Returns what a process of vLLM runs with these settings."""
    graphs = settings.compilation_config.cudagraph_capture_sizes or [1]
    tokens = max(settings.scheduler_config.max_num_batched_tokens, *graphs)
    parallel = settings.parallel_config
    return Limits(tokens, parallel.tensor_parallel_size, parallel.rank % parallel.tensor_parallel_size)


def _is_router(layer: object, prefix: str) -> bool:
    return isinstance(layer, ReplicatedLinear) and prefix.rpartition(".")[2] in ROUTERS


def _folder(model: str, revision: str | None) -> Path:
    """Returns where the files of a model are, which may be on the Hugging Face Hub."""
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, allow_patterns=["*.json", "*.safetensors"]))


def _check_on_load(config: LowbitConfig, modules: Sequence[str]) -> None:
    """Raise SpecError for a configuration by which the modules of a dense checkpoint can't be quantized."""
    if config.from_checkpoint:
        raise SpecError(
            "from_checkpoint=True: the checkpoint is dense; say how to quantize it, as LowbitConfig('u4', 128) does"
        )
    if config.embeddings:
        raise SpecError(
            "embeddings=True: in vLLM embeddings are not quantized while they are loaded; serve a folder that lowbit "
            "quantize --embeddings has made"
        )
    config.check_no_data()
    check_names(config.modules_to_not_convert or [], modules)
    check_config(config.configs, modules)


# vLLM's attention on a CPU uses AMX, for which a process has to ask Linux. oneDNN does so in dense layers, of which a
# low-bit model may have none; without that, the first instruction of AMX ends the process.
if current_platform.is_cpu():
    torch.cpu._init_amx()
