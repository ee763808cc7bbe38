"""LLVM IR text to machine code in this process: the back end of the CPU target (llvmlite's ORC JIT)."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import count
from typing import Any

from lowbit.dialect.errors import PassError, TargetError
from lowbit.passes.codegen.llvm import binding, optimize

_LEVELS = {
    "generic": (),
    "x86-64": ("sse2",),
    "x86-64-v2": ("sse4.2", "popcnt"),
    "x86-64-v3": ("avx2", "bmi2", "f16c", "fma"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
"""Processor name -> features it needs (x86-64 psABI, table "Micro-Architecture Levels")."""

_library_number = count()  # a library's name may never come twice, even after it is gone


def host_cpu() -> str:
    """LLVM's name of this machine's processor: "znver4", "sapphirerapids", ..."""
    return binding().get_host_cpu_name()


def host_features() -> frozenset[str]:
    """LLVM's names of what this machine's processor can do: "avx2", "avx512f", ..."""
    return frozenset(name for name, present in binding().get_host_cpu_features().items() if present)


class HostModule:
    """The functions of one LLVM module, compiled for a CPU and loaded; valid as long as this object lives.

    Args:
        llvm_ir: text of the module.
        symbols: names of its functions whose addresses are wanted.
        cpu: "" for this machine's processor with all its features, or less: "x86-64", "x86-64-v2" (SSE4.2),
            "x86-64-v3" (AVX2), "x86-64-v4" (AVX-512), "generic".

    Raises:
        PassError: the IR is not valid, or does not define a symbol.
        TargetError: `cpu` is unknown, or more than this machine has.
    """

    def __init__(self, llvm_ir: str, symbols: Sequence[str], cpu: str = "") -> None:
        llvm = binding()
        self._machine = _machine(cpu)
        triple = llvm.get_process_triple()
        self._module = optimize(llvm_ir, self._machine, triple, vectorize=True, unroll=True)
        defined = sorted(f.name for f in self._module.functions if not f.is_declaration)
        if missing := sorted(set(symbols) - set(defined)):
            raise PassError(f"no function {', '.join(missing)} in the module; it has {', '.join(defined)}")
        library = llvm.JITLibraryBuilder().add_ir(self._module).add_current_process()
        for symbol in symbols:
            library.export_symbol(symbol)
        self._jit = llvm.create_lljit_compiler(self._machine)
        self._library = library.link(self._jit, f"lowbit.{next(_library_number)}")

    def address(self, symbol: str) -> int:
        """Address of a function, one of the `symbols`; to be called through ctypes."""
        return self._library[symbol]

    @cached_property
    def assembly(self) -> str:
        """The machine code, to read."""
        return self._machine.emit_assembly(self._module)


@lru_cache(maxsize=8)
def _machine(cpu: str) -> Any:
    llvm = binding()
    if cpu in ("", host_cpu()):
        cpu, features = host_cpu(), llvm.get_host_cpu_features().flatten()
    elif cpu not in _LEVELS:
        raise TargetError(f"unknown cpu {cpu!r}; allowed: {', '.join(_LEVELS)}, {host_cpu()}")
    elif missing := sorted(set(_LEVELS[cpu]) - host_features()):
        raise TargetError(f"cpu {cpu!r} needs {', '.join(missing)}, which this machine ({host_cpu()}) lacks")
    else:
        features = ""
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
