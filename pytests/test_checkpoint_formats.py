"""Checkpoints of other libraries: weights are those that the libraries dequantize, bit for bit, and run.

The files are made by `fixtures/make_checkpoints.py`, which runs the libraries.
"""

from __future__ import annotations

import copy
import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import lowbit
from lowbit import CheckpointError
from lowbit.pylib import reference
from lowbit.pylib.checkpoints import unpack
from lowbit.pylib.checkpoints.checkpoint import open_checkpoint
from lowbit.pylib.weights.packed import PackedWeight

FIXTURES = Path(__file__).parent / "fixtures/checkpoints"
REFUSED = {
    "hqq-4-axis-0": "axis=0: groups must lie along k",
}
NAMES = sorted(folder.name for folder in FIXTURES.iterdir())


def weights(name: str, device: str = "cpu") -> Iterator[tuple[PackedWeight, Tensor]]:
    """Yields the weights of a checkpoint, and what its library makes of each."""
    checkpoint = open_checkpoint(FIXTURES / name)
    expected = load_file(FIXTURES / name / "expected.safetensors")
    for module in checkpoint.modules:
        if module in expected:  # all experts in one tensor
            yield from zip(checkpoint.load_experts(module, "bf16", device), expected[module])
        else:
            yield checkpoint.load(module, device=device), expected[f"{module}.weight"]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_values_are_those_of_the_library(name: str) -> None:
    found = list(weights(name))
    assert found
    for w, expected in found:
        assert torch.equal(w.dequantize().to(expected.dtype), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_imported(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"model.safetensors: model.layers.0.*: {REFUSED[name]}"):
        list(weights(name))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_layers_run(name: str) -> None:
    for w, _ in weights(name):
        x = reference.random_inputs(w.spec, 3)[0]
        assert is_right(lowbit.LowbitLinear.from_packed(w)(x), w, x)


def test_eight_bits_of_bitsandbytes_in_another_order() -> None:
    """Versions of before 2025 could save weights as they were laid out for a GPU."""
    checkpoint = open_checkpoint(FIXTURES / "bnb-int8")
    (module,) = checkpoint.modules
    tensors = {short: checkpoint.tensors[full] for short, full in checkpoint.names_of(module).items()}
    tensors["weight_format"] = torch.tensor(2, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="weight_format must be 0, rows as they are"):
        lowbit.import_weight(checkpoint.quantization_config, tensors)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("at_once", [1, 100, 1 << 24])
def test_streams_of_codes(bits: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is one long number, of which each code is a digit."""
    monkeypatch.setattr(unpack, "AT_ONCE", at_once)
    for count in (1, 7, 32, 45):
        words = torch.randint(-(1 << 31), 1 << 31, (5, -(-count * bits // 32)), dtype=torch.int32)
        numbers = [int.from_bytes(row.numpy().tobytes(), "little") for row in words]
        expected = [[number >> (i * bits) & ((1 << bits) - 1) for i in range(count)] for number in numbers]
        assert unpack.from_stream(words, bits, count).tolist() == expected
        assert unpack.from_columns(words.t(), bits, count).t().tolist() == expected
    with pytest.raises(CheckpointError, match="8 bytes a row can't hold 65 codes of 1 bits"):
        unpack.from_stream(torch.zeros(2, 2, dtype=torch.int32), 1, 65)


def test_gptq_with_exceptions() -> None:
    """"dynamic" gives some layers other bits and groups than the configuration says."""
    checkpoint = open_checkpoint(FIXTURES / "gptq-3")
    (module,) = checkpoint.modules
    tensors = {short: checkpoint.tensors[full] for short, full in checkpoint.names_of(module).items()}
    config = checkpoint.quantization_config | {"bits": 4, "group_size": 64}
    with pytest.raises(CheckpointError, match="12 rows of qweight are not k=128 codes of 4 bits"):
        lowbit.import_weight(config, tensors)
    w = lowbit.import_weight(config | {"dynamic": {"+:.*up_proj": {"bits": 3, "group_size": 32}}}, tensors)
    assert torch.equal(w.dequantize(), checkpoint.load(module).dequantize())


@pytest.mark.parametrize(("name", "groups"), [("bnb-nf4-nested-wide", 4), ("bnb-nf4-nested", None)])
def test_nested_scales_stay_small(name: str, groups: int | None) -> None:
    """Scales of NF4 are bytes with a second level, where that takes less than f32 scales."""
    w, _ = next(weights(name))
    assert (w.spec.bilevel.groups if w.spec.bilevel else None) == groups
    assert w.spec.scale == ("lut8" if groups else "f32")
    taken = sum(t.nbytes for slot, t in w.items() if slot.startswith("scale"))
    assert taken == 32 * w.spec.groups * (3 if groups else 4)  # 24 rows in blocks of 16


EMULATED = (
    "gptq-3", "gptq-4-act-order", "awq", "hqq-4", "bnb-fp4", "bnb-nf4-nested-wide", "ct-pack-5-asym", "ct-int8",
    "ct-mxfp6", "ct-nvfp4", "fp8-block", "mxfp4", "spqr-ptcsr", "torchao-int4",
)  # fmt: skip


@pytest.mark.parametrize("name", EMULATED)
def test_kernels_of_a_gpu(name: str) -> None:
    """One of each kind in the emulator."""
    w, _ = next(weights(name))
    x = reference.random_inputs(w.spec, 2)[0]
    assert is_right(lowbit.compile(w.spec, "emulator:sm_90a")(x, w), w, x)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_import_on_a_gpu(name: str) -> None:
    """Weights are unpacked and packed where they go, and are the same there."""
    on_gpu = [w for w, _ in weights(name, "cuda")]
    on_cpu = [w for w, _ in weights(name)]
    for w, expected in zip(on_gpu, on_cpu, strict=True):
        assert w.device.type == "cuda" and w.spec == expected.spec
        assert all(torch.equal(t.cpu(), expected[tensor]) for tensor, t in w.items())


def is_right(y: Tensor, w: PackedWeight, x: Tensor) -> bool:
    """Tells whether y is the product of x with a weight and its bias, but for the rounding of correct kernels."""
    numbers = {slot.name: w.unpack_tensor(slot.name) for slot in w.spec.given_tensors[1:]}
    expected = reference.matmul(w.spec, x, w.unpack(), **numbers)
    return bool(reference.agrees(y, expected, reference.tolerance(w.spec, x, w.unpack(), **numbers)).all())


# -- damaged files, and configurations that lie


SEEDS = {name: i for i, name in enumerate(NAMES)}


@pytest.mark.parametrize("name", NAMES)
def test_mutations(name: str) -> None:
    """Whatever is wrong is a CheckpointError, or gives a weight; it takes little memory."""
    chance = random.Random(SEEDS[name])
    checkpoint = open_checkpoint(FIXTURES / name)
    config, (module,) = checkpoint.config["quantization_config"], checkpoint.modules
    tensors = {short: checkpoint.tensors[full] for short, full in checkpoint.names_of(module).items()}
    load = lowbit.import_experts if name == "mxfp4" else lowbit.import_weight
    refused, used = 0, peak_memory()
    for _ in range(60):
        try:
            load(mutated_config(config, chance), mutated_tensors(tensors, chance), "bf16")
        except CheckpointError:
            refused += 1
    assert refused > 5
    assert peak_memory() - used < 64 << 20


def mutated_tensors(tensors: dict[str, Tensor], chance: random.Random) -> dict[str, Tensor]:
    """Returns tensors of which one has other bytes, another name, another type or another shape, or is gone."""
    result = {name: t.clone() for name, t in tensors.items()}
    name = chance.choice(list(result))
    t = result[name]
    match chance.randrange(8):
        case 0 | 1:
            data = t.view(-1).view(torch.uint8)
            for _ in range(chance.randint(1, 4) if len(data) else 0):
                data[chance.randrange(len(data))] = chance.choice((0, 0x7F, 0xFF, chance.randrange(256)))
        case 2:
            del result[name]
        case 3:
            result[name] = result[chance.choice(list(result))]
        case 4:
            result[name] = t.view(-1)[: chance.randint(0, t.numel())]
        case 5:
            result[name] = t[chance.randint(0, len(t)) :] if t.ndim else t[None]
        case 6:
            result[name] = t.to(chance.choice((torch.int32, torch.float16, torch.float32, torch.bool, torch.int64)))
        case _:
            result[name] = t.view(torch.uint8) if t.ndim else t
    return result


def mutated_config(config: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Returns a configuration that half of the time has one other value."""
    result = copy.deepcopy(config)
    places = [(result, key) for key in result if key != "quant_method"]
    for group in result.get("config_groups", {}).values():
        places += [(group["weights"], key) for key in group["weights"]] + [(group, "weights")]
    if places and chance.random() < 0.5:
        place, key = chance.choice(places)
        place[key] = chance.choice(
            (0, -1, 1, 3, 4, 64, 1 << 40, 1 << 80, None, "4", [], {}, [0, 0], [1 << 70, 1], 2.5, True)
        )
    return result


def peak_memory() -> int:
    """Returns the most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("name", ["gptq-4", "hqq-3", "mxfp4"])
def test_damaged_files(name: str, tmp_path: Path) -> None:
    """A file that is cut short, or has other bytes in its header, is a CheckpointError or gives a weight."""
    chance, whole = random.Random(1), (FIXTURES / name / "model.safetensors").read_bytes()
    shutil.copy(FIXTURES / name / "config.json", tmp_path)
    refused = 0
    for number in range(200):
        data = bytearray(whole)
        if number % 4 == 0:
            del data[chance.randrange(len(data)) :]
        else:
            for _ in range(chance.randint(1, 3)):
                data[chance.randrange(1000)] = chance.randrange(256)
        (tmp_path / "model.safetensors").write_bytes(data)
        try:
            checkpoint = open_checkpoint(tmp_path)
            for module in checkpoint.modules:
                checkpoint.load(module)
        except CheckpointError as error:
            assert str(error).startswith(str(tmp_path))
            refused += 1
    assert refused > 50
