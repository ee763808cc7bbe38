"""One case: compiled, multiplied, and compared with the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lowbit.dialect.errors import EmulatorError, LowbitError
from lowbit.passes.kernels.registry import family_of
from lowbit.passes.scheduling.expert_rule import tile_for
from lowbit.pylib import reference
from lowbit.pylib.check import definition
from lowbit.pylib.check.cases import Case, simpler
from lowbit.pylib.check.definition import F64
from lowbit.pylib.experts.routing import route
from lowbit.pylib.matmul import Matmul, compile
from lowbit.pylib.runtime.devices import target_named
from lowbit.pylib.runtime.expert_matmul import expert_matmul
from lowbit.pylib.tune.expert_trial import rounding_of_experts
from lowbit.pylib.tune.trial import rounding
from lowbit.pylib.weights import packed

TOP_K = 2  # experts of a row, of a matmul of several
Verdict = Literal["right", "wrong", "refused"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    kernels  the families that computed it, in order
    detail   why it was refused, or how it was wrong
    worst    the largest error as a share of what rounding explains; 0 if it was refused
    """

    case: Case
    verdict: Verdict
    kernels: str = ""
    detail: str = ""
    worst: float = 0.0


Attempt = Callable[[Case], Outcome]


def compile_case(case: Case) -> tuple[Matmul, str]:
    """Returns the matmul of a case, its kernels compiled into the cache, and the names of their families."""
    mm = compile(case.spec, case.target, case.schedule)
    if not mm.target.is_gpu:
        return mm, "cpu"
    mm.kernel(case.m)
    return mm, " + ".join(dict.fromkeys(request.family for request in mm.choices.launches(case.m)))


def try_case(case: Case) -> Outcome:
    """Compiles, multiplies and compares a case. Whatever is raised is an outcome, too."""
    try:
        return _compared_slots(case) if case.spec.experts > 1 else _compared(case, *compile_case(case))
    except EmulatorError as error:
        return Outcome(case, "wrong", detail=str(error))
    except LowbitError as error:  # also of `pack`: random numbers may be too large or too small for a format
        return Outcome(case, "refused", detail=_first_words(error))
    except Exception as error:
        return Outcome(case, "wrong", detail=f"{type(error).__name__}: {error}")


def _compared(case: Case, mm: Matmul, kernels: str) -> Outcome:
    """Multiplies random data and compares the result with the definition."""
    x, tensors = reference.random_inputs(case.spec, case.m, case.seed)
    device = "cuda" if mm.target.kind == "cuda" else "cpu"
    weight = mm.pack(**{name: t.to(device) for name, t in tensors.items()})
    others = reference.random_residual(case.spec, case.m, case.seed)
    y = mm(x.to(device), weight, **{name: t.to(device) for name, t in others.items()}).cpu()
    tensors |= others
    expected = definition.matmul(asdict(case.spec), x, tensors)
    allowed = reference.tolerance(case.spec, x, **tensors, **rounding(mm, case.m))  # type: ignore[arg-type]
    return _judged(case, kernels, y, expected, allowed)


def _compared_slots(case: Case) -> Outcome:
    """Does the same for rows that go to two experts each, some of them elsewhere."""
    slots, target = TOP_K * case.m, target_named(case.target)
    spec = case.spec.for_rows(slots)
    mm = expert_matmul(spec, target)
    tile = tile_for(mm.tiles, slots, spec.experts)
    schedule = mm.kernel(tile, slots).schedule if target.is_gpu else None
    x, tensors = reference.random_inputs(spec, case.m, case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    ids = torch.randint(0, spec.experts + 1, (case.m, TOP_K), generator=generator)
    routing, experts = route(ids, spec.experts, tile), ids.flatten().sort().values
    device = "cuda" if target.kind == "cuda" else "cpu"
    weight = packed.pack(spec, **{name: t.to(device) for name, t in tensors.items()})
    given, rows, tiles = (t.to(device) for t in (x, routing.rows, routing.tiles))
    here = int(routing.tiles[0, 1])
    y = mm(given, rows, tiles, weight.tensors, tile).cpu()[:here]
    tokens, own = routing.rows[:here].numpy(), experts[:here].numpy()
    expected = definition.matmul_of_experts(asdict(spec), x, tensors)[own, tokens]
    rounded: dict[str, Any] = {**tensors, **rounding_of_experts(spec, case.m, schedule)}
    allowed = reference.of_slots(reference.tolerance(spec, x, **rounded)[tokens], spec, own)
    return _judged(case, family_of(schedule).name if schedule else "cpu", y, expected, allowed)


def _judged(case: Case, kernels: str, y: Tensor, expected: F64, allowed: F64) -> Outcome:
    """Returns the outcome of a result."""
    worst = _worst(y, torch.from_numpy(expected), torch.from_numpy(allowed))
    if worst <= 1:
        return Outcome(case, "right", kernels, worst=worst)
    error = (y.double() - torch.from_numpy(expected)).abs().max().item()
    largest = float(abs(expected).max(initial=0))
    return Outcome(case, "wrong", kernels, f"error {error:.2g} at values of up to {largest:.2g}", worst)


def _worst(y: Tensor, expected: Tensor, allowed: Tensor) -> float:
    """Returns the largest error as a share of what is allowed; inf for a NaN or an infinity."""
    if not y.numel():
        return 0.0
    share = (y.double() - expected).abs() / allowed
    return share.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()


def _first_words(error: Exception) -> str:
    """Returns what an error says without numbers and names that differ from case to case: up to the first clause."""
    return str(error).partition(";")[0].partition(":")[0].partition("=")[0].strip()


def minimal(outcome: Outcome, attempt: Attempt = try_case) -> Outcome:
    """Returns the outcome of the simplest case found that is wrong as well, one field after the other."""
    while found := next((o for o in map(attempt, simpler(outcome.case)) if o.verdict == "wrong"), None):
        outcome = found
    return outcome
