"""The whole lowering, in order: from a spec to PTX, stage by stage; `passes.stages` has the stages and their passes.

Why this order: the memory order and the schedule must be known before a program can be built; copies are pipelined
while they are still tile operations; formats are expanded last, when it is known which registers are wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.assembly import print_module
from lowbit.dialect.bindings import gpu, ir, new_context
from lowbit.dialect.errors import PassError
from lowbit.dialect.signature import Param
from lowbit.dialect.types import Element, Global, param_kind, read_grid, read_strings, remembered_mirrors
from lowbit.passes.base import Pass, each_function, each_op
from lowbit.passes.builder import Program
from lowbit.passes.builder.locations import named
from lowbit.passes.builder.program import built_module
from lowbit.passes.codegen.cubin import emit_cubin
from lowbit.passes.codegen.lower_to_llvm import LowerToLLVM
from lowbit.passes.codegen.ptx import emit_ptx, translate_lowered
from lowbit.passes.codegen.source_lines import mark_lines
from lowbit.passes.kernels.base import KernelRequest, KernelSchedule
from lowbit.passes.kernels.registry import family_named
from lowbit.passes.launch import Launch
from lowbit.passes.lowering.lower_dequant import LowerDequant
from lowbit.passes.lowering.lower_tiles import LowerTiles
from lowbit.passes.origins import Origins
from lowbit.passes.stages import GPU_STAGES, Stage
from lowbit.passes.target import Target
from lowbit.passes.tensor_programs import tensor_program
from lowbit.passes.transforms.expand_matmul import ExpandMatmul
from lowbit.passes.transforms.pipeline_copies import PipelineCopies
from lowbit.passes.transforms.plan_packing import PlanPacking
from lowbit.passes.transforms.select_schedule import SelectSchedule
from lowbit.passes.transforms.share_constants import ShareConstants

PASSES: dict[str, type[Any]] = {
    p.name: p
    for p in (
        PlanPacking,
        SelectSchedule,
        ExpandMatmul,
        PipelineCopies,
        ShareConstants,
        LowerTiles,
        LowerDequant,
        LowerToLLVM,
    )
}


def passes_to(stage: Stage, target: Target) -> tuple[Pass, ...]:
    """The passes that lead to a stage from the one before it."""
    made: dict[str, Pass] = {
        SelectSchedule.name: SelectSchedule(target),
        LowerTiles.name: LowerTiles(target),
    }
    return tuple(made.get(name) or PASSES[name]() for name in stage.passes)


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel ready to be assembled: how to start it, its PTX, and the text of every stage that was asked for.

    elements   the types as which a program of one's own sees the memory behind its pointers, by parameter
    origins    where the lines of all stages came from, if that was asked for
    """

    launch: Launch
    target: Target
    schedule: KernelSchedule | None  # None for a program of one's own
    stages: dict[str, str]
    elements: dict[str, tuple[Element, ...]] = field(default_factory=dict[str, tuple[Element, ...]])
    origins: Origins | None = None

    @property
    def ptx(self) -> str:
        return self.stages["ptx"]

    def cubin(self) -> bytes:
        """Machine code, assembled anew at every call."""
        return emit_cubin(self.ptx, self.target)


def compile_kernel(
    request: KernelRequest, keep: bool = False, lines: bool = False, origins: bool = False
) -> CompiledKernel:
    """The kernel of a request; `keep` records the IR of every stage, `lines` has the PTX say which line of the kernel's
    program made what, in `.loc` directives, and `origins` notes for every line of every stage where it came from."""
    noted = Origins() if origins else None
    compiled = _compile(lambda: tensor_program(request), request.target, request.schedule, keep, lines, noted)
    family = family_named(request.family)
    names = [param.name for param in compiled.launch.params]
    roles = family.roles(request.spec, names)
    launch = replace(compiled.launch, boxes=family.x_boxes(request.spec, request.schedule), roles=roles)
    return replace(compiled, launch=launch)


Buildable = Program | ir.Module | Callable[[], Program | ir.Module]
"""A program of one's own: what the builder makes, its module, or a function that returns one of these."""


def lower_program(
    program: Buildable, target: Target, lines: bool = False, origins: bool = False
) -> CompiledKernel:
    """The kernel of a tile program of one's own, with the IR of every stage.

    The program stays as it is. For the emulator, and with `lines`, its PTX says which line made what, in `.loc`
    directives; with `origins` it is noted for every line of every stage where it came from, in place of these. Raises
    PassError for what is no program, or a wrong one.
    """
    context = new_context()
    ops.register(context)
    with context, ir.Location.unknown():
        module = built_module(program() if callable(program) else program)
        text = module.operation.get_asm(enable_debug_info=True)  # so that the program stays, for other targets
    lines = lines or target.kind == "emulator"
    return _compile(lambda: _read(text), target, None, keep=True, lines=lines, origins=Origins() if origins else None)


def _read(text: str) -> ir.Module:
    """A module of the current context. Raises PassError for a wrong one."""
    try:
        return ir.Module.parse(text)
    except ir.MLIRError as error:
        raise PassError(f"the program's module is wrong: {error}") from None


def _compile(
    build: Callable[[], ir.Module],
    target: Target,
    schedule: KernelSchedule | None,
    keep: bool,
    lines: bool = False,
    origins: Origins | None = None,
) -> CompiledKernel:
    stages: dict[str, str] = {}
    launches: list[Launch] = []
    with _known_operations(), ir.Location.unknown(), remembered_mirrors():
        module = build()
        elements = _elements(module)
        if keep:
            stages["lowbit"] = _written("lowbit", module, origins)
        for stage in (stage for stage in GPU_STAGES if stage.passes):
            for step in passes_to(stage, target):
                step.run(module)
            _verify(module, stage)
            if stage.name == "gpu":
                launches = read_launches(module)
            if origins and stage.name == "tile":
                origins.number(module)
            if keep:
                stages[stage.name] = _written(stage.name, module, origins)
        if lines or origins:
            mark_lines(module)
        llvm_ir = translate_lowered(module)
    ptx = emit_ptx(llvm_ir, target)
    if keep:
        stages["ll"] = origins.recorded_llvm(llvm_ir) if origins else llvm_ir
    stages["ptx"] = origins.recorded_assembly("ptx", ptx) if origins else ptx
    launch = replace(launches[0], may_overlap="griddepcontrol.wait" in stages["ptx"])
    return CompiledKernel(launch, target, schedule, stages, elements, origins)


def _verify(module: ir.Module, stage: Stage) -> None:
    """Raises PassError for what is wrong at a stage: a mistake of a pass, or of a kernel's program."""
    try:
        module.operation.verify()
    except ir.MLIRError as error:
        found = [named(each.location) + each.message for each in error.error_diagnostics]
        raise PassError(f"stage {stage.name} is wrong: " + "\n".join(found)) from None


class _Spare(threading.local):
    """A context that a thread has compiled in, and in how many kernels; no context where it is in use."""

    context: ir.Context | None = None
    kernels = 0


_spare = _Spare()
_MOST_KERNELS = 32  # of a context, which keeps their types and attributes


@contextmanager
def _known_operations() -> Generator[None]:
    """Within it, a context with our operations is the current one: that of this thread's last kernel if it has compiled
    few. To make one takes 25 ms, a tenth of what a small kernel takes. After an error it is not used again."""
    context, kernels = _spare.context, _spare.kernels + 1
    if context is None or kernels > _MOST_KERNELS:
        context, kernels = new_context(), 1
        ops.register(context)
    _spare.context = None
    with context:
        yield
    _spare.context, _spare.kernels = context, kernels


def _written(stage: str, module: ir.Module, origins: Origins | None) -> str:
    return origins.recorded(stage, module) if origins else print_module(module)


def _elements(module: ir.Module) -> dict[str, tuple[Element, ...]]:
    """The elements of the views of each pointer parameter of a tile program; of a program on tensors there are none."""
    found: dict[str, tuple[Element, ...]] = {}
    for program in each_op(module, ops.ProgramOp):
        names, arguments = read_strings(program.params), list(program.body.blocks[0].arguments)
        for view in each_op(module, ops.GlobalViewOp):
            for name in (name for name, argument in zip(names, arguments) if argument == view.pointer):
                element = Global.of(view.result.type).element
                found[name] = tuple(dict.fromkeys((*found.get(name, ()), element)))
    return found


def read_launches(module: ir.Module) -> list[Launch]:
    """How to start the kernels of a module at stage gpu."""
    return [_read_launch(function.operation.attributes) for function in each_function(module, gpu.GPUFuncOp)]


def _read_launch(attributes: Any) -> Launch:
    """The launch in the attributes of a gpu.func, whose type says which kinds its parameters have."""

    def number(name: str) -> int:
        return int(ir.IntegerAttr(attributes[f"lowbit.{name}"]).value)

    types = ir.FunctionType(ir.TypeAttr(attributes["function_type"]).value).inputs
    names = read_strings(attributes["lowbit.params"])
    return Launch(
        ir.StringAttr(attributes["sym_name"]).value,
        read_grid(attributes["lowbit.grid"]),
        number("threads"),
        number("shared_bytes"),
        tuple(Param(name, param_kind(type_, name)) for name, type_ in zip(names, types)),
        number("workspace"),
    )
