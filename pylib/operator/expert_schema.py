"""Declares `torch.ops.lowbit.expert_matmul` to torch: one launch for the slots of all experts (`ExpertMatmul`), so that
torch.compile can trace it.

Its `kernel` argument is that of `torch.ops.lowbit.matmul.packed`: the matmul as text. There is no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.targets import parse_target
from lowbit.pylib.operator.schema import parts
from lowbit.pylib.runtime.expert_matmul import expert_matmul
from lowbit.pylib.torch_types import TORCH

_LIBRARY = torch.library.Library("lowbit", "FRAGMENT")
_LIBRARY.define(
    "expert_matmul(Tensor x, Tensor rows, Tensor tiles, Tensor[] weight, str kernel, int tile) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def multiply(x: Tensor, rows: Tensor, tiles: Tensor, weight: Sequence[Tensor], kernel: str, tile: int) -> Tensor:
    """Returns y [slots, n / experts]: what the operator runs on tensors that have values."""
    given = parts(kernel)
    return expert_matmul(given["spec"], parse_target(given["target"]))(x, rows, tiles, weight, tile)


def _fake(x: Tensor, rows: Tensor, tiles: Tensor, weight: Sequence[Tensor], kernel: str, tile: int) -> Tensor:
    spec: MatmulSpec = parts(kernel)["spec"]
    return x.new_empty((rows.shape[0], spec.outputs), dtype=TORCH[spec.out_dtype])


torch.library.register_fake("lowbit::expert_matmul", _fake, lib=_LIBRARY)
for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("expert_matmul", multiply, _device)
