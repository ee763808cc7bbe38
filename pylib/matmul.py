"""The compile driver: a `MatmulSpec` goes in, a function that takes and returns torch tensors comes out.

mm = lowbit.compile(lowbit.MatmulSpec(n=8192, k=8192, weight="u4", group_size=128))
w = mm.pack(codes, scales)
y = mm(x, w)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch._C import _is_tracing
from torch.compiler import is_dynamo_compiling

from lowbit.dialect.errors import SpecError, TargetError
from lowbit.dialect.fields import integer
from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.registry import schedule_from_dict, schedule_names
from lowbit.passes.stages import stages
from lowbit.passes.target import Target
from lowbit.pylib.build.choices import KernelChoices
from lowbit.pylib.build.driver import Artifact
from lowbit.pylib.operator import schema
from lowbit.pylib.operator.call_checks import (
    check_call,
    check_memory_of_x,
    check_one_expert,
    check_quantized_call,
    check_readable,
    check_residual,
    check_weight,
    in_memory,
)
from lowbit.pylib.operator.calls import OperatorCalls
from lowbit.pylib.operator.tracing import check_transforms, is_observed, sizes_as_numbers
from lowbit.pylib.runtime.activation import QuantizedActivation, from_values
from lowbit.pylib.runtime.devices import target_named
from lowbit.pylib.runtime.matmul_runtimes import MatmulRuntimes
from lowbit.pylib.runtime.quantizers import quantize_on
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights import packed
from lowbit.pylib.weights.packed import PackedWeight

if TYPE_CHECKING:
    from lowbit.pylib.explain.page import Page


def compile(
    spec: MatmulSpec, target: str | None = None, schedule: KernelSchedule | Mapping[str, Any] | None = None
) -> Matmul:
    """Compile a matmul.

    spec      what to compute
    target    a GPU such as "sm_90a" (`lowbit info` lists them); "cpu"; "emulator:sm_90a", which runs the GPU's PTX on
              CPU tensors; None: this machine's GPU, else "cpu". Compiling for a GPU needs none.
    schedule  the free choices of one GPU kernel: a schedule of any family, or a dictionary as `Matmul.choices` and
              tables have it. A Schedule (IntegerSchedule, EightBitSchedule) is for up to schedule.tokens tokens, one of
              the other families for all rows that its family has kernels for. Other rows, and None: good ones are
              chosen

    The kernel for one token is compiled (or found in the disk cache) at once, others when they are first
    needed. The same arguments give the same `Matmul`, so every layer of a model may ask for its own; one that no
    layer holds any more is given back in time.

    Raises SpecError for a spec or schedule that is none or does not fit, for one with top_k, and for a schedule that no
    rows would have; TargetError for an unknown target, a GPU that is too old, or a missing tool, with the command that
    installs it.
    """
    if not isinstance(spec, MatmulSpec):
        raise SpecError(f"spec={spec!r} must be a MatmulSpec, such as MatmulSpec(n=64, k=256, weight='u4')")
    if spec.top_k is not None:
        raise SpecError(f"({spec}) is a part of what lowbit.LowbitExperts does for few tokens; drop top_k= to compile")
    schedule = schedule_from_dict(schedule) if isinstance(schedule, Mapping) else schedule
    if not (schedule is None or isinstance(schedule, KernelSchedule)):
        names = schedule_names("matmul", "quantized_matmul")
        raise SpecError(f"schedule={schedule!r} must be one of {names}, or None")
    if not (target is None or isinstance(target, str)):
        raise TargetError(f"target={target!r} must be a name such as 'sm_90a', 'cpu' or 'emulator', or None")
    return _compile(interned(spec), target_named(target), schedule)


_KEPT = 256  # matmuls that nothing else holds
_alive: WeakValueDictionary[tuple[MatmulSpec, Target, KernelSchedule | None], Matmul] = WeakValueDictionary()


@lru_cache(maxsize=_KEPT)
def _compile(spec: MatmulSpec, target: Target, schedule: KernelSchedule | None) -> Matmul:
    """Returns the `Matmul` of these arguments: an earlier one while anyone holds it, or if it is among the last asked
    for."""
    key = spec, target, schedule
    found = _alive.get(key)
    return found or _alive.setdefault(key, Matmul(spec, target, schedule))


class Matmul:
    """y = x W^T + bias with W packed in low-bit codes. Made by `compile`; safe to call from any thread.

    A gradient flows to x, by way of the dequantized weight and straight through the quantization that
    `MatmulSpec.compute` asks for; none to the weight's tensors, nor to an activation that comes in 8 bits. Change a
    packed weight in place only when no call is under way (`torch.cuda.synchronize()`): on Hopper a call reads it ahead
    of its turn in the stream. Then make a new `PackedWeight` of its tensors, which looks at the range of the values.

    spec, target   as compiled
    schedule       of the kernel for one token; None on a CPU
    description    all that was compiled, as text: the last argument of `torch.ops.lowbit.matmul.packed`
    """

    def __init__(self, spec: MatmulSpec, target: Target, schedule: KernelSchedule | None) -> None:
        self.spec = spec
        self.target = target
        self._act, self._k = TORCH[spec.act], spec.k
        self._arguments = spec, target.name, schedule
        self.description = schema.describe(spec, target, schedule)
        self._runtimes = MatmulRuntimes(spec, target, schedule)
        self._operator_calls = OperatorCalls(spec, self._runtimes)
        self._runtime = self._runtimes.ordinary
        self._run = self._without_residual if spec.call_inputs else self._runtime.matmul
        self.schedule = self._runtime.schedule

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles as the call that made it: a model that holds one can be copied and saved."""
        return compile, self._arguments

    def __repr__(self) -> str:
        return f"Matmul({self.spec}; on {self.target})"

    def pack(
        self,
        codes: Tensor | np.ndarray,
        scales: Tensor | np.ndarray,
        zeros: Tensor | np.ndarray | None = None,
        bias: Tensor | np.ndarray | None = None,
        outliers: Tensor | Sequence[Tensor | np.ndarray] | None = None,
        **others: Tensor | np.ndarray | None,
    ) -> PackedWeight:
        """Returns a quantized weight in the kernels' memory order, on the device that its tensors are on.

        codes        integers [n, k]: signed values for i<b> formats, codes 0 .. 2^b-1 for all others
        scales       floats [n, groups], for group_size=None also [n]; rounded to the spec's scale type
        zeros        [n, groups]: for "int" integers lo .. lo + spec.zero_span, with lo the format's least value; for
                     "float" floats
        bias         floats [n], rounded to the out type
        outliers     a torch.sparse_csr tensor [n, k], or (row offsets, columns, values); values are rounded to f16
        others       by name, where the spec has them:
        offsets      floats [n, groups]
        row_scales   floats [n], or one number; with fold_scales=True they may be left out, and are powers of two then
        permutation  integers [k]: column j of all these tensors is for column permutation[j] of x; of several experts
                     [experts k], those of each
        scale_scales, scale_zeros, scale_offsets, zero_scales, offset_scales and so on
                     with `bilevel`: floats [n / rows, groups / bilevel.groups], one for each block; scales, zeros and
                     offsets are integers of the spec's scale format then, or floats for "e4m3"

        Raises PackError for a wrong shape, type or device, a code out of range, a value that is not finite or
        overflows, an e8m0 scale that is no power of two, outliers outside the weight or twice in one place, and tensors
        that are missing or not in the spec.
        """
        return packed.pack(self.spec, codes, scales, zeros, bias, outliers, **others)

    def __call__(
        self,
        x: Tensor | QuantizedActivation,
        w: PackedWeight,
        x_scale: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Returns y [..., n] in the spec's out type, on the device and the current stream of x; [..., n / 2] where its
        epilogue multiplies the halves of a gated MLP.

        x         [..., k] in the spec's act type, with any number of rows, none too, and any strides. With
                  `MatmulSpec.compute` also what `lowbit.quantize_activation` returns, or values of 8 bits,
                  torch.float8_e4m3fn or torch.int8
        w         the weight as `pack` returns it, on the device of x
        x_scale   [...] in f32: the scale of each row, where x has values of 8 bits; None for all other x
        residual  [..., n] in the out type: what epilogue="residual" adds; None for all other specs. It gets a gradient
                  like x

        Raises SpecError for an x and PackError for a weight that do not fit the spec, TargetError for tensors where the
        target does not run.
        """
        if type(x) is not Tensor or x_scale is not None or x.requires_grad or is_observed() or x.is_neg():
            if isinstance(x, QuantizedActivation) or x_scale is not None:
                return self._of_quantized(x, w, x_scale, residual)
            return self._by_operator(x, w, residual)
        if residual is not None:
            return self._with_residual(x, w, residual)
        run, shape = self._run, x.shape
        if (  # what check_call looks at, and no more: it costs 0.5 us
            x.dtype is not self._act
            or not shape
            or shape[-1] != self._k
            or getattr(w, "ordinary_spec", None) is not self.spec
            or x.get_device() != w.tensors[0].get_device()
        ):
            check_readable(w)
            check_call(self.spec, x, w)
            run = self._runtimes.wide.matmul if w.wide_range else run
        try:
            return run(x, w.tensors)
        except RuntimeError:  # torch's: x has no memory that a kernel could read
            check_memory_of_x(x)
            raise

    def _without_residual(self, x: Tensor, weight: Sequence[Tensor]) -> Tensor:
        check_one_expert(self.spec)
        raise SpecError(f"({self.spec}) adds a residual; call mm(x, w, residual=r)")

    def _with_residual(self, x: Tensor, w: PackedWeight, residual: Tensor) -> Tensor:
        """Returns what a call gives that adds a residual."""
        if type(residual) is not Tensor or residual.requires_grad:
            return self._by_operator(x, w, residual)
        check_call(self.spec, x, w)
        check_residual(self.spec, x.shape, x.device, residual)
        check_readable(w)
        check_memory_of_x(x)
        runtime = self._runtimes.wide if w.wide_range else self._runtime
        return runtime.matmul(x, (*w.tensors, in_memory(residual)))

    def _by_operator(self, x: Tensor, w: PackedWeight, residual: Tensor | None) -> Tensor:
        """Returns what a call gives, as an operator of torch: recorded, differentiated, or run on other kinds of
        tensors, such as a view that negates."""
        if is_dynamo_compiling() or not _is_tracing():
            check_call(self.spec, x, w)
            check_transforms(x)
        else:  # sizes are tensors to torch.jit.trace: the operator checks x
            check_weight(self.spec, w)
        with sizes_as_numbers():
            check_residual(self.spec, x.shape, x.device, residual)
        return torch.ops.lowbit.matmul.packed(x, _operands(w, residual), self.description)

    def _of_quantized(
        self, x: Tensor | QuantizedActivation, w: PackedWeight, x_scale: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """Returns what a call gives for an activation of 8 bits."""
        compute = self.spec.compute
        if compute is None:
            raise SpecError(f"x has 8 bits, but ({self.spec}) multiplies in {self.spec.act}; use a spec with compute=")
        if not isinstance(x, QuantizedActivation):
            q = from_values(x, x_scale, compute)
        elif x_scale is None:
            q = x
        else:
            raise SpecError("x is quantized and has its scales; drop x_scale=")
        with sizes_as_numbers():
            check_quantized_call(self.spec, q, w)
            check_residual(self.spec, q.shape, q.device, residual, gradient=False)
        if is_observed() or any(type(t) is not Tensor for t in q.tensors):
            return torch.ops.lowbit.matmul.quantized(*q.tensors, _operands(w, residual), self.description)
        check_readable(w)
        others = () if residual is None else (in_memory(residual),)
        return self._runtimes.of_eight_bits.multiply(q.tensors, (*w.tensors, *others))

    def dequantize(self, w: PackedWeight) -> Tensor:
        """W [n, k] rounded to the act type, on the weight's device: values beyond its range become infinities."""
        check_weight(self.spec, w)
        if not is_observed():
            check_readable(w)
        return torch.ops.lowbit.dequantize(list(w.tensors), self.description)

    def prepare(self, rows: int, wide_range: bool = False) -> None:
        """Compile all kernels that calls with 1 to so many rows take, or read them from the disk cache, so that no call
        waits for a compiler.

        wide_range   of the weights (`PackedWeight.wide_range`)

        On a CPU, whose programs take any number of rows, nothing is left to do. Raises SpecError for a number of rows
        that is none, TargetError if a tool to compile is missing.
        """
        if not self.target.is_gpu:
            return
        runtime = self._runtimes.wide if wide_range else self._runtime
        for first in runtime.choices().firsts(integer("rows", rows, 1)):
            runtime.kernel(first)

    def kernel(self, m: int) -> Artifact:
        """The kernel that serves m rows, or the first of them; `choices` has the table. Raises SpecError for an m that
        is no number of rows."""
        return self._runtime.kernel(integer("m", m, 1))

    @property
    def choices(self) -> KernelChoices:
        """Returns which kernel family and schedule serve how many rows: print it, or take `.to_dict()` for JSON. Raises
        TargetError for the CPU, which has one program for all."""
        return self._runtime.choices()

    @property
    def ptx(self) -> str:
        """The kernel for one token as PTX."""
        return self.kernel(1).ptx

    @property
    def cubin(self) -> bytes:
        """The kernel for one token as machine code. Raises TargetError for the emulator and the CPU."""
        cubin = self.kernel(1).cubin
        if cubin is None:
            raise TargetError(f"target {self.target} has no cubin; compile for a GPU such as 'sm_90a'")
        return cubin

    def ir(self, stage: str, m: int = 1) -> str:
        """Returns the program for m rows after a stage, compiled afresh.

        A GPU has "lowbit", "tile", "gpu", "llvm", "ll" and "ptx"; a CPU "lowbit", "vector", "llvm", "ll" and "asm".
        Raises SpecError for another stage, and for an m that is no number of rows.
        """
        programs = self._runtime.stages(integer("m", m, 1))
        if stage not in programs:
            raise SpecError(f"stage={stage!r} must be one of {', '.join(map(repr, programs))}{self._stage_hint(stage)}")
        return programs[stage]

    def explain(self, m: int = 1) -> Page:
        """Returns a page that explains the kernel for m rows (of several experts: slots), which a notebook shows:
        Python, every stage of the IR, PTX and machine code, linked line by line, and pictures of layouts, memory, waves
        and time. `.save(path)` writes it as one file of HTML, which needs no network.

        The kernel is compiled afresh, and one cluster of its blocks is run in the emulator. Where the target is this
        machine's GPU, a call on random data is timed, too. Raises SpecError for an m that is no number of rows. Without
        nvdisasm (`pip install 'lowbit[explain]'`) a page says so in place of SASS.
        """
        from lowbit.pylib.explain.kernels import explain_matmul

        return explain_matmul(self.spec, self.target, self._arguments[2], integer("m", m, 1))

    def _repr_html_(self) -> str:
        """What a notebook shows: the kernels for all numbers of rows."""
        from lowbit.pylib.explain.page import choices_html

        return choices_html(repr(self), self.choices.to_dict() if self.target.is_gpu else {"rows": []})

    def _stage_hint(self, stage: str) -> str:
        """Returns where there is a stage that this target does not have as text, for an error."""
        if stage == "cubin":
            return "; machine code is in compile(spec, 'sm_90a').cubin"
        if stage in stages(gpu=True) and not self.target.is_gpu:
            return f" on a CPU; compile(spec, 'sm_90a').ir({stage!r}) has it, and needs no GPU"
        return ""


def _operands(w: PackedWeight, residual: Tensor | None) -> list[Tensor]:
    """Returns the tensors of `MatmulSpec.call_operands`, as operators take them."""
    return [*w.tensors] if residual is None else [*w.tensors, residual]


@lru_cache(maxsize=_KEPT)
def _described(kernel: str) -> Matmul:
    """Returns the matmul that an argument of the operators describes."""
    return compile(**schema.parts(kernel))


schema.implement(lambda kernel: _described(kernel)._operator_calls, quantize_on)
