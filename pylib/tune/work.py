"""The work of a tuning session: the matmuls and token tiles that the command line or a preset names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.byte_codes import products_named
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.scheduling.choice import Chooser, check_token_tile
from lowbit.passes.target import Target
from lowbit.pylib.tune import presets
from lowbit.pylib.tune.model_shapes import linear_sizes
from lowbit.pylib.tune.problem import Problem


def problems(
    shapes: Iterable[tuple[int, int]],
    weights: Sequence[str],
    group_sizes: Sequence[int | None],
    tiles: Sequence[int],
    acts: Sequence[str] = ("f16",),
    zeros: Sequence[str] = ("none",),
    scale: str | None = None,
    computes: Sequence[str] = ("none",),
) -> list[Problem]:
    """Returns all combinations that are matmuls, the tiles of one weight next to each other.

    scale      of all; None: that of act
    computes   "none" for x as it is, or types of 8 bits, "f8e4m3+fold" with scales folded into weights

    Raises SpecError if there is none, for the reason that the first has.
    """
    for token_tile in tiles:
        check_token_tile(token_tile)
    found: list[Problem] = []
    refused: list[SpecError] = []
    for (n, k), weight, group, act, zero, compute in product(shapes, weights, group_sizes, acts, zeros, computes):
        given: dict[str, Any] = {"group_size": group, "act": act, "zeros": zero, "scale": scale or act}
        given |= products_named(compute)
        try:
            spec = MatmulSpec(n, k, weight, **given)
        except SpecError as error:
            refused.append(error)
            continue
        found += [Problem(spec, token_tile) for token_tile in tiles]
    if refused and not found:
        raise refused[0]
    return found


def preset_problems(name: str) -> list[Problem]:
    """Returns all of a preset's matmuls, the most important first."""
    return [
        problem
        for p in presets.preset(name)
        for problem in problems(
            linear_sizes(p.shapes), p.weights, p.group_sizes, p.tiles, p.acts, p.zeros, computes=p.computes
        )
    ]


def with_kernels(work: Iterable[Problem], target: Target) -> list[Problem]:
    """Returns the problems with a token tile that a family has kernels for: not all have all.

    Raises SpecError if there is none, for the reason that the first has.
    """
    found: list[Problem] = []
    refused: list[SpecError] = []
    for problem in work:
        try:
            Chooser(problem.spec, target).families(problem.token_tile)
            found.append(problem)
        except SpecError as error:
            refused.append(error)
    if refused and not found:
        raise refused[0]
    return found
