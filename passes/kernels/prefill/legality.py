"""What a prefill schedule must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.legality import (
    Extra,
    check_shared,
    check_split,
    extra_registers,
    loaded_registers,
)
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.requirements import fits_async_x
from lowbit.passes.target import Target

OTHERS = "take a Schedule of the decode family"
_MOST_REGISTERS = 240  # of a thread, beside those for addresses and on the way to fragments
_SHORT_GROUP = 16  # columns

_EXTRAS: tuple[Extra[PersistentPlan], ...] = (
    (17, "codes that f16 cannot hold", lambda p: compute_element(p.spec.dtype, "f16") != "f16"),
    (1, "scales of e4m3", lambda p: p.spec.scale == "e4m3"),
    (25, "float zeros beside these", lambda p: p.spec.scale == "e4m3" and p.spec.zeros == "float"),
    (9, "zeros that are codes", lambda p: p.spec.bilevel is not None and p.spec.bilevel.zeros),
    (8, "integer zeros beside scales of rows", lambda p: p.scaling.rows_early and p.spec.zeros == "int"),
    (21, "outliers that are added in f32", lambda p: _is_wide(p) and p.spec.outliers and p.scaling.in_f32),
    (9, "floats of 7 bits", lambda p: _is_float_of(7, p)),
    (8, "the same, scaled in f32", lambda p: _is_float_of(7, p) and p.scaling.in_f32),
    (21, "the same with float zeros, where tiles are cut", lambda p: _is_float_of(7, p) and _has_cut_zeros(p)),
    (17, "floats of 8 bits with float zeros", lambda p: _is_float_of(8, p) and _is_wide(p) and p.spec.zeros == "float"),
    (3, "tiles that are cut", lambda p: p.schedule.last_tokens > 0),
    (17, "offsets beside scales in f32, with eight panels", lambda p: p.scaling.in_f32 and _has_deep_offsets(p)),
    (29, "parts of tiles, in wide panels", lambda p: p.schedule.streams and _is_wide(p)),
    (24, "the same, in narrow ones", lambda p: p.schedule.streams and not _is_wide(p)),
    (40, "the same with float zeros, of clusters", lambda p: p.schedule.streams and _shares_zeros(p)),
    (22, "slices whose k is split", lambda p: p.schedule.last_split_k > 1),
    (_MOST_REGISTERS, "all that there are: what is added to short groups", lambda p: _adds_in_short_groups(p)),
)


def check_schedule(spec: MatmulSpec, s: PrefillSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    check_target(target)
    check_plan(PersistentPlan(spec, s, WGMMA), target)


def check_target(target: Target) -> None:
    """Raises SpecError where a target has no wgmma."""
    if not target.has_wgmma:
        raise SpecError(f"schedule: prefill needs sm_90a, the target is {target}; {OTHERS}")


def check_plan(plan: PersistentPlan, target: Target) -> None:
    """Raises SpecError where a kernel does not fit a spec or a target."""
    if why := misfit(plan.spec):
        raise SpecError(f"schedule: {why}; {OTHERS}")
    check_split(plan, target)
    check_shared(plan, target)


def misfit(spec: MatmulSpec) -> str:
    """Returns what of a spec no schedule fits, or "" if there may be one."""
    if not fits_async_x(spec):
        return (
            f"prefill copies x in whole 16-byte pieces; {spec.weight} with k={spec.k} and groups of {spec.group_size} "
            "does not fit"
        )
    if spec.compute is not None:
        return "prefill takes no activations of 8 bits"
    return ""


def spills(spec: MatmulSpec, s: PrefillSchedule) -> bool:
    """Whether a thread is likely to need more registers than there are: for sums, for two panels' fragments, for what
    is loaded of a round, and for what kernels were seen to need besides."""
    plan = PersistentPlan(spec, s, WGMMA)
    needed = s.tokens // 2 + s.panel_k // 2 + loaded_registers(plan) + extra_registers(_EXTRAS, plan)
    return needed > _MOST_REGISTERS


def _is_wide(plan: PersistentPlan) -> bool:
    """Whether panels have more than 64 columns."""
    return plan.schedule.panel_k > 64


def _is_float_of(bits: int, plan: PersistentPlan) -> bool:
    return plan.spec.dtype.kind == "float" and plan.spec.dtype.bits == bits


def _has_cut_zeros(plan: PersistentPlan) -> bool:
    """Whether there are float zeros beside scales of f32, in tiles that are cut."""
    return plan.spec.zeros == "float" and plan.spec.scale == "f32" and plan.schedule.last_tokens > 0


def _has_deep_offsets(plan: PersistentPlan) -> bool:
    """Whether there are offsets, and eight panels of x in shared memory."""
    return plan.spec.zeros == "offset" and plan.schedule.num_stages == 8


def _shares_zeros(plan: PersistentPlan) -> bool:
    """Whether blocks that share narrow panels of x have float zeros."""
    return plan.spec.zeros == "float" and plan.schedule.cluster > 1 and not _is_wide(plan)


def _adds_in_short_groups(plan: PersistentPlan) -> bool:
    """Whether numbers are added to the weights of short groups, in tiles of clusters that are cut."""
    group, s = plan.spec.group_size, plan.schedule
    adds = group is not None and group <= _SHORT_GROUP and plan.spec.zeros in ("float", "offset")
    return adds and s.cluster > 1 and s.last_tokens > 0
