"""Tensor and expert parallelism: each process keeps its part of every low-bit layer, or its experts.

transformers plans it by styles: "colwise" layers give parts of y, "rowwise" layers get parts of x and their results are
added up. Its own hooks around a layer's forward do the communication. The parts are cut out of the packed weights,
after loading: so codes and scales are those of one device, and each process holds the whole low-bit model for a moment.
"""

from __future__ import annotations

import re
from typing import Any, cast

from torch import nn

from lowbit.dialect.errors import SpecError
from lowbit.pylib.nn.embedding import LowbitEmbedding, TiedLinear
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.fuse import FusedModule
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.nn.rotated import RotatedLinear

KINDS = LowbitLinear | RotatedLinear | LowbitEmbedding | TiedLinear | LowbitExperts
_OF_EXPERTS = {"moe_tp_experts": LowbitExperts.split_, "ep_dispatch_experts": LowbitExperts.keep_}
"""What the styles of transformers make of low-bit experts."""


def split(model: Any) -> None:
    """Cut the low-bit layers of a model as its plan says, where transformers has split it over several devices.

    Raises PackError and SpecError, which name the layer, where one can't be cut.
    """
    mesh = _mesh(model)
    if mesh is None:
        return
    rank, count = mesh.get_local_rank(), mesh.size()
    plan = {**model.tp_plan, **_experts_plan(model, count)}
    for name, module in list(model.named_modules()):
        if isinstance(module, FusedModule):
            raise SpecError(f"{name}: fused layers can't be split over devices; load a model that was not fused")
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None or not isinstance(module, KINDS):
            continue
        with naming(name):
            if isinstance(module, RotatedLinear):
                raise SpecError("a layer that is rotated at each call can't be split over devices; load it on one")
            if isinstance(module, LowbitEmbedding | TiedLinear):
                raise SpecError("low-bit embeddings can't be split over devices; load with embeddings=False")
            if isinstance(module, LowbitLinear):
                _split_layer(module, style, rank, count)
            elif style in _OF_EXPERTS:
                vars(module).pop("forward", None)  # its hook looks for sharded parameters, of which there are none
                _OF_EXPERTS[style](module, rank, count, mesh.get_group())
            else:
                raise SpecError(f"low-bit experts can't be split in the style {style!r}")


def _experts_plan(model: Any, count: int) -> dict[str, str]:
    """Returns which modules have their experts shared out, where that is asked for."""
    asked = getattr(getattr(model.config, "distributed_config", None), "ep_size", None) or 1
    if asked == 1:
        return {}
    if asked != count:
        raise SpecError(f"ep_size={asked}: low-bit experts are shared out among the processes of tp_size={count} alone")
    return dict(model.ep_plan)


def _mesh(model: Any) -> Any:
    """Returns the processes among which layers are split; None if there is one."""
    if (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    mesh = model._device_mesh
    return mesh if mesh.ndim == 1 else mesh["tp"]


def _split_layer(layer: LowbitLinear, style: str, rank: int, count: int) -> None:
    if style.startswith("colwise"):
        layer.split_(0, rank, count)
    elif style.startswith("rowwise"):
        layer.split_(1, rank, count)
    else:
        raise SpecError(f"a low-bit layer can't be split in the style {style!r}")
    cast(nn.Module, layer)._hf_quantized_needs_local_tp = True  # type: ignore[assignment]
