"""The runtimes of one matmul: of most weights, of weights with values beyond the range of x's type, of activations of
8 bits, and of an x that is quantized only where it has many rows (`MatmulSpec.compute_from`)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from torch import Tensor

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.target import Target
from lowbit.pylib.build.choices import KernelChoices
from lowbit.pylib.build.driver import Artifact
from lowbit.pylib.build.kernels import check_given, schedules_by_rows
from lowbit.pylib.runtime.eight_bit import EightBitRuntime, make_eight_bit_runtime
from lowbit.pylib.runtime.interface import Runtime, Tensors, check_schedule
from lowbit.pylib.runtime.runtimes import make_runtime


class MatmulRuntimes:
    """Runtimes that share a spec, a target and a schedule.

    ordinary   of weights whose values are numbers of x's type, to which kernels may round them
    """

    ordinary: Runtime

    def __init__(self, spec: MatmulSpec, target: Target, schedule: KernelSchedule | None) -> None:
        self._spec, self._target = spec, target
        check_schedule(target, schedule)
        check_given(spec, target, schedule)
        self._few_schedule, many_schedule = schedules_by_rows(spec, schedule)
        self._eight_bits: EightBitRuntime | None = None
        if spec.compute:
            self._eight_bits = make_eight_bit_runtime(spec.in_eight_bits, target, many_schedule)
        self.ordinary = self._make(late_scaling=False)

    @cached_property
    def wide(self) -> Runtime:
        """The runtime for weights of a wide range (`PackedWeight.wide_range`): its kernels scale sums, which a CPU's
        program and products of 8 bits do in any case."""
        scales_sums = not self._target.is_gpu or self._spec.for_rows(1).compute is not None
        return self.ordinary if scales_sums else self._make(late_scaling=True)

    @property
    def of_eight_bits(self) -> EightBitRuntime:
        """The runtime of a spec with `compute`, for any number of rows. Raises SpecError for other specs."""
        if self._eight_bits is None:
            raise SpecError(f"({self._spec}) has no activations of 8 bits; it needs compute='f8e4m3' or 'i8'")
        return self._eight_bits

    def _make(self, late_scaling: bool) -> Runtime:
        spec = self._spec.for_rows(1)
        if spec.compute:
            return self.of_eight_bits
        few = make_runtime(spec, self._target, self._few_schedule, late_scaling=late_scaling)
        return RuntimeByRows(self._spec, few, self._eight_bits) if self._eight_bits else few


class RuntimeByRows:
    """Two runtimes of one weight: calls with fewer rows of x than `compute_from` take the first."""

    def __init__(self, spec: MatmulSpec, few: Runtime, many: Runtime) -> None:
        self._spec, self._k, self._first = spec, spec.k, spec.first_in_eight_bits
        self._few, self._many = few, many
        self.schedule = few.schedule
        self.dequantize = few.dequantize

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        return self._of(x.numel() // self._k).matmul(x, weight)

    def kernel(self, m: int) -> Artifact:
        return self._of(m).kernel(m)

    def stages(self, m: int) -> dict[str, str]:
        return self._of(m).stages(m)

    def choices(self) -> KernelChoices:
        return replace(self._many.choices().after(self._few.choices(), self._first), spec=self._spec)

    def _of(self, m: int) -> Runtime:
        return self._few if m < self._first else self._many
