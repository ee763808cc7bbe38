"""The dequantize family: one kernel per weight, which writes it out for the vendor's matmul."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelFamily, KernelSchedule, Operation

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir


@dataclass(frozen=True)
class DequantizeSchedule(KernelSchedule):
    """The dequantize kernel has no free choices."""


class Dequantize(KernelFamily[DequantizeSchedule]):
    """W [n, k] in the activation's type."""

    name: ClassVar[str] = "dequantize"
    operation: ClassVar[Operation] = "dequantize"
    schedule_type = DequantizeSchedule

    def rounding(self, spec: MatmulSpec, schedule: DequantizeSchedule) -> dict[str, bool]:
        return {"dequantized": True}

    def build(self, spec: MatmulSpec, schedule: DequantizeSchedule) -> ir.Module:
        from lowbit.passes.kernels.dequantize.kernel import dequantize

        return dequantize(spec)
