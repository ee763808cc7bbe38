"""Types of numbers, against NumPy's and PyTorch's idea of their width."""

from __future__ import annotations

import pytest
import torch

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.packed import TORCH


@pytest.mark.parametrize("name", ELEMENTS)
def test_widths(name: str) -> None:
    element = ELEMENTS[name]
    assert element.bytes == torch.empty(0, dtype=TORCH[name]).element_size() and element.bits == 8 * element.bytes
    assert element.per_vector * element.bytes == 16 and element.per_panel * element.bytes == 128
    assert element.mlir == (name if name in ("f16", "bf16", "f32") else "i8")


def test_the_activation_of_a_spec() -> None:
    assert MatmulSpec(16, 64, "u4", act="bf16").x is ELEMENTS["bf16"]
