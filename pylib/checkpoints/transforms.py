"""Rotations that a model of compressed-tensors applies at each call: its `transform_config`.

    y = output(input(x) W^T + bias)

A group of the configuration is one kind of matrix, for the inputs or outputs of the modules that it names. The matrix
M [size, size] is a tensor of the module, <group>_input.weight, which modules of one size share: it is in the files
once. x becomes x M for "random-matrix", x M / sqrt(size) for "hadamard" and "random-hadamard", with blocks of head_dim
columns if that is given. `inverse` transposes M, or chose another M when the file was made. Of several on the input of
a module, the last one is applied first. What is merged into weights (weight_input, weight_output) is done.
(compressed_tensors/transform/: factory/base.py, factory/hadamard.py, utils/matrix.py.)

A format of another library may have a tensor [k] in a module that multiplies its inputs column by column
(`Format.scaling`), which is a rotation by a diagonal matrix.

Queries and keys that are rotated alike (q_attn and k_cache, SpinQuant's R3) make the same products as before: it is for
caches of few bits, and lowbit leaves caches as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.tensor_files import TensorFiles
from lowbit.pylib.layer.hadamard import HadamardMatrix, found_in
from lowbit.pylib.nn.dense_experts import LISTS, MATRICES
from lowbit.pylib.nn.rotated import (
    FLOATS,
    INPUTS,
    OUTPUTS,
    STATE,
    Beside,
    ColumnScaling,
    HadamardRotation,
    MatrixRotation,
    Rotation,
    rotation_of,
)
from lowbit.pylib.torch_types import type_name
from lowbit.pylib.weights.sharding import Part

ENTRY = "transform_config"
HADAMARD = ("hadamard", "random-hadamard")
TYPES = (*HADAMARD, "random-matrix")
MERGED = ("weight_input", "weight_output")
ATTENTION = ("q_attn", "k_cache")
LOCATIONS = ("input", "output", *MERGED, *ATTENTION)
AT_CALLS = (
    "at each call, which a weight alone does not say; lowbit.load_checkpoint and from_pretrained make layers that do it"
)
MOST_MATRIX = 2048  # rows of a matrix that is no Hadamard matrix: each layer holds it in f32
_FLOATS = (torch.float64, *FLOATS)


@dataclass(frozen=True)
class Transform:
    """What a group does at one location.

    group     its name
    kind      one of TYPES
    location  one of LOCATIONS
    targets   names of modules, patterns after "re:", or classes
    ignore    modules that are left out, likewise
    inverse   whether the matrix is the inverse
    head_dim  the columns of a block; None: all columns of the module
    permuted  whether rows and columns of the matrix are permuted alike
    """

    group: str
    kind: str
    location: str
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    inverse: bool
    head_dim: int | None
    permuted: bool

    def matches(self, names: Iterable[str], classes: Sequence[str] = ("Linear",)) -> bool:
        """Tells whether it is for a module with these names, any of which counts."""
        given = tuple(names)
        hit = (any(_fits(target, given, classes) for target in each) for each in (self.targets, self.ignore))
        return next(hit) and not next(hit)

    @property
    def prefix(self) -> str:
        """What its tensors are called in a module."""
        return f"{self.group}_{self.location}"


def _fits(target: str, names: Sequence[str], classes: Sequence[str]) -> bool:
    if not target.startswith("re:"):
        return target in names or target in classes
    try:
        return any(re.match(target.removeprefix("re:"), name) is not None for name in names)
    except re.error as error:
        raise CheckpointError(f"target {target!r} of the transform_config is no pattern: {error}") from None


# -- the configuration


def problem(config: object) -> str:
    """Returns what is wrong with a transform_config; "" if all of it can be applied."""
    try:
        found = list(_transforms(config))
    except ValueError as error:
        return str(error)
    for transform in found:
        if transform.location in ATTENTION and not _cancels(transform, found):
            return (
                f"{transform.group} rotates queries or keys of attention ({transform.location}), and not both alike; "
                "only what cancels out can be left to caches of 16 bits. Use a checkpoint without"
            )
    return ""


def _cancels(transform: Transform, others: Sequence[Transform]) -> bool:
    """Tells whether a group rotates queries and keys alike: q M (k M)^T is q k^T for a rotation M."""
    alike = {t.location: t for t in others if t.group == transform.group and t.location in ATTENTION}
    of_both = {(t.kind, t.targets, t.ignore, t.inverse, t.head_dim) for t in alike.values()}
    return len(alike) == len(ATTENTION) and len(of_both) == 1 and transform.kind in HADAMARD


def at_calls(config: Mapping[str, Any]) -> list[Transform]:
    """Returns what a quantization_config leaves to be done at each call, once `problem` has found nothing wrong."""
    given = config.get(ENTRY)
    return [t for t in _transforms(given) if t.location in ("input", "output")] if given else []


def check_unrotated(config: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise CheckpointError for modules whose inputs or outputs are rotated; one without a name, "", may be any.

    config   a quantization_config in which nothing is wrong
    """
    for transform in at_calls(config):
        for name in names:
            if not name or transform.matches([name]):
                what = name or "a layer"
                raise CheckpointError(
                    f"by the {transform.group} of its transform_config, the {transform.location} of {what} is rotated "
                    f"{AT_CALLS}"
                )


def _transforms(config: object) -> Iterator[Transform]:
    """Yields what a transform_config has. Raises ValueError for what it should not have."""
    groups = _dict(config, "transform_config").get("config_groups")
    for name, group in _dict(groups, "config_groups").items():
        entries = _dict(group, name)
        _check_known(entries, name, ("type", "apply", "randomize", "requires_grad", "head_dim", "precision"))
        if entries.get("type") not in TYPES:
            raise ValueError(f"{name} has type={entries.get('type')!r}; what can be applied is {', '.join(TYPES)}")
        size = entries.get("head_dim")
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(f"{name} has head_dim={size!r}; it must be a number of columns")
        for one in _list(entries.get("apply", []), f"{name}.apply"):
            about = _dict(one, f"{name}.apply")
            _check_known(about, f"{name}.apply", ("targets", "location", "inverse", "ignore"))
            if about.get("location") not in LOCATIONS:
                raise ValueError(f"{name} has location={about.get('location')!r}; known are {', '.join(LOCATIONS)}")
            targets, ignore = (_names(about.get(key, []), f"{name}.{key}") for key in ("targets", "ignore"))
            inverse, permuted = bool(about.get("inverse")), bool(entries.get("randomize"))
            yield Transform(name, entries["type"], about["location"], targets, ignore, inverse, size, permuted)


def _dict(given: object, what: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{what} must be a dictionary, not {type(given).__name__}")
    return cast(dict[str, Any], given)


def _list(given: object, what: str) -> list[object]:
    if not isinstance(given, list):
        raise ValueError(f"{what} must be a list, not {type(given).__name__}")
    return cast(list[object], given)


def _names(given: object, what: str) -> tuple[str, ...]:
    names = [given] if isinstance(given, str) else _list(given, what)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ValueError(f"{what} has {wrong[0]!r}; it must have texts")
    return tuple(cast(list[str], names))


def _check_known(entries: Mapping[str, Any], what: str, known: Sequence[str]) -> None:
    if unknown := [name for name in entries if name not in known]:
        raise ValueError(f"{what} has {unknown[0]!r}, which lowbit does not know; it may change what is rotated")


# -- the tensors


@dataclass(frozen=True)
class Rotations:
    """What is done before and behind the matmul of a layer, the first one first."""

    inputs: tuple[Rotation, ...] = ()
    outputs: tuple[Rotation, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs)

    def part(self, part: Part) -> Rotations:
        """Returns what is done in one of several processes, which has a part of the weight.

        Raises PackError where a rotation mixes columns of this process with those of others.
        """
        inputs = tuple(rotation.part(*part.columns) for rotation in self.inputs)
        if not self.outputs or len(part.rows) == 1:
            return Rotations(inputs, tuple(rotation.part(*part.rows[0]) for rotation in self.outputs))
        each = [(count, [rotation.part(first, count) for rotation in self.outputs]) for first, count in part.rows]
        return Rotations(inputs, (Beside(each),))

    def is_like(self, other: Rotations) -> bool:
        """Tells whether the same is done to the inputs, and to the outputs."""
        return are_alike(self.inputs, other.inputs) and are_alike(self.outputs, other.outputs)

    def to(
        self, device: torch.device | str, act: torch.dtype = torch.float16, out: torch.dtype | None = None
    ) -> Rotations:
        """Returns copies on a device for one layer, with signs in the types of what they change: those of inputs in
        `act`, and those of outputs in `out`, which is `act` if it is not given."""
        both = (self.inputs, act), (self.outputs, out or act)
        return Rotations(*(tuple(_copy(r, kind).to(device) for r in rotations) for rotations, kind in both))


def are_alike(some: Sequence[Rotation], others: Sequence[Rotation]) -> bool:
    """Tells whether rotations one after the other give the same bits as others."""
    return len(some) == len(others) and all(one.is_like(other) for one, other in zip(some, others))


def _copy(rotation: Rotation, act: torch.dtype) -> Rotation:
    state = {name: t.clone() for name, t in rotation.state_dict().items()}
    if "signs" in state:
        state["signs"] = state["signs"].to(act)
    return rotation_of(state)


@dataclass
class TransformReader:
    """Reads the rotations of a checkpoint, of lowbit's own or of compressed-tensors.

    tensors      all tensors
    transforms   what the configuration leaves to be done at each call; of lowbit's own, tensors say it
    scaling      how names of tensors end that multiply the inputs of their module; "" for none
    """

    tensors: TensorFiles
    transforms: Sequence[Transform] = ()
    scaling: str = ""
    _made: dict[tuple[str, int, bool], Rotation] = field(default_factory=dict[tuple[str, int, bool], Rotation])
    _came: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def instead(self, module: str, came: Mapping[str, Tensor]) -> TransformReader:
        """Returns a reader that takes tensors, by their names in a module, in place of those of the files."""
        if not came:
            return self
        named = {f"{module}.{short}": tensor.to("cpu") for short, tensor in came.items()}
        return replace(self, _came=named, _made={})

    def _tensor(self, name: str) -> Tensor:
        return self._came[name] if name in self._came else self.tensors[name]

    def names_in(self, config: Mapping[str, Any], modules: Collection[str]) -> set[str]:
        """Returns the names of tensors of rotations, those of attention too, which cancel out."""
        given = config.get(ENTRY)
        known = _transforms(given) if given else ()
        ends = tuple(f".{t.prefix}.{part}" for t in known for part in ("weight", "perm"))
        own = rf"\.({INPUTS}|{OUTPUTS})\.\d+\.({'|'.join(STATE)})"
        found = {name for name in self.tensors if ends and name.endswith(ends)}
        found |= {module + self.scaling for module in modules if self.scales(module)}
        owners = {*modules, *map(owner_of_expert, modules)}
        for name in self.tensors:
            match = re.search(own + "$", name)
            if match and name[: match.start()] in owners:
                found.add(name)
        return found

    def is_of_attention(self, name: str) -> bool:
        """Tells whether a tensor belongs to a rotation of queries and keys, which cancels out."""
        return name.rpartition(".")[0].endswith(tuple(f"_{place}" for place in ATTENTION))

    def scales(self, module: str) -> bool:
        """Tells whether a tensor of a module multiplies its inputs."""
        return bool(self.scaling) and module + self.scaling in self.tensors

    def of(self, module: str, n: int, k: int) -> Rotations:
        """Returns the rotations of a quantized module of n rows and k columns, on the CPU."""
        with torch.device("cpu"):  # whatever the default is: models are built on meta
            return self._of(module, n, k)

    def _of(self, module: str, n: int, k: int) -> Rotations:
        of_expert = owner_of_expert(module)
        inputs = self._own(module, INPUTS, k) or (self._own(of_expert, INPUTS, k) if of_expert else ())
        own = Rotations(inputs, self._own(module, OUTPUTS, n))
        if own:
            return own
        here = [t for t in self.transforms if t.matches([module])]
        inputs = [self._rotation(t, module, k) for t in here if t.location == "input"]
        outputs = [self._rotation(t, module, n) for t in here if t.location == "output"]
        scalings = [self._scaling(module, k)] if self.scales(module) else []
        return Rotations((*scalings, *reversed(inputs)), tuple(outputs))

    def scalings(self, module: str) -> tuple[ColumnScaling, ...]:
        """Returns what multiplies the inputs of an expert's layer, on the CPU."""
        if self.scales(module):
            return (self._scaling(module, sum(self.tensors.shape(module + self.scaling)[:1])),)
        own = self._own(owner_of_expert(module), INPUTS, 0)
        if wrong := [each for each in own if not isinstance(each, ColumnScaling)]:
            raise CheckpointError(f"inputs of experts are rotated by {wrong[0]}; they can be scaled alone")
        return cast(tuple[ColumnScaling, ...], own)

    def _scaling(self, module: str, k: int) -> ColumnScaling:
        name = module + self.scaling
        scale = self._tensor(name)
        if scale.dtype not in FLOATS or scale.shape != (k,):
            raise CheckpointError(f"{name} is {type_name(scale.dtype)} {list(scale.shape)}; it must be floats {[k]}")
        if not bool(((scale > 0) & scale.isfinite()).all()):
            low, high = (float(bound) for bound in scale.aminmax())
            raise CheckpointError(f"{name} has numbers from {low} to {high}; those of {k} columns must be positive")
        return ColumnScaling(scale)

    def _own(self, module: str, place: str, columns: int) -> tuple[Rotation, ...]:
        made: list[Rotation] = []
        while True:
            prefix = f"{module}.{place}.{len(made)}."
            named = {part: prefix + part for part in STATE}
            found = {part: name for part, name in named.items() if name in self.tensors}
            if not found:
                return tuple(made)
            made.append(rotation_of({part: self._tensor(name) for part, name in found.items()}))
            if columns % made[-1].size:
                raise CheckpointError(f"{prefix[:-1]} has {made[-1].size} columns, which do not divide {columns}")

    def _rotation(self, transform: Transform, module: str, columns: int) -> Rotation:
        size = transform.head_dim or columns
        if columns % size:
            raise CheckpointError(f"{transform.group} has head_dim={size}, which does not divide {columns} columns")
        name = self._stored(transform, module, size)
        key = (name, size, transform.inverse)
        if key not in self._made:
            self._made[key] = self._read(transform, name, size)
        return self._made[key]

    def _stored(self, transform: Transform, module: str, size: int) -> str:
        """Returns the name of the tensor of a module, or of the one that it shares it with; "" for none."""
        own = f"{module}.{transform.prefix}.weight"
        if own in self.tensors:
            return own
        kin = [t for t in self.transforms if t.group == transform.group]
        for name in self.tensors:
            for other in kin:
                owner = name.removesuffix(f".{other.prefix}.weight")
                same = transform.kind in HADAMARD or other.inverse == transform.inverse
                if owner != name and same and other.matches([owner]) and self.tensors.shape(name) == (size, size):
                    return name
        return ""

    def _read(self, transform: Transform, name: str, size: int) -> Rotation:
        if not name:
            return self._known(transform, size)
        matrix = self._tensor(name)
        if matrix.dtype not in _FLOATS or matrix.shape != (size, size):
            given = f"{type_name(matrix.dtype)} {list(matrix.shape)}"
            raise CheckpointError(f"{name} is {given}; it must be floats {[size, size]}")
        if transform.permuted:
            matrix = self._permuted(matrix, name.removesuffix("weight") + "perm")
        if transform.kind in HADAMARD:
            matrix = matrix.T if transform.inverse else matrix
            if found := found_in(matrix):
                return HadamardRotation(found[0], None if found[1] is None else found[1].to(torch.float16))
            matrix = matrix.double() / math.sqrt(size)
        if size > MOST_MATRIX:
            raise CheckpointError(
                f"{name} is no Hadamard matrix of signs, and has {size} rows; others are applied up to {MOST_MATRIX}"
            )
        return MatrixRotation(matrix.float().contiguous())

    def _known(self, transform: Transform, size: int) -> Rotation:
        """Returns a matrix that is in no file, as one of Sylvester's need not be."""
        if transform.kind != "hadamard" or transform.permuted or size & (size - 1):
            name = f"*.{transform.prefix}.weight {[size, size]}"
            raise CheckpointError(f"the files have no {name}, by which the {transform.location} is rotated")
        return HadamardRotation(HadamardMatrix(power=size))

    def _permuted(self, matrix: Tensor, name: str) -> Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"{name} is missing, though the transform_config has randomize=true")
        order = self._tensor(name)
        if order.dtype is not torch.int64 or not torch.equal(order.sort().values, torch.arange(len(matrix))):
            raise CheckpointError(f"{name} must be a permutation of {len(matrix)} columns, in int64")
        return matrix[order][:, order]


def owner_of_expert(module: str) -> str:
    """Returns the name of the experts whose inputs one of lowbit's own modules multiplies by, "experts.gate_up.3"; ""
    for others."""
    path, _, number = module.rpartition(".")
    owner, _, matrix = path.rpartition(".")
    return owner if number.isdecimal() and matrix == LISTS[MATRICES[0]] else ""


def check_applied(transforms: Sequence[Transform], modules: Mapping[str, tuple[nn.Module, Iterable[str]]]) -> None:
    """Raise CheckpointError for a module that is to be rotated at each call, and that is no low-bit linear layer.

    modules   those of a model that stay as they are, by name, with the names that the checkpoint has for them
    """
    for transform in transforms:
        for name, (module, names) in modules.items():
            classes = [kind.__name__ for kind in type(module).__mro__]
            if transform.matches([name, *names], classes):
                raise CheckpointError(
                    f"{name} is a {type(module).__name__} that is not quantized, and the transform_config rotates its "
                    f"{transform.location} at each call ({transform.group}); low-bit linear layers alone can be rotated"
                )


