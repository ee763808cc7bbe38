"""A matmul on this machine's CPU: one native call, run by torch's threads, each on its own row blocks."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.errors import PackError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.task import ENTRY, Needs
from lowbit.pylib.build import knobs
from lowbit.pylib.build.host_programs import FEW_AND_MANY, Program, load_host_program
from lowbit.pylib.build.knobs import MOST_THREADS
from lowbit.pylib.runtime import cpu_threads
from lowbit.pylib.runtime.interface import check_memory_of_weight, check_memory_of_x
from lowbit.pylib.runtime.machine_code import load
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.folding import spec_of_values
from lowbit.pylib.weights.tensor_checks import address_of

# Multiply-adds that are worth more than one thread: about 10 us of work; a team takes 2 to begin and to end.
_WORTH_A_TEAM = 1 << 19
_PARTS = 4  # per thread: a core that others use too holds up a quarter of a share, not all of it
_NO_MEMORY = "a tensor of the weight has no memory (it is fake, meta or a view of zeros); use real ones"
_MOST_SOUND = 4096  # weights of a spec whose addresses are kept
_SLAB = 1024  # tokens that are prepared at once, to bound the scratch memory

# As Inductor allocates (shape, strides, dtype), without the dispatcher, and without a look at the default device.
allocate: Callable[..., Tensor] = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Loaded:
    """A program in memory."""

    call: Callable[[int], None]
    needs: Needs

    def parts(self, threads: int, row_blocks: int) -> int:
        """Returns how many parts row blocks are cut into for so many threads."""
        return 1 if threads == 1 else min(_PARTS * threads, -(-row_blocks // self.needs.panel))

    def run(
        self, threads: int, row_blocks: int, m: int, x: int, y: int, weight: Sequence[int], first_block: int = 0
    ) -> None:
        """One task, with the addresses of its arrays."""
        parts = self.parts(threads, row_blocks)
        nbytes = self.needs.nbytes(m, threads)
        scratch = allocate((nbytes,), (1,), torch.uint8)
        task = array("q", (0, 0, 0, m, parts, x, y, scratch.data_ptr(), first_block, *weight))
        cpu_threads.run(self.call, task.buffer_info()[0], threads)


def cpu_matmul(spec: MatmulSpec, m: int) -> CpuMatmul:
    """Returns what multiplies m rows of x by a weight on this CPU, within LOWBIT_CPU and LOWBIT_NUM_THREADS: with
    `compute` rows of values and their scales, else rows in the act type; columns are in the order of the weight's.

    Raises TargetError as `CpuMatmul` does.
    """
    kind = replace(spec.for_rows(m), permuted=False)
    of_values = spec_of_values(kind, m) if kind.compute else kind
    return CpuMatmul(of_values, knobs.cpu(), knobs.num_threads(), scaled=kind.compute is not None)


class CpuMatmul:
    """A spec compiled for a CPU. Tensors must fit the spec, lie on the CPU, and be contiguous (x need not).

    spec      what to compute
    cpu       processor to compile for: one of LLVM's levels ("x86-64-v3"), "" for this one
    threads   at most so many; None: torch.get_num_threads() at every call. Never more than `knobs.MOST_THREADS`
    scaled    whether rows of x have scales, which are the last operand of a call: [m] in f32, contiguous

    `few_tokens` are multiplied by exact codes; more by weights that are decoded into memory, in bf16 where the
    activation is bf16 and the processor multiplies it, else in f32.

    Raises TargetError without llvmlite, and for a processor that this is not or that lacks AVX2.
    """

    def __init__(self, spec: MatmulSpec, cpu: str = "", threads: int | None = None, scaled: bool = False) -> None:
        self.spec, self._scaled = spec, scaled
        self.cpu, self._threads = cpu, threads
        self._act, self._out = TORCH[spec.act], TORCH[spec.out_dtype]
        self._act_bytes = ELEMENTS[spec.act].bytes
        self._row_blocks = spec.packing.row_blocks
        self._programs: dict[Program, Loaded] = {}
        self._sound: set[tuple[int, ...]] = set()  # addresses of weights
        self._lock = threading.Lock()
        self._few_and_many = FEW_AND_MANY[scaled]
        self._few = self._program(self._few_and_many[0])
        self.few_tokens = self._few.needs.most

    def matmul(self, x: Tensor, weight: Sequence[Tensor], first_block: int = 0) -> Tensor:
        """Returns y [..., n] in the out type.

        x            [..., k] in the act type
        weight       the tensors of `spec.call_operands`, behind which are the scales of a scaled x
        first_block  the row block of the tensor of outliers that is the weight's first: it may have those of more rows
        """
        n, k = self.spec.outputs, self.spec.k
        m = x.numel() // k
        y = allocate((m, n), (n, 1), self._out)
        if m:
            needed = (x.storage_offset() + m * k) * self._act_bytes
            if not x.is_contiguous() or x.untyped_storage().nbytes() < needed:
                x = _in_rows(x)
            self._rows(m, address_of(x), y.data_ptr(), self._operands(weight), first_block)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], n)

    def _rows(self, m: int, x: int, y: int, weight: Sequence[int], first_block: int) -> None:
        spec = self.spec
        program = self._program(self.program_for(m))
        x_row, y_row = self._act_bytes * spec.k, ELEMENTS[spec.out_dtype].bytes * spec.outputs
        stored, others = weight[: len(spec.tensors)], weight[len(spec.tensors) :]
        sizes = [y_row] * len(spec.call_inputs) + [4] * self._scaled  # of rows of the others
        for first in range(0, m, _SLAB):
            rows = min(_SLAB, m - first)
            threads = self._team(rows * spec.n * spec.k)
            operands = (*stored, *(start + first * size for start, size in zip(others, sizes))) if others else weight
            at = x + first * x_row, y + first * y_row
            program.run(threads, self._row_blocks, rows, *at, operands, first_block)

    def few(self) -> Loaded:
        """Returns the program for up to `few_tokens`."""
        return self._few

    def dequantize(self, weight: Sequence[Tensor]) -> Tensor:
        """W [n, k] in the act type."""
        n, k = self.spec.n, self.spec.k
        w = allocate((n, k), (k, 1), self._act)
        addresses = [*self.addresses(weight), *[0] * len(self.spec.call_inputs)]
        self._program("dequantize").run(self._team(n * k), self._row_blocks, 0, 0, w.data_ptr(), addresses)
        return w

    def stages(self, m: int = 1) -> dict[str, str]:
        """The program for m rows as text: "vector" and "llvm" (MLIR), "ll" (LLVM IR), "asm"."""
        from lowbit.passes.cpu.compile import program_stages  # which loads MLIR and LLVM

        return program_stages(self.spec, self.program_for(m), self.cpu)

    def program_for(self, m: int) -> Program:
        """Returns the name of the program that multiplies m rows."""
        return self._few_and_many[m > self.few_tokens]

    def rounds_weights(self, m: int) -> bool:
        """Tells whether m rows are multiplied by weights that are rounded to bf16."""
        from lowbit.passes.cpu.compile import isa_of  # which loads MLIR and LLVM
        from lowbit.passes.cpu.decode import multiplies_bf16

        return m > self.few_tokens and multiplies_bf16(self.spec, isa_of(self.cpu))

    def _team(self, work: int) -> int:
        """Returns how many threads work: all of them, or one where they are not worth it. To change a team's size would
        end threads and start others."""
        return self.most_threads() if work >= _WORTH_A_TEAM else 1

    def most_threads(self) -> int:
        """Returns how many threads work where it is worth it."""
        return min(self._threads or torch.get_num_threads(), MOST_THREADS)

    def _program(self, name: Program) -> Loaded:
        """Compiled when first wanted: most weights are never dequantized, say."""
        loaded = self._programs.get(name)
        if loaded is None:
            with self._lock:
                loaded = self._programs.get(name) or self._load(name)
                self._programs[name] = loaded
        return loaded

    def _load(self, name: Program) -> Loaded:
        program = load_host_program(self.spec, name, self.cpu)
        return Loaded(load(program.code, ENTRY), program.needs)

    def _operands(self, operands: Sequence[Tensor]) -> tuple[int, ...]:
        """Returns the addresses of a weight's tensors, and of what a call has besides them."""
        if not self.spec.call_inputs and not self._scaled:
            return self.addresses(operands)
        count = len(self.spec.tensors)
        return (*self.addresses(operands[:count]), *(t.data_ptr() for t in operands[count:]))

    def addresses(self, weight: Sequence[Tensor]) -> tuple[int, ...]:
        """Returns the addresses of a weight's tensors. Raises PackError where one has no memory, or too little.

        A storage that is shrunk moves, so those that were found sound are not looked at again.
        """
        found = tuple([tensor.data_ptr() for tensor in weight])
        if found not in self._sound:
            if not all(found):
                raise PackError(_NO_MEMORY)
            check_memory_of_weight(self.spec, weight)
            if len(self._sound) == _MOST_SOUND:
                self._sound.clear()
            self._sound.add(found)
        return found


def _in_rows(x: Tensor) -> Tensor:
    """Returns a contiguous copy. Raises SpecError where the storage of x was shrunk."""
    check_memory_of_x(x)
    return x.clone(memory_format=torch.contiguous_format)
