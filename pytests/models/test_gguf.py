"""GGUF files: weights are those that the `gguf` package dequantizes, bit for bit."""

from __future__ import annotations

import random
import resource
import struct
import sys
from collections.abc import Sequence
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
from lowbit.dialect.bilevel import integers_of
from lowbit.pylib import reference
from lowbit.pylib.checkpoints.contents import contents
from lowbit.pylib.checkpoints.gguf import codebooks
from lowbit.pylib.checkpoints.gguf.file import DENSE, TYPES, UNREAD, GgufFile

N, K = 6, 512
NAMES = [kind.name for kind in TYPES.values()]
UNUSED = {"MXFP4": 1, "NVFP4": 1, "TQ1_0": 1, "IQ2_XXS": 2, "IQ2_XS": 2, "IQ2_S": 2, "IQ1_S": 2, "IQ1_M": 2}
"""How many codes a type has no use for: -0, 3 of 0, 1 and 2, and the fourth of three magnitudes with either sign."""
ODD_SCALES = {"IQ1_S": 8, "IQ1_M": 8, "IQ2_XXS": 16, "IQ2_XS": 16, "IQ2_S": 16, "IQ3_XXS": 16, "IQ3_S": 16}
"""How many scales types have whose scales are odd numbers."""


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
    assert torch.equal(bits_of(w.dequantize()), bits_of(torch.from_numpy(expected)))
    x = reference.random_inputs(w.spec, 3)[0]
    y, right = lowbit.LowbitLinear.from_packed(w)(x).float(), x.float() @ torch.from_numpy(expected).T
    assert float((y - right).abs().max()) < 0.002 * float(right.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_changed_values(name: str, tmp_path: Path) -> None:
    """Whatever bytes a tensor has, its values are those of the package, or it is refused."""
    chance, refused = random.Random(name), 0
    for _ in range(8):
        data = blocks(name, N, K)
        for _ in range(chance.choice((1, 2, 8))):
            data.reshape(-1)[chance.randrange(data.size)] = chance.randrange(256)
        file = write(tmp_path / "file.gguf", {"w": (data, Kind[name])})
        with np.errstate(all="ignore"):
            expected = torch.from_numpy(gguf.quants.dequantize(data, Kind[name]))
        try:
            found = cast(lowbit.PackedWeight, file["w"]).dequantize()
        except CheckpointError:
            refused += 1
            continue
        assert torch.equal(bits_of(found), bits_of(expected))
    assert refused < 5


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Returns f32 values as integers: 0 and -0 differ."""
    return values.view(torch.int32)


@pytest.mark.parametrize("name", NAMES)
def test_every_code_with_every_scale(name: str, tmp_path: Path) -> None:
    """All pairs of the code of a weight and that of its scale (or its exponent), and all codes of offsets."""
    data = blocks(name, *(64, 4096) if name in ("Q6_K", "MXFP4") else (16, 2048))
    if name == "MXFP4":
        data.reshape(-1, 17)[:, 0] = np.arange(data.size // 17) % 253  # 6 times 2^126 overflows
    w = cast(lowbit.PackedWeight, write(tmp_path / "file.gguf", {"w": (data, Kind[name])})["w"])
    expected = torch.from_numpy(gguf.quants.dequantize(data, Kind[name]))
    assert torch.equal(bits_of(w.dequantize()), bits_of(expected))
    codes = w.unpack().int().unflatten(1, (w.spec.groups, -1))
    assert len(codes.unique()) == w.spec.dtype.codes - UNUSED.get(name, 0)
    if w.spec.bilevel or w.spec.scale == "e8m0":
        scales = w.unpack_scales().float()
        pairs = torch.stack([codes.float(), scales[..., None].expand(codes.shape)]).flatten(1)
        count = ODD_SCALES.get(name) or (integers_of(w.spec.scale).codes if w.spec.bilevel else 253)
        assert len(pairs.unique(dim=1)[0]) == len(codes.unique()) * count
    if w.spec.bilevel and w.spec.zeros == "offset":
        assert len(cast(torch.Tensor, w.unpack_offsets()).unique()) == integers_of(w.spec.scale).codes


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


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_floats_stay_dense(kind: Kind, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    data = gguf.quants.quantize(values, kind)
    found = write(tmp_path / "file.gguf", {"w": (data, kind)})["w"]
    assert isinstance(found, torch.Tensor) and found.is_floating_point() and found.shape == (N, K)
    assert torch.equal(found.float(), torch.from_numpy(gguf.quants.dequantize(data, kind)))


def test_types_that_can_not_be_read(tmp_path: Path) -> None:
    columns, size = gguf.GGML_QUANT_SIZES[Kind.Q8_K]
    file = write(tmp_path / "file.gguf", {"w": (np.zeros((2, size * 256 // columns), np.uint8), Kind.Q8_K)})
    assert file.type_of("w") == "Q8_K"
    with pytest.raises(CheckpointError, match=r"file.gguf: w: Q8_K can't be imported; what can is Q4_0, "):
        file["w"]
    with pytest.raises(CheckpointError, match=r"file.gguf: w: Q8_K can't"):
        contents(tmp_path / "file.gguf")


def test_a_codebook_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.gguf"
    write(path, {"w": (blocks("IQ3_S", N, K), Kind.IQ3_S)})
    codebooks._codebook.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match="w: IQ3_S has a codebook, which is in the gguf package; pip install"):
        lowbit.load_gguf(path)["w"]


def test_every_type_of_the_package_has_a_name() -> None:
    assert all(kind in TYPES or kind in DENSE or UNREAD[kind] == kind.name for kind in Kind)


def test_a_big_endian_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "file.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"file.gguf: it is big-endian; gguf-convert-endian of the gguf package"):
        lowbit.load_gguf(tmp_path / "file.gguf")


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(CheckpointError, match=r"/file can't be read: No such file or directory$"):
        lowbit.load_gguf(path)
    for data, message in (
        (b"", "can't be read"),
        (b"GGU", "the file ends within its header, at byte 0"),
        (b"GGML1234", "it does not begin with GGUF"),
        (b"GGUF\x04\x00\x00\x00", "GGUF version 4 can't be read"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "the file ends within its header, at byte 24"),
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            lowbit.load_gguf(path)
    with pytest.raises(CheckpointError, match="can't be read"):
        lowbit.load_gguf(tmp_path / "nowhere")
    with pytest.raises(SpecError, match="act='f32' must be one of 'f16', 'bf16'"):
        lowbit.load_gguf(path, act="f32")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="device=gpu is no device; use cpu or cuda"):
        lowbit.load_gguf(path, device="gpu")


def text(given: str) -> bytes:
    return struct.pack("<Q", len(given)) + given.encode()


def header(tensors: Sequence[tuple[str, int]], alignment: int | str = 32) -> bytes:
    """Returns a file with tensors of 256 columns in Q4_K, which begin at these bytes after the header."""
    kind, value = (4, struct.pack("<I", alignment)) if isinstance(alignment, int) else (8, text(alignment))
    infos = [text(name) + struct.pack("<IQQIQ", 2, 256, 1, 12, start) for name, start in tensors]
    key = text("general.alignment") + struct.pack("<I", kind) + value
    return b"".join((b"GGUF", struct.pack("<IQQ", 3, len(infos), 1), key, *infos, bytes(600)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header([("a", 0), ("b", 144)]), "b: it begins at 144, which is no multiple of the alignment, 32"),
        (header([("a", 0), ("b", 3)], 8), "b: it begins at 3, which is no multiple of the alignment, 8"),
        (header([("a", 0), ("a", 160)]), "two tensors are called a"),
        *((header([("a", 0)], wrong), f"general.alignment is {wrong!r}; it must be a positive multiple of 8")
          for wrong in (0, 1, 12, "32")),
    ],
)  # fmt: skip
def test_places_that_can_not_be(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    path.write_bytes(header([("a", 0), ("b", 160)]))
    assert all(not cast(lowbit.PackedWeight, w).dequantize().any() for w in lowbit.load_gguf(path).values())
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        lowbit.load_gguf(path)


TERA = 1 << 42
KEY, CUT = text("key"), "the file ends within its header"
LIES = {  # what a file of a kilobyte says of itself: tensors, entries of metadata, and what follows
    "tensors": (TERA, 0, struct.pack("<QIQIQ", 0, 1, 1, 0, 0) * 31, CUT),
    "metadata": (0, TERA, b"", CUT),
    "a key": (0, 1, struct.pack("<Q", TERA), CUT),
    "a string": (0, 1, KEY + struct.pack("<IQ", 8, TERA), CUT),
    "numbers": (0, 1, KEY + struct.pack("<IIQ", 9, 4, TERA), CUT),
    "strings": (0, 1, KEY + struct.pack("<IIQ", 9, 8, TERA), CUT),
    "arrays": (0, 1, KEY + struct.pack("<IIQ", 9, 9, TERA), "metadata of type 9 at byte 51 can't be read"),
    "floats": (1, 0, text("w") + struct.pack("<IQQIQ", 2, 1 << 21, 1 << 21, 0, 0), "of a file of 1024"),
    "blocks": (1, 0, text("w") + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 12, 0), "of a file of 1024"),
    "a stack": (1, 0, text("w") + struct.pack("<IQQQIQ", 3, 256, TERA, TERA, 12, 0), "of a file of 1024"),
    "a place": (1, 0, text("w") + struct.pack("<IQQIQ", 2, 256, 1, 12, TERA), "of a file of 1024"),
    "dimensions": (1, 0, text("w") + struct.pack("<I", 1 << 31), "a tensor has 2147483648 dimensions; those of 1"),
    "no dimensions": (1, 0, text("w") + struct.pack("<IIQ", 0, 0, 0), "a tensor has 0 dimensions; those of 1 to 4 can"),
}


@pytest.mark.parametrize(("tensors", "entries", "data", "message"), LIES.values(), ids=LIES)
def test_sizes_that_lie_take_no_memory(tensors: int, entries: int, data: bytes, message: str, tmp_path: Path) -> None:
    path, used = tmp_path / "file.gguf", _peak()
    path.write_bytes((b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + data).ljust(1024, b"\0"))
    with pytest.raises(CheckpointError, match=message):
        lowbit.load_gguf(path)
    assert _peak() - used < 16 << 20


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    """It is refused as it is opened, and `lowbit inspect` does not take it for whole."""
    path = tmp_path / "file.gguf"
    write(path, {name: (blocks("Q4_K", N, K), Kind.Q4_K) for name in ("a", "b")})
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    for read in (lowbit.load_gguf, contents):
        with pytest.raises(CheckpointError, match=rf"file.gguf: b: it takes bytes \d+ to {len(data)} of a file of"):
            read(path)


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
