"""Every mistake a user can make gets an error that says what was given, what is allowed, and the fix.

And it costs nothing: after each mistake the same objects still give the same result.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_pipeline import FakePipeline, pipeline
from torch.autograd import forward_ad

import lowbit
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.targets import parse_target
from lowbit.pylib import PackError, SpecError, TargetError
from lowbit.pylib.build import knobs
from lowbit.pylib.matmul import Matmul
from lowbit.pylib.reference import random_problem

__all__ = ["pipeline"]

SPEC = lowbit.MatmulSpec(n=48, k=256, weight="u4", group_size=64, zeros="int")
PROBLEM = random_problem(SPEC, 3)

MISTAKES: list[tuple[type[lowbit.LowbitError], str, dict[str, Any]]] = [
    (SpecError, r"unknown weight format 'u9'; allowed: .*u1\.\.u8", {"weight": "u9"}),
    (SpecError, r"did you mean 'u4'\?", {"weight": "uint4"}),
    (SpecError, "weight=4 must be the name of a format", {"weight": 4}),
    (SpecError, "f6e3m3: .* must make 6 bits", {"weight": "f6e3m3"}),
    (SpecError, "group_size=96 must divide k=256; try 64 or 128", {"group_size": 96}),
    (SpecError, "group_size=8 must be at least 16", {"group_size": 8}),
    (SpecError, "n=0 must be at least 1", {"n": 0}),
    (SpecError, "k=8 must be at least 16", {"k": 8, "group_size": None}),
    (SpecError, "n=2147483648 must be at most 1073741824", {"n": 1 << 31}),
    (SpecError, "n='48' must be an integer", {"n": "48"}),
    (SpecError, "act='f32' must be one of 'f16', 'bf16'", {"act": "f32"}),
    (SpecError, "scale='f17' must be one of .* did you mean 'f16'", {"scale": "f17"}),
    (SpecError, "zeros='int' needs an integer weight", {"weight": "nf4"}),
    (SpecError, "bias=1 must be True or False", {"bias": 1}),
    (SpecError, "lut4 needs table= with 16 values", {"weight": "lut4", "zeros": "none"}),
    (SpecError, r"±2\^127; got 1e\+300", {"weight": "lut1", "zeros": "none", "table": (0, 1e300)}),
    (SpecError, "table= goes with weight='lut<b>' only", {"table": (0.0,) * 16}),
]


def test_a_number_that_python_does_not_write() -> None:
    with pytest.raises(SpecError, match="n=a number of thousands of digits must be at most 1073741824"):
        replace(SPEC, n=10**5000)


@pytest.mark.parametrize(("error", "message", "change"), MISTAKES, ids=lambda v: str(v)[:40])
def test_spec(error: type[lowbit.LowbitError], message: str, change: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        replace(SPEC, **change)


@pytest.mark.parametrize(
    "change", [{"tokens": "8"}, {"num_stages": None}, {"warps_k": 2.0}, {"split_k": True}], ids=str
)
def test_schedule_of_no_integers(change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    with pytest.raises(SpecError, match=f"schedule: {name}={value!r} must be an integer"):
        Schedule(**change)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("unknown target 'sm_70'; allowed: 'cpu', 'sm_80'", (SPEC, "sm_70")),
        ("unknown target 'cuda'; .*'emulator'; leave it out for this machine's GPU", (SPEC, "cuda")),
        ("unknown target ''", (SPEC, "")),
        ("unknown target 'emulator:cpu'", (SPEC, "emulator:cpu")),
        ("target=90 must be a name", (SPEC, 90)),
        ("spec='u4' must be a MatmulSpec", ("u4",)),
        ("schedule=8 must be one of Schedule, IntegerSchedule, PrefillSchedule, ", (SPEC, "sm_80", 8)),
        ("schedule= is for GPU targets", (SPEC, "cpu", Schedule())),
    ],
)
def test_compile(message: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(lowbit.LowbitError, match=message):
        lowbit.compile(*arguments)


def _with(tensor: torch.Tensor | None, value: float) -> torch.Tensor:
    """A copy with one element changed."""
    assert tensor is not None
    changed = tensor.clone()
    changed[5, 2] = value
    return changed


_, CODES, SCALES, ZEROS, _ = PROBLEM


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (r"codes\[5, 2\] = 16 must be in 0..15", {"codes": _with(CODES, 16)}),
        (r"codes\[5, 2\] = -1 must be in 0..15", {"codes": _with(CODES.to(torch.int8), -1)}),
        (r"codes must be \[n, k\] = \[48, 256\], not \[256, 48\]; transpose it", {"codes": CODES.T}),
        ("codes must be integers, not torch.float32", {"codes": CODES.float()}),
        ("codes must be a torch tensor or a NumPy array, not list", {"codes": CODES.tolist()}),
        (r"scales\[5, 2\] = nan must be finite", {"scales": _with(SCALES, float("nan"))}),
        (r"scales\[5, 2\] = inf must be finite", {"scales": _with(SCALES, float("inf"))}),
        (r"scales\[5, 2\] = 100000 overflows f16", {"scales": _with(SCALES.float(), 1e5)}),
        (r"scales must be \[n, groups\] = \[48, 4\], not \[48, 2\]", {"scales": SCALES[:, :2]}),
        (r"zeros\[5, 2\] = 256 must be in 0..255", {"zeros": _with(ZEROS, 256)}),
        ("zeros must be integers, not torch.float16", {"zeros": SCALES}),
        ("needs zeros; pass zeros", {"zeros": None}),
        ("has no bias; drop bias", {"bias": SCALES[:, 0]}),
        ("scales is on meta, but codes are on cpu", {"scales": SCALES.to("meta")}),
        ("codes are on meta: they have no values", {"codes": CODES.to("meta")}),
        (r"codes is torch.sparse_coo; use .to_dense\(\)", {"codes": CODES.to_sparse()}),
        ("codes: .* byte order", {"codes": CODES.numpy().astype(">i4")}),
        ("codes: can't convert np.ndarray of type numpy.object_", {"codes": CODES.numpy().astype(object)}),
    ],
)
def test_pack(message: str, change: dict[str, Any]) -> None:
    mm = lowbit.compile(SPEC, "cpu")
    good = {"codes": CODES, "scales": SCALES, "zeros": ZEROS, "bias": None}
    with pytest.raises(PackError, match=message):
        mm.pack(**(good | change))


X = PROBLEM[0]


@pytest.mark.parametrize(
    ("error", "message", "x"),
    [
        (SpecError, r"x is torch.float32, but act='f16'; use x.to\(torch.float16\)", X.float()),
        (SpecError, "x is torch.bfloat16", X.bfloat16()),
        (SpecError, "x is torch.int64", X.long()),
        (SpecError, "x is torch.complex64", X.to(torch.complex64)),
        (SpecError, r"x must be \[..., k=256\], not \[256, 3\]", X.T),
        (SpecError, r"x must be \[..., k=256\], not \[3, 255\]", X[:, 1:]),
        (SpecError, r"x must be \[..., k=256\], not \[\]", X[0, 0]),
        (SpecError, r"x must be \[..., k=256\], not \[0\]", X[0, :0]),
        (SpecError, "x must be a torch tensor, not ndarray", X.numpy()),
        (SpecError, "x must be a torch tensor, not list", [[1.0]]),
        (SpecError, "x must be a torch tensor, not NoneType", None),
        (SpecError, r"x is torch.sparse_coo; use x.to_dense\(\)", X.to_sparse()),
        (TargetError, r"target cpu takes CPU tensors, not meta; use .cpu\(\)", X.to("meta")),
    ],
)
def test_x(error: type[lowbit.LowbitError], message: str, x: Any) -> None:
    mm = lowbit.compile(SPEC, "cpu")
    w = mm.pack(*PROBLEM[1:])
    before = mm(X, w)
    with pytest.raises(error, match=message):
        mm(x, w)
    assert torch.equal(mm(X, w), before)


@pytest.mark.parametrize(
    "change",
    [{"weight": "f4e2m1", "zeros": "none"}, {"zeros": "none"}, {"n": 47}, {"scale": "bf16"}, {"act": "bf16"}],
    ids=str,
)
def test_packed_weight_of_another_spec(change: dict[str, Any]) -> None:
    """Even where the bytes have the same shape."""
    mm = lowbit.compile(SPEC, "cpu")
    other = replace(SPEC, **change)
    w = lowbit.compile(other, "cpu").pack(*random_problem(other, 1)[1:])
    for use in (lambda: mm(X, w), lambda: mm.dequantize(w)):
        with pytest.raises(PackError, match=r"the weight was packed for \(.*\), not for \(u4\[48, 256\]"):
            use()


@pytest.mark.parametrize("w", [CODES, None, (CODES, SCALES)], ids=["tensor", "None", "tuple"])
def test_weight_that_is_not_packed(w: Any) -> None:
    mm = lowbit.compile(SPEC, "cpu")
    with pytest.raises(SpecError, match=r"x must be a torch tensor, not PackedWeight; call mm\(x, w\)"):
        mm(mm.pack(*PROBLEM[1:]), w)  # type: ignore[arg-type]
    for use in (lambda: mm(X, w), lambda: mm.dequantize(w)):
        with pytest.raises(PackError, match=f"must be a PackedWeight, not {type(w).__name__}; use pack"):
            use()


@pytest.mark.parametrize("transform", ["grad", "vmap", "jacfwd", "jacrev", "functionalize"])
def test_functional_transforms(transform: str) -> None:
    mm = lowbit.compile(SPEC, "cpu")
    w = mm.pack(*PROBLEM[1:])
    transformed = getattr(torch.func, transform)(lambda x: mm(x, w).float().sum(-1 if transform == "vmap" else None))
    with pytest.raises(SpecError, match=r"torch.func's transforms \(grad, vmap, jvp\) do not go through a matmul"):
        transformed(X)


def test_forward_mode() -> None:
    """Neither a call nor the operator loses a tangent without a word."""
    mm = lowbit.compile(SPEC, "cpu")
    w = mm.pack(*PROBLEM[1:])
    arguments = list(w.tensors), mm.description
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X, X)
        for use in (lambda: mm(x, w), lambda: torch.ops.lowbit.matmul.packed(x, *arguments)):
            with pytest.raises(SpecError, match="forward-mode gradients do not go through a matmul"):
                use()
    with pytest.raises(SpecError, match="forward-mode gradients do not go through a matmul"):
        torch.func.jvp(lambda x: torch.ops.lowbit.matmul.packed(x, *arguments), (X,), (X,))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("must be what state_dict", None),
        ("must be what state_dict", {"codes": None}),
        ("must be what state_dict", {"spec": "u4"}),
        ("'spec' is not what state_dict", {"spec": torch.zeros(8)}),
        ("'spec' is not what state_dict", {"spec": torch.tensor(list(b"{bad"), dtype=torch.uint8)}),
        ("'spec' is not what state_dict", {"spec": torch.tensor(list(b"[1]"), dtype=torch.uint8)}),
        ("packed codes must be torch.int32", {"codes": torch.zeros(3)}),
    ],
)
def test_saved_weight_that_is_damaged(message: str, change: dict[str, Any] | None) -> None:
    saved: Any = lowbit.compile(SPEC, "cpu").pack(*PROBLEM[1:]).state_dict()
    with pytest.raises(PackError, match=message):
        lowbit.PackedWeight.from_state_dict(None if change is None else saved | change)  # type: ignore[arg-type]
    with pytest.raises(PackError, match="spec='u4' must be a MatmulSpec"):
        lowbit.PackedWeight.from_state_dict(saved, "u4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "description",
    ["", "u4", "[]", '{"spec": {"version": 1}, "target": "cpu"}', "[" * 100000, '{"spec": ' * 100000],
    ids=lambda description: description[:20],
)
def test_operator_of_no_matmul(description: str) -> None:
    weight, operators = list(lowbit.compile(SPEC, "cpu").pack(*PROBLEM[1:]).tensors), torch.ops.lowbit
    for call in (
        lambda: operators.matmul.packed(X, weight, description),
        lambda: operators.matmul.quantized(X, X, X, weight, description),
        lambda: operators.dequantize(weight, description),
        lambda: operators.dequantize([t.to("meta") for t in weight], description),
    ):
        with pytest.raises(SpecError, match="must be a Matmul's description") as raised:
            call()
        assert len(str(raised.value)) < 400


def test_weight_elsewhere() -> None:
    mm = lowbit.compile(SPEC, "cpu")
    w = mm.pack(*PROBLEM[1:])
    away = w.to("meta")
    for use in (lambda: mm(X, away), lambda: mm(X.to("meta"), away), lambda: mm.dequantize(away)):
        with pytest.raises(PackError, match="the weight's tensors are on meta: they have no values"):
            use()


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, pipeline: FakePipeline) -> None:
    """Compiling for a GPU works without one; calling says what is missing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    mm = lowbit.compile(SPEC, "sm_90a")
    w = mm.pack(*PROBLEM[1:])
    message = "for sm_90a, but torch finds no CUDA device here; .* target='cpu', .* target='emulator:sm_90a'"
    uses: list[Callable[[], object]] = [lambda: mm(X, w), lambda: mm(X[:0], w), lambda: mm.dequantize(w)]
    uses.append(lambda: mm(X.repeat(30, 1), w))
    for use in uses:
        with pytest.raises(TargetError, match=message):
            use()


def test_cpu_tensor_for_a_gpu_kernel(monkeypatch: pytest.MonkeyPatch, pipeline: FakePipeline) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    mm = lowbit.compile(SPEC, "sm_86")
    with pytest.raises(TargetError, match=r"a matmul for sm_86 takes CUDA tensors; use .cuda\(\)"):
        mm(X, mm.pack(*PROBLEM[1:]))


@pytest.mark.parametrize(
    ("target", "capability", "fits"),
    [
        ("sm_90a", (8, 6), False),
        ("sm_90a", (10, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_90", (10, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_80", (9, 0), True),
        ("sm_89", (8, 6), False),
    ],
)
def test_gpu_of_another_architecture(
    monkeypatch: pytest.MonkeyPatch, target: str, capability: tuple[int, int], fits: bool
) -> None:
    from lowbit.pylib.runtime.gpu import check_device

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    if fits:
        check_device(parse_target(target), 0)
    else:
        have = 10 * capability[0] + capability[1]
        message = rf"for {target}, but cuda:0 \(A GPU\) is sm_{have}; compile with target=None"
        with pytest.raises(TargetError, match=message):
            check_device(parse_target(target), 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a driver")
def test_no_driver() -> None:
    from lowbit.pylib.runtime.driver import driver_call

    with pytest.raises(TargetError, match=r"no NVIDIA driver on this machine .*use target='cpu'"):
        driver_call("cuDeviceGetCount")


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        ("torch_mlir", "no usable MLIR Python bindings .*torch_mlir.* pip install 'torch-mlir>="),
        ("llvmlite", "llvmlite is needed to generate code .* pip install 'llvmlite>=0.48'"),
        ("cuda", "a cubin needs nvJitLink or ptxas, and neither is here; pip install cuda-bindings nvidia-nvjitlink"),
    ],
)
def test_missing_wheel(wheel: str, message: str, repo: Path) -> None:
    """In a new process in which the wheel can't be imported; what does not need it goes on."""
    program = f"""
import sys
sys.modules["mlir"] = sys.modules["{wheel}"] = None
import lowbit
spec = lowbit.MatmulSpec(n=16, k=64, weight="u4")
for target in ("sm_80", "cpu"):
    try:
        print(lowbit.compile(spec, target))
    except lowbit.TargetError as error:
        print(error)
"""
    environment = os.environ | {"LOWBIT_NO_CACHE": "1", "PATH": "/nonexistent"}  # no ptxas
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, cwd=repo, env=environment, capture_output=True, text=True)
    gpu, cpu = done.stdout.splitlines()
    assert re.match(message, gpu)
    assert cpu == "Matmul(u4[16, 64] f16 scale per row: f16 -> f16; on cpu)" if wheel == "cuda" else cpu == gpu


def test_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pipeline: FakePipeline) -> None:
    """Nobody can make a file in /proc, root neither; a name that can't be a directory at all is the user's mistake."""
    monkeypatch.setenv("LOWBIT_CACHE_DIR", "/proc/lowbit")
    with pytest.warns(UserWarning, match=r"lowbit's cache in /proc/lowbit can't be written \(.*set LOWBIT_CACHE_DIR"):
        assert Matmul(SPEC, parse_target("sm_90a"), None).cubin
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "folder"):
        monkeypatch.setenv("LOWBIT_CACHE_DIR", str(folder))
        with pytest.raises(SpecError, match=r"LOWBIT_CACHE_DIR=.* can't be used .*; name a directory"):
            Matmul(SPEC, parse_target("sm_90a"), None)


def test_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder called "~" in the working directory."""
    for name in ("HOME", "LOWBIT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it comes to
    assert knobs.cache_dir() == Path("/nonexistent/lowbit")


def test_dump_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pipeline: FakePipeline) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOWBIT_DUMP", str(tmp_path / "file"))
    with pytest.raises(SpecError, match=r"LOWBIT_DUMP=.*/file can't be written .*; name a folder of yours"):
        Matmul(SPEC, parse_target("sm_90a"), None)


def test_every_error_is_a_lowbit_error_and_a_value_error() -> None:
    names = ("SpecError", "PackError", "LayoutError", "PassError", "TargetError", "EmulatorError")
    for name in names:
        assert issubclass(getattr(lowbit, name), lowbit.LowbitError)
    assert issubclass(lowbit.LowbitError, ValueError)


def test_numpy_serves_where_it_can() -> None:
    """What is no mistake: NumPy arrays for the weight."""
    mm = lowbit.compile(SPEC, "cpu")
    arrays = [np.asarray(CODES), SCALES.numpy(), None if ZEROS is None else ZEROS.numpy()]
    assert torch.equal(mm(X, mm.pack(*arrays)), mm(X, mm.pack(*PROBLEM[1:])))


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_experts_by_ids_are_no_matmul(target: str) -> None:
    spec = lowbit.MatmulSpec(4 * 64, 128, "u4", 32, experts=4, top_k=lowbit.TopK(2))
    with pytest.raises(lowbit.SpecError, match="LowbitExperts does for few tokens; drop top_k="):
        lowbit.compile(spec, target)
