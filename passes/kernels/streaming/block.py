"""What the parts of a kernel share in the program of a block."""

from __future__ import annotations

from lowbit.passes.builder import Memory, Program
from lowbit.passes.kernels.scales.conversion import ScaleConversion
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.kernels.streaming.work import Work


class Block:
    """The program `p` of a block, its plan and its work.

    convert        makes f32 of scales and zeros
    buffers        all in shared memory, to be freed after the loop
    slot           of the buffers of a stage: kernels with preloaded weights have one for every round
    step_boundary  what is read in place of steps beyond the last
    """

    def __init__(self, p: Program, plan: KernelPlan, work: Work) -> None:
        self.p, self.plan, self.work = p, plan, work
        self.spec, self.schedule = plan.spec, plan.schedule
        arithmetic = plan.arithmetic
        subnormal, power = arithmetic.subnormal_codes, plan.scaling.scale_power
        self.convert = ScaleConversion(p, plan.spec, arithmetic.stored_offset, subnormal, power)
        self.buffers: list[Memory] = []
        self.slot = 0
        self.step_boundary = "none" if plan.steps.cover_exactly else "zero"

    def alloc(self, element: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Memory:
        """Returns a buffer, dense by default."""
        buffer = self.p.alloc_shared(element, shape, strides)
        self.buffers.append(buffer)
        return buffer

    def alloc_stage(
        self, element: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, swizzle: int = 0
    ) -> list[Memory]:
        """Returns a buffer, of which `pipeline-copies` makes as many as there are stages; or one for every round."""
        count = self.plan.steps.rounds if self.schedule.preload_weights else 1
        buffers = [self.p.alloc_shared(element, shape, strides, swizzle) for _ in range(count)]
        self.buffers += buffers
        return buffers
