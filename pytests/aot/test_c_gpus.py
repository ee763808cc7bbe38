"""Two GPUs at once, from four threads in C, on a driver without a GPU that refuses what does harm in a call: a kernel
in another GPU's context, and functions that allocate, load or wait, of the driver and of the C library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from c_runtime import WARNINGS, compiler, needs_flag, sources
from exported import Exported
from fake_cuda import build_driver, with_texts

import lowbit
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.aot.sources import C_FOLDER

HERE = Path(__file__).resolve().parent
WRAPPED = ",".join(f"--wrap={name}" for name in ("malloc", "calloc", "realloc", "aligned_alloc"))
CALLS = 3  # of each of two threads of a GPU
S = MatmulSpec
SPECS = {
    "usual": S(48, 256, "u4", group_size=64, zeros="int", bias=True),
    "eight_bits": S(32, 128, "u4", group_size=32, compute="i8", compute_from=17),
    "permuted_experts": S(64, 128, "u4", group_size=32, experts=2, permuted=True, epilogue="silu_mul"),
}
ROWS = {"usual": (0, (1, 70, 130)), "eight_bits": (0, (16, 17)), "permuted_experts": (5, (10, 300))}


@dataclass(frozen=True)
class Program:
    """gpu_calls.c and the driver, built with some flags."""

    folder: Path

    def run(self, folder: Path, x: int, rows: Sequence[int], *wrapper: str, log: Path | None = None) -> str:
        """Returns what it prints; what it says of a failure is in the error."""
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.folder), "FAKE_CUDA_CAPABILITY": "80,90"}
        environment |= {"TSAN_OPTIONS": "halt_on_error=1", **({"FAKE_CUDA_LOG": str(log)} if log else {})}
        command = [*wrapper, str(self.folder / "gpu_calls"), str(folder), str(CALLS), str(x), *map(str, rows)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def build(folder: Path, *flags: str) -> Program:
    """Returns the program, compiled with the sources of the runtime."""
    build_driver(folder, *flags)
    files = [*sources(), str(HERE / "gpu_calls.c"), "-o", str(folder / "gpu_calls"), "-lm", "-ldl", "-pthread"]
    command = [compiler(), "-O1", "-g", *WARNINGS, *flags, f"-I{C_FOLDER}/include", f"-Wl,{WRAPPED}", *files]
    subprocess.run(command, check=True)
    return Program(folder)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return build(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders for both GPUs, by the name of the spec, with code that the driver takes."""
    made = tmp_path_factory.mktemp("folders")
    for name, spec in SPECS.items():
        lowbit.export({"it": spec}, ["sm_80", "sm_90a"], made / name)
    return {name: with_texts(made / name, made / f"{name}_texts") for name in SPECS}


@pytest.mark.parametrize("name", SPECS)
def test_each_gpu_runs_its_own_kernels(name: str, folders: dict[str, Path], program: Program, tmp_path: Path) -> None:
    """The kernels of sm_80 on the first, those of sm_90a on the second, as many as two threads have called."""
    x, rows = ROWS[name]
    printed = program.run(folders[name], x, rows, log=tmp_path / "log")
    assert printed == f"sm_80 and sm_90a: {4 * CALLS * len(rows)} calls\n"
    expected = Counter[tuple[int, str]]()
    for device, target in enumerate(("sm_80", "sm_90a")):
        exported = Exported(folders[name], "it", target)
        for m in rows:
            for number, _, _ in exported.launches(m, x or m):
                expected[device, f"cubin:{exported.target['kernels'][number]['name']}"] += 2 * CALLS
    *lines, last = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert Counter((line["device"], line["kernel"]) for line in lines if "kernel" in line) == expected
    assert last == {"closed": True, "contexts": 0, "modules": 0, "allocated": 0}


@pytest.mark.parametrize("name", SPECS)
def test_memory_under_valgrind(name: str, folders: dict[str, Path], program: Program) -> None:
    if (valgrind := shutil.which("valgrind")) is None:
        pytest.skip("no valgrind on this machine")
    program.run(folders[name], *ROWS[name], valgrind, "-q", "--error-exitcode=9", "--leak-check=full")


def test_a_flag_that_the_compiler_has_not() -> None:
    needs_flag("-pthread")
    with pytest.raises(pytest.skip.Exception, match="has no -fsanitize=nothing on this machine"):
        needs_flag("-fsanitize=nothing")


def test_threads_under_a_sanitizer(folders: dict[str, Path], tmp_path: Path) -> None:
    """The runtime and the driver, compiled with ThreadSanitizer."""
    needs_flag("-fsanitize=thread")
    program = build(tmp_path, "-fsanitize=thread")
    for name in SPECS:
        program.run(folders[name], *ROWS[name])
