"""The compile driver: a `MatmulSpec` goes in, a function that takes and returns torch tensors comes out.

    mm = lowbit.compile(lowbit.MatmulSpec(n=8192, k=8192, weight="u4", group_size=128))
    w = mm.pack(codes, scales)
    y = mm(x, w)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch._C import _is_tracing
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from lowbit.dialect.errors import PackError, SpecError, TargetError
from lowbit.dialect.formats.byte_codes import Compute
from lowbit.dialect.spec import MatmulSpec, interned
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.stages import stages
from lowbit.passes.target import GPUS, Target, parse_target, target_of_gpu
from lowbit.pylib import operator_schema
from lowbit.pylib.activation import VALUES, Quantized, QuantizedActivation, from_values
from lowbit.pylib.build.choices import KernelChoices
from lowbit.pylib.build.driver import Artifact
from lowbit.pylib.runtime.eight_bit import EightBitRuntime, make_eight_bit_runtime
from lowbit.pylib.runtime.quantizers import quantize_on
from lowbit.pylib.runtime.runtimes import make_runtime
from lowbit.pylib.tensor_checks import SeenTensors
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.tracing import check_transforms, is_observed
from lowbit.pylib.weights import dequantized, packed
from lowbit.pylib.weights.packed import PackedWeight


def compile(spec: MatmulSpec, target: str | None = None, schedule: Schedule | None = None) -> Matmul:
    """Compile a matmul.

    spec      what to compute
    target    a GPU such as "sm_90a" (`lowbit info` lists them); "cpu"; "emulator:sm_90a", which runs the GPU's PTX on
              CPU tensors; None: this machine's GPU, else "cpu". Compiling for a GPU needs none.
    schedule  the free choices of the GPU kernel for up to schedule.tokens tokens; None: a good one

    The kernel for one token is compiled (or found in the disk cache) at once, others when they are first
    needed. The same arguments give the same `Matmul`, so every layer of a model may ask for its own; one that no
    layer holds any more is given back in time.

    Raises SpecError for a spec or schedule that is none or does not fit; TargetError for an unknown target, a
    GPU that is too old, or a missing tool, with the command that installs it.
    """
    if not isinstance(spec, MatmulSpec):
        raise SpecError(f"spec={spec!r} must be a MatmulSpec, such as MatmulSpec(n=64, k=256, weight='u4')")
    if not (schedule is None or isinstance(schedule, Schedule)):
        raise SpecError(f"schedule={schedule!r} must be a Schedule, such as Schedule(tokens=8), or None")
    if not (target is None or isinstance(target, str)):
        raise TargetError(f"target={target!r} must be a name such as 'sm_90a', 'cpu' or 'emulator', or None")
    return _compile(interned(spec), parse_target(this_machine() if target is None else target), schedule)


_KEPT = 256  # matmuls that nothing else holds
_alive: WeakValueDictionary[tuple[MatmulSpec, Target, Schedule | None], Matmul] = WeakValueDictionary()


@lru_cache(maxsize=_KEPT)
def _compile(spec: MatmulSpec, target: Target, schedule: Schedule | None) -> Matmul:
    """The same `Matmul` as long as anyone holds it, or it is one of the last that were asked for."""
    key = spec, target, schedule
    found = _alive.get(key)
    return found or _alive.setdefault(key, Matmul(spec, target, schedule))


def this_machine() -> str:
    """The target of torch's current GPU, or "cpu" if there is none.

    A GPU without a target of its own gets that of its nearest predecessor, with a warning. Raises TargetError for a GPU
    older than all targets.
    """
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "cpu"
    gpu = torch.cuda.get_device_properties()
    capability = 10 * gpu.major + gpu.minor
    target = target_of_gpu(capability, gpu.shared_memory_per_block_optin)
    if target is None:
        raise TargetError(
            f"this GPU ({gpu.name}) is sm_{capability}, but the kernels need {GPUS[0]} or later; use target='cpu'"
        )
    if target.capability != capability:
        _warn_of_predecessor(gpu.name, capability, target.name)
    return target.name


@lru_cache(maxsize=None)
def _warn_of_predecessor(gpu: str, capability: int, target: str) -> None:
    """Say once what a GPU gets that is not in the table of targets."""
    warnings.warn(
        f"{gpu} is sm_{capability}, which has no target of its own: kernels are compiled for {target}, and the driver "
        f"translates them; target={target!r} says so without a warning",
        stacklevel=4,
    )


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

    def __init__(self, spec: MatmulSpec, target: Target, schedule: Schedule | None) -> None:
        self.spec = spec
        self.target = target
        self._act, self._k = TORCH[spec.act], spec.k
        self._seen = SeenTensors()
        self._arguments = spec, target.name, schedule
        self.description = operator_schema.describe(spec, target, schedule)
        make = make_eight_bit_runtime if spec.compute else make_runtime
        self._runtime = make(spec, target, schedule)
        self._run = self._runtime.matmul
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
        """The weight in the kernels' memory order; takes and raises what `pylib.weights.packed.pack` does."""
        return packed.pack(self.spec, codes, scales, zeros, bias, outliers, **others)

    def __call__(
        self, x: Tensor | QuantizedActivation, w: PackedWeight, x_scale: Tensor | None = None
    ) -> Tensor:
        """y [..., n] in the spec's out type, for x [..., k] in its act type; on x's device and current
        stream.

        x may have any number of rows, none too, and any strides. With `MatmulSpec.compute` it may also be an activation
        of `lowbit.quantize_activation`; or come in that type, torch.float8_e4m3fn or torch.int8, with x_scale [...] in
        f32, one scale per row. Raises SpecError for an x and PackError for a weight that do not fit the spec,
        TargetError for tensors where the target does not run.
        """
        if type(x) is not Tensor or x_scale is not None or x.requires_grad or is_observed() or x.is_neg():
            if isinstance(x, QuantizedActivation) or x_scale is not None:
                return self._of_quantized(x, w, x_scale)
            return self._by_operator(x, w)
        run, shape = self._run, x.shape
        if (  # what _check looks at, and no more: it costs 0.5 us
            x.dtype is not self._act
            or not shape
            or shape[-1] != self._k
            or getattr(w, "ordinary_spec", None) is not self.spec
            or x.get_device() != w.tensors[0].get_device()
        ):
            _check_readable(w)
            self._check(x, w)
            run = self._run_wide if w.wide_range else run
        try:
            return run(x, w.tensors)
        except RuntimeError:  # torch's: x has no memory that a kernel could read
            _check_memory(x)
            raise

    def _by_operator(self, x: Tensor, w: PackedWeight) -> Tensor:
        """Returns what a call gives, as an operator of torch: recorded, differentiated, or run on other kinds of
        tensors, such as a view that negates."""
        if is_dynamo_compiling() or not _is_tracing():
            self._check(x, w)
            check_transforms(x)
        else:  # sizes are tensors to torch.jit.trace: the operator checks x
            self._check_weight(w)
        return torch.ops.lowbit.matmul.packed(x, list(w.tensors), self.description)

    def _of_quantized(self, x: Tensor | QuantizedActivation, w: PackedWeight, x_scale: Tensor | None) -> Tensor:
        """Returns what a call gives for an activation of 8 bits."""
        compute = self._compute()
        if not isinstance(x, QuantizedActivation):
            q = from_values(x, x_scale, compute)
        elif x_scale is None:
            q = x
        else:
            raise SpecError("x is quantized and has its scales; drop x_scale=")
        self._check_weight(w)
        self._check_quantized(q)
        if q.device != w.device:
            raise TargetError(f"x is on {q.device}, but the weight is on {w.device}; use w.to({str(q.device)!r})")
        if is_observed() or any(type(t) is not Tensor for t in q.tensors):
            return torch.ops.lowbit.matmul.quantized(*q.tensors, list(w.tensors), self.description)
        _check_readable(w)
        return self._runtime_of_quantized.multiply(q.tensors, w.tensors)

    def _compute(self) -> Compute:
        """Returns the type of activations of 8 bits. Raises SpecError if the spec has none."""
        if self.spec.compute is None:
            raise SpecError(f"x has 8 bits, but ({self.spec}) multiplies in {self.spec.act}; use a spec with compute=")
        return self.spec.compute

    def _check_quantized(self, q: QuantizedActivation) -> None:
        """Raise SpecError unless an activation of 8 bits fits the spec."""
        if q.compute != self.spec.compute:
            raise SpecError(
                f"x was quantized to {q.compute!r}, but the spec has compute={self.spec.compute!r}; quantize it anew"
            )
        if q.shape[-1] != self._k:
            raise SpecError(f"x must be [..., k={self._k}], not {list(q.shape)}")

    @property
    def _runtime_of_quantized(self) -> EightBitRuntime:
        return cast(EightBitRuntime, self._runtime)

    def untraced_quantized(self, x: Quantized, weight: Sequence[Tensor]) -> Tensor:
        """Returns what a call with an activation of 8 bits returns: for the operator."""
        self._check_quantized(QuantizedActivation(*x, self._compute()))
        if not self._seen.has(weight):
            _check_readable(self._as_weight(weight))
        return self._runtime_of_quantized.multiply(x, weight)

    def untraced(self, x: Tensor, weight: Sequence[Tensor]) -> Tensor:
        """Returns what a call returns: for the operator, which a call becomes where torch observes it."""
        if not self._seen.has(weight):
            return self._first_untraced(x, weight)
        if x.dtype is not self._act or not x.ndim or x.shape[-1] != self._k or x.get_device() != weight[0].get_device():
            self._check(x, self._as_weight(weight))
        if forward_ad._current_level >= 0:
            check_transforms(x)
        return self._run(x, weight)

    def _first_untraced(self, x: Tensor, weight: Sequence[Tensor]) -> Tensor:
        """The same for a weight that was not seen before, or that is looked at in every call: one of a wide range."""
        w = self._as_weight(weight)
        _check_readable(w)
        self._check(x, w)
        check_transforms(x)
        if not w.wide_range or not self.target.is_gpu:  # a CPU's program scales sums in any case
            self._seen.add(weight)
            return self._run(x, weight)
        return self._run_wide(x, weight)

    @cached_property
    def _run_wide(self) -> Callable[[Tensor, Sequence[Tensor]], Tensor]:
        """Multiplies by a weight of a wide range."""
        if not self.target.is_gpu or self.spec.compute:
            return self._run
        spec, _, schedule = self._arguments
        return make_runtime(spec, self.target, schedule, late_scaling=True).matmul

    def untraced_dequantize(self, weight: Sequence[Tensor]) -> Tensor:
        """Returns what `dequantize` returns: for the operator."""
        if not self._seen.has(weight):
            _check_readable(self._as_weight(weight))
        return self._runtime.dequantize(weight)

    def untraced_input_gradient(self, dy: Tensor, weight: Sequence[Tensor]) -> Tensor:
        """dx = dy W in the act type; sums are in f32 where dy is of another type than x, and for a wide range."""
        w = self._as_weight(weight)
        _check_readable(w)
        if w.wide_range:
            return (dy.float() @ dequantized.dequantize(self.spec, w, torch.float32)).to(self._act)
        dense = self._runtime.dequantize(weight)
        return dy @ dense if dy.dtype is self._act else (dy.float() @ dense.float()).to(self._act)

    def dequantize(self, w: PackedWeight) -> Tensor:
        """W [n, k] rounded to the act type, on the weight's device: values beyond its range become infinities."""
        self._check_weight(w)
        if not is_observed():
            _check_readable(w)
        return torch.ops.lowbit.dequantize(list(w.tensors), self.description)

    def kernel(self, m: int) -> Artifact:
        """The kernel that serves m rows, or the first of them; `choices` has the table."""
        return self._runtime.kernel(m)

    @property
    def choices(self) -> KernelChoices:
        """Which kernel family and schedule serve which number of rows: print it, or take `.to_dict()` for JSON. Raises
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
        Raises SpecError for another stage.
        """
        programs = self._runtime.stages(m)
        if stage not in programs:
            raise SpecError(f"stage={stage!r} must be one of {', '.join(map(repr, programs))}{self._stage_hint(stage)}")
        return programs[stage]

    def _stage_hint(self, stage: str) -> str:
        """Returns where there is a stage that this target does not have as text, for an error."""
        if stage == "cubin":
            return "; machine code is in compile(spec, 'sm_90a').cubin"
        if stage in stages(gpu=True) and not self.target.is_gpu:
            return f" on a CPU; compile(spec, 'sm_90a').ir({stage!r}) has it, and needs no GPU"
        return ""

    def _as_weight(self, weight: Sequence[Tensor]) -> PackedWeight:
        names = [slot.name for slot in self.spec.tensors]
        if len(weight) != len(names):
            raise PackError(f"({self.spec}) takes {len(names)} tensors, {', '.join(names)}, not {len(weight)}")
        return PackedWeight(self.spec, dict(zip(names, weight)))

    def _check(self, x: Tensor, w: PackedWeight) -> None:
        """Raise if x and w do not fit the spec and each other."""
        self._check_x(x)
        self._check_weight(w)
        if x.device != w.device:
            move = f"use w.to({str(x.device)!r})"
            raise TargetError(f"x is on {x.device}, but the weight is on {w.device}; {move}")

    def _check_x(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            fix = "call mm(x, w)" if isinstance(x, PackedWeight) else "use torch.as_tensor(x)"
            raise SpecError(f"x must be a torch tensor, not {type(x).__name__}; {fix}")
        if x.dtype is not self._act and self.spec.compute and x.dtype is VALUES[self.spec.compute]:
            raise SpecError(f"x is {x.dtype} and needs its scales, one per row: mm(x, w, x_scale=...)")
        if x.dtype is not self._act:
            raise SpecError(f"x is {x.dtype}, but act={self.spec.act!r}; use x.to({self._act})")
        if x.ndim == 0 or x.shape[-1] != self._k:
            raise SpecError(f"x must be [..., k={self._k}], not {list(x.shape)}")

    def _check_weight(self, w: PackedWeight) -> None:
        if not isinstance(w, PackedWeight):
            raise PackError(f"the weight must be a PackedWeight, not {type(w).__name__}; use pack()")
        if w.spec is not self.spec and w.spec != self.spec:
            raise PackError(f"the weight was packed for ({w.spec}), not for ({self.spec}); pack it anew")


@lru_cache(maxsize=_KEPT)
def _described(kernel: str) -> Matmul:
    """Returns the matmul that an argument of the operator describes."""
    return compile(**operator_schema.parts(kernel))


def run_described(x: Tensor, weight: Sequence[Tensor], kernel: str) -> Tensor:
    """Multiply as `kernel` describes: the implementation of `torch.ops.lowbit.matmul.packed`."""
    return _described(kernel).untraced(x, weight)


def dequantize_described(weight: Sequence[Tensor], kernel: str) -> Tensor:
    """Write out a weight as `kernel` describes it: the implementation of `torch.ops.lowbit.dequantize`."""
    return _described(kernel).untraced_dequantize(weight)


def input_gradient_described(dy: Tensor, weight: Sequence[Tensor], kernel: str) -> Tensor:
    """Multiply a gradient by a weight: the implementation of `torch.ops.lowbit.input_gradient`."""
    return _described(kernel).untraced_input_gradient(dy, weight)


def run_quantized(values: Tensor, scales: Tensor, sums: Tensor, weight: Sequence[Tensor], kernel: str) -> Tensor:
    """Multiply an activation of 8 bits: the implementation of `torch.ops.lowbit.matmul.quantized`."""
    return _described(kernel).untraced_quantized((values, scales, sums), weight)


operator_schema.implement(run_described, dequantize_described, input_gradient_described, run_quantized, quantize_on)


def _check_readable(w: object) -> None:
    """Raise PackError if w is a weight whose tensors have no values."""
    if isinstance(w, PackedWeight) and w.readable_spec is None:
        what = "on meta" if w.device.type == "meta" else f"of type {type(w.codes).__name__}"
        raise PackError(f"the weight's tensors are {what}: they have no values; load them, or trace x as well")


def _check_memory(x: Tensor) -> None:
    """Raise SpecError if x is no plain array of numbers."""
    if x.layout is not torch.strided:
        raise SpecError(f"x is {x.layout}; use x.to_dense()")
    check_transforms(x)
    if not x.data_ptr() and x.numel():
        raise SpecError("x has no memory that a kernel could read; clone it")
