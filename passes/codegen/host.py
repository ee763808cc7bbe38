"""LLVM IR text to machine code for this machine's processor: the back end of the CPU target."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from lowbit.dialect.errors import PassError, TargetError
from lowbit.passes.codegen.llvm import binding, parse

_LEVELS = {
    "generic": (),
    "x86-64": ("sse2",),
    "x86-64-v2": ("sse4.2", "popcnt"),
    "x86-64-v3": ("avx2", "bmi2", "f16c", "fma"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v4+avx512bf16": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512bf16"),
}
"""Processor name -> features it needs (x86-64 psABI, table "Micro-Architecture Levels"). What stands behind a plus is
no part of the level."""

_PASSES = (
    "simplify_cfg",
    "loop_simplify",
    "loop_rotate",
    "loop_unroll",  # before the rest, which then finds what rounds have in common
    "instruction_combine",
    "new_gvn",
    "simplify_cfg",
)
"""What is worth its time for loops that MLIR has simplified and written in vectors; all of O3 takes three times as long
and makes slower code."""


def host_cpu() -> str:
    """LLVM's name of this machine's processor: "znver4", "sapphirerapids", ..."""
    return binding().get_host_cpu_name()


def host_features() -> frozenset[str]:
    """LLVM's names of what this machine's processor can do: "avx2", "avx512f", ..."""
    return frozenset(name for name, present in binding().get_host_cpu_features().items() if present)


def emit_host(llvm_ir: str, functions: Sequence[str], cpu: str = "", elsewhere: bool = False) -> bytes:
    """A module's code for a CPU: a relocatable object file.

    Args:
        llvm_ir: text of the module; it may call nothing that it does not define.
        functions: names of those that are wanted.
        cpu: "" for this machine's processor with all its features, or less: "x86-64", "x86-64-v2" (SSE4.2),
            "x86-64-v3" (AVX2), "x86-64-v4" (AVX-512), "x86-64-v4+avx512bf16", "generic".
        elsewhere: whether the code is for another machine, so that this one may lack what `cpu` has.

    Raises:
        PassError: the IR is not valid, does not define a function, or calls one of another module.
        TargetError: `cpu` is unknown, or more than this machine has.
    """
    if not elsewhere:
        _check_runs_here(cpu)
    machine = _machine(cpu)
    module = _optimize(llvm_ir, machine)
    defined = sorted(f.name for f in module.functions if not f.is_declaration)
    foreign = sorted(f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm."))
    if missing := sorted(set(functions) - set(defined)):
        raise PassError(f"no function {', '.join(missing)} in the module; it has {', '.join(defined)}")
    if foreign:
        raise PassError(f"host code calls {', '.join(foreign)}, which it does not define; it has {', '.join(defined)}")
    return machine.emit_object(module)


def emit_host_assembly(llvm_ir: str, cpu: str = "") -> str:
    """The machine code that `emit_host` makes, to read."""
    _check_runs_here(cpu)
    machine = _machine(cpu)
    return machine.emit_assembly(_optimize(llvm_ir, machine))


def _optimize(llvm_ir: str, machine: Any) -> Any:
    """The module after `_PASSES`."""
    module = parse(llvm_ir, machine, _triple())
    llvm = binding()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    passes = llvm.create_new_module_pass_manager()
    for name in _PASSES:
        getattr(passes, f"add_{name}_pass")()
    passes.run(module, builder)
    return module


def _triple() -> str:
    return binding().get_process_triple()


def _check_runs_here(cpu: str) -> None:
    """Raises TargetError for a processor that has more than this machine's."""
    if missing := sorted(set(_LEVELS.get(cpu, ())) - host_features()):
        raise TargetError(f"cpu {cpu!r} needs {', '.join(missing)}, which this machine ({host_cpu()}) lacks")


@lru_cache(maxsize=8)
def _machine(cpu: str) -> Any:
    llvm = binding()
    if cpu in ("", host_cpu()):
        cpu, features = host_cpu(), llvm.get_host_cpu_features().flatten()
    elif cpu not in _LEVELS:
        raise TargetError(f"unknown cpu {cpu!r}; allowed: {', '.join(_LEVELS)}, {host_cpu()}")
    else:
        cpu, plus, feature = cpu.partition("+")
        features = plus + feature
    target = llvm.Target.from_triple(_triple())
    return target.create_target_machine(cpu=cpu, features=features, opt=2, reloc="pic", codemodel="small")
