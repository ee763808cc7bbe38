"""What a checkpoint has of the experts of a layer, and how the weights of all of them are made of it.

lowbit saves two modules for each expert, gate_up and down. Other libraries have one for each projection, `gate_proj`,
`up_proj` and `down_proj`, or under the names of Mixtral `w1`, `w3` and `w2`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError, SpecError
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import Act, MatmulSpec, interned
from lowbit.pylib.checkpoints.checkpoint import EXTRA_STATE, Checkpoint
from lowbit.pylib.checkpoints.expert_places import PARTS, PROJECTIONS
from lowbit.pylib.checkpoints.expert_scales import of_all
from lowbit.pylib.checkpoints.registry import format_of, rows_between, without_zero_bias
from lowbit.pylib.integrations.serving.experts import LEAVE_DENSE, check_one_spec, each_of, part_of_expert, stacked
from lowbit.pylib.nn.dense_experts import LISTS
from lowbit.pylib.nn.gated_linear import Gate
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.nn.rotated import INPUTS, ColumnScaling
from lowbit.pylib.runtime.expert_matmul import spec_of_experts
from lowbit.pylib.torch_types import stored_type
from lowbit.pylib.tune.timing import random_weight
from lowbit.pylib.weights.packed import PackedWeight
from lowbit.pylib.weights.saved import SPEC, check_same, read_spec, write_spec
from lowbit.pylib.weights.sharding import Part

_ABOUT = EXTRA_STATE[1:]
LINEAR = ("silu_mul", "gelu_mul")
"""Gates that are linear in what the up projection gives."""

Taken = tuple[str, int, Tensor]
"""A kind of tensor, the number of an expert, and the expert's tensor of this kind."""


class ExpertShare(NamedTuple):
    """What one process computes of every expert that it has.

    gate        what is applied to the results of gate_up
    act         type of the inputs
    rank        which of so many processes it is that have a part of every expert each
    """

    gate: Gate
    act: Act
    rank: int
    processes: int


class ExpertsSource:
    """The experts of a layer as their files describe them.

    tensors   those of one expert, on meta, by kind
    inputs    what multiplies tokens before they meet experts, as it was when the model was made
    """

    tensors: Mapping[str, Tensor]
    inputs: Sequence[ColumnScaling] = ()

    def check_scale(self, tensor: Tensor) -> None:
        """Raise CheckpointError for a scale of tokens that is another than when the model was made."""
        if not any(scaling.is_like(ColumnScaling(tensor)) for scaling in self.inputs):
            raise CheckpointError(
                "inputs of experts are scaled in another way than when the model was made; start the server again"
            )

    def taken(self, name: str, tensor: Tensor) -> Taken | None:
        """Returns what a tensor of the files is, by its name among the experts'; None for one that has no values.

        Raises PackError and CheckpointError for one of another format.
        """
        raise NotImplementedError

    def wanted(self, kind: str, tensor: Tensor, share: ExpertShare) -> Tensor | None:
        """Returns what a process wants of an expert's tensor; None if that is nothing."""
        raise NotImplementedError

    def weights(self, tensors: Mapping[str, Tensor], share: ExpertShare) -> tuple[PackedWeight, PackedWeight]:
        """Returns the process's part of gate_up and of down of all experts.

        tensors   what is wanted of the tensors of all experts, [experts, ...] by kind
        """
        raise NotImplementedError

    def random(self, experts: int, device: torch.device, share: ExpertShare) -> tuple[PackedWeight, PackedWeight]:
        """Returns random weights of this size. Raises CheckpointError if only the tensors say what they are."""
        raise CheckpointError(
            "only the tensors of another library's files say what experts are; use load_format='auto'"
        )


class SavedSource(ExpertsSource):
    """Experts that lowbit has saved.

    specs   of one expert's gate_up and down
    """

    def __init__(self, specs: Mapping[str, MatmulSpec], inputs: Sequence[ColumnScaling] = ()) -> None:
        self.specs, self.inputs = specs, inputs
        self._cuts: dict[tuple[str, ExpertShare], tuple[MatmulSpec, Part, MatmulSpec | None]] = {}
        self.tensors = {
            f"{matrix}.{slot.name}": torch.empty(slot.shape, dtype=stored_type(slot.storage), device="meta")
            for matrix, spec in specs.items()
            for slot in spec.tensors
        }

    def taken(self, name: str, tensor: Tensor) -> Taken | None:
        matrix, number, kind = name.split(".")
        if matrix == INPUTS:
            self.check_scale(tensor)
            return None
        if kind == _ABOUT:
            with naming(f"{matrix}.{number}"):
                check_same(read_spec(tensor), self.specs[matrix])
            return None
        return f"{matrix}.{kind}", int(number), tensor

    def wanted(self, kind: str, tensor: Tensor, share: ExpertShare) -> Tensor | None:
        matrix, _, name = kind.partition(".")
        spec, part, one = self._cut(matrix, share)
        if one is None:
            return tensor
        kept = any(slot.name == name for slot in one.tensors)
        return part.of(spec.slot(name), tensor, spec) if kept else None

    def _cut(self, matrix: str, share: ExpertShare) -> tuple[MatmulSpec, Part, MatmulSpec | None]:
        """Returns the spec of an expert's matrix, what a process has of it, and the spec of that where its tensors are
        slices of the matrix's."""
        if (matrix, share) not in self._cuts:
            spec = interned(replace(self.specs[matrix], act=share.act))
            part = part_of_expert(spec, matrix, share.gate, share.rank, share.processes)
            one = interned(part.spec(spec)) if part.is_cut_in_memory(spec) else None
            self._cuts[matrix, share] = spec, part, one
        return self._cuts[matrix, share]

    def weights(self, tensors: Mapping[str, Tensor], share: ExpertShare) -> tuple[PackedWeight, PackedWeight]:
        return self._weight("gate_up", tensors, share), self._weight("down", tensors, share)

    def _weight(self, matrix: str, tensors: Mapping[str, Tensor], share: ExpertShare) -> PackedWeight:
        spec, part, one = self._cut(matrix, share)
        came = one or spec
        given = {slot.name: tensors[f"{matrix}.{slot.name}"] for slot in came.tensors}
        whole = spec_of_experts(came, len(given["codes"]))
        flat = {name: tensor.flatten(0, 1) for name, tensor in given.items()}
        packed = PackedWeight.from_state_dict({**flat, SPEC: write_spec(whole)}, whole)
        return packed if one else stacked([each.part(part) for each in each_of(packed)])

    def random(self, experts: int, device: torch.device, share: ExpertShare) -> tuple[PackedWeight, PackedWeight]:
        cuts = (self._cut(matrix, share)[:2] for matrix in ("gate_up", "down"))
        first, second = (random_weight(spec_of_experts(part.spec(spec), experts), str(device)) for spec, part in cuts)
        return first, second


class ImportedSource(ExpertsSource):
    """Experts of another library, which has a module for each projection of each.

    config    the checkpoint's quantization_config
    tensors   by kind: "gate_proj.qweight", say
    """

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], inputs: Sequence[ColumnScaling] = ()
    ) -> None:
        self.config, self.tensors, self.inputs = config, tensors, inputs
        self.scaling = format_of(config).scaling.removeprefix(".")
        self.projections = {kind.partition(".")[0] for kind in tensors}
        self.shorts = {kind.partition(".")[2] for kind in tensors} | ({self.scaling} if inputs else set())

    def taken(self, name: str, tensor: Tensor) -> Taken | None:
        number, _, kind = name.partition(".")
        if self.scaling and kind.endswith(f".{self.scaling}") and kind not in self.tensors:
            self.check_scale(tensor)
        return (kind, int(number), tensor) if kind in self.tensors else None

    def wanted(self, kind: str, tensor: Tensor, share: ExpertShare) -> Tensor | None:
        return tensor  # its format says how it is cut, once it has been read

    def weights(self, tensors: Mapping[str, Tensor], share: ExpertShare) -> tuple[PackedWeight, PackedWeight]:
        found: list[PackedWeight] = []
        for matrix, projections in zip(("gate_up", "down"), self._projections()):
            factors = tensors.get(f"{self._projections()[1][0]}.{self.scaling}") if matrix == "gate_up" else None
            if factors is not None and share.gate.epilogue not in LINEAR:
                gate = share.gate.epilogue
                raise SpecError(f"inputs of down are scaled, and {gate} is not linear in up; {LEAVE_DENSE}")
            each = self._each(tensors, projections, share.act, factors)
            part = part_of_expert(each[0].spec, matrix, share.gate, share.rank, share.processes)
            found.append(stacked([one.part(part) for one in each]))
        return found[0], found[1]

    def _projections(self) -> list[tuple[str, ...]]:
        return [next(parts for parts in kinds if set(parts) <= self.projections) for kinds in PARTS.values()]

    def _each(
        self, tensors: Mapping[str, Tensor], projections: Sequence[str], act: Act, factors: Tensor | None
    ) -> list[PackedWeight]:
        """Returns the matrix of each expert. Where some would have zeros and others none, all have them.

        factors   [experts, rows] that multiply the rows of the last projection
        """
        layers = [self._of(tensors, projections, number) for number in range(len(next(iter(tensors.values()))))]
        numbers = [None] * len(layers) if factors is None else list(factors.float())
        each = [
            without_zero_bias(rows_between(self.config, of_one, act, of_rows))
            for of_one, of_rows in zip(layers, numbers, strict=True)
        ]
        spec = each[0].spec
        if all(one.spec == spec for one in each):
            return each
        if spec.n % ROWS or factors is not None:
            why = "inputs that are scaled" if factors is not None else f"{spec.n} rows, no multiple of {ROWS}"
            raise SpecError(f"experts have {why}, and are of several formats; {LEAVE_DENSE}")
        rows = without_zero_bias(rows_between(self.config, [part for of_one in layers for part in of_one], act))
        return each_of(PackedWeight(interned(replace(rows.spec, experts=len(layers))), rows))

    def _of(self, tensors: Mapping[str, Tensor], projections: Sequence[str], number: int) -> list[dict[str, Tensor]]:
        """Returns the tensors of an expert's projections."""
        found: dict[str, dict[str, Tensor]] = {name: {} for name in projections}
        for kind, tensor in tensors.items():
            projection, _, short = kind.partition(".")
            if projection in found and short != self.scaling:
                found[projection][short] = tensor[number]
        return list(found.values())


def source_of_experts(checkpoint: Checkpoint, modules: Sequence[str]) -> ExpertsSource:
    """Returns what a checkpoint has of the experts of a layer.

    modules   the names of all of them

    Raises SpecError for experts of several formats, and for those that are saved in another way.
    """
    if checkpoint.format is None:
        return SavedSource(_specs(checkpoint, modules), _scales(checkpoint, modules))
    return ImportedSource(checkpoint.quantization_config, _tensors(checkpoint, modules), _scales(checkpoint, modules))


def _scales(checkpoint: Checkpoint, modules: Sequence[str]) -> tuple[ColumnScaling, ...]:
    """Returns what multiplies the tokens of all experts. Raises CheckpointError where they are multiplied by different
    numbers."""
    if not checkpoint.rotations:
        return ()
    return of_all({m: checkpoint.scalings_of(m) for m in modules if not _is_down(m, checkpoint.format is None)})


def _is_down(module: str, is_saved: bool) -> bool:
    """Tells whether a module of an expert does not multiply tokens."""
    *_, before, last = module.split(".")
    return before == LISTS["down_proj"] if is_saved else last in PROJECTIONS and PROJECTIONS[last][0] == "down_proj"


def _specs(checkpoint: Checkpoint, modules: Sequence[str]) -> dict[str, MatmulSpec]:
    found: dict[str, dict[str, MatmulSpec]] = {matrix: {} for matrix in LISTS.values()}
    for module in modules:
        matrix = module.split(".")[-2]
        if matrix not in found:
            raise SpecError(
                f"{module}: lowbit saves the experts of models that it knows as gate_up and down; {LEAVE_DENSE}"
            )
        found[matrix][module] = read_spec(checkpoint.tensors[module + EXTRA_STATE])
    return {matrix: check_one_spec(specs) for matrix, specs in found.items()}


def _tensors(checkpoint: Checkpoint, modules: Sequence[str]) -> dict[str, Tensor]:
    """Returns the tensors of one expert of another library, on meta, by kind; all have to be like the first."""
    found: dict[str, tuple[str, Tensor]] = {}
    for module, projection in _by_projection(modules):
        checkpoint.check_layer(module)
        scales = checkpoint.rotation_names_of(module) if _is_down(module, is_saved=False) else {}
        for short, full in (checkpoint.names_of(module) | scales).items():
            tensor = checkpoint.tensors[full]
            first, like = found.setdefault(f"{projection}.{short}", (full, tensor.to("meta")))
            if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                sizes = [f"{t.dtype} {list(t.shape)}" for t in (like, tensor)]
                raise SpecError(f"{first} is {sizes[0]}, and {full} {sizes[1]}; {LEAVE_DENSE}")
    return {kind: like for kind, (_, like) in found.items()}


def _by_projection(modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    for module in modules:
        path, _, projection = module.rpartition(".")
        if projection not in PROJECTIONS or not path.rpartition(".")[2].isdecimal():
            raise SpecError(
                f"{module}: of other libraries lowbit knows experts by names such as experts.0.gate_proj, and those of "
                "gpt-oss; serve this checkpoint without lowbit, or with transformers"
            )
        yield module, projection
