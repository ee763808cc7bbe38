"""`KernelPlan`: what follows from a spec and a schedule, by subject. Kernels are built from it, and schedules are
chosen by it, so it needs no MLIR. Each part of it knows what that part of a kernel demands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.streaming.arithmetic import Arithmetic
from lowbit.passes.kernels.streaming.ending_plan import EndingPlan
from lowbit.passes.kernels.streaming.engine_plans import EnginePlan, engine_type
from lowbit.passes.kernels.streaming.outlier_plan import OutlierPlan
from lowbit.passes.kernels.streaming.scaling import Scaling
from lowbit.passes.kernels.streaming.stage_plans import CodesPlan, ScalesPlan, XPlan, padded
from lowbit.passes.kernels.streaming.steps import Steps


@dataclass(frozen=True)
class KernelPlan:
    """The plan of a kernel.

    steps       tiles, rounds, steps and groups
    scaling     whether weights or sums are scaled, and powers of two
    arithmetic  what is multiplied, and what sums of x correct
    codes, x, scales  what the stages of the pipeline hold
    outliers    lines of outliers and their room
    engine      how a warp multiplies its step
    ending      how sums of warps and blocks meet
    """

    spec: MatmulSpec
    schedule: Schedule

    steps: Steps = field(init=False)
    scaling: Scaling = field(init=False)
    arithmetic: Arithmetic = field(init=False)
    codes: CodesPlan = field(init=False)
    x: XPlan = field(init=False)
    scales: ScalesPlan = field(init=False)
    outliers: OutlierPlan = field(init=False)
    engine: EnginePlan = field(init=False)
    ending: EndingPlan = field(init=False)

    def __post_init__(self) -> None:
        spec, s = self.spec, self.schedule
        steps = Steps(spec, s)
        scaling = Scaling(spec, s, steps)
        arithmetic, codes = Arithmetic(spec, s, steps, scaling), CodesPlan(spec, s, steps)
        scales = ScalesPlan(spec, s, steps, arithmetic)
        engine = engine_type(s, arithmetic)(arithmetic, codes, scales)
        stages = {"codes": codes, "x": XPlan(spec, s, steps, arithmetic), "scales": scales}
        others = {"outliers": OutlierPlan(spec, s, steps, codes), "ending": EndingPlan(spec, s, steps)}
        vars(self).update(steps=steps, scaling=scaling, arithmetic=arithmetic, engine=engine, **stages, **others)

    @property
    def rounding(self) -> dict[str, bool]:
        """What the kernel rounds besides its sums, as arguments of `pylib.reference.tolerance`."""
        return {"dequantized": self.scaling.rounds_scales, "rounded_zeros": self.scaling.rounds_zeros}

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a block, as `lower-tiles` will lay it out: signals of stages and outliers in front, then
        codes, x and scales, tables behind. Sums of warps take the place of all but the signals."""
        signals = self._signal_bytes
        first = signals + self.outliers.bytes_beside
        loop = self.x.placed(first + self.codes.stage_bytes) + self.x.stage_bytes() + self.scales.stage_bytes()
        tables = self.codes.table_bytes + self.scales.table_bytes + self.engine.shared_bytes
        return max(max(loop, first + self.outliers.bytes_after) + tables, signals + self.ending.bytes)

    @property
    def _signal_bytes(self) -> int:
        """Bytes of the mbarriers with which warps order their stages by themselves."""
        return padded(16 * self.steps.stages * self.schedule.warps_k) if self.schedule.refill == "per_warp" else 0


@lru_cache(maxsize=256)
def known_plan(spec: MatmulSpec, schedule: Schedule) -> KernelPlan:
    """Returns a plan that is kept for a while: a choice asks for the same one to check, to predict and to compare."""
    return KernelPlan(spec, schedule)
