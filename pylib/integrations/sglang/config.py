"""Answers what SGLang asks about a low-bit model. Importing this file makes `quantization="lowbit"` known to it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES, add_quantization_method_choices
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import nn

from lowbit.dialect.errors import SpecError
from lowbit.pylib.checkpoints.registry import FORMATS
from lowbit.pylib.integrations.choose import wishes_without
from lowbit.pylib.integrations.config import QUANT_METHOD, LowbitConfig
from lowbit.pylib.integrations.serving.expert_sources import source_of_experts
from lowbit.pylib.integrations.serving.names import Names
from lowbit.pylib.integrations.serving.rows import ACTS, Source, check_whole, opened
from lowbit.pylib.integrations.serving.startup import Startup
from lowbit.pylib.integrations.sglang.methods import OnLoadExperts, OnLoadLinear, SavedExperts, SavedLinear
from lowbit.pylib.nn.plan import naming, plan_module
from lowbit.pylib.quantization.config import QuantConfig

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""What SGLang makes one layer of, where a model does not say it."""
DENSE = ("gate", "router", "kv_b_proj")
"""The last names of layers that stay dense when a model is loaded: routers, and what MLA reads as numbers."""
_ADDED = ("packed_modules_mapping", "hf_config", "requantization_method")  # SGLang's own, in a quantization_config


class LowbitServing(QuantizationConfig):
    """Which layers of a model in SGLang are low-bit: those that its files have so. If they have none, those that a
    `LowbitConfig` wants to be quantized when the model has been loaded.

    config   that of config.json, or LowbitConfig()
    folder   of the model; None for a dense model without a configuration
    """

    def __init__(self, config: LowbitConfig | None = None, folder: Path | None = None) -> None:
        super().__init__()
        self.config = LowbitConfig() if config is None else config
        self.config.check_no_data()
        self.startup = Startup(logging.getLogger("sglang.lowbit"))
        self.folder = folder
        self.names = Names(opened(folder)) if folder else None

    def get_name(self) -> str:
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

    def get_scaled_act_names(self) -> list[str]:
        """Returns no activations that would be scaled."""
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LowbitServing:
        """Returns what the quantization_config of a config.json says, lowbit's or another library's.

        Raises SpecError where SGLang does not say which folder the model is in.
        """
        written = {name: value for name, value in config.items() if name not in _ADDED}
        folder = _folder(config.get("hf_config"))
        if written.get("quant_method") == QUANT_METHOD:
            found = cls(LowbitConfig.from_dict(written), folder)
        else:
            found = cls(LowbitConfig(from_checkpoint=True).importing(written), folder)
        found.packed_modules_mapping = dict(config.get("packed_modules_mapping") or {})
        return found

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None) -> str | None:
        """Returns "lowbit" if the caller wants it for a checkpoint of another library, by `--quantization lowbit`."""
        imports = hf_quant_cfg and hf_quant_cfg.get("quant_method") in FORMATS
        return QUANT_METHOD if imports and user_quant == QUANT_METHOD else None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Returns the method of the layer of this name; None for layers that lowbit does not serve.

        Raises SpecError and CheckpointError for low-bit layers that it can't serve in SGLang.
        """
        with naming(prefix or type(layer).__name__):
            if isinstance(layer, FusedMoE):
                return self._of_experts(layer, prefix)
            if isinstance(layer, VocabParallelEmbedding):
                return self._of_table(prefix)
            return self._of_linear(layer, prefix) if isinstance(layer, LinearBase) else None

    def _of_linear(self, layer: Any, prefix: str) -> Any:
        packed, dense = PACKED | self.packed_modules_mapping, prefix.rpartition(".")[2] in DENSE
        if self.names and self.names.low_bit:
            modules = self.names.take(prefix, packed)
            if modules and dense:
                raise SpecError("SGLang reads this layer's weight as numbers; leave it dense in the model")
            return SavedLinear(prefix, self._sources(modules), self.startup) if modules else UnquantizedLinearMethod()
        parts = [] if dense else [prefix.removesuffix(prefix.rpartition(".")[2]) + part for part in self._parts(prefix)]
        columns = getattr(layer, "input_size_per_partition", layer.input_size)
        configs = self._configs(parts, (layer.output_size, columns), layer.params_dtype)
        return OnLoadLinear(prefix, configs, self.startup) if configs else UnquantizedLinearMethod()

    def _parts(self, prefix: str) -> Sequence[str]:
        leaf = prefix.rpartition(".")[2]
        return (PACKED | self.packed_modules_mapping).get(leaf, [leaf])

    def _of_table(self, prefix: str) -> None:
        if self.names and self.names.take_table(prefix, (0, 0)):
            raise SpecError("in SGLang embeddings and output layers are dense; quantize the model without them")

    def _of_experts(self, layer: Any, prefix: str) -> Any:
        if self.names and self.names.low_bit:
            modules = self.names.below(prefix)
            checkpoint = opened(self._known_folder())
            return SavedExperts(prefix, source_of_experts(checkpoint, modules), self.startup) if modules else None
        hidden, inner = layer.hidden_size, layer.intermediate_size_per_partition
        sizes = (2 * inner, hidden), (hidden, inner)
        configs = [config for size in sizes for config in self._configs([prefix], size, torch.get_default_dtype())]
        return OnLoadExperts(prefix, configs, self.startup) if len(configs) == len(sizes) else None

    def _sources(self, modules: Sequence[str]) -> list[Source]:
        return [Source.of(opened(self._known_folder()), module) for module in modules]

    def _known_folder(self) -> Path:
        if self.folder is None:
            raise SpecError("SGLang has not said which folder the model is in; start it with --model-path DIR")
        return self.folder

    def _configs(self, parts: Sequence[str], size: tuple[int, int], dtype: torch.dtype) -> list[QuantConfig]:
        """Returns how to quantize each matrix of a layer of a dense model; nothing if it stays dense.

        size   rows and columns
        """
        wishes = wishes_without(self.config, self.config.modules_to_not_convert or [])
        dense = nn.Linear(size[1], size[0], False, "meta", dtype)
        found = [config for part in parts if (config := plan_module(part, dense, wishes).config) is not None]
        if found and len(found) < len(parts):
            raise SpecError(f"SGLang makes one layer of {', '.join(parts)}; quantize all of them or none")
        return found


def _folder(config: Any) -> Path:
    """Returns where the files of a model are, by what transformers keeps of its name."""
    name = getattr(config, "_name_or_path", "")
    if not name:
        raise SpecError("SGLang has not said which folder the model is in; start it with --model-path DIR")
    if Path(name).is_dir():
        check_whole(Path(name))
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))


QUANTIZATION_METHODS[QUANT_METHOD] = LowbitServing
if QUANT_METHOD not in QUANTIZATION_CHOICES:
    add_quantization_method_choices([QUANT_METHOD])
