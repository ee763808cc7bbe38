"""select-schedule: chooses the free parameters of every `lowbit.matmul`; `passes.scheduling.choice` says how.

The compile driver has made its choice before it looks into the disk cache, and hands this pass operations that carry
their schedule; so it only chooses for users of `lowbit opt`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir
from lowbit.passes.base import at, each_op
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.permute.family import default_schedule as default_permute_schedule
from lowbit.passes.kernels.quantize.family import default_schedule as default_quantize_schedule
from lowbit.passes.kernels.registry import family_of, schedule_from_dict
from lowbit.passes.scheduling.choice import fixed_schedule, schedule_for
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.passes.tensor_programs import schedule_attr, spec_of
from lowbit.passes.transforms.plan_packing import WITH_WEIGHT


@dataclass(frozen=True)
class SelectSchedule:
    """Attach a schedule to every lowbit.matmul, or other operation on tensors, that has none."""

    name: ClassVar[str] = "select-schedule"
    target: Target = field(default_factory=lambda: parse_target("sm_80"))
    tokens: int = 8
    family: str = "decode"
    schedule: Schedule | None = None

    def run(self, module: ir.Module) -> None:
        for op in each_op(module, *WITH_WEIGHT, ops.QuantizeOp, ops.PermuteOp):
            if op.schedule is None:
                with at(op):
                    op.schedule = schedule_attr(self._choose(op))

    def _choose(self, op: Any) -> KernelSchedule:
        if isinstance(op, ops.DequantizeOp):
            return fixed_schedule("dequantize")
        if isinstance(op, ops.PrepackOp):
            return fixed_schedule("prepack")
        spec = spec_of(op)
        if isinstance(op, ops.QuantizeOp):
            return default_quantize_schedule(spec)
        if isinstance(op, ops.PermuteOp):
            return default_permute_schedule(spec, self.tokens, self.target)
        if self.schedule is None:
            return schedule_for(spec, self.tokens, self.target)
        given = schedule_from_dict({"family": self.family} | asdict(self.schedule))
        family_of(given).check(spec, given, self.target)
        return given
