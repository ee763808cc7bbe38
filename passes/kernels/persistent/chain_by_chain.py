"""The loop over the chains of an order of sums (`Chains`): `chain_by_chain`.

    total = 0
    for chain of the order:
        sums = 0
        for round of the chain:        whose columns may lie apart (`rounds_of_chain`)
            sums = sums + products
        total = total + sums           scaled, where rows have one scale

Where parts of k are added up by themselves, this is the loop over the chains of a part, inside one over parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lowbit.dialect.layouts.layout import Layout
from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.persistent.chains import Chains

Round = Callable[[Scalar, list[Tile]], list[Tile]]
"""Multiplies a round: by its number as rounds are visited and what the round before left, which it returns for the
next."""
Chain = Callable[[Scalar, list[Tile]], tuple[list[Tile], Iterable[Tile]]]
"""Multiplies a chain: by its number and what registers hold of the weight. Returns what they hold at its end, and what
is added up of its sums, one part of the tokens after the other."""


def chain_by_chain(
    p: Program, chains: Chains, parts: Sequence[Layout], carried: list[Tile], chain: Chain
) -> tuple[list[Tile], list[Tile]]:
    """Multiplies a tile. parts: layouts of the sums, one part of the tokens after the other. Returns what registers
    hold of the weight at the end, and the sums of all chains."""
    order = chains.order

    def part(number: Scalar, carried: list[Tile]) -> tuple[list[Tile], list[Tile]]:
        first = number * order.warps_k
        return _added_up(p, order.warps_k, parts, carried, lambda i, carried: chain(first + i, carried))

    if chains.are_apart:
        return _added_up(p, order.split_k, parts, carried, part)
    return _added_up(p, chains.count, parts, carried, chain)


def _added_up(
    p: Program, count: int, parts: Sequence[Layout], carried: list[Tile], term: Chain
) -> tuple[list[Tile], list[Tile]]:
    """Returns what registers hold at the end, and the sums of so many terms, from -0, which leaves the first as they
    are."""
    held = len(carried)
    with p.loop(0, count, [*carried, *(p.constant(-0.0, "f32", part) for part in parts)]) as every:
        left, terms = term(every.index, every.carried[:held])
        totals = zip(every.carried[held:], terms, strict=True)
        every.results = [*left, *(p.add(total, each) for total, each in totals)]
    return every.carried[:held], every.carried[held:]


def rounds_of_chain(p: Program, chains: Chains, chain: Scalar, carried: list[Tile], round_: Round) -> list[Tile]:
    """Multiplies the rounds of a chain, by its number. Returns what the last one leaves."""
    with p.loop(chain * chains.rounds, chains.rounds, carried) as loop:
        loop.results = round_(loop.index, loop.carried)
    return loop.carried
