"""Where the quantized layers of a checkpoint belong among the experts of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.nn.dense_experts import LISTS, MATRICES, count_of, is_experts

PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
"""The layers of an expert where files have one for each, as before transformers 5: for each matrix of an expert, the
layers whose rows it has, one below the other, by the names of either kind of files."""
PROJECTIONS = {
    name: (matrix, part, len(names))
    for matrix, kinds in PARTS.items()
    for names in kinds
    for part, name in enumerate(names)
}
"""By the name of a layer: its matrix, which part of that the layer is, and the number of parts."""


class Place(NamedTuple):
    """Where a quantized layer of a checkpoint belongs among the experts of a model.

    owner    the name of the module with the experts
    matrix   one of MATRICES
    expert   None: the layer is a stack of all
    part     which of several layers it is whose rows make the matrix
    parts    how many there are of these
    """

    owner: str
    matrix: str
    expert: int | None
    part: int
    parts: int


def place_of(name: str, modules: Mapping[str, nn.Module]) -> Place | None:
    """Returns where a layer belongs among the experts of a model; None for a layer of its own.

    It is a stack of all experts, "experts.down_proj"; one of lowbit's own, "experts.down.3"; or one of another library,
    which has a module for each expert, "experts.3.down_proj".
    """
    path, _, last = name.rpartition(".")
    upper, _, middle = path.rpartition(".")
    matrices = {short: matrix for matrix, short in LISTS.items()}
    if last in MATRICES and _has_experts(modules, path):
        return Place(path, last, None, 0, 1)
    if last.isdecimal() and middle in matrices and _has_experts(modules, upper):
        return Place(upper, matrices[middle], int(last), 0, 1)
    if middle.isdecimal() and last in PROJECTIONS and _has_experts(modules, upper):
        return Place(upper, PROJECTIONS[last][0], int(middle), *PROJECTIONS[last][1:])
    return None


def _has_experts(modules: Mapping[str, nn.Module], name: str) -> bool:
    return name in modules and is_experts(modules[name])


def check_places(owner: str, dense: nn.Module, places: Sequence[Place]) -> None:
    """Raise CheckpointError unless layers are all that the experts of a model are made of."""
    count = count_of(dense)
    wanted = {(matrix, expert) for matrix in MATRICES for expert in range(count)}
    found: dict[tuple[str, int | None], set[int]] = {}
    for place in places:
        found.setdefault((place.matrix, place.expert), set()).add(place.part)
    if all(expert is None for _, expert in found):
        wanted = {(matrix, None) for matrix in MATRICES}
    parts = {place.matrix: place.parts for place in places}
    for matrix, expert in sorted(wanted ^ found.keys(), key=str):
        said = "lacks" if (matrix, expert) in wanted else "has"
        what = "a stack of all" if expert is None else f"expert {expert}"
        raise CheckpointError(f"{owner}: the checkpoint {said} {matrix} of {what}; the model has {count} experts")
    for (matrix, expert), have in found.items():
        if len(have) < parts[matrix]:
            raise CheckpointError(f"{owner}: the checkpoint lacks a part of {matrix} of expert {expert}")
