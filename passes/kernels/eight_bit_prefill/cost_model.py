"""About how long a prefill schedule for activations of 8 bits takes: a tile's time is that of its panels and its end,
and tiles come in waves."""

from __future__ import annotations

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_prefill.plan import EightBitPrefillPlan
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.target import Target

_LAUNCH = 2.5  # microseconds of a launch, until the first panel is there
_PER_TOKEN = 0.0023  # of a token of a tile and 128 columns,
_PER_COLUMNS = 0.062  # of 128 columns whatever the tokens
_END, _END_PER_TOKEN = 0.5, 0.004  # of the end of a tile
_MEMORY = 4.5e6  # bytes per microsecond


def predict(spec: MatmulSpec, tokens: int, s: EightBitPrefillSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes: for comparing schedules."""
    plan = EightBitPrefillPlan(spec, s)
    tiles = plan.row_tiles * -(-tokens // s.tokens)
    waves = -(-tiles // max(1, target.multiprocessors // s.cluster))
    products = plan.rounds * plan.step / 128 * (_PER_COLUMNS + _PER_TOKEN * s.tokens)
    tile = products + _END + _END_PER_TOKEN * s.tokens
    return max(_LAUNCH + waves * tile, spec.bytes / _MEMORY)
