"""Entries of a quantization_config that change what a model computes, and that no reader of formats/ implements.

A library may multiply the inputs of a layer by a rotation, or scale them, before its weight sees them. The weight alone
is then another matrix than the model's, though all of its tensors can be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from lowbit.dialect.errors import CheckpointError

TELLING = re.compile(
    r"(^|_)(transforms?|rotat(ion|ions|e|ed)|hadamard|smoothquant|quarot|spinquant|pre_(quant_)?scale)(_|$)"
)
"""Found in the names of entries that say that a weight or an activation is transformed."""
NOTES = ("meta",)
"""Entries that say how a checkpoint was made, and not what it is."""
TRANSFORMS = "transform_config"
MERGED = ("weight_input", "weight_output")
"""Where compressed-tensors merges a transform into the weight, so that nothing is left to do."""


def check_config(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an entry, at any depth, that changes inputs or outputs of layers."""
    for path, value in _entries(config):
        if path.rpartition(".")[2] == TRANSFORMS and all(place in MERGED for place in _places(value)):
            continue
        raise CheckpointError(
            f"the quantization_config has {path}, which changes what goes into layers or comes out of them, and is not "
            "implemented; use a checkpoint without"
        )


def _entries(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the entries that say so and are not off, with their paths; nothing of what is in one of them."""
    for name, value in config.items():
        if name in NOTES or _is_off(value):
            continue
        if TELLING.search(str(name).lower()):
            yield f"{path}{name}", value
        elif isinstance(value, Mapping):
            yield from _entries(cast(Mapping[str, Any], value), f"{path}{name}.")


def _is_off(value: object) -> bool:
    """Tells whether an entry says that there is nothing: null, "none", or that it is not enabled."""
    match value:
        case str():
            return value.lower() in ("", "none")
        case {"enabled": enabled}:
            return not enabled
        case _:
            return not value


def _places(transforms: object) -> list[object]:
    """Returns where each transform is applied; something unknown where that can't be seen."""
    match transforms:
        case {"config_groups": dict(groups)}:
            applied = [group.get("apply") if isinstance(group, dict) else None for group in groups.values()]
            each = [one for some in applied for one in (some if isinstance(some, list) else [None])]
            return [one.get("location") if isinstance(one, dict) else None for one in each]
        case _:
            return [None]
