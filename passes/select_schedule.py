"""select-schedule: chooses the free parameters of every `lowbit.matmul`.

The rule of thumb below comes from what bounds the kernel: enough bytes in flight (three stages of 8 warps), enough
blocks for all multiprocessors (fewer row blocks each, then k split over blocks), activations that fit beside them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from dialect import ops
from dialect.bindings import ir
from dialect.errors import PassError, SpecError
from dialect.spec import BYTES, MatmulSpec
from passes.plan import Plan
from passes.rewriting import at, each_op
from passes.schedule import Schedule
from passes.target import Target, parse_target

SCHEDULE = "lowbit.schedule"
TOKEN_TILES = (1, 8, 16, 32, 64)  # the m for which a kernel of its own is made, up to the next
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
            with at(op):
                chosen = self.schedule or default_schedule(spec_of(op), self.tokens, self.target)
                check_schedule(spec_of(op), chosen, self.target)
            op.operation.attributes[SCHEDULE] = schedule_attr(chosen)


def schedule_attr(schedule: Schedule) -> Any:
    i64 = ir.IntegerType.get_signless(64)
    return ir.DictAttr.get({k: ir.IntegerAttr.get(i64, v) for k, v in asdict(schedule).items()})


def read_schedule(attribute: Any) -> Schedule:
    """The schedule in a `lowbit.schedule` attribute."""
    names = {field.name for field in fields(Schedule)}
    entries = {named.name: named.attr for named in attribute} if isinstance(attribute, ir.DictAttr) else {}
    if not entries or set(entries) - names or not all(isinstance(v, ir.IntegerAttr) for v in entries.values()):
        raise PassError(f"{SCHEDULE} must be a dictionary of integers for {', '.join(sorted(names))}; got {attribute}")
    return Schedule(**{name: int(ir.IntegerAttr(value).value) for name, value in entries.items()})


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
        raise SpecError(f"schedule: step_k={s.step_k} must be a multiple of {chunk} for {spec.weight}; try {chunk}")
    if group is not None and s.step_k % group and group % s.step_k:
        raise SpecError(f"schedule: step_k={s.step_k} and groups of {group} must divide one another; try {chunk}")
    needed = shared_bytes(spec, s)
    if needed > target.max_shared_per_block:
        raise SpecError(
            f"schedule: {s} needs {needed} bytes of shared memory, {target} allows {target.max_shared_per_block}; "
            "take fewer stages or warps_k, or a smaller step_k"
        )


# (row blocks, warps along n, warps along k, stages) for m up to a token tile, by measurement on an H200 (2026-11;
# docs/performance.md): many rows per block save reads of x, warps along k make up for few rows.
_SHAPES = {1: (2, 1, 8, 3), 8: (4, 1, 8, 3), 16: (4, 1, 8, 3), 32: (2, 4, 4, 2), 64: (2, 4, 2, 2)}
# The same where the weight has rows for many blocks per multiprocessor.
_TALL_SHAPES = {1: (2, 1, 4, 3), 8: (8, 2, 2, 2), 16: (8, 2, 2, 2), 32: (4, 4, 2, 2)}
_MOST_SPLITS = 4  # beyond, their partial sums cost more than idle multiprocessors


def _smaller(s: Schedule, chunk: int) -> Schedule | None:
    """The least painful way to need less shared memory."""
    if s.stages > 2:
        return replace(s, stages=s.stages - 1)
    if s.step_k > chunk:
        return replace(s, step_k=chunk)
    if s.warps_k > 1:
        return replace(s, warps_k=s.warps_k // 2)
    if s.row_blocks > 1:
        return replace(s, row_blocks=s.row_blocks // 2)
    return replace(s, warps_n=s.warps_n // 2) if s.warps_n > 1 else None


def default_schedule(spec: MatmulSpec, tile: int, target: Target) -> Schedule:
    """A good schedule without search, for m up to `tile` (one of TOKEN_TILES)."""
    if tile not in _SHAPES:
        raise SpecError(f"tokens={tile} must be one of {', '.join(map(str, TOKEN_TILES))}")
    processors = _MULTIPROCESSORS.get(target.capability, 108)
    packing = spec.packing
    step = max(packing.chunk, min(128, 2 * packing.chunk))

    def shaped(row_blocks: int, warps_n: int, warps_k: int, stages: int) -> Schedule:
        fits = group_fits(spec, step)
        return Schedule(max(8, tile), row_blocks, warps_n, warps_k, step if fits else packing.chunk, stages)

    def tiles(s: Schedule) -> int:
        return Plan(spec, s).tiles

    s = shaped(*_SHAPES[tile])
    if tile in _TALL_SHAPES and tiles(tall := shaped(*_TALL_SHAPES[tile])) >= (6 if tile == 1 else 1.5) * processors:
        s = tall
        if tile == 1 and packing.bits <= 2:
            s = replace(s, row_blocks=4, stages=2)  # decoding is the bound: more work for every fragment of x
    if tile == 1 and packing.bits == 8:
        s = replace(s, row_blocks=1, warps_k=8)
    if packing.chunk == 256:
        s = replace(s, stages=2)  # a stage is large as it is

    # One token leaves room for two blocks on a multiprocessor, whose phases then overlap. Wide tiles would rather
    # split k than share x among fewer rows.
    blocks, splits = (2 if tile == 1 else 1), (2 if tile >= 32 else 1)
    while s.rows > 16 and tiles(s) * splits < 0.9 * blocks * processors:
        s = replace(s, row_blocks=s.row_blocks // 2) if s.row_blocks > 1 else replace(s, warps_n=s.warps_n // 2)
    if tile == 1 and s.row_blocks == 1 and packing.bits < 8:
        s = replace(s, warps_k=16, stages=2)
    while s.warps_k > 1 and Plan(spec, s).steps <= s.warps_k // 2:  # idle warps
        s = replace(s, warps_k=s.warps_k // 2)
    limit = min(target.max_shared_per_block, target.shared_per_sm // blocks - 1024)
    while shared_bytes(spec, s) > limit and (smaller := _smaller(s, packing.chunk)):
        s = smaller
    wanted = min(_MOST_SPLITS, -(-9 * processors // (10 * tiles(s))))
    return replace(s, splits=max(1, min(wanted, Plan(spec, s).rounds // 2)))


def group_fits(spec: MatmulSpec, step: int) -> bool:
    """Whether steps and groups divide one another."""
    group = spec.packing.padded_group
    return group is None or step % group == 0 or group % step == 0
