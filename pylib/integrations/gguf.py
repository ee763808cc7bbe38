"""`lowbit.from_gguf`: a GGUF file as a model of transformers whose matrices stay packed.

transformers builds the model and loads it, from a state dictionary like that of a model which lowbit has saved; so what
can be done with a model of `from_pretrained` can be done with this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as error:
    raise ImportError("from_gguf needs transformers 5: pip install 'lowbit[hf]'") from error

from lowbit.dialect.errors import CheckpointError, SpecError
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.pylib.checkpoints.gguf.architectures import EMBEDDINGS, Source, read_source
from lowbit.pylib.checkpoints.gguf.file import load_gguf
from lowbit.pylib.integrations.config import LowbitConfig
from lowbit.pylib.integrations.quantizer import adopt
from lowbit.pylib.nn.embedding import LowbitEmbedding
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.packed_module import PackedModule

ACTS: Mapping[torch.dtype, Act] = {torch.float16: "f16", torch.bfloat16: "bf16"}


def from_gguf(path: str | PathLike[str], dtype: torch.dtype = torch.bfloat16, **arguments: Any) -> Any:
    """Returns the model of a GGUF file, for transformers. Matrices of a quantized type become `LowbitLinear`s with the
    codes and scales of the file, and all else is in `dtype`.

    path        a file of one of the architectures llama, qwen2, qwen3 and gemma3
    dtype       type of the activations: torch.bfloat16 or torch.float16
    arguments   of `from_pretrained`, such as device_map and attn_implementation

    Embeddings of a quantized type become a `LowbitEmbedding`, whose table a tied output layer shares.

    Raises CheckpointError for a file that is damaged or can't be loaded; it names the tensor or the key.
    """
    if dtype not in ACTS:
        raise SpecError(f"dtype={dtype} must be torch.float16 or torch.bfloat16, in which kernels take inputs")
    source = read_source(load_gguf(path, ACTS[dtype]))
    contents = _read(source, dtype)
    fields = {**source.config, "dtype": str(dtype).removeprefix("torch.")}
    config = AutoConfig.for_model(source.architecture.model_type, **fields)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    _check_fits(empty, contents, source)
    wanted = LowbitConfig.of_layers(contents.specs)
    model = type(empty).from_pretrained(
        None, config=config, state_dict=contents.state, quantization_config=wanted, **arguments
    )
    adopt(model)
    return model


@dataclass
class _Contents:
    """The tensors of a file, by their names in the model.

    state    the state dictionary
    specs    the low-bit modules
    shapes   what the dense model's tensors would be
    """

    state: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    specs: dict[str, MatmulSpec] = field(default_factory=dict[str, MatmulSpec])
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, "tuple[int, ...]"])

    def add_dense(self, name: str, value: Tensor) -> None:
        self.state[name], self.shapes[name] = value, tuple(value.shape)

    def add_module(self, name: str, module: PackedModule) -> None:
        self.specs[name], self.shapes[f"{name}.weight"] = module.spec, (module.spec.n, module.spec.k)
        self.state |= {f"{name}.{key}": value for key, value in module.state_dict().items()}


def _read(source: Source, dtype: torch.dtype) -> _Contents:
    """Returns the tensors of a file, each in the order and the type that the model has it in."""
    file, contents = source.file, _Contents()
    for name, key in source.names():
        value = file.load(name, source.order(name))
        if isinstance(value, Tensor):
            shift = source.shift(name)
            contents.add_dense(key, (value.float() - shift if shift else value).to(dtype))
        elif name == EMBEDDINGS:
            contents.add_module(key.removesuffix(".weight"), LowbitEmbedding.from_packed(value))
        else:
            bias = name.removesuffix("weight") + "bias"
            given = cast(Tensor, file.load(bias, source.order(bias))) if bias in file else None
            contents.add_module(key.removesuffix(".weight"), LowbitLinear.from_packed(value, given))
    return contents


def _check_fits(model: nn.Module, contents: _Contents, source: Source) -> None:
    """Raise CheckpointError unless a file has what its model needs: transformers would make up what is missing."""
    wanted = model.state_dict(keep_vars=True)
    path, model_type = source.file.path, source.architecture.model_type
    for name, shape in contents.shapes.items():
        if name not in wanted:
            raise CheckpointError(f"{path}: there is {name}, which {model_type} models of this configuration have not")
        if tuple(wanted[name].shape) != shape:
            raise CheckpointError(f"{path}: {name} is {list(shape)}, but {list(wanted[name].shape)} in the model")
    have = {id(wanted[name]) for name in contents.shapes}  # of tied tensors it has one
    if missing := [name for name, tensor in wanted.items() if id(tensor) not in have]:
        raise CheckpointError(f"{path}: there is no {missing[0]}, which the model needs")
