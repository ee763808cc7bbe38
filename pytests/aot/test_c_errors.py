"""Bad input to the C runtime: a code and a sentence, and nothing is run."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from c_runtime import (
    BAD_ARGUMENT,
    BAD_FILE,
    BAD_VERSION,
    BAD_WEIGHT,
    CPU,
    CUDA_FAILED,
    NOT_THERE,
    Call,
    CMatmul,
    Failed,
    check,
    library,
    pointers,
)
from exported import seal
from safetensors.torch import load_file, save_file
from torch import Tensor

import lowbit
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.reference.inputs import random_inputs
from lowbit.pylib.weights.packed import PackedWeight, pack

N, K = 32, 64
SPECS = {
    "one": MatmulSpec(N, K, "u4", group_size=32, zeros="int"),
    "two": MatmulSpec(N, K, "u2", outliers=True, permuted=True),
}
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "folder"
    lowbit.export(SPECS, "cpu", path)
    return path


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return copytree(exported, tmp_path / "folder")


def change(folder: Path, how: Change) -> None:
    """Changes the manifest, and gives it the right checksum."""
    manifest = json.loads((folder / "manifest.json").read_text())
    how(manifest)
    seal(folder, manifest)


def fails(code: int, text: str, call: Callable[[], object]) -> None:
    with pytest.raises(Failed, match=text) as raised:
        call()
    assert raised.value.code == code


def code_of(folder: Path) -> Path:
    """A file that every open of "one" reads."""
    return next(folder.glob("cpu/one/*/many.bin"))


@pytest.mark.parametrize(
    ("name", "device", "code", "text"),
    [
        (None, CPU, BAD_ARGUMENT, "name is NULL, and the folder has several matmuls"),
        ("three", CPU, NOT_THERE, "no matmul 'three' in the folder"),
        ("one", -2, BAD_ARGUMENT, "device=-2 must be the number of a GPU or LOWBIT_CPU"),
    ],
)
def test_names_and_devices(exported: Path, name: str | None, device: int, code: int, text: str) -> None:
    fails(code, text, lambda: CMatmul(exported, name, device))


def test_folders(tmp_path: Path, folder: Path) -> None:
    fails(BAD_FILE, "manifest.json can't be opened; is it a folder", lambda: CMatmul(tmp_path / "nothing", "one"))
    fails(BAD_ARGUMENT, "more than 511 bytes", lambda: CMatmul("x" * 600, "one"))
    handle = ctypes.c_void_p()
    assert library().lowbit_open(None, None, CPU, ctypes.byref(handle)) == BAD_ARGUMENT
    assert library().lowbit_open(str(folder).encode(), b"one", CPU, None) == BAD_ARGUMENT
    assert library().lowbit_open_files(None, b"one", CPU, ctypes.byref(handle)) == BAD_ARGUMENT


@pytest.mark.parametrize("size", [0, 10, 1000, -12])
def test_truncated_manifest(folder: Path, size: int) -> None:
    text = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(text[:size])
    fails(BAD_FILE, r"manifest.json is (damaged|empty)", lambda: CMatmul(folder, "one"))


def test_changed_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"most": ', '"most": 1', 1))
    fails(BAD_FILE, "manifest.json is damaged", lambda: CMatmul(folder, "one"))


@pytest.mark.parametrize("version", [2, 4])
def test_manifest_of_another_version(folder: Path, version: int) -> None:
    change(folder, lambda manifest: manifest.update(manifest=version))
    fails(BAD_VERSION, f"manifest.json is of version {version}, this runtime reads 3", lambda: CMatmul(folder, "one"))


def test_truncated_and_changed_code(folder: Path) -> None:
    for path in folder.glob("cpu/**/*.bin"):
        path.write_bytes(path.read_bytes()[:-1])
    fails(BAD_FILE, "bin is damaged: it has .* bytes of", lambda: CMatmul(folder, "one"))
    for path in folder.glob("cpu/**/*.bin"):
        path.write_bytes(path.read_bytes() + b"\x90")
    fails(BAD_FILE, "bin is damaged", lambda: CMatmul(folder, "one"))
    for path in folder.glob("cpu/**/*.bin"):
        path.unlink()
    fails(BAD_FILE, "bin can't be opened", lambda: CMatmul(folder, "one"))


def test_no_code_for_this_machine(folder: Path) -> None:
    def leave_none(manifest: dict[str, Any]) -> None:
        for matmul in manifest["matmuls"]:
            matmul["targets"] = []

    change(folder, leave_none)
    fails(NOT_THERE, "no code in the folder runs on this CPU", lambda: CMatmul(folder, "one"))


def test_arguments_that_the_runtime_does_not_know(folder: Path) -> None:
    change(folder, lambda manifest: manifest["matmuls"][0]["targets"][-1]["operands"].append("new"))
    change(folder, lambda manifest: manifest["matmuls"][0].update(targets=manifest["matmuls"][0]["targets"][-1:]))
    if library().lowbit_open(str(folder).encode(), b"one", CPU, ctypes.byref(ctypes.c_void_p())) == NOT_THERE:
        pytest.skip("this CPU takes other code")
    fails(BAD_VERSION, "arguments that this runtime does not know", lambda: CMatmul(folder, "one"))


def _programs(target: dict[str, Any]) -> list[dict[str, Any]]:
    return [program for each in target["ranges"] for program in each["programs"]]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda t: t.pop("ranges"), "`ranges`"),
        (lambda t: t.update(ranges=[]), "`ranges`"),
        (lambda t: t.update(ranges=t["ranges"] * 3), "`ranges`"),
        (lambda t: t["ranges"][0].pop("programs"), "`programs`"),
        (lambda t: t["ranges"][0].update(programs=_programs(t)[:1] * 4), "`programs`"),
        (lambda t: t["ranges"][0].update(quantize="i16"), "`quantize`"),
        (lambda t: _programs(t)[-1].pop("block"), "`block` or `panel`"),
        (lambda t: _programs(t)[-1].update(panel=0), "`block` or `panel`"),
        (lambda t: t["dequantize"].update(block=-1), "`block` or `panel`"),
        (lambda t: t.update(top_k={"ids": "i64"}), "the count of `top_k`"),
    ],
)
def test_code_that_is_called_in_another_way(folder: Path, wrong: Change, named: str) -> None:
    """Manifests that are whole: no crash, and nothing is opened that can't be called."""

    def all_targets(manifest: dict[str, Any]) -> None:
        for target in manifest["matmuls"][0]["targets"]:
            wrong(target)

    change(folder, all_targets)
    fails(BAD_VERSION, f"manifest.json lacks {named} of the CPU's code, or has", lambda: CMatmul(folder, "one"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu(exported: Path) -> None:
    fails(CUDA_FAILED, r"libcuda.so.1|cuInit failed", lambda: CMatmul(exported, "one", 0))


# -- calls


class Problem:
    """A call that is right, of which a test changes one thing."""

    def __init__(self, mm: CMatmul) -> None:
        self.spec = SPECS["one"]
        self.mm = mm
        self.x, tensors = random_inputs(self.spec, 3)
        self.weight = list(pack(self.spec, **tensors).tensors)
        self.y = torch.full((3, N), torch.nan, dtype=torch.float16)
        size = library().lowbit_workspace_bytes(mm.handle, ctypes.c_int64(3))
        self.workspace = torch.zeros(size + 64, dtype=torch.uint8)
        self.addresses = pointers(self.weight)
        self.call = Call(ctypes.sizeof(Call), self.x.data_ptr(), ctypes.addressof(self.addresses), self.y.data_ptr(), 3)
        self.call.workspace, self.call.workspace_bytes = self.workspace.data_ptr(), size

    def run(self) -> None:
        check(library().lowbit_run(self.mm.handle, ctypes.byref(self.call)))


def _move_a_tensor(p: Problem) -> None:
    p.addresses[1] += 2


def _without_a_tensor(p: Problem) -> None:
    p.addresses[1] = None


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda p: setattr(p.call, "size", 4), "call must have size"),
        (lambda p: setattr(p.call, "size", 1000), "call must have size"),
        (lambda p: setattr(p.call, "m", -1), "m=-1 must be 0 to 2147483647 rows"),
        (lambda p: setattr(p.call, "m", 1 << 31), "m=2147483648 must be"),
        (lambda p: setattr(p.call, "x", None), "x is NULL"),
        (lambda p: setattr(p.call, "x", p.call.x + 2), "x=0x.* must begin at a multiple of 16 bytes"),
        (lambda p: setattr(p.call, "y", None), "y is NULL"),
        (lambda p: setattr(p.call, "y", p.call.y + 4), "y=0x.* must begin at a multiple of 16 bytes"),
        (lambda p: setattr(p.call, "weight", None), "weight is NULL"),
        (_without_a_tensor, "scales is NULL"),
        (_move_a_tensor, "scales=0x.* must begin at a multiple of 16 bytes"),
        (lambda p: setattr(p.call, "workspace", None), "workspace is NULL, and .* bytes are needed"),
        (lambda p: setattr(p.call, "workspace_bytes", 10), "workspace_bytes=10 must be at least"),
        (lambda p: setattr(p.call, "x_rows", -1), "x_rows=-1 must be 0, or of experts the rows of x"),
        (lambda p: setattr(p.call, "x_rows", 2), "x_rows=2 must be 0"),
        (lambda p: setattr(p.call, "x_rows", 1 << 31), "x_rows=2147483648 must be 0"),
    ],
)
def test_calls(exported: Path, wrong: Callable[[Problem], None], text: str) -> None:
    with CMatmul(exported, "one") as mm:
        problem = Problem(mm)
        wrong(problem)
        fails(BAD_ARGUMENT, text, problem.run)
        assert problem.y.isnan().all()


def test_a_right_call_and_one_without_rows(exported: Path) -> None:
    with CMatmul(exported, "one") as mm:
        problem = Problem(mm)
        problem.call.m = 0
        problem.run()
        assert problem.y.isnan().all()
        problem.call.m = 3
        problem.run()
        assert problem.y.isfinite().all()


def test_null_handles(exported: Path) -> None:
    c, call = library(), Call(ctypes.sizeof(Call))
    assert c.lowbit_run(None, ctypes.byref(call)) == c.lowbit_run(None, None) == BAD_ARGUMENT
    assert c.lowbit_supports(None, ctypes.c_int64(1)) == c.lowbit_use_threads(None, 1, None, None) == BAD_ARGUMENT
    assert c.lowbit_workspace_bytes(None, ctypes.c_int64(1)) == c.lowbit_dequantize_bytes(None) == -1
    assert c.lowbit_pack_codes(None, None, None, None) == BAD_ARGUMENT
    assert c.lowbit_dequantize(None, None, None, None, None) == BAD_ARGUMENT
    assert c.lowbit_pack(None, None, 0, None) == c.lowbit_save(None, None, None) == c.lowbit_load(None, None, None)
    assert c.lowbit_tensors(None) == c.lowbit_n(None) == 0 and c.lowbit_target(None) == b""
    c.lowbit_close(None)


def test_workspaces_of_the_runtime(exported: Path) -> None:
    with CMatmul(exported, "one") as mm:
        memory = ctypes.c_void_p()
        for size in (0, 1, 1000):
            check(library().lowbit_allocate(mm.handle, ctypes.c_int64(size), ctypes.byref(memory)))
            assert memory.value and memory.value % 256 == 0 and ctypes.string_at(memory, size) == bytes(size)
            library().lowbit_free(mm.handle, memory)
        allocate, place = library().lowbit_allocate, ctypes.byref(memory)
        fails(BAD_ARGUMENT, "bytes=-1 of at least 0", lambda: check(allocate(mm.handle, ctypes.c_int64(-1), place)))
        assert allocate(mm.handle, ctypes.c_int64(1), None) == allocate(None, ctypes.c_int64(1), place) == BAD_ARGUMENT
        library().lowbit_free(mm.handle, None)


def test_packing_codes_is_for_gpus(exported: Path) -> None:
    with CMatmul(exported, "one") as mm:
        codes, pack_codes = torch.zeros(N, K, dtype=torch.uint8), library().lowbit_pack_codes
        address = ctypes.c_void_p(codes.data_ptr())
        fails(BAD_ARGUMENT, "opened for the CPU", lambda: check(pack_codes(mm.handle, address, address, None)))
        fails(BAD_ARGUMENT, "codes is NULL", lambda: check(pack_codes(mm.handle, None, address, None)))


# -- packing


def given(**changed: Tensor | None) -> dict[str, Tensor]:
    codes, scales = torch.ones(N, K, dtype=torch.uint8), torch.ones(N, 2)
    tensors = {"codes": codes, "scales": scales, "zeros": torch.ones(N, 2, dtype=torch.int32), **changed}
    return {name: t for name, t in tensors.items() if t is not None}


def with_one(t: Tensor, value: float) -> Tensor:
    t[3, 1] = value
    return t


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (given(scales=None), "scales are missing"),
        (given(scales=torch.ones(N, 3)), r"scales must be \[32, 2\], 64 numbers, not 96"),
        (given(scales=torch.ones(N, 2, dtype=torch.int32)), "scales must be floats: F32"),
        (given(codes=torch.ones(N, K)), "codes must be integers: U8, I8 or I32"),
        (given(codes=with_one(torch.ones(N, K, dtype=torch.uint8), 16)), r"codes\[3, 1\] = 16 must be in 0..15"),
        (given(zeros=with_one(torch.ones(N, 2, dtype=torch.int32), -1)), r"zeros\[3, 1\] = -1 must be in 0..255"),
        (given(scales=with_one(torch.ones(N, 2), torch.nan)), r"scales\[3, 1\] = nan must be finite"),
        (given(scales=with_one(torch.ones(N, 2), 65520.0)), r"scales\[3, 1\] = 65520 overflows"),
        (given(bias=torch.ones(N)), "this matmul has no bias; drop it"),
    ],
)
def test_what_is_packed(exported: Path, tensors: dict[str, Tensor], text: str) -> None:
    with CMatmul(exported, "one") as mm:
        fails(BAD_WEIGHT, text, lambda: mm.pack(tensors))


def outliers(**changed: Tensor) -> dict[str, Tensor]:
    offsets = torch.tensor([0, 2, *[3] * (N - 1)], dtype=torch.int32)
    columns, values = torch.tensor([1, 5, 7], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0])
    given = {"codes": torch.ones(N, K, dtype=torch.uint8), "scales": torch.ones(N, 1)}
    given |= {"outlier_offsets": offsets, "outlier_columns": columns, "outlier_values": values}
    return given | {"permutation": torch.arange(K, dtype=torch.int32)} | changed


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"outlier_columns": torch.tensor([1, 1, 7], dtype=torch.int32)}, "an outlier is there twice"),
        ({"outlier_columns": torch.tensor([1, K, 7], dtype=torch.int32)}, "an outlier is in column 64 of 64"),
        ({"outlier_values": torch.tensor([1.0, torch.inf, 3.0])}, "must be finite"),
        ({"outlier_offsets": torch.tensor([0, 2, 1, *[3] * (N - 2)], dtype=torch.int32)}, "not fall; see row 1"),
        ({"outlier_offsets": torch.tensor([0, 2, *[4] * (N - 1)], dtype=torch.int32)}, "end with 4, and there are 3"),
        ({"outlier_offsets": torch.zeros(3, dtype=torch.int32)}, r"outlier_offsets I32 \[n \+ 1\]"),
        ({"permutation": torch.zeros(K, dtype=torch.int32)}, r"permutation\[1\] = 0 is there twice"),
        ({"permutation": torch.full((K,), K, dtype=torch.int32)}, "permutation.* = 64 must be in 0..63"),
    ],
)
def test_outliers_and_permutations(exported: Path, changed: dict[str, Tensor], text: str) -> None:
    with CMatmul(exported, "two") as mm:
        mm.pack(outliers())
        fails(BAD_WEIGHT, text, lambda: mm.pack(outliers(**changed)))


# -- saved weights


def saved(path: Path, name: str = "two", **changed: Tensor) -> Path:
    w = pack(SPECS[name], **random_inputs(SPECS[name], 1)[1])
    save_file({**w.state_dict(), **changed}, path)
    return path


def test_files_that_are_no_weight(exported: Path, tmp_path: Path) -> None:
    path = saved(tmp_path / "w.safetensors")
    whole = path.read_bytes()
    with CMatmul(exported, "two") as mm:
        for size in (4, 20, 300, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises(Failed, match=r"truncated|damaged|no spec") as raised:
                mm.load(path)
            assert raised.value.code in (BAD_FILE, BAD_WEIGHT)
        path.write_bytes((1 << 60).to_bytes(8, "little") + whole[8:])
        fails(BAD_FILE, "truncated", lambda: mm.load(path))
        fails(BAD_FILE, "can't be opened", lambda: mm.load(tmp_path / "nothing"))
        weight = list(mm.load(saved(path)).values())
        fails(BAD_FILE, "can't be written", lambda: mm.save(tmp_path / "no/folder", weight))


def test_weights_of_other_specs(exported: Path, tmp_path: Path) -> None:
    with CMatmul(exported, "one") as mm:
        other = MatmulSpec(N, K, "u4", group_size=16, zeros="int")
        save_file(pack(other, **random_inputs(other, 1)[1]).state_dict(), tmp_path / "w")
        fails(BAD_WEIGHT, "was packed with another group_size", lambda: mm.load(tmp_path / "w"))
        gated = MatmulSpec(N, K, "u4", group_size=32, zeros="int", epilogue="silu_mul")
        save_file(pack(gated, **random_inputs(gated, 1)[1]).state_dict(), tmp_path / "w")
        fails(BAD_WEIGHT, "was packed with another epilogue", lambda: mm.load(tmp_path / "w"))
        text = bytes(load_file(saved(tmp_path / "w", "one"))["spec"].tolist()).replace(b'"format": 4', b'"format": 5')
        saved(tmp_path / "w", "one", spec=torch.frombuffer(bytearray(text), dtype=torch.uint8))
        fails(BAD_VERSION, "was saved in format 5, this is 4", lambda: mm.load(tmp_path / "w"))


def test_values_that_point_elsewhere(exported: Path, tmp_path: Path) -> None:
    """A permutation or outliers beyond the weight, with which a program would read other memory."""
    w = PackedWeight.from_state_dict(load_file(saved(tmp_path / "w")))
    permutation, lines = w["permutation"].clone(), w["outliers"].clone()
    permutation[4] = K
    table = lines.clone()
    table[0, 1] = 1000
    lines[1, 0] = K
    with CMatmul(exported, "two") as mm:
        for name, tensor in (("permutation", permutation), ("outliers", table), ("outliers", lines)):
            path = saved(tmp_path / "damaged", **{name: tensor})
            with pytest.raises(Failed, match=f"{name} are missing, of another size, or damaged"):
                mm.load(path)
