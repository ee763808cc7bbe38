"""The GPU half of an exported folder, executed by the emulator. It reads the folder and nothing else: what a runtime in
any language has to know must be in the manifest."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.pylib.emulator import Emulator
from lowbit.pylib.runtime.tensor_map import TensorMap

MULTIPROCESSORS = 4  # of the made-up GPU
SEAL = ',\n "crc32": "'
ELEMENTS = {0: "u8", 6: "f16", 9: "bf16"}  # CUtensorMapDataType
SWIZZLES = (0, 32, 64, 128)  # CUtensorMapSwizzle
Arrays = dict[str, np.ndarray]


def seal(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes a manifest that a test has changed, with checksums of it and of the files that are there."""
    sizes = {name: (folder / name).read_bytes() for name in manifest["files"]}
    files = {name: {"bytes": len(each), "crc32": f"{zlib.crc32(each):08x}"} for name, each in sizes.items()}
    kept = {key: value for key, value in manifest.items() if key != "crc32"}
    text = json.dumps({**kept, "files": files}, indent=1).removesuffix("\n}")
    (folder / "manifest.json").write_text(f'{text}{SEAL}{zlib.crc32(text.encode()):08x}"\n}}\n')


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest, whose checksum is right, of files that are as it says."""
    text = (folder / "manifest.json").read_text()
    assert zlib.crc32(text[: text.rindex(SEAL)].encode()) == int(json.loads(text)["crc32"], 16)
    manifest = json.loads(text)
    for name, about in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert (len(content), zlib.crc32(content)) == (about["bytes"], int(about["crc32"], 16))
    return manifest


class Exported:
    """A matmul of a folder for one GPU target."""

    def __init__(self, folder: Path, name: str, target: str) -> None:
        self._folder = folder
        self.manifest = read_manifest(folder)
        self.about = next(each for each in self.manifest["matmuls"] if each["name"] == name)
        self.target = next(each for each in self.about["targets"] if each["target"] == target)
        self.row_bytes = {each["name"]: each["row_bytes"] for each in self.about["arrays"]}
        self.started: list[str] = []

    def range_of(self, m: int) -> dict[str, Any]:
        return next(r for r in self.target["ranges"] if r["first"] <= m and (r["last"] is None or m <= r["last"]))

    def run(self, arrays: Arrays, m: int, x_rows: int | None = None) -> None:
        """Writes y of arrays by name, as bytes."""
        arrays, tile = self._with_buffers(arrays, max(m, x_rows or m)), self.range_of(m).get("tile", 0)
        for number, first, rows in self.launches(m, x_rows or m):
            self._start(number, arrays, first, rows, tile)

    def launches(self, m: int, x_rows: int) -> Iterator[tuple[int, int, int]]:
        """Yields the number of each kernel, its first row, and how many it has."""
        found, launched, first = self.range_of(m), 0, 0
        for each in found["prepare"]:
            yield each["kernel"], 0, {"x": x_rows, "y": m}[each["rows_of"]]
        while first < m:
            launch = found["launches"][min(launched, len(found["launches"]) - 1)]
            rows = min(launch["rows"] or m, m - first)
            yield launch["kernel"], first, rows
            launched, first = launched + 1, first + rows

    def dequantize(self, arrays: Arrays) -> None:
        """Writes the weight to y."""
        arrays = self._with_buffers(arrays, 0)
        for number in self.target["dequantize"]:
            self._start(number, arrays, 0, 0)

    def pack_codes(self, codes: np.ndarray, packed: np.ndarray) -> None:
        """Writes packed codes; both are bytes."""
        self._start(self.target["prepack"], {"x": codes, self.about["weight"]["tensors"][0]["name"]: packed}, 0, 0)

    def _with_buffers(self, arrays: Arrays, rows: int) -> Arrays:
        sizes = {a["name"]: rows * a["row_bytes"] for a in self.about["arrays"] if a["from"] == "buffer"}
        sizes |= {a["name"]: a["bytes"] for a in self.about["arrays"] if a["from"] == "dequantized"}
        made = {name: np.full(size, 0xA5, np.uint8) for name, size in sizes.items()}
        workspace = max(kernel["workspace_bytes"] for kernel in self.target["kernels"])
        return {**arrays, **made, "workspace": np.zeros(workspace, np.uint8)}

    def _start(self, number: int, arrays: Arrays, first: int, rows: int, tile: int = 0) -> None:
        kernel = self.target["kernels"][number]
        self.started.append(kernel["name"])
        Emulator((self._folder / kernel["ptx"]).read_text()).launch(
            kernel["function"],
            grid=[blocks(extent, rows) for extent in kernel["grid"]],
            block=kernel["threads"],
            args=[self._argument(param, arrays, first, rows, tile) for param in kernel["params"]],
            shared_bytes=kernel["shared_bytes"],
            names=[param["name"] for param in kernel["params"]],
        )

    def _argument(self, param: Mapping[str, Any], arrays: Arrays, first: int, rows: int, tile: int) -> Any:
        if param["kind"] == "i32":
            return tile if param["from"] == "tile" else rows
        memory = arrays.get(param["from"])
        if memory is None:
            return None
        memory = memory[first * self.row_bytes[param["from"]] :]
        return tensor_map(memory, param["map"], rows) if param["kind"] == "tensor_map" else memory


def tensor_map(memory: np.ndarray, about: Mapping[str, Any], rows: int) -> TensorMap:
    """Returns a tensor map of so many rows."""
    box = tuple(reversed(about["box"]))
    shape = (rows, about["columns"])
    return TensorMap(memory, ELEMENTS[about["type"]], shape, box, swizzle=SWIZZLES[about["swizzle"]])


def blocks(extent: Mapping[str, Any], rows: int) -> int:
    number = extent["number"]
    return {
        "constant": number,
        "ceil": -(-rows // number),
        "sm_count": MULTIPROCESSORS * number,
        "sm_part": max(1, MULTIPROCESSORS // number),
    }[extent["rule"]]
