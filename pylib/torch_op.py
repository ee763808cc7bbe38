"""`torch.ops.lowbit.matmul`: a `Matmul` as an operator that torch.compile, export and fake tensors know.

Its last argument says which matmul: spec, target and schedule as JSON. So a graph that holds it can be stored
and run by another process, which compiles the matmul when it first meets it; such a process imports this module, which
registers the operator.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.dialect.errors import LowbitError, SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.registry import schedule_from_dict, schedule_to_dict
from lowbit.passes.target import Target
from lowbit.pylib.packed import TORCH, PackedWeight

if TYPE_CHECKING:
    from lowbit.pylib.matmul import Matmul

_LIBRARY = torch.library.Library("lowbit", "DEF")
_LIBRARY.define(
    "matmul(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, str kernel) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def describe(spec: MatmulSpec, target: Target, schedule: KernelSchedule | None) -> str:
    """The `kernel` argument of the operator."""
    parts = {"spec": asdict(spec), "target": target.name, "schedule": schedule and schedule_to_dict(schedule)}
    return json.dumps(parts)


@cache
def _parts(kernel: str) -> dict[str, Any]:
    try:
        parts = json.loads(kernel)
        spec, target, schedule = parts["spec"], parts["target"], parts["schedule"]
        return {"spec": MatmulSpec(**spec), "target": target, "schedule": schedule and schedule_from_dict(schedule)}
    except LowbitError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(f"kernel={kernel!r} must be a Matmul's description ({error})") from None


@lru_cache(maxsize=256)
def _resolve(kernel: str) -> Matmul:
    from lowbit.pylib.matmul import compile  # which imports this module

    return compile(**_parts(kernel))


def _matmul(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, kernel: str
) -> Tensor:
    mm = _resolve(kernel)
    return mm.untraced(x, PackedWeight(mm.spec, codes, scales, zeros, bias))


def _fake_matmul(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, kernel: str
) -> Tensor:
    spec: MatmulSpec = _parts(kernel)["spec"]
    return x.new_empty((*x.shape[:-1], spec.n), dtype=TORCH[spec.out_dtype])


_LIBRARY.impl("matmul", _matmul, "CPU")
_LIBRARY.impl("matmul", _matmul, "CUDA")
torch.library.register_fake("lowbit::matmul", _fake_matmul, lib=_LIBRARY)
