"""Thin layers over the C runtime: functions for tvm-ffi, and an operator for torch without Python."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from c_runtime import BAD_ARGUMENT, compiler
from test_cmake import run, tool
from torch import Tensor

import lowbit
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.top_k import TopK
from lowbit.pylib.reference.inputs import random_inputs, random_residual
from lowbit.pylib.weights.packed import pack

ROOT = Path(__file__).resolve().parents[2]
SPEC = MatmulSpec(64, 256, "u4", group_size=64, act="bf16", out="f32")
PLUS = replace(SPEC, epilogue="residual")
IDS = MatmulSpec(3 * 32, 96, "u4", group_size=32, experts=3, top_k=TopK(2, "i64"))
ADDED = replace(IDS, top_k=TopK(2, "i32", "f32"))
PROJECT = """
cmake_minimum_required(VERSION 3.19)
project(engines LANGUAGES C CXX)
add_subdirectory("ROOT" lowbit)
lowbit_add_folder(it FOLDER "folder" SHARED)
lowbit_add_folder(inside FOLDER "folder")
if(WITH_TORCH)
  lowbit_add_torch_library(it_torch MATMULS inside)
endif()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with an exported folder in it."""
    path = tmp_path_factory.mktemp("project")
    lowbit.export({"it": SPEC, "plus": PLUS, "ids": IDS, "added": ADDED}, "cpu", path / "folder")
    (path / "CMakeLists.txt").write_text(PROJECT.replace("ROOT", str(ROOT)))
    return path


def built(project: Path, target: str, *options: str) -> Path:
    compiler("cc"), compiler("c++")
    cmake, build = tool("cmake"), project / "build"
    run(cmake, "-S", project, "-B", build, f"-DLOWBIT_PYTHON={sys.executable}", *options, folder=project)
    run(cmake, "--build", build, "--target", target, folder=project)
    return build / f"lib{target}.so"


# -- tvm-ffi


class View(ctypes.Structure):
    """DLTensor"""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Any_(ctypes.Structure):
    """TVMFFIAny"""

    _fields_ = (("kind", ctypes.c_int32), ("zero", ctypes.c_int32), ("value", ctypes.c_int64))


INTEGER, VIEW, OBJECT = 1, 7, 70
CODES = {torch.uint8: 1, torch.int32: 0, torch.int64: 0, torch.bfloat16: 4}  # DLDataTypeCode; 2 for IEEE floats


class Functions:
    """A library's functions, called as tvm-ffi calls them.

    as_objects  whether tensors come behind the header of an object of tvm-ffi, and not as views alone
    """

    def __init__(self, library: Path, as_objects: bool = False) -> None:
        self.c, self._as_objects = ctypes.CDLL(str(library)), as_objects
        self.c.lowbit_error_text.restype = ctypes.c_char_p

    def __call__(self, name: str, *given: Tensor | int) -> int:
        """Returns the result, or raises ValueError with what was wrong."""
        kept: list[Any] = []
        arguments = (Any_ * len(given))(*(self._argument(each, kept) for each in given))
        result = Any_()
        if getattr(self.c, f"__tvm_ffi_{name}")(None, arguments, len(given), ctypes.byref(result)):
            raise ValueError(self.c.lowbit_error_text().decode())
        return result.value

    def _argument(self, given: Tensor | int, kept: list[Any]) -> Any_:
        if isinstance(given, int):
            return Any_(INTEGER, 0, given)
        shape, strides = ((ctypes.c_int64 * given.ndim)(*sizes) for sizes in (given.shape, given.stride()))
        view = View(given.data_ptr() - 8, 1, 0, given.ndim, CODES.get(given.dtype, 2), 8 * given.itemsize, 1)
        view.shape, view.strides, view.byte_offset = shape, strides, 8
        if not self._as_objects:
            kept.append(view)
            return Any_(VIEW, 0, ctypes.addressof(view))
        object_ = ctypes.create_string_buffer(bytes(24) + bytes(view))
        kept += [object_, shape, strides]
        return Any_(OBJECT, 0, ctypes.addressof(object_))


@pytest.mark.parametrize("as_objects", [False, True])
def test_tvm_ffi(project: Path, as_objects: bool) -> None:
    """A matmul as tvm_ffi.load_module would call it; nothing of tvm-ffi is there."""
    functions, mm = Functions(built(project, "it"), as_objects), lowbit.compile(SPEC, "cpu")
    x, tensors = random_inputs(SPEC, 5)
    w, y = mm.pack(**tensors), torch.full((5, SPEC.n), torch.nan)
    workspace = torch.zeros(functions("it_workspace_bytes", x, 5), dtype=torch.uint8)
    assert functions("it", x, y, workspace, *w.tensors) == 0
    assert torch.equal(y, mm(x, w)) and functions("it_tile", x, 5) == 0
    calls: list[tuple[str, tuple[Tensor | int, ...], str]] = [
        ("it", (x, y, workspace), "2 tensors of the weight and 0 others are wanted, not 3 arguments"),
        ("it", (x, y), "x, y, a workspace and a weight are wanted"),
        ("it", (x.half(), y, workspace, *w.tensors), r"x must be contiguous, \[rows, 256\]"),
        ("it", (x, y.bfloat16(), workspace, *w.tensors), r"y must be contiguous, \[rows, 64\]"),
        ("it", (x.T.contiguous().T, y, workspace, *w.tensors), "x must be contiguous"),
        ("it", (x[:3], y, workspace, *w.tensors), "x has 3 rows, and y 5"),
        ("it", (x, y, workspace[:4], *w.tensors), "workspace_bytes=4 must be at least"),
        ("it", (x, y, 1, *w.tensors), "argument 2 must be a tensor"),
        ("it_workspace_bytes", (x, -1), "m=-1 must be 0 to"),
        ("it_workspace_bytes", (x, x), "a tensor and a number of rows are wanted"),
    ]
    for name, arguments, text in calls:
        with pytest.raises(ValueError, match=text):
            functions(name, *arguments)
    assert BAD_ARGUMENT == 1


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("ids", {"ids": torch.int32}, "ids, argument {0}, must be of type i64, as it was exported; convert it"),
        ("ids", {"ids": 3}, "ids, argument {0}, has 48 bytes, and 64 are read for 8 rows of y"),
        ("added", {"ids": torch.int64}, "ids, argument {0}, must be of type i32"),
        ("added", {"ids": 3}, "ids, argument {0}, has 24 bytes, and 32 are read for 4 rows of y"),
        ("added", {"weights": torch.float16}, "router_weights, argument {1}, must be of type f32"),
        ("added", {"weights": 3}, "router_weights, argument {1}, has 24 bytes, and 32 are read for 4 rows of y"),
        ("added", {"scales": 1}, "scales, argument 4, has .* bytes, and .* are read"),
    ],
)
def test_inputs_of_tvm_ffi(project: Path, name: str, wrong: dict[str, torch.dtype | int], text: str) -> None:
    """4 tokens of 2 experts each: types and sizes of ids, of router weights and of the weight's tensors."""
    functions, spec = Functions(built(project, "it")), {"ids": IDS, "added": ADDED}[name]
    sums = spec is ADDED
    x, tensors = random_inputs(replace(spec, top_k=None), 8 if sums else 4)
    w = pack(replace(spec, top_k=None), **tensors)
    y = torch.full((4 if sums else 8, 32), torch.nan, dtype=torch.float16)
    given = {**{slot.name: w[slot.name] for slot in w.spec.tensors}}
    given |= {"ids": torch.zeros(4, 2, dtype=torch.int32 if sums else torch.int64)}
    given |= {"weights": torch.ones(4, 2)} if sums else {}
    workspace = torch.zeros(functions(f"{name}_workspace_bytes", x, 8), dtype=torch.uint8)
    places = [3 + len(w.tensors), 4 + len(w.tensors)]
    for each, how in wrong.items():
        cut = given[each][:how].contiguous() if isinstance(how, int) else given[each].to(how)
        with pytest.raises(ValueError, match=text.format(*places)):
            functions(name, x, y, workspace, *(given | {each: cut}).values())
    assert y.isnan().all()
    functions(name, x, y, workspace, *given.values())
    assert y.isfinite().all()


# -- torch

WITHOUT_LOWBIT = """
import sys, torch
torch.ops.load_library(sys.argv[1])
x, weight, kernel, y, plus, residual, z = torch.load(sys.argv[2])
assert torch.equal(torch.ops.lowbit.matmul.packed(x, weight, kernel), y)
assert torch.ops.lowbit.matmul.packed(x[None, 1:], weight, kernel).shape == (1, *y[1:].shape)
assert torch.ops.lowbit.matmul.packed(x[:0], weight, kernel).shape == (0, y.shape[1])
assert torch.equal(torch.ops.lowbit.matmul.packed(x, [*weight, residual], plus), z)
for wrong in (
    (x, weight, kernel.replace("256", "512")),
    (x.half(), weight, kernel),
    (x[:, 1:], weight, kernel),
    (x, weight[:1], kernel),
    (x, [weight[0], weight[1][:1]], kernel),
    (x, [*weight, residual], kernel),
    (x, weight, plus),
    (x, [*weight, residual[:4]], plus),
    (x, [*weight, residual.int()], plus),
):
    try:
        torch.ops.lowbit.matmul.packed(*wrong)
    except RuntimeError as error:
        print(error)
assert "lowbit" not in sys.modules
"""


@pytest.mark.slow
def test_torch_operator(project: Path, tmp_path: Path) -> None:
    """The operator of saved graphs, in a process that has torch and no lowbit."""
    library, mm = built(project, "it_torch", "-DWITH_TORCH=ON"), lowbit.compile(SPEC, "cpu")
    x, tensors = random_inputs(SPEC, 5)
    w = mm.pack(**tensors)
    plus, residual = lowbit.compile(PLUS, "cpu"), random_residual(PLUS, 5)["residual"]
    z = plus(x, plus.pack(**tensors), residual=residual)
    torch.save((x, list(w.tensors), mm.description, mm(x, w), plus.description, residual, z), tmp_path / "saved")
    command = [sys.executable, "-c", WITHOUT_LOWBIT, str(library), str(tmp_path / "saved")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert "no matmul '" in first and len(others) == 8
    assert all("x, the weight or an input does not fit" in each for each in others)
