"""A matmul on this machine's CPU: compiled when made, run by several threads, each on its own row blocks."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from lowbit.dialect.bindings import ir, new_context
from lowbit.dialect.errors import TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.codegen.host import HostModule, host_cpu, host_features
from lowbit.passes.codegen.ptx import translate
from lowbit.passes.cpu.decode import Isa
from lowbit.passes.cpu.lower_cpu import build_cpu_dequantize, build_cpu_matmul, lower_cpu_to_llvm, prepared_tokens
from lowbit.pylib.torch_types import TORCH

# Multiply-adds worth a thread: about 50 us of work, which is what waking one and waiting for it costs.
_WORTH_A_THREAD = 1 << 19
_PARTS = 4  # per thread: a core that others use too holds up a quarter of a share, not all of it


class CpuMatmul:
    """A spec compiled for a CPU. Tensors must fit the spec, lie on the CPU, and be contiguous (x need not).

    spec      what to compute
    cpu       processor to compile for: one of LLVM's levels ("x86-64-v3"), "" for this one
    threads   at most so many; None: torch.get_num_threads() at every call

    Raises TargetError without llvmlite, and for a processor that this is not or that lacks AVX2.
    """

    def __init__(self, spec: MatmulSpec, cpu: str = "", threads: int | None = None) -> None:
        self.spec = spec
        self._cpu, self._threads = cpu, threads
        self._act, self._out = TORCH[spec.act], TORCH[spec.out_dtype]
        self._module = self._compile(build_cpu_matmul, "lowbit_prepare", "lowbit_matmul")
        self._prepare = _function(self._module, "lowbit_prepare", pointers=3, integers=2)
        self._matmul = _function(self._module, "lowbit_matmul", pointers=3 + len(spec.tensors), integers=3)

    @cached_property
    def _dequantizer(self) -> tuple[Callable[..., None], HostModule]:
        """Compiled when first wanted: most weights are never dequantized."""
        module = self._compile(build_cpu_dequantize, "lowbit_dequantize")
        return _function(module, "lowbit_dequantize", pointers=1 + len(self.spec.tensors), integers=2), module

    def _compile(self, build: Callable[[MatmulSpec, Isa], ir.Module], *functions: str) -> HostModule:
        with new_context(), ir.Location.unknown():
            module = lower_cpu_to_llvm(build(self.spec, _isa(self._cpu)))
            return HostModule(translate(module), functions, self._cpu)

    def matmul(self, x: Tensor, weight: Sequence[Tensor]) -> Tensor:
        """y [..., n] in the out type for x [..., k] in the act type and the tensors of `spec.tensors`."""
        spec, p = self.spec, self.spec.packing
        y = torch.empty((*x.shape[:-1], spec.n), dtype=self._out)
        m = x.numel() // spec.k
        if not m:
            return y
        x = x.contiguous()
        xs = torch.empty((prepared_tokens(m), p.padded_k))
        sums = torch.empty((prepared_tokens(m), p.groups))
        prepare = (x.data_ptr(), xs.data_ptr(), sums.data_ptr())
        self._parallel(lambda first, last: self._prepare(*prepare, first, last), m, m * spec.k)
        arrays = [t.data_ptr() for t in (xs, sums, *weight, y)]
        work = m * spec.n * spec.k
        self._parallel(lambda first, last: self._matmul(*arrays, m, first, last), p.row_blocks, work)
        return y

    def dequantize(self, weight: Sequence[Tensor]) -> Tensor:
        """W [n, k] in the act type."""
        spec = self.spec
        w = torch.empty((spec.n, spec.k), dtype=self._act)
        arrays = [t.data_ptr() for t in (*weight, w)]
        run, _ = self._dequantizer
        self._parallel(lambda first, last: run(*arrays, first, last), spec.packing.row_blocks, w.numel())
        return w

    def stages(self) -> dict[str, str]:
        """The program as text: "vector" and "llvm" (MLIR), "ll" (LLVM IR), "asm"."""
        with new_context(), ir.Location.unknown():
            module = build_cpu_matmul(self.spec, _isa(self._cpu))
            stages = {"vector": str(module)}
            stages["llvm"] = str(lower_cpu_to_llvm(module))
            stages["ll"] = translate(module)
            return stages | {"asm": self._module.assembly}

    def _parallel(self, run: Callable[[int, int], None], count: int, work: int) -> None:
        """run(first, last) on parts of range(count), in as many threads as `work` multiply-adds are worth."""
        most = self._threads or torch.get_num_threads()
        threads = min(most, count, work // _WORTH_A_THREAD)
        if threads <= 1:
            run(0, count)
            return
        parts = min(_PARTS * threads, count)
        bounds = [count * part // parts for part in range(parts + 1)]
        left = iter(list(pairwise(bounds)))  # shared: whoever is free takes the next

        def take_parts() -> None:
            for first, last in left:
                run(first, last)

        others = [_pool(os.getpid(), most).submit(take_parts) for _ in range(threads - 1)]
        try:
            take_parts()
        finally:  # the arrays must live until the last thread is done
            for other in others:
                if not other.cancel():  # it may not have begun: then all is done already
                    other.result()


@lru_cache(maxsize=None)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The threads besides the caller's. A forked process has none of its parent's: it makes its own."""
    return ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="lowbit")


def _isa(cpu: str) -> Isa:
    """What a processor offers for tables. Raises TargetError for an x86 that can't convert f16."""
    levels: dict[str, Isa] = {"x86-64-v3": "avx2", "x86-64-v4": "avx512"}
    isa = levels.get(cpu, "generic")
    if not cpu:
        features = host_features()
        isa = "avx512" if "avx512f" in features else "avx2" if features >= {"avx2", "f16c"} else "generic"
    if isa == "generic" and platform.machine().lower() in ("x86_64", "amd64"):
        raise TargetError(
            f"cpu {cpu or host_cpu()!r} lacks AVX2 or F16C, which the CPU target needs; "
            "use a processor of level 'x86-64-v3' or later"
        )
    return isa


def _function(module: HostModule, name: str, *, pointers: int, integers: int) -> Callable[..., None]:
    """A compiled function; calling it releases the interpreter lock."""
    types = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * integers
    return ctypes.CFUNCTYPE(None, *types)(module.address(name))
