"""Programs for this machine's CPU, each compiled at its first use or taken from the disk cache.

Nothing here imports MLIR or LLVM before a program has to be compiled. The key has all that
decides the code: spec, program, the processor as LLVM sees it, and the tools.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.group_plans import GroupPlan
from lowbit.passes.cpu.layer_plans import LayerPlan
from lowbit.passes.cpu.task import Needs
from lowbit.pylib.build import cache

Program = Literal["few", "many", "scaled_few", "scaled_many", "dequantize"]
FEW_AND_MANY: dict[bool, tuple[Program, Program]] = {False: ("few", "many"), True: ("scaled_few", "scaled_many")}
"""The programs for up to `Needs.most` rows of x and for more, by whether these have scales."""


@dataclass(frozen=True)
class HostProgram:
    """A compiled program: an object file that defines `passes.cpu.task.ENTRY`, and what a caller owes it."""

    code: bytes
    needs: Needs

    def to_files(self) -> dict[str, bytes]:
        """Returns the files of an entry of the disk cache."""
        return {"needs.json": json.dumps(asdict(self.needs)).encode(), "code.o": self.code}

    @staticmethod
    def from_files(files: dict[str, bytes]) -> HostProgram:
        """The inverse of `to_files`. Raises an exception of some kind for what can't be loaded."""
        code, needs = files["code.o"], json.loads(files["needs.json"])
        if not code or not all(type(size) is int and size >= 0 for size in needs.values()):
            raise ValueError(f"no code in {len(code)} bytes, or it needs {needs}")
        return HostProgram(code, Needs(**needs))


def load_host_program(spec: MatmulSpec, program: Program, cpu: str, elsewhere: bool = False) -> HostProgram:
    """A program for a processor: one of LLVM's levels ("x86-64-v3"), or "" for this one.

    elsewhere: whether another machine is to run it, so that this one may lack what the level has

    Raises TargetError for a processor that this is not or that lacks AVX2, and where LLVM is missing to compile it.
    """
    key = cache.key(spec=spec, target="cpu", program=program, cpu=cpu, processor="" if elsewhere else processor())

    def build() -> dict[str, bytes]:
        from lowbit.passes.cpu.compile import compile_program  # which loads MLIR and LLVM

        return HostProgram(*compile_program(spec, program, cpu, elsewhere)).to_files()

    return cache.load_or_build(key, build, HostProgram.from_files)


def load_plan(plan: LayerPlan | GroupPlan, cpu: str) -> bytes:
    """Returns the object file of a program between the matmuls of a layer, or of one that quantizes groups, for a
    processor as above. Raises TargetError as above."""

    def build() -> dict[str, bytes]:
        from lowbit.passes.cpu.compile import compile_plan  # which loads MLIR and LLVM

        return HostProgram(compile_plan(plan, cpu), Needs()).to_files()

    key = cache.key(plan=plan, target="cpu", cpu=cpu, processor=processor())
    return cache.load_or_build(key, build, HostProgram.from_files).code


@lru_cache(maxsize=1)
def processor() -> str:
    """This machine's processor, by what LLVM tells processors apart: family, model and features."""
    wanted = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    try:
        with Path("/proc/cpuinfo").open() as file:
            first = [line for line in iter(file.readline, "\n") if line]
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.version()}"
    return "".join(line for line in first if line.partition(":")[0].strip() in wanted)
