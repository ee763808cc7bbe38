"""About how long a prefill schedule takes: a tile's time is that of its panels and its end, and tiles come in waves.

The constants are fitted to 557 timings on an H200 (2026-11, u4 in groups of 128, 15 sizes, 100 to 4096 tokens),
rested: nine of ten are right within 5 %. A panel is multiplied while the next one is decoded, so it takes the longer of
the two and a part of the shorter. Reading the weight from memory adds as one leg of a right triangle to the other:
so it is within 8 % for 20 of 24 timings of 48 to 112 tokens, where it shows.
"""

from __future__ import annotations

import math

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.prefill.legality import exchanged_bytes
from lowbit.passes.kernels.prefill.plan import PrefillPlan, Shares, TileShape, Waves
from lowbit.passes.kernels.prefill.schedule import ROWS_OF_TILE, PrefillSchedule
from lowbit.passes.target import Target

LAUNCH = 1.0  # microseconds of a launch that the one before does not hide,
_LATE = 2.5  # and until blocks start that find room only when others have ended
_PER_TOKEN = 0.00218  # of products: of a token of a tile and 64 columns,
_PER_COLUMNS = 0.057  # and of 64 columns whatever the tokens
_PER_PANEL = 0.25  # of decoding: of a panel,
_DECODING = {"uint": 0.1, "int": 0.1, "float": 0.14, "table": 0.14}  # and of 64 columns
_SHOWN = 0.2  # of the shorter of products and decoding, which is not hidden behind the longer
END_PER_TOKEN = 0.0026  # of the end of a tile
MULTICAST = 0.974  # times as long, where blocks of a cluster share x and are in the middle of their work
IDLE = 0.2  # less of their time in a single wave, if all other multiprocessors were idle
EXCHANGE, SENT = 2.0, 100e3  # where blocks split k: until sums are there, and bytes per microsecond
MEETING = 3.0  # where blocks share rounds: until the last one of a tile knows that it is,
_READ = 80e3  # bytes per microsecond that it reads,
_UNEVEN = 0.5  # and more where parts of tiles do not begin together
DEEP = 0.94  # times as long are rounds then, where eight panels have room,
SHARED_X, _NARROW = 0.985, 128  # and where blocks share x of so many tokens or more
_REACH = {4: 0.9}  # of the multiprocessors take part in clusters of four
_MARGIN = 1.02  # times as long, where tiles are cut or shared: gains and predicted ones differ by as much
_WIDE_MARGIN, _WIDE_TOKENS = 1.05, 160  # the same where tiles of more tokens than that are shared
_MEMORY = 4.5e6  # bytes of the weight per microsecond


def predict(spec: MatmulSpec, tokens: int, s: PrefillSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes: for comparing schedules."""
    plan = PrefillPlan(spec, s)
    if s.streams:
        round_ = plan.panels * _panel(plan, s.tokens) * (DEEP if s.num_stages == 8 else 1.0)
        tiles = streamed(s, plan.shares(tokens, clusters(s, target)), round_, END_PER_TOKEN * s.tokens)
    else:
        waves = waves_of(plan, tokens, target)
        pace = _pace(s, waves)
        tiles = waves.full * _tile(plan, plan.whole, pace) + (waves.busy > 0) * _tile(plan, waves.last, pace)
    return with_memory(spec, LAUNCH + late(s, target) + tiles) * margin(s)


def with_memory(spec: MatmulSpec, time: float) -> float:
    """Microseconds of a launch that would take so many, if the weight were there at once."""
    return math.hypot(time, spec.bytes / _MEMORY)


def _pace(s: PrefillSchedule, waves: Waves) -> float:
    """How much of their time panels take: less where blocks share x, and in a single wave that leaves others idle."""
    if waves.count > 1:
        return MULTICAST if s.cluster > 1 else 1.0
    return 1.0 if waves.full else 1 - IDLE * (1 - waves.busy)


def _tile(plan: PrefillPlan, shape: TileShape, pace: float) -> float:
    """Microseconds of a tile or slice; pace: what the time of its panels is multiplied by."""
    panels = shape.rounds * plan.panels * _panel(plan, shape.tokens) * pace
    return panels + END_PER_TOKEN * shape.share + exchange(shape, EXCHANGE)


def _panel(plan: PrefillPlan, tokens: int) -> float:
    return time_of_panel(plan.spec, plan.schedule.panel_k, tokens)


def time_of_panel(spec: MatmulSpec, panel_k: int, tokens: int) -> float:
    """Microseconds of a panel of so many columns, in a tile of so many tokens."""
    columns = panel_k / 64
    products = columns * (_PER_COLUMNS + _PER_TOKEN * tokens)
    decoding = _PER_PANEL + columns * _DECODING[spec.dtype.kind]
    return both(products, decoding, _SHOWN)


def both(products: float, decoding: float, shown: float) -> float:
    """Microseconds of the two together, where the longer hides all but a part of the shorter."""
    return max(products, decoding) + shown * min(products, decoding)


def waves_of(plan: PrefillPlan, tokens: int, target: Target) -> Waves:
    """Returns the waves of a launch for so many tokens."""
    return plan.waves(tokens, max(1, clusters(plan.schedule, target)))


def margin(s: PrefillSchedule) -> float:
    """A factor with which tiles are cut or shared only if that is predicted to gain two percent, or five."""
    if s.streams and s.tokens > _WIDE_TOKENS:
        return _WIDE_MARGIN
    return _MARGIN if s.last_tokens or s.streams else 1.0


def exchange(shape: TileShape, first: float) -> float:
    """Microseconds of a tile until the sums of blocks that split k are added up; first: until the first are there."""
    return first + exchanged_bytes(shape) / SENT if shape.split_k > 1 else 0.0


def sent(share: float, split_k: int) -> float:
    """Microseconds for the sums of so many tokens of a block that it gets from others that split k with it."""
    return 4 * ROWS_OF_TILE * share * (split_k - 1) / SENT


def streamed(s: PrefillSchedule, shares: Shares, round_: float, end: float) -> float:
    """Microseconds of the tiles of a launch whose blocks have parts of them. round_, end: those of a round, and of the
    end of a tile."""
    read = shares.parts * 4 * ROWS_OF_TILE * s.tokens / _READ
    if s.cluster > 1 and s.tokens >= _NARROW:
        round_ *= SHARED_X
    return shares.rounds * round_ + shares.tiles * end + MEETING + (not shares.even) * _UNEVEN + read


def clusters(s: PrefillSchedule, target: Target) -> int:
    """How many clusters, or single blocks, run at a time."""
    reached = target.multiprocessors * _REACH.get(s.cluster_blocks, 1.0)
    return int(reached / (s.cluster * s.split_k))


def late(s: PrefillSchedule, target: Target) -> float:
    """Microseconds until all blocks have started: some clusters find room only when others have ended, if only to see
    that there is nothing left to do."""
    return 0.0 if clusters(s, target) == target.multiprocessors // (s.cluster * s.split_k) else _LATE


def at_once(plan: PrefillPlan, tokens: int, target: Target) -> bool:
    """Whether all tiles are computed at the same time: what splitting k is for."""
    return plan.tiles(tokens) <= clusters(plan.schedule, target)
