"""The driver of the CPU target: spec to vector code to LLVM IR to an object file."""

from __future__ import annotations

from lowbit.dialect.assembly import print_module
from lowbit.dialect.bindings import ir, new_context
from lowbit.dialect.errors import TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder.locations import traced
from lowbit.passes.codegen.host import emit_host, emit_host_assembly, host_cpu, host_features
from lowbit.passes.codegen.ptx import translate
from lowbit.passes.codegen.source_lines import mark_lines
from lowbit.passes.cpu.decode import Isa
from lowbit.passes.cpu.group_plans import GroupPlan
from lowbit.passes.cpu.groups import build_group_program
from lowbit.passes.cpu.layer import build_layer_program
from lowbit.passes.cpu.layer_plans import LayerPlan
from lowbit.passes.cpu.lower_cpu import Program, build_cpu_program, cpu_needs, lower_cpu_to_llvm
from lowbit.passes.cpu.task import ENTRY, Needs
from lowbit.passes.origins import Origins


def compile_program(
    spec: MatmulSpec, program: Program, cpu: str = "", elsewhere: bool = False
) -> tuple[bytes, Needs]:
    """Returns an object file that defines `ENTRY`, and what its caller owes it.

    cpu        one of LLVM's levels ("x86-64-v3"), or "" for this processor
    elsewhere  whether another machine is to run it

    Raises TargetError without llvmlite, and for a processor that this is not or that lacks AVX2.
    """
    isa = isa_of(cpu)
    with new_context(), ir.Location.unknown():
        llvm_ir = translate(lower_cpu_to_llvm(build_cpu_program(spec, program, isa)))
    return emit_host(llvm_ir, [ENTRY], cpu, elsewhere), cpu_needs(spec, program, isa)


def compile_plan(plan: LayerPlan | GroupPlan, cpu: str = "") -> bytes:
    """Returns an object file that defines `ENTRY`: a program between the matmuls of a layer, or one that quantizes
    groups, for a processor as above. Raises TargetError as above."""
    isa = isa_of(cpu)
    with new_context(), ir.Location.unknown():
        module = build_group_program(plan) if isinstance(plan, GroupPlan) else build_layer_program(plan, isa)
        llvm_ir = translate(lower_cpu_to_llvm(module))
    return emit_host(llvm_ir, [ENTRY], cpu)


def program_stages(spec: MatmulSpec, program: Program, cpu: str = "") -> dict[str, str]:
    """The program as text: "vector" and "llvm" (MLIR), "ll" (LLVM IR), "asm"."""
    with new_context(), ir.Location.unknown():
        module = build_cpu_program(spec, program, isa_of(cpu))
        stages = {"vector": print_module(module)}
        stages["llvm"] = print_module(lower_cpu_to_llvm(module))
        stages["ll"] = translate(module)
        return stages | {"asm": emit_host_assembly(stages["ll"], cpu)}


def program_origins(spec: MatmulSpec, program: Program, cpu: str = "") -> tuple[dict[str, str], Origins]:
    """The same, and where the lines of every stage came from."""
    origins = Origins(helpers=("vector_ops.py",))
    with new_context(), ir.Location.unknown():
        with traced():
            module = build_cpu_program(spec, program, isa_of(cpu))
        origins.number(module)
        stages = {"vector": origins.recorded("vector", module)}
        stages["llvm"] = origins.recorded("llvm", lower_cpu_to_llvm(module))
        mark_lines(module)
        llvm_ir = translate(module)
        stages["ll"] = origins.recorded_llvm(llvm_ir)
        return stages | {"asm": origins.recorded_assembly("asm", emit_host_assembly(llvm_ir, cpu))}, origins


def isa_of(cpu: str) -> Isa:
    """Returns the instruction set of a processor. Raises TargetError unless it is an x86 that can convert f16."""
    levels: dict[str, Isa] = {"x86-64-v3": "avx2", "x86-64-v4": "avx512", "x86-64-v4+avx512bf16": "avx512bf16"}
    isa = levels.get(cpu, "generic")
    if not cpu:
        isa = _isa_of_features(host_features())
    if isa == "generic":
        raise TargetError(
            f"cpu {cpu or host_cpu()!r} lacks AVX2 or F16C, which the CPU target needs; "
            "use a processor of level 'x86-64-v3' or later"
        )
    return isa


def _isa_of_features(features: frozenset[str]) -> Isa:
    if features >= {"avx512f", "avx512bw", "avx512vl"}:
        return "avx512bf16" if "avx512bf16" in features else "avx512"
    return "avx2" if features >= {"avx2", "f16c", "fma"} else "generic"
