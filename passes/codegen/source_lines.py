"""The lines of a program in its PTX: `.loc` directives, from which the emulator, and with LOWBIT_LINEINFO a profiler of
GPUs, knows what made an instruction.

The builder records the frames that made an operation (`passes.builder`), and passes hand its location on. LLVM writes
`.loc` where an operation has a line within a subprogram, which is what is made here. Instructions stay the same.
"""

from __future__ import annotations

from typing import Any

from lowbit.dialect.bindings import ir, llvm
from lowbit.passes.base import each_function
from lowbit.passes.builder.locations import user_line


def mark_lines(module: ir.Module) -> None:
    """Give all operations of the module's functions, in the llvm dialect, the line of the program that made them."""
    for function in each_function(module, llvm.LLVMFuncOp):
        if function.operation.regions[0].blocks:
            _mark(function.operation)


def _mark(function: Any) -> None:
    operations: list[Any] = []

    def visit(op: Any) -> ir.WalkResult:
        operations.append(op)
        return ir.WalkResult.ADVANCE

    function.walk(visit)
    lines = [user_line(op.location) for op in operations]
    files = sorted({line[0] for line in lines if line})
    if not files:
        return
    subprogram, *scopes = _scopes(ir.StringAttr(function.attributes["sym_name"]).value, files)
    scope_of = dict(zip(files, scopes))
    for op, line in zip(operations, lines):
        at = [ir.Location.file(*line, 0)] if line else []
        op.location = ir.Location.fused(at, scope_of[line[0]]) if line else ir.Location.unknown()
    function.location = ir.Location.fused([ir.Location.file(files[0], 1, 0)], subprogram)


def _scopes(name: str, files: list[str]) -> Any:
    """A function as LLVM's debug information has it, and within it a scope for each file.

    They are parsed as one attribute, as what is distinct is the same within one text alone.
    """
    of_files = [f"#llvm.di_file<{ir.StringAttr.get(file)} in \"\">" for file in files]
    unit = (
        f"<id = distinct[1]<>, sourceLanguage = DW_LANG_C, file = {of_files[0]}, isOptimized = true, "
        "emissionKind = DebugDirectivesOnly>"
    )
    subprogram = (
        f"#llvm.di_subprogram<id = distinct[0]<>, compileUnit = {unit}, scope = {of_files[0]}, "
        f'name = "{name}", file = {of_files[0]}, subprogramFlags = "Definition|Optimized", type = <>>'
    )
    scopes = [f"#llvm.di_lexical_block_file<scope = {subprogram}, file = {f}, discriminator = 0>" for f in of_files]
    return ir.ArrayAttr(ir.Attribute.parse(f"[{', '.join([subprogram, *scopes])}]"))
