"""What transformers does with a `LowbitConfig`: importing this file registers it there.

`from_pretrained` builds a model without memory, calls `_process_model_before_weight_loading`, loads one tensor after
the other, and calls `_process_model_after_weight_loading`. Before loading, empty low-bit modules take the places of
those that `lowbit.quantize_` would replace.

Where the checkpoint is dense, each empty module also has its dense parameters, without memory. So transformers finds
the tensors of the checkpoint, merges the experts of a mixture of experts, and hands them to `Quantize`, one by one:
at the peak there are the quantized model and one dense tensor.

Where the checkpoint is low-bit, transformers loads codes, scales and zeros by their names. Each weight in the file says
what it is; that is compared with config.json before anything is loaded, and the values are checked afterwards.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging

from lowbit.dialect.errors import CheckpointError, LowbitError, QuantizeError, SpecError
from lowbit.pylib.checkpoints.checkpoint import Checkpoint
from lowbit.pylib.integrations.config import QUANT_METHOD, LowbitConfig
from lowbit.pylib.integrations.foreign import (
    Targets,
    act_of_model,
    import_into,
    opened,
    place_foreign,
    prefer_lowbit,
)
from lowbit.pylib.integrations.on_load import Target, attach_dense, quantize_into
from lowbit.pylib.integrations.parallel import split
from lowbit.pylib.integrations.saved import (
    check_dense,
    check_output_layer,
    compare,
    fit_lengths,
    low_bit_layers,
    place_saved,
    saved_specs,
    start_no_fused,
    tie,
    untie,
)
from lowbit.pylib.nn.embedding import LowbitEmbedding, TiedLinear
from lowbit.pylib.nn.experts import LowbitExperts, is_experts
from lowbit.pylib.nn.fuse import FusedLayers, fuse_, place_fused
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.packed_module import PackedModule
from lowbit.pylib.nn.plan import EXCLUDED, Planned, Wishes, is_known, naming, plan
from lowbit.pylib.nn.replace import replace_planned

logger = logging.get_logger(__name__)


class LowbitQuantizer(HfQuantizer):
    """Quantizes a dense checkpoint while it is loaded, or loads a low-bit one.

    targets        the dense parameters to quantize by their names, while a dense checkpoint is loaded
    foreign        the tensors of another library's layers, while its checkpoint is loaded
    stays_dense    why modules stay dense, by their names, as `lowbit.quantize_` reports it
    fused          what became of layers that share their input, if `fuse=True` was asked for
    """

    def __init__(self, quantization_config: LowbitConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.config = quantization_config
        self.targets: dict[str, Target] = {}
        self.stays_dense: dict[str, str] = {}
        self.fused: tuple[FusedLayers, ...] = ()
        self.error: LowbitError | None = None
        self.checkpoint: Checkpoint | None = None
        self.foreign: Targets = {}
        if quantization_config.layers is not None:
            self.pre_quantized = True
        if not self.pre_quantized:
            quantization_config.check_no_data()
            if quantization_config.from_checkpoint:
                raise SpecError(
                    "from_checkpoint=True: the checkpoint is dense, or its config.json names a library that "
                    "transformers does not know; say how to quantize a dense one, as LowbitConfig('u4', 128) does"
                )

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Raise SpecError for devices where a low-bit weight can't be."""
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise SpecError("device_map: low-bit weights can't be on 'disk'; use 'cpu'")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the type of the model's activations: kernels take f16 and bf16."""
        if dtype in (torch.float16, torch.bfloat16):
            return dtype
        logger.warning_once(f"lowbit multiplies in f16 or bf16: {dtype} becomes bf16; dtype=torch.float16 is the other")
        return torch.bfloat16

    # -- before loading

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        """Put empty low-bit modules where the configuration or the checkpoint wants them."""
        if self.config.embeddings:
            tie(model)
        self._place(model, checkpoint_files)
        if self.pre_quantized:
            check_output_layer(model, checkpoint_files or ())
            start_no_fused(model)
        untie(model)

    def _place(self, model: nn.Module, checkpoint_files: Sequence[str] | None) -> None:
        if self.config.layers is not None:
            place_saved(model, self.config.layers)
            return
        if self.config.from_checkpoint:
            self.checkpoint = opened(checkpoint_files)
            if self.checkpoint.format is None:
                place_saved(model, saved_specs(model, checkpoint_files or ()))
                fit_lengths(model, checkpoint_files or ())
            else:
                self.foreign = place_foreign(model, self.checkpoint)
            return
        if not self.pre_quantized:
            self._choose_scales(cast(Any, model))
        modules = plan(model, self._wishes(cast(Any, model)))
        planned = [entry for entry in modules if entry.config is not None]
        self.stays_dense = {entry.names[0]: self._reason(entry, model) for entry in modules if entry.reason}
        if warning := _mostly_dense(modules):
            logger.warning_once(warning)
        if not planned:
            raise SpecError(f"the configuration leaves nothing of {type(model).__name__} to be quantized")
        if not self.pre_quantized:
            check_dense(checkpoint_files or ())
        saved = saved_specs(model, checkpoint_files or ()) if self.pre_quantized else {}
        for entry in planned:
            module = _empty(entry)
            replace_planned(model, entry, module)
            if not self.pre_quantized:
                self.targets |= attach_dense(entry, module)
        if self.pre_quantized and checkpoint_files:
            place_fused(model, saved)
            compare(model, saved)
            fit_lengths(model, checkpoint_files)

    def _choose_scales(self, model: Any) -> None:
        """Let config.json say which type the scales have that are made now."""
        self.config = self.config.multiplied_in("bf16" if model.dtype is torch.bfloat16 else "f16")
        model.config.quantization_config = self.quantization_config = self.config

    def _wishes(self, model: Any) -> Wishes:
        skipped = self.config.modules_to_not_convert or []
        _check_names(skipped, [name for name, _ in model.named_modules()])
        outputs = model.get_output_embeddings()
        kept = set(self.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules))
        tied = {name.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for name in pair}
        if self.config.lm_head:
            kept -= {name for name, module in model.named_modules() if module is outputs} - tied
        if self.config.embeddings:
            kept -= tied
        patterns = [*skipped, *map(_exactly, kept)]

        def wanted(name: str, _: nn.Module) -> bool:
            return should_convert_module(name, patterns)

        return Wishes(
            self.config.configs,
            wanted,
            lm_head=self.config.lm_head,
            embeddings=self.config.embeddings,
            per_row_if_indivisible=self.config.per_row_if_indivisible,
            strict=True,
        )

    def _reason(self, entry: Planned, model: Any) -> str:
        """Returns why a module stays dense, in terms of a LowbitConfig."""
        if entry.reason != EXCLUDED:
            return entry.reason
        name, skipped = entry.names[0], self.config.modules_to_not_convert or []
        if not should_convert_module(name, skipped):
            return "modules_to_not_convert"
        if any(f"{name}.weight" in pair for pair in model.all_tied_weights_keys.items()):
            return "its weight is tied to an embedding; embeddings=True quantizes both"
        if model.get_output_embeddings() is entry.module:
            return "the output layer; lm_head=True quantizes it"
        return "transformers converts none of a kind that is kept in f32, nor the last module"

    # -- loading

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        """Tells whether a tensor of the checkpoint is to be quantized."""
        return param_name in self.targets

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Returns the bytes of an element: none of dense parameters, beside which their codes are counted."""
        return 0 if param_name in self.targets else param.element_size()

    def get_quantize_ops(self) -> Any:
        """Returns the operation that takes dense tensors."""
        from lowbit.pylib.integrations.conversion import Quantize  # whose base class is loaded after this file

        return Quantize(self._take)

    def _take(self, name: str, value: Tensor) -> set[str]:
        """Quantize a tensor of the checkpoint; returns the keys that the model has got by it.

        An error is kept, for transformers would print it and go on.
        """
        target = self.targets[name]
        try:
            if self.error is None:
                with naming(name.removesuffix(".weight")):
                    quantize_into(target, value)
        except LowbitError as error:
            self.error = error
        return target.keys

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        """Returns what to do with tensors of a checkpoint. Another library's layers come before the model's own steps,
        which would merge experts whose codes are called weights."""
        from lowbit.pylib.integrations.conversion import Import, ImportConverter

        own = super().update_weight_conversions(weight_conversions, *model)
        return [ImportConverter(Import(self._import, self.foreign)), *own] if self.foreign else own

    def _import(self, model: Any, name: str, tensors: dict[str, Tensor]) -> set[str]:
        """Take a layer of another library's checkpoint; returns the keys that the model has got by it."""
        try:
            if self.error is None:
                with naming(name):
                    return import_into(model, name, tensors, self.config.source or {}, act_of_model(model))
        except LowbitError as error:
            self.error = error
        return set()

    # -- after loading

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        """Check what was loaded. Raises an error that names the module."""
        if self.error is not None:
            raise self.error
        for name, target in self.targets.items():
            if target.pending:
                raise QuantizeError(f"{name}: the checkpoint has no such tensor")
            target.forget()
        if self.config.fuse and not self.pre_quantized:
            self.fused = fuse_(model)
        self.targets.clear()
        if self.checkpoint is not None:
            _keep_as_imported(model)
            self.checkpoint = None
            self.foreign.clear()
        for name, layer in low_bit_layers(model):
            with naming(name):
                layer.check()
        split(model)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        kind: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # as config.json has it
        for name, layer in list(low_bit_layers(model)):
            if isinstance(model.get_submodule(".".join(name.split(".")[:-2])), LowbitExperts):
                raise SpecError(f"{name}: experts can't be dequantized; load the dense checkpoint")
            if isinstance(layer, LowbitLinear):
                model.set_submodule(name, layer.to_linear(kind))
            elif isinstance(layer, LowbitEmbedding):
                _dequantize_embedding(model, name, layer, kind)
        return model

    # -- saving, and what else the model can do

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[None, dict[str, Any]]:
        """Returns that the model's state dictionary is saved. Raises CheckpointError where it could not be loaded."""
        if (getattr(model, "_tp_size", None) or 1) > 1:
            raise CheckpointError("each process has its part of the model only; load it on one device to save it")
        return None, {}

    def is_serializable(self, **_: Any) -> bool:
        """Tells that the model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters beside low-bit layers can be trained: gradients flow to x."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether generate() may compile the model."""
        return True


register_quantization_config(QUANT_METHOD)(LowbitConfig)
register_quantizer(QUANT_METHOD)(LowbitQuantizer)
prefer_lowbit()


def adopt(model: nn.Module) -> None:
    """Let a model of transformers that was quantized in place be saved with a config.json that says so."""
    from transformers.modeling_utils import PreTrainedModel  # which imports the module that waits for this file

    if next(low_bit_layers(model), None) is None:
        return
    if isinstance(model, PreTrainedModel) and isinstance(getattr(model, "hf_quantizer", None), LowbitQuantizer | None):
        quantizer = LowbitQuantizer(LowbitConfig(from_checkpoint=True), pre_quantized=True)
        cast(Any, model).hf_quantizer = quantizer
        untie(model)
        quantizer.postprocess_model(model)


def _keep_as_imported(model: Any) -> None:
    """Let an imported model be saved as it is: transformers would undo its conversions."""
    from lowbit.pylib.integrations.conversion import without_imports

    model._weight_conversions = without_imports(model._weight_conversions)


def _mostly_dense(modules: Sequence[Planned]) -> str:
    """Returns a warning if most weights are in modules of kinds that can't be quantized; "" if not."""

    def size(entry: Planned) -> int:
        return sum(p.numel() for p in entry.module.parameters(recurse=False))

    left = [entry for entry in modules if not is_known(entry.module)]
    share = sum(map(size, left)) / max(1, sum(map(size, modules)))
    if share < 0.5:
        return ""
    largest = max(left, key=size)
    name, reason = largest.names[0], largest.reason
    return f"{share:.0%} of the weights stay dense, {name} for one: {reason}; model.hf_quantizer.stays_dense has all"


def _empty(entry: Planned) -> PackedModule | LowbitExperts:
    """Returns a low-bit module without memory for a dense one."""
    if is_experts(entry.module):
        return LowbitExperts.empty_like(entry.module, entry.specs, "meta")
    if isinstance(entry.module, nn.Embedding):
        return LowbitEmbedding.empty(entry.specs[0], "meta").in_place_of(entry.module)
    return LowbitLinear.empty(entry.specs[0], "meta").train(entry.module.training)


def _dequantize_embedding(model: nn.Module, name: str, table: LowbitEmbedding, dtype: torch.dtype | None) -> None:
    """Put a dense embedding in the place of a low-bit one, and dense layers that share its table."""
    dense = table.to_embedding(dtype)
    model.set_submodule(name, dense)
    for head, layer in list(model.named_modules()):
        if isinstance(layer, TiedLinear) and layer.embedding is table:
            linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, "meta")
            linear.weight = dense.weight
            linear.register_parameter("bias", layer.bias)
            model.set_submodule(head, linear)


def _exactly(name: str) -> str:
    """Returns a pattern of transformers for the module of this name, and those within."""
    return re.escape(name)


def _check_names(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise SpecError for a pattern that matches no module."""
    for pattern in patterns:
        if all(should_convert_module(name, [pattern]) for name in names if name):
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SpecError(f"modules_to_not_convert: {pattern!r} matches no module{hint}")
