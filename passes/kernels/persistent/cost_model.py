"""What the tiles of persistent kernels with wgmma cost, whatever multiplies them: waves, clusters, shares and exchange.

Constants are those of a target (`PrefillCosts`). A tile's time is that of its rounds and its end, and tiles come in
waves.
"""

from __future__ import annotations

from lowbit.passes.costs import PrefillCosts
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import ROWS_OF_TILE, PrefillSchedule
from lowbit.passes.kernels.persistent.tiles import Shares, TileShape, Waves
from lowbit.passes.target import Target


def both(products: float, decoding: float, shown: float) -> float:
    """Microseconds of the two together, where the longer hides all but a part of the shorter."""
    return max(products, decoding) + shown * min(products, decoding)


def waves_of(plan: PersistentPlan, tokens: int, target: Target) -> Waves:
    """Returns the waves of a launch for so many tokens."""
    return plan.tiles.waves(tokens, max(1, clusters(plan.schedule, target)))


def margin(s: PrefillSchedule, costs: PrefillCosts) -> float:
    """A factor with which tiles are cut or shared only if that is predicted to gain two percent, or five."""
    if s.streams and s.tokens > costs.wide_tokens:
        return costs.wide_margin
    return costs.margin if s.last_tokens or s.streams else 1.0


def exchange(shape: TileShape, first: float, costs: PrefillCosts) -> float:
    """Microseconds of a tile until the sums of blocks that split k are added up; first: until the first are there."""
    return first + shape.exchanged_bytes / costs.sent if shape.split_k > 1 else 0.0


def sent(share: float, split_k: int, costs: PrefillCosts) -> float:
    """Microseconds for the sums of so many tokens of a block that it gets from others that split k with it."""
    return 4 * ROWS_OF_TILE * share * (split_k - 1) / costs.sent


def streamed(s: PrefillSchedule, shares: Shares, round_: float, end: float, costs: PrefillCosts) -> float:
    """Microseconds of the tiles of a launch whose blocks have parts of them. round_, end: those of a round, and of the
    end of a tile."""
    read = shares.parts * 4 * ROWS_OF_TILE * s.tokens / costs.read
    if s.cluster > 1 and s.tokens >= costs.narrow:
        round_ *= costs.shared_x
    uneven = (not shares.even) * costs.uneven
    return shares.rounds * round_ + shares.tiles * end + costs.meeting + uneven + read


def clusters(s: PrefillSchedule, target: Target) -> int:
    """How many clusters, or single blocks, run at a time."""
    reached = target.multiprocessors * target.costs.prefill.reaches.get(s.cluster_blocks, 1.0)
    return int(reached / (s.cluster * s.split_k))


def late(s: PrefillSchedule, target: Target) -> float:
    """Microseconds until all blocks have started: some clusters find room only when others have ended, if only to see
    that there is nothing left to do."""
    all_start = clusters(s, target) == target.multiprocessors // (s.cluster * s.split_k)
    return 0.0 if all_start else target.costs.prefill.late


def at_once(plan: PersistentPlan, tokens: int, target: Target) -> bool:
    """Whether all tiles are computed at the same time: what splitting k is for."""
    return plan.tiles.count(tokens) <= clusters(plan.schedule, target)
