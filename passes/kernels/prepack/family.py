"""The prepack family: one kernel per weight, which brings codes into the order of the other kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelFamily, KernelSchedule, Operation
from lowbit.passes.launch import Role

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir


@dataclass(frozen=True)
class PrepackSchedule(KernelSchedule):
    """The prepack kernel has no free choices."""


class Prepack(KernelFamily[PrepackSchedule]):
    """Packed codes of a weight, from its codes [n, k]."""

    name: ClassVar[str] = "prepack"
    operation: ClassVar[Operation] = "prepack"
    schedule_type = PrepackSchedule
    outputs: ClassVar[tuple[str, ...]] = ("packed",)

    def roles(self, spec: MatmulSpec, names: Iterable[str]) -> dict[str, Role]:
        """Codes are an input here."""
        codes: dict[str, Role] = {"codes": "input"}
        return super().roles(spec, names) | codes

    def build(self, spec: MatmulSpec, schedule: PrepackSchedule) -> ir.Module:
        from lowbit.passes.kernels.prepack.kernel import prepack

        return prepack(spec)
