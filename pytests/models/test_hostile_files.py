"""Files that somebody has damaged, of every format: whatever is wrong is a CheckpointError, and takes little memory.

Headers, JSON, whole tensors and the places in them are changed in the files, which are then read as users do it.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit import CheckpointError
from lowbit.pylib.checkpoints.checkpoint import open_checkpoint
from pytests.models.test_checkpoint_formats import FIXTURES, NAMES, mutated_tensors, peak_memory

VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 3, 1 << 31, 1 << 63, 1 << 70, 2.5, 1e400, True, None, "x", "F16", "I64", [], {}, [0]),
    *([1 << 40, 1 << 40], [-1, 2], [[]], {"a": 1}),
)
LAST = "model.safetensors"
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def read_all(folder: Path) -> None:
    """Read all that a checkpoint has."""
    checkpoint = open_checkpoint(folder)
    for module in checkpoint.modules:
        shapes = [checkpoint.tensors.shape(name) for name in checkpoint.names_of(module).values()]
        if max(map(len, shapes), default=0) > 2 and checkpoint.quantization_config.get("quant_method") == "mxfp4":
            checkpoint.load_experts(module, "bf16")
        else:
            checkpoint.load(module, "bf16")
    for name in checkpoint.dense:
        checkpoint.tensors[name]


def places_of(tree: object) -> list[tuple[Any, Any]]:
    """Returns the entries of a JSON tree, each by what holds it."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    found: list[tuple[Any, Any]] = [(tree, key) for key in keys]
    return found + [place for key in keys for place in places_of(tree[key])]  # type: ignore[index]


def changed_json(text: bytes, chance: random.Random) -> bytes:
    """Returns JSON of which one entry is another, of another place or gone, or some bytes are."""
    tree = json.loads(text)
    match chance.randrange(4):
        case 0:
            data = bytearray(text)
            for _ in range(chance.randint(1, 3)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            return bytes(data)
        case 1:
            holder, key = chance.choice(places_of(tree))
            del holder[key]
        case 2:
            (one, place), (other, key) = (chance.choice(places_of(tree)) for _ in range(2))
            one[place] = copy.deepcopy(other[key])
        case _:
            holder, key = chance.choice(places_of(tree))
            holder[key] = chance.choice(VALUES)
    return json.dumps(tree).encode()


def damage(folder: Path, chance: random.Random) -> None:
    """Change one thing in the files of a checkpoint."""
    file, config = folder / LAST, folder / "config.json"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    match chance.randrange(6):
        case 0:
            file.write_bytes(data[: chance.randrange(len(data))])
        case 1:
            header = changed_json(data[8 : 8 + size], chance)
            file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
        case 2:
            given = chance.choice((0, 1, size - 1, size + 1, len(data), 1 << 40, (1 << 64) - 1))
            file.write_bytes(given.to_bytes(8, "little") + data[8:])
        case 3:
            config.write_bytes(changed_json(config.read_bytes(), chance))
        case 4:
            full = load_file(file)
            names = {name.rpartition(".")[2]: name for name in full}
            short = mutated_tensors({name: full[names[name]] for name in names}, chance)
            save_file({names[name]: t.contiguous().clone() for name, t in short.items()}, file)
        case _:
            extreme(file, chance)


def extreme(file: Path, chance: random.Random) -> None:
    """Give some numbers of one tensor the largest or smallest values, as of places that are beyond it."""
    tensors = load_file(file)
    t = tensors[chance.choice(sorted(tensors))].view(-1)
    raw = t.view(BITS[t.itemsize])
    for _ in range(chance.choice((1, 8, 64)) if len(raw) else 0):
        half = 1 << (8 * t.itemsize - 1)
        raw[chance.randrange(len(raw))] = chance.choice((-half, half - 1, -1, half >> 1))
    save_file(tensors, file)


def campaign(name: str, folder: Path, count: int) -> tuple[int, int]:
    """Reads damaged copies of a checkpoint; returns how many were refused, and the bytes of memory that it took."""
    chance, refused, used = random.Random(name), 0, peak_memory()
    for _ in range(count):
        for file in (LAST, "config.json"):
            shutil.copy(FIXTURES / name / file, folder)
        damage(folder, chance)
        try:
            read_all(folder)
        except CheckpointError as error:
            assert str(error)
            refused += 1
    return refused, peak_memory() - used


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    refused, memory = campaign(name, tmp_path, 25)
    assert refused > 5 and memory < 128 << 20


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_damaged_files(name: str, tmp_path: Path) -> None:
    refused, memory = campaign(name, tmp_path, 400)
    assert refused > 100 and memory < 128 << 20
