"""The formats that can be read, by the quant_method of a model's quantization_config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError, LowbitError
from lowbit.dialect.spec import Act
from lowbit.pylib.checkpoints.config_entries import check_config
from lowbit.pylib.checkpoints.formats import (
    auto_round,
    awq,
    bitnet,
    bitsandbytes,
    compressed_tensors,
    exl2,
    fbgemm_fp8,
    fp8,
    gemma,
    gpt_oss,
    gptq,
    hqq,
    mlx,
    modelopt,
    quanto,
    quark,
    spqr,
    torchao,
)
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors
from lowbit.pylib.checkpoints.stacked import below
from lowbit.pylib.checkpoints.transforms import AT_CALLS, check_unrotated
from lowbit.pylib.weights.packed import PackedWeight

FORMATS: dict[str, Format] = {
    "auto-round": auto_round.FORMAT,
    "awq": awq.FORMAT,
    "bitnet": bitnet.FORMAT,
    "bitsandbytes": bitsandbytes.FORMAT,
    "compressed-tensors": compressed_tensors.FORMAT,
    "exl2": exl2.FORMAT,
    "fbgemm_fp8": fbgemm_fp8.FORMAT,
    "fp8": fp8.FORMAT,
    "gemma": gemma.FORMAT,
    "gptq": gptq.FORMAT,
    "hqq": hqq.FORMAT,
    "metal": mlx.METAL,
    "mlx": mlx.FORMAT,
    "modelopt": modelopt.FORMAT,
    "mxfp4": gpt_oss.FORMAT,
    "mxfp8": fp8.FORMAT,
    "quanto": quanto.FORMAT,
    "quark": quark.FORMAT,
    "spqr": spqr.FORMAT,
    "torchao": torchao.FORMAT,
}
FORMATS |= {"intel/auto-round": auto_round.FORMAT}
FORMATS |= {f"modelopt_{kind}": modelopt.FORMAT for kind in ("fp4", "mxfp8", "mixed")}

REFUSED = {
    **dict.fromkeys(("aqlm", "vptq", "quip", "quip_sharp"), "its codes stand for vectors of several weights"),
    "exl3": "its codes are a path through a trellis",
    "higgs": "its codes stand for vectors of rotated weights",
    "fouroversix": "lowbit has no reader for its files",
    "nvfp4": "transformers quantizes to it while it loads a dense model, and saves no such files",
    "fp_quant": "it rotates what goes into layers at each call",
    "paroquant": "it rotates pairs of columns of what goes into layers at each call",
    "sinq": "it scales the columns of a matrix as well as its groups",
    "eetq": "its weights lie in the order of a kernel that is not published with them",
    "gguf": "a GGUF file is loaded by lowbit.from_gguf, or lowbit.load_gguf",
    "qqq": "its weights are quantized twice, to 8 and then to 4 bits",
}
"""Methods that can't be read, with the reason."""


def format_of(quantization_config: Mapping[str, Any]) -> Format:
    """Returns the format of a checkpoint whose config.json has this quantization_config.

    Raises CheckpointError for a method that is none of FORMATS, and for entries that the reader of the format does not
    know, as they may change what a model computes.
    """
    config = cast(object, quantization_config)
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not isinstance(method, str) or method not in FORMATS:
        why = f", as {REFUSED[method]}" if isinstance(method, str) and method in REFUSED else ""
        raise CheckpointError(f"quant_method={method!r} can't be imported{why}; what can is {', '.join(FORMATS)}")
    check_config(quantization_config, FORMATS[method].entries)
    return FORMATS[method]


def import_weight(
    quantization_config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    act: Act = "f16",
    shape: tuple[int, int] | None = None,
    name: str = "",
) -> PackedWeight:
    """Returns a quantized linear layer of another library's checkpoint as a packed weight, without loss.

    quantization_config   the entry of this name in the model's config.json, as a dictionary
    tensors               the tensors of the layer by their names after the layer's: "qweight", "scales" ...
    act                   type of the inputs, "f16" or "bf16"
    shape                 n and k of the weight; SpQR's tensors leave them open where in_perm is empty
    name                  what the checkpoint calls the layer, by which a configuration that has something for some
                          layers alone is compared with the tensors

    The bias is the layer's, rounded to `act`. Raises CheckpointError for tensors that are missing, that contradict each
    other or the configuration, or that no kernel can read, and for a layer whose inputs or outputs are rotated or
    scaled.
    """
    with _as_checkpoint_error():
        _check_weights_alone(quantization_config, [tensors], [name])
    return import_between(quantization_config, tensors, act, shape, name)


def import_between(
    quantization_config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    act: Act = "f16",
    shape: tuple[int, int] | None = None,
    name: str = "",
) -> PackedWeight:
    """Returns the same of a layer that may be rotated: the weight between its rotations."""
    with _as_checkpoint_error():
        return _read(quantization_config, tensors, shape, name).pack(act)


def import_rows(
    quantization_config: Mapping[str, Any],
    layers: Sequence[Mapping[str, Tensor]],
    act: Act = "f16",
    names: Sequence[str] = ("",),
) -> PackedWeight:
    """Returns several quantized layers that read the same inputs as one weight, with their rows one below the other.

    layers   the tensors of each layer
    names    what the checkpoint calls them. The other arguments are those of `import_weight`
    """
    with _as_checkpoint_error():
        _check_weights_alone(quantization_config, layers, names)
    return rows_between(quantization_config, layers, act)


def rows_between(
    quantization_config: Mapping[str, Any],
    layers: Sequence[Mapping[str, Tensor]],
    act: Act = "f16",
    factors: Tensor | None = None,
) -> PackedWeight:
    """Returns the same of layers whose inputs may be scaled: the weight behind that.

    factors   f32 [rows] that multiply the rows of the last layer
    """
    with _as_checkpoint_error():
        parts = [_read(quantization_config, tensors) for tensors in layers]
        if factors is not None:
            *above, last = parts
            ones = (part.times(torch.ones(len(part.codes))) for part in above)  # with scales of the same type
            parts = [*ones, last.times(factors)]
        return below(parts).pack(act)


def _check_weights_alone(
    config: Mapping[str, Any], layers: Sequence[Mapping[str, Tensor]], names: Sequence[str]
) -> None:
    """Raise CheckpointError where a weight does not say what the layers of a configuration compute."""
    scaling = format_of(config).scaling.removeprefix(".")
    check_unrotated(config, names)
    if any(scaling in tensors for tensors in layers):
        raise CheckpointError(f"{scaling} is there: inputs are scaled {AT_CALLS}")


def _read(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], shape: tuple[int, int] | None = None, name: str = ""
) -> Imported:
    return format_of(config).read(ModuleTensors(config, tensors, shape, name))


def import_experts(
    quantization_config: Mapping[str, Any], tensors: Mapping[str, Tensor], act: Act = "f16", name: str = ""
) -> list[PackedWeight]:
    """Returns the weights of all experts of a layer whose tensors have a first dimension for the expert (gpt-oss).

    The arguments are those of `import_weight`, but for the shape.
    """
    with _as_checkpoint_error():
        _check_weights_alone(quantization_config, [tensors], [name])
    counts = {t.shape[0] if t.ndim else 0 for t in tensors.values()}
    if len(counts) != 1 or 0 in counts:
        raise CheckpointError(f"tensors must have one first dimension, the expert's, but have {sorted(counts)}")
    (count,) = counts
    each = ({name: t[expert] for name, t in tensors.items()} for expert in range(count))
    return [import_between(quantization_config, expert, act) for expert in each]


def without_zero_bias(weight: PackedWeight) -> PackedWeight:
    """Returns a weight without its bias where that is all zeros: AutoGPTQ writes such for layers that have none."""
    if weight.bias is None or bool(weight.bias.any()):
        return weight
    tensors = {name: tensor for name, tensor in weight.items() if name != "bias"}
    return PackedWeight(replace(weight.spec, bias=False), tensors)


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Lets a weight that no spec describes, or that can't be packed, be an error of the checkpoint."""
    try:
        yield
    except CheckpointError:
        raise
    except LowbitError as error:
        raise CheckpointError(str(error)) from error
