"""What is exported, and what is not: `lowbit.export` and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from exported import read_manifest
from typer.testing import CliRunner

import lowbit
from lowbit.dialect.errors import SpecError, TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.top_k import TopK
from lowbit.passes.cpu.compile import compile_program
from lowbit.pylib.aot import image
from lowbit.pylib.aot.export import default_name
from lowbit.pylib.aot.gpu import arrays_of
from lowbit.pylib.cli.main import app

SPEC = MatmulSpec(16, 32, "u4", group_size=16)
ADDED = MatmulSpec(32, 32, "u4", experts=2, top_k=TopK(1, weights="f32"))


@pytest.mark.parametrize(
    ("specs", "targets", "error", "message"),
    [
        ([], "cpu", SpecError, "specs are empty"),
        ({}, "cpu", SpecError, "specs are empty"),
        ([1], "cpu", SpecError, "specs: 1 must be a MatmulSpec"),
        ({"a-b": SPEC}, "cpu", SpecError, "specs: 'a-b' must be letters, digits and _"),
        ({"x" * 64: SPEC}, "cpu", SpecError, "as names in C, at most 63"),
        ([SPEC, SPEC], "cpu", SpecError, "specs have the same name; give them as a dictionary"),
        (SPEC, [], TargetError, "targets are empty"),
        (SPEC, "sm_1", TargetError, "unknown target 'sm_1'"),
        (SPEC, "emulator:sm_80", TargetError, "target emulator:sm_80 is not exported; name the GPU: 'sm_80'"),
        (ADDED, "sm_80", SpecError, "in clusters, which sm_80 does not have; for this target export .* top_k=None"),
    ],
)
def test_mistakes(specs: Any, targets: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        lowbit.export(specs, targets, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match=r"can't be written .*; name a folder of yours"):
        lowbit.export(SPEC, "cpu", tmp_path / "file")


def test_names() -> None:
    assert default_name(SPEC) == "u4_g16_16x32"
    experts = MatmulSpec(64, 32, "nf4", epilogue="silu_mul", experts=2)
    assert default_name(experts) == "nf4_rows_64x32_silu_mul_2_experts"


@pytest.mark.parametrize(
    ("fields", "inputs"),
    [
        ({"epilogue": "residual", "out": "f32"}, {"residual": ("f32", 128)}),
        ({"experts": 2}, {"rows": ("i32", 4), "tiles": ("i32", 0)}),
        ({"experts": 2, "top_k": TopK(2)}, {"ids": ("i64", 8)}),
        ({"experts": 2, "top_k": TopK(2, "i32", "bf16")}, {"ids": ("i32", 8), "router_weights": ("bf16", 4)}),
    ],
)
def test_types_and_sizes_of_inputs(fields: dict[str, Any], inputs: dict[str, tuple[str, int]]) -> None:
    """Bytes are those for a row of y: of each id, or of all of a token where weights add them up."""
    spec = MatmulSpec(32 * fields.get("experts", 1), 32, "u4", **fields)
    arrays = [each for each in arrays_of(spec) if each["from"] == "input"]
    assert {each["name"]: (each["type"], each["row_bytes"]) for each in arrays} == inputs


def test_equal_code_is_one_file(tmp_path: Path) -> None:
    """Two matmuls of one spec."""
    manifest = lowbit.export({"a": SPEC, "b": SPEC}, "cpu", tmp_path)
    codes = [
        [
            program["code"]
            for target in matmul["targets"]
            for program in (target["dequantize"], *(each for r in target["ranges"] for each in r["programs"]))
        ]
        for matmul in manifest["matmuls"]
    ]
    assert codes[0] == codes[1] and len(set(codes[0])) == len(read_manifest(tmp_path)["files"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("targets = [", "is no TOML"),
        ("other = 1", "must have targets"),
        ("[matmul.a]\nn = 16", "matmul.a.*missing"),
        ("[matmul.a]\nn = 16\nk = 32\nweight = 'u4'\nsize = 3", "unexpected keyword argument 'size'"),
        ("[matmul.a]\nn = 16\nk = 32\nweight = 'u9'", "matmul.a.*u9"),
    ],
)
def test_mistakes_in_a_file(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text(text)
    done = CliRunner().invoke(app, ["export", str(file), "--targets", "cpu", "--folder", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert re.search(message, " ".join(done.output.split())), done.output


def test_a_file_of_matmuls(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    tables = [f"[matmul.{name}]\nn = 16\nk = 32\nweight = '{weight}'" for name, weight in (("a", "mxfp4"), ("b", "u2"))]
    tables += ["[matmul.c]\nn = 32\nk = 32\nweight = 'u4'\nexperts = 2\ntop_k = {count = 2, weights = 'f32'}"]
    file.write_text("\n".join(["targets = ['cpu']", *tables]))
    done = CliRunner().invoke(app, ["export", str(file), "--folder", str(tmp_path / "out"), "--json"])
    assert [each["name"] for each in json.loads(done.stdout)["matmuls"]] == ["a", "b", "c"]
    assert read_manifest(tmp_path / "out")["matmuls"][0]["spec"]["scale"] == "e8m0"
    by_ids = read_manifest(tmp_path / "out")["matmuls"][2]["targets"][0]["top_k"]
    assert by_ids == TopK(2, weights="f32").to_dict()
    both = CliRunner().invoke(app, ["export", str(file), "-n", "8"])
    assert both.exit_code == 1 and "drop the options of one" in " ".join(both.output.split())


def test_machine_code_that_needs_a_linker() -> None:
    code, _ = compile_program(SPEC, "few", "x86-64-v3")
    assert image.link(code, "lowbit_run").code
    with pytest.raises(TargetError, match="defines no other"):
        image.link(code, "other")
    with pytest.raises(TargetError, match="x86-64 alone"):
        image.link(b"\x7fELF\x02\x01" + bytes(100), "lowbit_run")
    calls = _object_that_calls()
    with pytest.raises(TargetError, match="refers to puts in a way that needs a linker"):
        image.link(calls, "f")


def _object_that_calls() -> bytes:
    """Returns an object file whose function calls one of another file."""
    import llvmlite.binding as llvm

    from lowbit.passes.codegen.llvm import binding

    binding()
    machine = llvm.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(reloc="pic", codemodel="small")
    text = "declare void @puts()\ndefine void @f() {\n call void @puts()\n ret void\n}\n"
    return machine.emit_object(llvm.parse_assembly(text))
