"""Quantizes or loads a model for transformers by a `LowbitConfig`. Importing this file registers it there.

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

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from lowbit.dialect.errors import CheckpointError, LowbitError, PackError, QuantizeError, SpecError
from lowbit.pylib.checkpoints.checkpoint import Checkpoint
from lowbit.pylib.checkpoints.description import model_config, quantization_config
from lowbit.pylib.checkpoints.names import Names
from lowbit.pylib.integrations.choose import empty_module, mostly_dense, reason_in_config, wishes
from lowbit.pylib.integrations.config import QUANT_METHOD, LowbitConfig
from lowbit.pylib.integrations.dequantize import dequantize_model
from lowbit.pylib.integrations.foreign import (
    Foreign,
    forget_parts,
    load_into,
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
    multiply_as_saved,
    place_saved,
    saved_rotations,
    saved_specs,
    start_no_fused,
    tie,
    untie,
)
from lowbit.pylib.nn.fuse import FusedLayers, chain_placed, fuse_, place_fused
from lowbit.pylib.nn.linear_like import may_be_low_bit
from lowbit.pylib.nn.plan import EXCLUDED, naming, plan
from lowbit.pylib.nn.replace import replace_planned
from lowbit.pylib.nn.why_dense import Reason

ABSENT = Reason("the checkpoint has no such layer; it is initialized anew")
SAVED_DENSE = Reason("dense in the checkpoint")

logger = logging.get_logger(__name__)


class LowbitQuantizer(HfQuantizer):
    """Quantizes a dense checkpoint while it is loaded, or loads a low-bit one.

    targets        the dense parameters to quantize by their names, while a dense checkpoint is loaded
    checkpoint     the files, while a model is loaded from safetensors
    foreign        the layers of another library, while its checkpoint is loaded
    packed         the types of the tensors of low-bit layers, by their names
    reasons        why modules stay dense, by their names, as `lowbit.quantize_` reports it
    asked          formats that were asked for, by the names of modules that they don't fit and that got another
    fused          what became of layers that share their input, if `fuse=True` was asked for
    """

    def __init__(self, quantization_config: LowbitConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.config = quantization_config
        self.targets: dict[str, Target] = {}
        self.reasons: dict[str, Reason] = {}
        self.asked: dict[str, str] = {}
        self.fused: tuple[FusedLayers, ...] = ()
        self.error: LowbitError | None = None
        self.checkpoint: Checkpoint | None = None
        self.foreign = Foreign()
        if quantization_config.layers is not None:
            self.pre_quantized = True
        if not self.pre_quantized:
            quantization_config.check_no_data()

    @property
    def stays_dense(self) -> dict[str, str]:
        """Returns the reasons why modules stay dense, by their names, in the words of a Python caller."""
        return {name: str(reason) for name, reason in self.reasons.items()}

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
        self.checkpoint = self._opened(checkpoint_files)
        if self.config.embeddings:
            tie(model)
        if self.config.layers is not None:
            place_saved(model, self.config.layers, saved_rotations(model, self.checkpoint, self.config.layers))
        elif self.config.from_checkpoint:
            self._place_found(model, opened(checkpoint_files) if self.checkpoint is None else self.checkpoint)
        else:
            self._place_planned(cast(Any, model), self.checkpoint)
        if self.pre_quantized and self.checkpoint is not None:
            check_output_layer(model, self.checkpoint)
        if self.pre_quantized:
            start_no_fused(model)
            _keep_low_bit_types(cast(Any, model))
        untie(model)

    def _opened(self, files: Sequence[str] | None) -> Checkpoint | None:
        """Returns the checkpoint of a model; None for a state dictionary, and for dense weights in pickles.

        Raises PackError for low-bit weights in pickles, and SpecError where a quantized checkpoint is to be quantized.
        """
        if not files:
            return None
        pickled = next((file for file in files if not file.endswith(".safetensors")), None)
        if pickled and self.pre_quantized:
            raise PackError(f"{pickled} is no safetensors file; save the model again with save_pretrained")
        if pickled:
            return None
        if not (self.pre_quantized or self.config.from_checkpoint):
            folder = Path(files[0]).parent
            _, described = quantization_config(folder, model_config(folder))
            if described:
                self.config.importing(described)
        return opened(files)

    def _place_found(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        """Put empty modules where the files have low-bit layers, of lowbit or of another library."""
        if checkpoint.format is not None:
            self.foreign = place_foreign(model, checkpoint)
        elif self.pre_quantized or checkpoint.modules:
            saved = saved_specs(model, checkpoint)
            place_saved(model, saved, saved_rotations(model, checkpoint, saved))
            fit_lengths(model, checkpoint)
        else:
            check_dense(checkpoint)
            raise SpecError(
                "from_checkpoint=True: the checkpoint is dense; say how to quantize it, as LowbitConfig('u4', 128) does"
            )
        self.pre_quantized = True

    def _place_planned(self, model: Any, checkpoint: Checkpoint | None) -> None:
        """Put empty modules where `lowbit.quantize_` would, for a checkpoint that is dense or saved by lowbit."""
        if not self.pre_quantized:
            self._choose_scales(model)
        kept = self.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        left = {} if checkpoint is None else self._left_dense(model, checkpoint)
        modules = plan(model, wishes(self.config, model, kept, left))
        planned = [entry for entry in modules if entry.config is not None]
        dense = [entry for entry in modules if entry.reason]
        self.reasons = {entry.names[0]: reason_in_config(self.config, model, entry) for entry in dense}
        self.reasons |= {e.names[0]: left[e.names[0]] for e in dense if e.reason == EXCLUDED and e.names[0] in left}
        self.asked = {entry.names[0]: entry.asked for entry in planned if entry.asked}
        if warning := mostly_dense(modules):
            logger.warning_once(warning)
        if not planned:
            raise SpecError(f"the configuration leaves nothing of {type(model).__name__} to be quantized")
        if not self.pre_quantized and checkpoint is not None:
            check_dense(checkpoint)
        saved = saved_specs(model, checkpoint) if self.pre_quantized and checkpoint is not None else {}
        for entry in planned:
            module = empty_module(entry)
            replace_planned(model, entry, module)
            if not self.pre_quantized:
                self.targets |= attach_dense(entry, module)
        if not self.pre_quantized and checkpoint is not None:
            given = Names(model).made_of(checkpoint.tensors)
            self._check_given(given | model.all_tied_weights_keys.keys())
        if self.pre_quantized and checkpoint is not None:
            place_fused(model, saved)
            multiply_as_saved(model, saved)
            chain_placed(model, saved)
            compare(model, saved)
            fit_lengths(model, checkpoint)

    def _left_dense(self, model: Any, checkpoint: Checkpoint) -> dict[str, Reason]:
        """Returns the modules of which the files have nothing, such as the head of a classifier that is to be trained,
        and linear layers that lowbit's own files have dense, as such a head after it was saved, with the reasons.

        transformers gives the former a random start. What a saved model has fused is neither.
        """
        names, modules = Names(model), dict(model.named_modules())
        paths = [name.split(".") for name in (*names.made_of(checkpoint.tensors), *model.all_tied_weights_keys)]
        absent = modules.keys() - {".".join(path[:count]) for path in paths for count in range(1, len(path))}
        if not self.pre_quantized:
            return dict.fromkeys(absent, ABSENT)
        dense = {names.tensor(name).removesuffix(".weight") for name in checkpoint.dense if name.endswith(".weight")}
        heads = {name for name in absent if name.rpartition(".")[0] in absent}
        linears = {name for name in dense if may_be_low_bit(modules.get(name))}
        return {**dict.fromkeys(linears, SAVED_DENSE), **dict.fromkeys(heads, ABSENT)}

    def _choose_scales(self, model: Any) -> None:
        """Let config.json say which type the scales have that are made now."""
        self.config = self.config.multiplied_in("bf16" if model.dtype is torch.bfloat16 else "f16")
        model.config.quantization_config = self.quantization_config = self.config

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
                target.forget()
        except LowbitError as error:
            self.error = error
        return target.keys

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        """Returns what to do with tensors of a checkpoint. Another library's layers come before the model's own steps,
        which would merge experts whose codes are called weights."""
        from lowbit.pylib.integrations.conversion import Import, ImportConverter

        own = super().update_weight_conversions(weight_conversions, *model)
        if not self.foreign.first:
            return own
        return [ImportConverter(Import(self._import), self.foreign.first, self.foreign.others), *own]

    def _import(self, model: Any, key: str, device: torch.device) -> set[str]:
        """Load a layer of another library's checkpoint; returns the keys that the model has got by it."""
        try:
            if self.error is None:
                return load_into(model, self.foreign, key, device)
        except LowbitError as error:
            self.error = error
        return set()

    # -- after loading

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        """Check what was loaded. Raises an error that names the module."""
        if self.error is not None:
            raise self.error
        self._check_given({name for name, target in self.targets.items() if not target.pending})
        if self.config.fuse and not self.pre_quantized:
            self.fused = fuse_(model)
            self.asked |= {
                f"{one.module}.{one.name}".lstrip("."): asked
                for one in self.fused
                if one.name and (asked := self.asked.get(f"{one.module}.{one.parts[0]}".lstrip(".")))
            }
        self.targets.clear()
        if self.foreign.first:
            _keep_as_imported(model)
            forget_parts(cast(Any, model).config)
        self.checkpoint, self.foreign = None, Foreign()
        for name, layer in low_bit_layers(model):
            with naming(name):
                layer.check()
        split(model)
        return model

    def _check_given(self, names: Collection[str]) -> None:
        """Raise QuantizeError for a tensor that is to be quantized and is none of these."""
        for name in self.targets:
            if name not in names:
                raise QuantizeError(f"{name}: the checkpoint has no such tensor")

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        dequantize_model(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)  # text: of config.json
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
        """Tells that adapters beside low-bit layers can be trained, as gradients flow to x."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Tells whether generate() may compile the model."""
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


def _keep_low_bit_types(model: Any) -> None:
    """Let transformers load the tensors of low-bit layers in the types that they have, where it would make some f32 by
    parts of their names: these parts become the whole names of the others."""
    low = tuple(f"{name}." for name, _ in low_bit_layers(model))
    for kind in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        for pattern in set(getattr(model, kind) or ()):
            meant = [name for name in model.state_dict() if re.search(pattern.replace("*", ".*"), name)]
            others = {name for name in meant if not name.startswith(low)}
            if len(others) < len(meant):
                setattr(model, kind, {*getattr(model, kind), *others} - {pattern})
