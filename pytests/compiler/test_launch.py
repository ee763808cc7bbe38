"""What a launch says of a kernel, and how its arguments lie in memory: no GPU, no MLIR."""

from __future__ import annotations

import ctypes
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compiled import compile_matmul
from hypothesis import given
from hypothesis import strategies as st

from lowbit.dialect.errors import SpecError
from lowbit.dialect.signature import PARAM_TYPES, Extent, Param, parse_grid
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.launch import Launch
from lowbit.passes.targets import parse_target
from lowbit.pylib.runtime.arguments import ArgumentBuffer, struct_layout

PARAMS = (
    Param("x", "pointer"),
    Param("alpha", "f32"),
    Param("map", "tensor_map"),
    Param("workspace", "pointer"),
    Param("m", "i32"),
)
LAUNCH = Launch(
    "k",
    parse_grid((3, "ceil(m / 16)", "sm_count * 2")),
    256,
    49152,
    PARAMS,
    workspace_bytes=64,
    may_overlap=True,
    boxes={"map": (64, 128)},
    roles={"x": "weight", "map": "input", "m": "rows"},
)
WRITTEN = {
    "name": "k",
    "grid": [3, "ceil(m / 16)", "sm_count * 2"],
    "threads": 256,
    "shared_bytes": 49152,
    "params": [["x", "pointer"], ["alpha", "f32"], ["map", "tensor_map"], ["workspace", "pointer"], ["m", "i32"]],
    "workspace_bytes": 64,
    "may_overlap": True,
    "boxes": {"map": [64, 128]},
    "roles": {"x": "weight", "map": "input", "m": "rows"},
}


@pytest.mark.parametrize("m", [0, 1, 15, 16, 17, 1000])
def test_a_grid_for_every_m(m: int) -> None:
    assert LAUNCH.blocks({"m": m}, sm_count=132) == (3, (m + 15) // 16, 264)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(SpecError, match=r"kernel k is called with a negative size: its grid would be \(3, -2, 2\)"):
        LAUNCH.blocks({"m": -32}, sm_count=1)


def test_more_blocks_than_a_gpu_takes_are_refused() -> None:
    assert LAUNCH.blocks({"m": 16 * 65535}, sm_count=132) == (3, 65535, 264)
    with pytest.raises(SpecError, match="the grid of kernel k has 65536 blocks along y; a GPU takes at most 65535"):
        LAUNCH.blocks({"m": 16 * 65535 + 1}, sm_count=132)


@given(st.integers(1, 1 << 31), st.sampled_from(["constant", "ceil", "sm_count", "sm_part"]), st.integers(1, 64))
def test_extents_are_read_as_they_are_written(number: int, rule: Any, divisor: int) -> None:
    extent = Extent(number, rule, "tokens" if rule == "ceil" else "")
    assert Extent.parse(json.loads(json.dumps(extent.written))) == extent
    for value in (1, number, number + 1, 7 * number):
        if extent.is_multiple_of(divisor):
            assert extent.blocks({"tokens": value}, sm_count=13) % divisor == 0


def test_json_there_and_back() -> None:
    assert json.loads(json.dumps(LAUNCH.to_dict())) == WRITTEN
    assert Launch.from_dict(WRITTEN) == LAUNCH


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": ["x", "m"]}, "expected params as pairs of a name and one of pointer, i32, f32, tensor_map"),
        ({"params": ["x", "m"]}, "got 'x'; compile the kernel again with this version"),
        ({"params": ["xm"]}, "got 'xm'; compile the kernel again with this version"),
        ({"params": [["x", "f64"]]}, r"got \['x', 'f64'\]"),
        ({"roles": {"x": "bias"}}, "expected roles of input, output, weight, rows, workspace, got 'bias'; compile the"),
        ({"grid": [1, 1]}, r"grid: expected three extents, got \[1, 1\]"),
        ({"grid": [1, 1, "m"]}, "'sm_count / NUMBER', got 'm'"),
    ],
)
def test_what_another_version_wrote_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Launch.from_dict(WRITTEN | change)


@pytest.mark.parametrize("field", ["threads", "may_overlap", "boxes", "roles"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(SpecError, match=f"launch: '{field}' is missing; compile the kernel again with this version"):
        Launch.from_dict({name: value for name, value in WRITTEN.items() if name != field})


@pytest.mark.parametrize(
    ("spec", "tokens", "target", "boxes"),
    [
        (MatmulSpec(128, 512, "u4", 128, bias=True), 1, "sm_90a", []),
        (MatmulSpec(128, 512, "u4", 128, bias=True), 1, "sm_80", []),
        (MatmulSpec(128, 512, "u4", 128, zeros="int"), 1024, "sm_90a", ["x"]),
    ],
    ids=str,
)
def test_a_launch_says_what_a_caller_must_know(spec: MatmulSpec, tokens: int, target: str, boxes: list[str]) -> None:
    """Whatever the language of the caller: it has neither the spec's tensors by name nor the schedule."""
    compiled = compile_matmul(spec, parse_target(target), tokens=tokens)
    launch = compiled.launch
    assert launch.may_overlap == ("griddepcontrol.wait" in compiled.ptx) == (target == "sm_90a")
    assert list(launch.boxes) == boxes == [p.name for p in launch.params if p.kind == "tensor_map"]
    usual = {"x": "input", "y": "output", "m": "rows", "workspace": "workspace"}
    weight = {slot.name: "weight" for slot in spec.tensors}
    assert launch.roles == {p.name: (usual | weight)[p.name] for p in launch.params}
    assert Launch.from_dict(json.loads(json.dumps(launch.to_dict()))) == launch


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["x", "alpha", "map"], "kernel k is called without m; it takes x, alpha, map, m"),
        (["x", "alpha", "map", "m", "y", "z"], "kernel k is called with y, z; it takes"),
        (["alpha", "map", "m", "y"], "kernel k is called without x and with y; it takes"),
        (["x", "alpha", "map", "m", "workspace"], "with workspace; it takes x, alpha, map, m"),
    ],
)
def test_names_of_arguments(given: list[str], message: str) -> None:
    LAUNCH.check_names(["m", "map", "alpha", "x"])
    with pytest.raises(SpecError, match=message):
        LAUNCH.check_names(given)


def test_layout_of_arguments() -> None:
    """As in C: every value at a multiple of its own size, tensor maps at multiples of 64."""
    layout = struct_layout(["i32", "pointer", "f32", "tensor_map", "i32", "tensor_map"])
    assert layout.offsets == (0, 8, 16, 64, 192, 256) and layout.size == 384
    assert struct.calcsize(layout.format) == layout.size
    assert struct_layout([]).size == 0


@given(st.lists(st.sampled_from(list(PARAM_TYPES)), max_size=12))
def test_layouts_are_aligned_and_do_not_overlap(kinds: list[Any]) -> None:
    sizes = {"pointer": 8, "i32": 4, "f32": 4, "tensor_map": 128}
    layout = struct_layout(kinds)
    ends = [offset + sizes[kind] for kind, offset in zip(kinds, layout.offsets)]
    assert all(offset % min(64, sizes[kind]) == 0 for kind, offset in zip(kinds, layout.offsets))
    assert all(end <= offset for end, offset in zip(ends, layout.offsets[1:]))
    assert struct.calcsize(layout.format) == layout.size == (ends[-1] if ends else 0)


def read(buffer: ArgumentBuffer, launch: Launch) -> list[Any]:
    """The values at the addresses that the driver is given, in the order of the kernel's signature."""
    types: dict[str, Any] = {"pointer": ctypes.c_uint64, "i32": ctypes.c_int32, "f32": ctypes.c_float}
    found: list[Any] = []
    for param, address in zip(launch.params, buffer.addresses):
        if param.kind == "tensor_map":
            assert address % 64 == 0
            found.append(ctypes.string_at(address, 128))
        else:
            found.append(types[param.kind].from_address(address).value)
    return found


def test_arguments_reach_the_kernel_in_any_order() -> None:
    buffer, encoded = ArgumentBuffer(LAUNCH, ["m", "map", "x", "alpha"]), bytes(range(128))
    for m in (7, -3):
        buffer.set(m, encoded, 1 << 47, 0.5, 4096)  # and last the workspace
        assert read(buffer, LAUNCH) == [1 << 47, 0.5, encoded, 4096, m]


def test_an_order_may_name_pointers_that_a_kernel_lacks() -> None:
    launch = Launch("k", parse_grid((1, 1, 1)), 32, 0, (Param("x", "pointer"), Param("m", "i32")))
    buffer = ArgumentBuffer(launch, ["x", "zeros", "m"])
    buffer.set(1 << 40, 0, 5)
    assert read(buffer, launch) == [1 << 40, 5]
    with pytest.raises(SpecError, match="kernel k is called without x; it takes x, m"):
        ArgumentBuffer(launch, ["zeros", "m"])


def test_a_launch_is_read_without_mlir_and_cuda(repo: Path) -> None:
    program = f"""
import sys
for name in ("torch_mlir", "mlir", "llvmlite", "cuda", "torch"):
    sys.modules[name] = None
from lowbit.passes.launch import Launch
print(Launch.from_dict({WRITTEN}).blocks({{"m": 33}}, 4))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, cwd=repo, capture_output=True, text=True)
    assert done.stdout == "(3, 3, 8)\n"
