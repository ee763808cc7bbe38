"""The two steps before the assembler: a module in the llvm dialect to LLVM IR text, and that text to PTX.

The MLIR bindings print LLVM IR and have no NVPTX back end; llvmlite has one, so the text crosses over.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from lowbit.dialect.bindings import ir, llvm, passmanager
from lowbit.dialect.errors import PassError, TargetError
from lowbit.passes.codegen.llvm import binding, optimize
from lowbit.passes.target import Target
from lowbit.passes.targets import GPU_NAMES

_TRIPLE = "nvptx64-nvidia-cuda"

# What LLVM's NVPTX back end cannot select ends the process, so it is looked for before.
_NEEDED: tuple[tuple[re.Pattern[str], str, Callable[[Target], bool]], ...] = (
    (re.compile(r"@llvm\.nvvm\.(?:wgmma|setmaxnreg)\.[\w.]+"), "needs sm_90a", lambda t: t.has_wgmma),
    (
        re.compile(
            r"@llvm\.nvvm\.(?:griddepcontrol|elect|barrier\.cluster|stmatrix|cp\.async\.bulk|prefetch"
            r"|fence\.(?:proxy|mbarrier)|mbarrier\.[\w.]*(?:expect|complete)\.tx)\b[\w.]*"
        ),
        "needs sm_90 or later",
        lambda t: t.capability >= 90,
    ),
    (
        re.compile(
            r"@llvm\.(?:exp|exp10|log|log10|tan|sinh|cosh|asin|acos|atan|atan2|pow)\.[\w.]+"
            r"|call (?!.*\b(?:afn|fast) )[^@]*@llvm\.(?:sin|cos|tanh|log2)\.[\w.]+"
        ),
        "has no GPU instruction",
        lambda t: False,
    ),
)
"""Intrinsic, what it needs, and whether a target has that. Sine and its like exist only as approximations (`afn`)."""


_Named = tuple[ir.Operation, str]
"""An operation and its name, which the bindings make anew whenever it is asked for."""


def translate(module: ir.Module | ir.Operation | ir.OpView) -> str:
    """LLVM IR text of a module whose functions are all in the llvm and nvvm dialects.

    A builtin module with a gpu.module in it gives that gpu.module's (device) code.

    Raises:
        PassError: the module does not verify, or has an operation without a translation; names the operation.
            (The translation itself would end the process.)
    """
    root = _device_code(module.operation)
    try:
        root.verify()
    except ir.MLIRError as error:
        raise PassError(f"module does not verify: {error}") from error
    nvvm = [each for each in _checked_operations(root) if each[1].startswith("nvvm.")]
    if needy := _inline_ptx_operations(root, nvvm):
        raise PassError(_no_translation(needy[0], "run convert-nvvm-to-llvm first"))
    return llvm.translate_module_to_llvmir(root)


def translate_lowered(module: ir.Module) -> str:
    """The same of a module that lower-to-llvm has made and that is verified: it has been through convert-nvvm-to-llvm.

    Raises:
        PassError: the module has an operation without a translation.
    """
    root = _device_code(module.operation)
    _checked_operations(root)
    return llvm.translate_module_to_llvmir(root)


def _checked_operations(root: ir.Operation) -> list[_Named]:
    """All operations inside `root`. Raises PassError for one that is of neither the llvm nor the nvvm dialect."""
    inner = _operations(root)
    if left := [op for op, name in inner if not name.startswith(("llvm.", "nvvm."))]:
        raise PassError(_no_translation(left[0], "lower it to the llvm dialect first"))
    return inner


def _device_code(root: ir.Operation) -> ir.Operation:
    """The gpu.module inside `root`, or `root`."""
    if root.name != "builtin.module":
        return root
    inner = [op.operation for op in root.regions[0].blocks[0].operations if op.operation.name == "gpu.module"]
    if len(inner) > 1:
        raise PassError(f"{len(inner)} gpu.module operations in one module; translate them one by one")
    return inner[0] if inner else root


def _operations(root: ir.Operation) -> list[_Named]:
    """All operations inside `root`, without itself."""
    found: list[_Named] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        found.append((op, op.name))
        return ir.WalkResult.ADVANCE

    root.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found[1:]


def _inline_ptx_operations(root: ir.Operation, nvvm: list[_Named]) -> list[ir.Operation]:
    """Those of the nvvm operations in `root` that are inline PTX to LLVM: they translate only after
    convert-nvvm-to-llvm.

    Nothing lists them, but the pass knows: they are those that it makes fewer.
    """
    if not nvvm:
        return []
    lowered = root.clone()
    manager = passmanager.PassManager.parse("any(convert-nvvm-to-llvm)", context=root.context)
    manager.enable_verifier(False)  # of a clone that is only counted
    manager.run(lowered)
    before, after = (Counter(name for _, name in ops) for ops in (nvvm, _operations(lowered)))
    return [op for op, name in nvvm if after[name] < before[name]]


def _no_translation(op: ir.Operation, fix: str) -> str:
    first_line = str(op).strip().splitlines()[0]
    return f"{op.name} has no translation to LLVM IR; {fix}\n  {first_line}\n  at {op.location}"


def emit_ptx(llvm_ir: str, target: Target) -> str:
    """PTX of `llvm_ir` for `target`; the same text for the same input, always.

    Loops keep their trip count: one is unrolled only where it carries unroll metadata (a
    ``#llvm.loop_annotation`` in MLIR), and nothing is vectorized, since the program says itself how it uses
    registers.

    Raises:
        TargetError: `target` is not a GPU.
        PassError: LLVM does not take the text, or the PTX would call functions that no one provides.
    """
    if not target.is_gpu:
        raise TargetError(f"no PTX for target {target}; allowed: {GPU_NAMES} and emulator:<one of these>")
    _check_intrinsics(llvm_ir, target)
    machine = _machine(target.arch, target.features)
    ptx: str = machine.emit_assembly(optimize(llvm_ir, machine, _TRIPLE))
    if missing := external_functions(ptx):
        raise PassError(
            f"PTX calls {', '.join(missing)}: an intrinsic that LLVM {binding().llvm_version_major} does not "
            "know (write it as inline PTX), or a libdevice function (expand it before)"
        )
    return ptx


def _check_intrinsics(llvm_ir: str, target: Target) -> None:
    for pattern, needs, has in _NEEDED:
        if not has(target) and (found := pattern.search(llvm_ir)):
            name = found[0][found[0].index("@") + 1 :]
            raise PassError(f"{name} {needs}; the target is {target}")


@lru_cache(maxsize=16)
def _machine(arch: str, features: str) -> Any:
    llvm_target = binding().Target.from_triple(_TRIPLE)
    return llvm_target.create_target_machine(cpu=arch, features=features, opt=3)


def external_functions(ptx: str) -> list[str]:
    """Names of the functions that `ptx` declares and does not define, sorted."""
    declaration = re.compile(r"\.extern\s+\.func\s+(?:\([^)]*\)\s*)?([\w.$%]+)")
    return sorted(set(declaration.findall(ptx)))
