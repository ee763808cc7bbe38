"""Where the lines of every stage came from; and machine code as text, with its control codes."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

import pytest

from lowbit.dialect.errors import TargetError
from lowbit.dialect.layouts.layout import spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program, locations
from lowbit.passes.codegen import sass
from lowbit.passes.codegen.cubin import emit_cubin
from lowbit.passes.codegen.sass import Control, disassemble
from lowbit.passes.cpu.compile import program_origins, program_stages
from lowbit.passes.kernels.base import KernelRequest
from lowbit.passes.kernels.registry import request
from lowbit.passes.pipeline import CompiledKernel, compile_kernel, lower_program
from lowbit.passes.scheduling.choice import schedule_for
from lowbit.passes.targets import parse_target

SPEC = MatmulSpec(n=128, k=512, weight="u4", group_size=128)
needs_nvdisasm = pytest.mark.skipif(sass.find_nvdisasm() is None, reason="needs nvidia-cuda-nvdisasm")


def requested(spec: MatmulSpec = SPEC, target: str = "sm_90a", tokens: int = 16) -> KernelRequest:
    gpu = parse_target(target)
    return request(spec, gpu, schedule_for(spec, tokens, gpu))


@dataclass(frozen=True)
class Both:
    """A kernel compiled as ever, and one whose lines' origins were noted."""

    plain: CompiledKernel
    noted: CompiledKernel

    @staticmethod
    def of(wanted: KernelRequest) -> Both:
        return Both(compile_kernel(wanted, keep=True), compile_kernel(wanted, keep=True, origins=True))


@pytest.mark.parametrize(
    ("spec", "target", "tokens"),
    [
        (SPEC, "sm_90a", 16),
        (SPEC, "sm_80", 16),
        (SPEC, "sm_90a", 256),
        (MatmulSpec(n=128, k=512, weight="nf4", group_size=64, bias=True, epilogue="silu_mul"), "sm_90a", 8),
        (MatmulSpec(n=128, k=512, weight="i3", group_size=128, outliers=True), "sm_90", 1),
    ],
    ids=str,
)
def test_origins_change_no_stage(spec: MatmulSpec, target: str, tokens: int) -> None:
    """Every stage reads as it does without, but for the metadata of LLVM IR, and its numbers."""
    both = Both.of(requested(spec, target, tokens))
    for name, text in both.plain.stages.items():
        noted = both.noted.stages[name]
        assert without_metadata(noted) == without_metadata(text) if name == "ll" else noted == text, name


def without_metadata(llvm_ir: str) -> str:
    return re.sub(r"!\d+", "!", llvm_ir.partition("\n!llvm.")[0]).strip()


def test_every_stage_has_the_origins_of_its_lines() -> None:
    noted = compile_kernel(requested(), keep=True, origins=True)
    origins = noted.origins
    assert origins and set(origins.lines) == {"tile", "gpu", "llvm", "ll", "ptx"} and set(origins.above) == {"lowbit"}
    for name, numbers in origins.lines.items():
        assert len(numbers) == len(noted.stages[name].splitlines()), name
        known = {number for number in numbers if number}
        assert known <= set(range(1, len(origins.python) + 1)), name
        assert len([n for n in numbers if n]) > 0.6 * len(numbers), name  # all but constants and indices of threads
    numbered = list(dict.fromkeys(n for n in origins.lines["tile"] if n))
    assert numbered == list(range(1, len(origins.python) + 1))  # the operations, in order


def test_a_line_leads_from_python_to_the_last_instruction() -> None:
    """The copy of codes: one line of Python, an operation on tiles, and cp.async in PTX."""
    noted = compile_kernel(requested(), keep=True, origins=True)
    origins = noted.origins
    assert origins
    ptx = list(zip(noted.stages["ptx"].splitlines(), origins.lines["ptx"]))
    copies = {number for line, number in ptx if "cp.async.cg" in line}
    tile = [line for line, n in zip(noted.stages["tile"].splitlines(), origins.lines["tile"]) if n in copies]
    assert copies and any("lowbit.copy_async" in line for line in tile)
    files = {place[0].rpartition("/")[2] for n in copies if n and (place := origins.python[n - 1])}
    assert files and not files & {"memory.py", "scope.py"}  # the kernel's lines, not the builder's


def doubled() -> Program:
    p = Program("double", 32, (1, 1, 1), {"x": "pointer", "y": "pointer"})
    with p:
        x, y = (p.global_view(p[name], "f32", (32,)) for name in ("x", "y"))
        tile = p.load(x, (0,), spatial(32), ("none",))
        p.store(tile + tile, y, (0,), ("none",))
    return p


def test_origins_of_a_program_of_ones_own() -> None:
    origins = lower_program(doubled, parse_target("sm_90a"), origins=True).origins
    assert origins
    of_python = {place[1] for place in origins.python if place}
    lines, first = inspect.getsourcelines(doubled)
    assert {lines[n - first].strip().split(" ")[0] for n in of_python} >= {"tile", "p.store(tile"}
    assert {place[1] for place in origins.above["lowbit"] if place} == of_python
    assert {place[0] for place in origins.python if place} == {__file__}


def test_origins_of_host_code_where_mlir_sees_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Python 3.12 and later. All but the module itself, which comes first, know their lines."""
    seen = program_origins(SPEC, "few", "x86-64-v3")
    monkeypatch.setattr(locations, "_sees_frames", lambda: False)
    given = program_origins(SPEC, "few", "x86-64-v3")
    assert seen[0] == given[0]
    assert seen[1].python[1:] == given[1].python[1:] and len(set(given[1].python)) > 100


@needs_nvdisasm
def test_machine_code_as_text() -> None:
    noted = compile_kernel(requested(), keep=True, origins=True)
    assert noted.origins
    code = disassemble(emit_cubin(noted.origins.assembly, noted.target))
    assert [i.offset for i in code] == list(range(0, 16 * len(code), 16))
    assert all(any(name in i.text for i in code) for name in ("MMA", "LDGSTS", "EXIT"))
    assert 0 < max(i.line for i in code) <= len(noted.origins.python)  # 0: of no operation
    assert {i.control.write for i in code} - {None} and any(i.control.waits for i in code)


def test_control_codes() -> None:
    """Of `PLOP3.LUT`, `S2UR` and `UISETP` as nvdisasm 13.5 prints them with -hex."""
    assert str(Control.of(0x000FDA0003F0F008000000000000781C)) == "B------:R-:W-:Y:S13"
    assert Control.of(0x000EA4000000250000000000001879C3) == Control(2, False, 2, None, (), ())
    assert Control.of(0x004FCC000BF040700000003F1800788C) == Control(6, True, None, None, (2,), ())


def test_without_nvdisasm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "find_nvdisasm", lambda: None)
    with pytest.raises(TargetError, match="SASS needs nvdisasm, which is not here; pip install nvidia-cuda-nvdisasm"):
        disassemble(b"")


@needs_nvdisasm
def test_what_is_no_cubin() -> None:
    with pytest.raises(TargetError, match="does not read the cubin"):
        disassemble(b"nothing")


@pytest.mark.parametrize("program", ["few", "many"])
def test_origins_on_a_cpu(program: str) -> None:
    plain, (noted, origins) = program_stages(SPEC, program), program_origins(SPEC, program)  # type: ignore[arg-type]
    assert noted["vector"] == plain["vector"] and noted["llvm"] == plain["llvm"]
    assert _instructions(noted["asm"]) == _instructions(plain["asm"])
    for name, numbers in origins.lines.items():
        assert len(numbers) == len(noted[name].splitlines())
        assert sum(n is not None for n in numbers) > 0.6 * len(numbers)
    assert not any(place and place[0].endswith("vector_ops.py") for place in origins.python)


def _instructions(assembly: str) -> list[str]:
    return [line for line in assembly.splitlines() if line.startswith("\t") and not line.startswith("\t.")]
