"""Where a matmul runs: on a GPU, in the PTX emulator, or on this machine's CPU.

Every runtime has `matmul(x [..., k], weight) -> y [..., n]` and `dequantize(weight) -> W [n, k]`, where `weight` are
the tensors of `spec.call_operands` in their order, which fit the spec: `pylib.matmul` sees to that. The emulator goes
the way the GPU goes, launch for launch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from lowbit.dialect.errors import TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.target import Target
from lowbit.pylib.build.choices import KernelChoices
from lowbit.pylib.build.driver import Artifact
from lowbit.pylib.operator.call_checks import check_one_expert
from lowbit.pylib.runtime.emulated import EmulatorRuntime
from lowbit.pylib.runtime.gpu import CudaRuntime
from lowbit.pylib.runtime.interface import Runtime, Tensors, check_cpu
from lowbit.pylib.runtime.permuters import Permuter, permuter
from lowbit.pylib.weights.dequantized import in_order_of_x

if TYPE_CHECKING:
    from lowbit.pylib.runtime.cpu import CpuMatmul


def make_runtime(
    spec: MatmulSpec, target: Target, schedule: KernelSchedule | None, *, late_scaling: bool = False
) -> Runtime:
    """Returns the runtime for a target. late_scaling: no kernel rounds weights, as `Artifacts` has it; a CPU's never
    does."""
    if spec.permuted:
        in_order = replace(spec, permuted=False)
        inner = make_runtime(in_order, target, schedule, late_scaling=late_scaling)
        return PermutedRuntime(inner, permuter(spec.k, spec.act, target), len(in_order.tensors))
    if target.kind == "cuda":
        return CudaRuntime(spec, target, schedule, late_scaling)
    if target.kind == "emulator":
        return EmulatorRuntime(spec, target, schedule, late_scaling)
    check_one_expert(spec)
    return CpuRuntime(spec)


class CpuRuntime:
    """This machine's CPU."""

    schedule = None

    def __init__(self, spec: MatmulSpec) -> None:
        from lowbit.pylib.runtime.cpu import cpu_matmul

        self._spec = spec
        self._program = cpu_matmul(spec, 1)

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        check_cpu("cpu", x, weight[0])
        return self._program.matmul(x, weight)

    def dequantize(self, weight: Tensors) -> Tensor:
        check_cpu("cpu", weight[0])
        return self._program.dequantize(weight)

    def kernel(self, m: int) -> Artifact:
        raise TargetError("target cpu has no PTX or cubin: see ir('asm'), or compile for 'sm_90a', say")

    def stages(self, m: int) -> dict[str, str]:
        from lowbit.passes.tensor_programs import matmul_text

        return {"lowbit": matmul_text(self._spec)} | self._of(m).stages(m)

    def _of(self, m: int) -> CpuMatmul:
        """Returns what multiplies m rows."""
        return self._program

    def choices(self) -> KernelChoices:
        raise TargetError("target cpu has one program for every number of rows; choices are those of a GPU target")


class PermutedRuntime:
    """Another runtime for weights whose columns are permuted: it brings x into their order first, once per call.

    On a GPU that is a launch in front of the matmul's, which begins to read the weight meanwhile. The kernels of the
    matmul are those of the same weight in order.
    """

    def __init__(self, inner: Runtime, permute: Permuter, place: int) -> None:
        """place: that of the permutation among the tensors of a call, behind those of the weight in order."""
        self._inner, self._permute, self._place = inner, permute, place
        self.schedule = inner.schedule
        self.kernel, self.stages, self.choices = inner.kernel, inner.stages, inner.choices

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        place = self._place
        in_order = (*weight[:place], *weight[place + 1 :])
        return self._inner.matmul(self._permute(x, weight[place]), in_order)

    def dequantize(self, weight: Tensors) -> Tensor:
        *in_order, permutation = weight
        return in_order_of_x(self._inner.dequantize(in_order), permutation, self._permute)
