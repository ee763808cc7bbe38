"""What multiplies the inputs of experts at each call, in files of ModelOpt's AWQ and SmoothQuant, and where it goes.

All experts of a layer have the same tokens, and ModelOpt gives their gate and up projections the same numbers
(requantize_resmooth_fused_llm_layers in modelopt/torch/export/unified_export_hf.py), so tokens are multiplied once.
Numbers in front of a down projection multiply rows of the up projection instead, as a gate is linear in these:

    down(s * act(g) * u) = down(act(g) * (s * u))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.checkpoint import Checkpoint
from lowbit.pylib.checkpoints.expert_places import Place
from lowbit.pylib.checkpoints.transforms import are_alike
from lowbit.pylib.nn.dense_experts import MATRICES, dense_weight, is_linear_in_up
from lowbit.pylib.nn.rotated import ColumnScaling, Rotation


@dataclass(frozen=True)
class ExpertScales:
    """What is done to the inputs of experts.

    inputs   what multiplies tokens before they meet experts
    rows     f32 [inner], for the rows of the up projection, by expert
    """

    inputs: tuple[Rotation, ...] = ()
    rows: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])


def scales_of_experts(checkpoint: Checkpoint, places: Mapping[Place, str], dense: nn.Module) -> ExpertScales:
    """Returns what is done to the inputs of the experts of a layer.

    places   the names of their layers in the checkpoint
    dense    the experts of the model

    Raises CheckpointError for scales of tokens that differ, for others where the gate is not linear, and for rotations.
    """
    if not (checkpoint.rotations or checkpoint.transforms):
        return ExpertScales()
    found = {place: _inputs(checkpoint, name, dense, place) for place, name in places.items()}
    tokens = {places[place]: inputs for place, inputs in found.items() if place.matrix == MATRICES[0]}
    rows = {
        place.expert: inputs[0].scale.float()
        for place, inputs in found.items()
        if place.matrix == MATRICES[1] and inputs and place.expert is not None
    }
    if rows and not is_linear_in_up(dense):
        name = next(places[place] for place in places if place.matrix == MATRICES[1])
        raise CheckpointError(f"inputs of {name} are scaled, and its gate is not linear in the up projection")
    return ExpertScales(of_all(tokens), rows)


def _inputs(checkpoint: Checkpoint, name: str, dense: nn.Module, place: Place) -> tuple[ColumnScaling, ...]:
    n, k = dense_weight(dense, place.matrix).shape[1:]
    rotations = checkpoint.rotations_of(name, n // place.parts, k)
    scalings = tuple(each for each in rotations.inputs if isinstance(each, ColumnScaling))
    is_stack = bool(scalings) and place.expert is None
    if rotations.outputs or len(scalings) < len(rotations.inputs) or len(scalings) > 1 or is_stack:
        raise CheckpointError(f"{name} is rotated at each call; inputs of experts can be scaled, one by one, alone")
    return scalings


def of_all(tokens: Mapping[str, tuple[ColumnScaling, ...]]) -> tuple[ColumnScaling, ...]:
    """Returns what multiplies the tokens of all experts, of what each of their layers says.

    Raises CheckpointError, which names two, where they differ.
    """
    (first, inputs), *others = tokens.items()
    for name, other in others:
        if not are_alike(inputs, other):
            raise CheckpointError(
                f"inputs of {first} and of {name} are scaled in different ways; experts of a layer have the same "
                "tokens, which are scaled once for all of them"
            )
    return inputs
