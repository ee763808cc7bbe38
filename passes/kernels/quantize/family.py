"""The quantize family: one kernel per number of columns, which turns activations into numbers of 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.byte_codes import Compute
from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.passes.kernels.base import KernelFamily, Operation
from lowbit.passes.kernels.quantize.schedule import QuantizeSchedule
from lowbit.passes.kernels.requirements import check_compute
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

_MOST_THREADS = 1024  # of a block


def quantize_spec(k: int, act: Act, compute: Compute) -> MatmulSpec:
    """The spec that stands for the quantization of rows of k columns: it is the same whatever the weight is."""
    return MatmulSpec(1, k, "u4", act=act, compute=compute)


def default_schedule(spec: MatmulSpec) -> QuantizeSchedule:
    """Returns the schedule with the fewest rounds of units for 256 threads, or 512 in long rows; no more than units."""
    units = spec.k // BLOCK_K
    most = 256 if units <= 2048 else 512
    rounds = -(-units // most)
    return QuantizeSchedule(32 * -(-units // (32 * rounds)))


class Quantize(KernelFamily[QuantizeSchedule]):
    """x as numbers of 8 bits, a scale per row, and sums of them."""

    name: ClassVar[str] = "quantize"
    operation: ClassVar[Operation] = "quantize"
    schedule_type = QuantizeSchedule
    outputs: ClassVar[tuple[str, ...]] = ("values", "scales", "sums")

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[QuantizeSchedule]:
        return [default_schedule(spec)]

    def check(self, spec: MatmulSpec, schedule: QuantizeSchedule, target: Target) -> None:
        check_compute(spec, target)
        threads = schedule.threads
        if threads < 32 or threads % 32 or threads > _MOST_THREADS:
            raise SpecError(f"schedule: threads={threads} must be a multiple of 32 from 32 to {_MOST_THREADS}")

    def build(self, spec: MatmulSpec, schedule: QuantizeSchedule) -> ir.Module:
        from lowbit.passes.kernels.quantize.kernel import quantize

        return quantize(spec, schedule)
