"""About how long a prefill schedule for activations of 8 bits takes, in the way of `prefill.cost_model`.

The constants are fitted to 159 timings on an H200 (2026-11, f8e4m3, u4 in groups of 128 and f8e4m3 per row, 14 sizes,
128 to 4096 tokens), rested. Nine of ten of tiles of 256 tokens are right within 5 %, and of smaller ones, which were
timed when codes of all kernels went straight to registers, within 10 %.
"""

from __future__ import annotations

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_prefill.plan import EightBitPrefillPlan
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.prefill.cost_model import both, clusters, exchange, late, margin, streamed, waves_of
from lowbit.passes.kernels.prefill.plan import TileShape
from lowbit.passes.target import Target

LAUNCH = 1.9  # microseconds of a launch that the one before does not hide
_PER_TOKEN = 0.00214  # of products: of a token of a tile and 128 columns,
_PER_SUM = 0.00067  # and of a token and product that is added to sums in f32
_PER_PANEL = 0.112  # of decoding: of a panel,
_DECODING = 0.146  # and of 128 columns,
_FOLDING, _TABLE, _WIDE = 0.134, 0.051, 0.027  # more if scales are folded in, and of tables and codes of 8 bits
_SHOWN = 0.62  # of the shorter of products and decoding, which is not hidden behind the longer
END_PER_TOKEN = 0.0065  # of the end of a tile
MULTICAST = 0.973  # times as long, where blocks of a cluster share x of wide tiles and are in the middle of their work
_NARROW = 128  # tokens up to which sharing x gains nothing
EXCHANGE = 1.0  # where blocks split k: until the first sums are there
MEMORY = 4.5e6  # bytes per microsecond


def predict(spec: MatmulSpec, tokens: int, s: EightBitPrefillSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes: for comparing schedules."""
    plan = EightBitPrefillPlan(spec, s)
    if s.streams:
        shares = plan.shares(tokens, clusters(s, target))
        tiles = streamed(s, shares, time_of_round(plan, s.tokens), END_PER_TOKEN * s.tokens)
        return max(LAUNCH + tiles, spec.bytes / MEMORY) * margin(s)
    waves = waves_of(plan, tokens, target)
    sharing = MULTICAST if s.cluster > 1 and waves.count > 1 and s.tokens > _NARROW else 1.0
    tiles = waves.full * _tile(plan, plan.whole, sharing) + (waves.busy > 0) * _tile(plan, waves.last, sharing)
    return max(LAUNCH + late(s, target) + tiles, spec.bytes / MEMORY) * margin(s)


def _tile(plan: EightBitPrefillPlan, shape: TileShape, sharing: float) -> float:
    """Microseconds of a tile or slice; sharing: what the time of its rounds is multiplied by."""
    end = END_PER_TOKEN * shape.share + exchange(shape, EXCHANGE)
    return shape.rounds * time_of_round(plan, shape.tokens) * sharing + end


def time_of_round(plan: EightBitPrefillPlan, tokens: int) -> float:
    """Microseconds of a round of a tile of so many tokens."""
    spec, columns = plan.spec, plan.step / 128
    added = 0 if plan.keeps_sums else sum(len(list(plan.products(panel))) for panel in range(plan.panels))
    products = (columns * _PER_TOKEN + added * _PER_SUM) * tokens
    more = _FOLDING * spec.folds + _TABLE * (spec.dtype.kind == "table") + _WIDE * (spec.dtype.bits == 8)
    decoding = plan.panels * _PER_PANEL + columns * (_DECODING + more)
    return both(products, decoding, _SHOWN)
