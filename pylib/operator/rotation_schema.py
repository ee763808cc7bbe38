"""Declares the rotation of numbers by a Hadamard matrix to torch, so that torch.compile can trace it:
`torch.ops.lowbit.hadamard`. It is one launch on a GPU (`pylib.layer.hadamard`), and its gradient another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.pylib.layer.hadamard import of_text, rotated
from lowbit.pylib.runtime.devices import target_at

_LIBRARY = torch.library.Library("lowbit", "FRAGMENT")


def hadamard(x: Tensor, signs: Tensor | None, matrix: str, target: str) -> Tensor:
    """Returns x [..., blocks * size] times a Hadamard matrix, given as `HadamardMatrix.text`, block by block.

    signs    [size], 1 and -1, where the matrix has some
    target   where it runs, or "" for the target of the device that x is on
    """
    return rotated(x, signs, of_text(matrix), target or target_at(x.get_device()))


def _fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None, str, str], output: Tensor) -> None:
    _, ctx.signs, ctx.matrix, ctx.target = inputs


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
    """Returns dy times the transpose; signs are constants."""
    turned = of_text(ctx.matrix).transposed.text
    return torch.ops.lowbit.hadamard(dy, ctx.signs, turned, ctx.target), None, None, None


_LIBRARY.define(
    "hadamard(Tensor x, Tensor? signs, str matrix, str target) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("hadamard", hadamard, _device)
torch.library.register_fake("lowbit::hadamard", _fake, lib=_LIBRARY)
torch.library.register_autograd("lowbit::hadamard", _gradient, setup_context=_save, lib=_LIBRARY)
