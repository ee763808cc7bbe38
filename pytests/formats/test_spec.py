"""What a `MatmulSpec` takes, what it derives, and what it says about a mistake."""

from __future__ import annotations

import dataclasses
import gc
import json
import pickle
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.names import weight_advice
from lowbit.dialect.formats.packing import Packing
from lowbit.dialect.spec import MatmulSpec, interned


def spec(**changes: Any) -> MatmulSpec:
    return MatmulSpec(**{"n": 64, "k": 4096, "weight": "u4", **changes})


def test_frozen_hashable_and_picklable() -> None:
    s = spec(group_size=128, zeros="int")
    assert s == spec(group_size=128, zeros="int") and hash(s) == hash(spec(group_size=128, zeros="int"))
    assert s != spec(group_size=64, zeros="int")
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.n = 3  # type: ignore[misc]
    assert s.packing.bits == 4  # a cached property must not change what a spec is
    assert pickle.loads(pickle.dumps(s)) == s == spec(group_size=128, zeros="int")
    assert dataclasses.replace(s, n=128).packing.n == 128


def test_numpy_numbers_become_python_numbers() -> None:
    s = spec(n=np.int64(64), k=np.int32(4096), group_size=np.uint8(128))
    assert s == spec(group_size=128) and {type(s.n), type(s.k), type(s.group_size)} == {int}


@pytest.mark.parametrize("table", [[1, 2.5], (1, 2.5), np.array([1, 2.5]), torch.tensor([1, 2.5])])
def test_tables_become_tuples_of_floats(table: Any) -> None:
    s = spec(weight="lut1", table=table)
    assert s.table == (1.0, 2.5) and isinstance(s.table, tuple) and hash(s) is not None
    assert s.dtype.values().tolist() == [1.0, 2.5]


def test_derived() -> None:
    s = MatmulSpec(100, 4096, "i3", 64, zeros="int", scale="f32", act="bf16", bias=True)
    assert s.dtype.name == "i3" and s.packing == Packing(3, 100, 4096, 64)
    assert s.groups == 64 and spec().groups == 1
    assert s.out_dtype == "bf16" and spec(out="f32").out_dtype == "f32" and spec().out_dtype == "f16"


@pytest.mark.parametrize(
    "zeros, scale, act, kind",
    [
        ("none", "f16", "f16", None),
        ("int", "e8m0", "f16", "u8"),
        ("float", "f32", "f16", "f32"),
        ("float", "bf16", "f16", "bf16"),
        ("float", "e8m0", "bf16", "bf16"),
        ("float", "e4m3", "f16", "f16"),
    ],
)
def test_zero_kind(zeros: str, scale: str, act: str, kind: str | None) -> None:
    assert spec(zeros=zeros, scale=scale, act=act).zero_kind == kind


def test_bytes() -> None:
    s = MatmulSpec(100, 4096, "u4", 128, zeros="int", bias=True, out="f32")
    rows = 112  # whole blocks of 16
    assert s.bytes == rows * 4096 // 2 + rows * 32 * (2 + 1) + 100 * 4


def test_one_line() -> None:
    s = spec(group_size=128, zeros="int", bias=True, out="f32")
    assert str(s) == "u4[64, 4096] f16 scale per 128, int zeros: f16 -> f32 + bias"
    assert str(spec(weight="nf4")) == "nf4[64, 4096] f16 scale per row: f16 -> f16"


@pytest.mark.parametrize("weight", ["u1", "i8", "f3e1m1", "f8e5m2", "nf4", "fp4_bnb"])
@pytest.mark.parametrize("zeros", ["none", "float"])
def test_every_kind_of_weight(weight: str, zeros: str) -> None:
    assert spec(weight=weight, zeros=zeros).dtype.name == weight


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n": 0}, "n=0 must be at least 1"),
        ({"n": True}, "n=True must be an integer, at least 1"),
        ({"n": 1.5}, "n=1.5 must be an integer"),
        ({"n": np.bool_(True)}, "must be an integer"),
        ({"n": "64"}, "n='64' must be an integer"),
        ({"k": 8}, "k=8 must be at least 16"),
        ({"k": None}, "k=None must be an integer, at least 16"),
        (
            {"group_size": 96},
            "group_size=96 must divide k=4096; try 64 or 128, or None for one scale per row",
        ),
        ({"group_size": 8}, "group_size=8 must be at least 16 and divide k=4096; try 16"),
        ({"group_size": 8192}, "group_size=8192 must divide k=4096; try 4096"),
        ({"k": 97, "group_size": 17}, "must divide k=97; try 97"),
        ({"group_size": 128.0}, "group_size=128.0 must be an integer"),
        ({"group_size": True}, "group_size=True must be an integer"),
        ({"group_size": -1}, "group_size=-1 must be at least 1"),
        ({"zeros": None}, "zeros=None must be one of 'none', 'int', 'float'"),
        ({"zeros": "ints"}, "did you mean 'int'?"),
        ({"scale": "f17"}, "'i6', 'i8', 'lut8'; did you mean 'f16'?"),
        ({"act": "float61"}, "act='float61' must be one of 'f16', 'bf16'; did you mean 'f16'?"),
        ({"act": torch.float32}, "act='f32' must be one of 'f16', 'bf16'"),
        ({"act": torch.int8}, "act=torch.int8 must be one of 'f16', 'bf16'"),
        ({"act": "f32"}, "act='f32' must be one of"),
        ({"out": "e4m3"}, "out='e4m3' must be one of 'f16', 'bf16', 'f32'"),
        ({"bias": 1}, "bias=1 must be True or False"),
        ({"bias": None}, "bias=None must be True or False"),
        ({"weight": "int3"}, "unknown weight format 'int3'; allowed: u1..u8, i1..i8"),
        ({"weight": "int3"}, "did you mean 'i3'?"),
        ({"weight": "int4"}, "weight='int4': use weight='u4', zeros='int' for GPTQ and AWQ, or 'i4' for two's"),
        ({"weight": "mxfp4"}, "weight='mxfp4': use weight='f4e2m1', group_size=32, scale='e8m0'"),
        ({"weight": "MX-FP4"}, "weight='MX-FP4': use weight='f4e2m1', group_size=32, scale='e8m0'"),
        ({"weight": "nvfp4"}, "weight='nvfp4': use weight='f4e2m1', group_size=16, scale='e4m3'"),
        ({"weight": "fp4"}, "weight='fp4': use weight='f4e2m1', or 'fp4_bnb'"),
        ({"weight": torch.float8_e5m2}, "weight='float8_e5m2': use weight='f8e5m2'"),
        ({"weight": "q4_K_M"}, "use weight='u4', group_size=32, zeros='offset', scale='u6', bilevel=Bilevel(groups=8)"),
        ({"weight": "uint3"}, "did you mean 'u3'?"),
        ({"weight": "NF4"}, "did you mean 'nf4'?"),
        ({"weight": "fp8_e4m3fn"}, "weight='fp8_e4m3fn': use weight='f8e4m3'"),
        ({"weight": "int8"}, "did you mean 'i8'?"),
        ({"weight": "f6e9m9"}, "must make 6 bits (1+9+9 = 19)"),
        ({"weight": 4}, "weight=4 must be the name of a format, such as 'u4'"),
        (
            {"weight": "nf4", "zeros": "int"},
            "needs an integer weight (u1..u8, i1..i8), not 'nf4'; use 'float'",
        ),
        ({"weight": "f8e4m3", "zeros": "int"}, "needs an integer weight"),
        ({"table": [1.0] * 16}, "drop it or use 'lut4'"),
        ({"weight": "lut2"}, "lut2 needs table= with 4 values; got none"),
        ({"weight": "lut2", "table": [1, 2]}, "lut2 needs table= with 4 values; got 2 values"),
        ({"weight": "lut1", "table": [[1], [2]]}, "must be a flat sequence of numbers"),
        ({"weight": "lut1", "table": ["a", "b"]}, "must be a flat sequence of numbers"),
        ({"weight": "lut1", "table": [1.0, float("inf")]}, "must be finite"),
    ],
)
def test_errors_name_the_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        spec(**changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "s",
    [
        spec(),
        MatmulSpec(3, 48, "i8", 16, "int", "e8m0", "bf16", "f32", True),
        spec(weight="lut1", table=(-0.1, 1 / 3), out="f16", zeros="float"),
    ],
)
def test_written_as_json(s: MatmulSpec) -> None:
    written = json.loads(json.dumps(s.to_dict()))
    assert MatmulSpec.from_dict(written) == s
    defaults = {f.name: f.default for f in dataclasses.fields(s)}
    assert written["version"] == 1 and not any(written[name] == defaults[name] for name in written if name in defaults)


def test_only_what_differs_is_written() -> None:
    assert MatmulSpec(16, 64, "u4").to_dict() == {"version": 1, "n": 16, "k": 64, "weight": "u4"}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"n": 16, "k": 64, "weight": "u4"}, "a spec of version None can't be read, only version 1; update lowbit"),
        ({"version": 2, "n": 16, "k": 64, "weight": "u4"}, "a spec of version 2 can't be read"),
        ({"version": 1, "n": 16, "k": 64}, "a spec must have weight"),
        ({"version": 1, "n": 16, "k": 64, "weight": "u4", "blocks": 2}, "a spec has no 'blocks'; update lowbit"),
        ({"version": 1, "n": 16, "k": 64, "weight": "u5", "group_size": 7}, "group_size=7 must be at least 16"),
        ({"version": 1, "n": 16, "k": 64, "weight": "lut1", "table": [1, 10**400]}, "must be a flat sequence"),
        ([1], "a spec must be written as a dictionary, not list"),
    ],
)
def test_what_is_no_written_spec(written: Any, message: str) -> None:
    with pytest.raises(SpecError) as error:
        MatmulSpec.from_dict(written)
    assert message in str(error.value)


def test_equal_specs_are_one_object_while_one_is_in_use() -> None:
    one = interned(MatmulSpec(17, 80, "u3"))
    assert interned(MatmulSpec(17, 80, "u3")) is one and interned(MatmulSpec(17, 96, "u3")) is not one
    kept = weakref.ref(one)
    del one
    gc.collect()
    assert kept() is None


def test_needs_neither_torch_nor_mlir(repo: Path) -> None:
    code = "import sys, dialect.spec; print(*({'torch', 'torch_mlir', 'mlir'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""


@pytest.mark.parametrize("half", [torch.float16, np.float16, np.dtype("float16"), "float16", "half", "fp16", "f16"])
def test_types_under_their_other_names(half: object) -> None:
    """They are kept under one name, so that equal specs are equal keys."""
    assert spec(act=half, out=half, scale=half) == spec(act="f16", out="f16", scale="f16")
    assert spec(act=torch.bfloat16, out=torch.float32) == spec(act="bf16", out="f32")
    assert spec(scale=torch.float8_e8m0fnu).scale == "e8m0" and spec(scale=torch.float8_e4m3fn).scale == "e4m3"


MX = ("mxfp4", "mxfp6", "mxfp6_e2m3", "mxfp8", "mxfp8_e5m2", "mxint8")
LLAMA = ("q4_0", "q5_0", "q8_0", "q4_1", "q5_1", "q2_k", "q3_k_m", "q4_k_m", "q5_k_s", "q6_k")
OTHERS = ("nvfp4", "fp4", "fp6_e3m2", "fp6_e2m3", "fp8", "float8_e4m3fn", "float8_e5m2", "int4", "awq4", "bitnet2")


@pytest.mark.parametrize("name", [*MX, *LLAMA, *OTHERS])
def test_advice_is_a_spec(name: str) -> None:
    """What is advised for another name can be made, and has the bits of that name."""
    advice = weight_advice(name) or weight_advice(name[:-1])
    found = re.findall(r"(\w+)=('\w+'|\w+\([^)]*\)|\w+)", re.sub(r" \([^)]*\)", "", advice or ""))
    given = {field: eval(value, {"Bilevel": Bilevel}) for field, value in found}
    group = given.pop("group_size", 64)
    assert f"{MatmulSpec(64, 256, group_size=group, **given).dtype.bits}" in name
    assert (group, given.get("scale")) == (32, "e8m0") or name not in MX
