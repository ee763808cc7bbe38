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
from dataclasses import dataclass

from lowbit.dialect.layouts.layout import Layout
from lowbit.passes.builder import Memory, Program, Scalar, Tile
from lowbit.passes.kernels.persistent.chains import Chains

Round = Callable[[Scalar, list[Tile]], list[Tile]]
"""Multiplies a round: by its number as rounds are visited and what the round before left, which it returns for the
next."""
Chain = Callable[[Scalar, list[Tile]], tuple[list[Tile], Iterable[Tile]]]
"""Multiplies a chain: by its number and what registers hold of the weight. Returns what they hold at its end, and what
is added up of its sums, one part of the tokens after the other."""


@dataclass(frozen=True)
class Total:
    """Where the sums of the chains before lie, of some tokens [rows, tokens]: in registers, or in shared memory."""

    layout: Layout
    shared: Memory | None = None


def chain_by_chain(
    p: Program, chains: Chains, totals: Sequence[Total], carried: list[Tile], chain: Chain
) -> tuple[list[Tile], list[Tile]]:
    """Multiplies a tile. totals: those of one part of the tokens after the other; in shared memory only where parts of
    k are not added up by themselves. Returns what registers hold of the weight at the end, and the sums of all
    chains."""
    order = chains.order
    if chains.count == 1:
        held, sums = chain(Scalar.of(0), carried)
        return held, list(sums)

    def part(number: Scalar, carried: list[Tile]) -> tuple[list[Tile], list[Tile]]:
        first = number * order.chains
        return _added_up(p, order.chains, totals, carried, lambda i, carried: chain(first + i, carried))

    if chains.are_apart:
        return _added_up(p, order.parts, totals, carried, part)
    return _added_up(p, chains.count, totals, carried, chain)


def _added_up(
    p: Program, count: int, totals: Sequence[Total], carried: list[Tile], term: Chain
) -> tuple[list[Tile], list[Tile]]:
    """Returns what registers hold at the end, and the sums of so many terms, from -0, which leaves the first as they
    are."""
    held, zeros = len(carried), list[Tile]()
    for total in totals:
        zero = p.constant(-0.0, "f32", total.layout)
        if total.shared:
            p.store(zero, total.shared, (0, 0))
        else:
            zeros.append(zero)
    with p.loop(0, count, [*carried, *zeros]) as every:
        left, terms = term(every.index, every.carried[:held])
        in_registers, sums = iter(every.carried[held:]), list[Tile]()
        for total, each in zip(totals, terms, strict=True):
            if total.shared:
                before = p.load(total.shared, (0, 0), total.layout)
                p.store(p.add(before, each), total.shared, (0, 0))
            else:
                sums.append(p.add(next(in_registers), each))
        every.results = [*left, *sums]
    ended = iter(every.carried[held:])
    found = (p.load(t.shared, (0, 0), t.layout) if t.shared else next(ended) for t in totals)
    return every.carried[:held], list(found)


def rounds_of_chain(p: Program, chains: Chains, chain: Scalar, carried: list[Tile], round_: Round) -> list[Tile]:
    """Multiplies the rounds of a chain, by its number. Returns what the last one leaves."""
    with p.loop(chain * chains.rounds, chains.rounds, carried) as loop:
        loop.results = round_(loop.index, loop.carried)
    return loop.carried
