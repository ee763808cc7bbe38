"""The loop over the chains of an order of sums (`Chains`): `chain_by_chain`.

    total = 0
    for chain of the order:
        sums = 0
        for round of the chain:        whose columns may lie apart
            sums = sums + products
        total = total + sums           scaled, where rows have one scale
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lowbit.dialect.layouts.layout import Layout
from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.eight_bit_prefill.product_sums import Sums
from lowbit.passes.kernels.persistent.chains import Chains

Round = Callable[[Scalar, list[Tile]], list[Tile]]
"""Multiplies a round: by its number as rounds are visited and what registers hold of the weight, which it returns for
the next."""
Scaled = Callable[[Scalar, list[Tile]], Iterable[Tile]]
"""Makes what is added up of the sums of a chain, by its number, one part of the tokens after the other."""


def chain_by_chain(
    p: Program, chains: Chains, sums: Sums, parts: Sequence[Layout], carried: list[Tile], round_: Round, scaled: Scaled
) -> tuple[list[Tile], list[Tile]]:
    """Multiplies a tile. parts: layouts of the sums, one part of the tokens after the other. Returns what registers
    hold of the weight at the end, and the sums of all chains, from -0, which leaves those of the first as they are."""
    count = len(carried)
    with p.loop(0, chains.count, [*carried, *(p.constant(-0.0, "f32", part) for part in parts)]) as every:
        sums.begin_tile()
        with p.loop(every.index * chains.rounds, chains.rounds, every.carried[:count]) as chain:
            chain.results = round_(chain.index, chain.carried)
        of_chain = scaled(every.index, list(sums.end_tile()))
        totals = zip(every.carried[count:], of_chain, strict=True)
        every.results = [*chain.carried, *(p.add(total, each) for total, each in totals)]
    return every.carried[:count], every.carried[count:]
