"""select-schedule: chooses the free parameters of every `lowbit.matmul`.

The rule of thumb below comes from what bounds the kernel: enough bytes in flight (three stages of 8 warps), enough
blocks for all multiprocessors (fewer row blocks each, then k split over blocks), activations that fit beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from dialect import ops
from dialect.bindings import ir
from dialect.errors import SpecError
from dialect.spec import BYTES, MatmulSpec
from passes.rewriting import each_op
from passes.schedule import Schedule
from passes.skinny import Plan
from passes.target import Target, parse_target

SCHEDULE = "lowbit.schedule"
TOKEN_TILES = (8, 16, 32, 64)
_MULTIPROCESSORS = {80: 108, 86: 84, 87: 16, 89: 142, 90: 132}  # A100, A40, Orin, L40S, H100


@dataclass(frozen=True)
class SelectSchedule:
    """Attach a schedule to every lowbit.matmul that has none."""

    name: ClassVar[str] = "select-schedule"
    target: Target = field(default_factory=lambda: parse_target("sm_80"))
    tokens: int = 8
    schedule: Schedule | None = None

    def run(self, module: ir.Module) -> None:
        from passes.expand_matmul import spec_of

        for op in each_op(module, ops.MatmulOp):
            if SCHEDULE in op.operation.attributes:
                continue
            chosen = self.schedule or default_schedule(spec_of(op), self.tokens, self.target)
            check_schedule(spec_of(op), chosen, self.target)
            op.operation.attributes[SCHEDULE] = schedule_attr(chosen)


def schedule_attr(schedule: Schedule) -> Any:
    i64 = ir.IntegerType.get_signless(64)
    return ir.DictAttr.get({k: ir.IntegerAttr.get(i64, v) for k, v in asdict(schedule).items()})


def read_schedule(attribute: Any) -> Schedule:
    """The schedule in a `lowbit.schedule` attribute."""
    entries = ir.DictAttr(attribute)
    return Schedule(**{named.name: int(ir.IntegerAttr(named.attr).value) for named in entries})


def shared_bytes(spec: MatmulSpec, s: Schedule) -> int:
    """Shared memory of the skinny kernel, as `lower-tiles` will lay it out (buffers are multiples of 128 bytes)."""
    plan = Plan(spec, s)

    def padded(size: int) -> int:
        return -(-size // 128) * 128

    units = s.step_k // spec.packing.chunk * spec.packing.units * 512
    rows = plan.row_blocks * max(1, plan.groups) * 16
    total = padded(s.stages * s.warps_k * plan.row_blocks * units)
    total += padded(s.stages * s.warps_k * s.tokens * (s.step_k + 8) * 2)
    if plan.groups:
        for kind in filter(None, (spec.scale, spec.zero_kind)):
            total += padded(s.stages * s.warps_k * rows * BYTES[kind])
    sums = padded(s.warps_k * s.tokens * (s.rows + 4) * 4) if s.warps_k > 1 else 0
    return max(total, sums) + 128


def check_schedule(spec: MatmulSpec, s: Schedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    chunk, group = spec.packing.chunk, spec.packing.padded_group
    if s.step_k % chunk:
        raise SpecError(
            f"schedule: step_k={s.step_k} must be a multiple of {chunk} for {spec.weight}; try {chunk}"
        )
    if group is not None and s.step_k % group and group % s.step_k:
        raise SpecError(
            f"schedule: step_k={s.step_k} and groups of {group} must divide one another; try {chunk}"
        )
    needed = shared_bytes(spec, s)
    if needed > target.max_shared_per_block:
        raise SpecError(
            f"schedule: {s} needs {needed} bytes of shared memory, {target} allows {target.max_shared_per_block}; "
            "take fewer stages or warps_k, or a smaller step_k"
        )


def _step(spec: MatmulSpec) -> int:
    """Columns per warp and step: two 16-byte loads per lane, row block and plane where groups allow."""
    chunk, group = spec.packing.chunk, spec.packing.padded_group
    step = max(chunk, min(128, 2 * chunk))
    if group is not None and step % group and group % step:
        return chunk
    return step


def _smaller(s: Schedule, chunk: int) -> Iterator[Schedule]:
    """Ways to need less shared memory, the least painful first."""
    if s.stages > 2:
        yield replace(s, stages=s.stages - 1)
    if s.step_k > chunk:
        yield replace(s, step_k=chunk)
    if s.warps_k > 1:
        yield replace(s, warps_k=s.warps_k // 2)
    if s.row_blocks > 1:
        yield replace(s, row_blocks=s.row_blocks // 2)


def default_schedule(spec: MatmulSpec, tokens: int, target: Target) -> Schedule:
    """A good schedule without search."""
    processors = _MULTIPROCESSORS.get(target.capability, 108)
    packing = spec.packing
    step = _step(spec)
    wide = tokens >= 32
    s = Schedule(
        tokens=tokens,
        row_blocks=2 if wide or packing.row_blocks < 4 * 2 * processors else 4,
        warps_n=4 if wide else 1,
        warps_k=2 if wide else 8,
        step_k=packing.chunk if wide and group_fits(spec, packing.chunk) else step,
        stages=3,
    )
    while shared_bytes(spec, s) > min(target.max_shared_per_block, target.shared_per_sm // 2):
        options = list(_smaller(s, packing.chunk))
        if not options:
            break
        s = options[0]
    while s.warps_k > 1 and Plan(spec, s).steps <= s.warps_k // 2:  # idle warps
        s = replace(s, warps_k=s.warps_k // 2)
    while Plan(spec, s).tiles < processors and s.row_blocks > 1:
        s = replace(s, row_blocks=s.row_blocks // 2)
    while Plan(spec, s).tiles < processors and s.warps_n > 1:
        s = replace(s, warps_n=s.warps_n // 2)
    plan = Plan(spec, s)
    if plan.tiles * 2 <= processors and plan.rounds >= 4:
        s = replace(s, splits=min(processors // plan.tiles, plan.rounds // 2))
    return s


def group_fits(spec: MatmulSpec, step: int) -> bool:
    """Whether steps and groups divide one another."""
    group = spec.packing.padded_group
    return group is None or step % group == 0 or group % step == 0
