"""`lowbit.from_gguf`: a GGUF file as a model of transformers whose matrices stay packed.

transformers builds the model and loads it, from a state dictionary like that of a model which lowbit has saved; so what
can be done with a model of `from_pretrained` can be done with this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
except ImportError as error:
    raise ImportError("from_gguf needs transformers 5: pip install 'transformers>=5.17' accelerate") from error

from lowbit.dialect.errors import CheckpointError, LowbitError, SpecError
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.pylib.checkpoints.gguf.architectures import LOOKED_UP, Made, Source, read_source
from lowbit.pylib.checkpoints.gguf.file import GgufFile, load_gguf
from lowbit.pylib.integrations.config import LowbitConfig
from lowbit.pylib.integrations.quantizer import adopt
from lowbit.pylib.nn.dense_experts import LISTS
from lowbit.pylib.nn.embedding import LowbitEmbedding
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.packed_module import PackedModule
from lowbit.pylib.torch_types import type_name
from lowbit.pylib.weights.packed import PackedWeight

ACTS: Mapping[torch.dtype, Act] = {torch.float16: "f16", torch.bfloat16: "bf16"}


def from_gguf(path: str | PathLike[str], dtype: torch.dtype | str = torch.bfloat16, **arguments: Any) -> Any:
    """Returns the model of a GGUF file, for transformers. Matrices of a quantized type become `LowbitLinear`s with the
    codes and scales of the file, and all else is in `dtype`.

    path        a file of one of the architectures that docs/howto/transformers.md lists, llama, qwen3 and gemma3
                among them; of a model in several files, any one of them
    dtype       type of the activations: torch.bfloat16 or torch.float16, or the name of either
    arguments   of `from_pretrained`, such as device_map and attn_implementation

    Embeddings of a quantized type become a `LowbitEmbedding`, whose table a tied output layer shares, and experts
    `LowbitExperts`. A matrix that the file has in parts of several types, or transposed, becomes dense. Encoders, such
    as BERT, are built by `AutoModel`, without a pooler.

    Raises CheckpointError for a file that is damaged or can't be loaded; it names the tensor or the key.
    """
    dtype = _dtype(arguments.pop("torch_dtype", dtype))
    for name in ("config", "quantization_config", "state_dict"):
        if name in arguments:
            raise SpecError(f"{name}= is what the file says; leave it out")
    source = read_source(load_gguf(path, ACTS[dtype]))
    contents = _read(source, dtype)
    config, empty = _empty_model(source, dtype)
    _check_fits(empty, contents, source)
    wanted = LowbitConfig.of_layers(contents.specs)
    arguments = {**(source.architecture.encoder or {}), **arguments}
    model = type(empty).from_pretrained(
        None, config=config, state_dict=contents.state, quantization_config=wanted, **arguments
    )
    adopt(model)
    return model


def _empty_model(source: Source, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns the configuration and the model, on meta, of a file. Raises CheckpointError where there is none."""
    architecture = source.architecture
    fields = {name: value for name, value in source.config.items() if name not in architecture.unknown}
    auto = AutoModelForCausalLM if architecture.encoder is None else AutoModel
    try:
        config = AutoConfig.for_model(architecture.model_type, **fields, dtype=type_name(dtype))
        with torch.device("meta"):
            return config, auto.from_config(config, **(architecture.encoder or {}))
    except Exception as error:  # of any class, from the code of a model that takes its configuration for right
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        what = f"transformers makes no {architecture.model_type} model of what the metadata say"
        raise CheckpointError(f"{source.file.path}: {what}: {said}") from error


def _dtype(given: object) -> torch.dtype:
    """Returns a type of activations that is given as transformers takes it, by its name too."""
    found = next((dtype for dtype in ACTS if given in (dtype, str(dtype), type_name(dtype))), None)
    if found is None:
        raise SpecError(f"dtype={given} must be torch.float16 or torch.bfloat16, in which kernels take inputs")
    return found


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

    def add_experts(self, name: str, list_name: str, layers: Sequence[LowbitLinear], transposed: bool) -> None:
        """Add a matrix of all experts, by its name in the dense model and by that of the list of its layers."""
        for expert, layer in enumerate(layers):
            self._add_layer(f"{list_name}.{expert}", layer)
        spec = layers[0].spec
        self.shapes[name] = (len(layers), *((spec.k, spec.n) if transposed else (spec.n, spec.k)))
        if spec.bias:
            self.shapes[f"{name}_bias"] = len(layers), spec.n

    def _add_layer(self, name: str, module: PackedModule) -> None:
        self.specs[name] = module.spec
        self.state |= {f"{name}.{key}": value for key, value in module.state_dict().items()}

    def add_module(self, name: str, module: PackedModule) -> None:
        self.shapes[f"{name}.weight"] = module.spec.n, module.spec.k
        self._add_layer(name, module)


def _read(source: Source, dtype: torch.dtype) -> _Contents:
    """Returns the tensors of a file, each in the order and the type that the model has it in."""
    file, contents = source.file, _Contents()
    for name, key in source.names():
        value = file.load(name, source.order(name), source.factors(name))
        if isinstance(value, Tensor):
            contents.add_dense(key, source.dense(name, value).to(dtype))
        elif name in LOOKED_UP:
            contents.add_module(key.removesuffix(".weight"), LowbitEmbedding.from_packed(value))
        else:
            bias = name.removesuffix("weight") + "bias"
            given = cast(Tensor, file.load(bias, source.order(bias))) if bias in file else None
            contents.add_module(key.removesuffix(".weight"), _layer(file, name, value, given))
    for key, parts, made in source.made():
        _add_made(contents, key, _made(source, parts, made), dtype)
    for module, matrices in source.experts().items():
        _check_stacks(file, matrices)
        for matrix, stacks in matrices.items():
            _add_experts(contents, source, f"{module}.{matrix}", stacks, dtype)
    return contents


def _layer(file: GgufFile, name: str, weight: PackedWeight, bias: Tensor | None) -> LowbitLinear:
    """Returns a layer of a matrix called `name`. Raises CheckpointError for biases that no layer can have."""
    try:
        return LowbitLinear.from_packed(weight, bias)
    except LowbitError as error:
        raise CheckpointError(f"{file.path}: {name}: {error}") from error


def _add_made(contents: _Contents, key: str, value: PackedWeight | Tensor, dtype: torch.dtype) -> None:
    if isinstance(value, Tensor):
        contents.add_dense(key, value.to(dtype))
    else:
        contents.add_module(key.removesuffix(".weight"), LowbitLinear.from_packed(value))


def _made(source: Source, parts: Sequence[str], made: Made) -> PackedWeight | Tensor:
    """Returns a matrix that is made of others. Raises CheckpointError where they do not fit each other."""
    file, factors = source.file, list(map(source.factors, parts))
    try:
        if made.values is not None:
            return made.values(*map(file.decoded, parts, factors))
        count = sum(file.shape(part)[0] for part in parts)
        return file.load_joined(parts, made.rows(source.config, count) if made.rows else None, factors)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {' and '.join(parts)}: {error}") from error


def _add_experts(
    contents: _Contents, source: Source, name: str, stacks: Sequence[str], dtype: torch.dtype
) -> None:
    """Add a matrix of all experts, `name` in the dense model, whose rows are those of several stacks."""
    file, transposed = source.file, source.architecture.transposed
    module, _, matrix = name.rpartition(".")
    rows = source.rows_of_experts(matrix, sum(file.shape(stack)[1] for stack in stacks))
    biases = source.biases(stacks, rows)
    if all(map(file.is_dense, stacks)):
        whole = torch.cat([cast(Tensor, file[stack]) for stack in stacks], 1)
        whole = whole if rows is None else whole[:, rows]
        contents.add_dense(name, (whole.mT.contiguous() if transposed else whole).to(dtype))
        if biases is not None:
            contents.add_dense(f"{name}_bias", biases.to(dtype))
    else:
        packed = file.load_joined_experts(stacks, rows, _factors(source, stacks))
        each = [None] * len(packed) if biases is None else list(biases)
        layers = [_layer(file, stacks[0], weight, bias) for weight, bias in zip(packed, each)]
        contents.add_experts(name, f"{module}.{LISTS[matrix]}", layers, transposed)


def _factors(source: Source, names: Sequence[str]) -> list[Tensor | None]:
    """Returns the factors of several stacks. Where one of the stacks has factors, all have them."""
    factors = {name: source.factors(name) for name in names}
    if any(each is not None for each in factors.values()):
        factors = {name: torch.ones(source.file.shape(name)[0]) if f is None else f for name, f in factors.items()}
    return list(factors.values())


def _check_stacks(file: GgufFile, matrices: Mapping[str, Sequence[str]]) -> None:
    """Raise CheckpointError unless the stacks of a block fit each other."""
    for stacks in matrices.values():
        for name in stacks:
            shape = file.shape(name)
            if len(shape) != 3 or shape != file.shape(stacks[0]) or shape[1] % ROWS:
                rule = f"must be [experts, a multiple of {ROWS}, columns], as {stacks[0]} is"
                raise CheckpointError(f"{file.path}: {name} is {list(shape)}; it {rule}")
        if len(kinds := {file.type_of(name) for name in stacks}) > 1:
            rule = "rows of one matrix must have one type"
            raise CheckpointError(f"{file.path}: {' and '.join(stacks)} are {' and '.join(sorted(kinds))}; {rule}")
    names = [name for stacks in matrices.values() for name in stacks]
    if len(set(map(file.is_dense, names))) > 1:
        raise CheckpointError(f"{file.path}: {', '.join(names)}: some are dense; all or none must be, to be one module")


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
