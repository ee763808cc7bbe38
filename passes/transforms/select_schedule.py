"""select-schedule: chooses the free parameters of every `lowbit.matmul`; `passes.scheduling.choice` says how."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, cast

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir
from lowbit.dialect.errors import PassError
from lowbit.passes.base import at, each_op
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.scheduling.choice import schedule_for
from lowbit.passes.scheduling.legality import check_schedule
from lowbit.passes.target import Target, parse_target
from lowbit.passes.transforms.plan_packing import spec_of

SCHEDULE = "lowbit.schedule"


@dataclass(frozen=True)
class SelectSchedule:
    """Attach a schedule to every lowbit.matmul that has none."""

    name: ClassVar[str] = "select-schedule"
    target: Target = field(default_factory=lambda: parse_target("sm_80"))
    tokens: int = 8
    schedule: Schedule | None = None

    def run(self, module: ir.Module) -> None:
        for op in each_op(module, ops.MatmulOp):
            if SCHEDULE in op.operation.attributes:
                continue
            with at(op):
                chosen = self.schedule or schedule_for(spec_of(op), self.tokens, self.target)
                check_schedule(spec_of(op), chosen, self.target)
            op.operation.attributes[SCHEDULE] = schedule_attr(chosen)


def schedule_attr(schedule: Schedule) -> Any:
    """A schedule as a dictionary attribute."""
    return ir.DictAttr.get({name: _attribute(value) for name, value in asdict(schedule).items()})


def _attribute(value: int | bool | str) -> Any:
    if isinstance(value, str):
        return ir.StringAttr.get(value)
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def _value(attribute: Any) -> int | bool | str | None:
    """The inverse of `_attribute`, None for any other attribute."""
    for kind in (ir.BoolAttr, ir.IntegerAttr, ir.StringAttr):
        if isinstance(attribute, kind):
            return kind(attribute).value
    return None


def read_schedule(attribute: Any) -> Schedule:
    """The schedule in a `lowbit.schedule` attribute."""
    names = {field.name for field in fields(Schedule)}
    entries = {named.name: _value(named.attr) for named in attribute} if isinstance(attribute, ir.DictAttr) else {}
    if not entries or set(entries) - names or None in entries.values():
        raise PassError(f"{SCHEDULE} must be a dictionary of {', '.join(sorted(names))}; got {attribute}")
    return Schedule(**cast(dict[str, Any], entries))
