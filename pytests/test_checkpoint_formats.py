"""Checkpoints of other libraries: weights are those that the libraries dequantize, bit for bit, and run.

The files are made by `fixtures/make_checkpoints.py`, which runs the libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated import matmul_is_right
from safetensors.torch import load_file
from torch import Tensor

import lowbit
from lowbit.pylib import reference
from lowbit.pylib.checkpoints.checkpoint import open_checkpoint
from lowbit.pylib.packed import PackedWeight

FIXTURES = Path(__file__).parent / "fixtures/checkpoints"
REFUSED = {
    "hqq-4-axis-0": "axis=0: groups must lie along k",
    "gptq-4-act-order": "g_idx puts columns of one group apart",
    "gptq-3-act-order": "g_idx puts columns of one group apart",
    "ct-nvfp4": "nvfp4-pack-quantized can't be imported yet",
}
NAMES = sorted(folder.name for folder in FIXTURES.iterdir())


def weights(name: str) -> Iterator[tuple[PackedWeight, Tensor]]:
    """Yields the weights of a checkpoint, and what its library makes of each."""
    checkpoint = open_checkpoint(FIXTURES / name)
    expected = load_file(FIXTURES / name / "expected.safetensors")
    for module in checkpoint.modules:
        if module in expected:  # all experts in one tensor
            yield from zip(checkpoint.load_experts(module, "bf16"), expected[module])
        else:
            yield checkpoint.load(module), expected[f"{module}.weight"]


def dense(w: PackedWeight) -> Tensor:
    """Returns the weight that its numbers stand for, in f32."""
    tensors = {"scales": w.unpack_scales(), "zeros": w.unpack_zeros()}
    return torch.from_numpy(reference.dequantize(w.spec, w.unpack(), **tensors)).float()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_values_are_those_of_the_library(name: str) -> None:
    found = list(weights(name))
    assert found
    for w, expected in found:
        assert torch.equal(dense(w).to(expected.dtype), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_imported(name: str) -> None:
    with pytest.raises(lowbit.CheckpointError, match=f"model.safetensors: model.layers.0.*: {REFUSED[name]}"):
        list(weights(name))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_layers_run(name: str) -> None:
    for w, _ in weights(name):
        layer = lowbit.LowbitLinear.from_packed(w)
        x = reference.random_inputs(w.spec, 3)[0]
        zeros = None if w.zeros is None else w.unpack_zeros()
        numbers = (x, w.unpack(), w.unpack_scales(), zeros, w.bias)
        assert matmul_is_right(layer(x), w.spec, numbers)
