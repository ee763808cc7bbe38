"""What a manifest says of CPUs: for each level of x86-64 the programs, and the memory that they need."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.task import ENTRY
from lowbit.pylib.aot.files import Files
from lowbit.pylib.aot.image import link
from lowbit.pylib.build.host_programs import Program, load_host_program

LEVELS = {"x86-64-v3": 3, "x86-64-v4": 4, "x86-64-v4+avx512bf16": 5}
"""The processors that code is made for, with the number by which the C runtime compares them."""
_PROGRAMS: tuple[Program, ...] = ("few", "many", "dequantize")


def cpu_to_dicts(spec: MatmulSpec, name: str, files: Files) -> list[dict[str, Any]]:
    """Returns the description of each level in terms of JSON, the least first, and adds its code to the files. Experts
    are multiplied one by one, by programs for the weight of one.

    Raises SpecError for experts by ids and experts with outliers, and for matmuls of 8 bits, which have no programs.
    """
    if spec.top_k:
        raise SpecError(f"({spec}) has ids of experts, which a CPU does not read: export it without top_k=")
    if spec.experts > 1 and spec.outliers:  # whose lines are those of all experts
        raise SpecError(f"({spec}) has outliers, which are not cut by expert: export a matmul per expert for a CPU")
    if spec.compute:
        raise SpecError(f"({spec}) multiplies in {spec.compute}; for a CPU export it with compute=None")
    return [_level(spec, level, name, files) for level in LEVELS]


def _level(spec: MatmulSpec, level: str, name: str, files: Files) -> dict[str, Any]:
    one = replace(spec, n=spec.n // spec.experts, experts=1, permuted=False)
    return {
        "target": level,
        "level": LEVELS[level],
        "operands": list(one.call_operands),
        "programs": {each: _program(one, each, level, name, files) for each in _PROGRAMS},
    }


def _program(spec: MatmulSpec, program: Program, level: str, name: str, files: Files) -> dict[str, Any]:
    compiled = load_host_program(spec, program, level, elsewhere=True)
    image = link(compiled.code, ENTRY)
    file = files.add(f"cpu/{name}/{level.replace('+', '_')}/{program}.bin", image.code)
    return {"code": file, "entry": image.entry, **asdict(compiled.needs)}
