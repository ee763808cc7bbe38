"""Kernels to pages: a matmul on a GPU or a CPU, or a tile program of one's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lowbit.dialect.errors import TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.codegen.cubin import assemble
from lowbit.passes.codegen.sass import disassemble
from lowbit.passes.cpu.compile import program_origins
from lowbit.passes.kernels.base import KernelRequest, KernelSchedule
from lowbit.passes.kernels.registry import family_named
from lowbit.passes.pipeline import Buildable, CompiledKernel, compile_kernel, lower_program
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.passes.tensor_programs import matmul_text
from lowbit.pylib.build import knobs
from lowbit.pylib.build.choices import spelled_out
from lowbit.pylib.build.kernels import kernel_choices
from lowbit.pylib.emulator import observer
from lowbit.pylib.emulator.observer import Observer, observing
from lowbit.pylib.explain.activity import activity_figures
from lowbit.pylib.explain.executed import STEPS, counts_by_line, counts_by_origin, run_one_cluster
from lowbit.pylib.explain.figures import Figure
from lowbit.pylib.explain.layouts import layout_grids
from lowbit.pylib.explain.machine import Roofline, machine_figures
from lowbit.pylib.explain.measured import measure
from lowbit.pylib.explain.packing import packing_figures
from lowbit.pylib.explain.page import Page
from lowbit.pylib.explain.shared import shared_figures
from lowbit.pylib.explain.text import Pane, absent_pane, pane_above, python_pane, sass_pane, stage_pane, with_counts
from lowbit.pylib.runtime.cpu import CpuMatmul
from lowbit.pylib.runtime.kernel import gpu_target, load

TITLES = {
    "tile": "Tiles: one block",
    "vector": "Vectors",
    "gpu": "One thread",
    "llvm": "LLVM dialect",
    "ll": "LLVM IR",
    "ptx": "PTX",
    "asm": "Assembly",
}


def explain_matmul(spec: MatmulSpec, target: Target, schedule: KernelSchedule | None, m: int) -> Page:
    """The page of the first kernel that serves m rows; of several experts, m slots.

    Raises SpecError for a schedule that does not fit, TargetError where a tool to compile is missing.
    """
    if not target.is_gpu:
        return _explain_cpu(spec, m)
    wanted = kernel_choices(spec, target, schedule).launches(m)[0]
    compiled = compile_kernel(wanted, keep=True, origins=True)
    seen = run_one_cluster(wanted, compiled.launch, compiled.ptx, m)
    choices = ", ".join(f"{name}={value}" for name, value in spelled_out(wanted.schedule).items() if name != "family")
    about = f"Kernel family {wanted.family}: {choices or 'no choices'}"
    roofline = Roofline.of(wanted, m).figure(measure(spec, target, schedule, m))
    figures = [roofline, *packing_figures(wanted.spec)]
    weights = _weights(wanted, compiled, m, seen)
    return _page(f"{spec}, m = {m}, on {target}", about, compiled, seen, figures, {"m": m}, weights)


def _weights(wanted: KernelRequest, compiled: CompiledKernel, m: int, seen: observer.Launch | None) -> float | None:
    """Numbers of the weight that each cluster multiplies, if all of them multiply as many; None if they do not."""
    if not seen or not seen.whole or family_named(wanted.family).operation != "matmul":
        return None
    blocks = math.prod(compiled.launch.blocks({"m": m}, wanted.target.multiprocessors))
    return wanted.spec.n * wanted.spec.k * len(seen.blocks) / blocks


def explain_program(program: Buildable, target: str | None = None, **arguments: Any) -> Page:
    """Returns the page of a tile program of one's own, as `Matmul.explain` gives that of a matmul.

    program    as `compile_program` takes it
    target     a GPU such as "sm_90a"; None: this machine's
    arguments  those of a call, with tensors of the CPU: the first cluster of its blocks runs in the emulator, and the
               page says how often each line ran. None: nothing runs

    Raises PassError for a wrong program, TargetError for an unknown target or where a tool to compile is missing.
    """
    gpu = gpu_target(target)
    compiled = lower_program(program, gpu, origins=True)
    seen = _seen(program, gpu, arguments) if arguments else None
    numbers = {name: value for name, value in arguments.items() if isinstance(value, int)}
    title = f"{compiled.launch.name}, on {gpu}"
    return _page(title, "A tile program", compiled, seen, [], numbers, None)


def _seen(program: Buildable, target: Target, arguments: Mapping[str, Any]) -> observer.Launch:
    """The first cluster of a call in the emulator."""
    kernel = load(lower_program(program, parse_target(f"emulator:{target.arch}"), origins=True), racecheck=False)
    with observing(Observer(clusters=1, steps=STEPS)) as seen:
        kernel(**arguments)
    return seen.launches[0]


def _page(
    title: str,
    about: str,
    compiled: CompiledKernel,
    seen: observer.Launch | None,
    figures: list[Figure],
    arguments: Mapping[str, int],
    weights: float | None,
) -> Page:
    """The page of a compiled kernel for a GPU."""
    origins, stages = compiled.origins, compiled.stages
    if origins is None:
        raise ValueError("compile the kernel with origins=True")
    shown = [python_pane(origins), pane_above("lowbit", "lowbit", stages["lowbit"], origins.above["lowbit"], origins)]
    shown += [stage_pane(name, TITLES[name], stages[name], lines) for name, lines in origins.lines.items()]
    if seen:
        by_origin, by_line = counts_by_origin(seen, origins.lines["ptx"]), counts_by_line(seen)
        shown = [with_counts(pane, by_origin, by_line if pane.name == "ptx" else None) for pane in shown]
        figures = [*figures, *activity_figures(seen, origins.lines["ptx"], weights)]
    figures += shared_figures(stages["tile"], seen)
    sass, of_machine = _machine_code(compiled, arguments)
    return Page(title, about, (*shown, sass), (*of_machine, *figures, *layout_grids(stages["tile"])))


def _machine_code(compiled: CompiledKernel, arguments: Mapping[str, int]) -> tuple[Pane, list[Figure]]:
    """Machine code, as far as there are an assembler and a disassembler, and what it takes of the GPU."""
    target = parse_target(compiled.target.arch)
    figures: list[Figure] = []
    try:
        cubin = assemble(compiled.origins.assembly if compiled.origins else compiled.ptx, target)
        figures = machine_figures(compiled.launch, cubin.resources, target, arguments)
        code = disassemble(cubin.image)
    except TargetError as error:
        return absent_pane("sass", "SASS", str(error)), figures
    return sass_pane(code, [each.line for each in code]), figures


def _explain_cpu(spec: MatmulSpec, m: int) -> Page:
    """The page of the program for m rows on this machine's CPU."""
    program = "few" if m <= CpuMatmul(spec, knobs.cpu()).few_tokens else "many"
    stages, origins = program_origins(spec, program, knobs.cpu())
    shown = [python_pane(origins), pane_above("lowbit", "lowbit", matmul_text(spec), (), origins)]
    shown += [stage_pane(name, TITLES[name], stages[name], lines) for name, lines in origins.lines.items()]
    about = f"The program for {program} rows"
    return Page(f"{spec}, m = {m}, on cpu", about, tuple(shown), tuple(packing_figures(spec)))
