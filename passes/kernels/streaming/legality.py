"""What a schedule must obey for a spec on a target, without MLIR. What parts of a kernel demand, their plans know."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.streaming.arithmetic import always_uses_raw_codes, can_use_raw_codes
from lowbit.passes.kernels.streaming.engine_plans import weight_in_words
from lowbit.passes.kernels.streaming.plan import KernelPlan, known_plan
from lowbit.passes.target import Target

MOST_PRELOADED = 128  # registers of weight in a thread
MOST_IN_CLUSTER = 8  # blocks: so many may split k even where some of them have no step


def shared_bytes(spec: MatmulSpec, s: Schedule) -> int:
    """Shared memory of a block of the kernel."""
    return known_plan(spec, s).shared_bytes


def shared_room(plan: KernelPlan, target: Target) -> int:
    """Blocks for which a multiprocessor has shared memory; the system takes 1 KB for each."""
    return target.shared_per_sm // (plan.shared_bytes + 1024)


def check_schedule(spec: MatmulSpec, s: Schedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    plan = known_plan(spec, s)
    _check_steps(plan)
    plan.engine.check(target)
    _check_raw_codes(spec, s)
    if s.preload_weights:
        _check_preloaded(plan)
    if s.outliers_by_step and not spec.outliers:
        weight = weight_in_words(spec)
        raise SpecError(f"schedule: outliers_by_step=True is for weights with outliers; {weight} needs False")
    plan.ending.check(target)
    if plan.shared_bytes > target.max_shared_per_block:
        raise SpecError(
            f"schedule: {s} needs {plan.shared_bytes} bytes of shared memory, {target} allows "
            f"{target.max_shared_per_block}; take fewer num_stages or warps_k, or a smaller step_k"
        )


def _check_steps(plan: KernelPlan) -> None:
    """Steps, chunks of the packed weight, groups and splits must come out even."""
    spec, s, steps, chunk = plan.spec, plan.schedule, plan.steps.count, plan.spec.packing.chunk
    if s.chains > 1:
        _check_chains(spec, s)
    columns, given = s.step_k // s.chains, f"step_k={s.step_k}" + f" in chains={s.chains}" * (s.chains > 1)
    if columns % chunk:
        raise SpecError(f"schedule: {given} must be a multiple of {chunk} for {spec.weight}; try {chunk * s.chains}")
    if not (group_fits(spec, columns) and group_fits(spec, s.step_k)):
        group, least = spec.packing.padded_group, chunk * s.chains
        raise SpecError(f"schedule: {given} and groups of {group} must divide one another; try {least}")
    if s.split_k > max(steps, MOST_IN_CLUSTER):
        rule = f"must be at most {MOST_IN_CLUSTER}, or the {steps} steps of step_k={s.step_k} that k={spec.k} has"
        raise SpecError(f"schedule: split_k={s.split_k} {rule}")


def _check_chains(spec: MatmulSpec, s: Schedule) -> None:
    """Several chains are for orders of sums that other kernels have, too."""
    if not spec.invariant or spec.outliers or s.spread_k:
        given = "spread_k=True" if s.spread_k else "outliers" if spec.outliers else "a matmul that is not invariant"
        raise SpecError(f"schedule: chains={s.chains} is for invariant matmuls; {given} needs chains=1")


def _check_raw_codes(spec: MatmulSpec, s: Schedule) -> None:
    if s.raw_codes and not can_use_raw_codes(spec):
        raise SpecError(
            f"schedule: raw_codes=True is for integers in f16; {spec.weight} in {spec.act} needs raw_codes=False"
        )
    if s.raw_codes and always_uses_raw_codes(spec, s):
        raise SpecError(
            f"schedule: {spec.weight} with zeros={spec.zeros!r} is multiplied as it is stored anyway; "
            "take raw_codes=False"
        )


def _check_preloaded(plan: KernelPlan) -> None:
    spec, s = plan.spec, plan.schedule
    if not plan.steps.cover_exactly or spec.packing.padded_k % s.step_k or not plan.x.in_pieces:
        raise SpecError(
            f"schedule: preload_weights=True needs steps of step_k={s.step_k}, warps_k={s.warps_k} and "
            f"split_k={s.split_k} to come out even for k={spec.packing.padded_k}, and x in 16-byte pieces; "
            "take preload_weights=False"
        )
    if plan.codes.registers > MOST_PRELOADED:
        raise SpecError(
            f"schedule: preload_weights=True has at most {MOST_PRELOADED} registers of weight in a thread, {s} needs "
            f"{plan.codes.registers}; take more warps or splits, or preload_weights=False"
        )


def group_fits(spec: MatmulSpec, step: int) -> bool:
    """Whether steps and groups, and blocks of groups where there are some, divide one another."""
    group = spec.packing.padded_group
    lengths = [length for length in (group, spec.bilevel and spec.bilevel.columns(spec.packing)) if length]
    return all(step % length == 0 or length % step == 0 for length in lengths)


def enough_blocks(blocks: int, target: Target) -> int:
    """The `max_blocks` with which so many blocks run at a time and no more would, or 0 where that takes many: a
    multiprocessor that finishes early would take more than its share of the next kernel's."""
    each = -(-blocks // target.multiprocessors)
    return each if each <= 2 else 0
