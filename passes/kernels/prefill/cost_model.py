"""About how long a prefill schedule takes: a tile's time is that of its panels and its end, and tiles come in waves.

Constants are those of a target (`PrefillCosts`). A panel is multiplied while the next one is decoded, so it takes the
longer of the two and a part of the shorter. Reading the weight from memory adds as one leg of a right triangle to the
other: so it is within 8 % for 20 of 24 timings of 48 to 112 tokens, where it shows.
"""

from __future__ import annotations

import math

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.costs import PrefillCosts
from lowbit.passes.kernels.prefill.legality import exchanged_bytes
from lowbit.passes.kernels.prefill.plan import PrefillPlan, Shares, TileShape, Waves
from lowbit.passes.kernels.prefill.schedule import ROWS_OF_TILE, PrefillSchedule
from lowbit.passes.target import Target


def predict(spec: MatmulSpec, tokens: int, s: PrefillSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes: for comparing schedules."""
    plan, costs = PrefillPlan(spec, s), target.costs.prefill
    if s.streams:
        round_ = plan.panels * _panel(plan, s.tokens, costs) * (costs.deep if s.num_stages == 8 else 1.0)
        tiles = streamed(s, plan.shares(tokens, clusters(s, target)), round_, costs.end_per_token * s.tokens, costs)
    else:
        waves = waves_of(plan, tokens, target)
        pace = _pace(s, waves, costs)
        tiles = waves.full * _tile(plan, plan.whole, pace, costs)
        tiles += (waves.busy > 0) * _tile(plan, waves.last, pace, costs)
    return with_memory(spec, costs.launch + late(s, target) + tiles, costs) * margin(s, costs)


def with_memory(spec: MatmulSpec, time: float, costs: PrefillCosts) -> float:
    """Microseconds of a launch that would take so many, if the weight were there at once."""
    return math.hypot(time, spec.bytes / costs.memory)


def _pace(s: PrefillSchedule, waves: Waves, costs: PrefillCosts) -> float:
    """How much of their time panels take: less where blocks share x, and in a single wave that leaves others idle."""
    if waves.count > 1:
        return costs.multicast if s.cluster > 1 else 1.0
    return 1.0 if waves.full else 1 - costs.idle * (1 - waves.busy)


def _tile(plan: PrefillPlan, shape: TileShape, pace: float, costs: PrefillCosts) -> float:
    """Microseconds of a tile or slice; pace: what the time of its panels is multiplied by."""
    panels = shape.rounds * plan.panels * _panel(plan, shape.tokens, costs) * pace
    return panels + costs.end_per_token * shape.share + exchange(shape, costs.exchange, costs)


def _panel(plan: PrefillPlan, tokens: int, costs: PrefillCosts) -> float:
    return time_of_panel(plan.spec, plan.schedule.panel_k, tokens, costs)


def time_of_panel(spec: MatmulSpec, panel_k: int, tokens: int, costs: PrefillCosts) -> float:
    """Microseconds of a panel of so many columns, in a tile of so many tokens."""
    columns = panel_k / 64
    products = columns * (costs.per_columns + costs.per_token * tokens)
    decoding = costs.per_panel + columns * costs.decoding[spec.dtype.kind]
    return both(products, decoding, costs.shown)


def both(products: float, decoding: float, shown: float) -> float:
    """Microseconds of the two together, where the longer hides all but a part of the shorter."""
    return max(products, decoding) + shown * min(products, decoding)


def waves_of(plan: PrefillPlan, tokens: int, target: Target) -> Waves:
    """Returns the waves of a launch for so many tokens."""
    return plan.waves(tokens, max(1, clusters(plan.schedule, target)))


def margin(s: PrefillSchedule, costs: PrefillCosts) -> float:
    """A factor with which tiles are cut or shared only if that is predicted to gain two percent, or five."""
    if s.streams and s.tokens > costs.wide_tokens:
        return costs.wide_margin
    return costs.margin if s.last_tokens or s.streams else 1.0


def exchange(shape: TileShape, first: float, costs: PrefillCosts) -> float:
    """Microseconds of a tile until the sums of blocks that split k are added up; first: until the first are there."""
    return first + exchanged_bytes(shape) / costs.sent if shape.split_k > 1 else 0.0


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


def at_once(plan: PrefillPlan, tokens: int, target: Target) -> bool:
    """Whether all tiles are computed at the same time: what splitting k is for."""
    return plan.tiles(tokens) <= clusters(plan.schedule, target)
