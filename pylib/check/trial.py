"""One case: compiled, multiplied, and compared with the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from lowbit.dialect.errors import EmulatorError, LowbitError
from lowbit.pylib import reference
from lowbit.pylib.check import definition
from lowbit.pylib.check.cases import Case, simpler
from lowbit.pylib.matmul import Matmul, compile
from lowbit.pylib.tune.trial import rounding

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
        return _compared(case, *compile_case(case))
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
    worst = _worst(y, torch.from_numpy(expected), torch.from_numpy(allowed))
    if worst <= 1:
        return Outcome(case, "right", kernels, worst=worst)
    error = (y.double() - torch.from_numpy(expected)).abs().max().item()
    largest = float(abs(expected).max())
    return Outcome(case, "wrong", kernels, f"error {error:.2g} at values of up to {largest:.2g}", worst)


def _worst(y: Tensor, expected: Tensor, allowed: Tensor) -> float:
    """Returns the largest error as a share of what is allowed; inf for a NaN or an infinity."""
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
