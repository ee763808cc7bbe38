"""What torch has to know of `torch.ops.lowbit.matmul` to trace it: its schema, and the shape and type of its result.

The last argument of the operator says which matmul: spec, target and schedule as JSON. So a graph that holds it can be
stored and run by another process, which compiles the matmul when it first meets it. `pylib.matmul` gives the operator
its implementation with `implement`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowbit.dialect.errors import LowbitError, SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.target import Target
from lowbit.pylib.packed import TORCH

_LIBRARY = torch.library.Library("lowbit", "DEF")
_LIBRARY.define(
    "matmul(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, str kernel) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def describe(spec: MatmulSpec, target: Target, schedule: Schedule | None) -> str:
    """Returns the `kernel` argument of the operator."""
    return json.dumps({"spec": asdict(spec), "target": target.name, "schedule": schedule and asdict(schedule)})


@cache
def parts(kernel: str) -> dict[str, Any]:
    """Returns the arguments of `compile` that a `kernel` argument describes; raises SpecError if it describes none."""
    try:
        given = json.loads(kernel)
        spec, target, schedule = given["spec"], given["target"], given["schedule"]
        return {"spec": MatmulSpec(**spec), "target": target, "schedule": schedule and Schedule.from_dict(schedule)}
    except LowbitError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(f"kernel={kernel!r} must be a Matmul's description ({error})") from None


def _fake_matmul(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, kernel: str
) -> Tensor:
    spec: MatmulSpec = parts(kernel)["spec"]
    return x.new_empty((*x.shape[:-1], spec.n), dtype=TORCH[spec.out_dtype])


def implement(matmul: Callable[..., Tensor]) -> None:
    """Make `matmul` what the operator runs on tensors that have values."""
    _LIBRARY.impl("matmul", matmul, "CPU")
    _LIBRARY.impl("matmul", matmul, "CUDA")


torch.library.register_fake("lowbit::matmul", _fake_matmul, lib=_LIBRARY)
