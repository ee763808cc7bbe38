"""Matmuls whose x is quantized only where it has many rows (`MatmulSpec.compute_from`)."""

from __future__ import annotations

from torch import Tensor

from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.build.choices import KernelChoices
from lowbit.pylib.build.driver import Artifact
from lowbit.pylib.runtime.interface import Runtime, Tensors


class RuntimeByRows:
    """Two runtimes of one weight: calls with fewer rows of x than `compute_from` take the first."""

    def __init__(self, spec: MatmulSpec, few: Runtime, many: Runtime) -> None:
        self._spec, self._k, self._first = spec, spec.k, spec.compute_from
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
        return self._many.choices().after(self._few.choices(), self._spec)

    def _of(self, m: int) -> Runtime:
        return self._few if m < self._first else self._many
