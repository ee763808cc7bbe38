"""Kernels to pages: a matmul on a GPU or a CPU, or a tile program of one's own."""

from __future__ import annotations

import gc
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lowbit.dialect.errors import SpecError, TargetError
from lowbit.dialect.fields import integer
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.top_k import TopK
from lowbit.passes.codegen.cubin import assemble
from lowbit.passes.codegen.sass import disassemble
from lowbit.passes.cpu.compile import program_origins
from lowbit.passes.kernels.base import KernelRequest, KernelSchedule
from lowbit.passes.kernels.registry import family_named, request
from lowbit.passes.pipeline import Buildable, CompiledKernel, compile_kernel, lower_program
from lowbit.passes.scheduling.choice import Chooser
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.passes.tensor_programs import matmul_text
from lowbit.pylib.build.choices import spelled_out
from lowbit.pylib.build.kernels import kernel_choices
from lowbit.pylib.emulator import observer
from lowbit.pylib.explain.activity import activity_figures
from lowbit.pylib.explain.executed import (
    STEPS,
    counts_by_line,
    counts_by_origin,
    first_cluster,
    rows_emulated,
    run_one_cluster,
    tokens_of,
    weights_of_cluster,
)
from lowbit.pylib.explain.figures import Figure
from lowbit.pylib.explain.layouts import layout_grids
from lowbit.pylib.explain.machine import Roofline, machine_figures
from lowbit.pylib.explain.measured import UNTIMED, Measured, measure
from lowbit.pylib.explain.packing import packing_figures
from lowbit.pylib.explain.page import Page
from lowbit.pylib.explain.shared import shared_figures
from lowbit.pylib.explain.text import Pane, pane_above, python_pane, sass_pane, stage_pane, with_counts
from lowbit.pylib.operator.call_checks import check_one_expert
from lowbit.pylib.runtime.cpu import cpu_matmul
from lowbit.pylib.runtime.devices import target_named
from lowbit.pylib.runtime.interface import check_schedule
from lowbit.pylib.runtime.kernel import gpu_target, load
from lowbit.pylib.runtime.top_k_experts import most_tokens

TITLES = {
    "tile": "Tiles: one block",
    "vector": "Vectors",
    "gpu": "One thread",
    "llvm": "LLVM dialect",
    "ll": "LLVM IR",
    "ptx": "PTX",
    "asm": "Assembly",
}


@contextmanager
def _uncollected() -> Generator[None]:
    """Within it nobody looks for cycles: a page is made of a million small objects, which live until it is written."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_uncollected()
def explain_matmul(spec: MatmulSpec, target: Target, schedule: KernelSchedule | None, m: int) -> Page:
    """The page of the first kernel that serves m rows; of several experts, m slots.

    Raises SpecError for a schedule that does not fit or that no rows have, TargetError where a tool to compile is
    missing.
    """
    check_schedule(target, schedule)
    if not target.is_gpu:
        return _explain_cpu(spec, m)
    first, *others = kernel_choices(spec, target, schedule).launches(m)
    of_call = [f"the first of {1 + len(others)} launches for {m} rows"] if others else []
    if spec.permuted or first.spec.compute:
        of_call.append(f"x is {'put in order' if spec.permuted else 'quantized'} by a launch before")
    return explain_kernel(first, m, measure(spec, target, schedule, m), "; ".join(of_call))


@_uncollected()
def explain_experts(spec: MatmulSpec, top_k: int, tokens: int = 1, target: str | None = None) -> Page:
    """Returns the page of the kernel by which a layer multiplies so many tokens by `top_k` experts of each.

    spec     the weights of all experts, as `LowbitExperts` has them: of gate and up where its epilogue is a gate
    target   as for `lowbit.compile`; None: this machine's

    For few tokens the kernel reads the ids of their experts, and adds up what they make unless its sums are gated; for
    more it reads a table of slots. Raises SpecError for a spec with one expert, for a top_k beyond them, for tokens
    that are no number of rows and, on a CPU, for a spec with `compute`; TargetError for an unknown target or where a
    tool to compile is missing.
    """
    tokens, top_k = integer("tokens", tokens, 1), integer("top_k", top_k, 1)
    if spec.experts == 1 or top_k > spec.experts:
        raise SpecError(f"top_k={top_k} must be in 1..{spec.experts}, of several experts (experts=)")
    slots = integer("tokens * top_k", tokens * top_k, 1)
    named = target_named(target)
    by_ids = _by_ids(spec, top_k, tokens, named)
    if by_ids is None:
        return explain_matmul(spec, named, None, slots)
    made, rows = request(by_ids, named, Chooser(by_ids, named).schedule(1)), slots if spec.is_gated else tokens
    return explain_kernel(made, rows, measure(by_ids, named, None, rows))


def _by_ids(spec: MatmulSpec, top_k: int, tokens: int, target: Target) -> MatmulSpec | None:
    """Returns what few tokens take in place of a table of slots; None where no kernel does, or for more tokens."""
    kind = spec.for_rows(1)
    if not target.is_gpu or kind.compute or tokens > most_tokens(spec.experts, top_k):
        return None
    found = replace(kind, top_k=TopK(top_k, weights=None if spec.is_gated else "f32"))
    try:
        return found if Chooser(found, target).token_tiles else None
    except SpecError:
        return None


@_uncollected()
def explain_kernel(request: KernelRequest, m: int, measured: Measured = UNTIMED, about: str = "") -> Page:
    """Returns the page of a kernel of any family for m rows; of experts m slots, or rows of y where it reads ids.

    measured   the time of a call, where one was timed
    about      what else there is to say of it

    Raises TargetError where a tool to compile is missing.
    """
    spec, family = request.spec, family_named(request.family)
    rows = m if family.takes_any_tokens else min(m, tokens_of(request.schedule, m))
    compiled = compile_kernel(request, keep=True, origins=True)
    choices = ", ".join(f"{name}={value}" for name, value in spelled_out(request.schedule).items() if name != "family")
    emulated = rows_emulated(request, rows)
    part = f"emulated with {emulated} rows" if emulated < rows else ""
    about = "; ".join(filter(None, (f"Kernel family {request.family}: {choices or 'no choices'}", about, part)))
    title = f"{spec}, m = {m}, on {request.target}"
    with ThreadPoolExecutor(1) as beside:
        code = beside.submit(_machine_code, compiled, {"m": rows})
        seen = run_one_cluster(request, compiled.launch, compiled.ptx, rows)
        figures = [Roofline.of(request, rows).figure(measured)] if family.operation.endswith("matmul") else []
        figures += [] if family.operation in ("permute", "quantize") else packing_figures(spec)
        return _page(title, about, compiled, code, seen, figures, weights_of_cluster(request, seen))


@_uncollected()
def explain_program(program: Buildable, target: str | None = None, **arguments: Any) -> Page:
    """Returns the page of a tile program of one's own, as `Matmul.explain` gives that of a matmul.

    program    as `compile_program` takes it
    target     a GPU such as "sm_90a"; None: this machine's
    arguments  those of a call, with tensors of the CPU: the first cluster of its blocks runs in the emulator, and the
               page says how often each line ran, and which race or other fault was found. Without arguments, and where
               their grid has no blocks, nothing runs

    Raises PassError for a wrong program, TargetError for an unknown target or where a tool to compile is missing.
    """
    gpu = gpu_target(target)
    compiled = lower_program(program, gpu, origins=True)
    numbers = {name: value for name, value in arguments.items() if isinstance(value, int)}
    title = f"{compiled.launch.name}, on {gpu}"
    with ThreadPoolExecutor(1) as beside:
        code = beside.submit(_machine_code, compiled, numbers)
        seen = _seen(program, gpu, arguments) if arguments else None
        nothing = ". The grid of these arguments has no blocks: nothing ran" * bool(arguments and not seen)
        return _page(title, f"A tile program{nothing}", compiled, code, seen, [])


def _seen(program: Buildable, target: Target, arguments: Mapping[str, Any]) -> observer.Launch | None:
    """The first cluster of a call in the emulator, as far as it comes without a fault; None where it has no blocks."""
    kernel = load(lower_program(program, parse_target(f"emulator:{target.arch}"), origins=True))
    return first_cluster(lambda: kernel(**arguments))


def _page(
    title: str,
    about: str,
    compiled: CompiledKernel,
    code: Future[tuple[Pane, list[Figure]]],
    seen: observer.Launch | None,
    figures: list[Figure],
    weights: int = 0,
) -> Page:
    """The page of a compiled kernel for a GPU. code: what `_machine_code` returns."""
    origins, stages = compiled.origins, compiled.stages
    if origins is None:
        raise ValueError("compile the kernel with origins=True")
    shown = [python_pane(origins), pane_above("lowbit", "lowbit", stages["lowbit"], origins.above["lowbit"], origins)]
    shown += [stage_pane(name, TITLES[name], stages[name], lines) for name, lines in origins.lines.items()]
    if seen:
        about += f". The emulator found a fault: {seen.fault}" if seen.fault else ""
        about += "" if seen.whole else f". The emulator was watched for {STEPS:,} steps"
        by_origin, by_line = counts_by_origin(seen, origins.lines["ptx"]), counts_by_line(seen)
        shown = [with_counts(pane, by_origin, by_line if pane.name == "ptx" else None) for pane in shown]
        figures = [*figures, *activity_figures(seen, origins.lines["ptx"], weights)]
    figures += shared_figures(stages["tile"], seen)
    sass, of_machine = code.result()
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
        return Pane("sass", "SASS", absent=str(error)), figures
    return sass_pane(code, [each.line for each in code]), figures


def _explain_cpu(spec: MatmulSpec, m: int) -> Page:
    """The page of the program for m rows on this machine's CPU; of several experts that for the slots of one."""
    if spec.compute:
        check_one_expert(spec)
    one, rows = replace(spec, n=spec.n // spec.experts, experts=1), -(-m // spec.experts)
    found = cpu_matmul(one, rows)
    stages, origins = program_origins(found.spec, found.program_for(rows), found.cpu)
    shown = [python_pane(origins), pane_above("lowbit", "lowbit", matmul_text(one.in_act), (), origins)]
    shown += [stage_pane(name, TITLES[name], stages[name], lines) for name, lines in origins.lines.items()]
    about = f"The program for {'few' if rows <= found.few_tokens else 'many'} rows"
    about += ", quantized to 8 bits, whose values are numbers of f16" * (one.for_rows(rows).compute is not None)
    about += f", which runs for each expert, here of {rows}" * (spec.experts > 1)
    return Page(f"{spec}, m = {m}, on cpu", about, tuple(shown), tuple(packing_figures(spec)))
