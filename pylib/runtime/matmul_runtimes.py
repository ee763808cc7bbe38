"""The runtimes of one matmul: that of most weights, and that of weights with values beyond the range of x's type."""

from __future__ import annotations

from functools import cached_property
from typing import cast

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.target import Target
from lowbit.pylib.runtime.base import Runtime
from lowbit.pylib.runtime.eight_bit import EightBitRuntime, make_eight_bit_runtime
from lowbit.pylib.runtime.runtimes import make_runtime


class MatmulRuntimes:
    """Runtimes that share a spec, a target and a schedule.

    ordinary   of weights whose values are numbers of x's type, to which kernels may round them
    """

    ordinary: Runtime

    def __init__(self, spec: MatmulSpec, target: Target, schedule: Schedule | None) -> None:
        make = make_eight_bit_runtime if spec.compute else make_runtime
        self.ordinary = make(spec, target, schedule)
        self._arguments = spec, target, schedule

    @cached_property
    def wide(self) -> Runtime:
        """Of weights with other values: kernels scale sums. A CPU's program does so in any case."""
        spec, target, schedule = self._arguments
        if not target.is_gpu or spec.compute:
            return self.ordinary
        return make_runtime(spec, target, schedule, late_scaling=True)

    @property
    def of_eight_bits(self) -> EightBitRuntime:
        """The ordinary one of a spec with `compute`."""
        return cast(EightBitRuntime, self.ordinary)
