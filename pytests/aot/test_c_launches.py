"""What the C runtime launches on GPUs, by a driver without a GPU that writes it down: the launches that `Exported` has,
which the emulator has run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from c_runtime import library_path
from exported import Exported, blocks, seal
from fake_cuda import build_driver, with_texts

import lowbit
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.top_k import TopK

HERE = Path(__file__).resolve().parent
PAGE = 256  # to a multiple of which a workspace and its buffers begin
S = MatmulSpec
SPECS = {
    "usual": S(48, 256, "u4", group_size=64, zeros="int", bias=True),
    "residual": S(32, 128, "i3", group_size=32, epilogue="residual", act="bf16"),
    "permuted": S(32, 128, "u4", group_size=32, permuted=True),
    "eight_bits": S(32, 128, "u4", group_size=32, compute="i8", compute_from=17),
    "experts": S(64, 128, "u4", group_size=32, experts=2, epilogue="silu_mul"),
    "permuted_experts": S(64, 128, "u4", group_size=32, experts=2, permuted=True, epilogue="silu_mul"),
    "by_ids": S(64, 128, "u4", group_size=32, experts=2, epilogue="silu_mul", top_k=TopK(2)),
    "added_up": S(64, 128, "u4", group_size=32, experts=2, top_k=TopK(2, weights="f32")),
    "experts_in_8_bits": S(64, 128, "u4", group_size=32, experts=2, compute="i8"),
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1."""
    return build_driver(tmp_path_factory.mktemp("driver"))


class Launched:
    """What a process has launched, and what it has printed."""

    def __init__(
        self,
        driver: Path,
        folder: Path,
        rows: Sequence[int],
        capability: int,
        flags: int = 0,
        device: int = 0,
        x: int = 0,
    ) -> None:
        log = folder.parent / "log"
        log.write_text("")
        environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "FAKE_CUDA_LOG": str(log)}
        environment["FAKE_CUDA_CAPABILITY"] = str(capability)
        arguments = json.dumps([str(library_path()), str(folder), device, list(rows), [x or m for m in rows], flags])
        command = [sys.executable, str(HERE / "launch_on_fake_gpu.py"), arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        self.error = done.stderr
        self.found = json.loads(done.stdout) if not done.returncode else None
        *self.launches, self.closed = [json.loads(line) for line in log.read_text().splitlines()] or [None]


@pytest.fixture(scope="module")
def whole() -> dict[tuple[str, ...], Path]:
    """Folders that were exported, by the name of the spec and the targets."""
    return {}


@pytest.fixture
def exported(tmp_path: Path, request: pytest.FixtureRequest, whole: dict[tuple[str, ...], Path]) -> Path:
    """A folder of the spec and the targets that the test names, which it may change."""
    if request.param not in whole:
        name, *targets = request.param
        lowbit.export({"it": SPECS[name]}, targets, tmp_path / "whole")
        whole[request.param] = tmp_path / "whole"
    return with_texts(whole[request.param], tmp_path / "texts")


def expected(exported: Exported, rows: Sequence[int], x: int, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the launches of a manifest for each number of rows, and those that dequantize and pack, with the addresses
    that the arrays have."""
    target = exported.target
    for m, call in zip(rows, found["calls"]):
        arrays, tile = _placed(exported, call, "buffer", max(m, x)), exported.range_of(m).get("tile", 0)
        for number, first, count in exported.launches(m, x or m):
            yield _launched(exported, number, arrays, first, count, tile)
    arrays = _placed(exported, found["of_the_weight"], "dequantized", 0)
    for number in (*target["dequantize"], target["prepack"]):
        yield _launched(exported, number, arrays | {"packed": arrays["codes"]}, 0, 0, 0)


def _placed(exported: Exported, call: dict[str, Any], kind: str, rows: int) -> dict[str, int]:
    """Returns the addresses of a call's arrays, with those of a kind behind each other in the workspace."""
    arrays = dict(call["arrays"])
    arrays["workspace"] = -(-arrays["workspace"] // PAGE) * PAGE
    at = arrays["workspace"] + _up(max(kernel["workspace_bytes"] for kernel in exported.target["kernels"]))
    for each in exported.about["arrays"]:
        if each["from"] == kind:
            arrays[each["name"]], at = at, at + _up(rows * each["row_bytes"] + each.get("bytes", 0))
    used = at > arrays["workspace"]
    assert call["bytes"] >= (at - call["arrays"]["workspace"] if used else 0)
    return arrays


def _launched(
    exported: Exported, number: int, arrays: dict[str, int], first: int, count: int, tile: int
) -> dict[str, Any]:
    kernel = exported.target["kernels"][number]
    arguments = [_argument(param, arrays, exported.row_bytes, first, count, tile) for param in kernel["params"]]
    return {
        "kernel": f"cubin:{kernel['name']}",
        "device": 0,
        "grid": [blocks(extent, count) for extent in kernel["grid"]],
        "block": [kernel["threads"], 1, 1],
        "shared": kernel["shared_bytes"],
        "allowed": kernel["shared_bytes"],
        "stream": 7,
        "overlap": False,
        "arguments": arguments,
    }


def _up(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _argument(
    param: dict[str, Any], arrays: dict[str, int], row_bytes: dict[str, int], first: int, count: int, tile: int
) -> Any:
    if param["kind"] == "i32":
        return tile if param["from"] == "tile" else count
    address = arrays[param["from"]] + first * row_bytes[param["from"]]
    if param["kind"] == "pointer":
        return address
    about = param["map"]
    return {
        "type": about["type"],
        "rank": 2,
        "address": address,
        "dims": [about["columns"], count],
        "stride": about["columns"] * about["bytes"],
        "box": about["box"],
        "steps": [1, 1],
        "rest": [0, about["swizzle"], about["promotion"], 0],
    }


@pytest.mark.parametrize(
    ("exported", "capability", "rows", "x"),
    [
        (("usual", "sm_80", "sm_90a"), 90, [1, 64, 65, 130, 5000], 0),
        (("usual", "sm_80"), 80, [3, 70, 4000], 0),
        (("residual", "sm_80"), 80, [70], 0),
        (("permuted", "sm_80"), 80, [1, 300], 0),
        (("eight_bits", "sm_80"), 80, [16, 17], 0),
        (("experts", "sm_80"), 80, [10, 300], 5),
        (("permuted_experts", "sm_80"), 80, [10, 300], 5),
        (("experts_in_8_bits", "sm_80"), 80, [10], 5),
        (("by_ids", "sm_80"), 80, [10], 5),
        (("added_up", "sm_90a"), 90, [5], 10),
    ],
    indirect=["exported"],
)
def test_launches(exported: Path, capability: int, rows: list[int], x: int, driver: Path) -> None:
    run = Launched(driver, exported, rows, capability, x=x)
    assert run.found, run.error
    target = run.found["target"]
    assert target == f"sm_{capability}" + "a" * (capability == 90)
    assert run.launches == list(expected(Exported(exported, "it", target), rows, x, run.found))
    assert run.closed == {"closed": True, "contexts": 0, "modules": 0, "allocated": 0}
    assert run.found["refused"].startswith("allocating a workspace: ")
    assert run.found["tile"] == Exported(exported, "it", target).range_of(rows[0]).get("tile", 0)


@pytest.mark.parametrize("exported", [("usual", "sm_80", "sm_90a")], indirect=True)
def test_settled_weights_overlap_where_kernels_can(exported: Path, driver: Path) -> None:
    run = Launched(driver, exported, [1, 130], 90, flags=1)
    assert [each["overlap"] for each in run.launches] == [True, True, False, False]  # the last are of the weight
    older = Launched(driver, exported, [1], 80, flags=1)
    assert not any(each["overlap"] for each in older.launches)


@pytest.mark.parametrize("exported", [("usual", "sm_80", "sm_90a")], indirect=True)
@pytest.mark.parametrize(
    ("capability", "target", "code"),
    [(80, "sm_80", "cubin"), (86, "sm_80", "cubin"), (90, "sm_90a", "cubin"), (100, "sm_80", "ptx")],
)
def test_which_target_a_gpu_takes(exported: Path, capability: int, target: str, code: str, driver: Path) -> None:
    """Machine code of its generation, or PTX that runs later: never that of sm_90a elsewhere."""
    run = Launched(driver, exported, [1], capability)
    assert run.found and run.found["target"] == target
    assert {each["kernel"].partition(":")[0] for each in run.launches} == {code}


@pytest.mark.parametrize("exported", [("usual", "sm_90a")], indirect=True)
def test_gpus_without_code(exported: Path, driver: Path) -> None:
    older = Launched(driver, exported, [1], 80)
    assert "no kernel in the folder runs on this GPU, sm_80; export for it as well" in older.error
    assert "finding the GPU: invalid device ordinal (101)" in Launched(driver, exported, [1], 90, device=3).error
    assert "m=2147483648 must be 0 to" in Launched(driver, exported, [1 << 31], 90).error


@pytest.mark.parametrize("exported", [("usual", "sm_80")], indirect=True)
@pytest.mark.parametrize(
    ("of", "changed"),
    [
        ("grid", {"rule": "log2", "number": 1}),
        ("grid", {"rule": "ceil", "number": 0}),
        ("grid", {"rule": "sm_count", "number": 1 << 40}),
        ("params", {"kind": "pointer", "from": "new"}),
        ("params", {"kind": "f32", "from": "x"}),
    ],
)
def test_what_the_runtime_does_not_know(of: str, changed: dict[str, Any], exported: Path, driver: Path) -> None:
    """A manifest that is whole, of a kernel that is started in another way: nothing is launched."""
    manifest = json.loads((exported / "manifest.json").read_text())
    kernel = manifest["matmuls"][0]["targets"][0]["kernels"][0]
    kernel[of][0] = {**kernel[of][0], **changed}
    seal(exported, manifest)
    run = Launched(driver, exported, [1], 80)
    assert f"kernel {kernel['name']} is started in a way that this runtime does not know" in run.error
    assert run.closed == {"closed": True, "contexts": 0, "modules": 0, "allocated": 0} and not run.launches


@pytest.mark.parametrize("exported", [("usual", "sm_80")], indirect=True)
def test_damaged_code_is_not_loaded(exported: Path, driver: Path) -> None:
    """A kernel of a folder, and what is left open after it."""
    damaged = next(exported.glob("kernels/it/sm_80/*_prepack.cubin"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    run = Launched(driver, exported, [1], 80)
    assert "_prepack.cubin is damaged: it has" in run.error and not run.launches
    assert run.closed == {"closed": True, "contexts": 0, "modules": 0, "allocated": 0}
