"""The work of a tuning session: the matmuls and token tiles that the command line or a preset names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.byte_codes import products_named
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.scheduling.choice import Chooser, check_token_tile
from lowbit.passes.scheduling.expert_rule import tile_for, tiles_of
from lowbit.passes.target import Target
from lowbit.pylib.tune import presets
from lowbit.pylib.tune.model_shapes import Size, matmul_sizes
from lowbit.pylib.tune.problem import Problem


def problems(
    shapes: Iterable[tuple[int, ...]],
    weights: Sequence[str],
    group_sizes: Sequence[int | None],
    tiles: Sequence[int],
    acts: Sequence[str] = ("f16",),
    zeros: Sequence[str] = ("none",),
    scale: str | None = None,
    computes: Sequence[str] = ("none",),
) -> list[Problem]:
    """Returns all combinations that are matmuls, the tiles of one weight next to each other.

    shapes     `Size`s, or their first fields
    tiles      token tiles; of experts numbers of tokens
    scale      of all; None: that of act
    computes   "none" for x as it is, or types of 8 bits, "i8+fold" with scales folded into weights

    Raises SpecError if there is none, for the reason that the first has.
    """
    sizes = [Size(*shape) for shape in shapes]
    if any(size.experts == 1 for size in sizes):
        for token_tile in tiles:
            check_token_tile(token_tile)
    found: list[Problem] = []
    refused: list[SpecError] = []
    for size, weight, group, act, zero, compute in product(sizes, weights, group_sizes, acts, zeros, computes):
        given: dict[str, Any] = {"group_size": group, "act": act, "zeros": zero, "scale": scale or act}
        given["experts"] = size.experts
        given |= products_named(compute)
        try:
            spec = MatmulSpec(size.n, size.k, weight, **given)
        except SpecError as error:
            refused.append(error)
            continue
        found += [Problem(spec, token_tile * size.top_k, size.top_k) for token_tile in tiles]
    if refused and not found:
        raise refused[0]
    return found


def preset_problems(name: str) -> list[Problem]:
    """Returns all of a preset's matmuls, the most important first."""
    return [
        problem
        for p in presets.preset(name)
        for problem in problems(
            matmul_sizes(p.shapes), p.weights, p.group_sizes, p.tiles, p.acts, p.zeros, computes=p.computes
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
            found.append(_as_computed(problem, target))
        except SpecError as error:
            refused.append(error)
    if refused and not found:
        raise refused[0]
    return found


def _as_computed(problem: Problem, target: Target) -> Problem:
    """Returns the problem; of experts whose tiles have too few slots for folded scales that without. Raises SpecError
    for a token tile, or for experts, that no family has kernels for."""
    spec, slots = problem.spec, problem.token_tile
    if spec.experts > 1:
        return replace(problem, spec=spec.for_tokens(tile_for(tiles_of(spec, target), slots, spec.experts)))
    Chooser(spec, target).families(slots)
    return problem
