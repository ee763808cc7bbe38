"""The scales that AWQ gives the columns of a model's layers: the same for all layers that read the same norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.pylib.nn.fold import NOTHING, Fold, find_folds
from lowbit.pylib.nn.linear_like import as_linear
from lowbit.pylib.nn.observe import calibrations
from lowbit.pylib.nn.plan import Planned
from lowbit.pylib.quantization.awq import shared_scales
from lowbit.pylib.quantization.calibration import Calibration
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.quantization.grid import Grid


@dataclass(frozen=True)
class ColumnScales:
    """The changes that AWQ makes to a model, apart from rounding.

    of      scales [k] of a layer's columns, by its name; layers that are not scaled are missing
    rows    what the rows [n] of a layer are divided by, by its name
    notes   what the report says of each layer
    norms   the norms that the scales are folded into, with their new parameters
    """

    of: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    norms: list[tuple[nn.Module, dict[str, Tensor]]] = field(default_factory=list)

    def fold_(self) -> None:
        """Give the norms their new parameters."""
        for norm, parameters in self.norms:
            for name, value in parameters.items():
                norm.get_parameter(name).copy_(value)


def column_scales(
    model: nn.Module,
    planned: Sequence[Planned],
    inputs: Sequence[Any],
    device: torch.device | str | None,
    sources: Sequence[Planned],
) -> ColumnScales:
    """Returns the scales of layers that AWQ quantizes; nothing is changed yet.

    sources   all modules that are quantized by any method: rows of linear layers may be divided before they are
    """
    entries = {entry.names[0]: entry for entry in planned}
    layers = {name: cast(nn.Linear, entry.module) for name, entry in entries.items()}
    divisible = {entry.names[0]: entry.module for entry in sources if _may_be_divided(entry)}
    folds, reasons = find_folds(model, layers, inputs, cast("dict[str, nn.Linear]", divisible))
    found = ColumnScales(notes=reasons)
    by_layer = {fold.layers[0]: fold for fold in folds}
    for name, seen in calibrations(model, {name: layers[name] for name in by_layer}, inputs):
        _add(found, by_layer[name], entries, seen.data, device)
    return found


def _add(
    found: ColumnScales,
    fold: Fold,
    entries: Mapping[str, Planned],
    data: Calibration,
    device: torch.device | str | None,
) -> None:
    """Choose the scales for the layers of a fold."""
    where = torch.device(device or entries[fold.layers[0]].module.get_parameter("weight").device)
    scales = shared_scales([_part(entries[name], where) for name in fold.layers], data.to(where))
    note = f"{NOTHING}no scales make the error less"
    if not bool((scales == 1).all()):
        if isinstance(fold.source, nn.Linear):
            found.rows[fold.name] = scales
        else:
            parameters, scales = fold.parameters(scales)
            found.norms.append((fold.source, parameters))
        found.of.update(dict.fromkeys(fold.layers, scales))
        note = f"column scales are in {fold.name}"
    found.notes.update(dict.fromkeys(fold.layers, note))


def _may_be_divided(entry: Planned) -> bool:
    """Tells whether a factor per row changes nothing of how a layer is rounded: its scales take it up."""
    config = cast(QuantConfig, entry.config)
    return type(entry.module) is nn.Linear and len(entry.names) == 1 and config.scale_type in ("f16", "bf16", "f32")


def _part(entry: Planned, device: torch.device) -> tuple[Tensor, Grid]:
    """Returns a layer's weight, and how it is rounded."""
    weight = as_linear(entry.module).weight.detach().to(device)
    return weight, Grid(cast(QuantConfig, entry.config), weight.shape[1], device)
