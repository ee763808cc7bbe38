"""About how long a prefill schedule for activations of 8 bits takes: a tile's time is that of its panels and its end,
and tiles come in waves.

The constants are fitted to an H200 (2026-11, u4 in groups of 128, 4096 x 4096 and 8192 x 8192), rested. An instruction
of wgmma takes as long as N / 2 clocks and some 20 more, so that parts of few tokens cost.
"""

from __future__ import annotations

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_prefill.plan import EightBitPrefillPlan
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.prefill.cost_model import clusters, exchange, starts, untried
from lowbit.passes.target import Target

_LAUNCH = 3.0  # microseconds of a launch, until the first panel is there
_PER_PANEL = 0.08  # of a panel,
_PER_PART = 0.08  # of a part of its tokens and 128 columns,
_PER_TOKEN = 0.0019  # of a token and 128 columns,
_PER_SUM = 0.0006  # and of a token and product that is added to sums in f32
_END, _END_PER_TOKEN = 0.5, 0.006  # of the end of a tile
_MEMORY = 4.5e6  # bytes per microsecond


def predict(spec: MatmulSpec, tokens: int, s: EightBitPrefillSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes: for comparing schedules."""
    plan = EightBitPrefillPlan(spec, s)
    waves = -(-plan.tiles(tokens) // max(1, clusters(s, target)))
    tile = plan.rounds * _round(plan) + _END + _END_PER_TOKEN * plan.share + exchange(plan)
    return max(_LAUNCH * starts(s, target) + waves * tile, spec.bytes / _MEMORY) * untried(s)


def _round(plan: EightBitPrefillPlan) -> float:
    """Microseconds of a round."""
    s, columns = plan.schedule, plan.step / 128
    added = 0 if plan.keeps_sums else sum(len(list(plan.products(panel))) for panel in range(plan.panels))
    products = columns * (_PER_PART * s.parts + _PER_TOKEN * s.tokens)
    return plan.panels * _PER_PANEL + products + added * _PER_SUM * s.tokens
