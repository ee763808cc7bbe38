"""The kernel between two parts of a layer, where more is done to what the first gives than to add it to its input:

    y[t] = r[t] + scale * x[t]  or  r[t] + scale * norm(x[t])       in f32, rounded once
    h[t] = norm(y[t])                                               of the rounded y, where another part follows

A block has a token, all of it in registers, as that of a norm (`rms_norm.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbit.passes.kernels.rms_norm import Token, count_in

if TYPE_CHECKING:
    from lowbit.passes.builder import Program, Tile


@dataclass(frozen=True)
class JoinPlan:
    """What a kernel that joins is made for.

    hidden       numbers of a token, a multiple of 8
    element      "f16" or "bf16": the type of all tensors
    normed       whether x has a norm: the parameters `gain` [hidden] and `eps`
    shift        added to its gain
    next         whether y has one, too, of which h is made: the parameters `next_gain`, `next_eps` and h
    next_shift   added to its gain
    """

    hidden: int
    element: str
    normed: bool = False
    shift: float = 0.0
    next: bool = False
    next_shift: float = 0.0


def join_program(plan: JoinPlan) -> Program:
    """Returns the program. Parameters: x, r and y [m, hidden], m, `scale`, and those that the plan says; with h also
    `counter`, an i32 that becomes larger by `count`."""
    from lowbit.passes.builder import Program

    names = dict.fromkeys(("x", "r", "y"), "pointer") | {"m": "i32", "scale": "f32"}
    names |= {"gain": "pointer", "eps": "f32"} if plan.normed else {}
    names |= {"next_gain": "pointer", "next_eps": "f32", "h": "pointer"} if plan.next else {}
    names |= {"counter": "pointer", "count": "i32"} if plan.next else {}
    threads = Token.threads(plan.hidden)
    p = Program("join", threads, ("ceil(m / 1)", 1, 1), names)
    with p:
        token = Token(p, plan.hidden, plan.element)
        p.grid_launch_dependents()
        p.grid_wait()
        y = p.cast(_sum(token, plan), plan.element)
        token.write(y, "y")
        if plan.next:
            h = token.normed(p.cast(y, "f32"), "next_gain", "next_eps", plan.next_shift)
            token.write(p.cast(h, plan.element), "h")
            count_in(p, threads)
    return p


def _sum(token: Token, plan: JoinPlan) -> Tile:
    """Returns r + scale * x, or that of x with its norm, in f32."""
    p, x = token.p, token.read("x")
    x = token.normed(x, "gain", "eps", plan.shift) if plan.normed else x
    return p.fma(x, p.splat(p["scale"], "f32", x.layout), token.read("r"))
