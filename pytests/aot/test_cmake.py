"""The examples in C and C++, built by CMake and checked for errors of memory."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from c_runtime import compiler
from safetensors.torch import load_file
from typer.testing import CliRunner

import lowbit
from lowbit.pylib.aot.sources import CMAKE_FOLDER
from lowbit.pylib.cli.main import app

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/cpp"
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g"
WARNINGS = "-Wall -Wextra -Werror"


def run(*command: str | Path, folder: Path) -> str:
    """Returns what a command prints. What it says of a failure is in the error."""
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[0]}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on this machine")
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, with sanitizers of addresses and of undefined behaviour in all of their code."""
    cmake, folder = tool("cmake"), tmp_path_factory.mktemp("built")
    compiler("cc"), compiler("c++")
    flags = [f"-DCMAKE_{language}_FLAGS={WARNINGS} {SANITIZERS}" for language in ("C", "CXX")]
    found = [f"-Dlowbit_DIR={CMAKE_FOLDER}", f"-DLOWBIT_PYTHON={sys.executable}"]
    run(cmake, "-S", EXAMPLES, "-B", folder, *found, *flags, folder=EXAMPLES.parents[1])
    run(cmake, "--build", folder, "-j", "2", folder=EXAMPLES.parents[1])
    return folder


def test_c(built: Path, tmp_path: Path) -> None:
    """Its weight is one that Python loads."""
    printed = run(built / "matmul_c", folder=tmp_path)
    assert "u4 [96, 256] for x86-64-v" in printed and "without a weight: weight is NULL" in printed
    w = lowbit.PackedWeight.from_state_dict(load_file(tmp_path / "u4.safetensors"))
    assert w.spec == lowbit.MatmulSpec(96, 256, "u4", group_size=64, zeros="int")
    assert w.unpack()[0, :3].tolist() == [i * 2654435761 % 2**32 >> 28 for i in range(3)]


def test_cpp(built: Path, tmp_path: Path) -> None:
    printed = run(built / "matmul_cpp", folder=tmp_path)
    assert printed == "four callers and a team of three give the same\nwithout scales: scales are missing\n"


def test_experts(built: Path, tmp_path: Path) -> None:
    assert "10 slots of 4 experts: largest error" in run(built / "experts_cpp", folder=tmp_path)


def test_fp6(built: Path, tmp_path: Path) -> None:
    assert "f6e3m2 [128, 256]: largest error" in run(built / "fp6_demo", folder=tmp_path)


def test_nothing_is_compiled_again(built: Path) -> None:
    assert "Compiling" not in run(tool("cmake"), "--build", built, folder=built)


def test_every_field_of_a_spec_is_an_argument_in_cmake() -> None:
    """Except ids of experts, which only a file has."""
    text = (CMAKE_FOLDER / "lowbit-config.cmake").read_text()
    flags, values = (re.search(rf"set\({name} (.*)\)", text) for name in ("flags", "values"))
    assert flags and values
    known = {word.lower() for found in (flags, values) for word in found[1].split()} - {"wide_range"}
    assert known == {field.name for field in fields(lowbit.MatmulSpec)} - {"top_k"}


def test_a_mistake_in_cmake(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.19)\nproject(p LANGUAGES C)\nfind_package(lowbit REQUIRED)\n"
        "lowbit_add_matmul(q WEIGHT u4 GROUPSIZE 64)\n"
    )
    command = [tool("cmake"), "-S", tmp_path, "-B", tmp_path / "b", f"-Dlowbit_DIR={CMAKE_FOLDER}"]
    compiler("cc")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode and "lowbit_add_matmul(q): unknown GROUPSIZE;64" in " ".join(done.stderr.split())


def test_a_folder_alone(tmp_path: Path) -> None:
    """Its own project, and the runtime under valgrind, which has no AVX-512: so the code for AVX2 runs."""
    cmake, valgrind = tool("cmake"), tool("valgrind")
    folder, built = tmp_path / "u4", tmp_path / "built"
    lowbit.export({"u4": lowbit.MatmulSpec(96, 256, "u4", group_size=64, zeros="int")}, "cpu", folder)
    run(cmake, "-S", folder, "-B", built, "-DCMAKE_BUILD_TYPE=Debug", folder=tmp_path)
    run(cmake, "--build", built, folder=tmp_path)
    headers = (f"-I{folder}/include", f"-I{built}/lowbit-u4-include")
    libraries = (built / "libu4.a", built / "liblowbit_runtime.a", "-lm", "-ldl", "-pthread")
    run(compiler("cc"), "-std=c11", "-g", EXAMPLES / "matmul.c", *headers, *libraries, "-o", "program", folder=tmp_path)
    shutil.rmtree(folder)  # all of it is in the program
    printed = run(valgrind, "--error-exitcode=9", "--leak-check=full", "-q", "./program", folder=tmp_path)
    assert "for x86-64-v3" in printed


def test_where_cmake_finds_it() -> None:
    printed = CliRunner().invoke(app, ["--cmake-dir"]).stdout
    assert printed == f"{CMAKE_FOLDER.resolve()}\n" and (Path(printed.strip()) / "lowbit-config.cmake").exists()
