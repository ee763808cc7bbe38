"""Files of other libraries with other bytes within their values: what is loaded is what an independent decoder reads.

    pytest -m slow pytests/models/test_changed_values.py     more of them
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import decoders
import numpy as np
import pytest
import torch
from decoders import DECODERS, Array

from lowbit import CheckpointError, open_checkpoint
from lowbit.pylib.weights.packed import PackedWeight

FIXTURES = Path(__file__).parents[1] / "fixtures/checkpoints"
NAMES = sorted(folder.name for folder in FIXTURES.iterdir() if folder.name != "hqq-4-axis-0")
HQQ = {
    *("axis", "channel_wise", "compute_dtype", "encoded_state_dict", "group_size", "nbits", "offload_meta", "optimize"),
    *("packing", "quant_scale", "quant_zero", "round_zero", "stores_quant_config", "unpack_view_dtype"),
    "view_as_float",
}
STRUCTURE = {
    *(*HQQ, "shape", "g_idx", "in_perm", "row_offsets", "weight_shape", "weight_format", "q_groups", "q_invperm"),
}
"""Tensors that say where values are."""
NEAR = 2.0**-20
"""How far f32 may be from f64, of the size of what is added up. Another code is further away by far."""
TINY = 1e-42
"""How far it may be below the smallest normal number of f32."""


def short_name(name: str) -> str:
    """Returns what a tensor is called in its layer."""
    return name.split("up_proj")[1][1:]


def change(path: Path, chance: random.Random) -> None:
    """Give a few bytes of one tensor with values others."""
    data, (_, places) = bytearray(path.read_bytes()), decoders.read_file(path)
    values = [
        place
        for name, place in places.items()
        if place[0] < place[1] and short_name(name) not in STRUCTURE and "quant_state" not in name
    ]
    start, end = chance.choice(values)
    for _ in range(chance.choice((1, 2, 8))):
        place = chance.randrange(start, end)
        data[place] = chance.choice((data[place] ^ 1 << chance.randrange(8), chance.randrange(256)))
    path.write_bytes(data)


def copies(name: str, folder: Path, count: int) -> Iterator[Path]:
    """Yields a checkpoint again and again, with other changes each time."""
    shutil.copy(FIXTURES / name / "config.json", folder)
    chance = random.Random(name)
    for _ in range(count):
        shutil.copy(FIXTURES / name / "model.safetensors", folder)
        change(folder / "model.safetensors", chance)
        yield folder


def loaded(folder: Path) -> list[PackedWeight]:
    checkpoint = open_checkpoint(folder)
    (module,) = checkpoint.modules
    if checkpoint.quantization_config["quant_method"] == "mxfp4":
        return checkpoint.load_experts(module, "bf16")
    return [checkpoint.load(module, "bf16")]


def decoded(folder: Path) -> tuple[Array, Array, Array | None]:
    """Returns what the independent decoder makes of a checkpoint: the weight, the sizes of its terms, and the bias."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = {short_name(name): t for name, t in decoders.read_file(folder / "model.safetensors")[0].items()}
    with np.errstate(all="ignore"):
        return *DECODERS[config["quant_method"]](config, tensors), tensors.get("bias")


def agrees(found: Array, expected: Array, size: Array) -> bool:
    """Tells whether f32 numbers are those of the decoder; not finite where these are none, or too large for f32."""
    with np.errstate(all="ignore"):
        finite = np.isfinite(expected) & (size < float(np.finfo(np.float32).max))
        near = np.abs(found - expected) <= NEAR * size + TINY
    return bool(np.where(finite, near, ~np.isfinite(found) | near).all())


def check(name: str, folder: Path, count: int) -> int:
    """Compares copies with what the decoder reads; returns how many were refused, for numbers that are not finite."""
    refused = 0
    for copy in copies(name, folder, count):
        try:
            weights = loaded(copy)
        except CheckpointError:
            refused += 1
            continue
        expected, size, bias = decoded(copy)
        assert agrees(torch.cat([w.dequantize() for w in weights]).numpy(), expected, size)
        if bias is not None:
            given = torch.from_numpy(bias.reshape(-1).astype(np.float32)).bfloat16()
            assert torch.equal(bits_of(torch.cat([cast(torch.Tensor, w.bias) for w in weights])), bits_of(given))
    return refused


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num().view(torch.int16)


@pytest.mark.parametrize("name", NAMES)
def test_changed_files(name: str, tmp_path: Path) -> None:
    """Five of each, more than 500 in all."""
    assert check(name, tmp_path, 5) < 5


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_changed_files(name: str, tmp_path: Path) -> None:
    assert check(name, tmp_path, 100) < 60


@pytest.mark.parametrize("name", NAMES)
def test_the_decoder_agrees_with_the_library(name: str) -> None:
    expected = decoders.read_file(FIXTURES / name / "expected.safetensors")[0]
    theirs = next(value for key, value in expected.items() if not key.endswith("half"))
    dense, size, _ = decoded(FIXTURES / name)
    step = {np.dtype(np.float16): 2.0**-10}.get(theirs.dtype, NEAR if theirs.dtype == np.float32 else 2.0**-7)
    assert (np.abs(dense - theirs.reshape(dense.shape)) <= step * np.abs(dense) + NEAR * size + 1e-7).all()
