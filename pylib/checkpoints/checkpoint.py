"""A model in a folder, opened: what is quantized in it, and each weight when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError, LowbitError
from lowbit.dialect.fields import did_you_mean
from lowbit.dialect.formats.names import short_name
from lowbit.dialect.spec import Act
from lowbit.pylib.checkpoints.description import model_config, quantization_config
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.registry import format_of, import_between, import_experts, rows_between
from lowbit.pylib.checkpoints.tensor_files import FLOATS, TensorFiles
from lowbit.pylib.checkpoints.transforms import (
    AT_CALLS,
    Rotations,
    Transform,
    TransformReader,
    at_calls,
    check_unrotated,
)
from lowbit.pylib.nn.rotated import ColumnScaling
from lowbit.pylib.runtime.devices import check_torch_device
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights import saved as saved_weight
from lowbit.pylib.weights.packed import PackedWeight

VERSION = "1"
VERSION_KEY = "lowbit"  # in the metadata of our files
EXTRA_STATE = "._extra_state"  # torch's name for the spec of a LowbitLinear
NOTHING: Mapping[str, Tensor] = MappingProxyType({})
OF_ACTIVATIONS = re.compile(
    r"(input|output|activation|act|q|k|v|kv|prob)_(global_|activation_)?(scale|zero_point|amax)(_inv)?"
)
"""Tensors for activations of 8 bits and caches of attention: without them activations stay as they are."""


def open_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """Returns a checkpoint that lies in a folder of safetensors files, or in one such file.

    It is lowbit's own, as `save_checkpoint` or `save_pretrained` wrote it, or that of another library, which its
    config.json says. Nothing but headers is read until a tensor is asked for.

    Raises CheckpointError for a folder without a checkpoint, and for a format that can't be imported.
    """
    return Checkpoint(Path(path))


class Checkpoint:
    """An open checkpoint, as `open_checkpoint` returns it.

    tensors               all tensors by name, read when they are looked up
    config                the model's config.json; {} without
    quantization_config   what it, or a file beside it, says of the quantization; {} if nothing does
    format                what another library's layers are written in; None for lowbit's own, and without any
    modules               names of the quantized layers
    dense                 names of the tensors that belong to none of them
    rotations             names of the tensors of what rotates or scales their inputs and outputs at each call

    It has the files of the folder that are given, or those that its index names.
    """

    def __init__(self, path: Path, files: Sequence[str] | None = None) -> None:
        self.tensors = TensorFiles(path, files)
        check_version(self.tensors)
        self.config = model_config(self.tensors.folder)
        described, self.quantization_config = quantization_config(self.tensors.folder, self.config)
        self._names = _own_modules(self.tensors)
        self.format: Format | None = None
        if self.quantization_config and not self._names:
            with _naming(described):
                self.format = format_of(self.quantization_config)
            self._names = _modules(self.tensors, self.format)
        self.modules = tuple(self._names)
        self._transforms = _transforms(self.tensors, self.quantization_config, self.format)
        self.rotations = self._transforms.names_in(self.quantization_config if self.format else {}, self._names)
        self._rotations_in = _by_module(self.rotations, self._names)
        used = self.rotations | {name for names in self._names.values() for name in names.values()}
        self.dense = tuple(name for name in self.tensors if name not in used)
        self._strays = {} if self.format is None else _strays(self.dense, self._names)

    def load(
        self,
        module: str,
        act: Act | None = None,
        device: torch.device | str = "cpu",
        shape: tuple[int, int] | None = None,
    ) -> PackedWeight:
        """Returns the weight of a quantized layer.

        act      type of the inputs; None: what a weight of lowbit's was saved for, else the dtype of config.json
        device   where the weight goes; it is unpacked and packed there
        shape    n and k where the model says them, for files that do not: see `lowbit.import_weight`

        Raises CheckpointError, which names the file and the layer, also for one whose inputs or outputs are rotated or
        scaled.
        """
        weight, rotations = self.load_between(module, act, device, shape)
        with self._naming_module(module):
            if rotations:
                raise CheckpointError(f"its inputs or outputs are rotated or scaled {AT_CALLS}")
        return weight

    def load_between(
        self,
        module: str,
        act: Act | None = None,
        device: torch.device | str = "cpu",
        shape: tuple[int, int] | None = None,
    ) -> tuple[PackedWeight, Rotations]:
        """Returns the weight of a quantized layer, and what rotates its inputs and outputs at each call, if anything
        does. The arguments are those of `load`."""
        with self._naming_module(module):
            weight = self._weight(module, act, device, shape)
            rotations = self._transforms.of(module, weight.spec.outputs, weight.spec.k)
            return weight, rotations.to(weight.device, TORCH[weight.spec.act], TORCH[weight.spec.out_dtype])

    def rotations_of(self, module: str, n: int, k: int, came: Mapping[str, Tensor] = NOTHING) -> Rotations:
        """Returns what rotates the k inputs and the n outputs of a quantized layer at each call, on the CPU.

        came   tensors in place of those of the files, by their names in `rotation_names_of`
        """
        with self._naming_module(module):
            return self._transforms.instead(module, came).of(module, n, k)

    def scalings_of(self, module: str) -> tuple[ColumnScaling, ...]:
        """Returns what multiplies the inputs of an expert's layer, on the CPU."""
        with self._naming_module(module):
            return self._transforms.scalings(module)

    def rotation_names_of(self, module: str) -> dict[str, str]:
        """Returns the names of tensors in a quantized layer that say how it is rotated, by what they are called in it.
        Others of these layers may share them."""
        return {name.removeprefix(f"{module}."): name for name in self._rotations_in.get(module, ())}

    def _weight(
        self, module: str, act: Act | None, device: torch.device | str, shape: tuple[int, int] | None
    ) -> PackedWeight:
        tensors = self._module_tensors(module, device)
        if self.format is not None:
            return import_between(self.quantization_config, tensors, act or self._act(), shape, module)
        tensors[saved_weight.SPEC] = tensors.pop(EXTRA_STATE[1:])
        weight = PackedWeight.from_state_dict(tensors)
        if act in (None, weight.spec.act):
            return weight
        return PackedWeight.from_state_dict(tensors, replace(weight.spec, act=act))

    def load_rows(
        self, modules: Sequence[str], act: Act | None = None, device: torch.device | str = "cpu"
    ) -> PackedWeight:
        """Returns several layers of another library that read the same inputs as one weight, with the rows of the first
        on top. The arguments are those of `load`."""
        with self._naming_module(modules[0]):
            self.check_unscaled(modules)
            check_unrotated(self.quantization_config, modules)
        return self.load_rows_between(modules, act, device)

    def load_rows_between(
        self,
        modules: Sequence[str],
        act: Act | None = None,
        device: torch.device | str = "cpu",
        factors: Tensor | None = None,
    ) -> PackedWeight:
        """Returns the same of layers whose inputs may be scaled.

        factors   f32 [rows] that multiply the rows of the last layer
        """
        with self._naming_module(modules[0]):
            layers = [self._module_tensors(module, device) for module in modules]
            return rows_between(self.quantization_config, layers, act or self._act(), factors)

    def load_experts(
        self, module: str, act: Act | None = None, device: torch.device | str = "cpu"
    ) -> list[PackedWeight]:
        """Returns the weights of all experts of a layer whose tensors have a first dimension for the expert."""
        with self._naming_module(module):
            if self.format is None:
                raise CheckpointError("lowbit saves each expert as a layer of its own; use load()")
            self.check_unscaled([module])
            tensors = self._module_tensors(module, device)
            return import_experts(self.quantization_config, tensors, act or self._act(), module)

    def check_unscaled(self, modules: Iterable[str]) -> None:
        """Raise CheckpointError if a tensor multiplies the inputs of one of these modules, which are no linear layers
        that can do that."""
        if scaled := [module for module in modules if self._transforms.scales(module)]:
            raise CheckpointError(
                f"{scaled[0]}{self._transforms.scaling} multiplies what goes into a layer at each call; low-bit linear "
                "layers and experts with names of their own do that, and no others. Use a checkpoint without"
            )

    def is_of_attention(self, tensor: str) -> bool:
        """Tells whether a tensor belongs to a rotation of queries and keys, which cancels out."""
        return self._transforms.is_of_attention(tensor)

    def check_unturned(self, modules: Collection[str], kind: str) -> None:
        """Raise CheckpointError for modules, by names of the checkpoint, whose inputs or outputs are to be rotated:
        none of them is a low-bit linear layer.

        kind   the name of the class of all of them, by which a configuration may mean them
        """
        for module in modules:
            for transform in self.transforms:
                if transform.matches([module], [kind]):
                    raise CheckpointError(
                        f"the {transform.group} of its transform_config rotates the {transform.location} of {module} "
                        "at each call; low-bit linear layers alone do that. Use a checkpoint without"
                    )

    @property
    def transforms(self) -> Sequence[Transform]:
        """What another library's configuration says of rotations at each call."""
        return self._transforms.transforms

    def names_of(self, module: str) -> dict[str, str]:
        """Returns the names of a quantized layer's tensors, by what they are called in the layer."""
        return dict(self._names[module])

    def check_layer(self, module: str) -> None:
        """Raise CheckpointError unless the files have all tensors of a quantized layer that they say it has, and none
        beside them whose meaning is unknown: it could change what the layer computes."""
        with self._naming_module(module):
            if module in self._strays:
                name = self._strays[module]
                raise CheckpointError(f"{name} is no tensor of such a layer, and may change its results")
            listed = self.format.listed(self.tensors.metadata, module) if self.format else ()
            if missing := [name for name in listed if name not in self._names[module]]:
                raise CheckpointError(f"{missing[0]} is missing, though the metadata of the file has it")

    def _module_tensors(self, module: str, device: torch.device | str) -> dict[str, Tensor]:
        check_torch_device(device)
        self.check_layer(module)
        return {short: self.tensors[name].to(device) for short, name in self._names[module].items()}

    def _act(self) -> Act:
        """Returns the type of inputs that config.json implies."""
        parts = [part for part in self.config.values() if isinstance(part, dict)]
        configs = [self.config, *cast(list[dict[str, Any]], parts)]
        given = next((c[key] for c in configs for key in ("dtype", "torch_dtype") if c.get(key)), None)
        act = short_name(given)
        if act in ("f16", "bf16"):
            return cast(Act, act)
        raise CheckpointError(f"config.json has dtype={given!r}, but inputs are f16 or bf16: say act='bf16'")

    @contextmanager
    def _naming_module(self, module: str) -> Iterator[None]:
        """Lets errors start with the file and the name of a module."""
        if module not in self._names:
            hint = did_you_mean(module, self.modules, cutoff=0.6)
            raise CheckpointError(f"{self.tensors.folder} has no quantized layer {module!r}{hint}")
        with _naming(self.tensors.path(next(iter(self._names[module].values()))), module):
            yield


def _transforms(tensors: TensorFiles, config: Mapping[str, Any], format: Format | None) -> TransformReader:
    """Returns the reader of what rotates or scales inputs and outputs of layers at each call."""
    return TransformReader(tensors) if format is None else TransformReader(tensors, at_calls(config), format.scaling)


def _by_module(tensors: Iterable[str], modules: Collection[str]) -> dict[str, list[str]]:
    """Returns the names of tensors that are in quantized layers, at any depth, by layer."""
    found: dict[str, list[str]] = {}
    for name in sorted(tensors):
        parts = name.split(".")
        for count in range(1, len(parts)):
            if (module := ".".join(parts[:count])) in modules:
                found.setdefault(module, []).append(name)
    return found


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tells whether one of several patterns fits a name, as a shell's do."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_dense(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise CheckpointError if one of these tensors, which belong to no quantized layer, holds codes as one would: the
    layer lacks a tensor, and what is left of it would be taken for a dense layer's; or if it multiplies inputs."""
    form, tensors = checkpoint.format, checkpoint.tensors
    if form is None:
        return
    for name in names:
        if form.scaling and name.endswith(form.scaling):
            raise CheckpointError(f"{tensors.path(name)}: {name} multiplies inputs of a layer that is not quantized")
        if name.endswith(form.tensors) and (kind := tensors.dtype(name)) not in FLOATS:
            raise CheckpointError(
                f"{tensors.path(name)}: {name} is {kind}, of a quantized layer that lacks a tensor: "
                f"none called *{' or *'.join(form.markers)} is beside it"
            )


@contextmanager
def _naming(*where: object) -> Iterator[None]:
    """Lets errors be CheckpointErrors that start with where they are."""
    try:
        yield
    except LowbitError as error:
        raise CheckpointError(": ".join([*map(str, where), str(error)])) from error


def check_version(tensors: TensorFiles) -> None:
    """Raises CheckpointError for files that a later version of lowbit wrote."""
    version = tensors.metadata.get(VERSION_KEY, VERSION)
    if version != VERSION:
        raise CheckpointError(f"{tensors.folder} has version {version!r}, this reads {VERSION}; update lowbit")


def _own_modules(tensors: TensorFiles) -> dict[str, dict[str, str]]:
    """Returns the `LowbitLinear`s by name, each with the names of its tensors in itself and in the files."""
    described = [name.removesuffix(EXTRA_STATE) for name in tensors if name.endswith(EXTRA_STATE)]
    modules = {name: dict[str, str]() for name in described if {f"{name}.codes", f"{name}.scales"} & tensors.keys()}
    for name in tensors:
        module, _, short = name.rpartition(".")
        if module in modules:
            modules[module][short] = name
    return modules


def _strays(others: Iterable[str], modules: Collection[str]) -> dict[str, str]:
    """Returns a tensor that is in a quantized layer and none of the layer's own, by layer, where there is one."""
    found: dict[str, str] = {}
    for name in others:
        parts = name.split(".")
        for count in range(1, len(parts)):
            module = ".".join(parts[:count])
            if module in modules and not OF_ACTIVATIONS.fullmatch(parts[-1]):
                found.setdefault(module, name)
    return found


def _modules(tensors: TensorFiles, format: Format) -> dict[str, dict[str, str]]:
    """Returns the same for the quantized layers of a format."""
    found: dict[str, dict[str, str]] = {}
    for name in tensors:
        for marker in format.markers:
            if name.endswith(marker):
                found[name.removesuffix(marker)] = {}
    for module, names in found.items():
        names.update({suffix[1:]: module + suffix for suffix in format.tensors if module + suffix in tensors})
    return found
