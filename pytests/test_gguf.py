"""GGUF files: weights are those that the `gguf` package dequantizes, bit for bit."""

from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import blocks
from numpy.typing import NDArray

import lowbit
from lowbit import CheckpointError, SpecError
from lowbit.pylib import reference
from lowbit.pylib.checkpoints.contents import contents
from lowbit.pylib.checkpoints.gguf.file import TYPES, GgufFile

N, K = 6, 512
NAMES = [kind.name for kind in TYPES.values()]


def write(path: Path, tensors: dict[str, tuple[NDArray[np.generic], Kind | None]], **metadata: str) -> GgufFile:
    """Writes a file with the package, and opens it."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, text in metadata.items():
        writer.add_string(key, text)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b c"])
    writer.add_array("numbers", [1, 2, 3])
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return lowbit.load_gguf(path)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_package(name: str, tmp_path: Path) -> None:
    data = blocks(name, N, K)
    w = cast(lowbit.PackedWeight, write(tmp_path / "file.gguf", {"w": (data, Kind[name])})["w"])
    expected = gguf.quants.dequantize(data, Kind[name])
    assert torch.equal(w.dequantize(), torch.from_numpy(expected))
    x = reference.random_inputs(w.spec, 3)[0]
    y, right = lowbit.LowbitLinear.from_packed(w)(x).float(), x.float() @ torch.from_numpy(expected).T
    assert float((y - right).abs().max()) < 0.002 * float(right.abs().max())


def test_ternary_codes_need_no_zeros(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).integers(-1, 2, (N, K)).astype(np.float32)
    kinds = (Kind.TQ1_0, Kind.TQ2_0)
    file = write(tmp_path / "file.gguf", {k.name: (gguf.quants.quantize(weight, k), k) for k in kinds})
    for w in map(file.__getitem__, ("TQ1_0", "TQ2_0")):
        assert isinstance(w, lowbit.PackedWeight) and (w.spec.weight, w.spec.zeros) == ("i2", "none")
        assert torch.equal(w.dequantize(), torch.from_numpy(weight))


def test_a_file(tmp_path: Path) -> None:
    """Dense tensors, experts, metadata."""
    norm, experts = np.linspace(0, 1, 7, dtype=np.float32), blocks("Q8_0", 3 * N, K).reshape(3, N, -1)
    tensors = {"norm": (norm, None), "experts": (experts, Kind.Q8_0), "half": (norm.astype(np.float16), None)}
    file = write(tmp_path / "file.gguf", tensors, note="ünder")
    assert list(file) == list(tensors) and len(file) == 3
    assert file.metadata["note"] == "ünder" and file.metadata["tokenizer.ggml.tokens"] == ["a", "b c"]
    assert file.metadata["numbers"].tolist() == [1, 2, 3]
    assert torch.equal(cast(torch.Tensor, file["norm"]), torch.from_numpy(norm))
    assert file.type_of("half") == "float16" and file.type_of("experts") == "Q8_0"
    assert file.shape("experts") == (3, N, K)
    (row,) = contents(tmp_path / "file.gguf")
    assert (row.name, row.shape, row.format) == ("experts", (3, N, K), "Q8_0")
    assert row.bytes_after == experts.nbytes == file.nbytes("experts")
    with pytest.raises(SpecError, match=r"against: .*file.gguf has names of llama.cpp's"):
        contents(tmp_path / "file.gguf", against=tmp_path)
    found = torch.stack([w.dequantize() for w in file.load_experts("experts")])
    assert torch.equal(found, torch.from_numpy(gguf.quants.dequantize(experts, Kind.Q8_0)))
    with pytest.raises(CheckpointError, match=r"experts: shape \[3, 6, 512\] is no matrix; load_experts\(name\)"):
        file["experts"]
    with pytest.raises(CheckpointError, match=r"norm: shape \[7\] is no stack of matrices"):
        file.load_experts("norm")


def test_types_that_can_not_be_read(tmp_path: Path) -> None:
    columns, size = gguf.GGML_QUANT_SIZES[Kind.IQ2_XS]
    file = write(tmp_path / "file.gguf", {"w": (np.zeros((2, size * 256 // columns), np.uint8), Kind.IQ2_XS)})
    assert file.type_of("w") == "type 17"
    with pytest.raises(CheckpointError, match=r"file.gguf: w: type 17 of GGUF can't be imported; what can is Q4_0, "):
        file["w"]
    with pytest.raises(CheckpointError, match=r"file.gguf: w: type 17 of GGUF can't"):
        contents(tmp_path / "file.gguf")


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(CheckpointError, match=r"/file can't be read: No such file or directory$"):
        lowbit.load_gguf(path)
    for data, message in (
        (b"", "can't be read"),
        (b"GGU", "the file ends within its header, at byte 0"),
        (b"GGML1234", "it does not begin with GGUF"),
        (b"GGUF\x00\x00\x00\x03", "GGUF version 50331648 can't be read"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "the file ends within its header, at byte 24"),
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            lowbit.load_gguf(path)
    with pytest.raises(CheckpointError, match="can't be read"):
        lowbit.load_gguf(tmp_path / "nowhere")


def test_damaged_files(tmp_path: Path) -> None:
    """A file that is cut short or has other bytes is a CheckpointError or gives tensors; it takes little memory."""
    chance, path = random.Random(0), tmp_path / "file.gguf"
    tensors = {name: (blocks(name, N, K), Kind[name]) for name in ("Q4_0", "Q4_K", "MXFP4")}
    write(path, {"norm": (np.ones(7, np.float32), None), **tensors})
    whole, used, refused = path.read_bytes(), _peak(), 0
    for number in range(240):
        data = bytearray(whole)
        if number % 3 == 0:
            del data[chance.randrange(len(data)) :]
        else:
            end = 500 if number % 3 == 1 else len(data)
            for _ in range(chance.randint(1, 4)):
                data[chance.randrange(end)] = chance.choice((0, 255, 128, chance.randrange(256)))
        path.write_bytes(data)
        try:
            file = lowbit.load_gguf(path)
            assert len(list(file.values())) == len(file) <= 4
        except CheckpointError:
            refused += 1
    assert 60 < refused < 240
    assert _peak() - used < 64 << 20


def _peak() -> int:
    """Returns the most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
